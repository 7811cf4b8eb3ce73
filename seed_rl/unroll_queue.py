"""The queue between central inference and training, for agents that train on every unroll once."""

import collections
import threading
from typing import Any

import optree


class QueueClosedError(RuntimeError):
    """The queue was closed: the learner is stopping."""

    is_answer = True  # so that the server does not log it as a failure of inference


class UnrollQueue:
    """A bounded first-in first-out queue of unrolls, safe for use by many threads.

    It holds at most `capacity` unrolls: `put` waits while there is no room. That is the learner's
    back-pressure: inference then waits for training, and actors for inference; nothing is dropped.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._unrolls: collections.deque = collections.deque()  # of (leaves, row)
        self._treedef: Any = None
        self._condition = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._unrolls)

    def put(self, unrolls: Any) -> None:
        """Adds n unrolls (leaves [n, …]) in order, each as soon as there is room for it.

        Raises:
          QueueClosedError: the queue is closed, now or while waiting.
        """
        leaves, treedef = optree.tree_flatten(unrolls)
        with self._condition:
            self._treedef = treedef
            for row in range(len(leaves[0])):
                self._condition.wait_for(lambda: self._closed or len(self) < self.capacity)
                if self._closed:
                    raise QueueClosedError("the unroll queue is closed")
                self._unrolls.append((leaves, row))
                self._condition.notify_all()

    def get(self, num_unrolls: int, timeout: float | None = None) -> list[Any] | None:
        """Takes the oldest `num_unrolls` unrolls.

        Args:
          num_unrolls: at most the capacity.
          timeout: seconds to wait for them.

        Returns:
          A list of unrolls (leaves [T + 1, …]), or None when there were too few within `timeout`
          (which stay in the queue).

        Raises:
          QueueClosedError: the queue is closed.
          ValueError: more than the capacity was asked for, which would never come.
        """
        if num_unrolls > self.capacity:
            raise ValueError(
                f"{num_unrolls} unrolls can never be had from a queue of {self.capacity}"
            )
        with self._condition:
            self._condition.wait_for(lambda: self._closed or len(self) >= num_unrolls, timeout)
            if self._closed:
                raise QueueClosedError("the unroll queue is closed")
            if len(self) < num_unrolls:
                return None
            taken = [self._unrolls.popleft() for _ in range(num_unrolls)]
            treedef = self._treedef
            self._condition.notify_all()
        return [
            optree.tree_unflatten(treedef, [leaf[row] for leaf in leaves]) for leaves, row in taken
        ]

    def close(self) -> None:
        """Wakes every waiting thread with QueueClosedError; what is queued is dropped."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
