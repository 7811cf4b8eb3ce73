"""Ends a process whose environments hang."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from absl import logging

from seed_rl import process_exit

EXIT_HUNG = 3


class Watchdog:
    """Watches over calls that may hang, such as a step of an environment.

        watchdog = Watchdog(60.0, "environments 0 to 7")
        with watchdog.watching("step"):
            environments.step(actions)

    What hangs in native code cannot be interrupted from within the process, so the process ends,
    with the reason in its log and exit code 3: whoever started it starts it again, with new
    environments. Not for use by several threads at once.
    """

    def __init__(
        self,
        limit: float,
        what: str,
        end: Callable[[int], object] = process_exit.leave,
    ):
        """Args:
        limit: seconds a call may take; 0 for as long as it likes.
        what: what is watched, for the message.
        end: ends the process with this exit code.
        """
        self._limit = limit
        self._what = what
        self._end = end
        self._condition = threading.Condition()
        self._call = ""  # what is under way; empty if nothing is
        self._deadline = 0.0
        if limit > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextlib.contextmanager
    def watching(self, call: str) -> Iterator[None]:
        """While the block runs, it is timed.

        Args:
          call: what the block does, for the message.
        """
        if self._limit <= 0:
            yield
            return
        with self._condition:
            self._call, self._deadline = call, time.monotonic() + self._limit
            # Whether the watcher has to wait shorter is for it to find out when it wakes.
        try:
            yield
        finally:
            with self._condition:
                self._call = ""

    def _watch(self) -> None:
        while True:
            with self._condition:
                # It looks a few times within the limit, so that calls need not wake it.
                self._condition.wait(self._limit / 10)
                hangs = self._call if self._call and time.monotonic() > self._deadline else ""
            if hangs:
                self._report(hangs)
                return

    def _report(self, call: str) -> None:
        message = (
            f"{call} of {self._what} has taken more than {self._limit:g} seconds: it hangs. This "
            "actor ends, to be started again; Actor.max_env_seconds is the limit"
        )
        logging.error("%s", message)
        print(f"error: {message}", file=sys.stderr)
        self._end(EXIT_HUNG)
