"""Batches got ready by a thread of their own."""

import threading

import numpy as np
import pytest

from seed_rl.prefetching import PlacedBatch, PrefetchingSink
from seed_rl.unroll_queue import QueueClosedError

SOON = 60.0


class NumberedBatches:
    """Gives the numbers 0, 1, 2, … as far as allowed, then waits; notes what it is told."""

    def __init__(self, allowed, error=None):
        self.allowed, self.error = allowed, error
        self.drawn, self.done, self.calls = 0, [], []
        self.changed = threading.Condition()
        self.closed = False

    def next_batch(self, timeout):
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.drawn < self.allowed, timeout)
            if self.closed:
                raise QueueClosedError("closed")
            if self.drawn >= self.allowed:
                if self.error is not None:
                    raise self.error
                return None
            self.drawn += 1
            self.changed.notify_all()
            return self.drawn - 1

    def wait_until_drawn(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: self.drawn >= number, SOON)

    def training_done(self, batch, feedback, training_step):
        self.done.append((batch, feedback, training_step))

    def put(self, unrolls):
        self.calls.append(("put", unrolls))

    def metrics(self):
        return {"queue_length": 3.0}

    def save(self, logdir):
        self.calls.append(("save", logdir))

    def restore(self, logdir):
        return f"restored from {logdir}"

    def close(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def place(batch):
    return ("placed", batch)


def test_batches_come_in_order_and_none_is_lost():
    inner = NumberedBatches(5)
    sink = PrefetchingSink(inner, place)
    batches = [sink.next_batch(SOON) for _ in range(5)]
    assert batches == [PlacedBatch(i, ("placed", i)) for i in range(5)]
    assert sink.next_batch(0.01) is None
    sink.training_done(batches[0], "feedback", 1)
    assert inner.done == [(0, "feedback", 1)]
    sink.close()


def test_the_next_batch_is_drawn_while_one_is_trained_on_and_not_many_more():
    inner = NumberedBatches(100)
    sink = PrefetchingSink(inner, place)
    assert sink.next_batch(SOON).host == 0
    inner.wait_until_drawn(2)
    assert sink.next_batch(SOON).host == 1
    inner.wait_until_drawn(3)
    sink.close()
    assert inner.drawn == 3


def test_nothing_is_drawn_before_training_asks():
    inner = NumberedBatches(5)
    sink = PrefetchingSink(inner, place)
    assert sink.restore("logs") == "restored from logs"
    sink.put("unrolls")
    sink.save("logs")
    assert inner.calls == [("put", "unrolls"), ("save", "logs")]
    assert sink.metrics() == {"queue_length": 3.0}
    assert inner.drawn == 0
    sink.close()


@pytest.mark.parametrize("allowed", [0, 100])
def test_close_ends_the_thread_and_who_waits(allowed):
    sink = PrefetchingSink(NumberedBatches(allowed), place)
    sink.next_batch(0.01)
    sink.close()
    assert not sink._thread.is_alive()
    with pytest.raises(QueueClosedError):
        sink.next_batch(SOON)


def test_what_goes_wrong_in_the_thread_is_raised_where_training_is():
    sink = PrefetchingSink(NumberedBatches(1, error=RuntimeError("a torn replay")), place)
    assert sink.next_batch(SOON).host == 0
    with pytest.raises(RuntimeError, match="a torn replay"):
        sink.next_batch(SOON)
    sink.close()


def test_a_replay_draws_no_more_than_its_ratio_allows():
    from seed_rl.replay_sink import ReplaySink
    from seed_rl.unrolls import Unroll

    class Sample:
        values = Unroll((), np.zeros((2, 3)), (), (), np.zeros(2), np.zeros(2))
        weights = np.ones(2)
        indices = insertions = np.arange(2)

    class Replay:
        def insert(self, values, priorities):
            pass

        def sample_with_insertions(self, number, exponent):
            return Sample()

        def update_priorities(self, *args):
            pass

    inner = ReplaySink(Replay(), 2, 2, 0.5, 1.0, lambda unrolls: np.ones(2))
    sink = PrefetchingSink(inner, place)
    for _ in range(5):  # 8 of the 10 come after the first two: 4 to train on, two batches
        inner.put("unrolls")
    taken = [sink.next_batch(SOON) for _ in range(2)]
    assert all(batch is not None for batch in taken)
    assert sink.next_batch(0.05) is None
    for step, batch in enumerate(taken, 1):
        sink.training_done(batch, np.ones(2), step)
    assert sink.next_batch(0.05) is None
    sink.close()
