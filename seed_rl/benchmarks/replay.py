"""The replay on frames of Atari games: `python -m seed_rl.benchmarks.replay`.

Bytes an unroll takes and what 100,000 of them would, what inserting and sampling a batch costs
beside a training step of R2D2 on that batch, and what drawing and updating cost at 1,000 to
1,000,000 items. Actions are random.
"""

import argparse
import functools
import multiprocessing
import os
import time
from typing import Any, NamedTuple

import numpy as np
import optree

from seed_rl.agents.r2d2.agent import R2D2Agent
from seed_rl.agents.r2d2.networks import AgentOutput, DuelingLSTMDQNNet
from seed_rl.benchmarks import workload
from seed_rl.grpc_service import TensorSpec
from seed_rl.nests import map_nest
from seed_rl.replay import PrioritizedReplay
from seed_rl.replay_memory import check_replay_fits
from seed_rl.replay_sink import ReplayBatch
from seed_rl.structures import EnvOutput
from seed_rl.training import Trainer
from seed_rl.unrolls import Unroll, batch_time_major

# R2D2's settings (Kapturowski et al. 2019).
BURN_IN = 40  # agent steps
UNROLL_LENGTH = 80  # agent steps
STEPS = BURN_IN + UNROLL_LENGTH + 1  # agent steps stored with an unroll
BATCH_SIZE = 64  # unrolls
REPLAY_SIZE = 100_000  # unrolls
_MACHINE_BYTES = 24 * 2**30
_LSTM_SIZE = 512
_PRIORITY_EXPONENT = 0.9
_IMPORTANCE_SAMPLING_EXPONENT = 0.6


class BatchSeconds(NamedTuple):
    """Seconds that a batch of unrolls takes."""

    insert: float
    sample: float
    update: float


def play(game: str, num_unrolls: int) -> np.ndarray:
    """Returns frames of random play, cut into successive unrolls that overlap as R2D2's do.

    Returns:
      uint8 [num_unrolls, STEPS, 84, 84, 1].
    """
    frames = workload.game_frames(num_unrolls * UNROLL_LENGTH + BURN_IN + 1, game)
    starts = UNROLL_LENGTH * np.arange(num_unrolls)[:, np.newaxis]
    return frames[starts + np.arange(STEPS)]


def unrolls_with(frames: np.ndarray) -> Unroll:
    """Returns unrolls with these frames [n, STEPS, …]; everything else in them is random."""
    rng = np.random.default_rng(0)
    n = len(frames)

    def state() -> np.ndarray:
        return rng.normal(size=(n, _LSTM_SIZE)).astype(np.float32)

    def actions() -> np.ndarray:
        return rng.integers(0, workload.NUM_ACTIONS, (n, STEPS)).astype(np.int32)

    return Unroll(
        agent_state=(state(), state()),
        prev_actions=actions(),
        env_outputs=EnvOutput(
            reward=rng.normal(size=(n, STEPS)).astype(np.float32),
            done=rng.random((n, STEPS)) < 0.01,
            observation=frames,
            abandoned=np.zeros((n, STEPS), np.bool_),
            episode_step=rng.integers(0, 27_000, (n, STEPS)).astype(np.int32),
        ),
        agent_outputs=AgentOutput(
            actions(), rng.normal(size=(n, STEPS, workload.NUM_ACTIONS)).astype(np.float32)
        ),
        env_id=np.arange(n, dtype=np.int32),
        policy_version=np.zeros(n, np.int64),
    )


def make_replay(size: int, items: Any) -> PrioritizedReplay:
    """Returns an empty replay of items like those of the batch `items` (leaves [n, …])."""
    specs = map_nest(lambda x: TensorSpec(x.shape[1:], x.dtype), items)
    return PrioritizedReplay(size, specs, _IMPORTANCE_SAMPLING_EXPONENT, seed=0)


def seconds_per_batch(replay: PrioritizedReplay, items: Any, num_batches: int) -> BatchSeconds:
    """Returns the medians of what it takes to insert, sample and update a batch of items.

    Args:
      replay: with any content.
      items: nest of arrays [B, …], the batch that is inserted; as many are sampled.
      num_batches: how many times each is done.
    """
    rng = np.random.default_rng(0)
    batch_size = len(optree.tree_leaves(items)[0])
    seconds = []
    for _ in range(num_batches):
        times = [time.perf_counter()]
        replay.insert(items, rng.random(batch_size))
        times.append(time.perf_counter())
        sample = replay.sample_with_insertions(batch_size, _PRIORITY_EXPONENT)
        times.append(time.perf_counter())
        replay.update_priorities(sample.indices, rng.random(batch_size), sample.insertions)
        times.append(time.perf_counter())
        seconds.append(np.diff(times))
    return BatchSeconds(*(float(x) for x in np.median(seconds, axis=0)))


