"""scripts/run_local.sh, with stubs for Python's installer, the learner and the actors."""

import contextlib
import fcntl
import importlib.util
import json
import os
import pathlib
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest

HERE = pathlib.Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's processes")


def wait_until(condition, what: str, timeout: float = 60.0):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError(f"after {timeout} s still not: {what}")


def has_ended(pid: int) -> bool:
    try:  # an orphan's remains may wait a while for whoever adopted it
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Checkout:
    """A checkout with the real scripts, whose Python and whose processes are stubs."""

    def __init__(self, directory: pathlib.Path):
        self.root = directory / "a checkout"
        self.stub = directory / "stub"
        self.stub.mkdir()
        shutil.copytree(SCRIPTS, self.root / "scripts")
        (self.root / "configs").mkdir()
        for name in ("atari_vtrace", "gym_vtrace"):
            (self.root / "configs" / f"{name}.gin").touch()
        for name in ("setup.py", "pyproject.toml"):
            (self.root / name).write_text("first\n")
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory / "home"),
            "SEED_RL_PYTHON": str(HERE / "stub_python.sh"),
            "STUB_DIR": str(self.stub),
            "STUB_MAIN": str(HERE / "stub_main.py"),
            "STUB_REAL_PYTHON": sys.executable,
        }
        self.processes: list[subprocess.Popen] = []

    def start(self, *arguments, script="run_local.sh", cwd="/", **options) -> subprocess.Popen:
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
            **options,
        }
        # Whoever runs the tests in the background, or under nohup, has these ignored, and what a
        # shell finds ignored it can never heed again.
        heed_signals = ["env", "--default-signal=INT,HUP,TERM"]
        process = subprocess.Popen(
            [*heed_signals, str(self.root / "scripts" / script), *map(str, arguments)],
            cwd=cwd,
            env=self.environment,
            **options,
        )
        self.processes.append(process)
        return process

    def run(self, *arguments, **options) -> tuple[int, str, str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def lines(self, file: str) -> list[str]:
        path = self.stub / file
        return path.read_text().splitlines() if path.exists() else []

    def arguments(self, name: str) -> list[list[str]]:
        """What each start of the learner or of an actor was given."""
        parsed = map(json.loads, self.lines("arguments"))
        return [arguments for started, arguments in parsed if started == name]

    def wait_until_up(self, *names: str) -> None:
        wanted = [f"{name} is up" for name in names]

        def all_are_up() -> bool:
            if all(self.lines("events").count(w) >= wanted.count(w) for w in wanted):
                return True
            for process in self.processes:
                if process.poll() not in (None, 0):
                    raise AssertionError(
                        f"a script ended with {process.returncode}: {_words(process)}"
                    )
            return False

        wait_until(all_are_up, f"up: {names}")

    def alive(self) -> list[str]:
        """The processes of the runs that are not gone; what was killed may take a moment."""
        return [line for line in self.lines("pids") if _is_alive(int(line.split()[-1]))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for line in self.lines("pids"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[-1]), signal.SIGKILL)
        for process in self.processes:
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe:
                    pipe.close()


def _words(process: subprocess.Popen) -> str:
    return process.stderr.read() if process.stderr else "(its words were not kept)"


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    yield checkout
    checkout.close()


def flag_values(arguments: list[str], name: str) -> list[str]:
    return [a.partition("=")[2] for a in arguments if a.startswith(f"--{name}=")]


def assert_nothing_is_left(checkout: Checkout) -> None:
    wait_until(lambda: not checkout.alive(), "every process has ended", timeout=5.0)
    for line in checkout.lines("sockets"):
        assert not pathlib.Path(line.split(" ", 1)[1]).parent.exists()


def test_trains_to_the_end_and_leaves_nothing_behind(checkout):
    checkout.environment["STUB_LEARNER"] = "finish"
    status, out, _ = checkout.run("gym", "vtrace", 2, 8, "--seed=7", "--gin_bindings=a.b = 1")
    assert status == 0
    assert "all frames are done" in out  # the learner's standard output is the terminal's
    assert "Training is finished" in out
    (learner,) = checkout.arguments("learner")
    (actor,) = checkout.arguments("actor 1")
    assert flag_values(actor, "task") == ["1"]
    for arguments in (learner, actor):
        assert flag_values(arguments, "num_envs") == ["16"]
        assert flag_values(arguments, "env_batch_size") == ["8"]
        assert flag_values(arguments, "gin_config") == [f"{checkout.root}/configs/gym_vtrace.gin"]
        assert arguments[-2:] == ["--seed=7", "--gin_bindings=a.b = 1"]
    addresses = [flag_values(a, "server_address") for a in (learner, actor)]
    assert addresses[0] == addresses[1]
    (logdir,) = flag_values(learner, "logdir")
    assert pathlib.Path(logdir).parent == checkout.root / "logs"
    assert sorted(p.name for p in pathlib.Path(logdir).glob("*.log")) == [
        "actor_0.log",
        "actor_1.log",
        "learner.log",
    ]
    (socket,) = checkout.lines("sockets")
    assert socket.startswith("700 ")
    assert_nothing_is_left(checkout)


def test_a_long_temporary_directory_does_not_make_the_socket_path_too_long(checkout, tmp_path):
    temporary = tmp_path / ("x" * 100)
    temporary.mkdir()
    checkout.environment.update(STUB_LEARNER="finish", TMPDIR=str(temporary))
    assert checkout.run("gym", "vtrace", 1, 1)[0] == 0
    (socket,) = checkout.lines("sockets")
    assert len(socket.split(" ", 1)[1].encode()) < 108  # sun_path, with its closing zero
    assert_nothing_is_left(checkout)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_learner_first_and_then_the_actors(checkout, sent):
    process = checkout.start("gym", "vtrace", 2, 1, "--gin_bindings=a.b = 'c'")
    checkout.wait_until_up("learner", "actor 0", "actor 1")
    process.send_signal(sent)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    command = out[out.index("To go on:\n") + len("To go on:\n") :]
    (logdir,) = flag_values(checkout.arguments("learner")[0], "logdir")
    assert shlex.split(command) == [
        *(str(checkout.root / "scripts" / "run_local.sh"), "gym", "vtrace", "2", "1"),
        *(f"--logdir={logdir}", "--gin_bindings=a.b = 'c'"),
    ]
    events = checkout.lines("events")[3:]
    assert events[:2] == ["learner is told to stop", "learner has saved"]
    assert sorted(events[2:]) == ["actor 0 is told to stop", "actor 1 is told to stop"]
    assert_nothing_is_left(checkout)


def test_ctrl_c_in_a_terminal(checkout):
    terminal, script_end = pty.openpty()
    process = checkout.start(
        "gym",
        "vtrace",
        1,
        1,
        stdin=script_end,
        stdout=script_end,
        stderr=script_end,
        text=False,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(script_end)
    try:
        checkout.wait_until_up("learner", "actor 0")
        os.write(terminal, b"\x03")
        shown = _read_until_closed(terminal)
        assert process.wait(timeout=20) == 0
    finally:
        os.close(terminal)
    # The learner is asked once, by the script, and nothing reaches the actor before it has saved.
    assert checkout.lines("events")[2:] == [
        "learner is told to stop",
        "learner has saved",
        "actor 0 is told to stop",
    ]
    assert "Stopped. To go on:" in shown
    assert_nothing_is_left(checkout)


def _read_until_closed(terminal: int) -> str:
    chunks = []
    while select.select([terminal], [], [], 20)[0]:
        try:
            chunks.append(os.read(terminal, 65536))
        except OSError:
            break
    return b"".join(chunks).decode()


def test_a_learner_that_does_not_stop_is_killed(checkout):
    checkout.environment["STUB_LEARNER"] = "hang"
    process = checkout.start("gym", "vtrace", 1, 1)
    checkout.wait_until_up("learner", "actor 0")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert err == (
        "The learner did not stop within 9 s and was killed: the newest checkpoint may be older.\n"
    )
    assert_nothing_is_left(checkout)


def test_a_second_signal_ends_everything_at_once(checkout):
    checkout.environment["STUB_LEARNER"] = "hang"
    process = checkout.start("gym", "vtrace", 1, 1)
    checkout.wait_until_up("learner", "actor 0")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "learner is told to stop" in checkout.lines("events"), "the first was seen")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert_nothing_is_left(checkout)


def test_a_reader_that_goes_away_does_not_cost_the_checkpoint(checkout):
    process = checkout.start("gym", "vtrace", 1, 1)
    checkout.wait_until_up("learner", "actor 0")
    process.stdout.close()
    (actor,) = [line for line in checkout.lines("pids") if line.startswith("actor")]
    os.kill(int(actor.split()[-1]), signal.SIGKILL)
    checkout.wait_until_up("actor 0", "actor 0")  # of which there was something to say
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    assert "learner has saved" in checkout.lines("events")
    assert_nothing_is_left(checkout)


def test_a_learner_that_dies_ends_the_run_and_its_last_words_are_shown(checkout):
    checkout.environment["STUB_LEARNER"] = "crash"
    status, _, err = checkout.run("gym", "vtrace", 2, 1)
    assert status == 3
    assert "failed with exit code 3" in err
    assert "ValueError: the model is upside down" in err
    assert_nothing_is_left(checkout)


def test_an_actor_that_dies_is_started_again(checkout):
    checkout.environment["STUB_ACTOR"] = "crash"
    process = checkout.start("gym", "vtrace", 1, 4, "--logdir", checkout.root / "here")
    checkout.wait_until_up("learner", "actor 0")
    first, second = checkout.arguments("actor 0")
    assert first == second
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert "Actor 0 died with exit code 1 and starts again in 1 s" in out
    assert "RuntimeError: the emulator is on fire" in out
    assert "on fire" in (checkout.root / "here" / "actor_0.log").read_text()
    assert_nothing_is_left(checkout)


def test_an_actor_that_is_killed_is_started_again(checkout):
    process = checkout.start("gym", "vtrace", 1, 1)
    checkout.wait_until_up("learner", "actor 0")
    (actor,) = [line for line in checkout.lines("pids") if line.startswith("actor")]
    (engine,) = [line for line in checkout.lines("pids") if line.startswith("child of actor")]
    os.kill(int(actor.split()[-1]), signal.SIGKILL)
    checkout.wait_until_up("actor 0", "actor 0")
    wait_until(lambda: has_ended(int(engine.split()[-1])), "what the killed actor had started ends")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert "Actor 0 died with exit code 137" in out
    assert err == ""  # bash does not report it a second time, in its own words
    assert_nothing_is_left(checkout)


def test_two_runs_side_by_side_share_nothing(checkout):
    checkout.environment["STUB_INSTALL_SECONDS"] = "0.5"
    processes = [checkout.start("gym", "vtrace", 1, 1) for _ in range(2)]
    checkout.wait_until_up("learner", "learner", "actor 0", "actor 0")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.communicate(timeout=20)
        assert process.returncode == 0
    learners = checkout.arguments("learner")
    for flag in ("logdir", "server_address"):
        assert len({flag_values(arguments, flag)[0] for arguments in learners}) == 2
    # One of them installed, and the other waited for it.
    assert [line.split()[0] for line in checkout.lines("calls")] == ["venv", "pip", "pip"]
    assert_nothing_is_left(checkout)


def test_another_run_may_begin_to_set_up_while_this_one_looks(checkout, tmp_path):
    # An `ls` of our own is that other run: it makes its lock just as the directory is listed.
    (tmp_path / "bin").mkdir()
    ls = tmp_path / "bin" / "ls"
    ls.write_text(
        f'#!/bin/sh\n: >"{checkout.root}/.venv/seed_rl.lock"\nexec {shutil.which("ls")} "$@"\n'
    )
    ls.chmod(0o755)
    checkout.environment["PATH"] = f"{ls.parent}:{checkout.environment['PATH']}"
    checkout.environment["STUB_LEARNER"] = "finish"
    status, _, err = checkout.run("gym", "vtrace", 1, 1)
    assert (status, err) == (0, "")


def test_two_runs_cannot_write_to_one_logdir(checkout, tmp_path):
    first = checkout.start("gym", "vtrace", 1, 1, f"--logdir={tmp_path}/logs")
    checkout.wait_until_up("learner")
    status, _, err = checkout.run("gym", "vtrace", 1, 1, "--logdir=logs", cwd=tmp_path)
    assert status == 1
    assert f"another run is writing to {tmp_path}/logs" in err
    assert len(checkout.arguments("learner")) == 1
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=20)
    # And once it has ended, the run can be continued there.
    checkout.environment["STUB_LEARNER"] = "finish"
    assert checkout.run("gym", "vtrace", 1, 1, "--logdir=logs", cwd=tmp_path)[0] == 0


