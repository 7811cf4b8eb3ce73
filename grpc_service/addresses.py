"""Addresses: `unix:/path/to/socket` and `host:port`."""

import contextlib
import dataclasses
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator, Sequence

from seed_rl.grpc_service import errors

# sockaddr_un holds 108 bytes on Linux and 104 on macOS, the last of them zero.
MAX_SOCKET_PATH_BYTES = 103
_PORT_ATTEMPTS = 10


@dataclasses.dataclass(frozen=True)
class Address:
    """A parsed address: either `path` of a Unix socket, or `host` and `port`."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def target(self) -> str:
        """As gRPC and `parse` read it."""
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return self.target


def parse(address: str) -> Address:
    """Reads `unix:/path`, `unix:relative/path`, `unix:///path`, `host:port` or `[ipv6]:port`.

    Raises:
      AddressError: it is none of these, or the path is too long for a socket.
    """
    if not isinstance(address, str):
        raise errors.AddressError(f"an address is a string, got {address!r}")
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return Address(path=_socket_path(address, rest))
    host, separator, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""
    valid_port = port.isascii() and port.isdigit() and int(port) < 65536
    if not separator or not host or not valid_port or "/" in host:
        raise errors.AddressError(
            f"{address!r} is not an address: expected unix:/path/to/socket or host:port "
            "(IPv6 as [::1]:port)"
        )
    return Address(host=host, port=int(port))


def resolve(address: Address) -> list[str]:
    """The IP addresses of a TCP address's host, each once.

    Raises:
      AddressError: there is none.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise errors.AddressError(f"{address}: cannot resolve {address.host!r}: {error}") from None
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def require_protection(address: Address, encrypted: bool, authenticated: bool) -> None:
    """Refuses TCP beyond this machine that is not both encrypted and authenticated.

    Raises:
      AddressError: the host is not a loopback address and lacks either, or does not resolve.
    """
    if address.path or (encrypted and authenticated):
        return
    for ip in resolve(address):
        if not ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
            state = "neither encrypted nor authenticated"
            if encrypted or authenticated:
                state = "not authenticated by a token" if encrypted else "not encrypted"
            raise errors.AddressError(
                f"{address}: {ip} reaches beyond this machine, and the connection is {state}: give "
                "certificates and a token (docs/security.md), or use a loopback address or a Unix "
                "socket, or allow it with --insecure (in Python: insecure=True) on a network you "
                "trust"
            )


def to_listen_on(address: Address) -> list[Address]:
    """One address an IP address of the host, all with the same port.

    gRPC by itself is content if it can listen on one of a host's IP addresses, and so would share
    `localhost` with a server that has the port on another of them.

    Raises:
      AddressError: the host does not resolve, or the port is taken on one of its IP addresses.
    """
    ips = resolve(address)
    if len(ips) == 1 and address.port == 0:
        return [Address(host=ips[0])]
    for attempts_left in reversed(range(_PORT_ATTEMPTS)):
        try:
            return _probe(address, ips)
        except OSError as error:
            # Where any port will do, one that is free on the first may be taken on the next.
            if address.port or not attempts_left:
                raise errors.AddressError(
                    f"{address}: cannot be listened on: {error.strerror}"
                ) from None
    raise AssertionError("unreachable")


def require_own_socket(address: Address) -> None:
    """Refuses a Unix socket of another user, who may have put it where ours is expected.

    Raises:
      AddressError: it is another user's, neither ours nor root's.
    """
    try:
        owner = os.stat(address.path).st_uid
    except OSError:
        return  # not there yet
    if os.geteuid() not in (0, owner) and owner != 0:
        raise errors.AddressError(
            f"{address} belongs to another user (uid {owner}), not to this one; use a socket in a "
            "directory of your own"
        )


@contextlib.contextmanager
def private_socket(path: str) -> Iterator[None]:
    """The block creates a Unix socket at `path`; it gets mode 0600.

    Its directory is made if it is missing, with mode 0700. The socket file of a dead server is
    removed first. A lock on the directory keeps servers that start at the same time from removing
    each other's.

    Raises:
      AddressError: a live server, or something that is not a socket, is at `path`, or the directory
        cannot be made or written, or others may replace what is in it.
    """
    directory = os.path.dirname(path) or "."
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise errors.AddressError(f"unix:{path}: directory {directory}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _require_safe_directory(path, directory, os.fstat(lock))
        _remove_stale(path)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise errors.AddressError(f"unix:{path}: directory {directory} cannot be written")
        # The umask is the process's, for the moment in which the socket comes to be: a file that
        # another thread creates meanwhile is private, too.
        umask = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(umask)
        os.chmod(path, 0o600)  # where a default ACL of the directory overrides the umask
    finally:
        os.close(lock)


def _probe(address: Address, ips: Sequence[str]) -> list[Address]:
    """One address an IP, with the port that was found free on all; OSError if there is none."""
    port, found = address.port, []
    with contextlib.ExitStack() as stack:
        for ip in ips:
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            try:
                probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                # As gRPC does it: a port whose last server has just ended is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((ip, port))
            except OSError as error:
                # /etc/hosts may name an IPv6 address although the machine has no IPv6.
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(ips) > 1:
                    continue
                raise
            port = probe.getsockname()[1]
            found.append(Address(host=ip, port=port))
    if not found:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return found


def _require_safe_directory(path: str, directory: str, found: os.stat_result) -> None:
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others_write and not found.st_mode & stat.S_ISVTX:
        raise errors.AddressError(
            f"unix:{path}: others may write in the directory {directory}, and so put a socket of "
            f"theirs in the place of this one; chmod 700 {directory}, or use another"
        )
    if os.geteuid() not in (0, found.st_uid) and found.st_uid != 0:
        raise errors.AddressError(
            f"unix:{path}: the directory {directory} belongs to another user (uid {found.st_uid}); "
            "use one of your own"
        )


def _socket_path(address: str, rest: str) -> str:
    path = rest
    if path.startswith("//"):  # unix://authority/path, where the authority is always empty
        path = path[2:]
        if not path.startswith("/"):
            raise errors.AddressError(f"{address!r}: unix:// takes an absolute path")
    if not path or "\0" in path:
        raise errors.AddressError(f"{address!r} names no socket: expected unix:/path/to/socket")
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise errors.AddressError(
            f"{address!r}: a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes, this one has "
            f"{num_bytes}; use a shorter directory, such as one in /tmp"
        )
    return path


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise errors.AddressError(f"unix:{path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise errors.AddressError(f"unix:{path}: exists and is not a socket; remove it first")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno != errno.ECONNREFUSED:
                raise errors.AddressError(
                    f"unix:{path}: in use, or not to be reached: {error}"
                ) from None
        else:
            raise errors.AddressError(f"unix:{path}: in use by a running server")
    try:
        os.unlink(path)
    except OSError as error:
        raise errors.AddressError(
            f"unix:{path}: cannot remove the socket of a dead server: {error.strerror}"
        ) from None
