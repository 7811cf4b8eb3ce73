"""Wrappers that a gin file puts around environments:

    gym_env.wrappers = [@time_limit, @clip_reward]
    time_limit.max_steps = 1000  # agent steps
    clip_reward.low = -1.0
    clip_reward.high = 1.0

The first is the innermost. Any function from an environment to one may be in the list. Observations
are normalised by the network instead, whose statistics are the learner's: see
`normalize_observations` of `AutoNetwork`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from seed_rl.environment_factory import missing_package
from seed_rl.rewards import as_number
from seed_rl.user_error import UserError


def wrapped(env: gymnasium.Env, wrappers: Sequence[Callable]) -> gymnasium.Env:
    """Returns `env` inside of all `wrappers`, the first of which is the innermost.

    Raises:
        UserError: a wrapper is no function, or does not return an environment.
    """
    for wrapper in wrappers:
        if not callable(wrapper):
            raise UserError(
                f"wrappers must be references to functions, such as [@time_limit], got {wrapper!r}"
            )
        inner, env = env, wrapper(env)
        if not isinstance(env, gymnasium.Env):
            name = getattr(wrapper, "__name__", wrapper)
            raise UserError(
                f"the wrapper {name} must return a gymnasium.Env around {inner}, got {env!r}"
            )
    return env


@gin.configurable
def time_limit(env: gymnasium.Env, max_steps: int = gin.REQUIRED) -> gymnasium.Env:
    """Cuts episodes after `max_steps` agent steps; agents know that they could have gone on."""
    if max_steps < 1:
        raise UserError(f"time_limit.max_steps must be at least 1, got {max_steps}")
    return gymnasium.wrappers.TimeLimit(env, int(max_steps))


@gin.configurable
def scale_reward(env: gymnasium.Env, factor: float = gin.REQUIRED) -> gymnasium.Env:
    """Multiplies rewards; returns are still logged as the environment counts them, too."""
    return RewardFunction(env, lambda reward: reward * factor)


@gin.configurable
def clip_reward(env: gymnasium.Env, low: float = -1.0, high: float = 1.0) -> gymnasium.Env:
    """Clips rewards; returns are still logged as the environment counts them, too."""
    if not low < high:
        raise UserError(f"clip_reward.low must be below its high, got {low} and {high}")
    return RewardFunction(env, lambda reward: min(max(reward, low), high))


class RewardFunction(gymnasium.Wrapper):
    """Trains on a function of the reward; info['raw_reward'] keeps the environment's own.

    Args:
        env: the environment.
        function: of the reward.
    """

    def __init__(self, env: gymnasium.Env, function: Callable[[float], float]):
        super().__init__(env)
        self._function = function

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Takes one action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        info = {"raw_reward": reward, **info}  # of several such wrappers, the innermost's
        return observation, self._function(as_number(reward)), terminated, truncated, info


@gin.configurable
def repeat_action(env: gymnasium.Env, times: int = gin.REQUIRED) -> gymnasium.Env:
    """Takes each action `times` times and adds up the rewards; bind Learner.action_repeat too."""
    if times < 1:
        raise UserError(f"repeat_action.times must be at least 1, got {times}")
    return RepeatedAction(env, int(times))


class RepeatedAction(gymnasium.Wrapper):
    """Repeats actions, until the episode ends; see `repeat_action`."""

    def __init__(self, env: gymnasium.Env, times: int):
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Takes one action several times."""
        total = raw = 0.0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += as_number(reward)
            raw += as_number(info.get("raw_reward", reward), "raw reward")
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, {**info, "raw_reward": raw}


