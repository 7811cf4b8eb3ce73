"""Files of a replay's items: written atomically, checked while they are read, nothing unpickled.

A file holds _MAGIC; the length and CRC-32 of a header, and the header (JSON: what the items look
like, their number, how many were ever inserted); then the items, oldest first, each as its length,
priority, CRC-32 (of priority and bytes) and bytes. Numbers are little-endian.
"""

import json
import os
import pathlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import optree

from seed_rl.user_error import UserError

_MAGIC = b"SEED RL replay 1\n"
_HEADER = struct.Struct("<II")  # length, CRC-32
_PRIORITY = struct.Struct("<d")
_ITEM = struct.Struct("<QdI")  # length, priority, CRC-32
_MAX_HEADER_BYTES = 2**24


class ReplayFileError(UserError):
    """A file with a replay cannot be read, or holds other items."""


class Header(NamedTuple):
    """What a file says of its items."""

    items: Any  # see describe_items
    num_items: int
    num_inserted: int  # of the replay when it was saved, so that the last item is this one less 1


def describe_items(specs: Any, min_compressed_bytes: int) -> dict[str, Any]:
    """Returns what must be equal for items to be exchanged, as JSON has it."""
    leaves = zip(optree.tree_accessors(specs), optree.tree_leaves(specs), strict=True)
    return {
        "leaves": [[path.codify("item"), str(s.dtype), list(s.shape)] for path, s in leaves],
        "min_compressed_bytes": min_compressed_bytes,
    }


def write_items(
    path: str | os.PathLike,
    header: Header,
    items: Sequence[bytes],
    priorities: Sequence[float],
) -> None:
    """Writes a file; one that was there before is replaced once the new one is complete.

    One process at a time may write to a path.

    Raises:
      OSError: it cannot be written.
    """
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)  # of several hosts, one alone has checkpoints
    # Always of the same name, so that what a process left that was killed is written over.
    partial = target.with_name(f"{target.name}.partial")
    with open(partial, "wb") as file:
        try:
            _write(file, header, items, priorities)
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            os.unlink(partial)
            raise
    _sync_folder(target.parent)


def read_header(file: BinaryIO, items: Any, name: str) -> Header:
    """Reads a file up to its items.

    Args:
      file: at its beginning.
      items: what the items must be like, see describe_items.
      name: of the file, for messages.

    Raises:
      ReplayFileError: it is no such file, is damaged, or holds items of another kind.
    """
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ReplayFileError(f"{name} is no file of a replay that this version can read")
    length, crc = _HEADER.unpack(_read_exactly(file, _HEADER.size, name))
    text = _read_exactly(file, length, name) if length <= _MAX_HEADER_BYTES else b""
    if len(text) != length or zlib.crc32(text) != crc:
        raise _damaged(name, "its header is not what was written")
    header = Header(**json.loads(text))
    if header.items != items:
        raise ReplayFileError(
            f"{name} holds items of another kind. Expected: {json.dumps(items)}. "
            f"In the file: {json.dumps(header.items)}"
        )
    return header


def read_items(
    file: BinaryIO, header: Header, max_item_bytes: int, name: str
) -> Iterator[tuple[bytes, float]]:
    """Reads (item, priority) one by one, after read_header.

    Raises:
      ReplayFileError: the file is damaged.
    """
    for number in range(header.num_items):
        length, priority, crc = _ITEM.unpack(_read_exactly(file, _ITEM.size, name))
        if length > max_item_bytes:
            raise _damaged(name, f"item {number} has {length} bytes, more than {max_item_bytes}")
        item = _read_exactly(file, length, name)
        if _item_crc(item, priority) != crc:
            raise _damaged(name, f"item {number} is not what was written")
        yield item, priority
    if file.read(1):
        raise _damaged(name, "it goes on after its last item")


def _write(file: Any, header: Header, items: Sequence[bytes], priorities: Sequence[float]) -> None:
    text = json.dumps(header._asdict()).encode()
    file.write(_MAGIC + _HEADER.pack(len(text), zlib.crc32(text)) + text)
    for item, priority in zip(items, priorities, strict=True):
        file.write(_ITEM.pack(len(item), priority, _item_crc(item, priority)))
        file.write(item)


def _item_crc(item: bytes, priority: float) -> int:
    return zlib.crc32(item, zlib.crc32(_PRIORITY.pack(priority)))


def _read_exactly(file: BinaryIO, num_bytes: int, name: str) -> bytes:
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise _damaged(name, "it ends too early")
    return data


def _damaged(name: str, how: str) -> ReplayFileError:
    return ReplayFileError(f"{name} is damaged: {how}. Delete it to start with an empty replay")


def _sync_folder(folder: pathlib.Path) -> None:
    """Makes the new name of a file last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
