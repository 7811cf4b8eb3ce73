"""The client: calls the functions that a server has bound."""

import dataclasses
import itertools
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from seed_rl.grpc_service import addresses, codec, errors, framing, protocol
from seed_rl.grpc_service import credentials as credentials_lib
from seed_rl.grpc_service import service_pb2 as pb
from seed_rl.grpc_service.claims import Claim
from seed_rl.grpc_service.credentials import NO_CREDENTIALS, Credentials
from seed_rl.grpc_service.signature import Signature, fits, to_array
from seed_rl.grpc_service.specs import TensorSpec, describe

_MAX_FORMS = 1024  # remembered of one function
# Between two attempts to reach a server that is not there: twice as long each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds


@dataclasses.dataclass(frozen=True)
class FunctionInfo:
    """What a client knows of a bound function.

    Attributes:
      name: of the client's method.
      input_signature: a tuple, one nest of `TensorSpec`s an argument.
      output_signature: the nest of `TensorSpec`s of the result.
      batched: calls bring one row (without the leading dimension) or several.
      max_batch_size: rows that a call can bring at most; 0 if unbatched.
    """

    name: str
    input_signature: tuple[Any, ...]
    output_signature: Any
    batched: bool
    max_batch_size: int


class Client:
    """A connection to a server, whose bound functions are this object's methods.

        with Client("unix:/tmp/learner") as client:
            action = client.inference(env_id, env_output)

    A batched function takes one row, without the leading dimension, or [n, …] for several; the
    result has the same form. Results are numpy arrays over the received bytes, read-only. Safe to
    use from several threads, whose calls are then in flight together. Not across a fork: make the
    client in the process that uses it. A client whose server died stays dead; make another one.

    Args:
      address: `unix:/path` or `host:port`.
      connect_timeout: seconds to wait for the server to come up.
      call_timeout: seconds to wait for an answer; None: as long as the server lives.
        Costs some speed.
      max_message_bytes: largest request and largest answer; the server has a limit of its own.
      environments: numbers of the environments that this client alone is to have, in order and
        without gaps, as long as it is connected; None: none.
      client_id: what the client calls itself. One that connects anew under the same name takes its
        environments over from its earlier connection, which the server may not know to be dead.
      keepalive_seconds: a server that is gone without a word is noticed after twice as long.
      credentials: the authorities to believe, this client's certificate, and the token to show.
      insecure: connect beyond this machine although the connection is not encrypted, or although
        no token is shown.

    Attributes:
      address: as given.
      functions: `FunctionInfo` by name.
      num_environments: as the server says.
      metadata: as the server says.

    Raises:
      AddressError: the address is not one, or is not protected and needs `insecure`.
      SignatureError: the server has fewer environments.
      EnvironmentsInUseError: another client has some of the environments.
      AuthenticationError: the server refuses the token, or its certificate is not believed.
      UnavailableError: no server came up in time.
      ProtocolError: the server speaks another version or another protocol.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout: float = 60.0,
        call_timeout: float | None = None,
        max_message_bytes: int = protocol.DEFAULT_MAX_MESSAGE_BYTES,
        environments: range | None = None,
        client_id: str | None = None,
        keepalive_seconds: float = protocol.DEFAULT_KEEPALIVE_SECONDS,
        credentials: Credentials = NO_CREDENTIALS,
        insecure: bool = False,
    ):
        parsed = addresses.parse(address)
        tls = credentials_lib.for_client(credentials)
        if not insecure:
            addresses.require_protection(
                parsed, encrypted=tls is not None, authenticated=bool(credentials.token)
            )
        self.address = address
        token = credentials_lib.token_metadata(credentials)
        claim: tuple[tuple[str, str], ...] = ()
        if environments is not None:
            name = client_id or uuid.uuid4().hex
            claim = Claim(environments.start, len(environments), name).metadata()
        channel = _open_channel(
            parsed, max_message_bytes, keepalive_seconds, None if parsed.path else tls
        )
        try:
            handshake = _shake_hands(channel, parsed, connect_timeout, token)
            methods = [
                _Method(function, index) for index, function in enumerate(handshake.functions)
            ]
            self._methods = {method.info.name: method for method in methods}
            if len(self._methods) != len(methods):
                raise errors.ProtocolError("two functions of the server have the same name")
        except BaseException:
            channel.close()
            raise
        self.functions: Mapping[str, FunctionInfo] = MappingProxyType(
            {method.info.name: method.info for method in methods}
        )
        self.num_environments: int = handshake.num_environments
        self.metadata: Mapping[str, str] = MappingProxyType(dict(handshake.metadata))
        self._max_message_bytes = min(max_message_bytes, handshake.max_message_bytes)
        self._call_timeout = call_timeout
        self._pid = os.getpid()
        self._connection = _Connection(
            channel,
            (
                (protocol.SERVER_ID_KEY, handshake.server_id),
                (protocol.MAX_MESSAGE_BYTES_KEY, str(max_message_bytes)),
                *claim,
                *token,
            ),
            reader_thread=call_timeout is not None,
        )
        self._close = weakref.finalize(self, self._connection.close)
        try:
            self._connection.wait_until_accepted()
        except BaseException:
            self._close()
            raise

    def close(self) -> None:
        """Ends the connection; calls that wait in other threads get a CancelledError."""
        if os.getpid() == self._pid:
            self._close()

    def check(self, name: str, *args: Any) -> None:
        """Raises what a call of a function with these arguments would raise before it is sent.

        Raises:
          UnknownFunctionError: the server has no such function.
          SignatureError: the arguments do not fit; the message names the one.
        """
        if name not in self._methods:
            raise self._unknown(name)
        self._methods[name].encode(args)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        methods = self.__dict__.get("_methods")
        if methods is None:
            raise AttributeError(name)
        if name not in methods:
            if name.startswith("_"):
                raise AttributeError(name)
            raise self._unknown(name)
        method = methods[name]

        def call(*args: Any) -> Any:
            return self._call(method, args)

        call.__name__ = name
        call.__doc__ = f"{name}{method.inputs} -> {method.outputs}, on {self.address}."
        self.__dict__[name] = call  # found without __getattr__ from now on
        return call

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]

    def _unknown(self, name: str) -> errors.UnknownFunctionError:
        known = ", ".join(sorted(self._methods)) or "none at all"
        return errors.UnknownFunctionError(
            f"the server at {self.address} has no function {name!r}; it has: {known}"
        )

    def _call(self, method: "_Method", args: tuple[Any, ...]) -> Any:
        if os.getpid() != self._pid:
            raise errors.RpcError(
                "this client was made before a fork; make one in the process that uses it"
            )
        form, arrays = method.encode(args)
        call_id = self._connection.new_call_id()
        request = form.frame.pack(call_id, arrays)
        if len(request) > self._max_message_bytes:
            raise errors.MessageTooLargeError(
                f"{method.info.name}: the request has {len(request)} bytes, more than the "
                f"{self._max_message_bytes} that fit in a message (max_message_bytes)"
            )
        response = self._connection.call(call_id, request, self._call_timeout)
        if response.error is not None:
            raise protocol.error_from_proto(response.error)
        return method.decode(form, response)


class _Form(NamedTuple):
    """How the arguments of a call came."""

    frame: framing.Frame
    num_rows: int  # 1 if unbatched
    single: bool  # one row, without its leading dimension


class _Method:
    """Turns arguments into arrays, and arrays into results."""

    def __init__(self, function: pb.Function, index: int):
        self._index = index
        self.inputs = Signature(codec.decode_structure(function.inputs))
        self.outputs = Signature(codec.decode_structure(function.outputs))
        if not isinstance(self.inputs.structure, tuple):
            raise errors.ProtocolError(f"{function.name}: the arguments are not a tuple")
        specs = self.inputs.specs + self.outputs.specs
        if function.batched and not (self.inputs.specs and all(spec.shape for spec in specs)):
            raise errors.ProtocolError(f"{function.name}: batched, but has tensors without rows")
        self.info = FunctionInfo(
            name=function.name,
            input_signature=self.inputs.structure,
            output_signature=self.outputs.structure,
            batched=function.batched,
            max_batch_size=function.max_rows,
        )
        self._argument = f"{function.name}: argument "
        # By the shapes of the arguments, which make up all of the form once the dtypes are right.
        self._forms: dict[tuple[tuple[int, ...], ...], _Form] = {}
        self._known_layouts = codec.LayoutCache()

    def encode(self, args: tuple[Any, ...]) -> tuple["_Form", list[np.ndarray]]:
        """(the form of the call, the arrays to send).

        Raises:
          SignatureError: the arguments do not fit; the message names the one.
        """
        if len(args) != len(self.info.input_signature):
            raise errors.SignatureError(
                f"{self.info.name}: expected {len(self.info.input_signature)} arguments "
                f"{self.inputs}, got {len(args)}"
            )
        arrays = self.inputs.flatten(args, self._argument)
        for index, (array, spec) in enumerate(zip(arrays, self.inputs.specs, strict=True)):
            if type(array) is not np.ndarray or array.dtype != spec.dtype:
                where = self._argument + self.inputs.paths[index]
                arrays[index] = to_array(array, spec.dtype, where)
        shapes = tuple([array.shape for array in arrays])
        form = self._forms.get(shapes)
        if form is None:
            form = self._make_form(arrays)
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            self._forms[shapes] = form
        return form, arrays

    def decode(self, form: "_Form", response: framing.Call) -> Any:
        """The result, in the form in which the arguments came.

        Raises:
          ProtocolError: the answer is not what the signature says.
        """
        layout, num_rows = self._known_layouts.get(response.layout, self._check_layout)
        if num_rows != form.num_rows or layout.num_bytes != response.size:
            raise errors.ProtocolError(
                f"{self.info.name}: expected an answer of {form.num_rows} rows and "
                f"{layout.num_bytes} bytes, got {num_rows} and {response.size}"
            )
        arrays = layout.decode(response.buffer, response.start)
        if form.single:
            arrays = [array[0, ...] for array in arrays]
        return self.outputs.unflatten(arrays)

    def _check_layout(self, layout: codec.Layout) -> tuple[codec.Layout, int]:
        specs = self.outputs.specs
        if len(layout.shapes) != len(specs):
            raise errors.ProtocolError(
                f"{self.info.name}: expected {len(specs)} tensors in the answer, got "
                f"{len(layout.shapes)}"
            )
        num_rows = layout.shapes[0][0] if self.info.batched and layout.shapes[0] else 1
        for index, spec in enumerate(specs):
            expected = (num_rows, *spec.shape[1:]) if self.info.batched else spec.shape
            dtype, shape = layout.dtypes[index], layout.shapes[index]
            if dtype != spec.dtype or not fits(shape, expected):
                raise errors.ProtocolError(
                    f"{self.info.name}: result{self.outputs.paths[index]}: expected "
                    f"{describe(expected, spec.dtype)}, got {describe(shape, dtype)}"
                )
        return layout, num_rows

    def _make_form(self, arrays: list[np.ndarray]) -> "_Form":
        specs, paths = self.inputs.specs, self.inputs.paths
        shapes = [array.shape for array in arrays]
        num_rows, single = 1, False
        if self.info.batched:
            single = len(shapes[0]) < len(specs[0].shape)
            num_rows = 1 if single or not shapes[0] else shapes[0][0]
        for array, spec, path in zip(arrays, specs, paths, strict=True):
            if self.info.batched:
                row_shape = spec.shape[1:]
                if array.shape != (row_shape if single else (num_rows, *row_shape)):
                    expected = self._expected_rows(spec, arrays[0], specs[0])
                    raise self._shape_error(path, expected, array)
            elif not fits(array.shape, spec.shape):
                raise self._shape_error(path, str(spec), array)
        if self.info.batched and not 1 <= num_rows <= self.info.max_batch_size:
            raise errors.SignatureError(
                f"{self.info.name}: a call brings 1 to {self.info.max_batch_size} rows, got "
                f"{num_rows}"
            )
        if single:
            shapes = [(1, *shape) for shape in shapes]
        layout = codec.Layout([spec.dtype for spec in specs], shapes)
        return _Form(framing.Frame(layout, self._index), num_rows, single)

    def _expected_rows(self, spec: TensorSpec, first: np.ndarray, first_spec: TensorSpec) -> str:
        row_shape = spec.shape[1:]
        one = f"{describe(row_shape, spec.dtype)} for one row"
        if spec is not first_spec and first.shape == first_spec.shape[1:]:
            return f"{one}, as in the first argument"
        if spec is not first_spec and first.shape[1:] == first_spec.shape[1:]:
            return f"{describe((first.shape[0], *row_shape), spec.dtype)}, as in the first argument"
        return f"{one} or {describe(('n', *row_shape), spec.dtype)} for n rows"

    def _shape_error(self, path: str, expected: str, array: np.ndarray) -> errors.SignatureError:
        return errors.SignatureError(
            f"{self.info.name}: argument {path}: expected {expected}, got "
            f"{describe(array.shape, array.dtype)}"
        )


class _PendingCall:
    __slots__ = ("error", "response")

    def __init__(self) -> None:
        self.response: framing.Call | None = None
        self.error: errors.RpcError | None = None

    @property
    def done(self) -> bool:
        return self.response is not None or self.error is not None


class _Connection:
    """The stream, shared by the threads of a process.

    A thread that waits for its answer reads the stream itself, also for the others, unless another
    one does so already: a reader thread would cost another switch of threads a call. Only a time
    limit needs one, because a read cannot be interrupted.
    """

    def __init__(
        self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], reader_thread: bool
    ):
        self._channel = channel
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        open_stream = channel.stream_stream(protocol.CALL_METHOD, None, None)
        self._stream: Any = open_stream(iter(self._requests.get, None), metadata=metadata)
        self._call_ids = itertools.count(1)
        self._condition = threading.Condition()
        self._pending: dict[int, _PendingCall] = {}
        self._is_read = reader_thread
        self._reader_thread = reader_thread
        self._failure: errors.RpcError | None = None  # of every call from now on

    def wait_until_accepted(self) -> None:
        """Returns when the server has taken the stream; to be called once, before any call.

        A server that is gone without a word is noticed by keep-alive.

        Raises:
          RpcError: one of its subclasses: the server refuses the stream, or is gone.
        """
        if protocol.ACCEPTED_KEY not in dict(self._stream.initial_metadata() or ()):
            self._read_one()  # what comes instead is the reason
            with self._condition:
                raise self._failure or errors.ProtocolError("the server did not take the stream")
        if self._reader_thread:
            threading.Thread(target=self._read_all, name="grpc_service client", daemon=True).start()

    def new_call_id(self) -> int:
        return next(self._call_ids)

    def call(self, call_id: int, request: bytes, timeout: float | None) -> framing.Call:
        """Sends a request and waits for its answer.

        Raises:
          RpcError: one of its subclasses, when the server or this client is gone, or time is up.
        """
        pending = _PendingCall()
        with self._condition:
            if self._failure is not None:
                raise _copy(self._failure)
            self._pending[call_id] = pending
            # Before the request is on its way: then the threads of gRPC want the interpreter.
            reads = not self._is_read
            self._is_read = True
        self._requests.put(request)
        try:
            if reads:
                self._read_until(pending)
            else:
                self._wait(pending, timeout)
        finally:
            with self._condition:
                self._pending.pop(call_id, None)
        if pending.error is not None:
            raise _copy(pending.error)
        assert pending.response is not None
        return pending.response

    def close(self) -> None:
        self._fail(errors.CancelledError("the client was closed"))
        self._stream.cancel()
        self._requests.put(None)
        self._channel.close()

    def _wait(self, pending: _PendingCall, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while self._is_read and not pending.done:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise errors.CallTimeoutError(f"no answer within {timeout} s (call_timeout)")
                self._condition.wait(left)
            if pending.done:
                return
            self._is_read = True
        self._read_until(pending)

    def _read_until(self, pending: _PendingCall) -> None:
        """Reads answers, everybody's, until that of `pending` has come."""
        try:
            while not pending.done:
                self._read_one()
        finally:
            with self._condition:
                self._is_read = False
                self._condition.notify_all()

    def _read_all(self) -> None:
        while self._failure is None:
            self._read_one()

    def _read_one(self) -> None:
        """Reads an answer and gives it to its caller; a broken stream fails all calls."""
        try:
            response = framing.read_response(next(self._stream))
        except grpc.RpcError as error:
            self._fail(_stream_error(error))
        except StopIteration:
            self._fail(errors.UnavailableError("the server ended the connection"))
        except errors.ProtocolError as error:
            self._fail(error)
        else:
            with self._condition:
                pending = self._pending.get(response.call_id)
                if pending is not None:  # else its caller gave up
                    pending.response = response
                    if len(self._pending) > 1 or self._is_read:
                        self._condition.notify_all()

    def _fail(self, error: errors.RpcError) -> None:
        with self._condition:
            if self._failure is None:
                self._failure = error
                if isinstance(error, errors.CancelledError):  # for calls after close()
                    self._failure = errors.UnavailableError(str(error))
            for pending in self._pending.values():
                if not pending.done:
                    pending.error = error
            self._condition.notify_all()


