"""Who a process is, and whom it believes: TLS certificates and the token that clients show.

Files are read and checked when a server or a client is made, so that a mistake is told before
anything connects. The token is never part of a message, a log or a `repr`.
"""

import dataclasses
import hmac
import logging
import os
import ssl
import stat
import time
from collections.abc import MutableMapping
from typing import Any

import grpc

from seed_rl.grpc_service import errors

TOKEN_VARIABLE = "SEED_RL_TOKEN"
MIN_TOKEN_LENGTH = 16

# Of a call's metadata; gRPC itself leaves this key out of what it traces.
TOKEN_KEY = "authorization"
_TOKEN_PREFIX = "Bearer "

_LOG_SECONDS = 10.0  # between two lines about clients without the token

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What a server or a client proves itself with. All of it is optional.

    Attributes:
      tls_certificate: path of this process's own certificate (PEM, with intermediate ones). A
        server that has one speaks TLS on every TCP address.
      tls_key: path of its private key, without a passphrase.
      tls_ca: path of the certificates of authorities (PEM). A client believes a server that one
        of them has signed; a client that has it speaks TLS on TCP. A server that has it turns away
        clients without a certificate that one of them has signed (mutual TLS).
      token: a server that has it wants it of every client, Unix sockets included.
    """

    tls_certificate: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    token: str = dataclasses.field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.token:
            _check_token(self.token)
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise errors.CredentialsError(
                "a certificate and its key go together: give both --tls_certificate and --tls_key, "
                "or neither"
            )


NO_CREDENTIALS = Credentials()


def read_token(path: str | None, environment: MutableMapping[str, str]) -> str:
    """The token from a file, or else from SEED_RL_TOKEN, which is taken out of `environment`.

    Out of it, so that processes started later do not inherit it. "" if there is neither.

    Raises:
      CredentialsError: the file cannot be read, or it holds no usable token.
    """
    from_environment = environment.pop(TOKEN_VARIABLE, "").strip()
    if not path:
        return _check_token(from_environment, TOKEN_VARIABLE) if from_environment else ""
    token = _read(path, "--token_file").decode("latin-1").strip()
    if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        _LOGGER.warning("%s holds a token, but others may read it: chmod 600 %s", path, path)
    return _check_token(token, path)


def for_server(credentials: Credentials) -> grpc.ServerCredentials | None:
    """TLS for a server's TCP addresses; None: it has no certificate.

    Raises:
      CredentialsError: a file is missing, is not what it should be, or does not fit another.
    """
    if not credentials.tls_certificate:
        if credentials.tls_ca:
            raise errors.CredentialsError(
                "a server that checks the certificates of clients (--tls_ca) needs one of its own: "
                "give it --tls_certificate and --tls_key"
            )
        return None
    pair = _key_and_certificate(credentials)
    authorities = _authorities(credentials.tls_ca) if credentials.tls_ca else None
    return grpc.ssl_server_credentials(
        [pair], root_certificates=authorities, require_client_auth=authorities is not None
    )


def for_client(credentials: Credentials) -> grpc.ChannelCredentials | None:
    """TLS for a client of a TCP address; None: it was given no authority to believe.

    Raises:
      CredentialsError: a file is missing, is not what it should be, or does not fit another.
    """
    if not credentials.tls_ca:
        if credentials.tls_certificate:
            raise errors.CredentialsError(
                "a client that shows a certificate (--tls_certificate) has to know whom to show it "
                "to: give it the authority of the server's certificate with --tls_ca"
            )
        return None
    authorities = _authorities(credentials.tls_ca)
    if not credentials.tls_certificate:
        return grpc.ssl_channel_credentials(authorities)
    return grpc.ssl_channel_credentials(authorities, *_key_and_certificate(credentials))


def token_metadata(credentials: Credentials) -> tuple[tuple[str, str], ...]:
    """What a client adds to the metadata of its calls."""
    if not credentials.token:
        return ()
    return ((TOKEN_KEY, _TOKEN_PREFIX + credentials.token),)


class RequireToken(grpc.aio.ServerInterceptor):
    """Turns away every call that does not show the token, before any of its messages is read."""

    def __init__(self, token: str):
        self._expected = (_TOKEN_PREFIX + token).encode()
        self._num_refused = 0
        self._next_log = 0.0  # of the monotonic clock

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        sent = dict(details.invocation_metadata or ()).get(TOKEN_KEY, "")
        if not isinstance(sent, bytes):
            sent = sent.encode("utf-8", "backslashreplace")
        # In a time that does not depend on how much of it is right.
        if hmac.compare_digest(sent, self._expected):
            return await continuation(details)
        # A stream's handler for whatever was called: gRPC would read the one message of a unary
        # call, as large as messages may be, before it enters the handler.
        return grpc.stream_stream_rpc_method_handler(
            self._refuse_wrong if sent else self._refuse_missing
        )

    async def _refuse_wrong(self, _: Any, context: Any) -> None:
        self._log("with a wrong token", context.peer())
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "the token is not the server's; give both the same, with --token_file or in "
            f"{TOKEN_VARIABLE}",
        )

    async def _refuse_missing(self, _: Any, context: Any) -> None:
        self._log("without a token", context.peer())
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"the server wants a token; give it with --token_file or in {TOKEN_VARIABLE}",
        )

    def _log(self, how: str, peer: str) -> None:
        """Not each of them: nobody may fill the disk by knocking."""
        self._num_refused += 1
        if time.monotonic() >= self._next_log:
            _LOGGER.warning("refused a client %s, from %s; %d so far", how, peer, self._num_refused)
            self._next_log = time.monotonic() + _LOG_SECONDS


def _check_token(token: str, where: str = "the token") -> str:
    printable = token.isascii() and token.isprintable() and " " not in token
    if len(token) < MIN_TOKEN_LENGTH or not printable:
        raise errors.CredentialsError(
            f"{where}: a token is one line of at least {MIN_TOKEN_LENGTH} letters, digits and "
            "signs without spaces; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return token


def _key_and_certificate(credentials: Credentials) -> tuple[bytes, bytes]:
    key = _read(credentials.tls_key, "--tls_key")
    certificate = _read(credentials.tls_certificate, "--tls_certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(
            credentials.tls_certificate, credentials.tls_key, password=lambda: ""
        )
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise errors.CredentialsError(
            f"{credentials.tls_certificate} and {credentials.tls_key} are not a certificate and "
            f"its private key, both PEM, the key without a passphrase ({reason})"
        ) from None
    return key, certificate


def _authorities(path: str) -> bytes:
    content = _read(path, "--tls_ca")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=path)
    except (ssl.SSLError, ValueError):
        raise errors.CredentialsError(f"--tls_ca={path} holds no certificate (PEM)") from None
    return content


def _read(path: str, flag: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise errors.CredentialsError(f"{flag}={path}: {error.strerror}") from None
