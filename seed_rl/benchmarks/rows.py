"""Environment rows a second with small observations: `python -m seed_rl.benchmarks.rows`.

Everything but the network: clients, wire, batcher, per-environment state, unroll store. A policy of
numpy answers with constant actions, so the figure is the system's own ceiling on this machine.
"""

import argparse
from typing import Any, NamedTuple

import numpy as np

from seed_rl.benchmarks.central import central_rows_per_second
from seed_rl.benchmarks.feeders import Load
from seed_rl.grpc_service import TensorSpec

_OBSERVATION = TensorSpec((4,), np.dtype(np.float32))
_ACTION = TensorSpec((), np.dtype(np.int32))


class _Output(NamedTuple):
    action: Any
    policy_logits: Any
    baseline: Any


class ConstantAgent:
    """Has what CentralInference asks of an agent, and answers at once."""

    unroll_length = 20
    num_overlapping_steps = 0
    num_eval_envs = 0

    def initial_state(self, batch_size: int) -> tuple:
        del batch_size
        return ()

    def policy(self, env_ids, prev_actions, env_outputs, agent_state):
        del prev_actions, env_outputs
        n = len(env_ids)
        return (
            _Output(np.zeros(n, np.int32), np.zeros((n, 2), np.float32), np.zeros(n, np.float32)),
            agent_state,
        )


def rows_per_second(load: Load, seconds: float) -> float:
    """Returns rows a second through the whole path, without a network."""
    agent: Any = ConstantAgent()
    return central_rows_per_second(
        agent,
        [agent.policy],
        (_OBSERVATION, _ACTION),
        load,
        batch_size=load.envs_per_client,
        padded_size=load.num_envs,
        seconds=seconds,
    )


def main() -> None:
    """Prints the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--envs_per_client", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    figure = rows_per_second(Load(args.clients, args.envs_per_client), args.seconds)
    print(
        f"{args.clients} clients × {args.envs_per_client} environments of 4 floats: "
        f"{figure:,.0f} rows/s  (bar: 1,000,000)"
    )


if __name__ == "__main__":
    main()
