import contextlib
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from seed_rl.grpc_service import Client, Server, TensorSpec

TIMEOUT = 30.0  # seconds that no test comes near unless something hangs


@pytest.fixture
def directory():
    """A directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="wire") as path:
        yield path


@pytest.fixture
def address(directory):
    return f"unix:{os.path.join(directory, 's')}"


@pytest.fixture
def stack():
    """Closes what a test opens, the last first."""
    with contextlib.ExitStack() as exit_stack:
        yield exit_stack


@pytest.fixture
def make_server(address, stack):
    """Server with its arguments; shut down after the test."""

    def make(addresses=None, **kwargs) -> Server:
        server = Server(addresses or address, **kwargs)
        stack.callback(server.shutdown)
        return server

    return make


@pytest.fixture
def connect(address, stack):
    """Client with its arguments; closed after the test."""

    def make(to=None, **kwargs) -> Client:
        return stack.enter_context(Client(to or address, connect_timeout=TIMEOUT, **kwargs))

    return make


@pytest.fixture
def pool(stack):
    """Runs calls that block, each in a thread of its own."""
    executor = ThreadPoolExecutor(32)
    stack.callback(executor.shutdown, wait=False, cancel_futures=True)
    return executor


class Gate:
    """A function that waits until it is let through, and says when it was entered.

    Attributes:
      batches: what it was called with.
    """

    def __init__(self, result: Callable = lambda x: x):
        self.entered = threading.Semaphore(0)
        self.batches: list[np.ndarray] = []
        self._released = threading.Semaphore(0)
        self._result = result

    def __call__(self, x):
        self.batches.append(np.array(x))
        self.entered.release()
        assert self._released.acquire(timeout=TIMEOUT)
        return self._result(x)

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT)

    def release(self, times: int = 1) -> None:
        self._released.release(times)


@pytest.fixture
def make_gate(stack):
    def make(result: Callable = lambda x: x) -> Gate:
        made = Gate(result)
        stack.callback(made.release, 1000)
        return made

    return make


@pytest.fixture
def gate(make_gate):
    return make_gate()


def floats(*shape) -> TensorSpec:
    return TensorSpec(shape, np.float32)


@pytest.fixture(name="floats")
def floats_fixture():
    return floats
