"""The server: binds functions and answers the calls of many clients."""

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import logging
import math
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from seed_rl.grpc_service import addresses as addresses_lib
from seed_rl.grpc_service import claims as claims_lib
from seed_rl.grpc_service import codec, errors, framing, protocol
from seed_rl.grpc_service import credentials as credentials_lib
from seed_rl.grpc_service import service_pb2 as pb
from seed_rl.grpc_service.batching import Batch, BatchQueue, Call, CallQueue, FunctionStatistics
from seed_rl.grpc_service.claims import Claims
from seed_rl.grpc_service.credentials import NO_CREDENTIALS, Credentials
from seed_rl.grpc_service.functions import BoundFunction, make_bound_function

_LOGGER = logging.getLogger(__name__)

_MAX_FRAMES = 1024  # remembered of one function

_LAST_TASKS_SECONDS = 1.0

_GOING_DOWN = "the server is shutting down"

_REFUSAL_CODES: dict[type[errors.RpcError], grpc.StatusCode] = {
    errors.EnvironmentsInUseError: grpc.StatusCode.ALREADY_EXISTS,
    errors.SignatureError: grpc.StatusCode.OUT_OF_RANGE,
    errors.ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
}

# A call whose answer is ready: the call, and the serialized answer.
_Answer = tuple[Call, bytes]


