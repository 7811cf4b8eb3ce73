"""The entry point: `python -m seed_rl.main --run_mode=learner|actor|eval|export|check_env`.

Flags are read here and nowhere else. They say where a process runs and which part it plays; what is
learnt, and how, is said by gin.
"""

import contextlib
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags, logging

from seed_rl.process_exit import leave

# TensorFlow's C++ side reads this once, at import: no notes on which CPU instructions it uses.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

FLAGS = flags.FLAGS

flags.DEFINE_enum(
    "run_mode",
    None,
    ["learner", "actor", "eval", "export", "check_env"],
    "Which part this process plays. check_env tries the environment and says what is wrong.",
)
flags.DEFINE_string("logdir", None, "The run's directory: checkpoints, TensorBoard, config.")
flags.DEFINE_list(
    "server_address",
    # In a directory that nobody else may enter; the learner makes it.
    [f"unix:/tmp/seed_rl_{os.getuid()}/learner"],
    "Where the learner listens: 'unix:/path' or 'host:port', several separated by commas. An actor "
    "connects to one of them, the first actors to the first.",
)
flags.DEFINE_integer("task", 0, "Number of this actor, from 0.", lower_bound=0)
flags.DEFINE_integer("num_envs", 16, "Environments of all actors together.", lower_bound=1)
flags.DEFINE_integer("env_batch_size", 8, "Environments of one actor.", lower_bound=1)
flags.DEFINE_multi_string(
    "gin_config", [], "A gin file: its path, or its name in seed_rl.configs. May be repeated."
)
flags.DEFINE_multi_string(
    "gin_bindings", [], "A gin binding, such as 'Learner.total_frames=1e6'. May be repeated."
)
flags.DEFINE_list(
    "hosts",
    [],
    "learner: 'host:port' of every host, if several train together, in the same order on all: "
    "where they talk to each other.",
)
flags.DEFINE_integer("host_index", 0, "learner: which of --hosts this is.", lower_bound=0)
flags.DEFINE_bool(
    "insecure_hosts",
    False,
    "Allow --hosts: what they tell each other is not encrypted, and whoever reaches their ports "
    "can run code there.",
)
flags.DEFINE_integer("seed", 1, "Environment i starts from seed + i.", lower_bound=0)
flags.DEFINE_string(
    "profile_steps", "", "learner: training steps to trace for TensorBoard, such as 100:110."
)
flags.DEFINE_integer(
    "num_episodes", None, "eval: episodes to play (100; with --video, 1).", lower_bound=1
)
flags.DEFINE_bool("greedy", True, "eval: take the best action; --nogreedy acts as in training.")
flags.DEFINE_string("video", None, "eval: an .mp4 or .avi file to write.")
flags.DEFINE_integer("num_steps", 300, "check_env: agent steps to take.", lower_bound=1)
flags.DEFINE_string(
    "token_file",
    None,
    "A file with the token that actors show and the learner wants. Without it: the environment "
    "variable SEED_RL_TOKEN, if that is set.",
)
flags.DEFINE_string("tls_certificate", None, "This process's own certificate: a PEM file.")
flags.DEFINE_string("tls_key", None, "The private key of --tls_certificate: a PEM file.")
flags.DEFINE_string(
    "tls_ca",
    None,
    "Certificates of authorities, a PEM file. An actor that has it connects by TLS to a learner "
    "whose certificate one of them signed; a learner that has it wants such a certificate of every "
    "actor.",
)
flags.DEFINE_bool(
    "insecure", False, "Allow addresses beyond this machine without encryption or token."
)

# What is the user's to mend: told in one line, without a traceback.
_EXIT_WRONG_INPUT = 2

_SAME_SIGNAL_SECONDS = 1.0
# An actor may be waiting for a learner that has gone, or for a busy one; it has nothing to save.
_ACTOR_LEAVES_WITHIN = 2.0  # seconds


class UsageError(ValueError):
    """The flags do not go together."""


