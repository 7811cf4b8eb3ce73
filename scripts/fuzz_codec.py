#!/usr/bin/env python3
"""Feeds damaged and made-up messages to the decoder, and to a live server and its clients.

    scripts/fuzz_codec.py                       # 100,000 messages each; a few minutes
    scripts/fuzz_codec.py --count=5000 --seed=7
    scripts/fuzz_codec.py --atheris --seconds=60   # guided by coverage; pip install atheris

Nothing but a ProtocolError or a SignatureError may come of a message: no other exception, nothing
that takes longer than --max_seconds, and no more memory than --max_megabytes above what the process
had before. Prints what it did and exits with 1 where that does not hold; what did harm is shown.
"""

import argparse
import collections
import itertools
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np

from seed_rl.grpc_service import Client, RpcError, Server, TensorSpec, codec, framing, protocol
from seed_rl.grpc_service import client as client_lib
from seed_rl.grpc_service import service_pb2 as pb
from seed_rl.grpc_service.functions import BoundFunction, make_bound_function

_STREAM_MESSAGES = 32  # of one stream, at most: the first message without a call id ends it
_HEALTH_CHECK_EVERY = 100  # streams

Step = collections.namedtuple("Step", "reward observation")


class HarmError(Exception):
    """A message did what none may do."""


# ---- Messages ------------------------------------------------------------------------------------


# Arguments of the two functions below, as they travel.
_TENSORS: tuple[list[Any], ...] = (
    [np.arange(3, dtype=np.int32), np.ones(3, bool), np.ones((3, 3, 2), np.uint8)],
    [np.ones((2, 5), np.float32), np.ones((), np.float64)],
)


def make_functions() -> list[BoundFunction]:
    """What the server binds: one batched and one unbatched function, each echoing."""
    rows = (
        TensorSpec((None,), np.int32, "env_ids"),
        Step(TensorSpec((None,), bool), {"image": TensorSpec((None, 3, 2), np.uint8)}),
    )
    open_ended = ({"x": TensorSpec((None, None), np.float32), "y": [TensorSpec((), np.float64)]},)
    return [
        make_bound_function(
            lambda env_ids, step: (env_ids, step),
            "rows",
            input_signature=rows,
            output_signature=rows,
            max_batch_size=8,
        ),
        make_bound_function(
            lambda x: x, "single", input_signature=open_ended, output_signature=open_ended[0]
        ),
    ]


def make_requests() -> list[bytes]:
    """Calls as a client sends them."""
    requests = []
    for index, arrays in enumerate(_TENSORS):
        layout = codec.Layout([a.dtype for a in arrays], [a.shape for a in arrays])
        requests.append(framing.Frame(layout, index).pack(7, arrays))
        data = b"".join(bytes(buffer) for buffer in layout.encode(arrays))
        fields: dict[str, Any] = {"call_id": 7, "function": index, "data": data}
        requests.append(pb.CallRequest(layout=layout.serialized, **fields).SerializeToString())
    return requests


def make_corpus() -> list[bytes]:
    """Messages as they are really sent, of every kind."""
    functions = make_functions()
    corpus = make_requests()
    for arrays in _TENSORS:
        layout = codec.Layout([a.dtype for a in arrays], [a.shape for a in arrays])
        corpus += [layout.serialized, framing.Frame(layout).pack(7, arrays)]
    error = pb.Error(kind=pb.Error.REMOTE_FUNCTION, message="no", exception_type="ValueError")
    corpus.append(pb.CallResponse(call_id=7, error=error).SerializeToString())
    corpus.append(pb.HandshakeRequest(protocol_version=2).SerializeToString())
    corpus.append(
        pb.HandshakeResponse(
            protocol_version=protocol.PROTOCOL_VERSION,
            functions=[function.to_proto() for function in functions],
            num_environments=8,
            server_id="0" * 32,
            max_message_bytes=1 << 20,
        ).SerializeToString()
    )
    return corpus


