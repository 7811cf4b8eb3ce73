"""Central inference beside the bare compiled policy: `python -m seed_rl.benchmarks.inference`.

Rows a second through clients, wire, batcher, per-environment state and unroll store, against the
same compiled policy called in a loop on constant data, at the same batch size in the same process.
Measured in turns, the median of the repetitions counts. Finished unrolls are thrown away.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

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
    parser.add_argument("--seconds", type=float, default=5.0, help="for each measurement")
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each")
    parser.add_argument("--agent", choices=workload.AGENTS, default="vtrace")
    args = parser.parse_args()
    load = Load(args.clients, args.envs_per_client)
    agent = workload.make_agent(args.agent, load.num_envs)
    policy = tf.function(agent.policy, autograph=False)
    bare, central = [], []
    for _ in range(args.repetitions):  # in turns, since the machine's own speed drifts
        bare.append(bare_rows_per_second(policy, agent, args.batch_size, args.seconds))
        central.append(
            central_rows_per_second(
                agent,
                [policy] * args.inference_threads,
                workload.specs(),
                load,
                args.batch_size,
                args.batch_size,
                args.seconds,
            )
        )
    bare.append(bare_rows_per_second(policy, agent, args.batch_size, args.seconds))
    around = [(before + after) / 2 for before, after in itertools.pairwise(bare)]
    ratios = [rate / beside for rate, beside in zip(central, around, strict=True)]
    print(
        f"{args.agent}, {args.clients} clients × {args.envs_per_client} environments, "
        f"batch {args.batch_size}, {args.inference_threads} inference threads\n"
        f"bare compiled policy   {statistics.median(bare):8.0f} rows/s, of {_rounded(bare)}\n"
        f"central inference      {statistics.median(central):8.0f} rows/s, of {_rounded(central)}\n"
        f"ratio                  {statistics.median(ratios):8.2f}  (bar: 0.85), of "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )


def _rounded(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.0f}" for rate in rates)


if __name__ == "__main__":
    main()
