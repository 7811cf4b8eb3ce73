"""Shape and dtype of a tensor, without TensorFlow."""

import dataclasses
from typing import Any

import numpy as np

from seed_rl.grpc_service import errors


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of an array.

    Attributes:
      shape: one entry a dimension; None stands for any size.
      dtype: anything `np.dtype` takes; kept as an `np.dtype`.
      name: for the reader only.
    """

    shape: tuple[int | None, ...]
    dtype: Any
    name: str = ""

    def __post_init__(self) -> None:
        shape = tuple(None if size is None else int(size) for size in self.shape)
        if any(size is not None and size < 0 for size in shape):
            raise errors.SignatureError(f"a shape cannot have negative sizes: {list(shape)}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def __str__(self) -> str:
        return describe(self.shape, self.dtype)


def describe(shape: Any, dtype: Any) -> str:
    """For error messages: `float32[None, 84, 84]`."""
    return f"{dtype}[{', '.join(str(size) for size in shape)}]"


def to_spec(value: Any) -> TensorSpec:
    """The spec of anything with a shape and a dtype: array, tensor, `tf.TensorSpec`, `TensorSpec`.

    Raises:
      SignatureError: there is no shape and dtype, or the rank is unknown.
    """
    if isinstance(value, TensorSpec):
        return value
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise errors.SignatureError(
            f"expected something with .shape and .dtype, such as a TensorSpec, got {value!r}"
        )
    try:
        shape = tuple(value.shape)
    except (TypeError, ValueError):
        raise errors.SignatureError(
            f"the rank of {value!r} is unknown; fix it with `tf.ensure_shape`"
        ) from None
    # A tf.DType is not something np.dtype understands; as_numpy_dtype is.
    dtype = getattr(value.dtype, "as_numpy_dtype", value.dtype)
    name = getattr(value, "name", None)
    if not isinstance(name, str) or ":" in name:  # "Identity:0" is a graph's name, nobody gave it
        name = ""
    try:
        return TensorSpec(shape, dtype, name)
    except TypeError:
        raise errors.SignatureError(f"{value!r} has no numpy dtype") from None
