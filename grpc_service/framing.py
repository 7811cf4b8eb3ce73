"""Writes and reads the messages of the Call stream without copying their tensors.

What is written here is what protobuf would write for `CallRequest` and `CallResponse`, in ascending
order of the fields; what is read may be anything that protobuf can. protobuf itself would copy the
data three times to write it and twice to read it, which costs as much as the rest of a call does
from about 100 kB on.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from seed_rl.grpc_service import codec, errors
from seed_rl.grpc_service import service_pb2 as pb

_CALL_ID = struct.Struct("<BQ")
_REQUEST_START = struct.Struct("<BQBI")

# A tag is the number of the field and how it is encoded (1: 8 bytes, 2: by length, 5: 4 bytes).
_CALL_ID_TAG = 1 << 3 | 1
_FUNCTION_TAG = 2 << 3 | 5
_LAYOUT_TAG = 3 << 3 | 2
_PADDING_TAG = 4 << 3 | 2
_DATA_TAG = 5 << 3 | 2


class Frame:
    """All of a message but its call id and its data, for one layout.

    Args:
      layout: of the tensors.
      function: index of the function, for a request; None for a response.
    """

    def __init__(self, layout: codec.Layout, function: int | None = None):
        self.layout = layout
        start = b"" if function is None else struct.pack("<BI", _FUNCTION_TAG, function)
        start += _field(_LAYOUT_TAG, layout.serialized)
        data_start = bytes([_DATA_TAG]) + _varint(layout.num_bytes)
        # The two bytes are the padding's own tag and length.
        size = _CALL_ID.size + len(start) + 2 + len(data_start)
        self._middle = start + _field(_PADDING_TAG, bytes(-size % codec.ALIGNMENT)) + data_start

    def pack(self, call_id: int, arrays: Sequence[np.ndarray]) -> bytes:
        """The message of arrays that have the layout; copies them once."""
        start = _CALL_ID.pack(_CALL_ID_TAG, call_id)
        return b"".join((start, self._middle, *self.layout.encode(arrays)))


class Call(NamedTuple):
    """A message that was read.

    The tensors are in `buffer[start : start + size]`.
    """

    call_id: int
    function: int  # 0 in a response
    layout: bytes
    buffer: bytes
    start: int
    size: int
    error: pb.Error | None


def read_request(message: bytes) -> Call:
    """Reads a CallRequest.

    Raises:
      ProtocolError: it cannot be parsed.
    """
    if len(message) > _REQUEST_START.size and message[0] == _CALL_ID_TAG:
        _, call_id, tag, function = _REQUEST_START.unpack_from(message)
        if tag == _FUNCTION_TAG:
            found = _read_tensors(message, _REQUEST_START.size)
            if found is not None:
                return Call(call_id, function, found[0], message, found[1], found[2], None)
    try:
        parsed = pb.CallRequest.FromString(message)
    except DecodeError:
        raise errors.ProtocolError("a request cannot be parsed") from None
    data = parsed.data
    return Call(parsed.call_id, parsed.function, parsed.layout, data, 0, len(data), None)


def read_response(message: bytes) -> Call:
    """Reads a CallResponse.

    Raises:
      ProtocolError: it cannot be parsed.
    """
    if len(message) > _CALL_ID.size and message[0] == _CALL_ID_TAG:
        found = _read_tensors(message, _CALL_ID.size)
        if found is not None:
            call_id = _CALL_ID.unpack_from(message)[1]
            return Call(call_id, 0, found[0], message, found[1], found[2], None)
    try:
        parsed = pb.CallResponse.FromString(message)
    except DecodeError:
        raise errors.ProtocolError("an answer cannot be parsed") from None
    error = parsed.error if parsed.HasField("error") else None
    data = parsed.data
    return Call(parsed.call_id, 0, parsed.layout, data, 0, len(data), error)


def _read_tensors(message: bytes, position: int) -> tuple[bytes, int, int] | None:
    """(layout, start of the data, its size) if exactly what `Frame` writes is at `position`."""
    try:
        if message[position] != _LAYOUT_TAG:
            return None
        size, position = _read_varint(message, position + 1)
        layout = message[position : position + size]
        position += size
        if message[position] != _PADDING_TAG:
            return None
        size, position = _read_varint(message, position + 1)
        position += size
        if message[position] != _DATA_TAG:
            return None
        size, position = _read_varint(message, position + 1)
    except IndexError:
        return None
    return (layout, position, size) if position + size == len(message) else None


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """(value, position after it)."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, position
        shift += 7


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + _varint(len(value)) + value