def _open_channel(
    address: addresses.Address,
    max_message_bytes: int,
    keepalive_seconds: float,
    tls: grpc.ChannelCredentials | None,
) -> grpc.Channel:
    options = [
        *protocol.keepalive_options(keepalive_seconds),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),  # checked where only one caller is harmed
        # A server that comes up is to be noticed soon.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        # Clients of one process must not share a connection, nor its failures.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls is None:
        return grpc.insecure_channel(address.target, options)
    return grpc.secure_channel(address.target, tls, options)


def _shake_hands(
    channel: grpc.Channel,
    address: addresses.Address,
    timeout: float,
    metadata: tuple[tuple[str, str], ...],
) -> pb.HandshakeResponse:
    request = pb.HandshakeRequest(protocol_version=protocol.PROTOCOL_VERSION).SerializeToString()
    data = _ask_until_answered(channel, address, timeout, metadata, request)
    if len(data) > protocol.MAX_HANDSHAKE_BYTES:
        raise errors.ProtocolError(
            f"the server at {address} does not speak this protocol: its handshake has {len(data)} "
            f"bytes, more than {protocol.MAX_HANDSHAKE_BYTES}"
        )
    try:
        response = pb.HandshakeResponse.FromString(data)
    except DecodeError:
        raise errors.ProtocolError(
            f"the server at {address} does not speak this protocol: its handshake cannot be parsed"
        ) from None
    if response.protocol_version != protocol.PROTOCOL_VERSION:
        raise errors.ProtocolError(
            f"the server at {address} speaks protocol version {response.protocol_version}, this "
            f"client {protocol.PROTOCOL_VERSION}; install the same seed_rl on both sides"
        )
    return response


