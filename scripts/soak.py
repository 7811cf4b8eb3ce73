"""Trains for a long time while actors and the learner are killed, and checks the books at the end.

    scripts/soak.sh --minutes=60

An actor is killed every 20 seconds and the learner twice, all by SIGKILL; each is started again at
once. Actor 0 is spared, so that its memory can be watched. The promises that are checked are those
of docs/reliability.md. Ends with exit code 0 if all of them were kept.
"""

import argparse
import dataclasses
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import psutil
from soak_environment import total_steps

ACTOR_KILL_SECONDS = 20.0
LEARNER_KILLS = 2
SAVE_SECONDS = 15.0
SAMPLE_SECONDS = 0.25
END_SECONDS = 10.0  # within which everything has to end
UNROLL_LENGTH, BATCH_SIZE = 32, 4
# From the moment whose frames a checkpoint holds until its last file is there, and some more.
SAVE_TAKES = 2.0
MEMORY_GROWTH = 0.03  # of the third quarter of a life, to the fourth; and so many bytes:
MEMORY_SLACK = 8 * 2**20
# A learner warms up for minutes: its queue and its caches fill, functions are traced.
MEMORY_MIN_SAMPLES = round(480 / SAMPLE_SECONDS)


@dataclasses.dataclass
class Life:
    """A learner's, from its start to its end."""

    resumed: int = 0  # frames
    steps_before: int = 0  # of all environments, when the learner before ended
    steps_after: int = 0  # the same, when this one ended
    actor_kills: int = 0
    was_killed: bool = False
    memory: list[int] = dataclasses.field(default_factory=list)  # bytes, a sample each


