"""Servers that die, shut down, restart or are something else."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

from seed_rl.grpc_service import (
    CallTimeoutError,
    CancelledError,
    Client,
    ProtocolError,
    RpcError,
    Server,
    TensorSpec,
    UnavailableError,
    codec,
    framing,
    protocol,
)
from seed_rl.grpc_service import service_pb2 as pb

TIMEOUT = 30.0
SCALAR = TensorSpec((), np.float32)
ROWS = TensorSpec((None,), np.float32)

SERVER = """
import sys, threading, numpy as np
from seed_rl.grpc_service import Server, TensorSpec
spec = TensorSpec((), np.float32)
def block(x):
    print("entered", flush=True)
    threading.Event().wait()
server = Server(sys.argv[1])
server.bind(block, input_signature=(spec,), output_signature=spec)
server.bind(lambda x: x, name="echo", input_signature=(spec,), output_signature=spec)
server.start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def start_process(stack):
    """Starts SERVER at an address in a process of its own."""

    def start(address) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, text=True
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    return start


@pytest.mark.parametrize("call_timeout", [None, 100.0])
def test_a_server_that_is_killed(start_process, address, connect, pool, call_timeout):
    process = start_process(address)
    client = connect(call_timeout=call_timeout)
    assert client.echo(1.0) == 1.0
    pending = pool.submit(client.block, 2.0)
    assert process.stdout.readline() == "entered\n"
    os.kill(process.pid, signal.SIGKILL)
    assert type(pending.exception(TIMEOUT)) is UnavailableError
    with pytest.raises(UnavailableError, match="the server is gone"):
        client.echo(1.0)


def test_a_killed_server_leaves_a_socket_that_the_next_one_replaces(
    start_process, address, connect
):
    process = start_process(address)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert os.path.exists(address.removeprefix("unix:"))
    start_process(address)
    assert connect().echo(3.0) == 3.0


def test_shutdown_cancels_waiting_calls_at_once(make_server, connect, pool, gate):
    server = make_server(max_batch_wait=1000.0)
    server.bind(lambda x: x, name="batched", input_signature=(ROWS,), output_signature=ROWS)
    server.bind(gate, name="running", input_signature=(SCALAR,), output_signature=SCALAR)
    server.start()
    clients = [connect() for _ in range(3)]
    running = pool.submit(clients[0].running, 1.0)
    gate.wait_entered()
    queued = pool.submit(clients[1].running, 2.0)
    waiting = pool.submit(clients[2].batched, 3.0)
    pause = threading.Event()
    batched, alone = (service.queue for service in server._services)
    while batched._open is None or not alone._ready:
        assert not pause.wait(0.001)
    stopping = pool.submit(server.shutdown, TIMEOUT)
    # They are told although the function that runs has not returned.
    for call in (running, queued, waiting):
        error = call.exception(TIMEOUT)
        assert type(error) is CancelledError and "shutting down" in str(error)
    assert not stopping.done()
    gate.release()
    stopping.result(TIMEOUT)
    assert len(gate.batches) == 1
    with pytest.raises(UnavailableError, match="shutting down"):
        clients[0].running(1.0)


def test_shutdown_cancels_calls_of_a_client_that_sends_no_more(
    make_server, address, stack, pool, gate
):
    server = make_server()
    server.bind(gate, name="f", input_signature=(SCALAR,), output_signature=SCALAR)
    server.start()
    channel = grpc.insecure_channel(address)
    stack.callback(channel.close)
    layout = codec.Layout([np.dtype(np.float32)], [()])
    request = framing.Frame(layout, function=0).pack(7, [np.float32(1)])
    stream: Any = channel.stream_stream(protocol.CALL_METHOD, None, None)(iter([request]))
    gate.wait_entered()
    stopping = pool.submit(server.shutdown, TIMEOUT)
    answer = framing.read_response(next(stream))
    assert (answer.call_id, answer.error and answer.error.kind) == (7, pb.Error.CANCELLED)
    assert not stopping.done()
    gate.release()
    stopping.result(TIMEOUT)


def test_shutdown_removes_sockets_and_can_be_repeated(directory, connect):
    path = f"{directory}/s"
    server = Server(f"unix:{path}")
    server.start()
    assert os.path.exists(path)
    server.shutdown()
    assert not os.path.exists(path)
    server.shutdown()
    with pytest.raises(RuntimeError, match="starts once"):
        server.start()
    Server(f"unix:{path}").shutdown()  # never started


def test_a_server_can_follow_another_at_the_same_address(address, stack):
    for index in range(5):
        with Server(address) as server:
            server.bind(
                lambda i=index: np.int32(i),
                name="f",
                input_signature=(),
                output_signature=TensorSpec((), np.int32),
            )
            server.start()
            with Client(address, connect_timeout=TIMEOUT) as client:
                assert client.f() == index


def test_shutdown_does_not_wait_for_a_function_longer_than_grace(make_server, connect, pool, gate):
    server = make_server()
    server.bind(gate, name="f", input_signature=(SCALAR,), output_signature=SCALAR)
    server.start()
    call = pool.submit(connect().f, 1.0)
    gate.wait_entered()
    pool.submit(server.shutdown, 0.01).result(TIMEOUT)
    assert isinstance(call.exception(TIMEOUT), CancelledError)