def _ask_until_answered(
    channel: grpc.Channel,
    address: addresses.Address,
    timeout: float,
    metadata: tuple[tuple[str, str], ...],
    request: bytes,
) -> bytes:
    """Asks for the handshake until a server is there.

    gRPC could wait by itself (wait_for_ready), but then would not say what it waits for: whether
    nobody listens, or somebody does whose certificate is not believed.
    """
    call = channel.unary_unary(protocol.HANDSHAKE_METHOD, None, None)
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    reason = "it does not answer"
    while (left := deadline - time.monotonic()) > 0:
        if address.path:
            addresses.require_own_socket(address)
        try:
            return call(request, timeout=left, metadata=metadata)
        except grpc.RpcError as rpc_error:
            error: Any = rpc_error
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                reason = _connection_reason(error.details(), address)
            elif error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _handshake_error(error, address) from None
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise errors.UnavailableError(
        f"no server answered at {address} within {timeout} s (connect_timeout): {reason}"
    )


# How gRPC's words begin where it cannot believe the server, and what they mean.
_DISBELIEFS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by an authority of --tls_ca, or "
    "not valid now",
    "Hostname Verification Check failed": "its certificate is for another name or IP address",
    "WRONG_VERSION_NUMBER": "it does not speak TLS; start it with --tls_certificate and --tls_key, "
    "or this side without --tls_ca",
}