class Server:
    """Serves bound functions on Unix and TCP sockets.

        with Server("unix:/tmp/learner") as server:  # or bind, start(), …, shutdown()
            server.bind(inference)
            server.start()
            …

    One background thread runs the transport, however many clients there are; each bound callable
    has a worker thread of its own. Nothing here survives a fork: fork first, then make the server.

    Args:
      addresses: one or several of `unix:/path` (created with mode 0600, in a directory that is
        made with mode 0700 if it is missing) and `host:port` (port 0: any free one; see the
        attribute `addresses`).
      max_batch_wait: seconds that a call of a batched function waits for company.
      num_environments: of all servers together; told to clients.
      environments: those of them that clients may have here; None: all, and any if
        num_environments is 0.
      metadata: strings for clients to read.
      max_message_bytes: largest request and largest answer.
      max_calls_in_flight: per client; the server reads no further calls of a client before it has
        answered some of these.
      keepalive_seconds: a client that is gone without a word is noticed after twice as long.
      credentials: this server's certificate, and the token that clients must show.
      insecure: listen beyond this machine although the connection is not encrypted, or although
        whoever reaches it may call.

    Attributes:
      addresses: where the server listens, with the real ports once it has started.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        max_batch_wait: float = 0.005,
        num_environments: int = 0,
        environments: range | None = None,
        metadata: Mapping[str, str] | None = None,
        max_message_bytes: int = protocol.DEFAULT_MAX_MESSAGE_BYTES,
        max_calls_in_flight: int = 64,
        keepalive_seconds: float = protocol.DEFAULT_KEEPALIVE_SECONDS,
        credentials: Credentials = NO_CREDENTIALS,
        insecure: bool = False,
    ):
        given = [addresses] if isinstance(addresses, str) else list(addresses)
        if not given:
            raise errors.AddressError("a server needs at least one address")
        if max_batch_wait < 0 or max_message_bytes < 1 or max_calls_in_flight < 1:
            raise ValueError(
                "max_batch_wait must be at least 0, max_message_bytes and max_calls_in_flight at "
                f"least 1, got {max_batch_wait}, {max_message_bytes}, {max_calls_in_flight}"
            )
        self._parsed = [addresses_lib.parse(address) for address in given]
        self._token = credentials.token
        self._tls = credentials_lib.for_server(credentials)
        for address in self._parsed:
            if not insecure:
                addresses_lib.require_protection(
                    address, encrypted=self._tls is not None, authenticated=bool(self._token)
                )
        self.addresses = [address.target for address in self._parsed]
        self._max_batch_wait = max_batch_wait
        self._num_environments = num_environments
        self._environments = environments
        if environments is None and num_environments:
            self._environments = range(num_environments)
        self._metadata = dict(metadata or {})
        self._max_message_bytes = max_message_bytes
        self._max_calls_in_flight = max_calls_in_flight
        self._keepalive_seconds = keepalive_seconds
        self._functions: dict[str, BoundFunction] = {}
        self._services: list[_FunctionService] = []
        self._state_lock = threading.Lock()
        self._state = "new"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._transport: _Transport | None = None
        self._sockets: list[tuple[str, tuple[int, int]]] = []

    def bind(
        self,
        fn: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        name: str | None = None,
        input_signature: Any = None,
        output_signature: Any = None,
        max_batch_size: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        batched: bool | None = None,
        environments_argument: int | None = None,
    ) -> None:
        """Makes a function callable for clients.

        A function whose inputs and outputs all lead with the same dimension is batched across
        callers: a call brings one row or several, and the function sees at most as many as the
        dimension says (where it is None: `max_batch_size`, 64 by default). A tf.function always
        sees its static size, or where that is None, one of `batch_sizes` (powers of two by
        default): the rows that are missing repeat the last real one, and what comes out for them is
        dropped. A Python function with None sees exactly the rows that were sent. A batched
        function owns its input arrays. Any other function is unbatched: each call runs alone, on
        read-only arrays.

        A function is never entered twice at the same time. The functions of a list are used in turn
        by a thread each. Bind before `start`.

        Args:
          fn: a tf.function with an input_signature, or a Python function of numpy nests; or a list
            of such functions with the same signature.
          name: what clients call it; the function's own name by default.
          input_signature: for a Python function: a tuple with one nest of specs an argument. A spec
            is a `TensorSpec` or anything with a shape and a dtype.
          output_signature: for a Python function: the nest of specs of its result; None if it
            returns nothing.
          max_batch_size: rows of a full batch, where the leading dimension is None.
          batch_sizes: the sizes to pad to, where the leading dimension is None.
          batched: False keeps a function unbatched that looks batched; True insists.
          environments_argument: index of the argument that holds the numbers of the caller's
            environments, as integers. A call for environments that another client has claimed, or
            that do not exist, or for others than those that its own client has claimed, gets a
            SignatureError.

        Raises:
          SignatureError: a signature is missing, or does not fit the other arguments.
          ValueError: the name is taken or cannot be a method's, or a size is not positive.
        """
        if self._state != "new":
            raise RuntimeError("bind functions before the server starts")
        bound = make_bound_function(
            fn,
            name,
            input_signature,
            output_signature,
            max_batch_size,
            batch_sizes,
            batched,
            environments_argument,
        )
        if bound.name in self._functions:
            raise ValueError(f"{bound.name!r} is bound already; give the second one another name=")
        self._functions[bound.name] = bound

    def start(self) -> None:
        """Listens on every address; returns when clients can connect.

        Raises:
          AddressError: an address cannot be listened on; then none is.
        """
        with self._state_lock:
            if self._state != "new":
                raise RuntimeError("a server starts once; make another one")
            self._state = "started"
            self._loop = loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(
                target=_run_loop, args=(loop,), name="grpc_service", daemon=True
            )
            self._loop_thread.start()
            try:
                asyncio.run_coroutine_threadsafe(self._start(loop), loop).result()
            except BaseException:
                self._stop(grace=0.0)
                self._state = "stopped"
                raise
            for service in self._services:
                service.start()
            atexit.register(self.shutdown)

    def shutdown(self, grace: float = 1.0) -> None:
        """Cancels every waiting call at once, closes the sockets and removes their files.

        A call that is running is cancelled for its caller, too; the function itself gets `grace`
        seconds to return, then its thread is left behind. Further calls do nothing.
        """
        with self._state_lock:
            if self._state == "started":
                atexit.unregister(self.shutdown)
                self._stop(grace)
            self._state = "stopped"

    @property
    def num_claims(self) -> int:
        """Number of connected clients that have environments."""
        return self._transport.num_claims if self._transport is not None else 0

    @property
    def seconds_since_departure(self) -> float:
        """Since a client with environments left last; infinity: none has."""
        if self._transport is None:
            return math.inf
        return time.monotonic() - self._transport.last_departure

    def statistics(self) -> dict[str, FunctionStatistics]:
        """What each function did since this was last called."""
        return {service.function.name: service.queue.statistics() for service in self._services}

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    async def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        claims = Claims(self._environments)
        self._services = [
            _FunctionService(function, loop, self._max_batch_wait, self._max_message_bytes, claims)
            for function in self._functions.values()
        ]
        handshake = pb.HandshakeResponse(
            protocol_version=protocol.PROTOCOL_VERSION,
            functions=[function.to_proto() for function in self._functions.values()],
            num_environments=self._num_environments,
            metadata=self._metadata,
            server_id=uuid.uuid4().hex,
            max_message_bytes=self._max_message_bytes,
        )
        self._transport = _Transport(
            handshake,
            self._services,
            claims,
            self._max_calls_in_flight,
            self._keepalive_seconds,
            self._token,
        )
        for index, address in enumerate(self._parsed):
            self.addresses[index] = self._listen(self._transport.server, address)
        await self._transport.server.start()

    def _listen(self, server: grpc.aio.Server, address: addresses_lib.Address) -> str:
        if not address.path:
            ports = [
                _add_port(server, one, self._tls) for one in addresses_lib.to_listen_on(address)
            ]
            return dataclasses.replace(address, port=ports[0]).target
        with addresses_lib.private_socket(address.path):
            _add_port(server, address)
        found = os.stat(address.path)
        self._sockets.append((address.path, (found.st_dev, found.st_ino)))
        return address.target

    def _stop(self, grace: float) -> None:
        assert self._loop is not None and self._loop_thread is not None
        deadline = time.monotonic() + grace
        for service in self._services:
            service.queue.close()
        loop = self._loop
        if self._transport is not None:
            asyncio.run_coroutine_threadsafe(self._transport.stop(grace), loop).result()
        for service in self._services:
            service.join(deadline)
        loop.call_soon_threadsafe(loop.stop)
        if self._loop_thread is not threading.current_thread():
            self._loop_thread.join()
        for path, identity in self._sockets:
            _remove_socket(path, identity)


class _FunctionService:
    """The queue of one bound function and the threads that work it off."""

    def __init__(
        self,
        function: BoundFunction,
        loop: asyncio.AbstractEventLoop,
        max_batch_wait: float,
        max_message_bytes: int,
        claims: Claims,
    ):
        self.function = function
        self.queue: BatchQueue | CallQueue = (
            BatchQueue(function.inputs.specs, function.max_rows, max_batch_wait, loop.call_later)
            if function.batched
            else CallQueue()
        )
        self._loop = loop
        self._max_message_bytes = max_message_bytes
        self._claims = claims
        self._known_layouts = codec.LayoutCache()  # the event loop's
        self._frames: dict[tuple[tuple[int, ...], ...], framing.Frame] = {}  # the workers'
        self._threads = [
            threading.Thread(
                target=self._work, args=(fn,), name=f"{function.name} {index}", daemon=True
            )
            for index, fn in enumerate(function.callables)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, deadline: float) -> None:
        """Waits for the workers until `deadline` (of the monotonic clock)."""
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    _LOGGER.warning(
                        "%s is still running; its thread is left behind", self.function.name
                    )

    def add(self, stream: "_Stream", call: framing.Call) -> None:
        """Queues a call.

        Raises:
          SignatureError: its tensors do not fit the function's, or are not this client's to send.
          ProtocolError: its tensors are malformed.
        """
        layout, num_rows = self._known_layouts.get(call.layout, self._check_layout)
        if layout.num_bytes != call.size:
            raise errors.ProtocolError(
                f"{self.function.name}: tensors of this layout have {layout.num_bytes} bytes, got "
                f"{call.size}"
            )
        arrays = layout.decode(call.buffer, call.start)
        if self.function.environments_leaf is not None:
            try:
                self._claims.check(stream, arrays[self.function.environments_leaf])
            except errors.SignatureError as error:
                raise errors.SignatureError(f"{self.function.name}: {error}") from None
        self.queue.add(Call(stream, call.call_id, num_rows), arrays)

    def _check_layout(self, layout: codec.Layout) -> tuple[codec.Layout, int]:
        return layout, self.function.check_inputs(layout)

    def _work(self, fn: Callable[..., Any]) -> None:
        while (batch := self.queue.take()) is not None:
            start = time.monotonic()
            answers = self._run(fn, batch)
            self.queue.count_run(time.monotonic() - start)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_deliver, answers)

    def _run(self, fn: Callable[..., Any], batch: Batch) -> list[_Answer]:
        # BaseException: whatever ends this thread would leave its callers waiting for ever.
        try:
            outputs = self.function.run(fn, batch)
            return self._encode(batch, outputs)
        except BaseException as error:
            # An exception may say of itself that it is an answer to callers, and no failure.
            if not getattr(error, "is_answer", False):
                _LOGGER.exception("%s raised", self.function.name)
            if isinstance(error, errors.RpcError):  # of this function's own making
                error = errors.RemoteFunctionError(
                    f"{type(error).__name__}: {error}", type(error).__name__
                )
            return [(call, _error_response(call.call_id, error)) for call in batch.calls]

    def _encode(self, batch: Batch, outputs: Sequence[np.ndarray]) -> list[_Answer]:
        # Here and not on the loop: the function may use the same output arrays for its next batch.
        answers = []
        start = 0
        for call in batch.calls:
            end = start + call.num_rows
            rows = [array[start:end] for array in outputs] if self.function.batched else outputs
            start = end
            answers.append((call, self._encode_one(call, rows)))
        return answers

    def _encode_one(self, call: Call, arrays: Sequence[np.ndarray]) -> bytes:
        data = self._frame(arrays).pack(call.call_id, arrays)
        limit = min(self._max_message_bytes, call.stream.max_message_bytes)
        if len(data) > limit:
            error = errors.MessageTooLargeError(
                f"{self.function.name}: the answer has {len(data)} bytes, more than the "
                f"{limit} that fit in a message (max_message_bytes)"
            )
            return _error_response(call.call_id, error)
        return data

    def _frame(self, arrays: Sequence[np.ndarray]) -> framing.Frame:
        shapes = tuple([array.shape for array in arrays])
        frame = self._frames.get(shapes)
        if frame is None:
            dtypes = [spec.dtype for spec in self.function.outputs.specs]
            frame = framing.Frame(codec.Layout(dtypes, shapes))
            if len(self._frames) >= _MAX_FRAMES:
                self._frames.clear()
            self._frames[shapes] = frame
        return frame


class _Stream:
    """One client's Call stream. Everything here happens on the event loop."""

    def __init__(self, context: Any, max_calls_in_flight: int, max_message_bytes: int):
        self.max_message_bytes = max_message_bytes
        self._context = context
        self._max_calls_in_flight = max_calls_in_flight
        self._waiting: dict[int, Call | None] = {}
        self._answers: collections.deque[bytes] = collections.deque()
        self._num_in_flight = 0
        self._room = asyncio.Event()
        self.displaced = asyncio.Event()  # its client has opened another one
        self._has_answers = asyncio.Event()

    def open_call(self, call_id: int) -> None:
        """Notes that a call came; `answer` closes it."""
        if call_id in self._waiting:
            raise errors.ProtocolError(f"call id {call_id} is in use by a call that still waits")
        self._waiting[call_id] = None
        self._num_in_flight += 1

    def answer(self, call_id: int, response: bytes) -> None:
        """Queues the answer of a call, unless it was answered (cancelled) before."""
        if call_id in self._waiting:
            del self._waiting[call_id]
            self._answers.append(response)
            self._has_answers.set()

    def cancel_all(self) -> None:
        """Answers every waiting call with a CancelledError."""
        error = errors.CancelledError(f"the call was cancelled: {_GOING_DOWN}")
        for call_id in list(self._waiting):
            self.answer(call_id, _error_response(call_id, error))

    def forget_all(self) -> None:
        """The client is gone: whatever is still computed for it is dropped."""
        self._waiting.clear()
        self._answers.clear()

    async def wait_for_room(self) -> None:
        """Until the client may have another call in flight."""
        while self._num_in_flight >= self._max_calls_in_flight:
            self._room.clear()
            await self._room.wait()

    async def wait_for_all(self) -> None:
        """Until every call is answered and every answer is written."""
        while self._num_in_flight:
            self._room.clear()
            await self._room.wait()

    async def write_answers(self) -> None:
        """Writes answers as they come, for ever."""
        while True:
            await self._has_answers.wait()
            self._has_answers.clear()
            while self._answers:
                await self._context.write(self._answers.popleft())
                self._num_in_flight -= 1
                self._room.set()


