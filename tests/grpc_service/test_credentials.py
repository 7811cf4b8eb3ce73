"""Who may connect: TLS, client certificates and the token, over real sockets."""

import logging
import os
import pathlib
import stat
import subprocess
import sys
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from seed_rl.grpc_service import (
    AddressError,
    AuthenticationError,
    Client,
    Credentials,
    CredentialsError,
    Server,
    TensorSpec,
    UnavailableError,
    credentials,
    protocol,
)

TIMEOUT = 30.0
ROOT = pathlib.Path(__file__).parents[2]
TOKEN = "right-0123456789abcdef"
SCALAR = TensorSpec((), np.float32)


class Certificates(NamedTuple):
    """What scripts/make_certs.sh makes."""

    directory: pathlib.Path

    def file(self, name: str) -> str:
        return str(self.directory / name)

    def server(self, **kwargs: Any) -> Credentials:
        return Credentials(self.file("server.pem"), self.file("server.key"), **kwargs)

    def client(self, **kwargs: Any) -> Credentials:
        return Credentials(tls_ca=self.file("ca.pem"), **kwargs)

    def mutual_client(self, **kwargs: Any) -> Credentials:
        pair = self.file("client.pem"), self.file("client.key")
        return Credentials(*pair, tls_ca=self.file("ca.pem"), **kwargs)


