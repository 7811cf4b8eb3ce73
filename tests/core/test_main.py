"""What the entry point makes of wrong input."""

import os
import signal
import subprocess
import sys
import threading

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from seed_rl import main
from seed_rl.grpc_service import Credentials, Server, TensorSpec
from seed_rl.inference import TrainingFinished, inference_input_specs, inference_output_specs
from seed_rl.user_error import UserError


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no"), AttributeError("no")])
def test_what_a_part_refuses_when_it_is_made_is_the_users_to_mend(error):
    message = r"configuration cannot be used: no .*--verbosity=1"
    with pytest.raises(main.UsageError, match=message), main._setting_up():
        raise error


def test_what_is_too_large_is_the_users_to_mend():
    def too_many():
        tf.zeros([2**40, 2**20])

    def infinite():
        int(float("inf"))

    for too_much in (too_many, infinite):
        message = "more than this machine can hold: "
        with pytest.raises(main.UsageError, match=message), main._setting_up():
            too_much()


def test_an_error_that_says_what_to_do_keeps_its_words():
    with pytest.raises(UserError, match=r"^do this$"), main._setting_up():
        raise UserError("do this")
    with pytest.raises(ArithmeticError, match=r"^a bug$"), main._setting_up():
        raise ArithmeticError("a bug")


@pytest.mark.parametrize(
    ("given", "video", "expected"),
    [(None, None, 100), (None, "play.mp4", 1), (7, "play.mp4", 7), (7, None, 7)],
)
def test_a_video_is_of_one_episode_unless_more_are_asked_for(given, video, expected):
    assert main._num_episodes(given, video) == expected


def test_what_gin_adds_is_made_readable():
    error = ValueError("too\nlow\n  In call to configurable 'MLP' (<class 'a.b.MLP'>)")
    assert main._one_line(error) == "too low [in MLP]"


def test_a_package_that_gymnasium_misses_is_the_users_to_install():
    assert issubclass(gymnasium.error.DependencyNotInstalled, main._user_errors())


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--server_address=", "error: --server_address is empty"),
        ("--gin_bindings=gym_env.env_id=3", "error: gym_env.env_id must be a text in quotes"),
        ("--num_envs=0", "error: flag --num_envs=0: 0 is not a positive integer"),
        ("--num_envs=many", "error: flag --num_envs=many: invalid literal"),
        ("--gin_bindigs=x=1", "error: Unknown command line flag 'gin_bindigs'. Did you mean: gin_"),
        ("--task=2", "error: --task=2 with --env_batch_size=8 needs environments 16 to 23"),
    ],
)
def test_an_actor_with_wrong_flags_says_so_in_one_line(flag, expected):
    command = [sys.executable, "-m", "seed_rl.main", "--run_mode=actor", "--gin_config=gym_vtrace"]
    done = subprocess.run([*command, flag], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1


def test_an_actor_leaves_in_time_whatever_it_waits_for(monkeypatch):
    left = []
    done = threading.Event()
    monkeypatch.setattr(main, "leave", lambda code: (left.append(code), done.set()))
    signals = main.StopSignals()
    signals.there_is_something_to_end(leave_within=0.01)
    signals._handle(signal.SIGTERM, None)
    assert signals.stop.is_set()
    assert done.wait(30.0)
    assert left == [0]


@pytest.mark.parametrize(("saves", "code"), [(True, 143), (False, 0)])
def test_who_should_have_saved_says_that_it_was_stopped_too_early(monkeypatch, saves, code):
    left = []

    def leave(code):
        left.append(code)
        raise SystemExit

    monkeypatch.setattr(main, "leave", leave)
    with pytest.raises(SystemExit):
        main.StopSignals(saves)._handle(signal.SIGTERM, None)
    assert left == [code]


def _run_main(*flags, **environment):
    command = [sys.executable, "-m", "seed_rl.main", "--gin_config=gym_vtrace", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("part", ["--run_mode=actor", "--run_mode=learner"])
def test_beyond_this_machine_the_refusal_names_the_flag(part, tmp_path):
    done = _run_main(part, "--server_address=192.0.2.1:80", f"--logdir={tmp_path}")
    assert done.returncode == 2
    assert "--insecure" in done.stderr and "insecure=True" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "error: 192.0.2.1:80: 192.0.2.1 reaches beyond this"
    )


@pytest.mark.parametrize("where", ["file", "environment"])
def test_an_actor_shows_the_token_of_a_file_or_of_the_environment(tmp_path, where):
    """And a wrong one ends it at once, with a message that does not show it."""
    right, wrong = "right-0123456789", "wrong-0123456789"
    asked = threading.Event()

    def inference(*args):
        asked.set()
        raise TrainingFinished("enough")

    server = Server("127.0.0.1:0", credentials=Credentials(token=right), num_environments=8)
    server.bind(
        inference,
        input_signature=inference_input_specs(TensorSpec((4,), np.float32)),
        output_signature=inference_output_specs(TensorSpec((), np.int32)),
    )
    outcomes = []
    with server:
        server.start()
        for token in (wrong, right):
            file = tmp_path / token
            file.write_text(token)
            flags = [f"--token_file={file}"] if where == "file" else []
            environment = {"SEED_RL_TOKEN": token} if where == "environment" else {}
            done = _run_main(
                *("--run_mode=actor", "--num_envs=8", f"--server_address={server.addresses[0]}"),
                *flags,
                **environment,
            )
            outcomes.append((done.returncode, asked.is_set()))
            said = (done.stdout + done.stderr).replace(str(tmp_path / token), "")
            assert token not in said
    assert outcomes == [(2, False), (0, True)]
