"""The unroll sink of agents that train on unrolls drawn from a replay."""

import pathlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from seed_rl.agent import UnrollSink
from seed_rl.replay import PrioritizedReplay
from seed_rl.replay_files import ReplayFileError
from seed_rl.unroll_queue import QueueClosedError
from seed_rl.unrolls import Unroll, batch_time_major
from seed_rl.user_error import UserError


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
        save: bool = False,
        max_backlog: int = 0,
    ):
        """Args:
        replay: stores the unrolls.
        batch_size: unrolls a training batch.
        min_unrolls: unrolls inserted before the first batch is drawn.
        replay_ratio: unrolls trained on for each one inserted.
        priority_exponent: unrolls are drawn in proportion to their priority to this power.
        initial_priorities: (unrolls: leaves [n, T + 1, …]) -> priorities [n].
        save: save the replay beside every checkpoint, which takes its size on disk and some time.
        max_backlog: how many unrolls training may be behind what the ratio asks for before
          inference has to wait; 0: two batches.

        Raises:
          ValueError: a number is out of its range.
          UserError: with such a max_backlog both sides would wait for ever.
        """
        if batch_size < 1 or min_unrolls < 1 or not replay_ratio > 0:
            raise ValueError(
                "batch_size and min_unrolls must be at least 1 and replay_ratio positive, got "
                f"{batch_size}, {min_unrolls} and {replay_ratio}"
            )
        if 0 < max_backlog < batch_size:
            raise UserError(
                f"max_backlog ({max_backlog}) must be at least the batch_size ({batch_size}), or 0 "
                "for two batches: inference would wait for training, and training for a whole batch"
            )
        self._replay = replay
        self._batch_size = batch_size
        self._min_unrolls = min_unrolls
        self._replay_ratio = replay_ratio
        self._priority_exponent = priority_exponent
        self._initial_priorities = initial_priorities
        self._saves = save
        self._max_backlog = max_backlog or 2 * batch_size
        self._condition = threading.Condition()
        self._closed = False
        self._num_inserted = 0  # those of a restored replay included
        self._first_due = min_unrolls  # the ratio is of the unrolls beyond so many
        self._num_drawn = 0
        self._policy_lag = 0.0

    def put(self, unrolls: Unroll) -> None:
        priorities = np.asarray(self._initial_priorities(unrolls))
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._due() <= self._max_backlog)
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
            # Now, not when training is done: the next batch may be drawn in the meantime.
            self._num_drawn += self._batch_size
            self._condition.notify_all()
        sample = self._replay.sample_with_insertions(self._batch_size, self._priority_exponent)
        return ReplayBatch(
            unrolls=batch_time_major(sample.values),
            weights=sample.weights,
            indices=sample.indices,
            insertions=sample.insertions,
        )

    def training_done(self, batch: ReplayBatch, feedback: Any, training_step: int) -> None:
        """`feedback`: the unrolls' new priorities [B]."""
        if feedback is not None:
            self._replay.update_priorities(batch.indices, np.asarray(feedback), batch.insertions)
        with self._condition:
            self._policy_lag = float(training_step - 1 - np.mean(batch.unrolls.policy_version))

    def metrics(self) -> dict[str, float]:
        with self._condition:
            since_start = self._num_since_start()
            metrics = {
                "replay_unrolls": float(len(self._replay)),
                "replay_megabytes": self._replay.bytes_used / 1e6,
                "policy_lag": self._policy_lag,
            }
            if self._num_inserted < self._min_unrolls:
                metrics["unrolls_until_training"] = float(self._min_unrolls - self._num_inserted)
            if since_start:
                metrics["replay_ratio"] = self._num_drawn / since_start
            return metrics

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def save(self, logdir: str) -> None:
        if self._saves:
            self._replay.save(_replay_file(logdir))

    def restore(self, logdir: str) -> str:
        """Loads the replay that was saved, if there is one that can be read."""
        problem = "there is no saved replay"
        try:
            self._replay.load(_replay_file(logdir))
        except FileNotFoundError:
            pass
        except (OSError, ReplayFileError) as error:
            problem = f"the saved replay cannot be used ({error})"
        restored = len(self._replay)
        if not restored:
            return f"{problem}: training goes on after {self._min_unrolls:,} unrolls were collected"
        with self._condition:
            self._num_inserted = restored
            self._first_due = max(self._min_unrolls, restored)
        return f"restored a replay of {restored:,} unrolls"

    def _num_since_start(self) -> int:
        """How many unrolls came in beyond those that training begins with."""
        return max(0, self._num_inserted - self._first_due)

    def _due(self) -> float:
        """How many unrolls the ratio allows to be trained on, beyond those drawn for it."""
        return self._replay_ratio * self._num_since_start() - self._num_drawn

    def _batch_is_due(self) -> bool:
        return self._num_inserted >= self._min_unrolls and self._due() >= self._batch_size


def _replay_file(logdir: str) -> pathlib.Path:
    return pathlib.Path(logdir) / "checkpoints" / "replay"
