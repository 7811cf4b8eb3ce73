"""Learner and actors on Pong beside the ideal: `python -m seed_rl.benchmarks.end_to_end`.

The ideal is what the machine could do if nothing but the parts cost time: emulation, inference and
training are each measured alone, and the ideal step takes the sum of their CPU times, spread evenly
over all cores. Beside it, the same from wall times with each part alone on the whole machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from seed_rl import config
from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
from seed_rl.benchmarks import workload
from seed_rl.benchmarks.feeders import Load, constant_env_outputs, rate
from seed_rl.benchmarks.learner import constant_batch, constant_unrolls
from seed_rl.environment import make_environment_batch
from seed_rl.learner import Learner
from seed_rl.training import Trainer

_CONFIG = "atari_vtrace.gin"
_ACTION_REPEAT = 4


class Cost(NamedTuple):
    """Of one agent step."""

    cpu_seconds: float
    wall_seconds: float


def measure(step: Callable[[], object], rows: int, seconds: float) -> Cost:
    """Calls `step`, which handles `rows` agent steps, for a while; returns the cost of one."""
    for _ in range(3):
        step()
    wall, cpu, calls = time.monotonic(), time.process_time(), 0
    while time.monotonic() - wall < seconds:
        step()
        calls += 1
    return Cost(
        (time.process_time() - cpu) / (calls * rows), (time.monotonic() - wall) / (calls * rows)
    )


def emulation_cost(environment: str, num_envs: int, seconds: float) -> Cost:
    """Returns the cost of an environment step in one process; wall time as if on every core."""
    environments = make_environment_batch(environment, range(num_envs), seed=1)
    environments.reset()
    rng = np.random.default_rng(0)
    cost = measure(
        lambda: environments.step(rng.integers(0, 18, num_envs).astype(np.int32)),
        num_envs,
        seconds,
    )
    environments.close()
    return Cost(cost.cpu_seconds, cost.cpu_seconds / _num_cpus())


def inference_cost(agent, batch_size: int, seconds: float) -> Cost:
    """Returns the cost of a row of the bare compiled policy."""
    observation_specs, _ = workload.specs()
    policy = tf.function(agent.policy, autograph=False)
    inputs = (
        np.arange(batch_size, dtype=np.int32),
        np.zeros(batch_size, np.int32),
        constant_env_outputs(batch_size, observation_specs),
        agent.initial_state(batch_size),
    )
    return measure(lambda: policy(*inputs)[0].action.numpy(), batch_size, seconds)


def training_cost(agent, seconds: float) -> Cost:
    """Returns the cost of an agent step of the bare compiled training step."""
    trainer = Trainer(agent, agent.make_optimizer(1_000_000))
    batch = constant_batch(agent, constant_unrolls(agent.batch_size, agent))
    return measure(
        lambda: trainer.step(batch)[0]["training/loss"].numpy(),
        agent.batch_size * agent.unroll_length,
        seconds,
    )


def system_steps_per_second(
    agent, load: Load, warm_up: float, seconds: float, **settings: Any
) -> float:
    """Returns agent steps a second of the real learner, with these settings, and real actors."""
    with tempfile.TemporaryDirectory() as logdir:
        address = f"unix:{logdir}/s"
        learner = Learner(
            agent,
            agent_observation_specs(workload.OBSERVATION_SPACE),
            agent_action_specs(workload.ACTION_SPACE),
            load.num_envs,
            [address],
            logdir,
            total_frames=10**12,
            save_checkpoint_secs=1e9,
            **settings,
        )
        stop = threading.Event()
        thread = threading.Thread(target=learner.run, args=(stop,))
        thread.start()
        actors = [_start_actor(task, load, address) for task in range(load.num_clients)]
        try:
            return rate(lambda: learner.frames, warm_up, seconds) / _ACTION_REPEAT
        finally:
            for actor in actors:
                actor.terminate()
            for actor in actors:
                actor.wait()
            stop.set()
            thread.join()


def _start_actor(task: int, load: Load, address: str) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            *("-m", "seed_rl.main", "--run_mode=actor", f"--task={task}"),
            f"--num_envs={load.num_envs}",
            f"--env_batch_size={load.envs_per_client}",
            f"--server_address={address}",
            f"--gin_config={_CONFIG}",
        ]
    )


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agent", choices=workload.AGENTS, default="vtrace")
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--envs_per_actor", type=int, default=16)
    parser.add_argument("--inference_threads", type=int, default=2, help="as the learner's")
    parser.add_argument("--inference_batch_size", type=int, default=64, help="as the learner's")
    parser.add_argument("--warm_up", type=float, default=20.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the system's measurement")
    args = parser.parse_args()
    experiment = config.load([_CONFIG], [], for_actor=False)
    load = Load(args.actors, args.envs_per_actor)
    agent = workload.make_agent(args.agent, load.num_envs)
    costs = {
        "emulation": emulation_cost(experiment.environment, args.envs_per_actor, 10.0),
        "inference": inference_cost(agent, min(64, load.num_envs), 10.0),
        "training": training_cost(agent, 20.0),
    }
    real = system_steps_per_second(
        agent,
        load,
        args.warm_up,
        args.seconds,
        inference_threads=args.inference_threads,
        inference_batch_size=args.inference_batch_size,
    )
    cpu_ideal = _num_cpus() / sum(cost.cpu_seconds for cost in costs.values())
    wall_ideal = 1 / sum(cost.wall_seconds for cost in costs.values())
    print(
        f"{args.agent}, Pong, Nature-CNN, {args.actors} actors × {args.envs_per_actor}, "
        f"{_num_cpus()} cores"
    )
    for name, cost in costs.items():
        print(
            f"{name:10} {1e6 * cost.cpu_seconds:7.0f} µs CPU, "
            f"{1e6 * cost.wall_seconds:7.0f} µs on all cores, an agent step"
        )
    print(
        f"ideal from CPU time    {cpu_ideal:7.0f} agent steps/s\n"
        f"ideal from wall time   {wall_ideal:7.0f} agent steps/s\n"
        f"learner and actors     {real:7.0f} agent steps/s "
        f"({real * _ACTION_REPEAT:.0f} frames/s)\n"
        f"ratio to CPU ideal     {real / cpu_ideal:7.2f}  (bar: 0.85)\n"
        f"ratio to wall ideal    {real / wall_ideal:7.2f}"
    )


if __name__ == "__main__":
    main()
