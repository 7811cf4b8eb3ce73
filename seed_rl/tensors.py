"""Reshaping whole nests of tensors: time and batch dimensions."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def batch_apply(fn: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Applies a function of batches to inputs that lead with time *and* batch.

    Args:
      fn: takes as many arguments as `inputs` has elements; their tensors are [T * B, ...]. It
        returns a nest of tensors [T * B, ...].
      inputs: a sequence of nests of tensors [T, B, ...], all with the same T and B.

    Returns:
      The nest that `fn` returned, its tensors unfolded to [T, B, ...].

    Raises:
      ValueError: there is no input tensor, or one that has fewer than two dimensions, or the
        inputs disagree on [T, B].
    """
    tensors = [tf.convert_to_tensor(x) for x in tf.nest.flatten(tuple(inputs))]
    if not tensors:
        raise ValueError("batch_apply needs at least one input tensor to know [T, B] from.")
    for tensor in tensors:
        if tensor.shape.rank is not None and tensor.shape.rank < 2:
            raise ValueError(
                f"batch_apply needs inputs [T, B, ...]; one of them has shape {tensor.shape}."
            )
        if not tensor.shape[:2].is_compatible_with(tensors[0].shape[:2]):
            raise ValueError(
                "batch_apply needs inputs that agree on [T, B]; got "
                f"{tensors[0].shape[:2]} and {tensor.shape[:2]}."
            )
    time, batch = dimensions(tensors[0], 2)
    folded = [tf.reshape(x, [time * batch, *dimensions(x)[2:]]) for x in tensors]
    results = fn(*tf.nest.pack_sequence_as(tuple(inputs), folded))
    return tf.nest.map_structure(
        lambda x: tf.reshape(x, [time, batch, *dimensions(tf.convert_to_tensor(x))[1:]]), results
    )


def make_time_major(x: Any) -> Any:
    """Swaps the first two dimensions of every tensor of a nest, [B, T, ...] to [T, B, ...].

    Its own inverse. Tensors with fewer than two dimensions pass through unchanged.
    """

    def swap(tensor: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        rank = tensor.shape.rank
        if rank is None:
            raise ValueError("make_time_major needs tensors of known rank.")
        return tensor if rank < 2 else tf.transpose(tensor, [1, 0, *range(2, rank)])

    return tf.nest.map_structure(swap, x)


def split_structure(structure: Any, prefix_length: int, axis: int = 0) -> tuple[Any, Any]:
    """Cuts every tensor of a nest in two along one axis.

    Args:
      structure: a nest of tensors that are at least `prefix_length` long along `axis`.
      prefix_length: how many elements go to the first part; 0 is allowed.
      axis: the axis to cut.

    Returns:
      Two nests like `structure`: the first `prefix_length` elements, and the rest.

    Raises:
      ValueError: a tensor is shorter than `prefix_length`, or has no such axis.
    """

    def split(tensor: Any) -> tuple[tf.Tensor, tf.Tensor]:
        tensor = tf.convert_to_tensor(tensor)
        rank = tensor.shape.rank
        if rank is not None and not -rank <= axis < rank:
            raise ValueError(f"Cannot split a tensor of shape {tensor.shape} along axis {axis}.")
        length = dimensions(tensor)[axis]
        if isinstance(length, int) and not 0 <= prefix_length <= length:
            raise ValueError(
                f"Cannot take a prefix of {prefix_length} elements along axis {axis} of a tensor "
                f"of shape {tensor.shape}."
            )
        return tuple(tf.split(tensor, [prefix_length, length - prefix_length], axis))

    pairs = [split(x) for x in tf.nest.flatten(structure)]
    prefix, suffix = ([pair[i] for pair in pairs] for i in range(2))
    return (
        tf.nest.pack_sequence_as(structure, prefix),
        tf.nest.pack_sequence_as(structure, suffix),
    )


def dimensions(tensor: tf.Tensor, number: int | None = None) -> list[Any]:
    """The first `number` dimensions (all by default) of a tensor of known rank.

    Each is an int where it is known statically, else a scalar tensor: reshaping to static sizes
    keeps them visible to XLA and to shape checks further on.
    """
    dynamic = tf.shape(tensor)
    static = tensor.shape.as_list()[:number]
    return [dynamic[i] if size is None else size for i, size in enumerate(static)]
