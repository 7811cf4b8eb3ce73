"""What arrives may be anything: no crash, no hang, no memory, and nothing is unpickled."""

import ast
import importlib.util
import pathlib
from typing import Any

import grpc
import numpy as np
import pytest

import seed_rl
from seed_rl.grpc_service import ProtocolError, TensorSpec, codec, framing, protocol
from seed_rl.grpc_service import service_pb2 as pb

TIMEOUT = 30.0
ROOT = pathlib.Path(__file__).parents[2]
BYTES = TensorSpec((None,), np.uint8)


@pytest.fixture(scope="module")
def fuzz():
    """scripts/fuzz_codec.py, which does the same at length."""
    spec = importlib.util.spec_from_file_location("fuzz_codec", ROOT / "scripts/fuzz_codec.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_corpus_is_what_is_really_sent(fuzz):
    functions = fuzz.make_functions()
    for request in fuzz.make_requests():
        call = framing.read_request(request)
        functions[call.function].check_inputs(codec.Layout.parse(call.layout))
    decode = fuzz.Decoder()
    assert all(decode(message) > 0 for message in fuzz.make_corpus())


def test_damaged_messages_do_no_harm_to_the_decoder(fuzz):
    before = fuzz.peak_megabytes()
    fuzz.fuzz_decoder(4_000, seed=11, max_seconds=2.0)
    assert fuzz.peak_megabytes() - before < 100


def test_damaged_messages_do_no_harm_to_a_server_and_its_clients(fuzz):
    before = fuzz.peak_megabytes()
    fuzz.fuzz_server(2_000, seed=12, timeout=TIMEOUT)
    assert fuzz.peak_megabytes() - before < 100


def test_the_fuzzer_notices_harm(fuzz, monkeypatch):
    monkeypatch.setattr(codec.Layout, "parse", lambda serialized: serialized[10**6])
    with pytest.raises(fuzz.HarmError, match="IndexError"):
        fuzz.fuzz_decoder(100, seed=0, max_seconds=2.0)


def test_a_small_message_does_not_become_a_large_one_in_memory(fuzz):
    """Two bytes a tensor: what protobuf makes of it would take dozens of times as much."""
    crowd = b"\x0a\x00" * 8_000_000
    before = fuzz.peak_megabytes()
    with pytest.raises(ProtocolError, match="more than the 1048576"):
        codec.Layout.parse(crowd)
    assert fuzz.peak_megabytes() - before < 50


def _raw(address, stack) -> grpc.Channel:
    channel = grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])
    stack.callback(channel.close)
    return channel


def test_a_handshake_is_small(make_server, address, stack):
    make_server().start()
    call: Any = _raw(address, stack).unary_unary(protocol.HANDSHAKE_METHOD, None, None)
    version = pb.HandshakeRequest(protocol_version=2).SerializeToString()
    unknown = b"\x7a" + framing._varint(5_000_000) + bytes(5_000_000)  # field 15
    with pytest.raises(grpc.RpcError) as caught:
        call(version + unknown, timeout=TIMEOUT)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 4194304" in str(caught.value.details())


def test_a_request_above_the_servers_limit_ends_its_stream_alone(
    make_server, connect, address, stack
):
    """Of a client that does not care; this package's refuses to send it."""
    server = make_server(max_message_bytes=10_000)
    server.bind(lambda x: None, name="take", input_signature=(BYTES,))
    server.start()
    other = connect()
    layout = codec.Layout([np.dtype(np.uint8)], [(20_000,)])
    request = framing.Frame(layout, 0).pack(1, [np.zeros(20_000, np.uint8)])
    stream: Any = _raw(address, stack).stream_stream(protocol.CALL_METHOD, None, None)
    with pytest.raises(grpc.RpcError) as caught:
        next(stream(iter([request]), timeout=TIMEOUT))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "10000" in str(caught.value.details())
    assert other.take(np.zeros(9_000, np.uint8)) is None


_UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_EVALUATORS = {"eval", "exec", "compile"}


def _python_files() -> list[pathlib.Path]:
    folders = ("seed_rl", "agents", "envs", "grpc_service", "scripts")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert ROOT / "seed_rl" in pathlib.Path(seed_rl.__file__).parents and len(files) > 50
    return files


def _unpicklings(source: str) -> list[str]:
    """What in a module could unpickle or evaluate what it is given."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in _UNPICKLERS]
        elif isinstance(node, ast.ImportFrom):
            found += [str(node.module)] * (str(node.module).split(".")[0] in _UNPICKLERS)
        elif isinstance(node, ast.Attribute) and node.attr in _UNPICKLERS:
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _EVALUATORS:
                found.append(node.func.id)
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not allowed:
                    found.append("allow_pickle")
    return found


def test_nothing_is_unpickled_anywhere():
    for file in _python_files():
        assert _unpicklings(file.read_text()) == [], file


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "import a, dill", "from cloudpickle import loads", "eval(x)"),
        *("numpy.load(x, allow_pickle=True)", "np.load(x, allow_pickle=y)", "six.moves.cPickle"),
    ],
)
def test_unpickling_would_be_found(source):
    assert len(_unpicklings(source)) == 1
    assert _unpicklings("np.load(x, allow_pickle=False); model.eval(); re.compile(x)") == []
