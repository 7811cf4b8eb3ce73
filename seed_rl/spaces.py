"""Which spaces an environment may have, and how their values become arrays.

An agent sees canonical action spaces only: Discrete counted from 0, MultiDiscrete counted from 0,
Box in [-1, 1] and Tuples of these. MultiBinary is a MultiDiscrete of twos. `ActionTranslator` takes
its actions back to the environment's own space.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import optree
from gymnasium import spaces

from seed_rl.user_error import UserError

OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"
ACTIONS = "Discrete, MultiDiscrete, MultiBinary, Box with finite bounds, and Tuple of these"


class UnsupportedSpaceError(UserError):
    """An environment has a space that cannot be used; the message names it and what can."""


class ObservationError(UserError):
    """An environment returned an observation that does not fit its observation space."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array of a nest, without a batch dimension."""

    shape: tuple[int, ...]
    dtype: np.dtype
    name: str = ""


def observation_specs(space: gymnasium.Space) -> Any:
    """Returns the nest of `ArraySpec` that observations of `space` make.

    Raises:
        UnsupportedSpaceError: `space` holds something else than OBSERVATIONS, or nothing at all.
    """
    specs = _observation_specs(space, "observation")
    if not optree.tree_leaves(specs):
        raise UnsupportedSpaceError(f"The observation space {space} holds no array.")
    return specs


def _observation_specs(space: gymnasium.Space, name: str) -> Any:
    if isinstance(space, spaces.Dict):
        for key in space.spaces:
            if not isinstance(key, str):  # no message can hold it
                raise UnsupportedSpaceError(
                    f"The {name} space {space} is a Dict with the key {key!r}: the keys must be "
                    "texts. Wrap the environment so that they are."
                )
        return {key: _observation_specs(s, f"{name}/{key}") for key, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_observation_specs(s, f"{name}/{i}") for i, s in enumerate(space.spaces))
    plain = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, plain) or not _is_numeric(np.dtype(space.dtype)):
        raise UnsupportedSpaceError(
            f"The {name} space {space} is not supported. Supported are {OBSERVATIONS}, with "
            "numbers in them. Wrap the environment so that it observes one of these: to leave "
            "texts out of a Dict, gym_env.wrappers = [@drop_text]"
        )
    assert space.shape is not None
    return ArraySpec(tuple(space.shape), np.dtype(space.dtype), name)


def _is_numeric(dtype: np.dtype) -> bool:
    """Whether TensorFlow knows the dtype as one of numbers: no float of more than 64 bits."""
    return dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize <= 8)


def action_specs(space: gymnasium.Space) -> Any:
    """Returns the nest of `ArraySpec` that an agent's actions for `space` make.

    Their names say what the actions are, so that two games whose actions have one shape and dtype
    can be told apart.

    Raises:
        UnsupportedSpaceError: `space` holds something else than ACTIONS.
    """

    def specs(canonical: gymnasium.Space, name: str) -> Any:
        if isinstance(canonical, spaces.Tuple):
            return tuple(specs(s, f"{name}/{i}") for i, s in enumerate(canonical.spaces))
        assert canonical.shape is not None
        name = f"{name}, {_choices(canonical)}"
        return ArraySpec(tuple(canonical.shape), np.dtype(canonical.dtype), name)

    return specs(canonical_action_space(space), "action")


def _choices(canonical: gymnasium.Space) -> str:
    # Not as gymnasium words it, which may change from one of its versions to the next.
    if isinstance(canonical, spaces.Discrete):
        return f"one of {int(canonical.n)}"
    if isinstance(canonical, spaces.MultiDiscrete):
        return f"of {np.asarray(canonical.nvec).tolist()} choices"
    return "from -1 to 1"


def canonical_action_space(space: gymnasium.Space) -> gymnasium.Space:
    """Returns the space in which an agent acts for an environment that has `space`.

    Raises:
        UnsupportedSpaceError: `space` holds something else than ACTIONS.
    """
    if space.shape is not None and 0 in space.shape:
        raise UnsupportedSpaceError(
            f"The action space {space} has the shape {space.shape}: there is nothing to choose. "
            "Wrap the environment to give it an action."
        )
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(np.asarray(space.nvec).ravel())
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete(np.full(int(np.prod(space.shape)), 2))
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind in "fiu":
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise UnsupportedSpaceError(
                f"The action space {space} has infinite bounds. Actions in [-1, 1] are rescaled to "
                "the bounds, so they must be finite: wrap the environment to give it some."
            )
        return spaces.Box(-1.0, 1.0, space.shape, np.float32)
    if isinstance(space, spaces.Tuple) and space.spaces:
        return spaces.Tuple([canonical_action_space(s) for s in space.spaces])
    raise UnsupportedSpaceError(
        f"The action space {space} is not supported. Supported are {ACTIONS}. Wrap the "
        "environment so that it takes one of these."
    )


