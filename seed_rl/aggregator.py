"""State kept for each environment, indexed by env_id."""

from typing import Any

import numpy as np
import optree

from seed_rl.env_ids import check_env_ids
from seed_rl.grpc_service import to_spec
from seed_rl.nests import check_like, map_nest


class Aggregator:
    """Holds one row of a nest for every environment, all zeros at first.

    Not safe for use by several threads at once.
    """

    def __init__(self, num_envs: int, specs: Any):
        """Args:
        num_envs: number of environments.
        specs: nest of objects with shape and dtype (tf.TensorSpec, arrays, …): one row's.
        """
        self.num_envs = num_envs
        self.specs = map_nest(to_spec, specs)
        self._state = map_nest(lambda s: np.zeros((num_envs, *s.shape), s.dtype), self.specs)

    def reset(self, env_ids) -> None:
        """Sets the rows of `env_ids` [n] to zero."""
        ids = check_env_ids(env_ids, self.num_envs)
        for state in optree.tree_leaves(self._state):
            state[ids] = 0

    def add(self, env_ids, values: Any) -> None:
        """Adds `values` (leaves [n, …]) to the rows of `env_ids` [n]; an id may come twice."""
        ids = check_env_ids(env_ids, self.num_envs)
        for state, value in self._pairs(ids, values):
            np.add.at(state, ids, value)

    def read(self, env_ids) -> Any:
        """Returns a copy of the rows of `env_ids` [n]: leaves [n, …]."""
        ids = check_env_ids(env_ids, self.num_envs)
        return map_nest(lambda state: state[ids], self._state)

    def replace(self, env_ids, values: Any) -> None:
        """Sets the rows of `env_ids` [n] to `values` (leaves [n, …]).

        Raises:
          ValueError: an id comes twice (which of its values would stay?), is out of range, or
            `values` does not fit the specs.
        """
        ids = check_env_ids(env_ids, self.num_envs, distinct=True)
        for state, value in self._pairs(ids, values):
            state[ids] = value

    def _pairs(self, ids: np.ndarray, values: Any):
        arrays = check_like(values, self.specs, (ids.size,), "values")
        return zip(optree.tree_leaves(self._state), arrays, strict=True)
