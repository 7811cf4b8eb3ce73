"""Prioritised experience replay (Schaul et al. 2016), as R2D2 uses it (Kapturowski et al. 2019)."""

import os
import threading
from typing import Any, NamedTuple

import numpy as np

from seed_rl import replay_files
from seed_rl.item_codec import MIN_COMPRESSED_BYTES, ItemCodec
from seed_rl.replay_memory import check_budget, max_slots, object_bytes
from seed_rl.sum_tree import SumTree


class Sample(NamedTuple):
    """Items drawn from a replay."""

    indices: np.ndarray  # int64 [num_samples], for update_priorities
    weights: np.ndarray  # float32 [num_samples], importance-sampling weights, at most 1
    values: Any  # nest of arrays [num_samples, …]
    insertions: np.ndarray  # int64 [num_samples], which insertion each item was, from 0


class PrioritizedReplay:
    """A first-in-first-out store of items, such as unrolls, drawn by priority.

    An item is drawn with P(i) = priority_i^e / Σ_k priority_k^e over the items stored, with
    replacement. Items of priority 0 are drawn only with e = 0 (then all are equally likely) or if
    no item has a priority above 0 (the same).

    Powers of priorities are kept in a sum tree for the exponent that was asked for last; asking
    for another one, except 0, raises all priorities to the new power first (some 30 ms for a
    million).

    An index is a slot, which a newer item takes over after `size` insertions. Who updates
    priorities some time after a sample passes on `Sample.insertions`, so that an item that has
    taken over the slot keeps its own priority.

    Items are packed and compressed (see `ItemCodec`) as bytes, each alone. To store once the steps
    that successive unrolls share does not pay: it would save 1.0 to 2.3 kB of the 18 to 23 kB that
    an Atari unroll of R2D2 takes with random actions, since little of that is frames.

    Safe for use by several threads. Nothing is compressed or decompressed under the lock, so that
    insertion never waits for a sample to be unpacked.
    """

    def __init__(
        self,
        size: int | None,
        specs: Any,
        importance_sampling_exponent: float,
        max_bytes: int | None = None,
        seed: int | None = None,
    ):
        """Args:
        size: items held at most; None leaves it to max_bytes.
        specs: nest of objects with shape and dtype, of one item.
        importance_sampling_exponent: β of the weights (1 / (N · P(i)))^β, at least 0.
        max_bytes: bytes held at most, `bytes_used`; the oldest items are dropped for it. Samples
          that were handed out and items on their way in are not counted.
        seed: of the draws; None for another each time.

        Raises:
          UserError: neither size nor max_bytes is given, or the budget cannot hold one item.
          ValueError: an argument is out of range.
        """
        if not 0 <= importance_sampling_exponent < np.inf:
            raise ValueError(
                "importance_sampling_exponent must be finite and at least 0, "
                f"got {importance_sampling_exponent}"
            )
        self._codec = ItemCodec(specs)
        self.size = max_slots(self._codec, size, max_bytes)  # number of slots
        self._importance_sampling_exponent = importance_sampling_exponent
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Everything below is guarded by the lock.
        self._rng = np.random.default_rng(seed)
        self._items: list[bytes | None] = [None] * self.size
        self._priorities = np.zeros(self.size)
        self._exponent = 1.0
        self._tree = SumTree(self.size)  # priorities ** exponent, 0 where a slot is empty
        self._oldest = 0  # insertion number of the oldest item stored
        self._num_inserted = 0
        self._base_bytes = self._tree.nbytes + self._priorities.nbytes + 8 * self.size
        self._item_bytes = 0
        check_budget(self._codec, self._base_bytes, max_bytes)

    @property
    def num_inserted(self) -> int:
        """Items inserted so far, those that were overwritten included."""
        with self._lock:
            return self._num_inserted

    def __len__(self) -> int:
        """Items stored now."""
        with self._lock:
            return self._num_inserted - self._oldest

    @property
    def bytes_used(self) -> int:
        """Bytes of the items, their Python objects (estimated within 16 bytes) and the indices."""
        with self._lock:
            return self._base_bytes + self._item_bytes

    @property
    def bytes_per_item(self) -> float:
        """Mean over the items stored now; NaN while there is none."""
        with self._lock:
            num_items = self._num_inserted - self._oldest
            return self._item_bytes / num_items if num_items else float("nan")

    def insert(self, values: Any, priorities: Any) -> np.ndarray:
        """Adds n items; the oldest ones make room.

        Args:
          values: nest of arrays [n, …] that fits the specs.
          priorities: [n], finite and at least 0.

        Returns:
          int64 [n], the items' indices.

        Raises:
          ValueError: `values` does not fit the specs, or a priority is out of range.
        """
        items = self._codec.encode(values)
        priorities = _check_priorities(priorities, len(items))
        with self._lock:
            powers = _powers(priorities, self._exponent, self.size)
            insertions = self._num_inserted + np.arange(len(items))
            oldest = self._oldest
            for item in items:
                self._append(item)
            dropped = np.arange(oldest, self._oldest) % self.size
            self._tree.set(dropped, np.zeros(dropped.size))
            # Of a slot that comes twice the last one counts.
            slots = insertions % self.size
            self._priorities[slots] = priorities
            alive = insertions >= self._oldest
            self._tree.set(slots[alive], powers[alive])
        return slots

    def sample(self, num_samples: int, priority_exp: float) -> tuple[np.ndarray, np.ndarray, Any]:
        """Draws items: (indices int64 [num_samples], weights float32 [num_samples], values).

        See `sample_with_insertions`, which does the same.
        """
        return self.sample_with_insertions(num_samples, priority_exp)[:3]

    def sample_with_insertions(self, num_samples: int, priority_exp: float) -> Sample:
        """Draws items with replacement, P(i) ∝ priority_i ** priority_exp.

        Args:
          num_samples: at least 1.
          priority_exp: finite, at least 0.

        Returns:
          A Sample. Its weights are (1 / (N · P(i)))^β with N the number of items stored, divided
          by the largest of this sample; 1 with priority_exp 0.

        Raises:
          ValueError: the replay is empty, or an argument is out of range.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        if not 0 <= priority_exp < np.inf:
            raise ValueError(f"priority_exp must be finite and at least 0, got {priority_exp}")
        with self._lock:
            if self._num_inserted == self._oldest:
                raise ValueError("The replay is empty: insert before sampling")
            slots, masses = self._draw(num_samples, priority_exp)
            items: list[Any] = [self._items[slot] for slot in slots]
            insertions = self._latest_insertions(slots)
        # N and the sum of all masses cancel out.
        weights = (masses.min() / masses) ** self._importance_sampling_exponent
        values = self._codec.decode(items)
        return Sample(slots, weights.astype(np.float32), values, insertions)

    def update_priorities(self, indices: Any, priorities: Any, insertions: Any = None) -> int:
        """Gives items that were sampled new priorities; the last one where an index comes twice.

        Args:
          indices: integers [n] that `insert` or `sample` returned.
          priorities: [n], finite and at least 0.
          insertions: `Sample.insertions` [n]. Rows whose item is no longer stored are left out.
            Without it the item that has the slot now gets the priority.

        Returns:
          How many rows were not left out.

        Raises:
          ValueError: an index was never returned, or a priority is out of range.
        """
        slots = np.asarray(indices)
        priorities = _check_priorities(priorities, slots.size)
        with self._lock:
            powers = _powers(priorities, self._exponent, self.size)
            self._check_slots(slots)
            latest = self._latest_insertions(slots)
            alive = latest >= self._oldest
            if insertions is not None:
                alive &= latest == _check_insertions(insertions, slots.size)
            slots = slots[alive]
            self._priorities[slots] = priorities[alive]
            self._tree.set(slots, powers[alive])
        return int(slots.size)

    def save(self, path: str | os.PathLike) -> None:
        """Writes items, priorities and num_inserted to a file, atomically.

        Other threads go on meanwhile; items that are dropped stay in memory until they are written.

        Raises:
          OSError: the file cannot be written.
        """
        with self._lock:
            slots = np.arange(self._oldest, self._num_inserted) % self.size
            items: list[Any] = [self._items[slot] for slot in slots]
            priorities = self._priorities[slots].tolist()
            header = replay_files.Header(self._item_description(), len(items), self._num_inserted)
        replay_files.write_items(path, header, items, priorities)

    def load(self, path: str | os.PathLike) -> None:
        """Restores what `save` wrote, as far as size and budget allow, into an empty replay.

        If size is another one, items have other indices than before. The generator of draws is
        not restored.

        Raises:
          FileNotFoundError: there is no such file.
          ReplayFileError: it is damaged, or its items do not fit the specs; the replay stays empty.
          ValueError: the replay is not empty.
        """
        with self._lock, open(path, "rb") as file:
            if self._num_inserted:
                raise ValueError(
                    f"A replay can be loaded only while it is empty; {self._num_inserted} items "
                    "have been inserted"
                )
            name = os.fspath(path)
            header = replay_files.read_header(file, self._item_description(), name)
            self._oldest = self._num_inserted = header.num_inserted - header.num_items
            try:
                for item, priority in replay_files.read_items(
                    file, header, self._codec.max_item_bytes, name
                ):
                    self._append(item)
                    self._priorities[(self._num_inserted - 1) % self.size] = priority
                slots = np.arange(self._oldest, self._num_inserted) % self.size
                self._tree.set(slots, _powers(self._priorities[slots], self._exponent, self.size))
            except BaseException:
                while self._oldest < self._num_inserted:
                    self._drop_oldest()
                self._oldest = self._num_inserted = 0
                raise

    def _item_description(self) -> dict[str, Any]:
        return replay_files.describe_items(self._codec.specs, MIN_COMPRESSED_BYTES)

    def _append(self, item: bytes) -> None:
        """Stores one item, after dropping the oldest ones as size and budget demand.

        Their masses and its own are left to the caller, who can set many at once.
        """
        needed = object_bytes(len(item))
        while self._num_inserted - self._oldest == self.size or (
            self._max_bytes is not None
            and self._base_bytes + self._item_bytes + needed > self._max_bytes
        ):
            self._drop_oldest()
        self._items[self._num_inserted % self.size] = item
        self._item_bytes += needed
        self._num_inserted += 1

    def _drop_oldest(self) -> None:
        slot = self._oldest % self.size
        item: Any = self._items[slot]
        self._items[slot] = None
        self._item_bytes -= object_bytes(len(item))
        self._oldest += 1

    def _latest_insertions(self, slots: np.ndarray) -> np.ndarray:
        """The insertion numbers of the newest items that `slots` [n] ever held."""
        newest = self._num_inserted - 1
        return newest - (newest - slots) % self.size

    def _draw(self, num_samples: int, exponent: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns slots [num_samples] and masses that their probabilities are in proportion to."""
        if exponent > 0:
            self._raise_to(exponent)
            total = self._tree.total
            if total > 0:
                slots = self._tree.find(self._rng.random(num_samples) * total)
                return slots, self._tree.get(slots)
        insertions = self._rng.integers(self._oldest, self._num_inserted, num_samples)
        return insertions % self.size, np.ones(num_samples)

    def _raise_to(self, exponent: float) -> None:
        """Makes the tree hold priorities ** exponent."""
        if exponent == self._exponent:
            return
        slots = np.arange(self._oldest, self._num_inserted) % self.size
        self._tree.set(slots, _powers(self._priorities[slots], exponent, self.size))
        self._exponent = exponent

    def _check_slots(self, slots: np.ndarray) -> None:
        num_used = min(self.size, self._num_inserted)
        integers = slots.dtype.kind in "iu" or slots.size == 0
        if slots.ndim != 1 or not integers or np.any((slots < 0) | (slots >= num_used)):
            raise ValueError(
                f"indices must be integers [n] in [0, {num_used}), as insert and sample return "
                f"them, got {slots}"
            )


def _check_priorities(priorities: Any, num_items: int) -> np.ndarray:
    array = np.asarray(priorities, np.float64)
    if array.shape != (num_items,):
        raise ValueError(f"priorities must have the shape ({num_items},), got {array.shape}")
    wrong = np.flatnonzero(~((array >= 0) & (array < np.inf)))
    if wrong.size:
        raise ValueError(
            f"priorities must be finite and at least 0, got {array[wrong[0]]} in row {wrong[0]}"
        )
    return array


def _check_insertions(insertions: Any, num_rows: int) -> np.ndarray:
    array = np.asarray(insertions)
    if array.shape != (num_rows,):
        raise ValueError(f"insertions must have the shape ({num_rows},), got {array.shape}")
    return array


def _powers(priorities: np.ndarray, exponent: float, num_slots: int) -> np.ndarray:
    """Returns priorities ** exponent, of which num_slots can be summed without overflow."""
    with np.errstate(over="ignore"):
        powers = priorities**exponent
    if np.any(powers > np.finfo(np.float64).max / num_slots):
        raise ValueError(
            f"a priority of {priorities.max()} to the power of {exponent} is too large to be "
            f"summed over {num_slots} items: scale the priorities down"
        )
    return powers
