"""The learner is killed at any moment and goes on from its last good checkpoint."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import tensorflow as tf
from real_processes import HERE, PATIENCE, wait_until

SCRIPTS = HERE.parents[1] / "scripts"
END_WITHIN = 10.0  # seconds, from the first signal

SMALL = [
    "Learner.save_checkpoint_secs=0.3",
    "Learner.log_secs=1.0",
    "Learner.total_frames=10**9",
]
VTRACE = [*SMALL, "AutoNetwork.hidden_sizes=(8,)"]
R2D2 = [
    *SMALL,
    "R2D2Agent.unroll_length=8",
    "R2D2Agent.burn_in=2",
    "R2D2Agent.batch_size=4",
    "R2D2Agent.min_replay_size=8",
    "R2D2Agent.replay_size=100",
    "R2D2Agent.replay_ratio=1",
    # Never: so that the target network is, as long as the run goes on, what it began with.
    "R2D2Agent.target_update_period=10**9",
    "DuelingLSTMDQNAuto.lstm_units=8",
    "DuelingLSTMDQNAuto.joint_size=8",
]


def flags(bindings):
    # gin knows no powers.
    return [f"--gin_bindings={b.replace('10**9', '1_000_000_000')}" for b in bindings]


class Run:
    """A learner and its actors, of two environments each, on CartPole."""

    def __init__(self, processes, config, bindings, num_actors):
        self._processes = processes
        self.logdir = processes.directory / "log"
        self.checkpoints = self.logdir / "checkpoints"
        self._flags = [
            f"--num_envs={2 * num_actors}",
            "--env_batch_size=2",
            f"--gin_config={config}.gin",
            *flags(bindings),
        ]
        self.actors = [
            processes.start(f"actor{task}", "--run_mode=actor", f"--task={task}", *self._flags)
            for task in range(num_actors)
        ]

    def learner(self, name, **options):
        return self._processes.start(
            name, "--run_mode=learner", f"--logdir={self.logdir}", *self._flags, **options
        )

    def saved(self, number=-1):
        """The contents of a checkpoint, the newest that is whole unless said otherwise."""
        return Saved(self.checkpoints / f"ckpt-{self.numbers()[number]}")

    def numbers(self):
        return sorted(int(path.stem[5:]) for path in self.checkpoints.glob("ckpt-*.index"))

    def wait_until_trained_beyond(self, training_steps, learner):
        def is_beyond():
            assert learner.poll() is None, "the learner ended"
            try:
                return self.numbers() and self.saved().training_steps > training_steps + 10
            except (tf.errors.OpError, ValueError):  # it was removed while it was read
                return False

        wait_until(is_beyond, f"a checkpoint beyond {training_steps} training steps")


class Saved:
    """What a checkpoint holds, read at once: a learner that runs removes it soon."""

    def __init__(self, path: pathlib.Path):
        reader = tf.train.load_checkpoint(str(path))
        end = "/.ATTRIBUTES/VARIABLE_VALUE"
        self.values = {
            name.removesuffix(end): reader.get_tensor(name)
            for name in reader.get_variable_to_shape_map()
            if name.endswith(end)
        }
        self.frames = int(self.values["frames"])
        self.training_steps = int(self.values["training_steps"])

    def target_network(self):
        return {k: v for k, v in self.values.items() if k.startswith("target_network/")}


def resumed_at(log):
    """(frames, training steps) that a learner says it goes on from."""
    ((frames, steps),) = re.findall(r"resumed at (\d+) frames, (\d+) training steps", log)
    return int(frames), int(steps)


def test_a_learner_that_is_killed_again_and_again_goes_on(processes):
    run = Run(processes, "gym_vtrace", VTRACE, num_actors=2)

    first = run.learner("first")
    run.wait_until_trained_beyond(0, first)
    processes.wait_for("first", "saved checkpoint", count=3)
    first.kill()
    first.wait()
    good, newest = run.saved(-2), run.numbers()[-1]
    (data,) = run.checkpoints.glob(f"ckpt-{newest}.data-*")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])

    # From the last good one; and it dies with a checkpoint half written.
    second = run.learner(
        "second",
        main=[str(HERE / "dying_learner.py")],
        DIE_BEYOND=str(good.training_steps),
    )
    assert second.wait(PATIENCE) == -signal.SIGKILL
    log = processes.log("second")
    assert log.count("skipping a checkpoint that cannot be restored") == 1
    assert f"ckpt-{newest}" in log[log.index("skipping") :].splitlines()[0]
    assert resumed_at(log) == (good.frames, good.training_steps)
    assert [path.name for path in run.checkpoints.glob("*_temp")]  # it was in the middle
    before = run.saved()
    assert before.frames > good.frames
    assert before.training_steps > good.training_steps

    third = run.learner("third")
    run.wait_until_trained_beyond(before.training_steps, third)
    log = processes.log("third")
    assert resumed_at(log) == (before.frames, before.training_steps)
    assert "skipping" not in log
    assert all(actor.poll() is None for actor in run.actors)  # the same ones all the time
    for actor in run.actors:
        actor.send_signal(signal.SIGINT)
        actor.wait(END_WITHIN)
    third.send_signal(signal.SIGTERM)
    assert third.wait(END_WITHIN) == 0
    assert [actor.returncode for actor in run.actors] == [0, 0]
    assert not list(run.checkpoints.glob("*_temp"))
    assert run.saved().training_steps >= before.training_steps + 10
    assert int(run.saved().values["optimizer/_iterations"]) == run.saved().training_steps
    assert run.saved().frames > before.frames
    assert not (processes.directory / "s" / "learner").exists()


@pytest.fixture
def venv(tmp_path):
    """A virtual environment, as run_local.sh makes them, with what runs the tests."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    fingerprint = subprocess.run(
        ["bash", "-c", f"source {shlex.quote(str(SCRIPTS / 'common.sh'))}; fingerprint"],
        capture_output=True,
        check=True,
    ).stdout
    (venv / "seed_rl.installed").write_bytes(fingerprint)
    return venv


