import collections
import contextlib
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_rl.grpc_service import ProtocolError, SignatureError, TensorSpec, codec, framing
from seed_rl.grpc_service import service_pb2 as pb

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
    ml_dtypes.bfloat16,
]
SHAPES = [(), (0,), (1,), (3, 0, 2), (2, 3), (1, 2, 3, 4)]

Point = collections.namedtuple("Point", "x y")


def _array(dtype, shape) -> np.ndarray:
    values = np.arange(int(np.prod(shape))).reshape(shape)
    return (values % 2 if dtype == "bool" else values).astype(dtype)


def _send(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Through a message and back."""
    layout = codec.Layout([a.dtype for a in arrays], [a.shape for a in arrays])
    call = framing.read_request(framing.Frame(layout, function=3).pack(7, arrays))
    assert (call.call_id, call.function) == (7, 3)
    received = codec.Layout.parse(call.layout)
    assert received.num_bytes == call.size
    return received.decode(call.buffer, call.start)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_dtype_and_shape_survives(dtype, shape):
    sent = _array(dtype, shape)
    (got,) = _send([sent])
    assert got.dtype == sent.dtype and got.shape == sent.shape
    np.testing.assert_array_equal(got, sent)


def test_many_tensors_in_one_message():
    sent = [_array(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    for got, expected in zip(_send(sent), sent, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "array",
    [np.arange(12).reshape(3, 4).T, np.arange(12)[::-2], np.broadcast_to(np.float32(2), (3, 2))],
    ids=["transposed", "strided", "broadcast"],
)
def test_any_memory_layout(array):
    np.testing.assert_array_equal(_send([array])[0], array)


def test_bytes_are_little_endian_and_aligned():
    arrays: list[np.ndarray] = [np.array([1, -2], np.int16), np.array([1.0], np.float64)]
    layout = codec.Layout([a.dtype for a in arrays], [a.shape for a in arrays])
    message = pb.CallRequest.FromString(framing.Frame(layout, function=1).pack(2**64 - 1, arrays))
    assert (message.call_id, message.function) == (2**64 - 1, 1)
    assert message.data == struct.pack("<hh12xd8x", 1, -2, 1.0)
    (first, second) = pb.Layout.FromString(message.layout).tensors
    assert (first.dtype, list(first.shape)) == (pb.INT16, [2])
    assert (second.dtype, list(second.shape)) == (pb.FLOAT64, [1])


def test_decoding_copies_nothing_and_is_aligned():
    arrays: list[np.ndarray] = [np.zeros(3, np.uint8), np.zeros((5, 7), np.float64)]
    layout = codec.Layout([a.dtype for a in arrays], [a.shape for a in arrays])
    message = framing.Frame(layout, function=0).pack(1, arrays)
    call = framing.read_request(message)
    assert call.buffer is message
    whole = np.frombuffer(message, np.uint8)
    for array in layout.decode(call.buffer, call.start):
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable
        assert array.ctypes.data % 16 == 0


def test_a_message_in_another_order_of_fields_is_read():
    array = np.arange(4, dtype=np.float32)
    layout = codec.Layout([array.dtype], [array.shape])
    parts = [
        pb.CallRequest(data=array.tobytes()),
        pb.CallRequest(layout=layout.serialized, function=2),
        pb.CallRequest(call_id=9),
    ]
    call = framing.read_request(b"".join(part.SerializeToString() for part in parts))
    assert (call.call_id, call.function, call.size) == (9, 2, 16)
    np.testing.assert_array_equal(layout.decode(call.buffer, call.start)[0], array)


def test_responses_carry_tensors_or_an_error():
    array = np.array([True, False])
    layout = codec.Layout([array.dtype], [array.shape])
    call = framing.read_response(framing.Frame(layout).pack(5, [array]))
    assert call.call_id == 5 and call.error is None
    np.testing.assert_array_equal(layout.decode(call.buffer, call.start)[0], array)
    error = pb.CallResponse(call_id=6, error=pb.Error(kind=pb.Error.CANCELLED, message="no"))
    call = framing.read_response(error.SerializeToString())
    assert call.call_id == 6 and call.error.message == "no"


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_garbage_is_a_protocol_error_or_nothing(garbage):
    for read in (framing.read_request, framing.read_response, codec.Layout.parse):
        with contextlib.suppress(ProtocolError):
            read(garbage)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_message_is_a_protocol_error_or_nothing(data):
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    layout = codec.Layout([array.dtype], [array.shape])
    message = bytearray(framing.Frame(layout, function=1).pack(300, [array]))
    index = data.draw(st.integers(0, len(message) - 1))
    message[index] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        call = framing.read_request(bytes(message[: data.draw(st.integers(0, len(message)))]))
        received = codec.Layout.parse(call.layout)
        if received.num_bytes == call.size:
            received.decode(call.buffer, call.start)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ({"dtype": pb.INT8, "shape": [-1]}, "impossible shape"),
        ({"dtype": pb.INT8, "shape": [2**40, 2**40]}, "impossible shape"),
        ({"dtype": pb.INT8, "shape": [0, 2**62]}, "impossible shape"),
        ({"dtype": pb.INT8, "shape": [1] * 33}, "impossible shape"),
        ({"dtype": 0, "shape": []}, "unknown dtype number 0"),
        ({"dtype": 99, "shape": []}, "unknown dtype number 99"),
    ],
)
def test_impossible_layouts(tensor, text):
    layout = pb.Layout(tensors=[pb.Layout.Tensor(**tensor)])
    with pytest.raises(ProtocolError, match=text):
        codec.Layout.parse(layout.SerializeToString())


def test_a_bool_is_zero_or_one():
    layout = codec.Layout([np.dtype(bool)], [(2,)])
    with pytest.raises(ProtocolError, match="bool"):
        layout.decode(b"\x01\x02")


def test_a_dtype_that_does_not_travel():
    with pytest.raises(SignatureError, match="complex64 cannot be sent"):
        codec.Layout([np.dtype(np.complex64)], [()])
    with pytest.raises(SignatureError, match="object"):
        codec.encode_structure(TensorSpec((), object))


STRUCTURES = [
    (),
    None,
    TensorSpec((None, 3), np.uint8, "frame"),
    (TensorSpec((), bool), [TensorSpec((0,), np.int64), None], {}),
    {"b": [], "a": {"c": TensorSpec((2,), ml_dtypes.bfloat16)}},
    Point(TensorSpec((), np.float16), Point(None, ())),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_structures_survive(structure):
    message = codec.encode_structure(structure)
    received = codec.decode_structure(pb.Structure.FromString(message.SerializeToString()))
    assert received == structure
    assert type(received) is type(structure) or isinstance(structure, Point)


def test_named_tuples_keep_name_and_fields():
    received = codec.decode_structure(codec.encode_structure(STRUCTURES[-1]))
    assert type(received).__name__ == "Point"
    assert received._fields == ("x", "y")
    assert type(received) is type(received.y)


def _deep(depth: int):
    return [_deep(depth - 1)] if depth else TensorSpec((), np.int8)


def test_depth_is_limited():
    codec.decode_structure(codec.encode_structure(_deep(codec.MAX_DEPTH)))
    with pytest.raises(SignatureError, match="deep"):
        codec.encode_structure(_deep(codec.MAX_DEPTH + 1))
    message = pb.Structure()
    inner = message
    for _ in range(codec.MAX_DEPTH + 1):
        inner = inner.list.items.add()
    inner.none.SetInParent()
    with pytest.raises(ProtocolError, match="deep"):
        codec.decode_structure(message)


def test_malformed_structures():
    field = pb.Structure.Field
    none = pb.Structure()
    none.none.SetInParent()
    bad = [
        pb.Structure(),
        pb.Structure(dict=pb.Structure.Dict(items=[field(name="a", value=none)] * 2)),
        pb.Structure(
            named_tuple=pb.Structure.NamedTuple(name="A", fields=[field(name="_a", value=none)])
        ),
        pb.Structure(named_tuple=pb.Structure.NamedTuple(name="not one")),
        pb.Structure(tensor=pb.TensorSpec(dtype=pb.INT8, shape=[-2])),
        pb.Structure(tensor=pb.TensorSpec(dtype=77)),
    ]
    for message in bad:
        with pytest.raises(ProtocolError):
            codec.decode_structure(message)


def test_the_layout_cache_forgets():
    cache = codec.LayoutCache(capacity=2)
    made = []

    def make(layout):
        made.append(layout.shapes)
        return layout

    layouts = [codec.Layout([np.dtype(bool)], [(n,)]).serialized for n in range(3)]
    for serialized in [layouts[0], layouts[0], layouts[1], layouts[2], layouts[0]]:
        cache.get(serialized, make)
    assert made == [((0,),), ((1,),), ((2,),), ((0,),)]
