"""Tensors and structures to and from what travels.

A tensor travels as dtype, shape (both in a layout) and raw little-endian bytes, and is decoded
without a copy. A structure is a nest (tuples, named tuples, lists, dicts with string keys, None)
with `TensorSpec`s at its leaves. Whatever arrives is checked before it is used, and nothing is ever
unpickled.
"""

import collections
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

from seed_rl.grpc_service import errors
from seed_rl.grpc_service import service_pb2 as pb
from seed_rl.grpc_service.specs import TensorSpec

ALIGNMENT = 16  # of the bytes of each tensor
MAX_ELEMENTS = 2**48  # of one tensor
MAX_RANK = 32  # what every numpy release can hold
MAX_DEPTH = 32  # of nests; protobuf itself stops at 100 nested messages
MAX_NODES = 10_000  # of one structure
# Parsed, a message of many small parts takes dozens of times its size.
MAX_LAYOUT_BYTES = 1024 * 1024

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
_BUFFER_KINDS = frozenset("biuf")
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


class Layout:
    """Dtypes and shapes of the tensors of a call, and where their bytes are.

    Attributes:
      dtypes: one a tensor.
      shapes: one a tensor.
      num_bytes: of all tensors together, with the gaps that align them.
      serialized: the message.
    """

    def __init__(self, dtypes: Sequence[np.dtype], shapes: Sequence[tuple[int, ...]]):
        self.dtypes = tuple(dtypes)
        self.shapes = tuple(shapes)
        message = pb.Layout()
        self._places: list[tuple[tuple[int, ...], np.dtype, int]] = []  # shape, dtype, offset
        self._gaps: list[bytes] = []  # after each tensor
        self._bools: list[tuple[int, int]] = []  # (start, end) of the bytes of bool tensors
        offset = 0
        for dtype, shape in zip(dtypes, shapes, strict=True):
            message.tensors.add(dtype=dtype_code(dtype), shape=shape)
            self._places.append((shape, dtype, offset))
            end = offset + math.prod(shape) * dtype.itemsize
            if dtype == np.bool_:
                self._bools.append((offset, end))
            self._gaps.append(bytes(-end % ALIGNMENT))
            offset = end + len(self._gaps[-1])
        self.num_bytes = offset
        self.serialized = message.SerializeToString()

    def encode(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Buffers that together are the data of arrays with these dtypes and shapes."""
        buffers: list[Any] = []
        for array, gap in zip(arrays, self._gaps, strict=True):
            if not _LITTLE_ENDIAN:
                array = array.byteswap()
            # ml_dtypes have no buffer interface.
            plain = array.flags.c_contiguous and array.dtype.kind in _BUFFER_KINDS
            buffers.append(array if plain else array.tobytes())
            if gap:
                buffers.append(gap)
        return buffers

    def decode(self, data: bytes, start: int = 0) -> list[np.ndarray]:
        """Read-only views of `data[start:]`, which is at least `num_bytes` long.

        Raises:
          ProtocolError: a bool tensor holds something else.
        """
        for first, end in self._bools:
            if data[start + first : start + end].translate(None, b"\x00\x01"):
                raise errors.ProtocolError("a bool tensor holds a byte other than 0 and 1")
        arrays = [
            np.ndarray(shape, dtype, data, start + offset) for shape, dtype, offset in self._places
        ]
        return arrays if _LITTLE_ENDIAN else [array.byteswap() for array in arrays]

    @classmethod
    def parse(cls, serialized: bytes) -> "Layout":
        """Reads what another process sent.

        Raises:
          ProtocolError: not a layout, too large, an unknown dtype or an impossible shape.
        """
        if len(serialized) > MAX_LAYOUT_BYTES:
            raise errors.ProtocolError(
                f"the layout of the tensors has {len(serialized)} bytes, more than the "
                f"{MAX_LAYOUT_BYTES} that one can have"
            )
        try:
            message = pb.Layout.FromString(serialized)
        except DecodeError:
            raise errors.ProtocolError("the layout of the tensors cannot be parsed") from None
        if len(message.tensors) > MAX_NODES:
            raise errors.ProtocolError(f"more than {MAX_NODES} tensors")
        dtypes = [_decode_dtype(tensor.dtype) for tensor in message.tensors]
        shapes = [tuple(tensor.shape) for tensor in message.tensors]
        for shape in shapes:
            # Also an empty tensor has to be one that memory could index.
            size = math.prod(max(1, size) for size in shape)
            if len(shape) > MAX_RANK or min(shape, default=0) < 0 or size > MAX_ELEMENTS:
                raise errors.ProtocolError(
                    f"impossible shape {list(shape[: MAX_RANK + 1])}: at most {MAX_RANK} sizes, "
                    f"none negative, and {MAX_ELEMENTS} elements"
                )
        return cls(dtypes, shapes)


class LayoutCache:
    """What was worked out for layouts seen before, at most `capacity` of them.

    A cache of its own for everything else that the result depends on, such as the function.
    """

    def __init__(self, capacity: int = 1024):
        self._capacity = capacity
        self._known: dict[bytes, Any] = {}

    def get(self, serialized: bytes, make: Callable[[Layout], Any]) -> Any:
        """`make(Layout.parse(serialized))`, from memory where it succeeded before."""
        found = self._known.get(serialized)
        if found is None:
            layout = Layout.parse(serialized)
            found = make(layout)
            # A message can be written in many ways; those that nobody sends need no memory.
            if layout.serialized == serialized:
                if len(self._known) >= self._capacity:
                    self._known.clear()
                self._known[serialized] = found
        return found


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
    dtype = _decode_dtype(message.dtype)
    shape = tuple(message.shape)
    if len(shape) > MAX_RANK or any(size < -1 for size in shape):
        raise errors.ProtocolError(f"impossible shape {list(shape)} in a signature")
    return TensorSpec(tuple(None if size == -1 else size for size in shape), dtype, message.name)


def _decode_dtype(code: int) -> np.dtype:
    dtype = _DTYPE_OF_CODE.get(code)
    if dtype is None:
        raise errors.ProtocolError(f"unknown dtype number {code}")
    return dtype