def _make(path: pathlib.Path, *hosts: str) -> Certificates:
    subprocess.run([ROOT / "scripts/make_certs.sh", path, *hosts], check=True, timeout=TIMEOUT)
    return Certificates(path)


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return _make(tmp_path_factory.mktemp("certs") / "right")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Of another authority, for another host."""
    return _make(tmp_path_factory.mktemp("certs") / "foreign", "elsewhere.example")


@pytest.fixture
def serve(make_server):
    """A server of `double` at an address; returns the address with its port and what was called."""

    def start(address, server_credentials, **kwargs):
        server = make_server(address, credentials=server_credentials, **kwargs)
        calls = []

        def double(x):
            calls.append(float(x))
            return 2 * x

        server.bind(double, input_signature=(SCALAR,), output_signature=SCALAR)
        server.start()
        return server.addresses[0], calls

    return start


def test_the_scripts_files_are_private_and_it_overwrites_none(certs):
    assert stat.S_IMODE(os.stat(certs.directory).st_mode) == 0o700
    modes = {stat.S_IMODE(os.stat(file).st_mode) for file in certs.directory.iterdir()}
    assert modes == {0o600}
    again = subprocess.run(
        [ROOT / "scripts/make_certs.sh", certs.directory], capture_output=True, text=True
    )
    assert again.returncode == 1 and "is not empty" in again.stderr


@pytest.mark.parametrize("host", ["two words,", "999.1.1.1", ""])
def test_the_script_refuses_what_no_host_can_be_called_and_leaves_nothing(tmp_path, host):
    made = subprocess.run(
        [ROOT / "scripts/make_certs.sh", tmp_path / "certs", "right.example", host],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert made.returncode == 1
    assert "each HOST has to be a name or an IP address" in made.stderr
    assert len(made.stderr.splitlines()) == 1
    assert list((tmp_path / "certs").iterdir()) == []


def test_the_script_leaves_a_directory_that_it_refuses_as_it_is(tmp_path):
    (tmp_path / "of_somebody").touch()
    tmp_path.chmod(0o755)
    made = subprocess.run(
        [ROOT / "scripts/make_certs.sh", tmp_path], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert made.returncode == 1 and "is not empty" in made.stderr
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_tls_and_token_beyond_this_machine(certs, serve, connect):
    address, calls = serve("0.0.0.0:0", certs.server(token=TOKEN))
    port = address.rpartition(":")[2]
    assert connect(f"localhost:{port}", credentials=certs.client(token=TOKEN)).double(2.0) == 4.0
    assert calls == [2.0]


@pytest.mark.parametrize(
    ("lacking", "state"),
    [("token", "not authenticated by a token"), ("tls", "not encrypted"), ("both", "neither")],
)
def test_beyond_this_machine_takes_both(certs, lacking, state):
    token = "" if lacking in ("token", "both") else TOKEN
    for make, tls in ((Server, certs.server(token=token)), (Client, certs.client(token=token))):
        given = tls if lacking == "token" else Credentials(token=token)
        with pytest.raises(AddressError, match=f"the connection is {state}"):
            make("192.0.2.1:80", credentials=given)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix"])
@pytest.mark.parametrize(
    ("token", "text"),
    [("", "wants a token"), (TOKEN[:-1], "not the server's"), (TOKEN + "x", "not the server's")],
)
def test_a_missing_and_a_wrong_token_are_refused(serve, connect, directory, address, token, text):
    address = f"unix:{directory}/t" if address == "unix" else address
    address, calls = serve(address, Credentials(token=TOKEN))
    with pytest.raises(AuthenticationError, match=text) as caught:
        connect(address, credentials=Credentials(token=token))
    assert TOKEN not in str(caught.value)
    assert connect(address, credentials=Credentials(token=TOKEN)).double(1.0) == 2.0
    assert calls == [1.0]


def test_every_method_is_closed_without_the_token(serve, stack):
    """Also to those who do not begin with a handshake, and before anything they send is read."""
    address, calls = serve("127.0.0.1:0", Credentials(token=TOKEN))
    channel = grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])
    stack.callback(channel.close)
    large = bytes(16 * 1024 * 1024)
    for method in (protocol.HANDSHAKE_METHOD, protocol.CALL_METHOD, "/another/Method"):
        for token in ("", "Bearer", f"bearer {TOKEN}", TOKEN, f"Bearer {TOKEN} "[:-2]):
            metadata = ((credentials.TOKEN_KEY, token),) if token else ()
            with pytest.raises(grpc.RpcError) as unary:
                channel.unary_unary(method, None, None)(large, metadata=metadata, timeout=TIMEOUT)
            assert unary.value.code() == grpc.StatusCode.UNAUTHENTICATED
            stream = channel.stream_stream(method, None, None)
            responses: Any = stream(iter([large]), metadata=metadata, timeout=TIMEOUT)
            with pytest.raises(grpc.RpcError) as streamed:
                next(responses)
            assert streamed.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert calls == []


def test_refusals_are_logged_but_do_not_fill_the_log(serve, connect, caplog):
    address, _ = serve("127.0.0.1:0", Credentials(token=TOKEN))
    for token in ("", TOKEN + "x", TOKEN + "y"):
        with pytest.raises(AuthenticationError):
            connect(address, credentials=Credentials(token=token))
    (line,) = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert line.startswith("refused a client without a token, from ipv4:127.0.0.1:")


MEMORY_SERVER = """
import sys, numpy as np
from seed_rl.grpc_service import Credentials, Server
server = Server("127.0.0.1:0", credentials=Credentials(token=sys.argv[1]))
server.bind(lambda: None, name="f", input_signature=())
server.start()
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(server.addresses[0], flush=True)
for line in sys.stdin:
    print(peak(), flush=True)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc")
def test_without_the_token_nobody_fills_the_servers_memory(stack):
    process = subprocess.Popen(
        [sys.executable, "-c", MEMORY_SERVER, TOKEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdin is not None and process.stdout is not None
    address = process.stdout.readline().strip()

    def peak_kilobytes() -> int:
        process.stdin.write("\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    before = peak_kilobytes()
    large = bytes(100 * 1024 * 1024)  # below the limit of a message
    channel = grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])
    stack.callback(channel.close)
    for method in (protocol.HANDSHAKE_METHOD, protocol.CALL_METHOD) * 3:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method, None, None)(large, timeout=TIMEOUT)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert peak_kilobytes() - before < 30 * 1024


def test_a_tls_server_shuts_plain_clients_out(certs, serve):
    address, calls = serve("127.0.0.1:0", certs.server())
    with pytest.raises(UnavailableError, match="--tls_ca"):
        Client(address, connect_timeout=0.5)
    assert calls == []


def test_a_tls_client_refuses_a_plain_server(certs, serve):
    address, _ = serve("127.0.0.1:0", Credentials())
    with pytest.raises(AuthenticationError, match="does not speak TLS"):
        Client(address, credentials=certs.client(), connect_timeout=TIMEOUT)


