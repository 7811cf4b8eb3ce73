"""Hundreds of actors at once: errors, latency and memory.

    python -m seed_rl.benchmarks.load --streams=256 --minutes=10
    python -m seed_rl.benchmarks.load --streams=1000 --processes=8 --minutes=1 --calls_per_second=1

Every stream is a whole actor with synthetic environments, in a thread; the actors share a few
processes. The learner is this process: server, batcher, central inference with a policy that
answers at once, unrolls that are thrown away. Exits with 1 if an actor fails, or if the memory of a
process in the last quarter is above that in the second by more than --max_growth_megabytes.
"""

import argparse
import dataclasses
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from absl import logging

from seed_rl.actor import Actor
from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
from seed_rl.environment import make_environment_batch

_START_SECONDS = 180.0  # until all actors have connected
_START_INTERVAL = 0.05  # between two actors of one process
_END_SECONDS = 60.0  # until all have heard that it is over
_LATENCY_EDGES = np.geomspace(1e-5, 100.0, 2000)  # seconds; two neighbours differ by 0.8 %


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured: see the flags of `main`."""

    address: str
    streams: int
    processes: int
    envs_per_stream: int
    observation_floats: int
    calls_per_second: float

    def streams_of(self, process: int) -> range:
        """The streams of one process."""
        bounds = np.linspace(0, self.streams, self.processes + 1).astype(int)
        return range(int(bounds[process]), int(bounds[process + 1]))


class SyntheticEnv(gymnasium.Env):
    """Observes noise; episodes have 100 steps."""

    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, size: int):
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (size,), np.float32)
        self._observation = np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self._steps = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple:
        self._steps += 1
        return self._observation, 1.0, self._steps % 100 == 0, False, {}


class _TimedActor(Actor):
    """Counts how long calls take, and makes so many a second at most.

    Attributes:
      latencies: number of calls between two edges of _LATENCY_EDGES, int64.
    """

    def measure(self, calls_per_second: float, phase: float) -> None:
        """To be called before `run`; `phase` in [0, 1) says when in its interval it calls."""
        self.latencies = np.zeros(_LATENCY_EDGES.size + 1, np.int64)
        self.measuring = False
        self._interval = 1.0 / calls_per_second if calls_per_second else 0.0
        self._next_call = time.monotonic() + phase * self._interval

    def _call(self, *args: Any) -> Any:
        if (left := self._next_call - time.monotonic()) > 0:
            time.sleep(left)
        start = time.monotonic()
        self._next_call = max(start, self._next_call + self._interval)
        actions = super()._call(*args)
        if self.measuring:
            self.latencies[np.searchsorted(_LATENCY_EDGES, time.monotonic() - start)] += 1
        return actions


def _run_actors(setting: Setting, process: int, measuring: Any, results: Any) -> None:
    """Runs the actors of one process to their end; reports (latencies, failures)."""
    logging.set_verbosity(logging.WARNING)
    _raise_file_limit()
    actors, threads, failures = [], [], []

    def run(actor: _TimedActor) -> None:
        try:
            actor.run()
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")

    for stream in setting.streams_of(process):
        first = stream * setting.envs_per_stream
        batch = make_environment_batch(
            lambda: SyntheticEnv(setting.observation_floats),
            range(first, first + setting.envs_per_stream),
            0,
        )
        actor = _TimedActor(batch, first, setting.address, max_env_seconds=0)
        actor.measure(setting.calls_per_second, phase=stream / setting.streams)
        actors.append(actor)
        threads.append(threading.Thread(target=run, args=(actor,), daemon=True))
        threads[-1].start()
        # Machines of a cluster do not start in the same moment either, nor share two cores.
        time.sleep(_START_INTERVAL)
    measuring.wait()
    for actor in actors:
        actor.measuring = True
    for thread in threads:
        thread.join()
    results.put((np.sum([actor.latencies for actor in actors], axis=0), failures))


def _make_learner(setting: Setting) -> tuple[Any, Any]:
    """(server, central inference), which answer with constant actions."""
    from seed_rl.benchmarks.rows import ConstantAgent
    from seed_rl.benchmarks.sinks import DiscardingSink
    from seed_rl.episode_statistics import EpisodeStatistics
    from seed_rl.grpc_service import Server
    from seed_rl.inference import (
        CentralInference,
        inference_input_specs,
        inference_output_specs,
    )

    num_envs = setting.streams * setting.envs_per_stream
    env = SyntheticEnv(setting.observation_floats)
    observation_specs = agent_observation_specs(env.observation_space)
    action_specs = agent_action_specs(env.action_space)
    agent: Any = ConstantAgent()
    inference = CentralInference(
        agent,
        [agent.policy],
        observation_specs,
        action_specs,
        num_envs,
        DiscardingSink(),
        EpisodeStatistics(num_envs, action_repeat=1),
        lambda: 0,
        [num_envs],
    )
    server = Server([setting.address], num_environments=num_envs)
    server.bind(
        inference.functions(),
        name="inference",
        input_signature=inference_input_specs(observation_specs),
        output_signature=inference_output_specs(action_specs),
        max_batch_size=num_envs,
    )
    return server, inference


class _Memory:
    """Resident memory of processes over time."""

    def __init__(self, pids: dict[str, int]):
        self._pids = pids
        self._samples: dict[str, list[float]] = {name: [] for name in pids}

    def sample(self) -> None:
        for name, pid in self._pids.items():
            with open(f"/proc/{pid}/statm") as statm:
                pages = int(statm.read().split()[1])
            self._samples[name].append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    def growth(self) -> dict[str, tuple[float, float]]:
        """By name: megabytes in the second quarter of the time, and in the last (medians)."""
        found = {}
        for name, samples in self._samples.items():
            quarter = max(1, len(samples) // 4)
            second = samples[quarter : 2 * quarter] or samples
            found[name] = (float(np.median(second)), float(np.median(samples[-quarter:])))
        return found


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was seen.

    Attributes:
      num_calls: that were answered while it was measured.
      seconds: of the measurement.
      latencies: p50 and p99 of a call as an actor sees it, in seconds.
      memory: by process: megabytes in the second quarter of the time, and in the last.
      failures: what actors died of.
    """

    num_calls: int
    seconds: float
    latencies: tuple[float, float]
    memory: dict[str, tuple[float, float]]
    failures: list[str]