@gin.configurable
def frame_stack(env: gymnasium.Env, size: int = 4) -> gymnasium.Env:
    """Observes the last `size` observations, zeros before the first; the newest is the last.

    Those of an image become its channels; others, and the parts of dicts, get a new first
    dimension. For a single image, the `stack_size` of a network does the same and sends less.
    """
    if size < 1:
        raise UserError(f"frame_stack.size must be at least 1, got {size}")
    frames = env.observation_space
    stacked = gymnasium.wrappers.FrameStackObservation(env, int(size), padding_type="zero")
    if not isinstance(frames, spaces.Box) or len(frames.shape) != 3:
        return stacked

    def as_channels(stack: np.ndarray) -> np.ndarray:
        return np.concatenate(list(stack), axis=-1)

    box = stacked.observation_space
    assert isinstance(box, spaces.Box)
    space = spaces.Box(as_channels(box.low), as_channels(box.high), dtype=box.dtype)
    return gymnasium.wrappers.TransformObservation(stacked, as_channels, space)


@gin.configurable
def discretize_actions(env: gymnasium.Env, bins: int = 5, joint: bool = False) -> gymnasium.Env:
    """Makes continuous actions discrete: R2D2 needs that.

    Args:
        env: its actions are a Box with finite bounds.
        bins: actions a dimension.
        joint: one Discrete space of all combinations, which R2D2 needs where there are several
            dimensions; otherwise several dimensions make a MultiDiscrete.
    """
    if bins < 2:
        raise UserError(f"discretize_actions.bins must be at least 2, got {bins}")
    space = env.action_space
    if not isinstance(space, spaces.Box):
        raise UserError(f"discretize_actions needs actions that are a Box; they are {space}")
    wrapper = getattr(gymnasium.wrappers, "DiscretizeAction", None)
    if wrapper is None:
        raise UserError("discretize_actions needs a newer gymnasium: pip install -U gymnasium")
    several = int(np.prod(space.shape)) > 1
    return wrapper(env, int(bins), multidiscrete=several and not joint)


@gin.configurable
def drop_text(env: gymnasium.Env) -> gymnasium.Env:
    """Leaves texts, such as the missions of MiniGrid, out of observations that are a Dict."""
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        raise UserError(f"drop_text needs observations that are a Dict; they are {space}")
    # Text, and MiniGrid's own kind of space.
    numbers = [key for key, part in space.items() if part.dtype is None or part.dtype.kind != "U"]
    return gymnasium.wrappers.FilterObservation(env, numbers)


@gin.configurable
def flatten_observation(env: gymnasium.Env) -> gymnasium.Env:
    """Observes a vector of everything: discrete values one-hot, images as they are."""
    return gymnasium.wrappers.FlattenObservation(env)


@gin.configurable
def resize_images(
    env: gymnasium.Env, height: int = gin.REQUIRED, width: int = gin.REQUIRED
) -> gymnasium.Env:
    """Scales images of bytes, [height, width, channels], by the means of areas.

    Args:
        env: observes an image, or a Dict that holds some.
        height: pixels.
        width: pixels.

    Raises:
        UserError: the observations hold no image, or a size is below 1.
        ModuleNotFoundError: OpenCV is not installed.
    """
    if height < 1 or width < 1:
        raise UserError(
            f"resize_images.height and its width must be at least 1, got {height} and {width}"
        )
    try:
        cv2 = importlib.import_module("cv2")
    except ModuleNotFoundError as error:
        raise missing_package(error, "resize_images") from error
    space = env.observation_space

    def resize(image: np.ndarray) -> np.ndarray:
        small = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
        return small.reshape(height, width, -1)  # OpenCV drops a single channel

    def resized_space(image: Any) -> spaces.Box:
        return spaces.Box(0, 255, (height, width, image.shape[2]), np.uint8)

    if _is_image(space):
        assert isinstance(space, spaces.Box)
        return gymnasium.wrappers.TransformObservation(env, resize, resized_space(space))
    parts = space.items() if isinstance(space, spaces.Dict) else ()
    images = {key: resized_space(part) for key, part in parts if _is_image(part)}
    if not images:
        raise UserError(
            f"resize_images needs an image of uint8, or a Dict that holds one; got {space}"
        )

    def resize_all(observation: dict) -> dict:
        return {**observation, **{key: resize(observation[key]) for key in images}}

    return gymnasium.wrappers.TransformObservation(
        env, resize_all, spaces.Dict({**dict(parts), **images})
    )


def _is_image(space: gymnasium.Space) -> bool:
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8
