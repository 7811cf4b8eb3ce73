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
