"""The unroll sink of agents that train on unrolls drawn from a replay."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from seed_rl.agent import UnrollSink
from seed_rl.replay import PrioritizedReplay
from seed_rl.unroll_queue import QueueClosedError
from seed_rl.unrolls import Unroll, batch_time_major


class ReplayBatch(NamedTuple):
    """A training batch of B unrolls from a replay."""

    unrolls: Unroll  # leaves [T + 1, B, …]
    weights: Any  # float32 [B], importance-sampling weights
    indices: Any  # int64 [B], where they stand in the replay
    insertions: Any  # int64 [B], which of all the unrolls ever inserted they are


class ReplaySink(UnrollSink):
    """A prioritised replay between inference and training, which keeps the two in step.

    The replay ratio is how often an unroll is trained on in the mean. Once `min_unrolls` are
    stored, training takes as many batches as the ratio allows for what came in since, and no more;
    and `put` waits while training is more than a few batches behind, so that inference does not
    run ahead of it.
    """

    def __init__(
        self,
        replay: PrioritizedReplay,
        batch_size: int,
        min_unrolls: int,
        replay_ratio: float,
        priority_exponent: float,
        initial_priorities: Callable[[Unroll], Any],
    ):
        """Args:
        replay: stores the unrolls.
        batch_size: unrolls a training batch.
        min_unrolls: unrolls inserted before the first batch is drawn.
        replay_ratio: unrolls trained on for each one inserted.
        priority_exponent: unrolls are drawn in proportion to their priority to this power.
        initial_priorities: (unrolls: leaves [n, T + 1, …]) -> priorities [n].

        Raises:
          ValueError: a number is out of its range.
        """
        if batch_size < 1 or min_unrolls < 1 or not replay_ratio > 0:
            raise ValueError(
                "batch_size and min_unrolls must be at least 1 and replay_ratio positive, got "
                f"{batch_size}, {min_unrolls} and {replay_ratio}"
            )
        self._replay = replay
        self._batch_size = batch_size
        self._min_unrolls = min_unrolls
        self._replay_ratio = replay_ratio
        self._priority_exponent = priority_exponent
        self._initial_priorities = initial_priorities
        # Training may be this many unrolls behind before inference has to wait.
        self._slack = 2 * batch_size
        self._condition = threading.Condition()
        self._closed = False
        self._num_inserted = 0  # by this sink; those of a restored replay are not trained on anew
        self._num_trained = 0
        self._policy_lag = 0.0

    def put(self, unrolls: Unroll) -> None:
        priorities = np.asarray(self._initial_priorities(unrolls))
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._due() <= self._slack)
            if self._closed:
                raise QueueClosedError("the replay is closed")
        self._replay.insert(unrolls, priorities)
        with self._condition:
            self._num_inserted += len(priorities)
            self._condition.notify_all()

    def next_batch(self, timeout: float) -> ReplayBatch | None:
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._batch_is_due(), timeout)
            if self._closed:
                raise QueueClosedError("the replay is closed")
            if not self._batch_is_due():
                return None
        sample = self._replay.sample_with_insertions(self._batch_size, self._priority_exponent)
        return ReplayBatch(
            unrolls=batch_time_major(sample.values),
            weights=sample.weights,
            indices=sample.indices,
            insertions=sample.insertions,
        )

    def training_done(self, batch: ReplayBatch, feedback: Any, training_step: int) -> None:
        """`feedback`: the unrolls' new priorities [B]."""
        self._replay.update_priorities(batch.indices, np.asarray(feedback), batch.insertions)
        with self._condition:
            self._num_trained += self._batch_size
            self._policy_lag = float(training_step - 1 - np.mean(batch.unrolls.policy_version))
            self._condition.notify_all()

    def metrics(self) -> dict[str, float]:
        with self._condition:
            since_start = max(0, self._num_inserted - self._min_unrolls)
            metrics = {
                "replay_unrolls": float(len(self._replay)),
                "replay_megabytes": self._replay.bytes_used / 1e6,
                "policy_lag": self._policy_lag,
            }
            if since_start:
                metrics["replay_ratio"] = self._num_trained / since_start
            return metrics

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _due(self) -> float:
        """How many unrolls the ratio allows to be trained on, beyond those that have been."""
        since_start = max(0, self._num_inserted - self._min_unrolls)
        return self._replay_ratio * since_start - self._num_trained

    def _batch_is_due(self) -> bool:
        return self._num_inserted >= self._min_unrolls and self._due() >= self._batch_size