def test_no_task_outlives_its_event_loop(make_server, connect, pool, gate):
    """Such a task complains when it is collected: it would use the loop, which is closed."""
    server = make_server()
    server.bind(gate, name="f", input_signature=(SCALAR,), output_signature=SCALAR)
    server.start()
    calls = [pool.submit(client.f, 1.0) for client in [connect() for _ in range(8)]]
    gate.wait_entered()
    server.shutdown(grace=0.0)
    assert server._loop is not None and server._loop.is_closed()
    assert asyncio.all_tasks(server._loop) == set()
    gate.release(8)
    for call in calls:
        assert isinstance(call.exception(TIMEOUT), RpcError)


def test_a_function_may_shut_its_server_down(make_server, connect):
    server = make_server()
    server.bind(server.shutdown, name="stop", input_signature=())
    server.start()
    with pytest.raises(RpcError):
        connect().stop()
    server.shutdown()


def test_a_client_that_leaves_harms_nobody(make_server, connect, pool, gate):
    server = make_server()
    server.bind(gate, name="f", input_signature=(SCALAR,), output_signature=SCALAR)
    server.start()
    leaving, staying = connect(), connect()
    first = pool.submit(leaving.f, 1.0)
    gate.wait_entered()
    second = pool.submit(staying.f, 2.0)
    leaving.close()
    assert isinstance(first.exception(TIMEOUT), CancelledError)
    with pytest.raises(UnavailableError, match="closed"):
        leaving.f(1.0)
    gate.release(2)
    assert second.result(TIMEOUT) == 2.0


def test_a_call_that_takes_too_long(make_server, connect, gate):
    server = make_server()
    server.bind(gate, name="f", input_signature=(SCALAR,), output_signature=SCALAR)
    server.bind(lambda x: x, name="g", input_signature=(SCALAR,), output_signature=SCALAR)
    server.start()
    client = connect(call_timeout=0.1)
    with pytest.raises(CallTimeoutError, match=r"no answer within 0.1 s \(call_timeout\)"):
        client.f(1.0)
    gate.release()
    assert connect(call_timeout=TIMEOUT).g(3.0) == 3.0


def test_no_server(address):
    with pytest.raises(UnavailableError, match=r"no server answered at unix:.* within 0.2 s"):
        Client(address, connect_timeout=0.2)


def test_a_client_waits_for_its_server(make_server, connect, pool):
    server = make_server()
    server.bind(lambda x: x, name="f", input_signature=(SCALAR,), output_signature=SCALAR)
    connecting = pool.submit(connect)
    server.start()
    assert connecting.result(TIMEOUT).f(1.0) == 1.0


@pytest.fixture
def foreign_server(address, stack):
    """A gRPC server whose handshake is what the test says."""

    def start(answer=None):
        def handshake(request, context):
            return answer

        handlers = {protocol.HANDSHAKE: grpc.unary_unary_rpc_method_handler(handshake)}
        server = grpc.server(futures.ThreadPoolExecutor(2))
        name = protocol.SERVICE if answer is not None else "another.Service"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        server.add_insecure_port(address)
        server.start()
        stack.callback(lambda: server.stop(0).wait())

    return start


def test_a_server_of_another_version(foreign_server, connect):
    foreign_server(pb.HandshakeResponse(protocol_version=77).SerializeToString())
    with pytest.raises(ProtocolError, match="speaks protocol version 77, this client 2"):
        connect()


def test_a_server_of_another_kind(foreign_server, connect):
    foreign_server()
    with pytest.raises(ProtocolError, match="not a seed_rl server"):
        connect()


def test_a_server_that_sends_garbage(foreign_server, connect):
    foreign_server(b"\xff")
    with pytest.raises(ProtocolError, match="handshake cannot be parsed"):
        connect()


def test_a_client_of_another_version(make_server, connect, monkeypatch):
    make_server().start()
    monkeypatch.setattr(protocol, "PROTOCOL_VERSION", 3)
    with pytest.raises(ProtocolError, match=r"speaks protocol version 2, this client 3"):
        connect()


def test_the_server_refuses_another_version(make_server, address, stack):
    make_server().start()
    channel = grpc.insecure_channel(address)
    stack.callback(channel.close)
    call = channel.unary_unary(protocol.HANDSHAKE_METHOD, None, None)
    for request, text in (
        (pb.HandshakeRequest(protocol_version=1).SerializeToString(), "speaks protocol version 1"),
        (b"\xff", "cannot be parsed"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=TIMEOUT)
        assert text in str(caught.value.details())


def test_a_server_that_restarted_between_handshake_and_stream(make_server, address, stack):
    make_server().start()
    channel = grpc.insecure_channel(address)
    stack.callback(channel.close)
    open_stream = channel.stream_stream(protocol.CALL_METHOD, None, None)
    stream: Any = open_stream(iter(()), metadata=((protocol.SERVER_ID_KEY, "of another"),))
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "restarted" in str(caught.value.details())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_client_does_not_survive_a_fork(make_server, connect, monkeypatch):
    server = make_server()
    server.bind(lambda x: x, name="f", input_signature=(SCALAR,), output_signature=SCALAR)
    server.start()
    client = connect()
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as it looks in a child
    with pytest.raises(RpcError, match="before a fork"):
        client.f(1.0)


def test_interpreter_ends_with_server_and_client_open(address):
    code = SERVER.removesuffix("threading.Event().wait()\n") + (
        "from seed_rl.grpc_service import Client\n"
        "client = Client(sys.argv[1])\n"
        "print(client.echo(4.0))\n"
    )
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ready\n4.0\n"
    assert result.stderr == ""
    assert not os.path.exists(address.removeprefix("unix:"))
    assert time.monotonic() - start < TIMEOUT