class Soak:
    """A run, its processes and what is noted of them."""

    def __init__(self, directory: pathlib.Path, num_actors: int, envs_per_actor: int, seed: int):
        self.directory, self.logdir = directory, directory / "log"
        self.counts = directory / "counts"
        self.counts.mkdir(parents=True)
        self.num_actors, self.envs_per_actor = num_actors, envs_per_actor
        self.num_envs = num_actors * envs_per_actor
        self.random = random.Random(seed)
        self.lives: list[Life] = []
        self.samples: list[tuple[float, int]] = []  # (time of the files' clock, steps)
        self.spared_memory: list[int] = []
        self.problems: list[str] = []
        self.learner: subprocess.Popen | None = None
        self.actors: list[subprocess.Popen] = []

    # ---- Processes -------------------------------------------------------------------------------

    def _start(self, name: str, *flags: str) -> subprocess.Popen:
        here = str(pathlib.Path(__file__).parent)
        bindings = [
            "experiment.environment = 'soak_environment:make'",
            f"Learner.save_checkpoint_secs = {SAVE_SECONDS}",
            "Learner.total_frames = 1_000_000_000_000",
            f"VTraceAgent.unroll_length = {UNROLL_LENGTH}",
            f"VTraceAgent.batch_size = {BATCH_SIZE}",
        ]
        with open(self.directory / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [
                    *[sys.executable, "-m", "seed_rl.main", *flags],
                    f"--server_address=unix:{self.directory}/socket/learner",
                    f"--num_envs={self.num_envs}",
                    f"--env_batch_size={self.envs_per_actor}",
                    "--gin_config=gym_vtrace.gin",
                    *[f"--gin_bindings={binding}" for binding in bindings],
                ],
                env={**os.environ, "PYTHONPATH": here, "SOAK_COUNTS": str(self.counts)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_learner(self) -> None:
        steps = self.lives[-1].steps_after if self.lives else 0
        self.lives.append(Life(steps_before=steps))
        name = f"learner_{len(self.lives)}"
        self.learner = self._start(name, "--run_mode=learner", f"--logdir={self.logdir}")

    def start_actor(self, task: int) -> subprocess.Popen:
        return self._start(f"actor_{task}", "--run_mode=actor", f"--task={task}")

    def kill_actor(self) -> None:
        task = self.random.randrange(1, self.num_actors)
        _kill(self.actors[task])
        self.lives[-1].actor_kills += 1
        self.actors[task] = self.start_actor(task)

    def kill_learner(self) -> None:
        assert self.learner is not None
        _kill(self.learner)
        self.lives[-1].was_killed = True
        self.lives[-1].steps_after = total_steps(self.counts)
        self.start_learner()

    def watch(self) -> None:
        """Takes a sample, and notes who ended without being told to."""
        assert self.learner is not None
        self.samples.append((time.time(), total_steps(self.counts)))
        if memory := _memory(self.learner):
            self.lives[-1].memory.append(memory)
        if memory := _memory(self.actors[0]):
            self.spared_memory.append(memory)
        for name, process in [("the learner", self.learner), *enumerate(self.actors)]:
            if process.poll() is not None:
                who = name if isinstance(name, str) else f"actor {name}"
                raise SystemExit(f"error: {who} ended with {process.returncode}, see its log")

    def stop(self) -> None:
        """Ends everything as an operator would: the learner first, then the actors."""
        assert self.learner is not None
        for who, processes in (("the learner", [self.learner]), ("actors", self.actors)):
            deadline = time.monotonic() + END_SECONDS
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                try:
                    status = process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    status = f"nothing within {END_SECONDS:.0f} s"
                if status != 0:
                    self.problems.append(f"{who}: told to stop, ended with {status}")
        self.lives[-1].steps_after = total_steps(self.counts)

    def close(self) -> None:
        for process in [*self.actors, *([self.learner] if self.learner else [])]:
            _kill(process)

    def run(self, seconds: float) -> None:
        """Trains and kills for so long, from the first step on."""
        self.start_learner()
        self.actors = [self.start_actor(task) for task in range(self.num_actors)]
        while not total_steps(self.counts):
            self.watch()
            time.sleep(SAMPLE_SECONDS)
        start = time.monotonic()
        actor_kill = start + ACTOR_KILL_SECONDS
        parts = LEARNER_KILLS + 1
        learner_kills = [start + seconds * i / parts for i in range(1, parts)]
        while (now := time.monotonic()) < start + seconds:
            self.watch()
            if now >= actor_kill:
                actor_kill += ACTOR_KILL_SECONDS
                self.kill_actor()
            if learner_kills and now >= learner_kills[0] and self._has_saved():
                learner_kills.pop(0)
                self.kill_learner()
            time.sleep(SAMPLE_SECONDS)
        if learner_kills:
            self.problems.append("the learner took too long to start: raise --minutes")
        self.stop()

    # ---- The books -------------------------------------------------------------------------------

    def _log_of(self, number: int) -> str:
        return (self.directory / f"learner_{number}.log").read_text(errors="replace")

    def _has_saved(self) -> bool:
        """Whether the learner that runs has; where it has not, a kill would prove little."""
        return "saved checkpoint" in self._log_of(len(self.lives))

    def check(self) -> str:
        """Checks every promise; returns the summary."""
        lines = []
        for number, life in enumerate(self.lives, 1):
            resumed = re.findall(r"resumed at (\d+) frames", self._log_of(number))
            life.resumed = int(resumed[0]) if resumed else 0
        frames, training_steps = self._last_checkpoint()
        ends = [life.resumed for life in self.lives[1:]] + [frames]
        for number, (life, end) in enumerate(zip(self.lives, ends, strict=True), 1):
            lines.append(self._check_life(number, life, end))
        lines.append(self._check_trained(frames, training_steps))
        lines.append(self._check_flat("actor 0", self.spared_memory))
        if (self.directory / "socket" / "learner").exists():
            self.problems.append("the socket file is still there")
        return "\n".join(lines)

    def _last_checkpoint(self) -> tuple[int, int]:
        """(frames, training steps)."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        import tensorflow as tf

        path = tf.train.latest_checkpoint(str(self.logdir / "checkpoints"))
        reader = tf.train.load_checkpoint(path)
        end = "/.ATTRIBUTES/VARIABLE_VALUE"
        names = ("frames", "training_steps")
        frames, training_steps = (int(reader.get_tensor(name + end)) for name in names)
        return frames, training_steps

    def _check_life(self, number: int, life: Life, end: int) -> str:
        stepped = life.steps_after - life.steps_before
        counted = end - life.resumed
        # An actor that is killed, or whose learner is, has one step an environment on its way.
        bound = life.actor_kills * self.envs_per_actor + self.num_envs
        if life.was_killed:
            bound += life.steps_after - self._steps_at_last_save(number)
        if not 0 <= stepped - counted <= bound:
            self.problems.append(
                f"learner {number}: {stepped} frames stepped, {counted} counted: the difference is "
                f"not within 0 … {bound}"
            )
        end_word = "killed" if life.was_killed else "stopped"
        return (
            f"learner {number} ({end_word}, {life.actor_kills} actor kills): stepped {stepped:,} "
            f"frames, counted {counted:,}, lost {stepped - counted:,} of at most {bound:,}\n"
            + self._check_flat(f"learner {number}", life.memory)
        )

    def _steps_at_last_save(self, number: int) -> int:
        """Steps of all environments when the learner's last checkpoint before its end was begun."""
        line = r"^I\d{4} (\d\d):(\d\d):([\d.]+) .*saved checkpoint"
        clock = re.findall(line, self._log_of(number), re.MULTILINE)
        if not clock:
            return self.lives[number - 1].steps_before
        hours, minutes, seconds = clock[-1]
        saved = int(hours) * 3600 + int(minutes) * 60 + float(seconds) - SAVE_TAKES
        best = self.lives[number - 1].steps_before
        for moment, steps in self.samples:
            if steps > self.lives[number - 1].steps_after:
                break
            if (saved - _time_of_day(moment)) % 86400 < 43200:
                best = max(best, steps)
        return best

    def _check_trained(self, frames: int, training_steps: int) -> str:
        trained = training_steps * BATCH_SIZE * UNROLL_LENGTH
        kills = sum(life.actor_kills for life in self.lives)
        # What every learner's end leaves: a batch in training and one in the queue, and of every
        # environment an unroll that waits for room and one half built; and every killed actor's
        # half-built unrolls.
        unrolls = len(self.lives) * (2 * BATCH_SIZE + 2 * self.num_envs)
        unrolls += (kills + len(self.lives) * self.num_actors) * self.envs_per_actor
        bound = unrolls * UNROLL_LENGTH
        if not 0 <= frames - trained <= bound:
            self.problems.append(
                f"{frames} frames counted, {trained} trained on: the difference is not within 0 … "
                f"{bound}"
            )
        return (
            f"all: counted {frames:,} frames, trained on {trained:,} in {training_steps:,} steps, "
            f"not trained on {frames - trained:,} of at most {bound:,}"
        )

    def _check_flat(self, who: str, memory: list[int]) -> str:
        quarter = len(memory) // 4
        if quarter < 1:
            return f"  {who}: a life of a moment"
        before = sum(memory[2 * quarter : 3 * quarter]) / quarter
        after = sum(memory[3 * quarter : 4 * quarter]) / quarter
        line = (
            f"  {who}: {before / 2**20:,.0f} MiB in the third quarter of its life, "
            f"{after / 2**20:,.0f} MiB in the fourth"
        )
        if len(memory) < MEMORY_MIN_SAMPLES:
            return line + " (too short a life to judge by)"
        if after - before > MEMORY_GROWTH * before + MEMORY_SLACK:
            self.problems.append(f"{who}: memory grew from {before:,.0f} to {after:,.0f} bytes")
        return line


def _time_of_day(moment: float) -> float:
    """Seconds since midnight, as the logs have it."""
    local = time.localtime(moment)
    return local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec + moment % 1


def _kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def _memory(process: subprocess.Popen) -> int:
    """Bytes that it occupies; 0 if it is gone."""
    try:
        return int(psutil.Process(process.pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def main() -> int:
    """Parses the arguments, trains, checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--actors", type=int, default=4, help="at least 2")
    parser.add_argument("--envs_per_actor", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="of who is killed")
    parser.add_argument("--directory", help="for logs and counts; a new one in /tmp if not given")
    args = parser.parse_args()
    if args.actors < 2 or args.minutes * 60 < 90:
        parser.error("--actors must be at least 2 and --minutes at least 1.5")
    directory = pathlib.Path(args.directory or tempfile.mkdtemp(prefix="seed_rl_soak."))
    print(f"Training for {args.minutes:g} minutes; logs are in {directory}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of close()
    soak = Soak(directory, args.actors, args.envs_per_actor, args.seed)
    try:
        soak.run(args.minutes * 60)
    finally:
        soak.close()
    print(soak.check())
    for problem in soak.problems:
        print(f"BROKEN: {problem}")
    print("Broken promises: " + str(len(soak.problems)) if soak.problems else "All promises kept.")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