def resident_bytes() -> int:
    """Returns the bytes of physical memory this process has (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _fill(replay: PrioritizedReplay, items: Any, num_inserted: int) -> None:
    """Inserts a batch of items again and again."""
    batch_size = len(optree.tree_leaves(items)[0])
    rng = np.random.default_rng(0)
    while replay.num_inserted < num_inserted:
        replay.insert(items, rng.random(batch_size))


def report_game(game: str, num_stored: int) -> None:
    """Fills a replay twice over with unrolls of a game, and prints bytes and seconds."""
    unrolls = unrolls_with(play(game, BATCH_SIZE))
    replay = make_replay(num_stored, unrolls)
    _fill(replay, unrolls, num_stored // 2)
    # What was allocated and freed before is in use again by now.
    num_before, resident_before = len(replay), resident_bytes()
    _fill(replay, unrolls, 2 * num_stored)
    resident = (resident_bytes() - resident_before) / (len(replay) - num_before)
    batch = seconds_per_batch(replay, unrolls, 10)
    total = make_replay(REPLAY_SIZE, unrolls).bytes_used + REPLAY_SIZE * replay.bytes_per_item
    print(
        f"{game:17} {replay.bytes_per_item:8,.0f} bytes an unroll ({resident:8,.0f} resident), "
        f"{REPLAY_SIZE:,}: {total / 2**30:5.2f} GiB ({total / _MACHINE_BYTES:5.1%} of 24 GiB); "
        f"batch of {BATCH_SIZE}: insert {1e3 * batch.insert:5.1f} ms, "
        f"sample {1e3 * batch.sample:5.1f} ms, update {1e3 * batch.update:5.2f} ms",
        flush=True,
    )


def report_training_step(num_steps: int) -> None:
    """Prints what the replay costs beside training steps of the paper's network and batch."""
    agent = R2D2Agent(
        workload.OBSERVATION_SPACE,
        workload.ACTION_SPACE,
        num_envs=BATCH_SIZE,
        network=functools.partial(DuelingLSTMDQNNet, stack_size=4),
    )
    unrolls = unrolls_with(play("Pong", BATCH_SIZE))
    unrolls = unrolls._replace(agent_state=map_nest(np.asarray, agent.initial_state(BATCH_SIZE)))
    replay = make_replay(1_000, unrolls)
    _fill(replay, unrolls, 1_000)
    trainer = Trainer(agent, agent.make_optimizer(1_000))
    sample = replay.sample_with_insertions(BATCH_SIZE, _PRIORITY_EXPONENT)
    training_batch = ReplayBatch(
        batch_time_major(sample.values), sample.weights, sample.indices, sample.insertions
    )
    trainer.step(training_batch)
    began = time.perf_counter()
    for _ in range(num_steps):
        trainer.step(training_batch)[0]["training/loss"].numpy()
    training = (time.perf_counter() - began) / num_steps
    batch = seconds_per_batch(replay, unrolls, 10)
    print(
        f"training step {1e3 * training:,.0f} ms; insert, sample and update of its batch "
        f"{1e3 * sum(batch):.1f} ms: {sum(batch) / training:.2%}  (bar: 10 %)",
        flush=True,
    )


def report_sizes(sizes: list[int]) -> None:
    """Prints what drawing and updating cost by the number of small items stored."""
    for size in sizes:
        items = np.zeros(min(size, 100_000), np.float32)
        replay = make_replay(size, items)
        _fill(replay, items, size)
        batch = seconds_per_batch(replay, items[:BATCH_SIZE], 500)
        print(
            f"{size:9,} items: insert {1e6 * batch.insert:5.0f} µs, sample "
            f"{1e6 * batch.sample:5.0f} µs, update {1e6 * batch.update:5.0f} µs "
            f"(batches of {BATCH_SIZE})",
            flush=True,
        )


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="*", default=["Pong", "Breakout", "MontezumaRevenge"])
    parser.add_argument("--stored", type=int, default=5_000, help="unrolls stored of each game")
    parser.add_argument("--training_steps", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1_000, 10_000, 100_000, 1_000_000])
    args = parser.parse_args()
    specs = map_nest(
        lambda x: TensorSpec(x.shape[1:], x.dtype),
        unrolls_with(np.zeros((1, STEPS, 84, 84, 1), np.uint8)),
    )
    print(check_replay_fits(specs, REPLAY_SIZE))
    for game in args.games:
        # In a process of its own, so that nothing freed before is in its memory.
        process = multiprocessing.get_context("spawn").Process(
            target=report_game, args=(game, args.stored)
        )
        process.start()
        process.join()
    report_sizes(args.sizes)
    report_training_step(args.training_steps)


if __name__ == "__main__":
    main()
