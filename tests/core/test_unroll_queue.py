"""The bounded queue between inference and training."""

import functools
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

from seed_rl.unroll_queue import QueueClosedError, UnrollQueue

SOON = 20.0  # seconds; how long a test waits for what happens at once


class Item(NamedTuple):
    number: Any
    row: Any


def items(numbers):
    """A batch of unrolls that can be told apart."""
    numbers = np.asarray(numbers, np.int64)
    return Item(numbers, {"x": np.stack([numbers, -numbers], -1)})


def numbers_of(unrolls):
    return [int(unroll.number) for unroll in unrolls]


class Background:
    """Runs a function in a thread; keeps its result or its exception."""

    def __init__(self, function):
        self._function = function
        self.result = self.error = None
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error
        self.done.set()

    def join(self):
        assert self.done.wait(SOON), "still waiting"
        return self


@pytest.fixture
def waiting(monkeypatch):
    """Returns a function that makes a queue and an event, set whenever a thread begins to wait."""

    def make(capacity):
        queue = UnrollQueue(capacity)
        began = threading.Semaphore(0)
        original = queue._condition.wait

        def wait(timeout=None):
            began.release()  # the lock is still held: whoever is told finds the thread waiting
            return original(timeout)

        monkeypatch.setattr(queue._condition, "wait", wait)
        return queue, began

    return make


def test_unrolls_come_out_in_the_order_they_went_in():
    queue = UnrollQueue(8)
    queue.put(items([1, 2, 3]))
    queue.put(items([4]))
    queue.put(items([5, 6]))
    assert len(queue) == 6
    assert numbers_of(queue.get(2)) == [1, 2]
    first, second, third = queue.get(3)
    assert isinstance(first, Item)
    assert [int(first.number), int(second.number), int(third.number)] == [3, 4, 5]
    np.testing.assert_array_equal(second.row["x"], [4, -4])
    assert len(queue) == 1


def test_no_unrolls_to_put_is_nothing():
    queue = UnrollQueue(1)
    queue.put(items([]))
    assert len(queue) == 0


def test_get_with_too_few_returns_none_in_time_and_keeps_what_there_is():
    queue = UnrollQueue(4)
    queue.put(items([1, 2]))
    assert queue.get(3, timeout=0.01) is None
    assert len(queue) == 2
    queue.put(items([3]))
    assert numbers_of(queue.get(3, timeout=0.01)) == [1, 2, 3]


def test_put_waits_for_room_holds_the_bound_and_loses_nothing(waiting):
    queue, began = waiting(3)
    put = Background(lambda: queue.put(items([1, 2, 3, 4, 5, 6, 7])))
    assert began.acquire(timeout=SOON)
    assert len(queue) == 3 and not put.done.is_set()
    assert numbers_of(queue.get(2)) == [1, 2]
    assert began.acquire(timeout=SOON)  # two went in, and no more
    assert len(queue) == 3 and not put.done.is_set()
    assert numbers_of(queue.get(3)) == [3, 4, 5]
    put.join()
    assert put.error is None
    assert numbers_of(queue.get(2)) == [6, 7]


def test_get_waits_until_there_are_enough(waiting):
    queue, began = waiting(4)
    get = Background(lambda: queue.get(2))
    assert began.acquire(timeout=SOON)
    queue.put(items([1]))
    assert began.acquire(timeout=SOON)  # woken by the first, it waits on
    assert not get.done.is_set()
    queue.put(items([2]))
    assert numbers_of(get.join().result) == [1, 2]


def test_many_threads_lose_and_double_nothing():
    queue = UnrollQueue(5)

    def produce(base):
        for i in (0, 2, 4):
            queue.put(items([base + i, base + i + 1]))

    producers = [Background(functools.partial(produce, 100 * i)) for i in (1, 2, 3, 4)]
    consumers = [Background(lambda: [numbers_of(queue.get(4)) for _ in range(3)]) for _ in range(2)]
    for thread in producers + consumers:
        assert thread.join().error is None
    taken = [n for consumer in consumers for batch in consumer.result for n in batch]
    assert sorted(taken) == [base + i for base in (100, 200, 300, 400) for i in range(6)]
    for consumer in consumers:  # each producer's unrolls stay in order
        for base in (100, 200, 300, 400):
            own = [n for batch in consumer.result for n in batch if base <= n < base + 100]
            assert own == sorted(own)


def test_close_wakes_who_waits_to_get_and_who_waits_to_put(waiting):
    empty, began_get = waiting(2)
    full, began_put = waiting(2)
    get = Background(lambda: empty.get(1))
    put = Background(lambda: full.put(items([1, 2, 3])))
    assert began_get.acquire(timeout=SOON) and began_put.acquire(timeout=SOON)
    empty.close()
    full.close()
    assert isinstance(get.join().error, QueueClosedError)
    assert isinstance(put.join().error, QueueClosedError)


def test_a_closed_queue_takes_and_gives_nothing():
    queue = UnrollQueue(2)
    queue.put(items([1]))
    queue.close()
    with pytest.raises(QueueClosedError, match="closed"):
        queue.put(items([2]))
    with pytest.raises(QueueClosedError, match="closed"):
        queue.get(1)


def test_more_than_the_capacity_can_never_be_had():
    with pytest.raises(ValueError, match="3 unrolls can never be had from a queue of 2"):
        UnrollQueue(2).get(3)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        UnrollQueue(0)
