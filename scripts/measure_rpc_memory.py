"""Does the memory of server and client stay flat over many calls?

    python scripts/measure_rpc_memory.py --calls=200000 --clients=2

A server process and some client processes make calls of a batched and of an unbatched function, one
row and several, with an error now and then. The resident memory of the server and of the first
client is printed ten times. Exit code 1 if either grew by more than --tolerance_mb between 25 % and
100 % of the calls; what comes before is warm-up.
"""

import argparse
import dataclasses
import logging
import multiprocessing
import os
import sys
import tempfile
from typing import Any

import numpy as np
import psutil

from seed_rl.grpc_service import Client, RemoteFunctionError, Server, TensorSpec

_OBSERVATION_SHAPE = (84, 84)
_MAX_ROWS = 16
_ERROR_EVERY = 100  # calls
_NUM_REPORTS = 10
_MB = 2**20


@dataclasses.dataclass(frozen=True)
class Report:
    """Resident bytes after a number of calls of the first client."""

    num_calls: int
    server: int
    client: int


def fail(message: np.ndarray) -> None:
    """Bound as a function that always raises."""
    raise ValueError("x" * int(message))


def serve(address: str, ready: Any, stop: Any) -> None:
    """Serves an echo, batched and unbatched, and a function that raises, until `stop`."""
    logging.disable(logging.ERROR)  # a traceback for every error that is provoked here
    frames = TensorSpec((None, *_OBSERVATION_SHAPE), np.uint8)
    with Server(address, max_batch_wait=0.0005) as server:
        for name, batched in (("batched", True), ("unbatched", False)):
            server.bind(
                lambda frames: frames,
                name=name,
                input_signature=(frames,),
                output_signature=frames,
                batched=batched,
            )
        server.bind(fail, input_signature=(TensorSpec((), np.int32),))
        server.start()
        ready.set()
        while not stop.wait(10.0):
            server.statistics()


def make_calls(address: str, server_pid: int, num_calls: int, reports: Any) -> None:
    """Calls in a loop; puts `_NUM_REPORTS + 1` reports."""
    frames = np.zeros((_MAX_ROWS, *_OBSERVATION_SHAPE), np.uint8)
    server, me = psutil.Process(server_pid), psutil.Process()
    every = max(1, num_calls // _NUM_REPORTS)
    with Client(address) as client:
        for index in range(num_calls + 1):
            if index % every == 0:
                reports.put(Report(index, server.memory_info().rss, me.memory_info().rss))
            if index % _ERROR_EVERY == 0:
                try:
                    client.fail(index % 1000)
                except RemoteFunctionError:
                    continue
            method = client.batched if index % 2 else client.unbatched
            num_rows = index % _MAX_ROWS + 1
            answer = method(frames[:num_rows])
            assert answer.shape[0] == num_rows


def measure(num_calls: int, num_clients: int) -> list[Report]:
    """Runs it all, printing as it goes; returns the reports of the first client."""
    processes = multiprocessing.get_context("spawn")
    ready, stop, queue = processes.Event(), processes.Event(), processes.Queue()
    others_queue = processes.Queue()
    with tempfile.TemporaryDirectory(prefix="seed_rl_rpc_") as directory:
        address = f"unix:{os.path.join(directory, 'socket')}"
        server = processes.Process(target=serve, args=(address, ready, stop))
        server.start()
        if not ready.wait(60):
            raise RuntimeError("the server did not start")
        share = num_calls // num_clients
        clients = [
            processes.Process(
                target=make_calls,
                args=(address, server.pid, share, others_queue if index else queue),
            )
            for index in range(num_clients)
        ]
        for client in clients:
            client.start()
        reports: list[Report] = []
        print(f"{'calls':>10} {'server MB':>10} {'client MB':>10}")
        while not reports or reports[-1].num_calls + share // _NUM_REPORTS <= share:
            report = queue.get(timeout=600)
            reports.append(report)
            print(
                f"{report.num_calls * num_clients:>10} {report.server / _MB:>10.1f} "
                f"{report.client / _MB:>10.1f}",
                flush=True,
            )
        stop.set()
        for client in clients:
            client.terminate()
        for process in (*clients, server):
            process.join()
    return reports


def growth(reports: list[Report], what: str) -> float:
    """MB from the report at 25 % of the calls to the last."""
    total = reports[-1].num_calls
    start = next(report for report in reports if report.num_calls * 4 >= total)
    return (getattr(reports[-1], what) - getattr(start, what)) / _MB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200_000, help="of all clients together")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--tolerance_mb", type=float, default=4.0)
    args = parser.parse_args()
    reports = measure(args.calls, args.clients)
    flat = True
    for what in ("server", "client"):
        grown = growth(reports, what)
        flat = flat and grown <= args.tolerance_mb
        verdict = "flat" if grown <= args.tolerance_mb else "NOT flat"
        print(f"{what}: {grown:+.1f} MB between 25 % and 100 % of the calls: {verdict}")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