def test_tensorboard_starts_on_demand_and_ends_with_the_run(checkout):
    process = checkout.start("gym", "vtrace", 1, 1, "--tensorboard", "--seed", 3)
    for line in process.stdout:
        if "TensorBoard: http://localhost:12345/" in line:
            break
    else:
        pytest.fail("the address was not said")
    checkout.wait_until_up("learner", "actor 0")
    assert checkout.arguments("learner")[0][-2:] == ["--seed", "3"]
    assert any(line.startswith("tensorboard") for line in checkout.alive())
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert "--tensorboard" in shlex.split(out[out.index("To go on:") :])
    assert_nothing_is_left(checkout)


def installs(checkout: Checkout) -> list[str]:
    """The requirement of each installation."""
    begun = [line for line in checkout.lines("calls") if line.startswith("pip begins")]
    return [line.split("--editable ")[1] for line in begun]


def test_installs_once_and_again_when_it_has_to(checkout):
    checkout.environment["STUB_LEARNER"] = "finish"
    root = checkout.root
    for environment, expected in (
        ("gym", [f"{root}"]),
        ("gym", [f"{root}"]),
        ("atari", [f"{root}", f"{root}[atari]"]),
        ("gym", [f"{root}", f"{root}[atari]"]),
        ("atari", [f"{root}", f"{root}[atari]"]),
    ):
        (checkout.stub / "events").unlink(missing_ok=True)
        assert checkout.run(environment, "vtrace", 1, 1)[0] == 0
        assert installs(checkout) == expected
    (root / "setup.py").write_text("second\n")
    (checkout.stub / "events").unlink()
    assert checkout.run("atari", "vtrace", 1, 1)[0] == 0
    assert installs(checkout)[2:] == [f"{root}[atari]"]
    assert [line for line in checkout.lines("calls") if line.startswith("venv")] == [
        f"venv {root}/.venv"
    ]


