"""Real processes, for tests that kill them."""

import sys

import pytest
from real_processes import Processes


@pytest.fixture
def processes(tmp_path):
    """Starts learners and actors in tmp_path, which talk over a socket in it."""
    if sys.platform != "linux":
        pytest.skip("needs Linux's processes")
    processes = Processes(tmp_path, f"unix:{tmp_path}/s/learner")
    yield processes
    processes.close()
