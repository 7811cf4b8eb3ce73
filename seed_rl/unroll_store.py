"""Cuts the steps of many environments into unrolls."""

from typing import Any

import numpy as np
import optree

from seed_rl.env_ids import check_env_ids
from seed_rl.grpc_service import TensorSpec, to_spec
from seed_rl.nests import check_like, map_nest


class UnrollStore:
    """Collects steps by environment and hands out an unroll whenever one is complete.

    An unroll holds num_overlapping_steps + unroll_length + 1 steps. Its last
    num_overlapping_steps + 1 steps are also the first of the next one: the one because rewards are
    shifted by one step against actions, the others as burn-in of a recurrent network (R2D2). The
    first unroll of an environment, and the first after a reset, begins with zeros in place of the
    overlap.

    Not safe for use by several threads at once.
    """

    def __init__(
        self, num_envs: int, unroll_length: int, timestep_specs: Any, num_overlapping_steps: int = 0
    ):
        """Args:
        num_envs: number of environments.
        unroll_length: T, transitions an unroll adds.
        timestep_specs: nest of objects with shape and dtype, of one step of one environment.
        num_overlapping_steps: steps repeated from the unroll before, beyond the one always shared.
        """
        if unroll_length < 1 or num_overlapping_steps < 0:
            raise ValueError(
                "unroll_length must be at least 1 and num_overlapping_steps at least 0, "
                f"got {unroll_length} and {num_overlapping_steps}"
            )
        self.num_envs = num_envs
        self.full_length = num_overlapping_steps + unroll_length + 1
        self._overlap = num_overlapping_steps
        self._specs = map_nest(to_spec, timestep_specs)
        self._leaves = [
            np.zeros((num_envs, self.full_length, *s.shape), s.dtype)
            for s in optree.tree_leaves(self._specs)
        ]
        self._next_step = np.full(num_envs, num_overlapping_steps, np.int64)

    @property
    def unroll_specs(self) -> Any:
        """Nest of TensorSpec of one unroll: leaves [full_length, …]."""
        return map_nest(
            lambda s: TensorSpec((self.full_length, *s.shape), s.dtype, s.name), self._specs
        )

    def append(self, env_ids, values: Any) -> tuple[np.ndarray, Any]:
        """Adds one step to each of `env_ids` [n] (`values`: leaves [n, …]).

        Returns:
          (completed_env_ids int64 [m], unrolls: leaves [m, full_length, …], copies).

        Raises:
          ValueError: an id comes twice or is out of range, or `values` does not fit the specs.
        """
        ids = check_env_ids(env_ids, self.num_envs, distinct=True)
        arrays = check_like(values, self._specs, (ids.size,), "values")
        steps = self._next_step[ids]
        for leaf, array in zip(self._leaves, arrays, strict=True):
            leaf[ids, steps] = array
        self._next_step[ids] = steps + 1
        completed = ids[steps + 1 == self.full_length]
        unrolls = optree.tree_unflatten(
            optree.tree_structure(self._specs), [leaf[completed] for leaf in self._leaves]
        )
        if completed.size:
            self._open_next(completed)
        return completed, unrolls

    def positions(self, env_ids) -> np.ndarray:
        """Returns where in their unrolls the next steps of `env_ids` [n] will stand: int64 [n]."""
        return self._next_step[check_env_ids(env_ids, self.num_envs)]

    def reset(self, env_ids) -> None:
        """Drops the half-built unrolls of `env_ids` [n] with their overlap."""
        ids = check_env_ids(env_ids, self.num_envs)
        self._next_step[ids] = self._overlap
        for leaf in self._leaves:
            leaf[ids, : self._overlap] = 0

    def _open_next(self, ids: np.ndarray) -> None:
        keep = self._overlap + 1
        for leaf in self._leaves:
            leaf[ids, :keep] = leaf[ids, -keep:]
        self._next_step[ids] = keep
