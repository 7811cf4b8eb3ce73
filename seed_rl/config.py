"""Reads gin files and bindings, and loads the agent and the environment that they name.

A configuration names its two plug-ins as text, 'package.module:name':

    experiment.agent = 'seed_rl.agents.vtrace.agent:VTraceAgent'
    experiment.environment = 'seed_rl.envs.atari:create_vector_environment'

As text, because actors read the same files and must not import the agent, which needs TensorFlow:
hundreds of them run, and each would pay seconds and hundreds of megabytes for it.
"""

import collections.abc
import contextlib
import importlib
import importlib.resources
import inspect
import logging
import pathlib
import tokenize
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gin

from seed_rl.environment_factory import has_parameter, load_factory
from seed_rl.user_error import UserError


class ConfigError(UserError):
    """A gin file, a binding or a plug-in is wrong."""


class Experiment(NamedTuple):
    """The plug-ins of a configuration."""

    agent: str  # 'module:name' of an Agent factory: (observation_space, action_space) -> Agent
    environment: str  # 'module:name' of an environment factory, see make_environment_batch


@gin.configurable("experiment")
def _experiment(agent: str = gin.REQUIRED, environment: str = gin.REQUIRED) -> Experiment:
    return Experiment(agent, environment)


# What the learner's side of a configuration may bind, beside the agent's own: an actor passes over
# these names, and any other name that it does not know is an error.
LEARNER_CONFIGURABLES = (
    "Learner",
    "make_placement",
    "TaskStatistics",
    "adam",
    "rmsprop",
    "evaluate",
    "ConvolutionalTorso",
)


class _Unqualified(list):
    """Names that gin may also find with a module before them: 'optimizers.adam' for 'adam'."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).rpartition(".")[2])


_GIN_ERRORS = (
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
)


def find_config(name: str) -> str:
    """Returns the path of a gin file: one given by path, or by name in seed_rl.configs.

    Raises:
      ConfigError: there is no such file; says which there are.
    """
    if pathlib.Path(name).is_file():
        return name
    folder = importlib.resources.files("seed_rl.configs")
    for candidate in (name, f"{name}.gin"):
        path = folder.joinpath(candidate)
        if "/" not in candidate and path.is_file():
            return str(path)
    known = sorted(p.name for p in folder.iterdir() if p.name.endswith(".gin"))
    what = "a directory, not a file" if pathlib.Path(name).is_dir() else "no such file"
    raise ConfigError(
        f"--gin_config={name}: {what}, and seed_rl.configs has only {', '.join(known)}"
    )


def load(gin_configs: Sequence[str], gin_bindings: Sequence[str], for_actor: bool) -> Experiment:
    """Reads the configuration, imports its plug-ins and binds every parameter.

    Args:
      gin_configs: files, by path or by name in seed_rl.configs.
      gin_bindings: 'name.parameter = value', which win over the files.
      for_actor: import the environment only, and pass over what belongs to the learner.

    Returns:
      The Experiment.

    Raises:
      ConfigError: a file is missing, a line cannot be read, a name or parameter does not exist, or
        a plug-in cannot be imported, or a parameter's value is of another type than it needs.
    """
    files = [find_config(name) for name in gin_configs]
    experiment, read = _read_experiment(files, gin_bindings)
    _import_replaced_environments(read)
    _import_environment(experiment.environment)
    skip: bool | list[str] = False
    if for_actor:
        declared = _agent_configurables(experiment.agent)
        skip = True if declared is None else _Unqualified([*LEARNER_CONFIGURABLES, *declared])
    else:
        importlib.import_module("seed_rl.learner")
        importlib.import_module("seed_rl.evaluation")
        load_agent_factory(experiment.agent)
    importlib.import_module("seed_rl.actor")
    _parse(files, gin_bindings, skip)
    _check_types()
    if not for_actor:
        _check_references()
    return experiment


def load_agent_factory(path: str) -> Callable[..., Any]:
    """Imports the Agent factory that 'package.module:name' names.

    Raises:
      ConfigError: the text has another form, or there is no such module or name.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(
            f"experiment.agent must have the form 'package.module:name', got {path!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"experiment.agent={path!r} cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"experiment.agent={path!r}: module {module_name} has no {name!r}")
    return getattr(module, name)


def make_agent(path: str, observation_space: Any, action_space: Any, num_envs: int) -> Any:
    """Makes the agent that 'package.module:name' names.

    Its factory is called as `factory(observation_space, action_space)`, and with `num_envs` too if
    it has that parameter.

    Args:
      path: the factory's name.
      observation_space: of one environment.
      action_space: of one environment.
      num_envs: environments of all actors together.

    Raises:
      ConfigError: see load_agent_factory.
      whatever the factory raises for settings that do not go together.
    """
    factory = load_agent_factory(path)
    if has_parameter(factory, "num_envs"):
        return factory(observation_space, action_space, num_envs=num_envs)
    return factory(observation_space, action_space)


def _import_environment(path: str) -> None:
    try:
        load_factory(path)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"experiment.environment={path!r}: {error}") from error


def _import_replaced_environments(read: Sequence[Any]) -> None:
    """Imports the environments of files in whose place another file or a binding puts its own.

    Those files bind parameters of their environments, which would be unknown names otherwise.

    Args:
      read: what `_parse` returned.
    """
    for file in read:
        _import_replaced_environments(file.includes)
        _parse([file.filename], [], skip_unknown=True)
        # A file may name none; and one that cannot be imported is not needed.
        with contextlib.suppress(ImportError, ValueError):
            load_factory(_macro_value(gin.query_parameter("experiment.environment")))


