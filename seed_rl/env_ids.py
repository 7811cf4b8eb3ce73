"""Checks on the environment ids that index per-environment state."""

import numpy as np


def check_env_ids(env_ids, num_envs: int, *, distinct: bool = False) -> np.ndarray:
    """Returns `env_ids` as an int64 array [n].

    Args:
      env_ids: [n] integers in [0, num_envs).
      num_envs: number of environments there is state for.
      distinct: whether an id may come only once.

    Raises:
      ValueError: wrong rank, an id out of range, or one that comes twice although `distinct`.
    """
    ids = np.asarray(env_ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(
            f"env_ids must be one-dimensional integers, got {ids.dtype} of shape {ids.shape}"
        )
    ids = ids.astype(np.int64, copy=False)
    if ids.size and (ids.min() < 0 or ids.max() >= num_envs):
        bad = ids[(ids < 0) | (ids >= num_envs)]
        raise ValueError(
            f"env_ids must lie in [0, {num_envs}), got {bad[:8].tolist()}; "
            "raise num_envs or lower the actor's ids"
        )
    if distinct and ids.size > 1:
        seen = np.zeros(num_envs, bool)
        seen[ids] = True
        if np.count_nonzero(seen) != ids.size:
            values, counts = np.unique(ids, return_counts=True)
            raise ValueError(
                f"env_ids must be distinct, got several times: {values[counts > 1][:8].tolist()}"
            )
    return ids