def measure(setting: Setting, seconds: float) -> Outcome:
    """Runs learner and actors, and measures for `seconds` once all have connected.

    Raises:
      RuntimeError: not all connect, or not all end, in time.
    """
    _raise_file_limit()
    server, inference = _make_learner(setting)
    context = multiprocessing.get_context("spawn")
    measuring, results = context.Event(), context.Queue()
    processes = [
        context.Process(target=_run_actors, args=(setting, i, measuring, results), daemon=True)
        for i in range(setting.processes)
    ]
    with server:
        server.start()
        for process in processes:
            process.start()
        try:
            _await_streams(server, setting.streams)
            measuring.set()
            memory = _watch_memory(processes, seconds)
            inference.finish()
            reports = [results.get(timeout=_END_SECONDS) for _ in processes]
            for process in processes:
                process.join(_END_SECONDS)
        finally:
            for process in processes:
                process.kill()
    counts = np.sum([latencies for latencies, _ in reports], axis=0)
    return Outcome(
        num_calls=int(counts.sum()),
        seconds=seconds,
        latencies=(_percentile(counts, 0.5), _percentile(counts, 0.99)),
        memory=memory.growth(),
        failures=[failure for _, failures in reports for failure in failures],
    )


def _await_streams(server: Any, num_streams: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while (connected := server.num_claims) < num_streams:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{connected} of {num_streams} actors connected in time")
        time.sleep(0.1)


def _watch_memory(processes: list[Any], seconds: float) -> _Memory:
    pids = {"learner": os.getpid()}
    pids.update({f"actors {i}": process.pid for i, process in enumerate(processes)})
    memory = _Memory(pids)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        memory.sample()
        time.sleep(min(1.0, seconds / 40))
    return memory


def _percentile(counts: np.ndarray, fraction: float) -> float:
    """Upper edge of the bin in which the fraction of all calls is reached, in seconds."""
    index = int(np.searchsorted(np.cumsum(counts), fraction * counts.sum()))
    return float(_LATENCY_EDGES[min(index, _LATENCY_EDGES.size - 1)])


def _raise_file_limit() -> None:
    """A stream takes a few file descriptors, and shells often allow 1,024 to begin with."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    """Prints what was seen; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256, help="actors")
    parser.add_argument("--processes", type=int, default=4, help="that the actors share")
    parser.add_argument("--envs_per_stream", type=int, default=2)
    parser.add_argument("--observation_floats", type=int, default=32)
    parser.add_argument("--calls_per_second", type=float, default=4.0, help="of a stream; 0: all")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--max_growth_megabytes", type=float, default=16.0, help="of a process")
    parser.add_argument("--tcp", action="store_true", help="over loopback, not a Unix socket")
    args = parser.parse_args()
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="seed_rl_load_") as directory:
        address = f"127.0.0.1:{_free_port()}" if args.tcp else f"unix:{directory}/learner"
        setting = Setting(
            address,
            args.streams,
            args.processes,
            args.envs_per_stream,
            args.observation_floats,
            args.calls_per_second,
        )
        outcome = measure(setting, 60 * args.minutes)
    p50, p99 = (1000 * seconds for seconds in outcome.latencies)
    print(
        f"{args.streams} streams, {args.minutes:g} minutes: {outcome.num_calls:,} calls, "
        f"{outcome.num_calls / outcome.seconds:,.0f} a second; "
        f"latency p50 {p50:.1f} ms, p99 {p99:.1f} ms; {len(outcome.failures)} actors failed"
    )
    for failure in outcome.failures[:5]:
        print(f"  {failure}")
    grown = False
    for name, (early, late) in outcome.memory.items():
        print(f"  {name}: {early:.1f} MB, at the end {late:.1f} MB")
        grown = grown or late - early > args.max_growth_megabytes
    if grown:
        print(f"memory grew by more than {args.max_growth_megabytes:g} MB")
    return int(grown or bool(outcome.failures) or not outcome.num_calls)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
