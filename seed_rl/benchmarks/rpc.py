"""Round trips a second over the wire, beside bare gRPC with the same payload.

    python -m seed_rl.benchmarks.rpc --clients=4 --rows=1,16 --payload_bytes=7056 --seconds=3
    python -m seed_rl.benchmarks.rpc --clients=4 --rows=16 --servers=1,2

Every client is a process that calls an echo in a loop, over a Unix socket; the server is a process
of its own. `bare` is grpcio by itself: a handler on grpc.aio that returns the bytes it reads, and
the synchronous stub. `unbatched` and `batched` are this package's server and client, where a batch
is full when every client has called. Measured in turns, the median of the repetitions counts.

A server's Python runs on one core at a time, so the server's CPU a call says about how many calls
a second one process could answer if there were cores for everything else: the last column. With
several servers the clients are spread evenly over them.
"""

import argparse
import asyncio
import dataclasses
import itertools
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from seed_rl.grpc_service import Client, Server, TensorSpec

_MODES = ("bare", "unbatched", "batched")
_BARE_METHOD = "/bare.Echo/Call"
_START_TIMEOUT = 60.0  # seconds


@dataclasses.dataclass(frozen=True)
class _Setting:
    mode: str
    address: str
    num_clients: int
    rows: int
    payload_bytes: int
    seconds: float


class _Measured(NamedTuple):
    calls_per_second: float  # of all clients together
    client_cpu: float  # seconds a call
    server_cpu: float  # seconds a call, all threads


def _run_server(setting: _Setting, ready: Any, stop: Any, cpu_seconds: Any) -> None:
    """Serves until `stop` is set; reports the seconds of CPU that it took."""
    ready_at = _ReadyClock(ready)
    if setting.mode == "bare":
        asyncio.run(_serve_bare(setting.address, ready_at, stop))
    else:
        _serve(setting, ready_at, stop)
    cpu_seconds.put(time.process_time() - ready_at.cpu)


class _ReadyClock:
    """An event that notes the CPU time at which it is set."""

    def __init__(self, event: Any):
        self._event, self.cpu = event, 0.0

    def set(self) -> None:
        self.cpu = time.process_time()
        self._event.set()


def _serve(setting: _Setting, ready: Any, stop: Any) -> None:
    shape = (None, setting.payload_bytes)
    spec = TensorSpec(shape, np.uint8)
    with Server(setting.address) as server:
        batched = setting.mode == "batched"
        server.bind(
            lambda frames: frames,
            name="echo",
            input_signature=(spec,),
            output_signature=spec,
            max_batch_size=setting.num_clients * setting.rows if batched else None,
            batched=batched,
        )
        server.start()
        ready.set()
        stop.wait()


async def _serve_bare(address: str, ready: Any, stop: Any) -> None:
    async def echo(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined,unused-ignore]
            await context.write(message)

    server = grpc.aio.server()
    handlers = {"Call": grpc.stream_stream_rpc_method_handler(echo)}  # type: ignore[arg-type,unused-ignore]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", handlers),))
    server.add_insecure_port(address)
    await server.start()
    ready.set()
    await asyncio.get_running_loop().run_in_executor(None, stop.wait)
    await server.stop(0)


def _run_client(setting: _Setting, barrier: Any, results: Any) -> None:
    """Reports (round trips a second, seconds of CPU a round trip)."""
    call, close = (_open_bare if setting.mode == "bare" else _open_client)(setting)
    call()
    barrier.wait(_START_TIMEOUT)
    cpu_start, start = time.process_time(), time.perf_counter()
    count, elapsed = 0, 0.0
    while elapsed < setting.seconds:
        call()
        count += 1
        elapsed = time.perf_counter() - start
    results.put((count / elapsed, (time.process_time() - cpu_start) / count))
    close()


def _open_client(setting: _Setting) -> tuple[Callable[[], Any], Callable[[], Any]]:
    client = Client(setting.address, connect_timeout=_START_TIMEOUT)
    frames = np.zeros((setting.rows, setting.payload_bytes), np.uint8)
    return lambda: client.echo(frames), client.close


