"""Waiting until all hosts of a run are there, before TensorFlow connects them.

TensorFlow by itself hears no signal while it waits for hosts, and gives up within seconds where
the first one is not there yet.
"""

import contextlib
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
_CONNECT_SECONDS = 5.0


def wait_for_all(hosts: Sequence[str], index: int) -> None:
    """Returns, on all hosts at about the same time, when all are there.

    The first one listens at its address meanwhile; the others ask there.

    Args:
      hosts: 'host:port' of each.
      index: which of them this process is.

    Raises:
      UserError: the hosts do not agree on how many they are, or two say that they are the same one.
      AddressError: the first one's address is taken.
    """
    if index == 0:
        _receive(hosts)
    else:
        _report(hosts, index)


def _receive(hosts: Sequence[str]) -> None:
    size = len(hosts)
    arrived, confirmed = {0}, {0}
    all_know = threading.Event()

    def arrive(host: np.ndarray, given_size: np.ndarray) -> np.bool_:
        if given_size != size:
            raise ValueError(f"--hosts names {size} hosts on the first one, and {given_size} here")
        if int(host) not in arrived:
            arrived.add(int(host))
            logging.info("host %d is there, %d of %d", host, len(arrived), size)
        return np.bool_(len(arrived) == size)

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
        input_signature=(number, number),
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
    known_missing = False
    while True:
        try:
            # What a client claims, no other one has: it is told if its index is in use.
            with Client(
                hosts[0],
                connect_timeout=_CONNECT_SECONDS,
                environments=range(index, index + 1),
                insecure=True,
            ) as client:
                while not client.arrive(np.int32(index), np.int32(len(hosts))):
                    time.sleep(_POLL_SECONDS)
                with contextlib.suppress(UnavailableError, CancelledError):
                    client.confirm(np.int32(index))
                return
        # ProtocolError: TensorFlow's server is there still, of a run that is ending.
        except (UnavailableError, CancelledError, ProtocolError) as error:
            if not known_missing:
                logging.info("the first host is not there yet: %s", error)
            known_missing = True
        except EnvironmentsInUseError as error:
            raise UserError(
                f"another process says that it is --host_index={index}; if that one was killed "
                "just now, start this one again in a minute"
            ) from error
        except RemoteFunctionError as error:
            raise UserError(str(error)) from error
        time.sleep(_POLL_SECONDS)