class ActionTranslator:
    """Takes actions of the canonical space to the environment's own, for a whole batch.

    Args:
        space: the action space of one environment.

    Raises:
        UnsupportedSpaceError: see `canonical_action_space`.
    """

    def __init__(self, space: gymnasium.Space):
        self.canonical = canonical_action_space(space)
        self._translate = _translation(space)
        self._space = space

    def __call__(self, actions: Any, num_envs: int) -> Any:
        """Returns the environments' actions, a batch as `gymnasium.vector` wants it.

        Args:
            actions: nest like `canonical`, every array [num_envs, …].
            num_envs: the number of environments.

        Raises:
            ValueError: the actions have another structure or shape, or lie outside the space.
        """
        return self._translate(actions, num_envs)

    def split(self, translated: Any, num_envs: int) -> Iterator[Any]:
        """Yields each environment's action of what `__call__` returned."""
        return _split(self._space, translated, num_envs)


def _split(space: gymnasium.Space, batch: Any, num_envs: int) -> Iterator[Any]:
    if isinstance(space, spaces.Tuple):
        parts = [_split(s, b, num_envs) for s, b in zip(space.spaces, batch, strict=True)]
        return iter(zip(*parts, strict=True))
    if isinstance(space, spaces.Discrete):
        return iter(batch.tolist())  # plain ints: some environments accept nothing else
    return (np.array(row) for row in batch)  # of a Box without dimensions, an array all the same


def _translation(space: gymnasium.Space) -> Callable[[Any, int], Any]:
    if isinstance(space, spaces.Tuple):
        return _translate_tuple(space)
    if isinstance(space, spaces.Box):
        return _translate_box(space)
    return _translate_integers(space)


def _translate_tuple(space: spaces.Tuple) -> Callable[[Any, int], Any]:
    parts = [_translation(s) for s in space.spaces]

    def translate(actions: Any, num_envs: int) -> tuple:
        if not isinstance(actions, (tuple, list)) or len(actions) != len(parts):
            raise ValueError(f"Expected a tuple of {len(parts)} actions for {space}, got {actions}")
        return tuple(part(a, num_envs) for part, a in zip(parts, actions, strict=True))

    return translate


def _translate_box(space: spaces.Box) -> Callable[[Any, int], np.ndarray]:
    low, high = np.asarray(space.low, np.float64), np.asarray(space.high, np.float64)

    def translate(actions: Any, num_envs: int) -> np.ndarray:
        actions = _shaped(actions, (num_envs, *space.shape), space)
        share = (np.clip(actions, -1.0, 1.0).astype(np.float64) + 1.0) / 2
        # Not by way of high - low, which overflows for the widest bounds of 64 bits.
        scaled = low * (1.0 - share) + high * share
        if np.dtype(space.dtype).kind != "f":
            return _whole_numbers(scaled, space)
        # Rounding may carry a value just past a bound, which strict environments refuse.
        return np.clip(scaled.astype(space.dtype), space.low, space.high)

    return translate


def _whole_numbers(scaled: np.ndarray, space: spaces.Box) -> np.ndarray:
    """Rounds float64 [num_envs, …] to integers of the space, which lie within its bounds."""
    rounded = np.rint(scaled)
    # A 64-bit bound may have no float64 of its own, and the one above it fits no integer.
    at_low, at_high = rounded <= space.low, rounded >= space.high
    inside = np.where(at_low | at_high, 0.0, rounded).astype(space.dtype)
    return np.where(at_high, space.high, np.where(at_low, space.low, inside))


