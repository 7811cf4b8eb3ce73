"""Environment rows a second with small observations: `python -m seed_rl.benchmarks.rows`.

Everything but the network: clients, wire, batcher, per-environment state, unroll store. A policy of
numpy answers with constant actions, so the figure is the system's own ceiling on this machine.
"""

import argparse
import tempfile
from typing import Any, NamedTuple

import numpy as np

from seed_rl.benchmarks.feeders import Load, feeding, rate
from seed_rl.benchmarks.sinks import DiscardingSink
from seed_rl.episode_statistics import EpisodeStatistics
from seed_rl.grpc_service import Server, TensorSpec
from seed_rl.inference import CentralInference, inference_input_specs, inference_output_specs

_OBSERVATION = TensorSpec((4,), np.dtype(np.float32))
_ACTION = TensorSpec((), np.dtype(np.int32))


class _Output(NamedTuple):
    action: Any
    policy_logits: Any
    baseline: Any


class _ConstantAgent:
    """Has what CentralInference asks of an agent, and answers at once."""

    unroll_length = 20
    num_overlapping_steps = 0

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
    agent: Any = _ConstantAgent()
    inference = CentralInference(
        agent,
        [agent.policy],
        _OBSERVATION,
        _ACTION,
        load.num_envs,
        DiscardingSink(),
        EpisodeStatistics(load.num_envs, action_repeat=1),
        lambda: 0,
        [load.num_envs],
    )
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/s"
        server = Server([address], num_environments=load.num_envs)
        server.bind(
            inference.functions(),
            name="inference",
            input_signature=inference_input_specs(_OBSERVATION),
            output_signature=inference_output_specs(_ACTION),
            max_batch_size=load.envs_per_client,
        )
        server.start()
        try:
            with feeding(address, load, _OBSERVATION):
                return rate(lambda: inference.num_steps, 2.0, seconds)
        finally:
            server.shutdown()


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
