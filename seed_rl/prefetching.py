"""Getting the next training batch ready while the present one is trained on."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from seed_rl.agent import SinkWrapper, UnrollSink
from seed_rl.unroll_queue import QueueClosedError

_POLL_SECONDS = 0.5  # how often the thread asks a sink that has no batch


class PlacedBatch(NamedTuple):
    """A batch that is on its way to the devices that train, or there already."""

    host: Any  # as the sink gave it
    placed: Any  # as the training step takes it


class PrefetchingSink(SinkWrapper):
    """Another sink, whose batches a thread of its own draws, stacks and sends to the devices.

    Batches come as PlacedBatch: so copies to a device overlap with the training step before. One
    batch is ahead at most. From a replay it is drawn before the priorities of the batch that is
    being trained on are updated.
    """

    def __init__(self, sink: UnrollSink, place: Callable[[Any], Any]):
        """Args:
        sink: where the batches come from; its next_batch and training_done are called by two
          threads.
        place: sends a batch to the devices, as Trainer.place.
        """
        super().__init__(sink)
        self._place = place
        self._changed = threading.Condition()
        self._ready: Any = None
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._fetch, name="prefetch", daemon=True)
        self._started = False

    def next_batch(self, timeout: float) -> PlacedBatch | None:
        if not self._started:  # not before whoever restores a replay has done so
            self._started = True
            self._thread.start()
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._error or self._ready is not None, timeout
            )
            if self._closed:
                raise QueueClosedError("the sink is closed")
            if self._ready is None and self._error is not None:
                raise self._error
            batch, self._ready = self._ready, None
            self._changed.notify_all()
        return batch

    def training_done(self, batch: PlacedBatch, feedback: Any, training_step: int) -> None:
        self._sink.training_done(batch.host, feedback, training_step)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sink.close()
        if self._started:
            self._thread.join()

    def _fetch(self) -> None:
        error: Exception | None = None
        while error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ready is None)
                if self._closed:
                    return
            batch = None
            try:
                host = self._sink.next_batch(_POLL_SECONDS)
                if host is not None:
                    batch = PlacedBatch(host, self._place(host))
            except Exception as raised:  # the training thread raises it
                error = raised
            with self._changed:
                self._ready, self._error = batch, error
                self._changed.notify_all()
