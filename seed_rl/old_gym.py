"""Environments with the API of the old `gym` package, as gymnasium environments.

Nothing here imports `gym`: an environment is known by what it has, so classes that merely follow
the old API work as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from seed_rl.spaces import UnsupportedSpaceError


def looks_like_old_gym(env: Any) -> bool:
    """Whether `env` has what an environment of the old API has (and is none of gymnasium's)."""
    return not isinstance(env, gymnasium.Env) and all(
        hasattr(env, name) for name in ("reset", "step", "observation_space", "action_space")
    )


class OldGymEnvironment(gymnasium.Env):
    """An environment of the old API.

    `step` may return (observation, reward, done, info), where info["TimeLimit.truncated"] tells a
    time limit from an end, or gym 0.26's five values; `reset` an observation, or gym 0.26's pair.
    Seeds go to `reset(seed=…)` where it has that parameter, else to `seed(…)` where that exists.

    Args:
        env: see `looks_like_old_gym`.

    Raises:
        UnsupportedSpaceError: a space has no counterpart in gymnasium.
    """

    def __init__(self, env: Any):
        self.env = env
        self.observation_space = gymnasium_space(env.observation_space)
        self.action_space = gymnasium_space(env.action_space)
        self.render_mode = getattr(env, "render_mode", None)
        self._reset_takes_seed = _has_parameter(_innermost(env).reset, "seed")
        self._render_takes_mode = _has_parameter(getattr(_innermost(env), "render", None), "mode")

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Starts an episode; `options` are not known to the old API and are ignored."""
        if seed is not None and self._reset_takes_seed:
            result = self.env.reset(seed=seed)
        else:
            if seed is not None and hasattr(self.env, "seed"):
                self.env.seed(seed)
            result = self.env.reset()
        if self._is_pair(result):
            return result
        return result, {}

    def _is_pair(self, result: Any) -> bool:
        """Whether `reset` returned (observation, info) rather than an observation."""
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            return False
        is_tuple_space = isinstance(self.observation_space, spaces.Tuple)
        return not (is_tuple_space and self.observation_space.contains(result))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Takes one action; a time limit is reported as truncation."""
        result = self.env.step(action)
        count = len(result) if isinstance(result, (tuple, list)) else 1
        if count == 5:
            return result
        if count != 4:
            raise ValueError(
                f"step() of {self.env} returned {count} values, expected (observation, "
                "reward, done, info) or (observation, reward, terminated, truncated, info)"
            )
        observation, reward, done, info = result
        if not hasattr(info, "get"):
            raise ValueError(f"step() of {self.env} returned the info {info!r}, expected a dict")
        truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def render(self) -> Any:
        """Returns a frame, as an RGB array where the environment can."""
        return self.env.render(mode="rgb_array") if self._render_takes_mode else self.env.render()

    def close(self) -> None:
        """Closes the environment, where it can be closed."""
        if hasattr(self.env, "close"):
            self.env.close()


def _innermost(env: Any) -> Any:
    return getattr(env, "unwrapped", env)


def _has_parameter(function: Callable | None, name: str) -> bool:
    try:
        return function is not None and name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: there is no signature to look at
        return False


def gymnasium_space(space: Any) -> gymnasium.Space:
    """Returns gymnasium's counterpart of a space of the old package (its own as they are).

    Raises:
        UnsupportedSpaceError: there is none.
    """
    if isinstance(space, gymnasium.Space):
        return space
    kind = type(space).__name__
    if kind == "Box":
        return spaces.Box(space.low, space.high, space.shape, space.dtype)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.asarray(space.nvec))
    if kind == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if kind == "Tuple":
        return spaces.Tuple([gymnasium_space(s) for s in space.spaces])
    if kind == "Dict":
        return spaces.Dict({key: gymnasium_space(s) for key, s in space.spaces.items()})
    raise UnsupportedSpaceError(
        f"The space {space} of type {type(space).__module__}.{kind} is not supported. Supported "
        "are Box, Discrete, MultiDiscrete, MultiBinary, Tuple and Dict."
    )
