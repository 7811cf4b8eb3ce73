"""Waiting calls of one bound function, in batches.

The event loop adds calls, worker threads take batches. A batch can be taken when it is full or when
its oldest call has waited long enough; while every worker is busy, calls go on collecting.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from seed_rl.grpc_service.specs import TensorSpec


class Call:
    """One call of one caller, until it is answered."""

    __slots__ = ("arrival", "call_id", "num_rows", "stream")

    def __init__(self, stream: Any, call_id: int, num_rows: int):
        self.stream = stream
        self.call_id = call_id
        self.num_rows = num_rows
        self.arrival = time.monotonic()


class Batch:
    """Calls that run together.

    Attributes:
      calls: in the order of arrival; each has `num_rows` rows, one call's after the other's.
      arrays: one a leaf of the inputs; the first `num_rows` rows count, where there are rows.
    """

    __slots__ = ("arrays", "calls", "expired", "num_rows")

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = arrays
        self.calls: list[Call] = []
        self.num_rows = 0
        self.expired = False


@dataclasses.dataclass(frozen=True)
class FunctionStatistics:
    """What one function did since the statistics were last asked for; times in seconds."""

    num_batches: int
    num_calls: int
    num_rows: int
    mean_batch_fill: float  # rows / max_rows of a batch, in [0, 1]
    mean_wait: float  # from a call's arrival to the start of its batch
    max_wait: float
    mean_run_time: float  # of a batch
    max_run_time: float


class _Queue:
    """What batched and unbatched functions share: waiting workers, closing, statistics."""

    def __init__(self, max_rows: int):
        self.max_rows = max_rows
        self._condition = threading.Condition()
        self._ready: collections.deque[Batch] = collections.deque()
        self._closed = False
        self._num_batches = self._num_calls = self._num_rows = 0
        self._wait = self._max_wait = self._run_time = self._max_run_time = 0.0

    def take(self) -> Batch | None:
        """Blocks until a batch is due; None once closed."""
        with self._condition:
            while True:
                if self._closed:
                    return None
                batch = self._pop()
                if batch is not None:
                    self._count_start(batch)
                    return batch
                self._condition.wait()

    def close(self) -> None:
        """Forgets what waits, and ends the workers."""
        with self._condition:
            self._closed = True
            self._ready.clear()
            self._condition.notify_all()

    def count_run(self, seconds: float) -> None:
        """To be told after each batch."""
        with self._condition:
            self._run_time += seconds
            self._max_run_time = max(self._max_run_time, seconds)

    def statistics(self) -> FunctionStatistics:
        """What happened since the last time this was called."""
        with self._condition:
            batches, calls = max(1, self._num_batches), max(1, self._num_calls)
            result = FunctionStatistics(
                num_batches=self._num_batches,
                num_calls=self._num_calls,
                num_rows=self._num_rows,
                mean_batch_fill=self._num_rows / (batches * self.max_rows),
                mean_wait=self._wait / calls,
                max_wait=self._max_wait,
                mean_run_time=self._run_time / batches,
                max_run_time=self._max_run_time,
            )
            self._reset_statistics()
            return result

    def _pop(self) -> Batch | None:
        return self._ready.popleft() if self._ready else None

    def _count_start(self, batch: Batch) -> None:
        now = time.monotonic()
        self._num_batches += 1
        self._num_calls += len(batch.calls)
        self._num_rows += batch.num_rows
        self._wait += sum(now - call.arrival for call in batch.calls)
        self._max_wait = max(self._max_wait, now - batch.calls[0].arrival)

    def _reset_statistics(self) -> None:
        self._num_batches = self._num_calls = self._num_rows = 0
        self._wait = self._max_wait = self._run_time = self._max_run_time = 0.0


class CallQueue(_Queue):
    """For unbatched functions: every call is a batch of its own."""

    def __init__(self) -> None:
        super().__init__(max_rows=1)

    def add(self, call: Call, arrays: Sequence[np.ndarray]) -> None:
        """Queues a call; its arrays are used as they are."""
        batch = Batch(arrays)
        batch.calls.append(call)
        batch.num_rows = 1
        with self._condition:
            if not self._closed:
                self._ready.append(batch)
                self._condition.notify()


class BatchQueue(_Queue):
    """For batched functions: gathers calls into batches of at most `max_rows` rows.

    Args:
      specs: of the inputs; the first dimension is the batch's.
      max_rows: rows of a full batch.
      max_wait: seconds until a batch that is not full runs.
      call_later: as `asyncio.AbstractEventLoop.call_later`; it and `add` run on the same thread.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        max_rows: int,
        max_wait: float,
        call_later: Callable[..., Any],
    ):
        super().__init__(max_rows)
        self._layout: list[tuple[Any, Any]] = [
            ((max_rows, *spec.shape[1:]), spec.dtype) for spec in specs
        ]
        self._max_wait_seconds = max_wait
        self._call_later = call_later
        self._timer: Any = None  # of the open batch
        self._open: Batch | None = None

    def add(self, call: Call, arrays: Sequence[np.ndarray]) -> None:
        """Copies the call's rows into the open batch, or into a new one if they do not fit.

        `call.num_rows` is in [1, max_rows], and every array leads with it.
        """
        with self._condition:
            if self._closed:
                return
            if self._open is not None and self._open.num_rows + call.num_rows > self.max_rows:
                self._finish(self._open)
            batch = self._open
            if batch is None:
                batch = self._open = Batch([np.empty(s, dtype) for s, dtype in self._layout])
            start = batch.num_rows
            end = batch.num_rows = start + call.num_rows
            for into, array in zip(batch.arrays, arrays, strict=True):
                into[start:end] = array
            batch.calls.append(call)
            if end == self.max_rows:
                self._finish(batch)
            elif start == 0:
                self._start_timer(batch)

    def close(self) -> None:
        with self._condition:
            self._open = None
            super().close()

    def _pop(self) -> Batch | None:
        batch = super()._pop()
        if batch is None and self._open is not None and self._open.expired:
            batch, self._open = self._open, None
        return batch

    def _finish(self, batch: Batch) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._open = None
        self._ready.append(batch)
        self._condition.notify()

    def _start_timer(self, batch: Batch) -> None:
        if self._max_wait_seconds > 0:
            self._timer = self._call_later(self._max_wait_seconds, self._expire, batch)
        else:
            batch.expired = True
            self._condition.notify()

    def _expire(self, batch: Batch) -> None:
        with self._condition:
            batch.expired = True
            self._timer = None
            if self._open is batch:
                self._condition.notify()
