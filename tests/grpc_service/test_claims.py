"""Which client has which environments."""

import time
from typing import Any

import grpc
import numpy as np
import pytest

from seed_rl.grpc_service import (
    EnvironmentsInUseError,
    SignatureError,
    TensorSpec,
    UnavailableError,
    UnknownFunctionError,
    protocol,
)
from seed_rl.grpc_service.claims import CLIENT_ID_KEY, ENVIRONMENTS_KEY, Claim, Claims

TIMEOUT = 30.0


@pytest.fixture
def start(make_server):
    def make(**kwargs):
        server = make_server(**kwargs)
        server.bind(lambda: None, name="f", input_signature=())
        server.start()
        return server

    return make


@pytest.mark.parametrize("call_timeout", [None, TIMEOUT])
def test_environments_belong_to_one_client_at_a_time(start, connect, call_timeout):
    start(num_environments=8)
    first = connect(environments=range(2, 4), call_timeout=call_timeout)
    for taken in (range(2, 4), range(3), range(3, 8), range(8)):
        with pytest.raises(EnvironmentsInUseError, match=r"environments 2 to 3 are in use"):
            connect(environments=taken, call_timeout=call_timeout)
    for free in (range(2), range(4, 8), None):
        assert connect(environments=free, call_timeout=call_timeout).f() is None
    assert first.f() is None


@pytest.mark.parametrize("environments", [range(8, 9), range(9), range(2**29, 2**29 + 1)])
def test_environments_that_are_not_there(start, connect, environments):
    start(num_environments=8)
    with pytest.raises(SignatureError, match=r"were asked for, but the server has 8, 0 to 7"):
        connect(environments=environments)


def test_a_server_without_a_number_of_environments_has_any(start, connect):
    start()
    assert connect(environments=range(10**6, 10**6 + 5)).f() is None
    with pytest.raises(EnvironmentsInUseError):
        connect(environments=range(10**6 + 4, 10**6 + 5))


def test_a_client_that_leaves_frees_its_environments(start, connect):
    server = start(num_environments=8)
    for _ in range(5):
        client = connect(environments=range(8))
        assert len(server._transport._claims._held) == 1
        client.close()
        end = time.monotonic() + TIMEOUT
        while server._transport._claims._held:
            assert time.monotonic() < end
            time.sleep(0.001)


def test_a_client_that_comes_back_takes_over_from_itself(start, connect):
    start(num_environments=8)
    old = connect(environments=range(4), client_id="me")
    new = connect(environments=range(4), client_id="me")
    assert new.f() is None
    with pytest.raises(UnavailableError, match="connected anew"):
        old.f()
    # That the old stream ends does not free what the new one has.
    with pytest.raises(EnvironmentsInUseError):
        connect(environments=range(1), client_id="you")
    assert new.f() is None


@pytest.mark.parametrize(
    ("environments", "client_id"),
    [
        *(("", "me"), ("1", "me"), ("1:", "me"), ("1:0", "me"), ("-1:2", "me"), ("1:2:3", "me")),
        *(("1:2", ""), ("1:2", "x" * 129), ("9" * 10 + ":1", "me"), ("1:+2", "me"), ("a:b", "me")),
    ],
)
def test_claims_that_cannot_be_read_are_refused(start, address, stack, environments, client_id):
    server = start(num_environments=8)
    channel = grpc.insecure_channel(address)
    stack.callback(channel.close)
    stream: Any = channel.stream_stream(protocol.CALL_METHOD, None, None)(
        iter(()),
        metadata=((ENVIRONMENTS_KEY, environments), (CLIENT_ID_KEY, client_id)),
        timeout=TIMEOUT,
    )
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be read" in str(caught.value.details())
    assert server._transport._claims._held == {}


def test_a_client_name_is_in_no_message():
    claims = Claims(None)
    claims.take(Claim(0, 2, "secret"), "stream 1", "ipv4:10.0.0.7:4321")
    with pytest.raises(EnvironmentsInUseError, match=r"connected from 10\.0\.0\.7:4321") as caught:
        claims.take(Claim(1, 2, "other"), "stream 2", "unix:")
    assert "secret" not in str(caught.value) + repr(Claim(0, 2, "secret"))


def test_arguments_are_checked_without_a_call(start, connect):
    start()
    client = connect()
    client.check("f")
    with pytest.raises(SignatureError, match="expected 0 arguments"):
        client.check("f", 1)
    with pytest.raises(UnknownFunctionError, match="no function 'g'; it has: f"):
        client.check("g")


@pytest.fixture
def served(make_server):
    """Returns a server whose function `rows(anything, environments)` notes what reaches it."""
    server = make_server(num_environments=8)
    server.seen = []

    def rows(_, environments):
        server.seen.extend(environments.tolist())
        return environments

    ids = TensorSpec((None,), np.int32)
    server.bind(
        rows,
        input_signature=({"a": ids, "b": TensorSpec((None, 2), np.float32)}, ids),
        output_signature=ids,
        max_batch_size=8,
        environments_argument=1,
    )
    server.start()
    return server


def call_rows(client, *environments):
    ids = np.array(environments, np.int32)
    return client.rows({"a": ids, "b": np.zeros((ids.size, 2), np.float32)}, ids).tolist()


def test_a_client_speaks_for_its_own_environments_alone(served, connect):
    client, other = connect(environments=range(2, 5)), connect(environments=range(5, 8))
    for wrong in (1, 5, -1, 8):
        with pytest.raises(SignatureError, match=rf"environments 2 to 4, and not {wrong}, which"):
            call_rows(client, 3, wrong, 4)
    assert served.seen == []
    assert call_rows(client, 4, 2) == [4, 2]
    assert call_rows(other, 5, 6, 7) == [5, 6, 7]


def test_a_client_without_environments_speaks_for_those_that_nobody_has(served, connect):
    claimant, client = connect(environments=range(2, 5)), connect()
    for taken in (2, 4):
        with pytest.raises(SignatureError, match="environments 2 to 4 belong to another client"):
            call_rows(client, 0, taken, 7)
    for absent in (-1, 8):
        with pytest.raises(SignatureError, match=f"no environment {absent}; the server has 8"):
            call_rows(client, absent)
    assert served.seen == []
    assert call_rows(client, 0, 1, 5, 7) == [0, 1, 5, 7]
    assert call_rows(claimant, 3) == [3]


@pytest.mark.parametrize("argument", [0, 2, 3, -1])
def test_environments_are_one_tensor_of_integers(make_server, argument):
    ids, floats = TensorSpec((None,), np.int32), TensorSpec((None,), np.float32)
    with pytest.raises(SignatureError, match=f"environments_argument={argument}: expected the"):
        make_server().bind(
            lambda *_: None,
            name="f",
            input_signature=((ids, ids), ids, floats),
            environments_argument=argument,
        )
