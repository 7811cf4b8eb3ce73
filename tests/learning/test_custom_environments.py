"""The example of docs/custom_environments.md, as it is written there."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from in_process import InProcessTraining

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "custom_environments.md"


def blocks(language):
    """The code blocks of the page in a language."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def words_of(command):
    return shlex.split(command.replace("\\\n", " "))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the example's module, from which everything is run."""
    (tmp_path / "catch.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("catch", None)


@pytest.mark.usefixtures("folder")
def test_the_checker_finds_nothing_wrong():
    python, *arguments = words_of(blocks("sh")[0])
    assert pathlib.Path(python).name == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "nothing is wrong" in done.stdout and "warning:" not in done.stdout


@pytest.mark.usefixtures("folder")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent", ["vtrace", "r2d2"])
def test_the_example_is_learned(agent):
    script, environment, written_agent, _, _, *flags = words_of(blocks("sh")[1])
    assert (pathlib.Path(script).name, written_agent) == ("run_local.sh", "vtrace")
    assert all(flag.startswith("--gin_bindings=") for flag in flags)
    bindings = [flag.removeprefix("--gin_bindings=") for flag in flags]
    training = InProcessTraining(f"{environment}_{agent}", bindings, 16, seed=1)
    # Random play catches one in four or so; every ball caught is 1.5.
    training.run(lambda: (training.statistics.recent_mean_return() or -1.0) > 1.0)
    assert training.statistics.recent_mean_return() > 1.0


@pytest.mark.usefixtures("folder")
def test_the_gin_file_adds_to_the_configuration():
    (lines,) = blocks("gin")
    pathlib.Path("my_catch.gin").write_text(lines)
    training = InProcessTraining("gym_vtrace", ["include 'my_catch.gin'"], 2, seed=1)
    assert set(training._environments.observation_space) == {"rows_left", "screen"}
