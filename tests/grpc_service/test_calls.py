"""Values there and back over real sockets; wrong ones are refused with their place."""

import collections
import threading
from typing import Any

import grpc
import numpy as np
import pytest

from seed_rl.grpc_service import (
    Client,
    MessageTooLargeError,
    RemoteFunctionError,
    SignatureError,
    TensorSpec,
    UnknownFunctionError,
    codec,
    framing,
    protocol,
)
from seed_rl.grpc_service import service_pb2 as pb

State = collections.namedtuple("State", "position velocity")
INPUTS = (
    TensorSpec((None,), np.int32),
    State(TensorSpec((None, 2), np.float32), {"x": TensorSpec((None,), bool)}),
)
OUTPUTS = {"sum": TensorSpec((None,), np.float32), "state": State(*INPUTS[1])}


def step(scale, state):
    total = state.position.sum(axis=1) * scale
    return {"sum": total.astype(np.float32), "state": state}


@pytest.fixture
def client(make_server, connect):
    server = make_server(num_environments=12, metadata={"task": "Pong"}, max_batch_wait=0)
    server.bind(step, input_signature=INPUTS, output_signature=OUTPUTS, max_batch_size=8)
    server.bind(
        lambda x: (x[1:], np.int64(x.size)),
        name="tail",
        input_signature=(TensorSpec((None,), np.uint8),),
        output_signature=(TensorSpec((None,), np.uint8), TensorSpec((), np.int64)),
    )
    server.start()
    return connect()


def test_the_handshake_tells_everything(client):
    assert client.num_environments == 12
    assert client.metadata == {"task": "Pong"}
    assert list(client.functions) == ["step", "tail"]
    info = client.functions["step"]
    assert info.input_signature == INPUTS
    assert info.output_signature == OUTPUTS
    assert type(info.input_signature[1]).__name__ == "State"
    assert info.batched and info.max_batch_size == 8
    assert not client.functions["tail"].batched
    assert {"step", "tail"} <= set(dir(client))


def test_one_row(client):
    result = client.step(3, State(np.array([1, 2], np.float32), {"x": True}))
    assert result["sum"].shape == () and result["sum"] == 9.0
    np.testing.assert_array_equal(result["state"].position, [1, 2])
    assert result["state"].velocity["x"].dtype == bool
    assert result["state"]._fields == ("position", "velocity")


def test_several_rows(client):
    position = np.arange(6, dtype=np.float32).reshape(3, 2)
    x = np.array([True, False, True])
    result = client.step(np.array([1, 2, 3], np.int32), State(position, {"x": x}))
    np.testing.assert_array_equal(result["sum"], [1, 10, 27])
    np.testing.assert_array_equal(result["state"].position, position)
    np.testing.assert_array_equal(result["state"].velocity["x"], x)


def test_one_row_with_its_dimension_keeps_it(client):
    state = State(np.ones((1, 2), np.float32), {"x": np.zeros(1, bool)})
    assert client.step(np.ones(1, np.int32), state)["sum"].shape == (1,)


def test_unbatched_calls_of_any_size(client):
    for size in (1, 5, 3):
        tail, count = client.tail(np.arange(size, dtype=np.uint8))
        np.testing.assert_array_equal(tail, np.arange(1, size))
        assert count == size and count.dtype == np.int64 and count.shape == ()
    tail, count = client.tail(np.empty(0, np.uint8))
    assert tail.shape == (0,) and count == 0


