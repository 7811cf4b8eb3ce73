"""The actor: steps environments and asks the learner for actions. Needs no TensorFlow."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import gin
import numpy as np
from absl import logging

from seed_rl.environment import EnvironmentBatch, Rows
from seed_rl.grpc_service import (
    NO_CREDENTIALS,
    CancelledError,
    Client,
    Credentials,
    RemoteFunctionError,
    SignatureError,
    UnavailableError,
)
from seed_rl.nests import map_nest
from seed_rl.user_error import UserError
from seed_rl.watchdog import Watchdog


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
        max_env_seconds: float = 600.0,
        insecure: bool = False,
        credentials: Credentials = NO_CREDENTIALS,
    ):
        """Args:
        environments: what is stepped; environment k has env_id first_env_id + k.
        first_env_id: int.
        server_address: 'unix:/path' or 'host:port' of the learner.
        reconnect_secs: seconds to wait for a learner, at the start and whenever it goes away.
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
          SignatureError: the learner was made for other environments.
          AuthenticationError: the learner refuses the token, or its certificate is not believed.
        """
        self._last_answer = time.monotonic()
        delay = 0.1
        while not should_stop():
            try:
                with Client(
                    self._server_address,
                    connect_timeout=5.0,
                    credentials=self._credentials,
                    insecure=self._insecure,
                ) as client:
                    self._check(client)
                    delay = 0.1
                    self._act(client, should_stop)
            except RemoteFunctionError as error:
                if error.exception_type == "TrainingFinished":
                    logging.info("training is finished")
                    return
                if error.exception_type != "QueueClosedError":  # that one: the learner is stopping
                    raise
            except (UnavailableError, CancelledError) as error:
                logging.info("no learner at %s: %s", self._server_address, error)
            if time.monotonic() - self._last_answer > self._reconnect_secs:
                raise LearnerLostError(
                    f"no learner answered at {self._server_address} for "
                    f"{self._reconnect_secs:.0f} seconds; is it running, with this "
                    "--server_address?"
                )
            # Jitter, so that hundreds of actors do not all come back in the same moment.
            _pause(delay * (0.5 + secrets.randbelow(1000) / 1000), should_stop)
            delay = min(2 * delay, 10.0)

    def _check(self, client: Client) -> None:
        last = int(self._env_ids[-1])
        if last >= client.num_environments:
            raise SignatureError(
                f"this actor's environments are {int(self._env_ids[0])} to {last}, but the learner "
                f"has --num_envs={client.num_environments}; start the learner with more or the "
                "actor with a lower --task or --env_batch_size"
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
            raise SignatureError(
                f"the learner was made for another environment ({error}); give this actor the "
                "learner's --gin_config and --gin_bindings, or another --server_address"
            ) from error
        self._last_answer = time.monotonic()
        return actions


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
