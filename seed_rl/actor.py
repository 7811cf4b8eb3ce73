"""The actor: steps environments and asks the learner for actions. Needs no TensorFlow."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import gin
import numpy as np
import optree
from absl import logging

from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
from seed_rl.environment import EnvironmentBatch, Rows
from seed_rl.grpc_service import (
    DEFAULT_MAX_MESSAGE_BYTES,
    NO_CREDENTIALS,
    CancelledError,
    Client,
    Credentials,
    EnvironmentsInUseError,
    MessageTooLargeError,
    RemoteFunctionError,
    SignatureError,
    UnavailableError,
)
from seed_rl.nests import map_nest
from seed_rl.structures import EnvOutput
from seed_rl.user_error import UserError
from seed_rl.watchdog import Watchdog

# Seconds between two attempts to reach the learner: each twice the one before, until it answers.
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 10.0


class LearnerLostError(UserError):
    """The learner did not come back in time."""


@gin.configurable(denylist=["credentials"])  # a token has no place on a command line
class Actor:
    """Steps a batch of environments, one call to the learner a step.

        rows = environments.reset()
        forever:
            actions = learner.inference(env_ids, run_ids, rows)
            rows = environments.step(actions)

    When the learner goes away the actor reconnects, resets its environments and goes on under new
    run_ids, by which the learner knows that what came before does not continue.
    """

    def __init__(
        self,
        environments: EnvironmentBatch,
        first_env_id: int,
        server_address: str,
        reconnect_secs: float = 600.0,
        takeover_secs: float = 30.0,
        keepalive_secs: float = 10.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_env_seconds: float = 600.0,
        insecure: bool = False,
        credentials: Credentials = NO_CREDENTIALS,
    ):
        """Args:
        environments: what is stepped; environment k has env_id first_env_id + k.
        first_env_id: int.
        server_address: 'unix:/path' or 'host:port' of the learner.
        reconnect_secs: seconds to wait for a learner, at the start and whenever it goes away.
        takeover_secs: seconds to wait for environments that another actor has. One that has died
          without a word has them until the learner notices, which takes it twice its keep-alive.
        keepalive_secs: a learner that is gone without a word is noticed after twice as long.
        max_message_bytes: largest message to send and to take; the learner has a limit of its own.
        max_env_seconds: seconds that resetting or stepping the environments may take; then they
          hang, and the process ends with exit code 3, to be started again. 0: no limit.
        insecure: allow an address beyond this machine without encryption or token.
        credentials: the authorities to believe, this actor's certificate, the token to show.
        """
        self._environments = environments
        self._env_ids = np.arange(
            first_env_id, first_env_id + environments.num_envs, dtype=np.int32
        )
        self._server_address = server_address
        self._reconnect_secs = reconnect_secs
        self._takeover_secs = takeover_secs
        self._keepalive_secs = keepalive_secs
        self._max_message_bytes = max_message_bytes
        self._client_id = secrets.token_hex(16)
        last_env_id = first_env_id + environments.num_envs - 1
        self._watchdog = Watchdog(
            max_env_seconds, f"the environments {first_env_id} to {last_env_id}"
        )
        self._insecure = insecure
        self._credentials = credentials

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Acts until the learner has finished training or `should_stop()`.

        Raises:
          LearnerLostError: no learner for `reconnect_secs`.
          EnvironmentsInUseError: another actor has had these environments for `takeover_secs`.
          SignatureError: the learner was made for other environments, or for fewer.
          MessageTooLargeError: what the environments observe does not fit in a message.
          AuthenticationError: the learner refuses the token, or its certificate is not believed.
        """
        self._last_answer = self._last_free = time.monotonic()
        self._delay = _FIRST_DELAY
        while not should_stop():
            try:
                with self._connect() as client:
                    self._last_free = time.monotonic()
                    self._check_environment(client)
                    # Otherwise an earlier "no learner at" would stay the last word of a log.
                    logging.info(
                        "connected to the learner at %s, with the environments %d to %d",
                        self._server_address,
                        self._env_ids[0],
                        self._env_ids[-1],
                    )
                    self._act(client, should_stop)
            except RemoteFunctionError as error:
                if error.exception_type == "TrainingFinished":
                    logging.info("training is finished")
                    return
                if error.exception_type != "QueueClosedError":  # that one: the learner is stopping
                    raise
            except (UnavailableError, CancelledError) as error:
                logging.info("no learner at %s: %s", self._server_address, error)
                self._last_free = time.monotonic()
            except EnvironmentsInUseError as error:
                self._wait_for_takeover(error)
            if time.monotonic() - self._last_answer > self._reconnect_secs:
                raise LearnerLostError(
                    f"no learner answered at {self._server_address} for "
                    f"{self._reconnect_secs:.0f} seconds; is it running, with this "
                    "--server_address?"
                )
            # Jitter, so that hundreds of actors do not all come back in the same moment.
            _pause(self._delay * (0.5 + secrets.randbelow(1000) / 1000), should_stop)
            self._delay = min(2 * self._delay, _LONGEST_DELAY)

    def _connect(self) -> Client:
        try:
            return Client(
                self._server_address,
                connect_timeout=5.0,
                environments=range(int(self._env_ids[0]), int(self._env_ids[-1]) + 1),
                client_id=self._client_id,
                keepalive_seconds=self._keepalive_secs,
                max_message_bytes=self._max_message_bytes,
                credentials=self._credentials,
                insecure=self._insecure,
            )
        except SignatureError as error:
            raise SignatureError(
                f"{error}; start the learner with a higher --num_envs, or this actor with a lower "
                "--task or --env_batch_size"
            ) from error

    def _wait_for_takeover(self, error: EnvironmentsInUseError) -> None:
        """Logs that another actor has the environments; raises when it had them for too long."""
        if time.monotonic() - self._last_free > self._takeover_secs:
            raise EnvironmentsInUseError(
                f"{error}. Every actor needs a --task of its own: give this one another, or end "
                "the other one"
            ) from error
        logging.info(
            "the learner says: %s. If that one is dead, the learner will notice; waiting", error
        )
        self._last_answer = time.monotonic()

    def _check_environment(self, client: Client) -> None:
        """Refuses a learner that was made for another environment, before a step is taken.

        Raises:
          SignatureError: observations or actions differ.
        """
        self._check_actions(client.functions["inference"].output_signature)
        num_envs = self._env_ids.size

        def rows(spec: Any) -> np.ndarray:
            return np.broadcast_to(np.zeros((), spec.dtype), (num_envs, *spec.shape))

        floats, flags = np.zeros(num_envs, np.float32), np.zeros(num_envs, np.bool_)
        env_outputs = EnvOutput(
            reward=floats,
            done=flags,
            observation=map_nest(
                rows, agent_observation_specs(self._environments.observation_space)
            ),
            abandoned=flags,
            episode_step=np.zeros(num_envs, np.int32),
        )
        run_ids = np.zeros(num_envs, np.int64)
        try:
            client.check("inference", self._env_ids, run_ids, env_outputs, floats)
        except SignatureError as error:
            raise self._wrong_environment(error) from error

    def _check_actions(self, output_signature: Any) -> None:
        learners = optree.tree_leaves(output_signature)
        own = optree.tree_leaves(agent_action_specs(self._environments.action_space))
        # By their names, games that know different numbers of actions can be told apart.
        named = all(spec.name for spec in learners)
        expected = [_describe(spec, spec.shape[1:], named) for spec in learners]
        got = [_describe(spec, spec.shape, named) for spec in own]
        if expected != got:
            raise self._wrong_environment(
                f"its actions are {', '.join(expected)}; this actor's are {', '.join(got)}"
            )

    def _wrong_environment(self, why: Any) -> SignatureError:
        return SignatureError(
            f"the learner was made for another environment ({why}); give this actor the learner's "
            "--gin_config and --gin_bindings, or another --server_address"
        )

    def _act(self, client: Client, should_stop: Callable[[], bool]) -> None:
        run_ids = np.array(
            [secrets.randbits(63) for _ in range(self._env_ids.size)], dtype=np.int64
        )
        answered: Any = None  # the latest action of every environment
        with self._watchdog.watching("reset"):
            pending = [self._environments.reset()]
        while not should_stop():
            for rows in pending:
                run_ids[rows.indices[rows.torn]] = secrets.randbits(63)
                actions = self._call(client, run_ids, rows)
                if answered is None or rows.indices.size == self._env_ids.size:
                    answered = map_nest(np.array, actions)
                else:
                    _put(answered, rows.indices, actions)
            with self._watchdog.watching("step"):
                pending = self._environments.step(answered)

    def _call(self, client: Client, run_ids: np.ndarray, rows: Rows) -> Any:
        try:
            actions = client.inference(
                self._env_ids[rows.indices],
                run_ids[rows.indices],
                rows.env_outputs,
                rows.raw_rewards,
            )
        except SignatureError as error:
            raise self._wrong_environment(error) from error
        except MessageTooLargeError as error:
            raise MessageTooLargeError(
                f"{error}; give the learner and the actors a lower --env_batch_size, or both "
                "--gin_bindings=Learner.max_message_bytes=N and "
                "--gin_bindings=Actor.max_message_bytes=N with a higher N"
            ) from error
        self._delay = _FIRST_DELAY
        self._last_answer = time.monotonic()
        return actions


def _describe(spec: Any, shape: Any, named: bool) -> str:
    words = f"{spec.dtype}{list(shape)}"
    return f"{words} ({spec.name})" if named else words


def _pause(seconds: float, should_stop: Callable[[], bool]) -> None:
    """Sleeps, but not past `should_stop()`."""
    end = time.monotonic() + seconds
    while not should_stop() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))


def _put(nest: Any, indices: np.ndarray, values: Any) -> None:
    """Writes rows (leaves [n, …]) into the arrays of `nest`, at `indices` [n]."""

    def put(array: np.ndarray, rows: np.ndarray) -> None:
        array[indices] = rows

    map_nest(put, nest, values)
