"""Environments with DeepMind's `dm_env` API, as gymnasium environments.

Nothing here imports `dm_env`: an environment is known by what it has, so classes that merely follow
the API work as well.
"""

from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from seed_rl.rewards import as_number
from seed_rl.spaces import UnsupportedSpaceError

logger = logging.getLogger(__name__)


def looks_like_dm_env(env: Any) -> bool:
    """Whether `env` has what an environment of dm_env has."""
    names = ("reset", "step", "observation_spec", "action_spec")
    return all(callable(getattr(env, name, None)) for name in names)


class DmEnvironment(gymnasium.Env):
    """An environment of dm_env.

    An episode whose last discount is 0 has terminated; one that ends with another discount was cut,
    and its return goes on from the final observation. Discounts before the last step are ignored:
    the agent has its own.

    dm_env knows no seeds. They go to `seed(…)` where the environment has it, else to the random
    state of a dm_control task; where there is neither, a factory that is told its env_index can
    make environments that differ.

    Args:
        env: see `looks_like_dm_env`.

    Raises:
        UnsupportedSpaceError: a spec has no counterpart in gymnasium.
    """

    def __init__(self, env: Any):
        self.env = env
        self._action_spec = env.action_spec()
        self.observation_space = observation_space(env.observation_spec())
        self.action_space = action_space(self._action_spec)
        self.render_mode = "rgb_array" if hasattr(env, "physics") else None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts an episode; there are no `options`."""
        if seed is not None:
            self._seed(seed)
        return self.env.reset().observation, {}

    def _seed(self, seed: int) -> None:
        random_state = getattr(getattr(self.env, "task", None), "random", None)
        if callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        elif isinstance(random_state, np.random.RandomState):
            random_state.seed(seed % 2**32)
        else:
            logger.warning(
                "%s cannot be seeded. A factory with the parameter env_index can make environments "
                "that differ.",
                type(self.env).__name__,
            )

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Takes one action."""
        time_step = self.env.step(_as_spec(action, self._action_spec))
        last = int(time_step.step_type) == 2  # StepType.LAST
        terminated = last and not time_step.discount  # None, too, promises nothing further
        # None is the reward of a first step, where the environment has started anew by itself.
        reward = 0.0 if time_step.reward is None else as_number(time_step.reward)
        return time_step.observation, reward, terminated, last and not terminated, {}

    def render(self) -> Any:
        """Returns a frame, of the environments of dm_control."""
        if not hasattr(self.env, "physics"):
            raise NotImplementedError
        return self.env.physics.render()

    def close(self) -> None:
        """Closes the environment, where it can be closed."""
        if hasattr(self.env, "close"):
            self.env.close()


def _as_spec(action: Any, spec: Any) -> Any:
    if isinstance(spec, (tuple, list)):
        return type(spec)(_as_spec(a, s) for a, s in zip(action, spec, strict=True))
    return np.asarray(action, spec.dtype)


def observation_space(spec: Any) -> gymnasium.Space:
    """Returns the space of observations with a spec, or a nest of specs.

    Raises:
        UnsupportedSpaceError: a spec is not one of numbers.
    """
    if hasattr(spec, "items"):
        return spaces.Dict({key: observation_space(s) for key, s in spec.items()})
    if isinstance(spec, (tuple, list)):
        return spaces.Tuple([observation_space(s) for s in spec])
    kind = _kind(spec, "observation")
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values))
    shape = tuple(spec.shape)
    if kind == "b":
        return spaces.MultiBinary(shape) if shape else spaces.Discrete(2)
    if hasattr(spec, "minimum"):
        return _box(spec)
    if kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, spec.dtype)
    limits = np.iinfo(spec.dtype)
    return spaces.Box(limits.min, limits.max, shape, spec.dtype)


def action_space(spec: Any) -> gymnasium.Space:
    """Returns the space of actions with a spec, or a tuple or list of specs.

    Raises:
        UnsupportedSpaceError: a spec is not one of numbers, or has no bounds.
    """
    if isinstance(spec, (tuple, list)):
        return spaces.Tuple([action_space(s) for s in spec])
    kind = _kind(spec, "action")
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values))
    if not hasattr(spec, "minimum"):
        raise UnsupportedSpaceError(
            f"The action spec {spec} has no bounds: agents need a DiscreteArray or a BoundedArray."
        )
    if kind == "f":
        return _box(spec)
    low = np.broadcast_to(np.asarray(spec.minimum, np.int64), spec.shape)
    numbers = np.broadcast_to(np.asarray(spec.maximum, np.int64), spec.shape) - low + 1
    if not spec.shape:
        return spaces.Discrete(int(numbers), start=int(low))
    return spaces.MultiDiscrete(numbers, start=low)


def _kind(spec: Any, what: str) -> str:
    dtype = getattr(spec, "dtype", None)
    kind = np.dtype(dtype).kind if dtype is not None else ""
    if kind not in tuple("biuf"):
        raise UnsupportedSpaceError(
            f"The {what} spec {spec} is not supported. Supported are arrays of numbers, and "
            f"{'dicts and ' if what == 'observation' else ''}tuples of them."
        )
    return kind


def _box(spec: Any) -> spaces.Box:
    low, high = (np.broadcast_to(np.asarray(x), spec.shape) for x in (spec.minimum, spec.maximum))
    return spaces.Box(
        low.astype(spec.dtype), high.astype(spec.dtype), tuple(spec.shape), spec.dtype
    )
