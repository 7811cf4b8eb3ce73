"""For all tests."""

import contextlib
import os
import socket

import pytest

# Some tests fork after others have used gRPC, whose handlers of forks would write into the child's
# standard error. Read when gRPC is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")


@pytest.fixture
def free_ports():
    """Returns a function that finds so many TCP ports of this machine that nobody listens on."""

    def find(number):
        with contextlib.ExitStack() as held:  # all at once, so that none is found twice
            sockets = [held.enter_context(socket.socket()) for _ in range(number)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            return [one.getsockname()[1] for one in sockets]

    return find
