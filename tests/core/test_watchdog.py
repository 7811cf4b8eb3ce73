import subprocess
import sys
import threading
import time

import pytest

from seed_rl.watchdog import EXIT_HUNG, Watchdog

SOON = 20.0  # seconds; how long a test waits for what happens at once


def test_a_call_that_hangs_is_reported_and_ends_the_process(caplog, capsys):
    ended = threading.Event()
    codes = []

    def end(code):
        codes.append(code)
        ended.set()

    watchdog = Watchdog(0.05, "environments 8 to 15", end)
    with watchdog.watching("reset"):
        assert ended.wait(SOON)
    assert codes == [EXIT_HUNG]
    expected = "reset of environments 8 to 15 has taken more than 0.05 seconds"
    assert expected in caplog.text
    assert expected in capsys.readouterr().err


def test_calls_within_the_limit_and_pauses_between_them_are_fine():
    ended = threading.Event()
    watchdog = Watchdog(0.2, "environments", lambda code: ended.set())
    for _ in range(50):
        with watchdog.watching("step"):
            time.sleep(0.005)  # together longer than the limit
    # As long between two calls as the limit and the intervals in which it looks.
    assert not ended.wait(0.5)
    with pytest.raises(KeyError), watchdog.watching("step"):
        raise KeyError
    assert not ended.wait(0.5)


def test_no_limit():
    ended = threading.Event()
    with Watchdog(0.0, "environments", lambda code: ended.set()).watching("step"):
        assert not ended.wait(0.1)


def test_a_process_ends_although_native_code_hangs():
    # A sleep that holds no lock stands for native code that never returns.
    code = (
        "import time; from seed_rl.watchdog import Watchdog\n"
        "with Watchdog(0.2, 'environments 0 to 3').watching('step'): time.sleep(1000)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == EXIT_HUNG
    assert result.stderr.splitlines()[-1].startswith("error: step of environments 0 to 3")
