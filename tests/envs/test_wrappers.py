"""Wrappers by gin."""

import sys

import gin
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import seed_rl.envs.gym_env  # noqa: F401, which gin has to know
from seed_rl.environment import make_environment_batch
from seed_rl.envs import wrappers
from seed_rl.user_error import UserError


@pytest.fixture(autouse=True)
def clear_gin():
    gin.clear_config()
    yield
    gin.clear_config()


class Counting(gymnasium.Env):
    """Observes how many steps it has taken; its reward is 3, 6, 9, …; never ends by itself."""

    def __init__(self, space=None, action_space=None):
        self.observation_space = space or spaces.Box(0, 255, (2, 2, 1), np.uint8)
        self.action_space = action_space or spaces.Discrete(2)
        self.actions = []

    def _observe(self):
        if isinstance(self.observation_space, spaces.Box):
            return np.full(self.observation_space.shape, self.steps, self.observation_space.dtype)
        return {**self.observation_space.sample(), "steps": np.float32([self.steps])}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.actions.append(action)
        self.steps += 1
        return self._observe(), 3.0 * self.steps, False, False, {}


def batch_of(*lines, env=None):
    """One environment, wrapped as the gin file says."""
    made = env or Counting()
    module = type(sys)("made_up_module")
    module.make = lambda: made
    sys.modules[module.__name__] = module
    gin.parse_config(["gym_env.env_id = 'made_up_module:make'", *lines])
    batch = make_environment_batch("seed_rl.envs.gym_env:gym_env", [0], 0, max_failures=1)
    batch.reset()
    return batch


def rewards_of(batch, steps=3):
    rows = [batch.step(np.array([0]))[0] for _ in range(steps)]
    rewards = [float(r.env_outputs.reward[0]) for r in rows]
    return rewards, [float(r.raw_rewards[0]) for r in rows]


def test_rewards_are_changed_and_kept():
    batch = batch_of(
        "gym_env.wrappers = [@scale_reward, @clip_reward]",
        "scale_reward.factor = 0.25",
        "clip_reward.low = -1.0",
        "clip_reward.high = 2.0",
    )
    # 3, 6, 9 by 4 are 0.75, 1.5, 2.25
    assert rewards_of(batch) == ([0.75, 1.5, 2.0], [3, 6, 9])


def test_the_first_wrapper_is_the_innermost():
    lines = ["scale_reward.factor = 0.25"]
    batch = batch_of("gym_env.wrappers = [@clip_reward, @scale_reward]", *lines)
    assert rewards_of(batch) == ([0.25] * 3, [3, 6, 9])


def test_repeated_actions_add_rewards_up():
    env = Counting()
    batch = batch_of(
        "gym_env.wrappers = [@time_limit, @clip_reward, @repeat_action]",
        "time_limit.max_steps = 3",
        "repeat_action.times = 2",
        "clip_reward.high = 5.0",
        env=env,
    )
    (rows,) = batch.step(np.array([1]))
    assert (rows.env_outputs.reward, rows.raw_rewards) == (3 + 5, 3 + 6)
    final, _ = batch.step(np.array([0]))  # the limit ends it after one
    assert (final.env_outputs.reward, final.raw_rewards) == (5, 9)
    assert env.actions == [1, 1, 0]


def test_a_time_limit_cuts():
    batch = batch_of("gym_env.wrappers = [@time_limit]", "time_limit.max_steps = 2")
    batch.step(np.array([0]))
    final, first = batch.step(np.array([0]))
    assert final.env_outputs.observation[0, 0, 0, 0] == 2
    assert first.env_outputs.abandoned.all()


@pytest.mark.parametrize("channels", [1, 3])
def test_stacked_images_are_channels(channels):
    env = Counting(spaces.Box(0, 255, (2, 2, channels), np.uint8))
    batch = batch_of("gym_env.wrappers = [@frame_stack]", "frame_stack.size = 3", env=env)
    assert batch.observation_space == spaces.Box(0, 255, (2, 2, 3 * channels), np.uint8)
    batch.step(np.array([0]))
    (rows,) = batch.step(np.array([0]))
    newest_last = np.repeat([0, 1, 2], channels)
    np.testing.assert_array_equal(rows.env_outputs.observation[0, 1, 0], newest_last)
    first = batch.reset().env_outputs.observation[0, 0, 0]
    np.testing.assert_array_equal(first, np.zeros(3 * channels))


