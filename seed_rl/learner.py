"""The learner: serves central inference, trains, saves and reports."""

import hashlib
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf
from absl import logging

from seed_rl.agent import Agent, UnrollSink
from seed_rl.checkpoints import Checkpoints
from seed_rl.devices import Placement, default_placement
from seed_rl.episode_statistics import EpisodeStatistics
from seed_rl.export import export_policy
from seed_rl.grpc_service import (
    DEFAULT_MAX_MESSAGE_BYTES,
    NO_CREDENTIALS,
    Credentials,
    Server,
)
from seed_rl.hosts import HostGoneError
from seed_rl.inference import (
    CentralInference,
    inference_input_specs,
    inference_output_specs,
    unroll_specs,
)
from seed_rl.inference_policies import InferencePolicies
from seed_rl.lockstep import LockstepSink
from seed_rl.prefetching import PrefetchingSink
from seed_rl.profiling import StepProfiler
from seed_rl.progress import FrameRate, ProgressReporter
from seed_rl.saving import FILE_ERRORS, SaveError, Saver, describe
from seed_rl.setting_checks import check_number
from seed_rl.summaries import SummaryWriter
from seed_rl.task_statistics import TaskStatistics
from seed_rl.training import Trainer
from seed_rl.user_error import UserError

_POLL_SECONDS = 0.5  # how often a learner without data looks whether it is to stop
_FAREWELL_SECONDS = 2.0  # how long actors have to hear that training is finished
# The same, where they may have to start or to reconnect first: the longest pause of an actor
# between two attempts is 15 seconds.
_LATE_FAREWELL_SECONDS = 20.0


