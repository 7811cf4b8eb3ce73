"""Which calls run together, and that a row's answer does not depend on its company."""

import threading

import numpy as np
import pytest

from seed_rl.grpc_service import SignatureError, TensorSpec

ROWS = TensorSpec((None,), np.float32)
TIMEOUT = 30.0  # seconds that no test comes near unless something hangs
FOREVER = 1000.0  # seconds of max_batch_wait: only a full batch runs


@pytest.fixture
def serve(make_server):
    def start(fn, max_batch_wait=FOREVER, spec=ROWS, **kwargs):
        server = make_server(max_batch_wait=max_batch_wait)
        server.bind(fn, name="f", input_signature=(spec,), output_signature=spec, **kwargs)
        server.start()
        return server

    return start


def _rows(*values):
    return np.array(values, np.float32)


class Recorder:
    """Doubles its rows and keeps what it was called with."""

    def __init__(self):
        self.batches = []

    def __call__(self, x):
        self.batches.append(x.copy())
        return x * 2


def test_a_full_batch_runs_at_once(serve, connect, pool):
    recorder = Recorder()
    serve(recorder, max_batch_size=4)
    clients = [connect() for _ in range(4)]
    results = [pool.submit(client.f, float(i)) for i, client in enumerate(clients)]
    assert [result.result(TIMEOUT) for result in results] == [0, 2, 4, 6]
    (batch,) = recorder.batches
    assert sorted(batch) == [0, 1, 2, 3]


def test_a_batch_runs_when_its_oldest_call_has_waited(serve, connect):
    recorder = Recorder()
    server = serve(recorder, max_batch_wait=0.02, max_batch_size=4)
    np.testing.assert_array_equal(connect().f(_rows(1, 2, 3)), [2, 4, 6])
    np.testing.assert_array_equal(recorder.batches, [[1, 2, 3]])  # and no padding
    assert server.statistics()["f"].max_wait >= 0.02


def test_a_call_that_does_not_fit_closes_the_batch(serve, connect, pool, gate):
    serve(gate, max_batch_size=4)
    client = connect()
    calls = [pool.submit(client.f, _rows(1, 1, 1))]
    _wait_until_queued(client, 1)
    calls.append(pool.submit(client.f, _rows(2, 2, 2, 2)))
    for _ in calls:
        gate.wait_entered()
        gate.release()
    for call, expected in zip(calls, ([1, 1, 1], [2, 2, 2, 2]), strict=True):
        np.testing.assert_array_equal(call.result(TIMEOUT), expected)
    assert [list(batch) for batch in gate.batches] == [[1, 1, 1], [2, 2, 2, 2]]


def _wait_until_queued(client, count):
    """Until the client has sent that many calls; a stream keeps their order."""
    connection = client._connection
    deadline = threading.Event()
    while len(connection._pending) < count:
        assert not deadline.wait(0.001)


def test_calls_collect_while_the_function_runs(serve, connect, pool, gate):
    server = serve(gate, max_batch_wait=0.0, max_batch_size=64)
    client = connect()
    first = pool.submit(client.f, 0.0)
    gate.wait_entered()
    later = []
    for i in range(1, 9):
        later.append(pool.submit(client.f, float(i)))
        _wait_until_queued(client, i + 1)
    _wait_until_waiting(server, 8)
    gate.release(2)
    assert first.result(TIMEOUT) == 0
    assert [call.result(TIMEOUT) for call in later] == list(range(1, 9))
    assert [list(batch) for batch in gate.batches] == [
        [0],
        list(range(1, 9)),
    ]  # first in, first out


def _wait_until_waiting(server, num_rows):
    queue = server._services[0].queue
    pause = threading.Event()
    for _ in range(int(TIMEOUT / 0.001)):
        if queue._open is not None and queue._open.num_rows == num_rows:
            return
        pause.wait(0.001)
    raise AssertionError("the calls did not arrive")


