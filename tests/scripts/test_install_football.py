"""scripts/install_football.sh, with stubs for Debian's tools; it installs and compiles nothing."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "install_football.sh"
VERSION = "{}.{}".format(*sys.version_info)
BOOSTS = {
    f"3.{path.name.removeprefix('libboost_python3').removesuffix('.so')}"
    for path in pathlib.Path("/usr/lib").glob("*/libboost_python3*.so")
}
TOOLS = (
    "bash",
    "cat",
    "cksum",
    "dirname",
    "env",
    "grep",
    "head",
    "mkdir",
    "readlink",
    "sed",
    "sort",
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


class Machine:
    """What is on PATH, and nothing else."""

    def __init__(self, directory: pathlib.Path):
        self._bin = directory / "bin"
        self._bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self._bin / tool).symlink_to(found)
        self.calls = directory / "calls"
        self.environment = {
            "PATH": str(self._bin),
            "HOME": str(directory / "home"),
            "CALLS": str(self.calls),
            "SEED_RL_VENV": str(directory / "venv"),
            "SEED_RL_PYTHON": sys.executable,
        }

    def add(self, name: str, *lines: str) -> None:
        """A command of these lines, which notes how it was called."""
        path = self._bin / name
        path.write_text("\n".join(["#!/bin/sh", f'echo "{name} $*" >>"$CALLS"', *lines, ""]))
        path.chmod(0o755)

    def add_debian(self, python_version: str) -> None:
        self.add("apt-get", '[ "$1" = update ] || exit 100')
        self.add("dpkg-query", "case $* in *cmake*) echo installed;; esac")
        self.add("apt-cache", f"echo 'Version: {python_version}.2-1+b1'")
        self.add("sudo", 'exec "$@"')

    def run(self, *arguments: str) -> tuple[int, str, str]:
        result = subprocess.run(
            [SCRIPT, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return result.returncode, result.stdout, result.stderr


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_help(machine):
    status, out, err = machine.run("--help")
    assert (status, err) == (0, "")
    assert "libboost-python-dev" in out and "gfootball==2.10.2" in out


def test_arguments_are_refused(machine):
    status, out, err = machine.run("--now")
    assert (status, out) == (1, "")
    assert "takes no arguments, got '--now'" in err


def test_without_apt_get(machine):
    status, out, err = machine.run()
    assert (status, out) == (1, "")
    assert "finds no apt-get" in err and "libsdl2-gfx-dev" in err and "docs/football.md" in err


@pytest.mark.skipif(VERSION in BOOSTS, reason="the engine can have this Python")
def test_another_python_than_that_of_boost(machine):
    machine.add_debian("3.9")
    status, out, err = machine.run()
    assert (status, out) == (1, "")
    assert f"is Python {VERSION}" in err and "Set SEED_RL_PYTHON to a" in err


@pytest.mark.skipif(bool(BOOSTS) and VERSION not in BOOSTS, reason="needs Boost.Python's Python")
def test_says_what_it_will_do_and_what_apt_get_could_not(machine):
    machine.add_debian(VERSION)
    status, out, err = machine.run()
    assert status == 1
    packages = "g++ make libopengl-dev libsdl2-image-dev"  # cmake is there
    assert out.startswith(f"To be done:\n  - install Debian packages: {packages} ")
    assert f"extra [football] into {machine.environment['SEED_RL_VENV']}" in out
    assert "apt-get could not install them" in err
    calls = machine.calls.read_text().splitlines()
    (install,) = [call for call in calls if call.startswith("apt-get install")]
    assert "--no-install-recommends g++ make libopengl-dev" in install
    assert any(call.startswith("sudo") for call in calls) == (os.geteuid() != 0)
    assert not pathlib.Path(machine.environment["SEED_RL_VENV"]).exists()
