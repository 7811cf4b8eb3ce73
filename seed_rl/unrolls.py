"""Unrolls: what inference collects and training consumes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import optree

from seed_rl.nests import map_nest


class Timestep(NamedTuple):
    """One step of one environment as central inference saw it."""

    prev_action: Any  # the action that led to env_output
    env_output: Any  # EnvOutput
    agent_output: Any  # what the network made of it: the action taken next among it


class Unroll(NamedTuple):
    """Successive steps of one environment, or of a batch of them.

    Stored batch-major: [T + 1, …] an unroll. Trained on time-major: [T + 1, B, …].
    """

    agent_state: Any  # recurrent state before the first step: no time dimension
    prev_actions: Any
    env_outputs: Any
    agent_outputs: Any
    env_id: Any  # int32 scalar
    policy_version: Any  # int64 scalar: training steps done when the first step was taken


_WITHOUT_TIME = ("agent_state", "env_id", "policy_version")


def batch_time_major(unrolls: Unroll) -> Unroll:
    """Turns a batch of unrolls from leaves [B, T + 1, …] to [T + 1, B, …], copied.

    Leaves without a time dimension (agent_state, env_id, policy_version) stay [B, …].
    """
    fields = {
        field: map_nest(
            np.asarray
            if field in _WITHOUT_TIME
            else lambda x: np.ascontiguousarray(np.swapaxes(x, 0, 1)),
            getattr(unrolls, field),
        )
        for field in Unroll._fields
    }
    return Unroll(**fields)


def stack_time_major(unrolls: Sequence[Unroll]) -> Unroll:
    """Batches unrolls (leaves [T + 1, …]) into one Unroll with leaves [T + 1, B, …].

    Leaves without a time dimension (agent_state, env_id, policy_version) become [B, …]. Each frame
    is copied once.
    """

    def stack(axis: int, *leaves: Any) -> np.ndarray:
        return np.stack(leaves, axis=axis)

    fields = {}
    for field in Unroll._fields:
        axis = 0 if field in _WITHOUT_TIME else 1
        rows = [getattr(unroll, field) for unroll in unrolls]
        fields[field] = map_nest(lambda *leaves, axis=axis: stack(axis, *leaves), *rows)
    return Unroll(**fields)


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """Cuts a training batch into equal parts along its batch dimension, in order.

    Args:
      batch: nest of arrays. Of an Unroll in it the leaves are [T + 1, B, …], but for those without
        a time dimension; these, and whatever is no Unroll, are [B, …].
      num_parts: how many; 1 gives the batch itself.

    Returns:
      As many nests, of views.

    Raises:
      ValueError: B does not divide by num_parts.
    """
    if num_parts == 1:
        return [batch]

    def split(x: Any, axis: int) -> list[np.ndarray]:
        x = np.asarray(x)
        if x.ndim <= axis or x.shape[axis] % num_parts:
            raise ValueError(
                f"a batch of leaves such as {x.dtype} {x.shape} cannot be divided by {num_parts} "
                f"along axis {axis}"
            )
        return np.split(x, num_parts, axis)

    leaves, treedef = optree.tree_flatten(batch)
    axes = optree.tree_leaves(_batch_axes(batch))
    parts = zip(*(split(x, axis) for x, axis in zip(leaves, axes, strict=True)), strict=True)
    return [optree.tree_unflatten(treedef, part) for part in parts]


def _batch_axes(batch: Any) -> Any:
    def axes(node: Any) -> Any:
        if not isinstance(node, Unroll):
            return 0
        fields = {
            field: map_nest(
                lambda _, axis=0 if field in _WITHOUT_TIME else 1: axis, getattr(node, field)
            )
            for field in Unroll._fields
        }
        return Unroll(**fields)

    return optree.tree_map(axes, batch, is_leaf=lambda node: isinstance(node, Unroll))