def _user_errors() -> tuple[type[BaseException], ...]:
    from gymnasium.error import DependencyNotInstalled

    from seed_rl.environment import EnvironmentFailedError, ObservationError, UnsupportedSpaceError
    from seed_rl.grpc_service import RpcError
    from seed_rl.user_error import UserError

    return (
        UsageError,
        UserError,
        RpcError,
        EnvironmentFailedError,
        ObservationError,
        UnsupportedSpaceError,
        ModuleNotFoundError,
        DependencyNotInstalled,
    )


@contextlib.contextmanager
def _setting_up() -> Iterator[None]:
    """While parts are made from the configuration: what they refuse is the user's to mend."""
    try:
        yield
    except _user_errors():
        raise
    except _too_large_errors() as error:
        logging.debug("setting up failed", exc_info=True)
        raise UsageError(
            f"the configuration asks for more than this machine can hold: {error}"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        logging.debug("setting up failed", exc_info=True)
        raise UsageError(
            f"the configuration cannot be used: {error} (--verbosity=1 shows where)"
        ) from error


def _too_large_errors() -> tuple[type[BaseException], ...]:
    """What is raised where numbers or arrays are larger than can be."""
    tensorflow = sys.modules.get("tensorflow")  # an actor has none
    exhausted = (tensorflow.errors.ResourceExhaustedError,) if tensorflow else ()
    return (MemoryError, OverflowError, *exhausted)


def _one_line(error: BaseException) -> str:
    """The message, with what gin adds to it made readable."""
    calls = r"\s*In call to configurable '(\w+)' \(<.*?>\)"
    return " ".join(re.sub(calls, r" [in \1]", str(error)).split())


def _credentials() -> Any:
    from seed_rl.grpc_service import Credentials, read_token

    return Credentials(
        tls_certificate=FLAGS.tls_certificate or "",
        tls_key=FLAGS.tls_key or "",
        tls_ca=FLAGS.tls_ca or "",
        token=read_token(FLAGS.token_file, os.environ),
    )


def run_actor(signals: "StopSignals") -> None:
    """Steps environments until the learner has finished."""
    from seed_rl import config
    from seed_rl.environment import make_environment_batch

    experiment = config.load(FLAGS.gin_config, FLAGS.gin_bindings, for_actor=True)
    from seed_rl.actor import Actor

    first = FLAGS.task * FLAGS.env_batch_size
    env_ids = range(first, first + FLAGS.env_batch_size)
    if env_ids[-1] >= FLAGS.num_envs:
        raise UsageError(
            f"--task={FLAGS.task} with --env_batch_size={FLAGS.env_batch_size} needs environments "
            f"{env_ids[0]} to {env_ids[-1]}, but --num_envs={FLAGS.num_envs}"
        )
    if not FLAGS.server_address:
        raise UsageError("--server_address is empty: give 'unix:/path' or 'host:port'")
    credentials = _credentials()
    with _setting_up():
        environments = make_environment_batch(experiment.environment, env_ids, FLAGS.seed)
    try:
        # The first actors to the first address and so on: learners on several hosts have their
        # environments in this order.
        num_actors = FLAGS.num_envs // FLAGS.env_batch_size
        address = FLAGS.server_address[FLAGS.task * len(FLAGS.server_address) // num_actors]
        actor = Actor(
            environments, first, address, insecure=FLAGS.insecure, credentials=credentials
        )
        signals.there_is_something_to_end(leave_within=_ACTOR_LEAVES_WITHIN)
        actor.run(signals.stop.is_set)
    finally:
        environments.close()


def _make_agent(environment: str, agent: str) -> tuple[Any, Any, Any]:
    """Returns (agent, observation specs, action specs), from the spaces of one environment."""
    make, observation_specs, action_specs = _agent_factory(environment, agent)
    return make(), observation_specs, action_specs


def _agent_factory(environment: str, agent: str) -> tuple[Callable[[], Any], Any, Any]:
    """Returns (what makes the agent, observation specs, action specs)."""
    import tensorflow as tf

    from seed_rl import config
    from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
    from seed_rl.environment import make_environment_batch

    # Hosts must not explore alike; their variables become those of the first one.
    tf.keras.utils.set_random_seed(FLAGS.seed + FLAGS.host_index)
    probe = make_environment_batch(environment, [0], FLAGS.seed)
    try:
        spaces = probe.observation_space, probe.action_space
    finally:
        probe.close()
    make = functools.partial(config.make_agent, agent, *spaces, FLAGS.num_envs)
    return make, agent_observation_specs(spaces[0]), agent_action_specs(spaces[1])


def run_learner(signals: "StopSignals") -> None:
    """Serves inference and trains."""
    from seed_rl import config

    logdir = _required_logdir()  # before TensorFlow is imported, which takes its time
    credentials = _credentials()
    experiment = config.load(FLAGS.gin_config, FLAGS.gin_bindings, for_actor=False)
    import tensorflow as tf

    from seed_rl.devices import make_placement
    from seed_rl.hosts import connect_hosts
    from seed_rl.learner import Learner, make_logdir
    from seed_rl.profiling import parse_steps

    if FLAGS.host_index:  # the first one's is the run's
        logdir = os.path.join(logdir, f"host_{FLAGS.host_index}")
    logdir = make_logdir(logdir)
    connect = functools.partial(connect_hosts, FLAGS.hosts, FLAGS.host_index, FLAGS.insecure_hosts)
    with _setting_up():
        placement = make_placement(connect=connect)
        make_agent, observation_specs, action_specs = _agent_factory(
            experiment.environment, experiment.agent
        )
        with placement.scope():
            agent = make_agent()
        copies = []
        for device in placement.copies:
            with tf.device(device):
                copies.append(make_agent())
        learner = Learner(
            agent,
            observation_specs,
            action_specs,
            FLAGS.num_envs,
            FLAGS.server_address,
            logdir,
            env_batch_size=FLAGS.env_batch_size,
            insecure=FLAGS.insecure,
            credentials=credentials,
            placement=placement,
            agent_copies=copies,
            profile_steps=parse_steps(FLAGS.profile_steps),
        )
    signals.there_is_something_to_end()
    learner.run(signals.stop)


def _restored_agent() -> tuple[Any, Any, Any, Any]:
    from seed_rl import config

    logdir = _required_logdir()
    experiment = config.load(FLAGS.gin_config, FLAGS.gin_bindings, for_actor=False)
    from seed_rl.checkpoints import CheckpointError, Checkpoints

    with _setting_up():
        made = _make_agent(experiment.environment, experiment.agent)
    checkpoints = Checkpoints(logdir, made[0].checkpoint_items)
    if not checkpoints.restore_latest():
        raise CheckpointError(f"there is no checkpoint in --logdir={logdir}; is it the learner's?")
    logging.info("restored the checkpoint of %d frames", checkpoints.frames.numpy())
    return experiment, *made


def run_eval(signals: "StopSignals") -> None:
    """Plays episodes with the newest checkpoint and prints how it did."""
    del signals  # the default action of a signal, to end at once, is right here
    experiment, agent, _, _ = _restored_agent()
    from seed_rl.environment import make_environment_batch
    from seed_rl.evaluation import evaluate

    num_episodes = _num_episodes(FLAGS.num_episodes, FLAGS.video)
    num_envs = 1 if FLAGS.video else min(FLAGS.env_batch_size, num_episodes)
    # Other seeds than in training, so that no episode is one that was trained on.
    environments = make_environment_batch(
        experiment.environment, range(num_envs), FLAGS.seed + 1_000_000
    )
    try:
        result = evaluate(
            agent,
            environments,
            num_episodes,
            greedy=FLAGS.greedy,
            video_path=FLAGS.video,
        )
    finally:
        environments.close()
    print(result.report())


def _num_episodes(given: int | None, video: str | None) -> int:
    """Returns how many episodes to play: a video is played by one environment, to be looked at."""
    if given is not None:
        return given
    return 1 if video else 100


def run_export(signals: "StopSignals") -> None:
    """Writes the newest checkpoint's policy as a SavedModel."""
    del signals
    _, agent, observation_specs, action_specs = _restored_agent()
    from seed_rl.export import export_policy

    print(export_policy(agent, observation_specs, action_specs, FLAGS.logdir))


def run_check_env(signals: "StopSignals") -> None:
    """Tries the environment, and whether the agent takes what it observes."""
    del signals
    from seed_rl import config
    from seed_rl.check_env import check_environment

    experiment = config.load(FLAGS.gin_config, FLAGS.gin_bindings, for_actor=False)
    warnings: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        warnings.extend([line] if line.startswith("warning: ") else [])

    with _setting_up():
        rows = check_environment(experiment.environment, FLAGS.seed, FLAGS.num_steps, say)
        agent, _, action_specs = _make_agent(experiment.environment, experiment.agent)
        say(f"agent         {_tried_agent(agent, action_specs, rows)}")
    say(f"{len(warnings)} warnings" if warnings else "nothing is wrong")


def _tried_agent(agent: Any, action_specs: Any, rows: Any) -> str:
    import numpy as np

    from seed_rl.nests import map_nest

    count = len(rows.indices)
    actions = map_nest(lambda s: np.zeros((count, *s.shape), s.dtype), action_specs)
    agent.policy(rows.indices, actions, rows.env_outputs, agent.initial_state(count))
    parameters = sum(int(np.prod(v.shape)) for v in agent.trainable_variables)
    return f"{type(agent).__name__} takes them; {parameters:,} parameters"


def _required_logdir() -> str:
    if not FLAGS.logdir:
        raise UsageError(f"--run_mode={FLAGS.run_mode} needs --logdir=DIRECTORY")
    return FLAGS.logdir


class StopSignals:
    """Sets the event `stop` when SIGINT or SIGTERM comes; a later signal ends the process at once.

    A launcher may pass on a Ctrl-C that the terminal has sent to every process already: what comes
    right after the first signal is taken for the same one.
    """

    def __init__(self, saves: bool = False) -> None:
        """Args:
        saves: this process saves what it has when it is stopped; stopped before there is something,
          it says by its exit code, 128 + the signal's number, that nothing was saved.
        """
        self._saves = saves
        self.stop = threading.Event()
        self._stopped_at = 0.0
        self._something_to_end = False
        self._leave_within: float | None = None

    def install(self) -> None:
        """Takes the signals over."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def there_is_something_to_end(self, leave_within: float | None = None) -> None:
        """Says that from now on `stop` is looked at; before, a signal ends the process at once.

        Args:
          leave_within: seconds after which the process ends whatever it waits for; None: never.
        """
        self._something_to_end = True
        self._leave_within = leave_within

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        if not self._something_to_end:
            leave(128 + number if self._saves else 0)
        if not self.stop.is_set():
            self._stopped_at = time.monotonic()
            self.stop.set()
            if self._leave_within is not None:
                timer = threading.Timer(self._leave_within, leave, [0])
                timer.daemon = True
                timer.start()
        elif time.monotonic() - self._stopped_at > _SAME_SIGNAL_SECONDS:
            leave(128 + number)


def main(argv: list[str]) -> int:
    """Runs the part that --run_mode names; returns the process's exit code."""
    if len(argv) > 1:
        print(f"error: not a flag: {' '.join(argv[1:])}", file=sys.stderr)
        return _EXIT_WRONG_INPUT
    if not FLAGS.run_mode:
        print(
            "error: --run_mode is needed: learner, actor, eval, export or check_env",
            file=sys.stderr,
        )
        return _EXIT_WRONG_INPUT
    logging.set_verbosity(max(FLAGS.verbosity, logging.INFO))
    signals = StopSignals(saves=FLAGS.run_mode == "learner")
    if FLAGS.run_mode in ("learner", "actor"):
        signals.install()
    parts = {
        "learner": run_learner,
        "actor": run_actor,
        "eval": run_eval,
        "export": run_export,
        "check_env": run_check_env,
    }
    try:
        parts[FLAGS.run_mode](signals)
    except _user_errors() as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return _EXIT_WRONG_INPUT
    return 0


def _parse_flags(argv: list[str]) -> list[str]:
    """Reads the flags; a wrong one ends the process as other wrong input does."""
    try:
        return FLAGS(argv)
    except flags.Error as error:
        print(f"error: {_one_line(error)} (--help lists the flags)", file=sys.stderr)
        sys.exit(_EXIT_WRONG_INPUT)


def run() -> None:
    """Parses the flags, runs `main` and ends the process."""
    app.run(lambda argv: leave(main(argv)), flags_parser=_parse_flags)


if __name__ == "__main__":
    run()
