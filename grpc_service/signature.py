"""Checks that values fit the nest of specs that a function takes or returns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree

from seed_rl.grpc_service import codec, errors
from seed_rl.grpc_service.specs import TensorSpec, describe, to_spec

_MAX_KNOWN_TREES = 64


class Signature:
    """A nest of `TensorSpec`s, and values checked against it.

    Leaves are in the order of optree: depth first, dict keys sorted.

    Attributes:
      structure: the nest, with `TensorSpec`s at its leaves.
      specs: the leaves.
      paths: for each leaf, where it is, for example "[0].observation['image']".
    """

    def __init__(self, structure: Any):
        """Takes a nest of anything `to_spec` accepts; errors name the place in it."""
        self.structure = _to_specs(structure, "", 0)
        leaves, self._tree = optree.tree_flatten(self.structure)
        self.specs: tuple[TensorSpec, ...] = tuple(leaves)
        self.paths: list[str] = []
        _walk(self.structure, self.structure, "", [], self.paths)
        # Trees of values that are known to fit although their classes differ, as a named tuple that
        # was sent over the wire does.
        self._known_trees = {self._tree}

    def flatten(self, value: Any, what: str) -> list[Any]:
        """The leaves of a nest of this structure, unchecked themselves.

        Raises:
          SignatureError: the structure differs; `what` says whose it is.
        """
        leaves, tree = optree.tree_flatten(value)
        if tree in self._known_trees:
            return leaves
        walked: list[Any] = []
        try:
            _walk(self.structure, value, "", walked, [])
        except errors.SignatureError as error:
            raise errors.SignatureError(f"{what}{error}") from None
        same_order = len(walked) == len(leaves) and all(
            a is b for a, b in zip(walked, leaves, strict=True)
        )
        if same_order and len(self._known_trees) < _MAX_KNOWN_TREES:
            self._known_trees.add(tree)
        return walked

    def unflatten(self, leaves: list[Any]) -> Any:
        """The nest with these leaves."""
        return optree.tree_unflatten(self._tree, leaves)

    def __str__(self) -> str:
        return _describe_nest(self.structure)


def to_array(value: Any, dtype: np.dtype, where: str) -> np.ndarray:
    """`value` as an array of exactly `dtype`, in native byte order.

    A Python scalar is taken where it loses nothing (bool as bool; int as any int it fits in or as a
    float; float as a float); anything else must have the dtype already.

    Raises:
      SignatureError: another dtype, or not an array at all.
    """
    if type(value) is np.ndarray and value.dtype == dtype:
        return value
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        return _scalar_to_array(value, dtype, where)
    try:
        array = np.asarray(value)
    except Exception as error:
        raise errors.SignatureError(f"{where}: not an array: {error}") from None
    if array.dtype.newbyteorder("=") != dtype:
        raise errors.SignatureError(
            f"{where}: expected dtype {dtype}, got {describe(array.shape, array.dtype)}"
        )
    return array.astype(dtype, copy=False)


def fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Whether a shape is one that `expected` (None: any size) allows."""
    return shape == expected or (
        len(shape) == len(expected)
        and all(b is None or a == b for a, b in zip(shape, expected, strict=True))
    )


def _scalar_to_array(value: bool | int | float, dtype: np.dtype, where: str) -> np.ndarray:
    is_float = dtype.kind == "f" or dtype.name == "bfloat16"
    if isinstance(value, bool):
        allowed = dtype.kind == "b"
    elif isinstance(value, int):
        in_range = dtype.kind in "iu" and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
        allowed = is_float or in_range
    else:
        allowed = is_float
    if not allowed:
        raise errors.SignatureError(
            f"{where}: expected dtype {dtype}, got the Python {type(value).__name__} {value!r}"
        )
    return np.asarray(value, dtype)


def _to_specs(nest: Any, path: str, depth: int) -> Any:
    """The same nest with `TensorSpec`s, and plain dicts, lists and tuples for their subclasses."""
    if depth > codec.MAX_DEPTH:
        raise errors.SignatureError(f"a signature is nested more than {codec.MAX_DEPTH} deep")
    if nest is None:
        return None
    if isinstance(nest, TensorSpec):
        codec.dtype_code(nest.dtype)
        return nest
    if isinstance(nest, Mapping):
        for key in nest:
            if not isinstance(key, str):
                raise errors.SignatureError(
                    f"signature{path}: dict keys must be strings, got {key!r}"
                )
        return {key: _to_specs(nest[key], f"{path}[{key!r}]", depth + 1) for key in sorted(nest)}
    if codec.is_named_tuple(nest):
        items = zip(nest._fields, nest, strict=True)
        return type(nest)(*(_to_specs(item, f"{path}.{name}", depth + 1) for name, item in items))
    # A TensorShape or a shape given by mistake must not look like a nest of sizes.
    if isinstance(nest, tuple | list):
        specs = [_to_specs(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(nest)]
        return specs if isinstance(nest, list) else tuple(specs)
    try:
        spec = to_spec(nest)
        codec.dtype_code(spec.dtype)
    except errors.SignatureError as error:
        raise errors.SignatureError(f"signature{path}: {error}") from None
    return spec


def _walk(structure: Any, value: Any, path: str, leaves: list[Any], paths: list[str]) -> None:
    """Appends the leaves of `value` and where they are; raises where it is unlike `structure`."""
    if isinstance(structure, TensorSpec):
        if isinstance(value, Mapping | list | tuple) or value is None:
            raise _mismatch(structure, value, path)
        leaves.append(value)
        paths.append(path)
    elif structure is None:
        if value is not None:
            raise _mismatch(structure, value, path)
    elif isinstance(structure, dict):
        if not isinstance(value, Mapping) or set(value) != set(structure):
            raise _mismatch(structure, value, path)
        for key in sorted(structure):
            _walk(structure[key], value[key], f"{path}[{key!r}]", leaves, paths)
    elif codec.is_named_tuple(structure):
        if not codec.is_named_tuple(value) or value._fields != structure._fields:
            raise _mismatch(structure, value, path)
        for name, part, item in zip(structure._fields, structure, value, strict=True):
            _walk(part, item, f"{path}.{name}", leaves, paths)
    else:
        kind = list if isinstance(structure, list) else tuple
        same_kind = isinstance(value, kind) and not codec.is_named_tuple(value)
        if not same_kind or len(value) != len(structure):
            raise _mismatch(structure, value, path)
        for index, (part, item) in enumerate(zip(structure, value, strict=True)):
            _walk(part, item, f"{path}[{index}]", leaves, paths)


def _mismatch(structure: Any, value: Any, path: str) -> errors.SignatureError:
    return errors.SignatureError(
        f"{path}: expected {_describe_nest(structure)}, got {_describe_nest(value)}"
    )


def _describe_nest(nest: Any) -> str:
    if isinstance(nest, Mapping):
        items = ", ".join(f"{key!r}: {_describe_nest(nest[key])}" for key in nest)
        return f"{{{items}}}"
    if codec.is_named_tuple(nest):
        pairs = zip(nest._fields, nest, strict=True)
        fields = ", ".join(f"{name}={_describe_nest(item)}" for name, item in pairs)
        return f"{type(nest).__name__}({fields})"
    if isinstance(nest, tuple | list):
        items = ", ".join(_describe_nest(item) for item in nest)
        return f"[{items}]" if isinstance(nest, list) else f"({items})"
    if isinstance(nest, TensorSpec):
        return str(nest)
    if hasattr(nest, "shape") and hasattr(nest, "dtype"):
        return describe(nest.shape, nest.dtype)
    return f"the {type(nest).__name__} {nest!r:.80}" if nest is not None else "None"