GOOD = State(np.ones((2, 2), np.float32), {"x": np.zeros(2, bool)})


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "expected 2 arguments .*, got 0"),
        ((np.ones(2, np.int64), GOOD), r"argument \[0\]: expected dtype int32, got int64\[2\]"),
        ((np.ones(2, np.int32), (1, 2)), r"argument \[1\]: expected State\("),
        (
            (np.ones(2, np.int32), GOOD._replace(position=np.ones((2, 3), np.float32))),
            r"argument \[1\].position: expected float32\[2, 2\].*, got float32\[2, 3\]",
        ),
        (
            (np.ones(2, np.int32), GOOD._replace(velocity={"x": np.zeros(3, bool)})),
            r"argument \[1\].velocity\['x'\]: expected bool\[2\].*, got bool\[3\]",
        ),
        (
            (1, GOOD),
            r"argument \[1\].position: expected float32\[2\] for one row.*, got float32\[2, 2",
        ),
        ((np.ones((2, 1), np.int32), GOOD), r"\[0\]: expected int32\[\] for one row or int32\[n\]"),
        (
            (np.ones(9, np.int32), State(np.ones((9, 2), np.float32), {"x": np.zeros(9, bool)})),
            "brings 1 to 8 rows, got 9",
        ),
        (
            (np.ones(0, np.int32), State(np.ones((0, 2), np.float32), {"x": np.zeros(0, bool)})),
            "brings 1 to 8 rows, got 0",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_the_client(client, args, text):
    for _ in range(2):
        with pytest.raises(SignatureError, match=f"^step: .*{text}"):
            client.step(*args)


def test_unknown_function(client):
    with pytest.raises(UnknownFunctionError, match="no function 'jump'; it has: step, tail"):
        client.jump(1)
    assert not hasattr(client, "jump")


class RawClient:
    """Sends what a client never would, on a stream of its own."""

    def __init__(self, target: str):
        self._channel = grpc.insecure_channel(target)
        self._requests: list[bytes] = []

    def send(self, *messages: bytes) -> list[framing.Call]:
        stream = self._channel.stream_stream(protocol.CALL_METHOD, None, None)
        return [framing.read_response(answer) for answer in stream(iter(messages), timeout=30)]

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def raw(client, address, stack):
    made = RawClient(address)
    stack.callback(made.close)
    return made


def _request(arrays, function=0, call_id=1, **fields) -> bytes:
    layout = codec.Layout([a.dtype for a in arrays], [a.shape for a in arrays])
    data = b"".join(bytes(buffer) for buffer in layout.encode(arrays))
    given = {"layout": layout.serialized, "data": data, **fields}
    return pb.CallRequest(call_id=call_id, function=function, **given).SerializeToString()


def _row(num_rows=1, scale=np.int32, width=2):
    # In the order of the signature's leaves.
    return [
        np.ones(num_rows, scale),
        np.ones((num_rows, width), np.float32),
        np.zeros(num_rows, bool),
    ]


@pytest.mark.parametrize(
    ("request_bytes", "kind", "text"),
    [
        (_request(_row(), function=9), pb.Error.UNKNOWN_FUNCTION, "no function number 9; it has 2"),
        (_request(_row()[:2]), pb.Error.SIGNATURE, "expected 3 tensors, got 2"),
        (
            _request(_row(scale=np.int64)),
            pb.Error.SIGNATURE,
            "[0]: expected int32[1], got int64[1]",
        ),
        (_request(_row(width=3)), pb.Error.SIGNATURE, "[1].position: expected float32[1, 2], got"),
        (_request(_row(9)), pb.Error.SIGNATURE, "1 to 8 rows, got 9"),
        (_request(_row(0)), pb.Error.SIGNATURE, "1 to 8 rows, got 0"),
        (_request([np.int32(1), *_row()[1:]]), pb.Error.SIGNATURE, "1 to 8 rows, got 0"),
        (_request(_row(), data=b"123"), pb.Error.PROTOCOL, "have 48 bytes, got 3"),
        (_request(_row(), layout=b"\xff"), pb.Error.PROTOCOL, "layout"),
        (_request(_row(), data=b"\xff" * 48), pb.Error.PROTOCOL, "bool"),
    ],
)
def test_the_server_checks_by_itself(client, raw, request_bytes, kind, text):
    good = _request(_row(), call_id=2)
    answers = {answer.call_id: answer for answer in raw.send(request_bytes, good)}
    assert answers[1].error.kind == kind
    assert text in answers[1].error.message
    assert answers[2].error is None
    assert client.step(1, State(np.ones(2, np.float32), {"x": False}))["sum"] == 2.0


def test_garbage_ends_the_stream_it_came_on_only(client, raw):
    with pytest.raises(grpc.RpcError) as caught:
        raw.send(b"\xff garbage")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be parsed" in str(caught.value.details())
    assert client.step(1, State(np.ones(2, np.float32), {"x": False}))["sum"] == 2.0


def test_a_call_id_in_use(make_server, address, stack, gate, floats):
    server = make_server()
    server.bind(gate, name="f", input_signature=(floats(),), output_signature=floats())
    server.start()
    raw = RawClient(address)
    stack.callback(raw.close)
    with pytest.raises(grpc.RpcError) as caught:
        raw.send(_request([np.float32(1)]), _request([np.float32(1)]))
    assert "call id 1 is in use" in str(caught.value.details())
    gate.release()


def test_messages_too_large_on_either_side(make_server, connect):
    server = make_server(max_message_bytes=10_000)
    server.bind(
        lambda n: np.zeros(n, np.uint8),
        name="zeros",
        input_signature=(TensorSpec((), np.int32),),
        output_signature=TensorSpec((None,), np.uint8),
    )
    server.bind(lambda x: None, name="take", input_signature=(TensorSpec((None,), np.uint8),))
    server.start()
    client, small = connect(), connect(max_message_bytes=5_000)
    with pytest.raises(MessageTooLargeError, match=r"take: the request has 2\d{4} bytes.* 10000"):
        client.take(np.zeros(20_000, np.uint8))
    with pytest.raises(MessageTooLargeError, match=r"zeros: the answer has 2\d{4} bytes.* 10000"):
        client.zeros(20_000)
    with pytest.raises(MessageTooLargeError, match=r"zeros: the answer has 6\d{3} bytes.* 5000"):
        small.zeros(6_000)
    assert client.take(np.zeros(9_000, np.uint8)) is None
    assert client.zeros(9_000).shape == (9_000,)
    assert small.zeros(4_000).shape == (4_000,)


@pytest.mark.parametrize("is_answer", [False, True])
def test_only_a_failure_is_logged(make_server, connect, floats, caplog, is_answer):
    kind = type("Finished", (Exception,), {"is_answer": is_answer})

    def finish(x):
        raise kind("enough")

    server = make_server()
    server.bind(finish, input_signature=(floats(),), output_signature=floats())
    server.start()
    with pytest.raises(RemoteFunctionError, match="enough"):
        connect().finish(1.0)
    assert any("finish raised" in record.message for record in caplog.records) != is_answer


def test_an_exception_in_the_function_reaches_its_caller(make_server, connect, floats, caplog):
    def root(x):
        if x < 0:
            raise ValueError(f"{x} is negative")
        return np.sqrt(x)

    server = make_server()
    server.bind(root, input_signature=(floats(),), output_signature=floats())
    server.start()
    client = connect()
    with pytest.raises(RemoteFunctionError, match=r"^ValueError: -1.0 is negative$") as caught:
        client.root(-1.0)
    assert caught.value.exception_type == "ValueError"
    assert client.root(4.0) == 2.0
    (record,) = [record for record in caplog.records if "root raised" in record.message]
    assert record.exc_info is not None


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (np.float64(1), r"result: expected dtype float32, got float64\[\]"),
        (np.zeros(2, np.float32), r"result: expected float32\[\], got float32\[2\]"),
        ((np.float32(1),), r"result: expected float32\[\], got \("),
        (None, r"result: expected float32\[\], got None"),
    ],
)
def test_a_result_that_is_not_what_was_promised(make_server, connect, floats, result, text):
    server = make_server()
    server.bind(lambda: result, name="f", input_signature=(), output_signature=floats())
    server.start()
    with pytest.raises(RemoteFunctionError, match=f"SignatureError: f: {text}"):
        connect().f()