def _open_bare(setting: _Setting) -> tuple[Callable[[], Any], Callable[[], Any]]:
    channel = grpc.insecure_channel(setting.address)
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    open_stream = channel.stream_stream(_BARE_METHOD, None, None)
    responses: Any = open_stream(iter(requests.get, None))
    message = bytes(setting.rows * setting.payload_bytes)

    def call() -> Any:
        requests.put(message)
        return next(responses)

    def close() -> None:
        requests.put(None)
        channel.close()

    return call, close


def _measure(settings: Sequence[_Setting]) -> _Measured:
    """Runs a server, with its clients, for each setting, all at the same time."""
    processes = multiprocessing.get_context("spawn")
    stop, results, cpu_seconds = processes.Event(), processes.Queue(), processes.Queue()
    num_clients = sum(setting.num_clients for setting in settings)
    barrier = processes.Barrier(num_clients)
    ready = [processes.Event() for _ in settings]
    servers = [
        processes.Process(target=_run_server, args=(setting, event, stop, cpu_seconds))
        for setting, event in zip(settings, ready, strict=True)
    ]
    clients = [
        processes.Process(target=_run_client, args=(setting, barrier, results))
        for setting in settings
        for _ in range(setting.num_clients)
    ]
    for server in servers:
        server.start()
    try:
        if not all(event.wait(_START_TIMEOUT) for event in ready):
            raise RuntimeError(f"the {settings[0].mode} server did not start")
        for client in clients:
            client.start()
        timeout = _START_TIMEOUT + 10 * settings[0].seconds
        rates = [results.get(timeout=timeout) for _ in clients]
        for client in clients:
            client.join()
        stop.set()
        server_cpu = sum(cpu_seconds.get(timeout=_START_TIMEOUT) for _ in servers)
    finally:
        stop.set()
        for server in servers:
            server.join()
    rate = sum(rate for rate, _ in rates)
    calls = rate * settings[0].seconds
    return _Measured(rate, statistics.mean(cpu for _, cpu in rates), server_cpu / calls)


def _settings(
    mode: str, rows: int, num_servers: int, repetition: int, directory: str, args: Any
) -> list[_Setting]:
    bounds = [args.clients * k // num_servers for k in range(num_servers + 1)]
    return [
        _Setting(
            mode,
            f"unix:{os.path.join(directory, f'{mode}-{rows}-{num_servers}-{repetition}-{k}')}",
            bounds[k + 1] - bounds[k],
            rows,
            args.payload_bytes,
            args.seconds,
        )
        for k in range(num_servers)
    ]


def _measure_all(
    rows: int, num_servers: int, directory: str, args: argparse.Namespace
) -> dict[str, _Measured]:
    """The medians of every mode, measured in turns."""
    found: dict[str, list[_Measured]] = {mode: [] for mode in _MODES}
    for repetition in range(args.repetitions):
        for mode in _MODES:
            settings = _settings(mode, rows, num_servers, repetition, directory, args)
            found[mode].append(_measure(settings))
    return {
        mode: _Measured(*(statistics.median(column) for column in zip(*runs, strict=True)))
        for mode, runs in found.items()
    }


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument(
        "--rows", type=_numbers, default="1,16", help="rows a call, one measurement each"
    )
    parser.add_argument(
        "--servers", type=_numbers, default="1", help="server processes, one measurement each"
    )
    parser.add_argument("--payload_bytes", type=int, default=7056, help="bytes a row")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each mode")
    args = parser.parse_args()
    table = Table(
        title=f"{args.clients} clients, {args.payload_bytes} bytes a row, both ways, Unix socket"
    )
    table.add_column("mode")
    columns = ("servers", "rows a call", "round trips/s", "of bare", "rows/s")
    for column in (*columns, "client CPU, µs/call", "server CPU, µs/call", "calls/s a core"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory(prefix="seed_rl_rpc_") as directory:
        for rows, servers in itertools.product(args.rows, args.servers):
            found = _measure_all(rows, servers, directory, args)
            for mode, (rate, client_cpu, server_cpu) in found.items():
                ratio = f"{rate / found['bare'].calls_per_second:.2f}"
                figures = (f"{servers}", f"{rows}", f"{rate:,.0f}", ratio, f"{rate * rows:,.0f}")
                costs = (f"{client_cpu * 1e6:.0f}", f"{server_cpu * 1e6:.0f}")
                table.add_row(mode, *figures, *costs, f"{1 / server_cpu:,.0f}")
    Console(width=max(110, Console().width)).print(table)


if __name__ == "__main__":
    main()
