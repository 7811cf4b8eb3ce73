"""Packs nests of arrays into one bytes object an item, and large integer leaves without loss."""

import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree
import zstandard

from seed_rl.grpc_service import TensorSpec, to_spec
from seed_rl.nests import check_like, map_nest

MIN_COMPRESSED_BYTES = 4096
# Level 1, without a transform: of 121 random Atari frames of 84×84 (854 kB) it leaves 3 to 8 kB.
# lz4 leaves 10 to 26 kB; differences between successive frames and time as the last dimension
# gain nothing, since the window of zstandard reaches back over whole frames.
_LEVEL = 1
_LENGTH = struct.Struct("<Q")


class ItemCodec:
    """Turns items, which are nests of arrays, into bytes and back.

    Leaves of integers or booleans of at least MIN_COMPRESSED_BYTES an item, such as the frames of
    an unroll, are compressed by zstandard, each on its own, or kept as they are where that would
    not make them smaller. All others are kept as they are. Bytes of an item: the plain leaves,
    then for each compressed one its stored length (uint64, little-endian) and its data.

    Safe for use by several threads. zstandard lets other threads run while it works.
    """

    def __init__(self, specs: Any):
        """Args:
        specs: nest of objects with shape and dtype, of one item.

        Raises:
          ValueError: a size of a shape is unknown.
        """
        self.specs = map_nest(to_spec, specs)
        self._leaf_specs: list[TensorSpec] = optree.tree_leaves(self.specs)
        sizes = [_num_bytes(spec) for spec in self._leaf_specs]
        large = [_is_compressed(spec) for spec in self._leaf_specs]
        self._compressed = [i for i, is_large in enumerate(large) if is_large]
        self._plain = [i for i, is_large in enumerate(large) if not is_large]
        self._ends = np.cumsum([0] + [sizes[i] for i in self._plain])
        self.plain_bytes = int(self._ends[-1])  # of the leaves that are kept as they are
        self.compressed_leaf_bytes = sum(sizes[i] for i in self._compressed)  # before compression
        self.max_item_bytes = (
            self.plain_bytes + self.compressed_leaf_bytes + _LENGTH.size * len(self._compressed)
        )
        self._thread = threading.local()

    def encode(self, values: Any) -> list[bytes]:
        """Returns one bytes object for each of the n items in `values` (leaves [n, …]).

        Raises:
          ValueError: `values` does not fit the specs.
        """
        leaves = optree.tree_leaves(values)
        num_items = len(leaves[0]) if leaves and np.ndim(leaves[0]) else 0
        arrays = check_like(values, self.specs, (num_items,), "values")
        plain = np.empty((num_items, self.plain_bytes), np.uint8)
        for i, start, end in self._plain_ranges():
            plain[:, start:end] = _rows_of_bytes(arrays[i])
        large = [_rows_of_bytes(arrays[i]) for i in self._compressed]
        return [
            b"".join(
                [plain[k].tobytes(), *(part for rows in large for part in self._pack(rows[k]))]
            )
            for k in range(num_items)
        ]

    def decode(self, items: Sequence[bytes]) -> Any:
        """Is the inverse of `encode`: returns a nest of arrays [len(items), …].

        Raises:
          ValueError: an item's bytes are not of these specs.
        """
        arrays = [np.empty((len(items), *_shape(s)), s.dtype) for s in self._leaf_specs]
        plain = [np.frombuffer(self._plain_part(item), np.uint8) for item in items]
        if plain:
            rows = np.stack(plain)
            for i, start, end in self._plain_ranges():
                _rows_of_bytes(arrays[i])[...] = rows[:, start:end]
        large = [_rows_of_bytes(arrays[i]) for i in self._compressed]
        for k, item in enumerate(items):
            position = self.plain_bytes
            for rows in large:
                position = self._unpack(item, position, rows[k])
            if position != len(item):
                raise ValueError(f"An item has {len(item)} bytes, of which {position} are used")
        return optree.tree_unflatten(optree.tree_structure(self.specs), arrays)

    def _plain_ranges(self) -> list[tuple[int, int, int]]:
        """(leaf, first byte, byte after the last) of the leaves kept as they are."""
        ends = self._ends.tolist()
        return list(zip(self._plain, ends[:-1], ends[1:], strict=True))

    def _plain_part(self, item: bytes) -> memoryview:
        if len(item) < self.plain_bytes:
            raise ValueError(f"An item has {len(item)} bytes, expected at least {self.plain_bytes}")
        return memoryview(item)[: self.plain_bytes]

    def _pack(self, row: np.ndarray) -> tuple[bytes, bytes]:
        """Returns (length, data) of one leaf of one item, uint8 [number of bytes]."""
        data = self._compressor().compress(row.data)
        if len(data) >= row.size:
            data = row.tobytes()
        return _LENGTH.pack(len(data)), data

    def _unpack(self, item: bytes, position: int, row: np.ndarray) -> int:
        """Fills `row` from the bytes at `position`; returns the position after them."""
        start = position + _LENGTH.size
        if len(item) < start:
            raise ValueError(f"An item of {len(item)} bytes ends too early")
        end = start + _LENGTH.unpack_from(item, position)[0]
        data = memoryview(item)[start:end]
        if len(data) != end - start:
            raise ValueError(f"An item of {len(item)} bytes ends too early, expected {end}")
        if len(data) == row.size:
            row[:] = np.frombuffer(data, np.uint8)
            return end
        # Straight into its place: as fast as copying it from elsewhere.
        with self._decompressor().stream_reader(data) as reader:
            try:
                num_bytes = reader.readinto(row.data)
            except zstandard.ZstdError as error:
                raise ValueError(f"An item cannot be decompressed: {error}") from error
        if num_bytes != row.size:
            raise ValueError(f"A leaf was decompressed to {num_bytes} bytes, expected {row.size}")
        return end

    # zstandard's objects must not be used by two threads at once.

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._thread, "compressor"):
            self._thread.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        return self._thread.compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._thread, "decompressor"):
            self._thread.decompressor = zstandard.ZstdDecompressor()
        return self._thread.decompressor


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    shape = tuple(size for size in spec.shape if size is not None)
    if len(shape) != len(spec.shape):
        raise ValueError(f"shapes of items must be known in full, got {spec}")
    return shape


def _num_bytes(spec: TensorSpec) -> int:
    return int(np.prod(_shape(spec), dtype=np.int64)) * spec.dtype.itemsize


def _is_compressed(spec: TensorSpec) -> bool:
    # Floats, such as recurrent states and Q-values, hardly get smaller.
    return spec.dtype.kind in "bui" and _num_bytes(spec) >= MIN_COMPRESSED_BYTES


def _rows_of_bytes(array: np.ndarray) -> np.ndarray:
    """Returns an array [n, …] as uint8 [n, bytes a row]; a view if its memory is contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    row_bytes = int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize
    return flat.reshape(len(array), row_bytes)
