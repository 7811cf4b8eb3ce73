"""Unrolls: what inference collects and training consumes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

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
