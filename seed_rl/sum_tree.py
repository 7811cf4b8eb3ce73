"""A sum tree: drawing indices in proportion to their masses."""

import numpy as np

_NUM_LEVELS = 5


class SumTree:
    """Masses of indices 0 … capacity - 1, and the sums over their groups.

    The number of levels is fixed, so that each operation is the same few numpy calls whatever the
    capacity: a node has about capacity^(1/5) children, 4 for 1,000 masses and 16 for 1,000,000.
    Sums are always those of the children as they are, never adjusted by differences, so that
    rounding errors do not pile up.

    Not safe for use by several threads at once.
    """

    def __init__(self, capacity: int):
        """Args:
        capacity: number of masses, all 0 at first.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._fan_out = _root(capacity, _NUM_LEVELS)
        # From the masses to the root's children: each row holds the children of one node, whose
        # sum is the mass, at the row's number, in the next level.
        self._levels: list[np.ndarray] = []
        num_nodes = capacity
        for _ in range(_NUM_LEVELS):
            num_nodes = -(-num_nodes // self._fan_out)
            self._levels.append(np.zeros((num_nodes, self._fan_out)))

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._levels[-1].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return sum(level.nbytes for level in self._levels)

    def get(self, indices: np.ndarray) -> np.ndarray:
        """Returns the masses of `indices` [n]: float64 [n]."""
        return self._levels[0].reshape(-1)[indices]

    def set(self, indices: np.ndarray, masses: np.ndarray) -> None:
        """Sets the masses of `indices` [n]; the last one counts where an index comes twice.

        Args:
          indices: integers in [0, capacity).
          masses: [n], finite and at least 0, with a sum over the tree that is finite too.

        Raises:
          IndexError: an index is out of range.
          ValueError: a mass is negative, infinite or NaN.
        """
        nodes, sums = np.asarray(indices, np.int64), np.asarray(masses, np.float64)
        if np.any((nodes < 0) | (nodes >= self.capacity)):
            raise IndexError(f"indices must be in [0, {self.capacity}), got {nodes}")
        if not np.all((sums >= 0) & (sums < np.inf)):
            raise ValueError(f"masses must be finite and at least 0, got {sums}")
        for level in self._levels:
            level.reshape(-1)[nodes] = sums
            nodes = nodes // self._fan_out
            sums = level[nodes].sum(axis=1)

    def find(self, prefix_sums: np.ndarray) -> np.ndarray:
        """Returns for each x of `prefix_sums` [n] the index i with Σ_{j<i} m_j ≤ x < Σ_{j≤i} m_j.

        Up to rounding; a mass of 0 is never found, and an x beyond the total finds the last index
        with mass. With x drawn evenly from [0, total) an index is found with probability m_i/total.

        Args:
          prefix_sums: at least 0.

        Returns:
          int64 [n].

        Raises:
          ValueError: all masses are 0.
        """
        if self.total <= 0:
            raise ValueError("All masses of the sum tree are 0: there is nothing to find")
        x = np.asarray(prefix_sums, np.float64)
        nodes = np.zeros(x.size, np.int64)
        for level in reversed(self._levels):
            children, x = _find_child(level[nodes], x)
            nodes = nodes * self._fan_out + children
        return nodes


def _root(x: int, degree: int) -> int:
    """Returns the smallest whole number whose power of `degree` is at least `x`."""
    root = max(1, round(x ** (1 / degree)) - 1)
    while root**degree < x:
        root += 1
    return root


def _find_child(masses: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds each x [n] among the children's masses [n, k]; returns (child, what is left of x)."""
    ends = np.cumsum(masses, axis=1)
    # A parent's sum and the running sum differ by rounding; x must stay below the latter.
    x = np.minimum(x, np.nextafter(ends[:, -1], 0))
    child = np.count_nonzero(x[:, None] >= ends, axis=1)
    starts = np.where(child > 0, ends[np.arange(x.size), child - 1], 0)
    return child, x - starts
