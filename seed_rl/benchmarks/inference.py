"""Central inference beside the bare compiled policy: `python -m seed_rl.benchmarks.inference`.

Rows a second through clients, wire, batcher, per-environment state and unroll store, against the
same compiled policy called in a loop on constant data, at the same batch size in the same process.
Finished unrolls are thrown away.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from seed_rl.benchmarks import workload
from seed_rl.benchmarks.central import central_rows_per_second
from seed_rl.benchmarks.feeders import Load, constant_env_outputs


def bare_rows_per_second(policy: Callable, agent, batch_size: int, seconds: float) -> float:
    """Returns rows a second of the compiled policy alone."""
    observation_specs, _ = workload.specs()
    inputs = (
        np.arange(batch_size, dtype=np.int32),
        np.zeros(batch_size, np.int32),
        constant_env_outputs(batch_size, observation_specs),
        agent.initial_state(batch_size),
    )
    for _ in range(5):
        policy(*inputs)
    began, calls = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        outputs, _ = policy(*inputs)
        outputs.action.numpy()
        calls += 1
    return calls * batch_size / (time.monotonic() - began)


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--envs_per_client", type=int, default=32)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--inference_threads", type=int, default=2, help="as the learner's")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement")
    parser.add_argument("--agent", choices=workload.AGENTS, default="vtrace")
    args = parser.parse_args()
    load = Load(args.clients, args.envs_per_client)
    agent = workload.make_agent(args.agent, load.num_envs)
    policy = tf.function(agent.policy, autograph=False)
    before = bare_rows_per_second(policy, agent, args.batch_size, args.seconds)
    central = central_rows_per_second(
        agent,
        [policy] * args.inference_threads,
        workload.specs(),
        load,
        args.batch_size,
        args.batch_size,
        args.seconds,
    )
    after = bare_rows_per_second(policy, agent, args.batch_size, args.seconds)
    bare = (before + after) / 2
    print(
        f"{args.agent}, {args.clients} clients × {args.envs_per_client} environments, "
        f"batch {args.batch_size}, {args.inference_threads} inference threads\n"
        f"bare compiled policy   {bare:8.0f} rows/s ({before:.0f} before, {after:.0f} after)\n"
        f"central inference      {central:8.0f} rows/s\n"
        f"ratio                  {central / bare:8.2f}  (bar: 0.85)"
    )


if __name__ == "__main__":
    main()