def _translate_integers(space: Any) -> Callable[[Any, int], np.ndarray]:
    """For Discrete and MultiDiscrete, which both count from `start`, and MultiBinary."""
    single = isinstance(space, spaces.Discrete)
    if isinstance(space, spaces.MultiBinary):
        counts, start = np.full(space.shape, 2), np.zeros(space.shape, np.int8)
    else:
        counts, start = np.asarray(space.n if single else space.nvec), np.asarray(space.start)
    dtype, shape = np.dtype(space.dtype), space.shape
    canonical_shape = (counts.size,) if not single else ()

    def translate(actions: Any, num_envs: int) -> np.ndarray:
        actions = _shaped(actions, (num_envs, *canonical_shape), space)
        if actions.dtype.kind not in "iu":
            raise ValueError(f"Expected integer actions for {space}, got {actions.dtype}")
        actions = actions.reshape((num_envs, *shape)).astype(dtype)
        if (actions < 0).any() or (actions >= counts).any():
            raise ValueError(f"Actions {actions} lie outside 0 … {counts - 1} of {space}")
        return actions + start.astype(dtype)

    return translate


def _shaped(actions: Any, shape: tuple[int, ...], space: gymnasium.Space) -> np.ndarray:
    array = np.asarray(actions)
    if array.shape != shape:
        raise ValueError(f"Expected actions of shape {shape} for {space}, got {array.shape}")
    return array


class ObservationLayout:
    """The arrays that observations of a space are made of, as a flat list.

    Args:
        space: the observation space of one environment.

    Raises:
        UnsupportedSpaceError: see `observation_specs`.
    """

    def __init__(self, space: gymnasium.Space):
        self._space = space
        self.specs: list[ArraySpec] = []
        self._numbering = self._number(observation_specs(space))

    def _number(self, specs: Any) -> Any:
        if isinstance(specs, dict):
            return {key: self._number(s) for key, s in specs.items()}
        if isinstance(specs, tuple):
            return tuple(self._number(s) for s in specs)
        self.specs.append(specs)
        return len(self.specs) - 1

    def nest(self, leaves: list[np.ndarray]) -> Any:
        """Returns the nest (dicts and tuples, as the space is) of `leaves`."""
        return optree.tree_map(leaves.__getitem__, self._numbering)

    def empty(self, num_envs: int) -> list[np.ndarray]:
        """Returns new uninitialised arrays [num_envs, …]."""
        return [np.empty((num_envs, *spec.shape), spec.dtype) for spec in self.specs]

    def leaves(self, observation: Any, leading: tuple[int, ...] = ()) -> list[np.ndarray]:
        """Returns the arrays of an observation, checked and safely cast to the space's dtypes.

        Args:
            observation: what the environment returned.
            leading: dimensions before those of the space, (num_envs,) for a batch.

        Raises:
            ObservationError: structure, shape or dtype do not fit.
        """
        values: list[Any] = []
        self._collect(self._numbering, observation, values)
        return [
            _fitted(value, leading + spec.shape, spec)
            for value, spec in zip(values, self.specs, strict=True)
        ]

    def _collect(self, numbering: Any, observation: Any, values: list[Any]) -> None:
        if isinstance(numbering, dict):
            if not hasattr(observation, "keys") or set(observation.keys()) != set(numbering):
                got = sorted(observation) if hasattr(observation, "keys") else type(observation)
                raise ObservationError(
                    f"Expected an observation with the keys {sorted(numbering)}, got {got}"
                )
            for key, part in numbering.items():
                self._collect(part, observation[key], values)
        elif isinstance(numbering, tuple):
            if not isinstance(observation, (tuple, list)) or len(observation) != len(numbering):
                raise ObservationError(
                    f"Expected an observation that is a tuple of {len(numbering)}, got "
                    f"{type(observation).__name__}"
                )
            for part, value in zip(numbering, observation, strict=True):
                self._collect(part, value, values)
        else:
            values.append(observation)


def _fitted(value: Any, shape: tuple[int, ...], spec: ArraySpec) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ObservationError(f"{spec.name} is not an array: {error}") from error
    if array.shape == shape and array.dtype == spec.dtype:
        return array
    complaint = (
        f"Expected {spec.name} of shape {shape} and dtype {spec.dtype}, as the observation space "
        f"says, got shape {array.shape} and dtype {array.dtype}"
    )
    if array.shape != shape:
        raise ObservationError(complaint)
    if np.can_cast(array.dtype, spec.dtype, "safe") or array.dtype.kind == spec.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what becomes infinite is found by whoever takes it
            return array.astype(spec.dtype)
    if array.dtype.kind in "iu" and spec.dtype.kind in "iu":
        cast = array.astype(spec.dtype)
        if np.array_equal(cast, array):
            return cast
        raise ObservationError(f"{complaint}, with values that do not fit")
    raise ObservationError(complaint)