class _Transport:
    """The gRPC server and its two methods. Lives on the event loop."""

    def __init__(
        self,
        handshake: pb.HandshakeResponse,
        services: Sequence[_FunctionService],
        claims: Claims,
        max_calls_in_flight: int,
        keepalive_seconds: float,
        token: str,
    ):
        self._handshake = handshake
        self._services = services
        self._max_calls_in_flight = max_calls_in_flight
        self._claims = claims
        self._stopping = asyncio.Event()
        self.server = grpc.aio.server(
            interceptors=[credentials_lib.RequireToken(token)] if token else [],
            options=[
                ("grpc.max_receive_message_length", handshake.max_message_bytes),
                ("grpc.max_send_message_length", -1),  # checked where the caller can be told
                ("grpc.so_reuseport", 0),  # else a second server could share a taken port
                *protocol.keepalive_options(keepalive_seconds),
            ],
        )
        handlers = {
            protocol.HANDSHAKE: grpc.unary_unary_rpc_method_handler(self._on_handshake),
            protocol.CALL: grpc.stream_stream_rpc_method_handler(self._on_stream),
        }
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(protocol.SERVICE, handlers),)
        )

    @property
    def num_claims(self) -> int:
        return len(self._claims)

    @property
    def last_departure(self) -> float:
        return self._claims.last_departure

    async def stop(self, grace: float) -> None:
        """Closes the listening sockets; each stream cancels what waits on it, and ends."""
        self._stopping.set()
        await self.server.stop(grace)

    async def _on_handshake(self, data: bytes, context: Any) -> bytes:
        if len(data) > protocol.MAX_HANDSHAKE_BYTES:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the handshake request has {len(data)} bytes, more than "
                f"{protocol.MAX_HANDSHAKE_BYTES}",
            )
        try:
            request = pb.HandshakeRequest.FromString(data)
        except DecodeError:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the handshake request cannot be parsed"
            )
        if request.protocol_version != protocol.PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the client speaks protocol version {request.protocol_version}, the server "
                f"{protocol.PROTOCOL_VERSION}; install the same seed_rl on both sides",
            )
        return self._handshake.SerializeToString()

    async def _on_stream(self, _: Any, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        expected_id = metadata.get(protocol.SERVER_ID_KEY, self._handshake.server_id)
        if expected_id != self._handshake.server_id:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the server restarted since the handshake"
            )
        limit = metadata.get(protocol.MAX_MESSAGE_BYTES_KEY, "")
        max_bytes = int(limit) if limit.isdecimal() else self._handshake.max_message_bytes
        stream = _Stream(context, self._max_calls_in_flight, max_bytes)
        try:
            await self._admit(stream, metadata, context)
            await self._serve(stream, context)
        finally:
            self._claims.release(stream)

    async def _admit(self, stream: _Stream, metadata: Mapping[str, Any], context: Any) -> None:
        """Gives the stream what it claims, and tells the client; or ends it."""
        try:
            claim = claims_lib.read_claim(metadata)
            if claim is not None:
                for displaced in self._claims.take(claim, stream, context.peer()):
                    displaced.displaced.set()
        except errors.RpcError as error:
            _LOGGER.info("refused %s: %s", claims_lib.peer_name(context.peer()), error)
            await context.abort(_REFUSAL_CODES[type(error)], str(error))
        await context.send_initial_metadata(((protocol.ACCEPTED_KEY, "1"),))

    async def _serve(self, stream: _Stream, context: Any) -> None:
        """Until the client has no more calls, or the stream is to end."""
        tasks = [
            asyncio.ensure_future(stream.write_answers()),
            asyncio.ensure_future(self._take_calls(stream, context)),
            asyncio.ensure_future(self._stopping.wait()),
            asyncio.ensure_future(stream.displaced.wait()),
        ]
        writing, taking, stopping, displaced = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                taking.cancel()
                stream.cancel_all()
                tasks.append(asyncio.ensure_future(stream.wait_for_all()))
                await asyncio.wait((writing, tasks[-1]), return_when=asyncio.FIRST_COMPLETED)
                await context.abort(grpc.StatusCode.UNAVAILABLE, _GOING_DOWN)
            if displaced.done():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the client has connected anew")
            if taking.done() and (error := taking.result()) is not None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            stream.forget_all()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_calls(self, stream: _Stream, context: Any) -> errors.ProtocolError | None:
        """Until the client has no more calls and all are answered, or the stream is useless.

        Returns what makes it so.
        """
        while (data := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined,unused-ignore]
            try:
                self._accept(stream, data)
            except errors.ProtocolError as error:
                return error
            await stream.wait_for_room()
        await stream.wait_for_all()
        return None

    def _accept(self, stream: _Stream, data: bytes) -> None:
        """Queues one call, or answers it with an error.

        Raises:
          ProtocolError: there is no call id to answer to.
        """
        request = framing.read_request(data)
        stream.open_call(request.call_id)
        if self._stopping.is_set():
            stream.cancel_all()
            return
        try:
            if request.function >= len(self._services):
                raise errors.UnknownFunctionError(
                    f"the server has no function number {request.function}; it has "
                    f"{len(self._services)}"
                )
            self._services[request.function].add(stream, request)
        except Exception as error:
            if not isinstance(error, errors.RpcError):
                _LOGGER.exception("a call could not be queued")
            stream.answer(request.call_id, _error_response(request.call_id, error))


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_end_tasks())
    finally:
        loop.close()


