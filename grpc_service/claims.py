"""Which client has which environments, so that no two step the same ones.

A client claims a range of environments when it opens its stream, and has it as long as the stream
lives. gRPC's keep-alive ends the stream of a client that is gone without a word.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from seed_rl.grpc_service import errors

# Of a Call stream's metadata.
ENVIRONMENTS_KEY = "seed-rl-environments"  # "first:count"
CLIENT_ID_KEY = "seed-rl-client-id"

_MAX_DIGITS = 9
_MAX_ID_LENGTH = 128


@dataclasses.dataclass(frozen=True)
class Claim:
    """Environments `first` to `first + count - 1`, for the client that calls itself `client_id`."""

    first: int
    count: int
    client_id: str = dataclasses.field(repr=False)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For the stream's metadata."""
        environments = f"{self.first}:{self.count}"
        return ((ENVIRONMENTS_KEY, environments), (CLIENT_ID_KEY, self.client_id))

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def __str__(self) -> str:
        return f"environments {self.first} to {self.last}"


def read_claim(metadata: Mapping[str, Any]) -> Claim | None:
    """What a stream's metadata claim; None: nothing.

    Raises:
      ProtocolError: they are not what `Claim.metadata` writes.
    """
    environments = metadata.get(ENVIRONMENTS_KEY)
    if environments is None:
        return None
    numbers = str(environments).split(":")
    client_id = metadata.get(CLIENT_ID_KEY, "")
    good = len(numbers) == 2 and all(
        n.isascii() and n.isdigit() and len(n) <= _MAX_DIGITS for n in numbers
    )
    named = isinstance(client_id, str) and 0 < len(client_id) <= _MAX_ID_LENGTH
    if not good or not named or int(numbers[1]) < 1:
        raise errors.ProtocolError("a claim to environments cannot be read")
    return Claim(int(numbers[0]), int(numbers[1]), client_id)


@dataclasses.dataclass(frozen=True)
class _Held:
    claim: Claim
    peer: str
    since: float  # of the monotonic clock


class Claims:
    """The claims of live streams. Everything here happens on the event loop.

    Args:
      environments: claims beyond them are refused; None: there is no limit.
    """

    def __init__(self, environments: range | None):
        self._environments = environments
        self._held: dict[Any, _Held] = {}
        self.last_departure = -math.inf  # when a client with environments left, monotonic clock

    def __len__(self) -> int:
        return len(self._held)

    def take(self, claim: Claim, stream: Any, peer: str) -> list[Any]:
        """Gives the environments to a stream.

        A client that comes back takes over from its own earlier streams, of which the server may
        not know yet that they are dead. These are returned, and are to be ended.

        Raises:
          SignatureError: there are not so many environments.
          EnvironmentsInUseError: a live stream of another client has some of them.
        """
        has = self._environments
        if has is not None and not (claim.first in has and claim.last in has):
            raise errors.SignatureError(
                f"{claim} were asked for, but the server has {len(has)}, {has[0]} to {has[-1]}"
            )
        displaced = []
        for other, held in self._held.items():
            if claim.first > held.claim.last or held.claim.first > claim.last:
                continue
            if held.claim.client_id != claim.client_id:
                seconds = time.monotonic() - held.since
                raise errors.EnvironmentsInUseError(
                    f"{claim} were asked for, but {held.claim} are in use by another client, which "
                    f"has been connected from {peer_name(held.peer)} for {seconds:.0f} seconds"
                )
            displaced.append(other)
        for other in displaced:
            del self._held[other]
        self._held[stream] = _Held(claim, peer, time.monotonic())
        return displaced

    def check(self, stream: Any, environments: np.ndarray) -> None:
        """Whether a stream may speak for these environments; integers of any shape.

        A stream that has claimed some speaks for those, another one for those that nobody has.

        Raises:
          SignatureError: it may not.
        """
        if not environments.size:
            return
        first, last = int(environments.min()), int(environments.max())
        own = self._held.get(stream)
        if own is not None:
            if first < own.claim.first or last > own.claim.last:
                wrong = first if first < own.claim.first else last
                raise errors.SignatureError(
                    f"this client has {own.claim}, and not {wrong}, which it sent"
                )
            return
        has = self._environments
        for number in (first, last):
            if number < 0 or (has is not None and number not in has):
                known = "any, from 0 on" if has is None else f"{len(has)}, from {has[0]} on"
                raise errors.SignatureError(
                    f"there is no environment {number}; the server has {known}"
                )
        for held in self._held.values():
            taken = (environments >= held.claim.first) & (environments <= held.claim.last)
            if taken.any():
                raise errors.SignatureError(
                    f"{held.claim} belong to another client; claim the environments that are "
                    "stepped when connecting"
                )

    def release(self, stream: Any) -> None:
        """Frees what a stream still has."""
        if self._held.pop(stream, None) is not None:
            self.last_departure = time.monotonic()


def peer_name(peer: str) -> str:
    """gRPC's name of the other side, for people."""
    scheme, _, rest = peer.partition(":")
    return rest if scheme in ("ipv4", "ipv6") and rest else "this machine"