def _connection_reason(details: str, address: addresses.Address) -> str:
    """What to tell of a connection that failed.

    Raises:
      AuthenticationError: asking again would be of no use.
    """
    for words, meaning in _DISBELIEFS.items():
        if words in details:
            raise errors.AuthenticationError(
                f"the server at {address} cannot be believed: {meaning} ({details})"
            )
    if address.host and details.endswith("Socket closed"):
        details += (
            " (whoever listens there may want TLS, --tls_ca, or a certificate of this side, "
            "--tls_certificate)"
        )
    return details


def _handshake_error(error: Any, address: addresses.Address) -> errors.RpcError:
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolError(f"the gRPC server at {address} is not a seed_rl server")
    return _stream_error(error, f"{address}: ")


def _stream_error(error: Any, prefix: str = "") -> errors.RpcError:
    code, details = error.code(), error.details()
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
        return errors.ProtocolError(f"{prefix}{details}")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.MessageTooLargeError(f"{prefix}{details} (max_message_bytes)")
    if code == grpc.StatusCode.ALREADY_EXISTS:
        return errors.EnvironmentsInUseError(f"{prefix}{details}")
    if code == grpc.StatusCode.OUT_OF_RANGE:
        return errors.SignatureError(f"{prefix}{details}")
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return errors.AuthenticationError(f"{prefix}{details}")
    if code == grpc.StatusCode.CANCELLED:
        details = "the connection was cancelled"
    return errors.UnavailableError(f"{prefix}the server is gone: {details}")


def _copy(error: errors.RpcError) -> errors.RpcError:
    """Each caller raises an exception, with a traceback, of its own."""
    return type(error)(str(error))
