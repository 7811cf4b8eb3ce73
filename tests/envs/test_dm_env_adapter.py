"""Environments of dm_env."""

import collections
import logging
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces

from seed_rl.dm_env_adapter import DmEnvironment
from seed_rl.environment import UnsupportedSpaceError, make_environment_batch


class Array(NamedTuple):
    shape: tuple
    dtype: Any


class BoundedArray(NamedTuple):
    shape: tuple
    dtype: Any
    minimum: Any
    maximum: Any


class DiscreteArray(NamedTuple):
    num_values: int
    shape: tuple = ()
    dtype: Any = np.int32
    minimum: int = 0
    maximum: int = 9


TimeStep = collections.namedtuple("TimeStep", "step_type reward discount observation")
FIRST, MID, LAST = range(3)


class Spec:
    """Wraps the fields of a spec above."""

    def __init__(self, fields):
        self.__dict__.update(fields._asdict())


ACTION = BoundedArray((2,), np.float64, -1.0, 3.0)


class Countdown:
    """Ends after `length` steps with `discount`; observes the steps left and the last action."""

    def __init__(self, length=2, discount=0.0, action=ACTION):
        self.length, self.discount, self.action = length, discount, action
        self.seeds, self.actions = [], []

    def observation_spec(self):
        return collections.OrderedDict(left=Spec(Array((1,), np.float32)))

    def action_spec(self):
        return Spec(self.action)

    def _observe(self):
        return collections.OrderedDict(left=np.array([self.left], np.float32))

    def reset(self):
        self.left = self.length
        return TimeStep(FIRST, None, None, self._observe())

    def step(self, action):
        self.actions.append(action)
        self.left -= 1
        last = self.left == 0
        # Only the last discount tells an end from a cut.
        discount = self.discount if last else 0.9
        return TimeStep(LAST if last else MID, 1.5, discount, self._observe())


class Seeded(Countdown):
    def seed(self, seed):
        self.seeds.append(seed)


def played(env, steps, num=1):
    batch = make_environment_batch(lambda: env, range(num), 5, max_failures=1)
    rows = [batch.reset()]
    for _ in range(steps):
        rows += batch.step(np.zeros((num, 2), np.float32))
    return [
        (
            float(r.env_outputs.observation["left"][0, 0]),
            float(r.env_outputs.reward[0]),
            bool(r.env_outputs.done[0]),
            bool(r.env_outputs.abandoned[0]),
        )
        for r in rows
    ]


def test_a_last_discount_of_zero_ends_the_episode():
    expected = [(2, 0, False, False), (1, 1.5, False, False), (2, 1.5, True, False)]
    assert played(Countdown(discount=0.0), 2) == expected
    assert played(Countdown(discount=None), 2) == expected


@pytest.mark.parametrize("discount", [1.0, 0.99])
def test_another_last_discount_cuts_it(discount):
    assert played(Countdown(discount=discount), 2) == [
        (2, 0, False, False),
        (1, 1.5, False, False),
        (0, 1.5, False, False),  # the final observation, from which the return goes on
        (2, 0, True, True),
    ]


def test_actions_are_in_the_bounds_and_dtype_of_the_spec():
    env = Countdown()
    batch = make_environment_batch(lambda: env, [0], 0)
    batch.reset()
    batch.step(np.array([[-1.0, 0.5]], np.float32))
    np.testing.assert_array_equal(env.actions[0], [-1.0, 2.0])
    assert env.actions[0].dtype == np.float64


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (DiscreteArray(4), spaces.Discrete(4)),
        (BoundedArray((), np.int32, 2, 5), spaces.Discrete(4, start=2)),
        (
            BoundedArray((2,), np.int32, -1, np.array([0, 3])),
            spaces.MultiDiscrete([2, 5], start=[-1, -1]),
        ),
        (BoundedArray((2,), np.float32, 0.0, np.float32([1, 2])), None),
    ],
)
def test_action_specs(spec, expected):
    if expected is None:
        expected = spaces.Box(np.float32([0, 0]), np.float32([1, 2]), (2,), np.float32)
    assert DmEnvironment(Countdown(action=spec)).action_space == expected


def observing(spec):
    env = Countdown()
    env.observation_spec = lambda: spec
    return DmEnvironment(env).observation_space


def test_observation_specs():
    assert observing(Spec(Array((2,), np.float64))) == spaces.Box(-np.inf, np.inf, (2,), np.float64)
    assert observing(Spec(Array((4, 5, 3), np.uint8))) == spaces.Box(0, 255, (4, 5, 3), np.uint8)
    assert observing(Spec(Array((3,), np.bool_))) == spaces.MultiBinary((3,))
    assert observing(Spec(Array((), np.bool_))) == spaces.Discrete(2)
    assert observing(Spec(DiscreteArray(3))) == spaces.Discrete(3)
    assert observing([{"a": Spec(BoundedArray((), np.int64, 0, 9))}]) == spaces.Tuple(
        [spaces.Dict(a=spaces.Box(0, 9, (), np.int64))]
    )
    with pytest.raises(UnsupportedSpaceError, match=r"observation spec .* not supported"):
        observing(Spec(Array((), object)))  # StringArray


def test_actions_without_bounds_are_refused():
    with pytest.raises(UnsupportedSpaceError, match="has no bounds"):
        DmEnvironment(Countdown(action=Array((2,), np.float32)))
    with pytest.raises(UnsupportedSpaceError, match=r"action spec .* not supported"):
        DmEnvironment(Countdown(action=Array((), object)))


def test_seeds(caplog):
    env = Seeded()
    make_environment_batch(lambda: env, [3], 5).reset()
    assert env.seeds == [8]

    env = Countdown()
    env.task = type("Task", (), {"random": np.random.RandomState(0)})()
    make_environment_batch(lambda: env, [3], 5).reset()
    assert env.task.random.randint(10**9) == np.random.RandomState(8).randint(10**9)

    with caplog.at_level(logging.WARNING):
        make_environment_batch(Countdown, [0], 0).reset()
    assert "cannot be seeded" in caplog.text and "env_index" in caplog.text


def test_a_real_environment_of_dm_env():
    dm_env: Any = pytest.importorskip("dm_env")
    from dm_env import specs

    class Real(dm_env.Environment):
        def observation_spec(self):
            return (specs.Array((1,), np.float32), specs.DiscreteArray(3))

        def action_spec(self):
            return [specs.DiscreteArray(2), specs.BoundedArray((1,), np.float64, -2, 2)]

        def _observe(self):
            return (np.zeros(1, np.float32), np.int32(2))

        def reset(self):
            return dm_env.restart(self._observe())

        def step(self, action):
            for value, spec in zip(action, self.action_spec(), strict=True):
                spec.validate(value)
            return dm_env.truncation(2.0, self._observe())

    batch = make_environment_batch(Real, [0, 1], 0, max_failures=1)
    batch.reset()
    final, first = batch.step((np.array([1, 0]), np.array([[1.0], [-0.5]], np.float32)))
    assert final.env_outputs.reward.tolist() == [2, 2] and not final.env_outputs.done.any()
    assert first.env_outputs.abandoned.all()
    assert final.env_outputs.observation[1].tolist() == [2, 2]