def _read_experiment(
    files: Sequence[str], bindings: Sequence[str]
) -> tuple[Experiment, Sequence[Any]]:
    """Finds the plug-ins; the names they will bring are not known yet and are passed over.

    Returns:
      The Experiment, and what `_parse` returned.
    """
    read = _parse(files, bindings, skip_unknown=True)
    try:
        return _experiment(), read
    except RuntimeError as error:
        raise ConfigError(
            "the configuration names no agent or no environment: bind experiment.agent and "
            "experiment.environment to 'package.module:name', or give --gin_config"
        ) from error


def _agent_configurables(agent: str) -> Sequence[str] | None:
    """Names an agent's package declares, in CONFIGURABLES, as its own; imports no TensorFlow.

    None if nothing is declared: the agent is a module without a package, its package is silent, or
    it is not installed where only actors run. The learner is then the one to find misspelt names.
    """
    package = agent.partition(":")[0].rpartition(".")[0]
    if not package:
        return None
    try:
        return getattr(importlib.import_module(package), "CONFIGURABLES", None)
    except ImportError:
        return None


def _parse(
    files: Sequence[str], bindings: Sequence[str], skip_unknown: bool | list[str]
) -> Sequence[Any]:
    """Puts files and bindings in place of what was bound before.

    Returns:
      What gin read: for every file its `filename`, and its `includes`, which are the same.
    """
    gin.clear_config()
    gin.add_config_file_search_path(str(importlib.resources.files("seed_rl.configs")))
    root_logger = logging.getLogger()
    root_logger.addFilter(_is_no_lookup)
    try:
        return gin.parse_config_files_and_bindings(
            list(files), list(bindings), skip_unknown=skip_unknown, finalize_config=False
        )
    except _GIN_ERRORS as error:
        raise _unreadable(error, bindings) from error
    finally:
        root_logger.removeFilter(_is_no_lookup)


def _is_no_lookup(record: logging.LogRecord) -> bool:
    """Keeps quiet that gin looked for an included file elsewhere before it found it."""
    return not record.getMessage().startswith("Path not found")


def _check_references() -> None:
    """Finds macros (%NAME) without a value; else the first call that needs one would."""
    try:
        gin.finalize()
    except _GIN_ERRORS as error:
        raise _unreadable(error) from error


def _check_types() -> None:
    """Finds values of the wrong type, such as a string for a number, before they do harm.

    A whole number that was written as 1e6 or 20.0 becomes an int: slices and ranges take no other.
    """
    # gin shows what is bound to a name, but has no public list of the names.
    for (scope, selector), parameters in gin.config._CONFIG.items():
        if selector == "gin.macro":
            continue
        annotations = _annotations(gin.get_configurable(selector))
        for name, value in parameters.items():
            kinds = _plain_kinds(annotations.get(name))
            value = _macro_value(value)
            if not kinds or isinstance(value, gin.config.ConfigurableReference):
                continue
            if not any(_is_a(value, kind) for kind in kinds):
                binding = f"{scope}/{selector.rpartition('.')[2]}.{name}".lstrip("/")
                expected = " or ".join(_KIND_NAMES[kind] for kind in kinds)
                raise ConfigError(f"{binding} must be {expected}, got {value!r}")
            if isinstance(value, float) and int in kinds and float not in kinds:
                parameters[name] = int(value)


_MAPPING, _SEQUENCE = collections.abc.Mapping, collections.abc.Sequence

_KIND_NAMES: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    type(None): "None",
    _MAPPING: "a dict such as {'name': 1}",
    _SEQUENCE: "a list such as [1, 2]",
    Callable: "a reference such as @name",
}


def _annotations(configurable: Callable) -> dict[str, Any]:
    try:
        parameters = inspect.signature(configurable, eval_str=True).parameters
    except (NameError, TypeError, ValueError):  # an annotation for type checkers alone
        return {}
    return {name: parameter.annotation for name, parameter in parameters.items()}


def _plain_kinds(annotation: Any) -> list[Any]:
    """The kinds of value that an annotation allows; none if it allows any other than those here."""
    origin = typing.get_origin(annotation)
    is_union = origin in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if is_union else [annotation]
    kinds = [_ORIGINS.get(typing.get_origin(p), p) for p in parts]
    return kinds if all(isinstance(k, typing.Hashable) and k in _KIND_NAMES for k in kinds) else []


# What an annotation such as Mapping[str, Any] says of the whole value.
_ORIGINS: dict[Any, Any] = {
    typing.get_origin(Callable[..., Any]): Callable,
    _MAPPING: _MAPPING,
    _SEQUENCE: _SEQUENCE,
}


def _is_a(value: Any, kind: Any) -> bool:
    if kind is Callable:
        return callable(value)
    if kind in (int, float):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and (kind is float or value == value // 1)  # 1e6 is how people write it
    if kind is _SEQUENCE and isinstance(value, str):
        return False  # a text in place of a list of texts
    return isinstance(value, kind)


def _macro_value(value: Any) -> Any:
    """What a macro, %NAME, stands for; another value as it is, and so a macro that is not bound."""
    if isinstance(value, gin.config.ConfigurableReference) and value.selector == "gin.macro":
        try:
            name = value.scoped_selector.rpartition("/")[0]
            return _macro_value(gin.query_parameter(f"%{name}"))
        except ValueError:
            return value
    return value


def _unreadable(error: Exception, bindings: Sequence[str] = ()) -> ConfigError:
    line = ""
    if isinstance(error, SyntaxError):
        line = error.text or ""
        if not error.filename and error.lineno is not None:  # gin then only gives the number
            line = "".join("\n".join(bindings).splitlines()[error.lineno - 1 : error.lineno])
    message = " ".join(f"{error} {line}".split())
    return ConfigError(f"the gin configuration cannot be read: {message}")