def test_a_server_of_another_authority_is_not_believed(certs, foreign, serve):
    address, _ = serve("127.0.0.1:0", foreign.server())
    with pytest.raises(AuthenticationError, match="not signed by an authority of --tls_ca"):
        Client(address, credentials=certs.client(token=TOKEN), connect_timeout=TIMEOUT)


def test_a_server_of_another_name_is_not_believed(foreign, serve):
    address, _ = serve("127.0.0.1:0", foreign.server())
    with pytest.raises(AuthenticationError, match="for another name or IP address"):
        Client(address, credentials=foreign.client(), connect_timeout=TIMEOUT)


def test_mutual_tls(certs, foreign, serve, connect):
    address, calls = serve("127.0.0.1:0", certs.server(tls_ca=certs.file("ca.pem")))
    strangers = Credentials(
        foreign.file("client.pem"), foreign.file("client.key"), tls_ca=certs.file("ca.pem")
    )
    for given in (certs.client(), strangers):
        with pytest.raises(UnavailableError, match="certificate of this side"):
            Client(address, credentials=given, connect_timeout=0.5)
    assert connect(address, credentials=certs.mutual_client()).double(3.0) == 6.0
    assert calls == [3.0]


def test_unix_sockets_do_without_tls(certs, serve, connect, directory):
    address, _ = serve(f"unix:{directory}/t", certs.server(token=TOKEN))
    assert connect(address, credentials=certs.client(token=TOKEN)).double(1.0) == 2.0


def test_a_token_is_in_no_repr_and_no_log(serve, connect, certs, caplog):
    caplog.set_level(logging.DEBUG)
    given = certs.server(token=TOKEN)
    assert TOKEN not in repr(given) + str(given)
    address, _ = serve("127.0.0.1:0", given)
    with pytest.raises(AuthenticationError):
        connect(address, credentials=certs.client(token=TOKEN + "x"))
    connect(address, credentials=certs.client(token=TOKEN)).double(1.0)
    assert TOKEN not in caplog.text


def test_a_token_comes_from_a_file_or_the_environment(tmp_path, caplog):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    environment = {credentials.TOKEN_VARIABLE: "of-the-environment", "other": "kept"}
    assert credentials.read_token(str(file), environment) == TOKEN
    assert environment == {"other": "kept"}
    environment = {credentials.TOKEN_VARIABLE: "of-the-environment"}
    assert credentials.read_token(None, environment) == "of-the-environment"
    assert environment == {}
    assert credentials.read_token(None, {}) == ""
    assert not caplog.records
    file.chmod(0o644)
    credentials.read_token(str(file), {})
    assert f"chmod 600 {file}" in caplog.text


@pytest.mark.parametrize("token", ["", "short", "with a space in it", "zwölf-zeichen-und-mehr"])
def test_what_is_no_token(tmp_path, token):
    file = tmp_path / "token"
    file.write_text(token)
    with pytest.raises(CredentialsError, match="at least 16 letters") as caught:
        credentials.read_token(str(file), {})
    assert not token or token not in str(caught.value).replace(str(file), "")
    with pytest.raises(CredentialsError, match="No such file"):
        credentials.read_token(str(tmp_path / "missing"), {})


def test_files_that_do_not_do(certs, foreign, tmp_path):
    file = certs.file
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\xff")
    wrong = [
        (Server, {"tls_certificate": file("server.pem"), "tls_key": foreign.file("server.key")}),
        (Server, {"tls_certificate": file("server.key"), "tls_key": file("server.key")}),
        (Server, {"tls_certificate": file("missing"), "tls_key": file("server.key")}),
        (Server, {"tls_ca": file("ca.pem")}),
        (Client, {"tls_ca": str(garbage)}),
        (Client, {"tls_ca": file("server.key")}),
        (Client, {"tls_certificate": file("client.pem"), "tls_key": file("client.key")}),
    ]
    for make, given in wrong:
        with pytest.raises(CredentialsError):
            make("127.0.0.1:0", credentials=Credentials(**given))
    with pytest.raises(CredentialsError, match="go together"):
        Credentials(tls_key=file("server.key"))
