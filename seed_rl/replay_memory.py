"""How much memory a replay takes, and whether that much is there."""

from typing import Any, NamedTuple

from seed_rl.available_memory import available_bytes
from seed_rl.item_codec import ItemCodec
from seed_rl.user_error import UserError

# What frames are assumed to shrink to where nothing else is known. Atari frames shrink to a
# hundredth or less with random actions; the assumption is kept well on the safe side of that.
ASSUMED_COMPRESSION = 20.0
# With a budget alone, slots are made for items that shrink this much. If they shrink more, the
# number of slots limits the replay and part of the budget stays unused.
_MAX_COMPRESSION = 500.0
# A slot's entry in the list of items, its priority, and its leaf and its part of inner nodes in
# the sum tree, which has about 1 + 1/k + 1/k² nodes a leaf with k children a node.
_SLOT_BYTES = 8 + 8 + 8 * 2
_GIB = 2**30


class ReplayBytes(NamedTuple):
    """What a replay takes once it is full, in bytes."""

    expected: int  # if compressed leaves shrink to 1 / ASSUMED_COMPRESSION
    plain: int  # without any compression: the worst case


def object_bytes(num_bytes: int) -> int:
    """Returns what a bytes object takes: 33 bytes of header, 8 of malloc's, rounded up to 16."""
    return -(-(num_bytes + 33 + 8) // 16) * 16


def estimate_replay_bytes(
    specs: Any, size: int, compression: float = ASSUMED_COMPRESSION
) -> ReplayBytes:
    """Returns what a replay of `size` items of `specs` takes.

    Only what is kept as it is is known; see `PrioritizedReplay.bytes_per_item` for what the items
    of a running replay take.

    Args:
      specs: nest of objects with shape and dtype, of one item.
      size: number of items.
      compression: how many times smaller compressed leaves (see `ItemCodec`) are assumed to get.
    """
    codec = ItemCodec(specs)
    saved = int(codec.compressed_leaf_bytes * (1 - 1 / compression))
    expected = object_bytes(codec.max_item_bytes - saved) + _SLOT_BYTES
    return ReplayBytes(size * expected, size * (object_bytes(codec.max_item_bytes) + _SLOT_BYTES))


def check_replay_fits(
    specs: Any,
    size: int | None,
    max_bytes: int | None = None,
    reserved_bytes: int = 0,
    available: int | None = None,
) -> str:
    """Returns a line that says how much a replay will take; to be called before it is filled.

    Args:
      specs: nest of objects with shape and dtype, of one item.
      size: items held at most, or None.
      max_bytes: bytes held at most, or None.
      reserved_bytes: what the rest of the process is still going to need.
      available: bytes of memory left; None to ask the system.

    Raises:
      UserError: neither size nor max_bytes is given, or it is more than there is memory.
    """
    _check_limits(size, max_bytes)
    if available is None:
        available = available_bytes()
    limits = []
    text = ""
    if size is not None:
        estimate = estimate_replay_bytes(specs, size)
        limits.append(estimate.expected)
        text = (
            f"{size:,} items of {estimate.plain // size:,} bytes, expected to take "
            f"{_gib(estimate.expected)} (assuming that frames shrink to "
            f"1/{ASSUMED_COMPRESSION:g}; {_gib(estimate.plain)} if they cannot be compressed)"
        )
    if max_bytes is not None:
        limits.append(max_bytes)
        text += (", " if text else "") + f"at most {_gib(max_bytes)}"
    if available is None:
        return f"Replay: {text}; how much memory is available is not known here"
    text += f"; available are {_gib(available)}"
    if reserved_bytes:
        text += f", of which {_gib(reserved_bytes)} are kept for other uses"
    if min(limits) > available - reserved_bytes:
        raise UserError(f"The replay does not fit in memory: {text}. Give it a smaller size")
    return f"Replay: {text}"


def max_slots(codec: ItemCodec, size: int | None, max_bytes: int | None) -> int:
    """Returns how many slots a replay of these limits needs.

    Raises:
      UserError: neither limit is given, or one is not positive.
    """
    _check_limits(size, max_bytes)
    if max_bytes is None:
        assert size is not None
        return size
    least = codec.plain_bytes + int(codec.compressed_leaf_bytes / _MAX_COMPRESSION)
    by_budget = max(1, max_bytes // (object_bytes(least) + _SLOT_BYTES))
    return by_budget if size is None else min(size, by_budget)


def check_budget(codec: ItemCodec, base_bytes: int, max_bytes: int | None) -> None:
    """Raises UserError unless max_bytes holds the indices and one item that does not compress."""
    needed = base_bytes + object_bytes(codec.max_item_bytes)
    if max_bytes is not None and needed > max_bytes:
        raise UserError(
            f"The replay's max_bytes must be at least {needed:,}, as one item can take "
            f"{object_bytes(codec.max_item_bytes):,} bytes; it is {max_bytes:,}"
        )


def _check_limits(size: int | None, max_bytes: int | None) -> None:
    if size is None and max_bytes is None:
        raise UserError("The replay needs a size (items), max_bytes, or both; neither is given")
    for name, value in (("size", size), ("max_bytes", max_bytes)):
        if value is not None and value < 1:
            raise UserError(f"The replay's {name} must be at least 1, got {value}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
