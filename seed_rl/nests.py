"""Nests (tuples, named tuples, lists, dicts) of arrays, without TensorFlow."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optree


def map_nest(fn: Callable, nest: Any, *rest: Any) -> Any:
    """Applies `fn` to the leaves of one or several nests of one structure."""
    return optree.tree_map(fn, nest, *rest)


def check_like(values: Any, specs: Any, prefix: tuple[int, ...], what: str) -> list[np.ndarray]:
    """Returns the leaves of `values` as arrays, after a check against `specs`.

    Args:
      values: nest of arrays or tensors.
      specs: nest of TensorSpec of the same structure.
      prefix: dimensions that every leaf must have before those of its spec.
      what: name of `values` in error messages.

    Raises:
      ValueError: the structure, a shape or a dtype differs; says where, what was expected and what
        came.
    """
    spec_leaves, treedef = optree.tree_flatten(specs)
    leaves, value_treedef = optree.tree_flatten(values)
    # A tuple or list may stand for a named tuple, but no leaf for one of another name.
    if value_treedef != treedef and optree.tree_paths(values) != optree.tree_paths(specs):
        raise ValueError(f"{what} must have the structure {treedef}, got {value_treedef}")
    arrays = [np.asarray(leaf) for leaf in leaves]
    for i, (array, spec) in enumerate(zip(arrays, spec_leaves, strict=True)):
        if array.shape != prefix + spec.shape or array.dtype != spec.dtype:
            path = optree.tree_accessors(specs)[i].codify(what)
            raise ValueError(
                f"{path} must be {spec.dtype} of shape {prefix + spec.shape}, "
                f"got {array.dtype} of shape {array.shape}"
            )
    return arrays
