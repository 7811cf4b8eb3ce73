"""The learner's training beside the bare training step: `python -m seed_rl.benchmarks.learner`.

Agent steps trained a second with unrolls that come through the queue one by one, as inference makes
them, against the same compiled training step called in a loop on one constant batch.
"""

import argparse
import threading
import time

import numpy as np

from seed_rl.agent import Agent, UnrollSink
from seed_rl.agents.vtrace.networks import AgentOutput
from seed_rl.benchmarks import workload
from seed_rl.benchmarks.feeders import constant_env_outputs
from seed_rl.grpc_service import TensorSpec
from seed_rl.nests import map_nest
from seed_rl.training import Trainer
from seed_rl.unroll_queue import QueueClosedError
from seed_rl.unrolls import Unroll, stack_time_major


def constant_unrolls(num_unrolls: int, agent: Agent) -> Unroll:
    """Returns unrolls (leaves [num_unrolls, T + 1, …]) of random content."""
    steps = workload.UNROLL_LENGTH + 1
    observation_specs, _ = workload.specs()
    rows = constant_env_outputs(num_unrolls * steps, observation_specs)
    rng = np.random.default_rng(0)
    return Unroll(
        agent_state=map_nest(np.asarray, agent.initial_state(num_unrolls)),
        prev_actions=rng.integers(0, 18, (num_unrolls, steps)).astype(np.int32),
        env_outputs=map_nest(lambda x: x.reshape(num_unrolls, steps, *x.shape[1:]), rows),
        agent_outputs=AgentOutput(
            action=rng.integers(0, 18, (num_unrolls, steps)).astype(np.int32),
            policy_logits=rng.normal(size=(num_unrolls, steps, 18)).astype(np.float32),
            baseline=rng.normal(size=(num_unrolls, steps)).astype(np.float32),
        ),
        env_id=np.arange(num_unrolls, dtype=np.int32),
        policy_version=np.zeros(num_unrolls, np.int64),
    )


def bare_steps_per_second(trainer: Trainer, batch: Unroll, num_steps: int) -> float:
    """Returns agent steps a second of the compiled training step alone."""
    trainer.step(batch)
    began = time.monotonic()
    for _ in range(num_steps):
        metrics, _ = trainer.step(batch)
        metrics["training/loss"].numpy()
    return num_steps * workload.BATCH_SIZE * workload.UNROLL_LENGTH / (time.monotonic() - began)


def learner_steps_per_second(
    trainer: Trainer, sink: UnrollSink, unrolls: Unroll, num_steps: int
) -> float:
    """Returns agent steps a second of training from the queue."""

    def produce() -> None:
        try:
            while True:
                # A copy, since the unroll store hands out copies.
                sink.put(map_nest(np.copy, unrolls))
        except QueueClosedError:
            pass

    producer = threading.Thread(target=produce)
    producer.start()
    trainer.train_from(sink, 60.0)
    began = time.monotonic()
    for _ in range(num_steps):
        trainer.train_from(sink, 60.0)
    seconds = time.monotonic() - began
    sink.close()
    producer.join()
    return num_steps * workload.BATCH_SIZE * workload.UNROLL_LENGTH / seconds


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--training_steps", type=int, default=20, help="for each measurement")
    args = parser.parse_args()
    agent = workload.make_agent()
    trainer = Trainer(agent, agent.make_optimizer(1_000_000))
    batch_of_unrolls = constant_unrolls(workload.BATCH_SIZE, agent)
    batch = stack_time_major(
        [map_nest(lambda x, i=i: x[i], batch_of_unrolls) for i in range(workload.BATCH_SIZE)]
    )
    specs = map_nest(lambda x: TensorSpec(x.shape[1:], x.dtype), batch_of_unrolls)
    few = map_nest(lambda x: x[:8], batch_of_unrolls)
    before = bare_steps_per_second(trainer, batch, args.training_steps)
    real = learner_steps_per_second(
        trainer, agent.make_unroll_sink(specs), few, args.training_steps
    )
    after = bare_steps_per_second(trainer, batch, args.training_steps)
    bare = (before + after) / 2
    print(
        f"batch {workload.BATCH_SIZE} unrolls of {workload.UNROLL_LENGTH} agent steps\n"
        f"bare training step   {bare:8.0f} agent steps/s ({before:.0f} before, {after:.0f} after)\n"
        f"learner              {real:8.0f} agent steps/s\n"
        f"ratio                {real / bare:8.2f}  (bar: 0.9)"
    )


if __name__ == "__main__":
    main()
