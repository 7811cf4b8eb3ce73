"""Addresses: `unix:/path/to/socket` and `host:port`."""

import contextlib
import dataclasses
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator

from seed_rl.grpc_service import errors

# sockaddr_un holds 108 bytes on Linux and 104 on macOS, the last of them zero.
MAX_SOCKET_PATH_BYTES = 103


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


def require_loopback(address: Address, insecure: bool) -> None:
    """Refuses TCP beyond this machine, which is not encrypted, unless `insecure`.

    Raises:
      AddressError: the host is not a loopback address, or does not resolve.
    """
    if address.path or insecure:
        return
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise errors.AddressError(f"{address}: cannot resolve {address.host!r}: {error}") from None
    for *_, sockaddr in found:
        if not ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]).is_loopback:
            raise errors.AddressError(
                f"{address}: {sockaddr[0]} is not on this machine, and the connection is neither "
                "encrypted nor authenticated; use a loopback address or a Unix socket, or pass "
                "insecure=True on a network you trust"
            )


@contextlib.contextmanager
def private_socket(path: str) -> Iterator[None]:
    """The block creates a Unix socket at `path`; it gets mode 0600.

    The socket file of a dead server is removed first. A lock on the directory keeps servers that
    start at the same time from removing each other's.

    Raises:
      AddressError: a live server, or something that is not a socket, is at `path`, or the directory
        does not exist or cannot be written.
    """
    directory = os.path.dirname(path) or "."
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise errors.AddressError(f"unix:{path}: directory {directory}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
