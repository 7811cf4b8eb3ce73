"""Waiting until all hosts of a run are there, before TensorFlow connects them.

TensorFlow by itself hears no signal while it waits for hosts, and gives up within seconds where
the first one is not there yet.
"""

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Sequence

import numpy as np
from absl import logging

from seed_rl.grpc_service import (
    CancelledError,
    Client,
    EnvironmentsInUseError,
    ProtocolError,
    RemoteFunctionError,
    Server,
    TensorSpec,
    UnavailableError,
)
from seed_rl.user_error import UserError

_POLL_SECONDS = 0.2
_HEARD_SECONDS = 10.0  # since a host that waits was heard of, which asks all the time
_CONNECT_SECONDS = 5.0
_REMIND_SECONDS = 60.0


def wait_for_all(hosts: Sequence[str], index: int) -> None:
    """Returns, on all hosts at about the same time, when all are there.

    The first one listens at its address meanwhile; the others ask there.

    Args:
      hosts: 'host:port' of each.
      index: which of them this process is.

    Raises:
      UserError: the hosts are given other hosts, or two say that they are the same one.
      AddressError: the first one's address is taken.
    """
    if index == 0:
        _receive(hosts)
    else:
        _report(hosts, index)


def _receive(hosts: Sequence[str]) -> None:
    size = len(hosts)
    confirmed = {0}
    last_heard: dict[int, float] = {}
    all_know = threading.Event()

    def arrive(host: np.ndarray, digest: np.ndarray) -> np.bool_:
        if digest != _digest(hosts):
            raise ValueError(
                f"--hosts differs from that of the first host, which is {','.join(hosts)}"
            )
        now = time.monotonic()
        if int(host) not in last_heard:
            logging.info("host %d is there", host)
        last_heard[int(host)] = now
        # One that has died meanwhile is not there.
        recent = {one for one, heard in last_heard.items() if now - heard < _HEARD_SECONDS}
        return np.bool_(len(recent | confirmed) == size)

    def confirm(host: np.ndarray) -> None:
        # An answer may be lost when the server ends; this one is not needed.
        confirmed.add(int(host))
        if len(confirmed) == size:
            all_know.set()

    # That nothing is encrypted was allowed before: see seed_rl.hosts.
    server = Server(hosts[0], num_environments=size, insecure=True)
    number = TensorSpec((), "int32")
    server.bind(
        arrive,
        input_signature=(number, TensorSpec((), "int64")),
        output_signature=TensorSpec((), "bool"),
        batched=False,
    )
    server.bind(confirm, input_signature=(number,), output_signature=None, batched=False)
    server.start()
    try:
        all_know.wait()
    finally:
        server.shutdown()


def _report(hosts: Sequence[str], index: int) -> None:
    reminded = -math.inf
    while True:
        try:
            # What a client claims, no other one has: it is told if its index is in use.
            with Client(
                hosts[0],
                connect_timeout=_CONNECT_SECONDS,
                environments=range(index, index + 1),
                insecure=True,
            ) as client:
                while not client.arrive(np.int32(index), _digest(hosts)):
                    time.sleep(_POLL_SECONDS)
                with contextlib.suppress(UnavailableError, CancelledError):
                    client.confirm(np.int32(index))
                return
        # ProtocolError: TensorFlow's server is there still, of a run that is ending.
        except (UnavailableError, CancelledError, ProtocolError) as error:
            if time.monotonic() - reminded > _REMIND_SECONDS:
                reminded = time.monotonic()
                logging.info("the first host, %s, is not there yet: %s", hosts[0], error)
        except EnvironmentsInUseError as error:
            raise UserError(
                f"another process says that it is --host_index={index}; if that one was killed "
                "just now, start this one again in a minute"
            ) from error
        except RemoteFunctionError as error:
            raise UserError(str(error)) from error
        time.sleep(_POLL_SECONDS)


def _digest(hosts: Sequence[str]) -> np.int64:
    digest = hashlib.sha256(",".join(hosts).encode()).digest()
    return np.int64(int.from_bytes(digest[:7], "big"))
