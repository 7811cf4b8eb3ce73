"""The learner's training beside the bare training step: `python -m seed_rl.benchmarks.learner`.

Agent steps trained a second with unrolls that come through the queue or the replay as inference
makes them, against the same compiled training step called in a loop on one constant batch.
"""

import argparse
import contextlib
import threading
import time
from typing import Any

import numpy as np

from seed_rl.agent import Agent, UnrollSink
from seed_rl.benchmarks import workload
from seed_rl.benchmarks.feeders import constant_env_outputs
from seed_rl.grpc_service import TensorSpec
from seed_rl.nests import map_nest
from seed_rl.prefetching import PrefetchingSink
from seed_rl.training import Trainer
from seed_rl.unroll_queue import QueueClosedError
from seed_rl.unrolls import Unroll


def constant_unrolls(num_unrolls: int, agent: Agent) -> Unroll:
    """Returns unrolls of random play (leaves [num_unrolls, T + 1, …]) with the agent's outputs."""
    steps = agent.num_overlapping_steps + agent.unroll_length + 1
    num_rows = num_unrolls * steps
    observation_specs, _ = workload.specs()
    rows = constant_env_outputs(num_rows, observation_specs)._replace(
        observation=workload.game_frames(num_rows)
    )
    rng = np.random.default_rng(0)
    prev_actions = rng.integers(0, workload.NUM_ACTIONS, num_rows).astype(np.int32)
    agent_outputs, _ = agent.policy(
        np.zeros(num_rows, np.int32), prev_actions, rows, agent.initial_state(num_rows)
    )

    def by_unroll(x: Any) -> np.ndarray:
        return np.asarray(x).reshape(num_unrolls, steps, *x.shape[1:])

    return Unroll(
        agent_state=map_nest(np.asarray, agent.initial_state(num_unrolls)),
        prev_actions=by_unroll(prev_actions),
        env_outputs=map_nest(by_unroll, rows),
        agent_outputs=map_nest(by_unroll, agent_outputs),
        env_id=np.arange(num_unrolls, dtype=np.int32),
        policy_version=np.zeros(num_unrolls, np.int64),
    )


def constant_batch(agent: Agent, unrolls: Unroll) -> Any:
    """Returns one training batch, from a sink of the agent's own that holds nothing else."""
    specs = map_nest(lambda x: TensorSpec(x.shape[1:], x.dtype), unrolls)
    sink = agent.make_unroll_sink(specs)
    filler = threading.Thread(target=_produce, args=(sink, unrolls))
    filler.start()
    batch = sink.next_batch(60.0)
    sink.close()
    filler.join()
    return batch


def _produce(sink: UnrollSink, unrolls: Unroll) -> None:
    """Puts copies of the unrolls, as the unroll store hands out copies, until the sink closes."""
    with contextlib.suppress(QueueClosedError):
        while True:
            sink.put(map_nest(np.copy, unrolls))


def bare_steps_per_second(trainer: Trainer, agent: Agent, batch: Any, num_steps: int) -> float:
    """Returns agent steps a second of the compiled training step alone."""
    trainer.step(batch)
    began = time.monotonic()
    for _ in range(num_steps):
        metrics, _ = trainer.step(batch)
        metrics["training/loss"].numpy()
    return num_steps * agent.batch_size * agent.unroll_length / (time.monotonic() - began)


def learner_steps_per_second(
    trainer: Trainer, agent: Agent, sink: UnrollSink, unrolls: Unroll, num_steps: int
) -> float:
    """Returns agent steps a second of training from the sink."""
    producer = threading.Thread(target=_produce, args=(sink, unrolls))
    producer.start()
    trainer.train_from(sink, 60.0)
    began = time.monotonic()
    for _ in range(num_steps):
        trainer.train_from(sink, 60.0)
    seconds = time.monotonic() - began
    sink.close()
    producer.join()
    return num_steps * agent.batch_size * agent.unroll_length / seconds


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agent", choices=workload.AGENTS, default="vtrace")
    parser.add_argument("--training_steps", type=int, default=20, help="for each measurement")
    parser.add_argument("--prefetch", action="store_true", help="draw the next batch meanwhile")
    args = parser.parse_args()
    agent = workload.make_agent(args.agent)
    trainer = Trainer(agent, agent.make_optimizer(1_000_000))
    unrolls = constant_unrolls(agent.batch_size, agent)
    batch = constant_batch(agent, unrolls)
    few = map_nest(lambda x: x[:8], unrolls)
    specs = map_nest(lambda x: TensorSpec(x.shape[1:], x.dtype), unrolls)
    before = bare_steps_per_second(trainer, agent, batch, args.training_steps)
    sink = agent.make_unroll_sink(specs)
    if args.prefetch:
        sink = PrefetchingSink(sink, trainer.place)
    real = learner_steps_per_second(trainer, agent, sink, few, args.training_steps)
    after = bare_steps_per_second(trainer, agent, batch, args.training_steps)
    bare = (before + after) / 2
    print(
        f"{args.agent}, batch {agent.batch_size} unrolls of {agent.unroll_length} agent steps\n"
        f"bare training step   {bare:8.0f} agent steps/s ({before:.0f} before, {after:.0f} after)\n"
        f"learner              {real:8.0f} agent steps/s\n"
        f"ratio                {real / bare:8.2f}  (bar: 0.9)"
    )


if __name__ == "__main__":
    main()