def test_only_the_first_installation_is_said_to_take_long(checkout):
    checkout.environment["STUB_LEARNER"] = "finish"
    venv = f"{checkout.root}/.venv"
    first, second = (checkout.run(env, "vtrace", 1, 1)[1] for env in ("gym", "atari"))
    assert f"Installing the package into {venv} … The first time takes some minutes" in first
    assert f"Installing the package with what atari needs into {venv} …\n" in second


def test_an_installation_that_failed_is_tried_again(checkout):
    checkout.environment["STUB_INSTALL_FAILS"] = "yes"
    status, out, err = checkout.run("gym", "vtrace", 1, 1)
    assert status == 1
    assert "no such package" in out and "could not install the package" in err
    del checkout.environment["STUB_INSTALL_FAILS"]
    checkout.environment["STUB_LEARNER"] = "finish"
    assert checkout.run("gym", "vtrace", 1, 1)[0] == 0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_installation(checkout, sent):
    checkout.environment["STUB_INSTALL_SECONDS"] = "300"
    process = checkout.start("gym", "vtrace", 1, 1)
    wait_until(lambda: installs(checkout), "the installation has begun")
    (pip,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.name() == "sleep"
    ]
    process.send_signal(sent)
    process.communicate(timeout=20)
    assert process.returncode == 128 + sent
    assert not _is_alive(pip.pid)


