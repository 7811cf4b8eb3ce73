"""What client and server agree on besides the messages of service.proto."""

from typing import Any

from seed_rl.grpc_service import errors
from seed_rl.grpc_service import service_pb2 as pb

PROTOCOL_VERSION = 2

SERVICE = "seed_rl.grpc_service.Service"
HANDSHAKE = "Handshake"
CALL = "Call"
HANDSHAKE_METHOD = f"/{SERVICE}/{HANDSHAKE}"
CALL_METHOD = f"/{SERVICE}/{CALL}"

# Metadata of a Call stream: the server the handshake was made with, and the largest answer the
# client can take.
SERVER_ID_KEY = "seed-rl-server-id"
MAX_MESSAGE_BYTES_KEY = "seed-rl-max-message-bytes"
# Initial metadata with which the server says that it has taken the stream.
ACCEPTED_KEY = "seed-rl-accepted"

# Seconds of silence after which a side asks whether the other one lives, and seconds that it waits
# for the answer: a connection that is dead without a word is noticed after twice as long.
DEFAULT_KEEPALIVE_SECONDS = 10.0

MAX_HANDSHAKE_BYTES = 4 * 1024 * 1024  # either way; read before anything is known of each other
DEFAULT_MAX_MESSAGE_BYTES = 128 * 1024 * 1024

_ERROR_OF_KIND: dict[int, type[errors.RpcError]] = {
    pb.Error.UNKNOWN_FUNCTION: errors.UnknownFunctionError,
    pb.Error.SIGNATURE: errors.SignatureError,
    pb.Error.PROTOCOL: errors.ProtocolError,
    pb.Error.CANCELLED: errors.CancelledError,
    pb.Error.MESSAGE_TOO_LARGE: errors.MessageTooLargeError,
}
_KIND_OF_ERROR: dict[type[BaseException], Any] = {
    error: kind for kind, error in _ERROR_OF_KIND.items()
}


def keepalive_options(seconds: float) -> list[tuple[str, int]]:
    """gRPC's options of a channel or a server; see DEFAULT_KEEPALIVE_SECONDS."""
    milliseconds = max(1, round(1000 * seconds))
    return [
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", milliseconds),
        # What counts in newer releases of gRPC, and which is a minute by itself.
        ("grpc.http2.ping_timeout_ms", milliseconds),
        ("grpc.keepalive_permit_without_calls", 1),
        # An actor may step for minutes between two calls: silence is no reason to ask less often,
        # nor is being asked often a reason to hang up.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def error_to_proto(error: BaseException) -> pb.Error:
    """An error of this package keeps its class; any other becomes a RemoteFunctionError."""
    kind = _KIND_OF_ERROR.get(type(error))
    if kind is not None:
        return pb.Error(kind=kind, message=_text(error))
    if isinstance(error, errors.RemoteFunctionError):
        name, message = error.exception_type, _text(error)
    else:
        name, message = type(error).__name__, f"{type(error).__name__}: {_text(error)}"
    return pb.Error(kind=pb.Error.REMOTE_FUNCTION, message=message, exception_type=name)


def error_from_proto(error: pb.Error) -> errors.RpcError:
    """The exception that a caller is to see."""
    if error.kind == pb.Error.REMOTE_FUNCTION:
        return errors.RemoteFunctionError(error.message, error.exception_type)
    cls = _ERROR_OF_KIND.get(error.kind)
    if cls is None:
        return errors.ProtocolError(f"error of unknown kind {error.kind}: {error.message}")
    return cls(error.message)


def _text(error: BaseException) -> str:
    # A lone surrogate cannot be encoded, and a message of megabytes helps nobody.
    text = str(error).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 10_000 else text[:10_000] + " […]"
