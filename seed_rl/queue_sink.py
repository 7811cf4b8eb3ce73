"""The unroll sink of agents that train on every unroll once."""

from typing import Any

import numpy as np

from seed_rl.agent import UnrollSink
from seed_rl.unroll_queue import UnrollQueue
from seed_rl.unrolls import Unroll, stack_time_major


class QueueSink(UnrollSink):
    """A bounded queue in front of training."""

    def __init__(self, batch_size: int, capacity: int):
        """Args:
        batch_size: unrolls a training batch.
        capacity: unrolls held at most; the more, the older the policy that made them.
        """
        self._batch_size = batch_size
        self._queue = UnrollQueue(capacity)
        self._policy_lag = 0.0  # mean over the last batch's unrolls, from their first steps

    def put(self, unrolls: Unroll) -> None:
        self._queue.put(unrolls)

    def next_batch(self, timeout: float) -> Unroll | None:
        unrolls = self._queue.get(self._batch_size, timeout)
        return None if unrolls is None else stack_time_major(unrolls)

    def training_done(self, batch: Unroll, feedback: Any, training_step: int) -> None:
        # The step itself is no lag: the one before it saw the newest parameters.
        self._policy_lag = float(training_step - 1 - np.mean(batch.policy_version))

    def metrics(self) -> dict[str, float]:
        return {
            "queue_length": float(len(self._queue)),
            "policy_lag": self._policy_lag,
        }

    def close(self) -> None:
        self._queue.close()
