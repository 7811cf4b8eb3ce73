"""Getting the next training batch ready while the present one is trained on."""

import queue
import threading
import time
from typing import Any

from seed_rl.agent import UnrollSink
from seed_rl.unroll_queue import QueueClosedError
from seed_rl.unrolls import Unroll

_POLL_SECONDS = 0.5  # how often the thread looks whether the sink was closed without its knowing


class PrefetchingSink(UnrollSink):
    """Another sink, whose batches are drawn, stacked and transposed by a thread of its own.

    One batch waits ready at most. From a replay it is drawn before the priorities of the batch that
    is being trained on are updated.
    """

    def __init__(self, sink: UnrollSink):
        """Args:
        sink: where the batches come from; its next_batch and training_done are called by two
          threads.
        """
        self._sink = sink
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._fetch, name="prefetch", daemon=True)
        self._started = False

    def put(self, unrolls: Unroll) -> None:
        self._sink.put(unrolls)

    def next_batch(self, timeout: float) -> Any | None:
        if not self._started:  # not before whoever restores a replay has done so
            self._started = True
            self._thread.start()
        deadline = time.monotonic() + timeout
        while True:
            if self._closed.is_set():
                raise QueueClosedError("the sink is closed")
            left = deadline - time.monotonic()
            try:
                return self._ready.get(timeout=max(0.0, min(left, _POLL_SECONDS)))
            except queue.Empty:
                if self._error is not None:
                    raise self._error from None
                if left <= 0:
                    return None

    def training_done(self, batch: Any, feedback: Any, training_step: int) -> None:
        self._sink.training_done(batch, feedback, training_step)

    def metrics(self) -> dict[str, float]:
        return self._sink.metrics()

    def close(self) -> None:
        self._closed.set()
        self._sink.close()
        if self._started:
            self._thread.join()

    def save(self, logdir: str) -> None:
        self._sink.save(logdir)

    def restore(self, logdir: str) -> str:
        return self._sink.restore(logdir)

    def _fetch(self) -> None:
        try:
            while not self._closed.is_set():
                batch = self._sink.next_batch(_POLL_SECONDS)
                while batch is not None and not self._closed.is_set():
                    try:
                        self._ready.put(batch, timeout=_POLL_SECONDS)
                        batch = None
                    except queue.Full:
                        continue
        except QueueClosedError:
            self._closed.set()
        except Exception as error:
            self._error = error
