"""Environments by name: ids of gymnasium and of the old gym, and any function that makes one."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gin
import gymnasium

from seed_rl.environment_factory import (
    has_parameter,
    load_factory,
    make_single,
    missing_package,
)
from seed_rl.envs.wrappers import wrapped
from seed_rl.old_gym import OldGymEnvironment
from seed_rl.user_error import UserError


@gin.configurable
def gym_env(
    env_index: int = 0,
    env_id: str = gin.REQUIRED,
    kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[gymnasium.Env], gymnasium.Env]] = (),
) -> gymnasium.Env:
    """Makes the environment that `env_id` names.

    Args:
        env_index: which of the run's environments it is; told to a function that asks for it.
        env_id: one of
            'CartPole-v1', an id of gymnasium ('ALE/Pong-v5' needs no import before);
            'my_package:MyEnv-v0', an id that my_package registers with gymnasium;
            'my_package.my_module:make', a function that returns an environment, of gymnasium, the
                old gym or dm_env;
            'gym:CartPole-v1', an id of the old gym package.
        kwargs: further arguments of the environment or the function.
        wrappers: what is put around it, the first innermost; see seed_rl.envs.wrappers.

    Raises:
        UserError: there is no such environment; near names are listed. Or a wrapper does not fit.
        ModuleNotFoundError: a package is not installed.
        TypeError: the function returned something that is no single environment.
    """
    return wrapped(_make(env_index, env_id, dict(kwargs or {})), wrappers)


def _make(env_index: int, env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    prefix, colon, name = env_id.partition(":")
    if not colon:
        return _make_gymnasium(env_id, kwargs)
    if prefix == "gym":
        return _make_old_gym(name, kwargs)
    if all(part.isidentifier() for part in name.split(".")):
        return _make_from_function(env_id, env_index, kwargs)
    _import(prefix, env_id)
    return _make_gymnasium(name, kwargs)


def _make_from_function(env_id: str, env_index: int, kwargs: dict[str, Any]) -> gymnasium.Env:
    function = load_factory(env_id)
    if has_parameter(function, "env_indices"):
        raise TypeError(
            f"{env_id} has the parameter env_indices, so it makes a VectorEnv. gym_env makes "
            f"single environments. Instead: experiment.environment = {env_id!r}"
        )
    return make_single(functools.partial(function, **kwargs), env_index)


def _make_gymnasium(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    if env_id.startswith("ALE/"):
        gymnasium.register_envs(_import("ale_py", env_id))
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise _unknown(env_id, gymnasium.registry, "gymnasium") from error
    return gymnasium.make(env_id, **kwargs)


def _make_old_gym(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    gym = _import("gym", f"gym:{env_id}")
    # The checker of gym 0.26 uses a name that numpy 2 no longer has.
    if "disable_env_checker" in inspect.signature(gym.make).parameters:
        kwargs = {"disable_env_checker": True, **kwargs}
    registry = gym.envs.registry
    # Before gym 0.24 it was no dict; since then it warns of the attribute.
    known = registry if isinstance(registry, Mapping) else registry.env_specs
    if env_id not in known:
        raise _unknown(env_id, known, "gym")
    return OldGymEnvironment(gym.make(env_id, **kwargs))


def _import(module: str, env_id: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_package(error, f"The environment {env_id!r}") from error


def _unknown(env_id: str, known: Iterable[str], package: str) -> UserError:
    near = difflib.get_close_matches(env_id, list(known), n=5, cutoff=0.5)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    return UserError(
        f"{package} knows no environment {env_id!r}.{hint} Give an id of gymnasium, "
        "'package:Id-v0' when a package registers it, 'gym:Id-v0' for one of the old gym "
        "package, or 'package.module:function'."
    )
