"""What is installed, and what importing it costs."""

import importlib.metadata
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import seed_rl

ROOT = pathlib.Path(__file__).parents[1]
# Where the folders at the root of the repository are installed.
FOLDERS = {
    "seed_rl": "seed_rl",
    "agents": "seed_rl/agents",
    "configs": "seed_rl/configs",
    "envs": "seed_rl/envs",
    "grpc_service": "seed_rl/grpc_service",
}
DATA_ENDINGS = (".gin", ".csv", ".proto", "py.typed")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
    """A copy of the files that belong to the repository, so that no earlier build is seen."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to know which files belong to it")
    copy = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


def _build(what: str, source: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    isolation = []
    if importlib.util.find_spec("setuptools"):
        isolation = ["--no-isolation", "--skip-dependency-check"]
    command = [
        sys.executable,
        "-m",
        "build",
        f"--{what}",
        *isolation,
        "--outdir",
        str(out),
        str(source),
    ]
    result = subprocess.run(
        command, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, result.stdout
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel_names(source, tmp_path_factory) -> set[str]:
    with zipfile.ZipFile(_build("wheel", source, tmp_path_factory.mktemp("wheel"))) as wheel:
        return set(wheel.namelist())


def _expected_files(source: pathlib.Path) -> set[str]:
    """The paths in the wheel of every module and data file of the root folders."""
    return {
        f"{target}/{path.relative_to(source / folder)}"
        for folder, target in FOLDERS.items()
        for path in (source / folder).rglob("*")
        if path.name.endswith((".py", *DATA_ENDINGS))
    }


def test_wheel_holds_every_module_and_data_file_and_nothing_else(source, wheel_names):
    outside = {name for name in wheel_names if ".dist-info/" not in name}
    assert outside == _expected_files(source)


def test_wheel_holds_the_files_that_users_look_for(wheel_names):
    assert {
        "seed_rl/py.typed",
        "seed_rl/configs/atari_vtrace.gin",
        "seed_rl/envs/data/atari57_scores.csv",
        "seed_rl/envs/data/dmlab30_scores.csv",
        "seed_rl/grpc_service/service.proto",
        "seed_rl/grpc_service/service_pb2.py",
        "seed_rl/agents/vtrace/vtrace.py",
        "seed_rl/main.py",
    } <= wheel_names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)


def test_source_distribution_builds_the_same_wheel(source, wheel_names, tmp_path):
    (tmp_path / "out").mkdir()
    with tarfile.open(_build("sdist", source, tmp_path / "out")) as sdist:
        sdist.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "scripts/run_local.sh", "tests"):
        assert (unpacked / name).exists(), name
    (tmp_path / "wheel").mkdir()
    with zipfile.ZipFile(_build("wheel", unpacked, tmp_path / "wheel")) as wheel:
        assert set(wheel.namelist()) == wheel_names


def test_the_version_is_the_same_everywhere():
    assert importlib.metadata.version("seed-rl") == seed_rl.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## ([0-9.]+)", changelog, re.MULTILINE)
    assert newest is not None and newest[1] == seed_rl.__version__


def _packages_imported_by(statement: str) -> set[str]:
    """The top-level packages that a new interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


HEAVY = {"tensorflow", "keras", "gymnasium", "gym", "ale_py", "cv2", "grpc", "rich"}


def test_importing_the_package_is_cheap():
    assert not _packages_imported_by("import seed_rl") & (HEAVY | {"numpy", "gin"})


@pytest.mark.parametrize(
    "module",
    [
        "seed_rl.actor",
        "seed_rl.config",
        "seed_rl.environment",
        "seed_rl.envs.atari",
        "seed_rl.envs.gym_env",
        "seed_rl.main",
        "seed_rl.structures",
    ],
)
def test_what_an_actor_imports_does_without_tensorflow(module):
    imported = _packages_imported_by(f"import {module}")
    assert "seed_rl" in imported
    assert not imported & {"tensorflow", "keras", "ale_py", "gym", "cv2"}


def test_the_wire_does_without_tensorflow_and_the_rest_of_the_package():
    imported = _packages_imported_by("import seed_rl.grpc_service")
    assert not imported & {"tensorflow", "keras", "gymnasium", "gin"}
    code = (
        "import sys, seed_rl.grpc_service\n"
        "print(*[n for n in sys.modules if n.startswith('seed_rl.')])"
    )
    names = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {n for n in names if not n.startswith("seed_rl.grpc_service")} == {"seed_rl.version"}


@pytest.mark.parametrize("script", ["scripts/run_local.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_can_be_run(script):
    path = ROOT / script
    assert path.stat().st_mode & 0o111, f"{script} is not executable"
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in path.read_text()