def processes_of(directory):
    """The processes that were started for a run in this directory."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        mine = any(str(directory) in word for word in process.info["cmdline"] or [])
        if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_r2d2_goes_on_under_run_local_with_its_optimizer_and_target_network(processes, venv):
    run = Run(processes, "gym_r2d2", R2D2, num_actors=1)
    first = run.learner("first")
    run.wait_until_trained_beyond(0, first)
    first.kill()
    first.wait()
    (actor,) = run.actors
    actor.kill()
    actor.wait()
    before = run.saved()
    assert int(before.values["optimizer/_iterations"]) == before.training_steps

    temporary = processes.directory / "tmp"
    temporary.mkdir()
    heed_signals = ["env", "--default-signal=INT,HUP,TERM"]
    with open(processes.log_path("script"), "wb") as log:
        script = subprocess.Popen(
            [
                *[*heed_signals, str(SCRIPTS / "run_local.sh"), "gym", "r2d2", "2", "2"],
                *[f"--logdir={run.logdir}", "--seed=1234", *flags(R2D2)],
            ],
            env={**os.environ, "SEED_RL_VENV": str(venv), "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        run.wait_until_trained_beyond(before.training_steps, script)
        log = (run.logdir / "learner.log").read_text()
        assert resumed_at(log) == (before.frames, before.training_steps)
        script.send_signal(signal.SIGINT)
        assert script.wait(END_WITHIN) == 0, processes.log("script")
    finally:
        script.terminate()
        script.wait()
    after = run.saved()
    assert after.frames > before.frames
    assert after.training_steps > before.training_steps + 10
    assert int(after.values["optimizer/_iterations"]) == after.training_steps
    assert after.target_network().keys() == before.target_network().keys()
    for name, value in before.target_network().items():
        np.testing.assert_array_equal(after.target_network()[name], value)
    assert not processes_of(processes.directory)
    assert not list(temporary.iterdir())  # no socket
