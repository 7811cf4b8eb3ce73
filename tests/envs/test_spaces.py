"""Spaces: what an agent sees of them, and how its actions come back."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from seed_rl.environment import (
    UnsupportedSpaceError,
    action_specs,
    make_environment_batch,
    observation_specs,
)


class Acted(gymnasium.Env):
    """Remembers its actions and refuses those outside its space."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)

    def __init__(self, space):
        self.action_space = space
        self.actions = []

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def acted(space, actions, num_envs):
    """Takes the agent's actions to `num_envs` environments; returns what each was given."""
    envs = []

    def make():
        envs.append(Acted(space))
        return envs[-1]

    batch = make_environment_batch(make, range(num_envs), 0, max_failures=1)
    batch.reset()
    batch.step(actions)
    return [env.actions[0] for env in envs], batch.action_space


def test_discrete_actions_count_from_zero_for_the_agent():
    given, space = acted(spaces.Discrete(3, start=5), np.array([0, 2], np.int32), 2)
    assert given == [5, 7] and space == spaces.Discrete(3)


def test_multi_discrete_actions_count_from_zero_too():
    own = spaces.MultiDiscrete([3, 4], start=[10, -1])
    given, space = acted(own, np.array([[0, 3], [2, 0]]), 2)
    np.testing.assert_array_equal(given, [[10, 2], [12, -1]])
    assert space == spaces.MultiDiscrete([3, 4])


def test_box_actions_are_rescaled_to_the_bounds_and_clipped():
    own = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float32)
    actions = np.array([[-1.0, 1.0], [0.5, 0.0], [3.0, -7.0]], np.float32)
    given, space = acted(own, actions, 3)
    np.testing.assert_allclose(given, [[-2.0, 10.0], [1.0, 5.0], [2.0, 0.0]])
    assert space == spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_box_actions_of_integers_are_rounded():
    given, space = acted(spaces.Box(-3, 9, (2,), np.int32), np.array([[-1.0, 0.3]], np.float32), 1)
    np.testing.assert_array_equal(given, [[-3, 5]])  # 3 + 0.3 * 6 = 4.8
    assert given[0].dtype == np.int32 and space == spaces.Box(-1.0, 1.0, (2,), np.float32)


WIDEST = [
    (np.float64, -1.7e308, 1.7e308),
    (np.float32, float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)),
    (np.int64, -(2**63), 2**63 - 1),
    (np.uint64, 0, 2**64 - 1),
    (np.int8, -128, 127),
]


@pytest.mark.parametrize(("dtype", "low", "high"), WIDEST)
@pytest.mark.filterwarnings("error")
def test_the_ends_of_the_widest_bounds_are_reached(dtype, low, high):
    own = spaces.Box(low, high, (2,), dtype)
    given, _ = acted(own, np.array([[-1.0, 1.0]], np.float32), 1)
    assert given[0].tolist() == [low, high]
    (middle,), _ = acted(own, np.zeros((1, 2), np.float32), 1)
    assert abs(float(middle[0]) - (low / 2 + high / 2)) <= 1.0


@pytest.mark.filterwarnings("error")  # of gymnasium, that a number is no array
def test_an_action_of_a_box_without_dimensions_is_an_array():
    given, _ = acted(spaces.Box(0.0, 4.0, (), np.float32), np.zeros(2, np.float32), 2)
    assert [type(action) for action in given] == [np.ndarray] * 2 and given == [2.0, 2.0]


@pytest.mark.parametrize("shape", [3, (3, 1)])
def test_binary_actions_are_choices_of_two(shape):
    given, space = acted(spaces.MultiBinary(shape), np.array([[0, 1, 1], [1, 0, 0]], np.int32), 2)
    np.testing.assert_array_equal(np.reshape(given, (2, 3)), [[0, 1, 1], [1, 0, 0]])
    assert space == spaces.MultiDiscrete([2, 2, 2])
    with pytest.raises(ValueError, match="MultiBinary"):
        acted(spaces.MultiBinary(shape), np.array([[0, 1, 2]]), 1)


def test_tuple_actions():
    own = spaces.Tuple([spaces.Discrete(2, start=1), spaces.Box(0.0, 4.0, (1,), np.float32)])
    given, space = acted(own, (np.array([0, 1]), np.array([[-1.0], [0.0]], np.float32)), 2)
    assert given == [(1, 0.0), (2, 2.0)]
    assert space == spaces.Tuple([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,), np.float32)])


def test_vector_environments_get_a_whole_batch_of_their_own_actions():
    envs = []

    def make_one():
        envs.append(Acted(spaces.Discrete(3, start=5)))
        return envs[-1]

    def make(env_indices):
        return gymnasium.vector.SyncVectorEnv([make_one for _ in env_indices])

    batch = make_environment_batch(make, [0, 1], 0, max_failures=1)
    batch.reset()
    batch.step(np.array([2, 0], np.int32))
    assert [env.actions for env in envs] == [[7], [5]]


@pytest.mark.parametrize("actions", [np.array([3]), np.array([-1]), np.array([0.5])])
def test_discrete_actions_outside_the_space_are_an_error(actions):
    with pytest.raises(ValueError, match="Discrete"):
        acted(spaces.Discrete(3), actions, 1)


def test_specs():
    space = spaces.Dict(a=spaces.Tuple([spaces.Box(0, 255, (4, 5), np.uint8), spaces.Discrete(3)]))
    specs = observation_specs(space)
    assert [(s.shape, s.dtype) for s in specs["a"]] == [((4, 5), np.uint8), ((), np.int64)]
    actions = action_specs(spaces.Tuple([spaces.Discrete(3), spaces.Box(0.0, 2.0, (2,))]))
    assert [(s.shape, s.dtype) for s in actions] == [((), np.int64), ((2,), np.float32)]


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Text(5), r"Text\(.*not supported.*Box, Discrete"),
        (spaces.Dict(a=spaces.Text(5)), r"observation/a.*Text"),
        (spaces.Dict(a=spaces.Text(5)), r"gym_env.wrappers = \[@drop_text\]"),
        (spaces.Box(0, 1, (2,), np.longdouble), r"Box.*float128.*not supported"),
        (spaces.Graph(spaces.Discrete(2), None), "Graph"),
        (spaces.Tuple([]), "no array"),
        (spaces.Dict({1: spaces.Discrete(2)}), "the key 1: the keys must be texts"),
        (spaces.Tuple([spaces.Dict({1: spaces.Discrete(2), "a": spaces.Discrete(2)})]), "key 1"),
    ],
)
def test_unsupported_observation_spaces(space, words):
    with pytest.raises(UnsupportedSpaceError, match=words):
        observation_specs(space)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(-np.inf, 1.0, (2,)), "infinite bounds"),
        (spaces.Dict(a=spaces.Discrete(2)), r"Dict.*not supported.*Discrete, MultiDiscrete"),
        (spaces.Sequence(spaces.Discrete(2)), "Sequence.*not supported.*MultiBinary"),
        (spaces.Box(-1.0, 1.0, (0,)), "nothing to choose"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (2, 0))]), "nothing to choose"),
    ],
)
def test_unsupported_action_spaces(space, words):
    with pytest.raises(UnsupportedSpaceError, match=words):
        action_specs(space)
    with pytest.raises(UnsupportedSpaceError, match=words):
        make_environment_batch(lambda: Acted(space), [0], 0)