@gin.configurable(denylist=["credentials"])  # a token has no place on a command line
class Learner:
    """One learner loop for every agent (see seed_rl.agent.Agent for the loop).

    Threads: this one trains; the server has one for its streams and some for each inference device,
    in which CentralInference runs.
    """

    def __init__(
        self,
        agent: Agent,
        observation_specs: Any,
        action_specs: Any,
        num_envs: int,
        server_addresses: Sequence[str],
        logdir: str,
        env_batch_size: int = 1,
        total_frames: int = 1_000_000,
        action_repeat: int = 1,
        inference_batch_size: int = 64,
        max_batch_wait: float = 0.005,
        save_checkpoint_secs: float = 600.0,
        log_secs: float = 10.0,
        jit_compile: bool = False,
        max_skipped_steps: int = 10,
        inference_weights_period: int = 1,
        inference_threads: int = 2,
        prefetch: bool | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        insecure: bool = False,
        credentials: Credentials = NO_CREDENTIALS,
        placement: Placement | None = None,
        agent_copies: Sequence[Agent] = (),
        profile_steps: range = range(0),
    ):
        """Args:
        agent: what is trained.
        observation_specs: nest of TensorSpec of one environment's observation.
        action_specs: nest of TensorSpec of one environment's action.
        num_envs: environments of all actors together, of several hosts' too.
        server_addresses: 'unix:/path' or 'host:port', where actors connect.
        logdir: the run's directory.
        env_batch_size: environments of one actor, which it sends in one call.
        total_frames: environment frames to train on.
        action_repeat: environment frames an agent step.
        inference_batch_size: environments an inference step takes at most; one actor's at least.
        max_batch_wait: seconds after which an inference batch runs although it is not full.
        save_checkpoint_secs: seconds between checkpoints.
        log_secs: seconds between points in TensorBoard.
        jit_compile: compile inference and training with XLA, as a TPU requires.
        max_skipped_steps: batches whose loss or gradient is not finite are not learned from; the
          run ends when there are more than so many of them in a row.
        inference_weights_period: training steps between copies of what was trained to the devices
          that only infer; they are so many steps behind at most, and the one that is running.
        inference_threads: of each inference device. A second one takes the next batch while the
          first waits for the device, and fills the cores that an operation on a CPU leaves idle.
        prefetch: draw and stack the next batch while one is trained on. None: if an accelerator
          trains; a CPU that does has no time to spare.
        max_message_bytes: largest message that actors may send, and that they are sent.
        insecure: allow addresses beyond this machine without encryption or token.
        credentials: the server's certificate, and the token that actors must show.
        placement: which devices train and infer, and with which other hosts; None: the device
          that TensorFlow takes by itself.
        agent_copies: agents of the same factory, one on each of `placement.copies`.
        profile_steps: training steps of which a TensorBoard trace is written.
        """
        placement = placement or default_placement()
        hosts = self._hosts = placement.hosts
        environments = self._environments = hosts.environments(num_envs)
        if not 0 <= agent.num_eval_envs < len(environments):
            raise UserError(
                f"of {_so_many_environments(num_envs, hosts.size)}, the last "
                f"{agent.num_eval_envs} are to evaluate only (num_eval_envs): at least one must be "
                f"left to train on{', on each host' if hosts.size > 1 else ''}. Raise --num_envs "
                "or lower num_eval_envs"
            )
        for name, count, least in (
            ("total_frames", total_frames, 1),
            ("action_repeat", action_repeat, 1),
            ("inference_batch_size", inference_batch_size, 1),
            ("inference_threads", inference_threads, 1),
            ("inference_weights_period", inference_weights_period, 1),
            ("max_skipped_steps", max_skipped_steps, 0),
        ):
            check_number(f"Learner.{name}", count, at_least=least)
        if save_checkpoint_secs < 0 or log_secs < 0:
            raise UserError(
                "Learner.save_checkpoint_secs and log_secs must not be negative, got "
                f"{save_checkpoint_secs} and {log_secs}"
            )
        if num_envs % (env_batch_size * hosts.size):
            raise UserError(
                f"{_so_many_environments(num_envs, hosts.size)} are no multiple of "
                f"--env_batch_size={env_batch_size}: the last "
                f"{num_envs % (env_batch_size * hosts.size)} would belong to no actor"
            )
        self._agent = agent
        self._logdir = logdir
        self._total_frames = total_frames
        self._action_repeat = action_repeat
        self._log_secs = log_secs
        self._observation_specs, self._action_specs = observation_specs, action_specs

        num_steps = agent.train_steps_per_frame(action_repeat) * total_frames / hosts.size
        check_number(
            "the number of training steps of the whole run", num_steps, at_least=0, below=2**63
        )
        with placement.scope():
            self._optimizer = agent.make_optimizer(max(1, round(num_steps)))
        self._trainer = Trainer(agent, self._optimizer, jit_compile, max_skipped_steps, placement)
        self._profiler = StepProfiler(profile_steps, logdir)
        self._num_batches = 0  # of this process, the ones skipped included
        self._checkpoints = Checkpoints(
            logdir, {"optimizer": self._optimizer, **agent.checkpoint_items}
        )
        self._news: list[str] = []  # to be told where the progress is shown
        variables = self._checkpoints.variables()  # restoring adds some that are TensorFlow's own
        if hosts.size > 1:
            hosts.check_same(
                self._described(variables, num_envs, env_batch_size, max_skipped_steps)
            )
        resumed = self._resume(variables)

        self._statistics = EpisodeStatistics(num_envs, action_repeat)
        self._eval_statistics = EpisodeStatistics(num_envs, action_repeat)
        self._tasks = TaskStatistics(range(num_envs))
        self._policies = InferencePolicies(
            agent, agent_copies, placement, jit_compile, inference_weights_period
        )
        batch_size = min(max(inference_batch_size, env_batch_size), len(environments))
        sizes = padded_sizes(batch_size)
        self._sink: UnrollSink = agent.make_unroll_sink(
            unroll_specs(
                agent, self._policies.policies[0], observation_specs, action_specs, sizes[0]
            )
        )
        if resumed and (news := self._sink.restore(logdir)):
            self._tell(news)
        if placement.on_accelerator if prefetch is None else prefetch:
            self._sink = PrefetchingSink(self._sink, self._trainer.place)
        self._stop = threading.Event()  # `run` is given another
        self._lockstep: LockstepSink | None = None
        if hosts.size > 1:
            self._lockstep = LockstepSink(self._sink, hosts, self._status)
        self._inference = CentralInference(
            agent,
            [policy for policy in self._policies.policies for _ in range(inference_threads)],
            observation_specs,
            action_specs,
            num_envs,
            self._sink,
            self._statistics,
            lambda: self._policies.version(self._trainer.num_steps),
            sizes,
            self._eval_statistics,
        )
        self._server = Server(
            server_addresses,
            max_batch_wait=max_batch_wait,
            num_environments=num_envs,
            environments=environments,
            max_message_bytes=max_message_bytes,
            credentials=credentials,
            insecure=insecure,
        )
        self._server.bind(
            self._inference.functions(),
            name="inference",
            input_signature=inference_input_specs(observation_specs),
            output_signature=inference_output_specs(action_specs),
            max_batch_size=batch_size,
            environments_argument=0,
        )
        self._saver = Saver(
            self._save_checkpoint if hosts.is_chief else None,
            self._save_data,
            save_checkpoint_secs,
        )
        self._summaries = SummaryWriter(logdir)
        self._frame_rate = FrameRate()
        self._interval = _Interval()

    @property
    def frames(self) -> int:
        """Environment frames trained on so far, those before a resumption included.

        Those of environments that only evaluate are not counted. Where several hosts train, they
        are those of all as they last were in step.
        """
        steps = self._inference.num_steps
        if self._lockstep is not None:
            steps = self._lockstep.meeting.num_steps
        return self._first_frames + steps * self._action_repeat

    @property
    def _is_to_end(self) -> bool:
        """Whether `run` was told to stop; where several hosts train, whether all know it."""
        if self._lockstep is not None:
            return self._lockstep.meeting.num_stopping > 0
        return self._stop.is_set()

    def _status(self) -> tuple[bool, int]:
        return self._stop.is_set(), self._inference.num_steps

    def run(self, stop: threading.Event) -> None:
        """Trains until `total_frames` are reached or `stop` is set; saves a checkpoint either way.

        Where several hosts train, all end when one is told to stop.

        What cannot be written meanwhile is a warning, and tried again.

        Raises:
          SaveError: the last checkpoint cannot be written.
          HostGoneError: another host is gone; the checkpoint is written first.
          UserError: the checkpoint is written, but the exported policy cannot be.
          whatever the loss or the environment's data make go wrong.
        """
        self._stop = stop
        self._server.start()
        logging.info("serving %s", ", ".join(self._server.addresses))
        self._summaries.operative_config()
        for news in self._news:
            print(news[:1].upper() + news[1:], flush=True)
        reporter = ProgressReporter(self._total_frames)
        self._saver.start()
        self._last_log = time.monotonic()
        resumed_finished = self.frames >= self._total_frames
        gone: HostGoneError | None = None
        try:
            while not self._is_to_end and self.frames < self._total_frames:
                self._train_once()
                self._report(reporter)
            if not self._is_to_end:
                self._say_farewell(resumed_finished)
        except HostGoneError as error:
            gone = error
        finally:
            try:
                reporter.close()
            finally:
                failure = self._close()
        if gone is not None:
            raise HostGoneError(f"{gone}. But {failure}" if failure else str(gone))
        if failure is not None:
            raise failure
        if not (stop.is_set() or self._is_to_end) and self._hosts.is_chief:
            self._export()

    def _train_once(self) -> None:
        self._profiler.before_step(self._num_batches)
        metrics = self._trainer.train_from(self._lockstep or self._sink, _POLL_SECONDS)
        if metrics is not None:
            self._num_batches += 1
            self._policies.update(self._trainer.num_steps)
            self._interval.add(metrics)

    def _report(self, reporter: ProgressReporter) -> None:
        now = time.monotonic()
        self._frame_rate.record(self.frames)
        sink_metrics = self._sink.metrics()
        reporter.update(
            self.frames,
            self._frame_rate.rates()[60.0],
            self._statistics.recent_mean_return(),
            self._statistics.num_episodes,
            self._trainer.num_steps,
            sink_metrics,
        )
        if now - self._last_log >= self._log_secs:
            self._log(sink_metrics, now - self._last_log)
            self._last_log = now
        self._saver.save_if_due()

    def _log(self, sink_metrics: dict[str, float], seconds: float) -> None:
        frames = self.frames
        finished = self._statistics.take_finished()
        self._summaries.episodes(finished, frames)
        self._tasks.record(finished)
        self._summaries.scalars(self._tasks.take_scalars(), frames)
        self._summaries.episodes(self._eval_statistics.take_finished(), frames, "eval/episode_")
        for prefix, statistics in (
            ("episode/", self._statistics),
            ("eval/episode_", self._eval_statistics),
        ):
            recent_return = statistics.recent_mean_return()
            if recent_return is not None:
                self._summaries.scalars({f"{prefix}return_last_100": recent_return}, frames)
        self._summaries.scalars(
            {
                **self._interval.take(seconds),
                **{f"data/{name}": value for name, value in sink_metrics.items()},
                **self._inference_metrics(),
                "speed/frames_per_second": self._frame_rate.rates()[10.0] or 0.0,
                "inference/weights_lag": self._policies.lag(self._trainer.num_steps),
                "training/steps": self._trainer.num_steps,
                "training/skipped_steps": self._trainer.num_skipped,
                "training/failed_saves": self._saver.num_failed + self._summaries.num_failed,
            },
            frames,
        )
        self._summaries.flush()

    def _inference_metrics(self) -> dict[str, float]:
        metrics = {"inference/environment_restarts": float(self._inference.num_restarts)}
        statistics = self._server.statistics()["inference"]
        if not statistics.num_batches:
            return metrics
        return metrics | {
            "inference/batch_fill": statistics.mean_batch_fill,
            "inference/wait_seconds": statistics.mean_wait,
            "inference/latency_seconds": statistics.mean_wait + statistics.mean_run_time,
        }

    def _described(
        self,
        variables: Sequence[tf.Variable],
        num_envs: int,
        env_batch_size: int,
        max_skipped_steps: int,
    ) -> list[str]:
        """What must be the same on all hosts."""
        settings = {
            "num_envs": num_envs,
            "env_batch_size": env_batch_size,
            "Learner.total_frames": self._total_frames,
            "Learner.action_repeat": self._action_repeat,
            "batch_size": self._agent.batch_size,
            "unroll_length": self._agent.unroll_length,
            "Learner.max_skipped_steps": max_skipped_steps,
            "a gin configuration with the digest": _configuration_digest(),
        }
        return [f"{name}={value}" for name, value in settings.items()] + [
            f"variable {i}={v.dtype.name} {v.shape}" for i, v in enumerate(variables)
        ]

    def _tell(self, news: str) -> None:
        logging.info("%s", news)
        self._news.append(news)

    def _resume(self, variables: Sequence[tf.Variable]) -> bool:
        resumed = self._hosts.is_chief and self._checkpoints.restore_latest()
        (resumed_hosts,) = self._hosts.sum([int(resumed)])
        resumed = int(resumed_hosts) > 0
        self._hosts.broadcast(variables)
        self._first_frames = int(self._checkpoints.frames.numpy())
        self._trainer.num_steps = int(self._checkpoints.training_steps.numpy())
        if resumed:
            self._tell(
                f"resumed at {self._first_frames} frames, {self._trainer.num_steps} training steps"
            )
        return resumed

    def _save_checkpoint(self) -> str:
        return self._checkpoints.save(self.frames, self._trainer.num_steps)

    def _save_data(self) -> None:
        self._sink.save(self._logdir)

    def _export(self) -> None:
        try:
            export_policy(self._agent, self._observation_specs, self._action_specs, self._logdir)
        except FILE_ERRORS as error:
            raise UserError(
                f"training is finished and saved, but the policy could not be exported: "
                f"{describe(error)}. Once there is room, --run_mode=export writes it"
            ) from error

    def _say_farewell(self, resumed_finished: bool) -> None:
        """Lets actors hear that training is finished, so that they end and do not reconnect."""
        self._inference.finish(self._environments if resumed_finished else range(0))
        if resumed_finished:
            logging.info(
                "the run in %s has all its %d frames already; to train on, raise "
                "Learner.total_frames. Telling actors for %.0f seconds",
                self._logdir,
                self.frames,
                _LATE_FAREWELL_SECONDS,
            )
        start = time.monotonic()
        while True:
            done = (
                self._inference.everybody_knows
                or time.monotonic() - start >= self._farewell_seconds(resumed_finished)
            )
            # Hosts leave together: what one still has to say, the others wait for.
            meeting = self._hosts.meet(done, self._stop.is_set(), 0)
            if meeting.num_ready == self._hosts.size or meeting.num_stopping:
                return
            # Inference may be waiting for room in the queue: it is made, so that it can answer.
            self._sink.next_batch(0.05)

    def _farewell_seconds(self, resumed_finished: bool) -> float:
        """How long to wait, as things are, for actors that have not heard the end."""
        # One that is connected will call when it has stepped; one that has just left comes back.
        expected = (
            self._server.num_claims > 0
            or self._server.seconds_since_departure < _LATE_FAREWELL_SECONDS
        )
        return _LATE_FAREWELL_SECONDS if resumed_finished or expected else _FAREWELL_SECONDS

    def _close(self) -> SaveError | None:
        """Ends everything; returns what was in the way of the last checkpoint."""
        self._profiler.close()
        self._sink.close()
        self._server.shutdown()
        failure = self._saver.save()
        self._log(self._sink.metrics(), max(1e-3, time.monotonic() - self._last_log))
        self._summaries.close()
        return failure


