"""Learners and actors as processes of their own, to be killed."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
PATIENCE = 300.0  # seconds; how long a test waits for what happens soon on an idle machine


def wait_until(condition, what: str):
    """Returns what `condition()` gives as soon as that is true; AssertionError if it never is."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"after {PATIENCE} s still not: {what}")


class Processes:
    """Starts parts of a run, each with a log, and leaves none of them behind."""

    def __init__(self, directory: pathlib.Path, address: str):
        self.directory = directory
        self.address = address
        self._started: list[subprocess.Popen] = []

    def start(self, name: str, *flags: str, main=("-m", "seed_rl.main"), **environment: str):
        """Starts `python main flags`; its words go to the end of the log of this name."""
        with open(self.log_path(name), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *main, f"--server_address={self.address}", *flags],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
                    "GRPC_ENABLE_FORK_SUPPORT": "false",
                    **environment,
                },
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Whoever runs the tests in the background has some signals ignored; Python's
                # own handlers, which seed_rl.main installs, override that.
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def log_path(self, name: str) -> pathlib.Path:
        return self.directory / f"{name}.log"

    def log(self, name: str) -> str:
        """What the processes of this name have said so far."""
        path = self.log_path(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, name: str, words: str, count: int = 1) -> str:
        """Waits until the log says `words` so many times; returns the log."""
        try:
            wait_until(lambda: self.log(name).count(words) >= count, f"{name} says {words!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it says:\n{self.log(name)[-3000:]}") from None
        return self.log(name)

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self._started:
            process.wait()