def test_several_addresses_at_once(directory, make_server, stack, floats):
    server = make_server([f"unix:{directory}/a", f"unix:{directory}/b", "localhost:0"])
    server.bind(lambda x: x, name="f", input_signature=(floats(),), output_signature=floats())
    server.start()
    assert server.addresses[:2] == [f"unix:{directory}/a", f"unix:{directory}/b"]
    host, _, port = server.addresses[2].rpartition(":")
    assert host == "localhost" and int(port) > 0
    for index, address in enumerate(server.addresses):
        client = stack.enter_context(Client(address, connect_timeout=30))
        assert client.f(float(index)) == index


def test_threads_share_a_client(make_server, connect, pool):
    server = make_server(max_batch_wait=0.001)
    spec = TensorSpec((None,), np.int64)
    server.bind(lambda x: x * x, name="f", input_signature=(spec,), output_signature=spec)
    server.start()
    client = connect()

    def work(index: int) -> bool:
        values = range(index * 1000, index * 1000 + 50)
        return all(client.f(value) == value * value for value in values)

    assert all(pool.map(work, range(16)))


def test_hundreds_of_streams_need_no_thread_each(make_server, connect, stack, address, floats):
    server = make_server(max_batch_wait=0)
    server.bind(lambda x: x, name="f", input_signature=(floats(),), output_signature=floats())
    server.start()
    # Bare streams, so that the threads counted here are not the clients'.
    channel = grpc.insecure_channel(address)
    stack.callback(channel.close)
    layout = codec.Layout([np.dtype(np.float32)], [()])
    request = framing.Frame(layout, function=0).pack(1, [np.float32(5)])
    done = threading.Event()
    stack.callback(done.set)

    def requests():
        yield request
        done.wait()

    before = {thread.name for thread in threading.enumerate()}
    streams: list[Any] = [
        channel.stream_stream(protocol.CALL_METHOD, None, None)(requests()) for _ in range(200)
    ]
    for stream in streams:
        assert framing.read_response(next(stream)).error is None
    names = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in names if name.startswith(("grpc_service", "f "))]
    for stream in streams:
        stream.cancel()
