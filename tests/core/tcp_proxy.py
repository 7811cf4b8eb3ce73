"""A TCP proxy that makes a network slow, still or broken when a test says so."""

import contextlib
import socket
import struct
import threading
import time


class TcpProxy:
    """Forwards connections to an address; a context.

    Args:
      target: `host:port`.

    Attributes:
      address: where it listens, `host:port`.
      delay: seconds that every piece takes, in either direction.
      piece_bytes: size of the pieces.
    """

    def __init__(self, target: str, delay: float = 0.0, piece_bytes: int = 65536):
        self._target = target
        self.delay, self.piece_bytes = delay, piece_bytes
        self._flows = threading.Event()
        self._flows.set()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def stall(self) -> None:
        """Swallows whatever comes from now on; the connections stay as they are."""
        self._flows.clear()

    def flow(self) -> None:
        """Ends a stall."""
        self._flows.set()

    def reset(self) -> int:
        """Breaks every connection, both sides getting a reset; returns how many there were."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
            one.close()
        return len(sockets) // 2

    def __enter__(self) -> "TcpProxy":
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed.set()
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(30.0)
            assert not thread.is_alive()

    def _start(self, target, *args) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        host, _, port = self._target.rpartition(":")
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            with self._lock:
                self._sockets += [near, far]
            self._start(self._pump, near, far)
            self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self.piece_bytes):
                if self.delay:
                    time.sleep(self.delay)
                self._flows.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
