"""Round trips a second over the wire, beside bare gRPC with the same payload.

    python -m seed_rl.benchmarks.rpc --clients=4 --rows=1,16 --payload_bytes=7056 --seconds=3

Every client is a process that calls an echo in a loop, over a Unix socket; the server is a process
of its own. `bare` is grpcio by itself: a handler on grpc.aio that returns the bytes it reads, and
the synchronous stub. `unbatched` and `batched` are this package's server and client, where a batch
is full when every client has called. Measured in turns, the median of the repetitions counts.
"""

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

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


def _serve(setting: _Setting, ready: Any, stop: Any) -> None:
    if setting.mode == "bare":
        asyncio.run(_serve_bare(setting.address, ready, stop))
        return
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


def _measure(setting: _Setting) -> tuple[float, float]:
    """(round trips a second of all clients together, client CPU seconds a round trip)."""
    processes = multiprocessing.get_context("spawn")
    ready, stop = processes.Event(), processes.Event()
    barrier, results = processes.Barrier(setting.num_clients), processes.Queue()
    server = processes.Process(target=_serve, args=(setting, ready, stop))
    clients = [
        processes.Process(target=_run_client, args=(setting, barrier, results))
        for _ in range(setting.num_clients)
    ]
    server.start()
    try:
        if not ready.wait(_START_TIMEOUT):
            raise RuntimeError(f"the {setting.mode} server did not start")
        for client in clients:
            client.start()
        timeout = _START_TIMEOUT + 10 * setting.seconds
        rates = [results.get(timeout=timeout) for _ in clients]
        for client in clients:
            client.join()
    finally:
        stop.set()
        server.join()
    return sum(rate for rate, _ in rates), statistics.mean(cpu for _, cpu in rates)


def _measure_all(
    rows: int, directory: str, args: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Median (round trips a second, client CPU seconds) of every mode, measured in turns."""
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in _MODES}
    for repetition in range(args.repetitions):
        for mode in _MODES:
            address = f"unix:{os.path.join(directory, f'{mode}-{rows}-{repetition}')}"
            setting = _Setting(mode, address, args.clients, rows, args.payload_bytes, args.seconds)
            found[mode].append(_measure(setting))
    return {
        mode: (statistics.median(r for r, _ in runs), statistics.median(c for _, c in runs))
        for mode, runs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--rows", default="1,16", help="rows a call, one measurement each")
    parser.add_argument("--payload_bytes", type=int, default=7056, help="bytes a row")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each mode")
    args = parser.parse_args()
    table = Table(
        title=f"{args.clients} clients, {args.payload_bytes} bytes a row, both ways, Unix socket"
    )
    table.add_column("mode")
    for column in ("rows a call", "round trips/s", "of bare", "rows/s", "client CPU, µs/call"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory(prefix="seed_rl_rpc_") as directory:
        for rows in map(int, args.rows.split(",")):
            found = _measure_all(rows, directory, args)
            for mode, (rate, cpu) in found.items():
                ratio = f"{rate / found['bare'][0]:.2f}"
                figures = (str(rows), f"{rate:,.0f}", ratio, f"{rate * rows:,.0f}")
                table.add_row(mode, *figures, f"{cpu * 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
