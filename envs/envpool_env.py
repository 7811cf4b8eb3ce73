"""Environments of EnvPool: many at once, stepped by threads of C++."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from seed_rl.environment_factory import missing_package
from seed_rl.user_error import UserError

_SET_HERE = ("env_type", "num_envs", "batch_size", "seed", "num_threads")


@gin.configurable
def envpool_env(
    env_indices: Sequence[int],
    env_id: str = gin.REQUIRED,
    kwargs: Mapping[str, Any] | None = None,
    num_threads: int = 1,
) -> VectorEnv:
    """Makes EnvPool's environments for all of env_indices.

    Args:
        env_indices: which of the run's environments they are.
        env_id: 'Pong-v5', an id of EnvPool.
        kwargs: further options of the environment, such as {'frame_skip': 4}.
        num_threads: threads that step them. One, as there usually is an actor a core.

    Raises:
        UserError: there is no such environment, or it has no such option.
        ModuleNotFoundError: EnvPool is not installed.
    """
    try:
        envpool = importlib.import_module("envpool")
    except ModuleNotFoundError as error:
        raise missing_package(error, f"The environment {env_id!r} of EnvPool") from error
    known = envpool.list_all_envs()
    if env_id not in known:
        near = difflib.get_close_matches(env_id, known, n=5, cutoff=0.5)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise UserError(f"EnvPool knows no environment {env_id!r}.{hint}")
    kwargs = dict(kwargs or {})
    for name in _SET_HERE:
        if name in kwargs:
            raise UserError(f"envpool_env.kwargs must not hold {name!r}: it is set by the run")
    return EnvPoolEnvironments(envpool, env_id, len(env_indices), kwargs, num_threads)


class EnvPoolEnvironments(VectorEnv):
    """EnvPool's environments with the API of gymnasium's VectorEnv.

    An environment shows its final observation in the step that ends its episode, and spends the
    next one on its reset, whatever the action.

    Args:
        envpool: the module.
        env_id: of EnvPool.
        num_envs: how many.
        kwargs: further options.
        num_threads: threads that step them.

    Raises:
        UserError: the environment has no such option.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012, as gymnasium has it

    def __init__(
        self, envpool: Any, env_id: str, num_envs: int, kwargs: dict[str, Any], num_threads: int
    ):
        self._envpool = envpool
        self._env_id = env_id
        self._kwargs = {**kwargs, "num_threads": num_threads}
        self._env: Any = None  # made by reset, as seeds are an option of the making
        self.num_envs = num_envs
        try:
            spec = envpool.make_spec(env_id, **kwargs)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(f"EnvPool cannot make {env_id!r} with {kwargs}: {error}") from error
        self.single_observation_space = spec.observation_space
        self.single_action_space = spec.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict | None = None
    ) -> tuple[Any, dict]:
        """Starts an episode everywhere; there are no `options`."""
        if seed is not None or self._env is None:
            self.close()
            self._env = self._envpool.make(
                self._env_id,
                env_type="gymnasium",
                num_envs=self.num_envs,
                seed=_seeds(seed, self.num_envs),
                **self._kwargs,
            )
        observation, infos = self._env.reset()
        return observation, _told(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict]:
        """Takes one action in every environment."""
        actions = _as_envpool_has_them(self.single_action_space, actions)
        observation, rewards, terminations, truncations, infos = self._env.step(actions)
        return observation, rewards, terminations, truncations, _told(infos)

    def close(self, **kwargs: Any) -> None:
        """Closes the environments."""
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _seeds(seed: int | Sequence[int] | None, num_envs: int) -> list[int]:
    """One seed an environment, in EnvPool's 31 bits."""
    if seed is None:
        return np.random.default_rng().integers(2**31, size=num_envs).tolist()
    each = range(seed, seed + num_envs) if isinstance(seed, int) else seed
    return [int(s) % 2**31 for s in each]


def _told(infos: dict) -> dict:
    """Of what EnvPool says, the reward before it was clipped."""
    return {"raw_reward": infos["reward"]} if "reward" in infos else {}


def _as_envpool_has_them(space: gymnasium.Space, actions: Any) -> Any:
    is_integer = isinstance(space, (spaces.Discrete, spaces.MultiDiscrete))
    return np.asarray(actions, np.int32) if is_integer else actions
