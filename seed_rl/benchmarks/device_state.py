"""Recurrent state on the host or on the device: `python -m seed_rl.benchmarks.device_state`.

Central inference keeps each environment's recurrent state in numpy on the host and sends the rows
of a batch to the inference device and back. Here the same compiled policy runs on constant data in
two ways, in turns: with the state travelling, and with tables of it on the device, from which the
step itself takes rows and to which it returns them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from seed_rl.agent import Agent
from seed_rl.benchmarks import workload
from seed_rl.benchmarks.feeders import constant_env_outputs
from seed_rl.nests import map_nest


def travelling_state(agent: Agent, inputs: tuple, num_envs: int) -> Callable[[], Any]:
    """Returns a step that reads states of numpy tables and writes them back, as the learner does.

    Args:
      agent: whose policy runs.
      inputs: (env_ids, prev_actions, env_outputs) of a batch.
      num_envs: rows of the tables.
    """
    policy = tf.function(agent.policy, autograph=False)
    tables = map_nest(np.asarray, agent.initial_state(num_envs))
    tables = map_nest(np.copy, tables)
    env_ids = inputs[0]

    def step() -> np.ndarray:
        outputs, states = policy(*inputs, map_nest(lambda table: table[env_ids], tables))
        states = map_nest(np.asarray, states)
        map_nest(lambda table, rows: table.__setitem__(env_ids, rows), tables, states)
        return np.asarray(outputs.action)

    return step


def resident_state(agent: Agent, inputs: tuple, num_envs: int) -> Callable[[], Any]:
    """Returns a step that keeps the states on the device, and otherwise does the same."""
    tables = tf.nest.map_structure(
        lambda x: tf.Variable(x, trainable=False), agent.initial_state(num_envs)
    )

    @tf.function(autograph=False)
    def policy(env_ids: Any, prev_actions: Any, env_outputs: Any) -> Any:
        states = tf.nest.map_structure(lambda table: tf.gather(table, env_ids), tables)
        outputs, states = agent.policy(env_ids, prev_actions, env_outputs, states)
        for table, rows in zip(tf.nest.flatten(tables), tf.nest.flatten(states), strict=True):
            table.scatter_update(tf.IndexedSlices(rows, env_ids))
        return outputs

    return lambda: np.asarray(policy(*inputs).action)


def rows_per_second(step: Callable[[], Any], batch_size: int, seconds: float) -> float:
    """Returns rows a second of a step of `batch_size` rows."""
    step()
    began, calls = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        step()
        calls += 1
    return calls * batch_size / (time.monotonic() - began)


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agent", choices=workload.AGENTS, default="r2d2")
    parser.add_argument("--num_envs", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--repetitions", type=int, default=3, help="of each way")
    args = parser.parse_args()
    agent = workload.make_agent(args.agent, args.num_envs)
    observation_specs, _ = workload.specs()
    inputs = (
        np.arange(args.batch_size, dtype=np.int32),
        np.zeros(args.batch_size, np.int32),
        constant_env_outputs(args.batch_size, observation_specs),
    )
    steps = {
        "on the host": travelling_state(agent, inputs, args.num_envs),
        "on the device": resident_state(agent, inputs, args.num_envs),
    }
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.repetitions):
        for name, step in steps.items():
            found[name].append(rows_per_second(step, args.batch_size, args.seconds))
    row = map_nest(np.asarray, agent.initial_state(1))
    size = sum(x.nbytes for x in tf.nest.flatten(row))
    print(f"{args.agent}, batch {args.batch_size}, state of {size:,} bytes an environment")
    for name, rates in found.items():
        shown = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"{name:14} {statistics.median(rates):8.0f} rows/s ({shown})")


if __name__ == "__main__":
    main()