class _Interval:
    """Means of training metrics since the last point in TensorBoard."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[float]] = {}
        self._num_steps = 0

    def add(self, metrics: dict[str, tf.Tensor]) -> None:
        self._num_steps += 1
        for name, value in metrics.items():
            self._metrics.setdefault(name, []).append(float(value))

    def take(self, seconds: float) -> dict[str, float]:
        means = {name: float(np.mean(values)) for name, values in self._metrics.items()}
        means["speed/training_steps_per_second"] = self._num_steps / seconds
        self._metrics, self._num_steps = {}, 0
        return means


def _configuration_digest() -> str:
    """A digest of all gin bindings but those that may differ from host to host."""
    own = ("Learner.", "make_placement.", "#")
    lines = [line for line in gin.config_str().splitlines() if not line.startswith(own)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _so_many_environments(num_envs: int, num_hosts: int) -> str:
    each = f", {num_envs / num_hosts:g} for each of {num_hosts} hosts" if num_hosts > 1 else ""
    return f"--num_envs={num_envs} environments{each}"


def padded_sizes(max_size: int) -> list[int]:
    """Sizes of inference batches to compile: powers of two below `max_size`, and it itself."""
    sizes = {max_size}
    size = 1
    while size < max_size:
        sizes.add(size)
        size *= 2
    return sorted(sizes)


def make_logdir(logdir: str) -> str:
    """Creates the run's directory if it is missing; returns its absolute path.

    Raises:
      UserError: it cannot be created or written to.
    """
    path = pathlib.Path(logdir).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--logdir={logdir} cannot be written to: {error}") from error
    return str(path)
