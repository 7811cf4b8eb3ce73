import os
import socket
import stat
import threading

import pytest

from seed_rl.grpc_service import AddressError, Client, Server, addresses


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("unix:/a/b", "unix:/a/b"),
        ("unix:b", "unix:b"),
        ("unix:///a/b", "unix:/a/b"),
        ("localhost:80", "localhost:80"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("[::1]:65535", "[::1]:65535"),
    ],
)
def test_addresses_that_are_understood(address, target):
    assert addresses.parse(address).target == target


@pytest.mark.parametrize(
    "address",
    [
        *("", "localhost", "localhost:", ":80", "localhost:65536", "localhost:-1", "localhost:x"),
        *("::1:80", "http://localhost:80", "unix:", "unix://a/b", "unix:/a\0b", 80, "a:b:c"),
        "localhost:²",
    ],
)
def test_addresses_that_are_not(address):
    for make in (Server, Client):
        with pytest.raises((AddressError, TypeError)):
            make(address)
    with pytest.raises(AddressError):
        addresses.parse(address)


def test_a_path_too_long_for_a_socket():
    with pytest.raises(AddressError, match="at most 103 bytes, this one has 151"):
        Server("unix:/" + "x" * 150)


def test_no_address():
    with pytest.raises(AddressError, match="at least one"):
        Server([])


def test_sockets_are_private_and_the_umask_is_restored(make_server, directory):
    umask = os.umask(0)
    try:
        make_server().start()
        found = os.umask(0)
    finally:
        os.umask(umask)
    assert found == 0
    assert stat.S_IMODE(os.stat(f"{directory}/s").st_mode) == 0o600


def test_a_live_socket_is_not_taken(make_server, address, connect):
    first = make_server()
    first.bind(lambda: None, name="f", input_signature=())
    first.start()
    with pytest.raises(AddressError, match="in use by a running server"):
        Server(address).start()
    assert connect().f() is None


def test_a_file_that_is_no_socket_is_kept(directory):
    path = f"{directory}/s"
    with open(path, "w") as file:
        file.write("precious")
    with pytest.raises(AddressError, match="exists and is not a socket"):
        Server(f"unix:{path}").start()
    with open(path) as file:
        assert file.read() == "precious"


def test_a_directory_that_is_not_there(directory):
    with Server(f"unix:{directory}/made/s") as server:
        server.start()
        assert stat.S_IMODE(os.stat(f"{directory}/made").st_mode) == 0o700
    with pytest.raises(AddressError, match=r"directory .*missing/deeper: No such file"):
        Server(f"unix:{directory}/missing/deeper/s").start()


@pytest.mark.parametrize(("mode", "allowed"), [(0o1777, True), (0o777, False), (0o770, False)])
def test_a_directory_in_which_others_could_replace_the_socket(directory, mode, allowed):
    os.chmod(directory, mode)
    server = Server(f"unix:{directory}/s")
    if allowed:
        with server:
            server.start()
    else:
        with pytest.raises(AddressError, match=r"others may write .* chmod 700"):
            server.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_socket_of_another_user_is_not_connected_to(directory, make_server, address, monkeypatch):
    make_server().start()
    os.chown(f"{directory}/s", 4321, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(AddressError, match=r"belongs to another user \(uid 4321\)"):
        Client(address)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written(directory):
    os.chmod(directory, 0o500)
    with pytest.raises(AddressError, match="cannot be written"):
        Server(f"unix:{directory}/s").start()


def test_a_taken_port(make_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressError, match=f"^{address}: cannot be listened on"):
            make_server(address).start()


def test_a_port_taken_by_another_server(make_server):
    first = make_server("127.0.0.1:0")
    first.start()
    with pytest.raises(AddressError, match="cannot be listened on"):
        make_server(first.addresses[0]).start()


def test_nothing_is_left_where_one_of_several_addresses_fails(make_server, directory, address):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError):
            make_server([address, f"127.0.0.1:{port}"]).start()
    assert os.listdir(directory) == []
    assert "grpc_service" not in {thread.name for thread in threading.enumerate()}


def test_a_port_taken_on_one_of_a_hosts_addresses(make_server, monkeypatch):
    """As `localhost` may be both 127.0.0.1 and ::1, of which gRPC would take the one left."""
    monkeypatch.setattr(addresses, "resolve", lambda address: ["127.0.0.2", "127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"localhost:{port}: cannot be listened on: Address"):
            make_server(f"localhost:{port}").start()
    with socket.create_server(("127.0.0.1", port)):
        pass  # nothing holds it


def test_a_host_with_several_addresses_has_one_port_on_all(make_server, monkeypatch, connect):
    monkeypatch.setattr(addresses, "resolve", lambda address: ["127.0.0.2", "::7", "127.0.0.1"])
    server = make_server("localhost:0", insecure=True)
    server.bind(lambda: None, name="f", input_signature=())
    server.start()
    host, _, port = server.addresses[0].rpartition(":")
    assert host == "localhost"
    monkeypatch.undo()
    for ip in ("127.0.0.1", "127.0.0.2"):
        assert connect(f"{ip}:{port}").f() is None


def test_beyond_this_machine_takes_insecure():
    for make in (Server, Client):
        with pytest.raises(
            AddressError, match=r"0.0.0.0 reaches beyond this machine.*neither.* --insecure"
        ):
            make("0.0.0.0:0")
    with Server("0.0.0.0:0", insecure=True) as server:
        server.start()
        assert int(server.addresses[0].removeprefix("0.0.0.0:")) > 0


def test_a_host_that_does_not_exist():
    with pytest.raises(AddressError, match="cannot resolve"):
        Server("no-such-host.invalid:80")
