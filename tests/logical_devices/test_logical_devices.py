"""Runs the cases that need several logical CPU devices, in processes of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("cases_*.py")))
def test_cases(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file)]
    environment = {**os.environ, "SEED_RL_LOGICAL_CPUS": "4", "TF_CPP_MIN_LOG_LEVEL": "2"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("hosts_*.py")))
def test_hosts(file, free_ports, tmp_path):
    hosts = ",".join(f"localhost:{port}" for port in free_ports(2))
    logs = [tmp_path / f"host_{index}" for index in range(2)]
    processes = []
    try:
        for index, log in enumerate(logs):
            with log.open("w") as output:
                processes.append(_start_host(file, hosts, index, output))
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)


def _start_host(file, hosts, index, output):
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file)],
        env={
            **os.environ,
            "SEED_RL_LOGICAL_CPUS": "3",
            "SEED_RL_HOSTS": hosts,
            "SEED_RL_HOST_INDEX": str(index),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        stdout=output,
        stderr=output,
    )