def test_more_rows_than_a_batch_holds(serve, connect):
    serve(Recorder(), max_batch_size=4)
    with pytest.raises(SignatureError, match="f: a call brings 1 to 4 rows, got 5"):
        connect().f(_rows(1, 2, 3, 4, 5))


def test_64_rows_by_default(serve, connect):
    serve(Recorder())
    assert connect().functions["f"].max_batch_size == 64


def test_a_row_has_the_same_answer_in_any_company(serve, connect, pool):
    """Calls of 1 to 7 rows from many threads, against the function by itself."""
    spec = TensorSpec((None, 5), np.float32)
    weights = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)

    def f(x):
        # A product for each row alone, so that the reference is exact.
        return np.stack([weights @ row for row in x])

    serve(f, max_batch_wait=0.001, spec=spec, max_batch_size=7)
    clients = [connect() for _ in range(4)]

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(30):
            num_rows = rng.integers(0, 8)
            shape = (num_rows, 5) if num_rows else (5,)
            x = rng.normal(size=shape).astype(np.float32)
            expected = f(x) if num_rows else weights @ x
            np.testing.assert_array_equal(clients[seed % 4].f(x), expected)
        return True

    assert all(pool.map(work, range(8)))


def test_a_failing_batch_harms_no_other(serve, connect, pool):
    def f(x):
        if (x < 0).any():
            raise ValueError("negative")
        return x

    serve(f, max_batch_size=2)
    bad, good = connect(), connect()
    calls = [pool.submit(bad.f, -1.0), pool.submit(bad.f, 1.0)]
    for call in calls:  # both callers of the batch are told
        assert "negative" in str(call.exception(TIMEOUT))
    np.testing.assert_array_equal(good.f(_rows(3, 4)), [3, 4])


def test_a_list_of_functions_is_used_in_turn(make_server, connect, pool, make_gate):
    gates = [make_gate(lambda x, i=i: x + 10 * i) for i in (1, 2)]
    server = make_server(max_batch_wait=0.0)
    server.bind(gates, name="f", input_signature=(ROWS,), output_signature=ROWS, max_batch_size=1)
    server.start()
    client = connect()
    # Both run at the same time: neither is let through before both were entered.
    calls = [pool.submit(client.f, float(i)) for i in range(2)]
    for gate in gates:
        gate.wait_entered()
    for gate in gates:
        gate.release(100)
    assert sorted(call.result(TIMEOUT) for call in calls) in ([10, 21], [11, 20])
    for i in range(6):
        client.f(float(i))
    assert {len(gate.batches) for gate in gates} == {4}


def test_a_function_is_never_entered_twice_at_once(serve, connect, pool):
    inside = threading.Lock()

    def f(x):
        assert inside.acquire(blocking=False)
        threading.Event().wait(0.002)
        inside.release()
        return x

    serve(f, max_batch_wait=0.0, max_batch_size=1)
    client = connect()
    assert list(pool.map(client.f, map(float, range(20)))) == list(range(20))


def test_unbatched_calls_run_alone_and_in_order(make_server, connect, pool, gate):
    server = make_server()
    server.bind(gate, name="f", input_signature=(ROWS,), output_signature=ROWS, batched=False)
    server.start()
    client = connect()
    calls = []
    for i in range(5):
        calls.append(pool.submit(client.f, _rows(i)))
        _wait_until_queued(client, i + 1)
    gate.release(5)
    for call in calls:
        call.result(TIMEOUT)
    assert [list(batch) for batch in gate.batches] == [[0], [1], [2], [3], [4]]


def test_results_may_share_one_array_that_the_function_keeps(serve, connect):
    kept = np.zeros(64, np.float32)

    def f(x):
        kept[: len(x)] = x
        return kept[: len(x)]

    serve(f, max_batch_wait=0.0)
    client = connect()
    results = [client.f(_rows(i, i)) for i in range(20)]
    np.testing.assert_array_equal(results, [[i, i] for i in range(20)])