def test_stacked_vectors_get_a_new_dimension():
    env = Counting(spaces.Box(0, 255, (2,), np.float32))
    batch = batch_of("gym_env.wrappers = [@frame_stack]", "frame_stack.size = 2", env=env)
    batch.step(np.array([0]))
    (rows,) = batch.step(np.array([0]))
    np.testing.assert_array_equal(rows.env_outputs.observation[0], [[1, 1], [2, 2]])


def test_continuous_actions_become_discrete():
    env = Counting(action_space=spaces.Box(-2.0, 2.0, (1,), np.float32))
    batch = batch_of(
        "gym_env.wrappers = [@discretize_actions]", "discretize_actions.bins = 4", env=env
    )
    assert batch.action_space == spaces.Discrete(4)
    for action in range(4):
        batch.step(np.array([action]))
    given = np.ravel(env.actions)
    assert (np.diff(given) > 0.5).all() and np.abs(given).max() <= 2
    np.testing.assert_allclose(given, -given[::-1], atol=1e-6)


def test_several_dimensions_are_several_choices_or_one():
    def space(*lines):
        env = Counting(action_space=spaces.Box(-2.0, 2.0, (2,), np.float32))
        lines = ["gym_env.wrappers = [@discretize_actions]", *lines]
        return batch_of(*lines, "discretize_actions.bins = 3", env=env).action_space

    assert space() == spaces.MultiDiscrete([3, 3])
    assert space("discretize_actions.joint = True") == spaces.Discrete(9)


NAMED = spaces.Dict(
    {
        "steps": spaces.Box(0, 99, (1,), np.float32),
        "mission": spaces.Text(20),
        "screen": spaces.Box(0, 255, (4, 6, 3), np.uint8),
    }
)


def test_texts_are_left_out():
    batch = batch_of("gym_env.wrappers = [@drop_text]", env=Counting(NAMED))
    assert set(batch.observation_space) == {"steps", "screen"}
    (rows,) = batch.step(np.array([0]))
    assert set(rows.env_outputs.observation) == {"steps", "screen"}
    assert rows.env_outputs.observation["steps"] == 1


def test_images_are_resized_by_the_means_of_areas():
    pytest.importorskip("cv2")
    lines = ["resize_images.height = 2", "resize_images.width = 3"]
    env = Counting(NAMED)
    batch = batch_of("gym_env.wrappers = [@drop_text, @resize_images]", *lines, env=env)
    assert batch.observation_space["screen"] == spaces.Box(0, 255, (2, 3, 3), np.uint8)
    image = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    env._observe = lambda: {"steps": np.float32([0]), "mission": "", "screen": image}
    (rows,) = batch.step(np.array([0]))
    means = image.reshape(2, 2, 3, 2, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(rows.env_outputs.observation["screen"][0], means, atol=0.5)

    grey = Counting(spaces.Box(0, 255, (4, 6, 1), np.uint8))
    batch = batch_of("gym_env.wrappers = [@resize_images]", *lines, env=grey)
    assert batch.reset().env_outputs.observation.shape == (1, 2, 3, 1)


def test_everything_can_be_flattened():
    space = spaces.Dict(steps=spaces.Box(0, 99, (1,), np.float32), kind=spaces.Discrete(3))
    batch = batch_of("gym_env.wrappers = [@flatten_observation]", env=Counting(space))
    assert batch.observation_space.shape == (4,)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["gym_env.wrappers = ['time_limit']"], "references to functions, such as"),
        (["gym_env.wrappers = [@time_limit]", "time_limit.max_steps = 0"], "at least 1, got 0"),
        (["gym_env.wrappers = [@frame_stack]", "frame_stack.size = 0"], "at least 1, got 0"),
        (["gym_env.wrappers = [@repeat_action]", "repeat_action.times = 0"], "at least 1, got 0"),
        (
            ["gym_env.wrappers = [@discretize_actions]", "discretize_actions.bins = 1"],
            "bins must be at least 2, got 1",
        ),
        (
            [
                "gym_env.wrappers = [@resize_images]",
                "resize_images.height = 4",
                "resize_images.width = 0",
            ],
            "at least 1, got 4 and 0",
        ),
        (["gym_env.wrappers = [@clip_reward]", "clip_reward.low = 1.0"], "low must be below"),
        (["gym_env.wrappers = [@drop_text]"], "drop_text needs observations that are a Dict"),
        (["gym_env.wrappers = [@discretize_actions]"], "needs actions that are a Box"),
    ],
)
def test_wrong_input_is_named(lines, message):
    with pytest.raises(UserError, match=message):
        batch_of(*lines)


def test_a_wrapper_must_return_an_environment():
    with pytest.raises(UserError, match="the wrapper broken must return"):

        def broken(env):
            return None

        wrappers.wrapped(Counting(), [broken])