def test_refuses_a_directory_that_is_no_virtual_environment(checkout, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    checkout.environment["SEED_RL_VENV"] = str(tmp_path / "mine")
    status, _, err = checkout.run("gym", "vtrace", 1, 1)
    assert status == 1
    assert "neither empty nor a virtual environment" in err
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("echo 3.9", "is not a Python of version 3.10, 3.11, 3.12, 3.13"),
        ("echo 3.14", "is not a Python of version 3.10, 3.11, 3.12, 3.13"),
        ("exit 1", "is not a Python of version"),
        (
            'case "$2" in *ensurepip*) exit 1;; *) echo 3.12;; esac',
            "apt-get install python3.12-venv",
        ),
    ],
)
def test_says_what_is_wrong_with_python(checkout, tmp_path, program, message):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    checkout.environment["SEED_RL_PYTHON"] = str(python)
    status, _, err = checkout.run("gym", "vtrace", 1, 1)
    assert status == 1
    assert message in err
    assert not checkout.lines("arguments")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected at least 4 arguments, got 0"),
        (("gym", "vtrace", 2), "expected at least 4 arguments, got 3"),
        (("gym", "nothing", 2, 8), "there is no configuration configs/gym_nothing.gin"),
        (("../configs/gym", "vtrace", 2, 8), "there is no configuration"),
        (("gym", "vtrace", 0, 8), "NUM_ACTORS must be a positive integer, got '0'"),
        (("gym", "vtrace", "two", 8), "NUM_ACTORS must be a positive integer, got 'two'"),
        (("gym", "vtrace", 2, "1.5"), "ENVS_PER_ACTOR must be a positive integer, got '1.5'"),
        (("gym", "vtrace", 2, -1), "ENVS_PER_ACTOR must be a positive integer, got '-1'"),
        (("gym", "vtrace", 2, 8, "more"), "unexpected argument 'more'"),
        (("gym", "vtrace", 2, 8, "--num_envs=3"), "--num_envs is set by this script"),
        (("gym", "vtrace", 2, 8, "--logdir"), "--logdir needs a directory"),
        (("gym", "vtrace", 2, 8, "--logdir="), "--logdir needs a directory"),
    ],
)
def test_wrong_arguments_get_one_message_and_the_usage(checkout, arguments, message):
    status, out, err = checkout.run(*arguments)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[0]
    assert "Usage: run_local.sh ENV AGENT" in err
    assert "  atari vtrace\n  gym vtrace\n" in err  # what exists
    assert not checkout.lines("calls")