def _overwrite(rng: random.Random, message: bytearray, corpus: Sequence[bytes]) -> None:
    message[rng.randrange(len(message))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _flip(rng: random.Random, message: bytearray, corpus: Sequence[bytes]) -> None:
    message[rng.randrange(len(message))] ^= 1 << rng.randrange(8)


def _insert(rng: random.Random, message: bytearray, corpus: Sequence[bytes]) -> None:
    at = rng.randrange(len(message) + 1)
    message[at:at] = rng.randbytes(rng.randrange(1, 9))


def _insert_size(rng: random.Random, message: bytearray, corpus: Sequence[bytes]) -> None:
    """A number as protobuf writes them, of the kind that overflows."""
    at = rng.randrange(len(message) + 1)
    power = 1 << rng.choice((7, 14, 31, 32, 40, 48, 63, 64))
    size = framing._varint(max(0, power + rng.randrange(-1, 2)))
    message[at : at + rng.randrange(2)] = size


def _delete(rng: random.Random, message: bytearray, corpus: Sequence[bytes]) -> None:
    at = rng.randrange(len(message))
    del message[at : at + rng.randrange(1, 9)]


def _repeat(rng: random.Random, message: bytearray, corpus: Sequence[bytes]) -> None:
    at = rng.randrange(len(message))
    part = message[at : at + rng.randrange(1, 33)]
    message[at:at] = part * rng.choice((1, 1, 1, 2, 50, 1000))


def _truncate(rng: random.Random, message: bytearray, corpus: Sequence[bytes]) -> None:
    del message[rng.randrange(len(message)) :]


def _splice(rng: random.Random, message: bytearray, corpus: Sequence[bytes]) -> None:
    other = rng.choice(corpus)
    message[rng.randrange(len(message)) :] = other[rng.randrange(len(other)) :]


_MUTATIONS = (_overwrite, _flip, _insert, _insert_size, _delete, _repeat, _truncate, _splice)


def make_messages(seed: int, corpus: Sequence[bytes]) -> Iterator[bytes]:
    """Messages of a corpus, damaged up to several times, and some random bytes, without end."""
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.05:
            yield rng.randbytes(rng.randrange(200))
            continue
        message = bytearray(rng.choice(corpus))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
            if message:
                rng.choice(_MUTATIONS)(rng, message, corpus)
        yield bytes(message)


def make_calls(seed: int) -> Iterator[bytes]:
    """Requests for a server: damaged as a whole, or whole with damaged fields, without end."""
    rng = random.Random(seed)
    requests = make_requests()
    damaged = make_messages(seed, requests)
    while True:
        if rng.random() < 0.1:
            yield next(damaged)
            continue
        request = pb.CallRequest.FromString(rng.choice(requests))
        for field in ("layout", "data"):
            value = bytearray(getattr(request, field))
            for _ in range(rng.choice((0, 0, 1, 2))):
                if value:
                    rng.choice(_MUTATIONS)(rng, value, requests)
            setattr(request, field, bytes(value))
        request.function = rng.choice((0, 0, 0, 1, 1, 1, 2, 2**32 - 1))
        request.padding = bytes(rng.randrange(16))
        # Mostly one that no other call of the stream has, which would end it.
        request.call_id = rng.choice((rng.getrandbits(64),) * 50 + (7,))
        yield request.SerializeToString()


# ---- The decoder ---------------------------------------------------------------------------------


class Decoder:
    """Everything that either side does with bytes it is sent, without a network."""

    def __init__(self) -> None:
        self._functions = make_functions()
        self._methods = [
            client_lib._Method(function.to_proto(), index)
            for index, function in enumerate(self._functions)
        ]
        arguments = [
            (np.zeros(3, np.int32), Step(np.zeros(3, bool), {"image": np.zeros((3, 3, 2), "u1")})),
            ({"x": np.zeros((2, 5), np.float32), "y": [np.float64(0)]},),
        ]
        self._forms = [m.encode(args)[0] for m, args in zip(self._methods, arguments, strict=True)]

    def __call__(self, message: bytes) -> int:
        """Decodes a message as each of those it could be; returns how many it was taken for."""
        parts = (self._request, self._response, self._layout, self._handshake)
        return sum(_survives(part, message) for part in parts)

    def _request(self, message: bytes) -> None:
        call = framing.read_request(message)
        if call.function < len(self._functions):
            layout = codec.Layout.parse(call.layout)
            self._functions[call.function].check_inputs(layout)
            self._views(layout, call)

    def _response(self, message: bytes) -> None:
        response = framing.read_response(message)
        if response.error is not None:
            str(protocol.error_from_proto(response.error))
            return
        for method, form in zip(self._methods, self._forms, strict=True):
            _survives(lambda m=method, f=form: m.decode(f, response))

    def _layout(self, message: bytes) -> None:
        codec.Layout.parse(message)

    def _handshake(self, message: bytes) -> None:
        pb_message = pb.HandshakeResponse()
        try:
            pb_message.ParseFromString(message)
        except client_lib.DecodeError:
            raise client_lib.errors.ProtocolError("no handshake") from None
        for index, function in enumerate(pb_message.functions):
            client_lib._Method(function, index)

    def _views(self, layout: codec.Layout, call: framing.Call) -> None:
        if layout.num_bytes != call.size:
            return
        for array in layout.decode(call.buffer, call.start):
            if array.nbytes > len(call.buffer):
                raise HarmError(f"an array of {array.nbytes} bytes from {len(call.buffer)}")
            array.tobytes()  # every byte of it can be read


def _survives(part: Callable[..., None], *args: Any) -> bool:
    """Whether a message was taken; any other exception than that it was refused is passed on."""
    try:
        part(*args)
    except RpcError:
        return False
    return True


def fuzz_decoder(count: int, seed: int, max_seconds: float) -> str:
    """Decodes `count` messages.

    Raises:
      HarmError: a message raised, or took too long; says which.
    """
    decode = Decoder()
    taken, slowest = 0, 0.0
    for message in itertools.islice(make_messages(seed, make_corpus()), count):
        start = time.thread_time()  # other threads of a test's process may be busy
        try:
            taken += decode(message) > 0
        except Exception as error:
            raise HarmError(f"{type(error).__name__}: {error}, by {message!r:.2000}") from error
        seconds = time.thread_time() - start
        slowest = max(slowest, seconds)
        if seconds > max_seconds:
            raise HarmError(f"{seconds:.1f} s for {message!r:.2000}")
    return f"decoder: {count} messages, {taken} of them taken; the slowest took {slowest:.3f} s"


# ---- A live server -------------------------------------------------------------------------------


def fuzz_server(count: int, seed: int, timeout: float) -> str:
    """Sends `count` messages to a server over its socket, while others call it.

    Raises:
      HarmError: a stream hangs, or a well-behaved client gets no right answer.
    """
    messages, shakes = make_calls(seed), make_messages(seed, make_corpus())
    sent = streams = ended = 0
    with tempfile.TemporaryDirectory(prefix="fuzz") as directory:
        server = Server(f"unix:{os.path.join(directory, 's')}", max_batch_wait=0.0)
        for function in make_functions():
            server._functions[function.name] = function
        with server:
            server.start()
            healthy = Client(server.addresses[0])
            channel = grpc.insecure_channel(server.addresses[0])
            open_stream: Any = channel.stream_stream(protocol.CALL_METHOD, None, None)
            shake: Any = channel.unary_unary(protocol.HANDSHAKE_METHOD, None, None)
            while sent < count:
                batch = _make_batch(messages)
                ended += _send(open_stream, batch, timeout)
                sent += len(batch)
                streams += 1
                _shake(shake, next(shakes), timeout)
                if streams % _HEALTH_CHECK_EVERY == 0:
                    _check_health(healthy)
            _check_health(healthy)
            healthy.close()
            channel.close()
    return (
        f"server: {sent} messages on {streams} streams, {ended} of which it ended; "
        "others were served meanwhile"
    )


def _make_batch(messages: Iterator[bytes]) -> list[bytes]:
    """Messages for one stream: up to one that cannot be parsed, since that will end it."""
    batch = []
    for message in itertools.islice(messages, _STREAM_MESSAGES):
        batch.append(message)
        if not _survives(framing.read_request, message):
            break
    return batch


def _send(open_stream: Any, batch: Sequence[bytes], timeout: float) -> bool:
    """Sends messages and reads the answers; returns whether the server ended the stream."""
    try:
        for answer in open_stream(iter(batch), timeout=timeout):
            framing.read_response(answer)
    except grpc.RpcError as rpc_error:
        error: Any = rpc_error
        if error.code() != grpc.StatusCode.INVALID_ARGUMENT:
            raise HarmError(f"{error.code()}: {error.details()}, by {batch!r:.4000}") from None
        return True
    return False


def _shake(shake: Any, message: bytes, timeout: float) -> None:
    expected = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    try:
        shake(message, timeout=timeout)
    except grpc.RpcError as rpc_error:
        error: Any = rpc_error
        if error.code() not in expected:
            raise HarmError(f"{error.code()}: {error.details()}, by {message!r:.2000}") from None


def _check_health(client: Client) -> None:
    ids, flags = np.array([3, 4], np.int32), np.array([True, False])
    image = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    got_ids, got = client.rows(ids, Step(flags, {"image": image}))
    good = (got_ids == ids).all() and (got[0] == flags).all() and (got[1]["image"] == image).all()
    if not good:
        raise HarmError("a well-behaved client got a wrong answer")


# ---- From the shell ------------------------------------------------------------------------------


def peak_megabytes() -> float:
    """The most memory that this process has had."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (1024 * 1024 if sys.platform == "darwin" else 1024)


def run_atheris(seconds: int) -> None:
    """Lets atheris look for messages that do harm; it ends the process."""
    import atheris

    for module in (codec, framing, client_lib):
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", "") != module.__name__:
                continue
            if isinstance(value, type):
                for attribute, method in list(vars(value).items()):
                    if callable(method) and hasattr(method, "__code__"):
                        setattr(value, attribute, atheris.instrument_func(method))
            elif hasattr(value, "__code__"):
                setattr(module, name, atheris.instrument_func(value))
    decode = Decoder()
    with tempfile.TemporaryDirectory(prefix="fuzz") as directory:
        for index, message in enumerate(make_corpus()):
            with open(os.path.join(directory, str(index)), "wb") as file:
                file.write(message)
        flags = [f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-timeout=5"]
        atheris.Setup([sys.argv[0], directory, *flags], lambda data: decode(data) and None)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="messages to each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_seconds", type=float, default=2.0, help="of CPU for a message")
    parser.add_argument("--max_megabytes", type=float, default=256.0, help="above the start")
    parser.add_argument("--atheris", action="store_true", help="be guided by coverage")
    parser.add_argument("--seconds", type=int, default=60, help="of --atheris")
    args = parser.parse_args()
    if args.atheris:
        run_atheris(args.seconds)
    before = peak_megabytes()
    try:
        print(fuzz_decoder(args.count, args.seed, args.max_seconds), flush=True)
        print(fuzz_server(args.count, args.seed + 1, timeout=60.0), flush=True)
    except HarmError as harm:
        print(f"HARM: {harm}", file=sys.stderr)
        return 1
    grown = peak_megabytes() - before
    print(f"memory: {grown:.0f} MB above the start, of {args.max_megabytes:.0f} allowed")
    return int(grown > args.max_megabytes)


if __name__ == "__main__":
    sys.exit(main())
