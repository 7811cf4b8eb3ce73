"""Training in step with other hosts: on a batch when all of them have one."""

from collections.abc import Callable
from typing import Any

from seed_rl.agent import SinkWrapper, UnrollSink
from seed_rl.hosts import HostGroup, Meeting


class LockstepSink(SinkWrapper):
    """Another sink, whose batches wait until every host has one.

    Every call of `next_batch` is a round of all hosts. A host without a batch takes part too, so
    that none waits for another longer than `next_batch` waits for data, and all hear at the same
    time that one is to end.
    """

    def __init__(self, sink: UnrollSink, hosts: HostGroup, status: Callable[[], tuple[bool, int]]):
        """Args:
        sink: where the batches come from.
        hosts: those that train together.
        status: returns whether this host is to end, and its agent steps so far.
        """
        super().__init__(sink)
        self._hosts, self._status = hosts, status
        self._batch: Any = None
        self.meeting = Meeting(0, 0, 0)  # the last one

    def next_batch(self, timeout: float) -> Any:
        """Returns this host's batch if all have one; None: they have not, or one is to end."""
        if self._batch is None:
            self._batch = self._sink.next_batch(timeout)
        self.meeting = self._hosts.meet(self._batch is not None, *self._status())
        if self.meeting.num_ready < self._hosts.size or self.meeting.num_stopping:
            return None
        batch, self._batch = self._batch, None
        return batch
