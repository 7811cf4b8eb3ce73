"""Environments made by a named function: finding it, calling it, and saying what is wrong.

A factory is called as `factory(env_indices=[…])` when it has that parameter, and then makes one
`gymnasium.vector.VectorEnv` for all of them; else as `factory(env_index=i)` when it has that one;
else as `factory()`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from seed_rl.dm_env_adapter import DmEnvironment, looks_like_dm_env
from seed_rl.old_gym import OldGymEnvironment, looks_like_old_gym
from seed_rl.user_error import UserError

logger = logging.getLogger(__name__)

# Module → the extra of this package that brings it.
EXTRAS = {
    "ale_py": "atari",
    "cv2": "atari",
    "envpool": "envpool",
    "gym": "gym",
    "minatar": "minatar",
    "mujoco": "mujoco",
}


def load_factory(factory: str | Callable) -> Callable:
    """Returns the function that 'package.module:function' names; a callable as it is.

    Raises:
        UserError: the name has another form, or the module holds no such function.
        ModuleNotFoundError: the module, or a package that it needs, is not installed.
    """
    if callable(factory):
        return factory
    module_name, _, function_name = str(factory).partition(":")
    if not module_name or not function_name:
        raise UserError(
            f"An environment factory is named 'package.module:function', got {factory!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise ModuleNotFoundError(
                f"There is no module {error.name!r}, which the environment factory {factory!r} "
                "names. Check its spelling, and that its folder is on PYTHONPATH.",
                name=error.name,
            ) from error
        raise missing_package(error, str(factory)) from error
    function: Any = module
    for part in function_name.split("."):
        if not hasattr(function, part):
            known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise UserError(
                f"The module {module_name!r} has no function {function_name!r}, which the "
                f"environment factory {factory!r} names. It has: {', '.join(known) or 'none'}"
            )
        function = getattr(function, part)
    if not callable(function):
        raise UserError(f"The environment factory {factory!r} is not a function: {function!r}")
    return function


def missing_package(error: ModuleNotFoundError, who: str) -> ModuleNotFoundError:
    """Returns an error that says how to install what `error` misses.

    Args:
        error: what the import raised.
        who: what needs the package.
    """
    # gin adds to the message of an exception, and loses its attributes by that.
    named = error.name or "".join(re.findall("No module named '([^']+)'", str(error))[:1])
    package = named.partition(".")[0]
    if not package:  # it says in its own words what is wrong, and with which package if any
        return ModuleNotFoundError(f"{who}: {error}")
    extra = EXTRAS.get(package)
    what = f"-e '.[{extra}]' in the folder of seed_rl's setup.py" if extra else package
    return ModuleNotFoundError(
        f"{who} needs the package {package!r}, which is not installed: pip install {what}",
        name=named,
    )


def make_environments(
    factory: Callable, env_indices: Sequence[int]
) -> list[gymnasium.Env] | VectorEnv:
    """Calls `factory` for some environments; see the module's docstring.

    Returns:
        One VectorEnv, or as many environments as there are env_indices.

    Raises:
        TypeError: the factory returned something else.
        UserError: a VectorEnv holds another number of environments.
        ModuleNotFoundError: a package that the factory needs is not installed.
    """
    if has_parameter(factory, "env_indices"):
        made = _call(factory, env_indices=list(env_indices))
        if not isinstance(made, VectorEnv):
            raise TypeError(
                f"{factory_name(factory)} has the parameter env_indices, so it must return a "
                f"gymnasium.vector.VectorEnv, but it returned a {_type_name(made)}. A factory of "
                "single environments has the parameter env_index, or none."
            )
        return _sized(made, env_indices, factory)
    first = make_one(factory, env_indices[0])
    if isinstance(first, VectorEnv):
        return _sized(first, env_indices, factory)
    return [first] + [make_single(factory, index) for index in env_indices[1:]]


def make_single(factory: Callable, env_index: int) -> gymnasium.Env:
    """Calls `factory` for one environment, which must not be a VectorEnv.

    Raises:
        TypeError: the factory returned something else than an environment.
        ModuleNotFoundError: a package that the factory needs is not installed.
    """
    made = make_one(factory, env_index)
    if isinstance(made, VectorEnv):
        raise TypeError(
            f"{factory_name(factory)} returned a VectorEnv for the single environment {env_index}"
        )
    return made


def make_one(factory: Callable, env_index: int) -> gymnasium.Env | VectorEnv:
    """Calls `factory` once and takes an environment of another API to gymnasium's."""
    if has_parameter(factory, "env_index"):
        made = _call(factory, env_index=env_index)
    else:
        made = _call(factory)
    if isinstance(made, (gymnasium.Env, VectorEnv)):
        return made
    if hasattr(made, "possible_agents"):  # PettingZoo's
        raise UserError(
            f"{factory_name(factory)} returned a {_type_name(made)}, an environment of several "
            "agents: an agent here has one observation, one action and one reward a step. To let a "
            "policy play all of them, write an environment whose observations and actions are "
            "tuples; to train one, write an environment that plays the others."
        )
    if looks_like_old_gym(made):
        return OldGymEnvironment(made)
    if looks_like_dm_env(made):
        return DmEnvironment(made)
    raise TypeError(
        f"{factory_name(factory)} must return a gymnasium.Env, a gymnasium.vector.VectorEnv, or an "
        "environment of the old gym API or of dm_env's, but it returned a "
        f"{_type_name(made)}."
    )


def _call(factory: Callable, **kwargs: Any) -> Any:
    try:
        return factory(**kwargs)
    except ModuleNotFoundError as error:
        if "pip install" in str(error):
            raise
        raise missing_package(error, factory_name(factory)) from error
    except (UserError, gymnasium.error.Error, AttributeError, TypeError, ValueError):
        raise  # these say more, or are taken for a wrong configuration
    except Exception as error:
        logger.debug("an environment could not be made", exc_info=True)
        raise UserError(
            f"{factory_name(factory)} raised {type(error).__name__} when it made an environment: "
            f"{error} (--verbosity=1 shows where)"
        ) from error


def _sized(env: VectorEnv, env_indices: Sequence[int], factory: Callable) -> VectorEnv:
    if env.num_envs != len(env_indices):
        raise UserError(
            f"{factory_name(factory)} returned a VectorEnv of {env.num_envs} environments, but "
            f"{len(env_indices)} are needed. Give it the parameter env_indices and make as many "
            "as that holds."
        )
    return env


def has_parameter(function: Callable, name: str) -> bool:
    """Whether `function` can be called with the keyword argument `name`, and names it."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: there is no signature to look at
        return False


def factory_name(factory: Callable) -> str:
    """Returns 'module:function', for messages."""
    factory = getattr(factory, "func", factory)  # of a functools.partial
    name = getattr(factory, "__qualname__", None)
    return f"{factory.__module__}:{name}" if name else repr(factory)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
