"""Tensors and structures to and from their messages.

A tensor travels as dtype, shape and raw little-endian bytes, and is decoded without a copy. A
structure is a nest (tuples, named tuples, lists, dicts with string keys, None) with `TensorSpec`s
at its leaves. Whatever arrives is checked before it is used, and nothing is ever unpickled.
"""

import collections
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from seed_rl.grpc_service import errors
from seed_rl.grpc_service import service_pb2 as pb
from seed_rl.grpc_service.specs import TensorSpec

MAX_RANK = 32  # what every numpy release can hold
MAX_DEPTH = 32  # of nests; protobuf itself stops at 100 nested messages
MAX_NODES = 10_000  # of one structure

_DTYPE_OF_CODE: dict[int, np.dtype] = {
    pb.BOOL: np.dtype(np.bool_),
    pb.INT8: np.dtype(np.int8),
    pb.INT16: np.dtype(np.int16),
    pb.INT32: np.dtype(np.int32),
    pb.INT64: np.dtype(np.int64),
    pb.UINT8: np.dtype(np.uint8),
    pb.UINT16: np.dtype(np.uint16),
    pb.UINT32: np.dtype(np.uint32),
    pb.UINT64: np.dtype(np.uint64),
    pb.FLOAT16: np.dtype(np.float16),
    pb.FLOAT32: np.dtype(np.float32),
    pb.FLOAT64: np.dtype(np.float64),
    pb.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
_LITTLE_ENDIAN = sys.byteorder == "little"


def dtype_code(dtype: np.dtype) -> int:
    """The wire's number for a dtype.

    Raises:
      SignatureError: the dtype does not travel.
    """
    code = _CODE_OF_DTYPE.get(dtype)
    if code is None:
        known = ", ".join(str(known) for known in _CODE_OF_DTYPE)
        raise errors.SignatureError(f"dtype {dtype} cannot be sent; these can: {known}")
    return code


def encode_tensor(array: np.ndarray) -> pb.Tensor:
    """The message of an array in native byte order, in any memory layout.

    Raises:
      SignatureError: the dtype does not travel.
    """
    code = dtype_code(array.dtype)
    data = array.tobytes() if _LITTLE_ENDIAN else array.byteswap().tobytes()
    return pb.Tensor(dtype=code, shape=array.shape, data=data)


def decode_tensor(message: pb.Tensor) -> np.ndarray:
    """A read-only view of the message's bytes.

    Raises:
      ProtocolError: unknown dtype, impossible shape, or bytes that do not fill the shape exactly.
    """
    dtype = _DTYPE_OF_CODE.get(message.dtype)
    if dtype is None:
        raise errors.ProtocolError(f"unknown dtype number {message.dtype}")
    shape = tuple(message.shape)
    if len(shape) > MAX_RANK or (shape and min(shape) < 0):
        raise errors.ProtocolError(
            f"impossible shape {list(shape[: MAX_RANK + 1])}: sizes are at least 0, rank at most "
            f"{MAX_RANK}"
        )
    data = message.data
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != len(data):
        raise errors.ProtocolError(
            f"a tensor {dtype}{list(shape)} has {num_bytes} bytes, got {len(data)}"
        )
    if dtype == np.bool_ and data.translate(None, b"\x00\x01"):
        raise errors.ProtocolError("a bool tensor holds a byte other than 0 and 1")
    try:
        array = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
        array = array.reshape(shape)
    except ValueError as error:  # an empty tensor with a dimension beyond what memory can index
        raise errors.ProtocolError(f"impossible shape {list(shape)}: {error}") from None
    if not _LITTLE_ENDIAN:
        array = array.byteswap()
    return array


def decode_tensors(messages: Iterable[pb.Tensor]) -> list[np.ndarray]:
    """`decode_tensor` of each."""
    return [decode_tensor(message) for message in messages]


def encode_structure(structure: Any, depth: int = 0) -> pb.Structure:
    """The message of a nest of `TensorSpec`s.

    Raises:
      SignatureError: a dtype, a key or a depth that does not travel.
    """
    if depth > MAX_DEPTH:
        raise errors.SignatureError(f"a structure is nested more than {MAX_DEPTH} deep")
    message = pb.Structure()
    if structure is None:
        message.none.SetInParent()
    elif isinstance(structure, TensorSpec):
        message.tensor.dtype = dtype_code(structure.dtype)
        message.tensor.shape.extend(-1 if size is None else size for size in structure.shape)
        message.tensor.name = structure.name
    elif isinstance(structure, Mapping):
        message.dict.SetInParent()
        for key in sorted(structure):
            value = encode_structure(structure[key], depth + 1)
            message.dict.items.add(name=key, value=value)
    elif is_named_tuple(structure):
        message.named_tuple.name = type(structure).__name__
        for name, item in zip(structure._fields, structure, strict=True):
            value = encode_structure(item, depth + 1)
            message.named_tuple.fields.add(name=name, value=value)
    elif isinstance(structure, tuple | list):
        sequence = message.tuple if isinstance(structure, tuple) else message.list
        sequence.SetInParent()
        sequence.items.extend(encode_structure(item, depth + 1) for item in structure)
    else:
        raise errors.SignatureError(f"not a nest of TensorSpecs: {structure!r}")
    return message


def decode_structure(message: pb.Structure) -> Any:
    """The nest of `TensorSpec`s; named tuples get a new class with the same name and fields.

    Raises:
      ProtocolError: not a structure that `encode_structure` makes, too deep or too large.
    """
    return _StructureDecoder().decode(message, 0)


def is_named_tuple(value: Any) -> bool:
    """Whether `value` is an instance of a named tuple class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


class _StructureDecoder:
    def __init__(self) -> None:
        self._num_nodes = 0
        # Equal named tuples of one structure share a class, as they did on the other side.
        self._classes: dict[tuple[str, ...], Any] = {}

    def decode(self, message: pb.Structure, depth: int) -> Any:
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise errors.ProtocolError(
                f"a structure is nested more than {MAX_DEPTH} deep or has over {MAX_NODES} parts"
            )
        kind = message.WhichOneof("kind")
        if kind == "none":
            return None
        if kind == "tensor":
            return _decode_spec(message.tensor)
        if kind == "tuple":
            return tuple(self.decode(item, depth + 1) for item in message.tuple.items)
        if kind == "list":
            return [self.decode(item, depth + 1) for item in message.list.items]
        if kind == "named_tuple":
            fields = message.named_tuple.fields
            cls = self._named_tuple_class(message.named_tuple.name, [f.name for f in fields])
            return cls(*(self.decode(field.value, depth + 1) for field in fields))
        if kind == "dict":
            items = message.dict.items
            decoded = {item.name: self.decode(item.value, depth + 1) for item in items}
            if len(decoded) != len(items):
                raise errors.ProtocolError("a dict in a structure repeats a key")
            return decoded
        raise errors.ProtocolError("a structure has a part of unknown kind")

    def _named_tuple_class(self, name: str, fields: Sequence[str]) -> Any:
        key = (name, *fields)
        if key not in self._classes:
            try:
                self._classes[key] = collections.namedtuple(name, fields)
            except ValueError as error:
                raise errors.ProtocolError(f"not a named tuple: {error}") from None
        return self._classes[key]


def _decode_spec(message: pb.TensorSpec) -> TensorSpec:
    dtype = _DTYPE_OF_CODE.get(message.dtype)
    if dtype is None:
        raise errors.ProtocolError(f"unknown dtype number {message.dtype}")
    shape = tuple(message.shape)
    if len(shape) > MAX_RANK or any(size < -1 for size in shape):
        raise errors.ProtocolError(f"impossible shape {list(shape)} in a signature")
    return TensorSpec(tuple(None if size == -1 else size for size in shape), dtype, message.name)