async def _end_tasks() -> None:
    """Waits for what gRPC still does; tasks that the loop leaves behind complain when they go."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not tasks:
        return
    _, pending = await asyncio.wait(tasks, timeout=_LAST_TASKS_SECONDS)
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=_LAST_TASKS_SECONDS)


def _deliver(answers: Sequence[_Answer]) -> None:
    for call, response in answers:
        call.stream.answer(call.call_id, response)


def _error_response(call_id: int, error: BaseException) -> bytes:
    response = pb.CallResponse(call_id=call_id, error=protocol.error_to_proto(error))
    return response.SerializeToString()


def _add_port(
    server: grpc.aio.Server,
    address: addresses_lib.Address,
    tls: grpc.ServerCredentials | None = None,
) -> int:
    try:
        if tls is None:
            port = server.add_insecure_port(address.target)
        else:
            port = server.add_secure_port(address.target, tls)
    except RuntimeError as error:
        raise errors.AddressError(f"{address}: cannot be listened on: {error}") from None
    if port == 0:
        raise errors.AddressError(f"{address}: cannot be listened on; is it in use?")
    return port


def _remove_socket(path: str, identity: tuple[int, int]) -> None:
    """Unless gRPC has removed it, or another server has put its own there."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISSOCK(found.st_mode) and (found.st_dev, found.st_ino) == identity:
            os.unlink(path)