def test_statistics_count_and_reset(serve, connect):
    server = serve(lambda x: x, max_batch_wait=0.0, max_batch_size=4)
    client = connect()
    for num_rows in (1, 4, 4):
        client.f(np.zeros(num_rows, np.float32))
    found = server.statistics()["f"]
    assert (found.num_batches, found.num_calls, found.num_rows) == (3, 3, 9)
    assert found.mean_batch_fill == pytest.approx(9 / 12)
    assert 0 <= found.mean_wait <= found.max_wait
    again = server.statistics()["f"]
    assert (again.num_batches, again.num_rows, again.mean_batch_fill, again.max_wait) == (
        0,
        0,
        0,
        0,
    )


def test_a_client_reads_no_more_than_the_bound(make_server, connect, pool, gate):
    server = make_server(max_calls_in_flight=3)
    server.bind(gate, name="f", input_signature=(ROWS,), output_signature=ROWS, batched=False)
    server.start()
    client, other = connect(), connect()
    calls = [pool.submit(client.f, _rows(i)) for i in range(10)]
    gate.wait_entered()
    call = pool.submit(other.f, _rows(99))  # not shut out by the first client's calls
    queue = server._services[0].queue
    pause = threading.Event()
    for _ in range(int(TIMEOUT / 0.001)):
        if len(queue._ready) == 3:
            break
        pause.wait(0.001)
    pause.wait(0.05)  # a server without a bound would have read all ten by now
    assert len(queue._ready) == 3  # two of the first client beside the one that runs, and the other
    gate.release(11)
    assert call.result(TIMEOUT) == 99
    assert sorted(float(call.result(TIMEOUT)[0]) for call in calls) == list(range(10))


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"name": "_f"}, ValueError, "'_f' cannot be a method"),
        ({"name": "a b"}, ValueError, "cannot be a method"),
        ({"name": "close"}, ValueError, "taken by the client"),
        ({}, ValueError, "'<lambda>' cannot be a method"),
        ({"name": "f", "input_signature": None}, SignatureError, "takes input_signature"),
        ({"name": "f", "input_signature": ROWS}, SignatureError, "is a tuple with one entry"),
        (
            {"name": "f", "input_signature": ("x",)},
            SignatureError,
            r"f: input signature\[0\]: expe",
        ),
        ({"name": "f", "max_batch_size": 0}, ValueError, "at least 1"),
        ({"name": "f", "max_batch_size": 3, "batch_sizes": [4]}, ValueError, "not the largest"),
        ({"name": "f", "output_signature": None, "max_batch_size": 3}, SignatureError, "batched"),
        ({"name": "f", "output_signature": None, "batched": True}, SignatureError, "cannot be bat"),
        (
            {"name": "f", "input_signature": (TensorSpec((None, None), np.float32),)},
            SignatureError,
            "only the first dimension",
        ),
    ],
)
def test_wrong_bindings(make_server, kwargs, error, text):
    given = {"input_signature": (ROWS,), "output_signature": ROWS, **kwargs}
    with pytest.raises(error, match=text):
        make_server().bind(lambda x: x, **given)


def test_a_name_is_bound_once(make_server):
    server = make_server()
    server.bind(np.sin, name="f", input_signature=(ROWS,), output_signature=ROWS)
    with pytest.raises(ValueError, match="'f' is bound already"):
        server.bind(np.cos, name="f", input_signature=(ROWS,), output_signature=ROWS)


def test_a_python_function_with_a_static_size_is_padded_to_it(make_server, connect):
    recorder = Recorder()
    server = make_server(max_batch_wait=0.0)
    spec = TensorSpec((4,), np.float32)
    server.bind(recorder, name="f", input_signature=(spec,), output_signature=spec)
    server.start()
    np.testing.assert_array_equal(connect().f(_rows(1, 2)), [2, 4])
    np.testing.assert_array_equal(recorder.batches, [[1, 2, 2, 2]])