@pytest.mark.parametrize("arguments", [("-h",), ("--help",), ("gym", "vtrace", 2, 8, "--help")])
def test_help(checkout, arguments):
    status, out, err = checkout.run(*arguments)
    assert (status, err) == (0, "")
    assert "Usage: run_local.sh ENV AGENT NUM_ACTORS ENVS_PER_ACTOR" in out


def test_works_through_a_symbolic_link(checkout, tmp_path):
    checkout.environment["STUB_LEARNER"] = "finish"
    link = tmp_path / "train"
    link.symlink_to(checkout.root / "scripts" / "run_local.sh")
    assert (
        subprocess.run(
            [link, "gym", "vtrace", "1", "1"], env=checkout.environment, timeout=60, check=False
        ).returncode
        == 0
    )


def test_a_configuration_may_name_its_agent_itself(checkout):
    checkout.environment["STUB_LEARNER"] = "finish"
    config = checkout.root / "configs" / "big_match.gin"
    config.write_text("experiment.agent = 'seed_rl.agents.vtrace.agent:VTraceAgent'\n")
    assert checkout.run("big_match", "vtrace", 1, 1)[0] == 0
    (arguments,) = checkout.arguments("learner")
    assert f"--gin_config={config}" in arguments
    status, _, err = checkout.run("big_match", "r2d2", 1, 1)
    assert status == 2 and "there is no configuration" in err
    assert "  big_match vtrace\n" in err


@pytest.mark.skipif(
    importlib.util.find_spec("gfootball") is not None, reason="football's engine is installed"
)
def test_football_without_its_engine(checkout):
    (checkout.root / "configs" / "football_vtrace.gin").touch()
    status, _, err = checkout.run("football", "vtrace", 1, 1)
    assert status == 1
    assert "engine is not installed" in err and "scripts/install_football.sh" in err
    assert installs(checkout) == [f"{checkout.root}[football]"]
    assert not checkout.arguments("learner")


def test_football_with_its_engine(checkout, tmp_path):
    (tmp_path / "gfootball.py").touch()
    checkout.environment |= {"STUB_LEARNER": "finish", "PYTHONPATH": str(tmp_path)}
    (checkout.root / "configs" / "football_vtrace.gin").touch()
    assert checkout.run("football", "vtrace", 1, 1)[0] == 0
