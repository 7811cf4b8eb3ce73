"""What the entry point makes of wrong input."""

import signal
import subprocess
import sys
import threading

import gymnasium
import pytest

from seed_rl import main
from seed_rl.user_error import UserError


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no"), AttributeError("no")])
def test_what_a_part_refuses_when_it_is_made_is_the_users_to_mend(error):
    message = r"configuration cannot be used: no .*--verbosity=1"
    with pytest.raises(main.UsageError, match=message), main._setting_up():
        raise error


def test_an_error_that_says_what_to_do_keeps_its_words():
    with pytest.raises(UserError, match=r"^do this$"), main._setting_up():
        raise UserError("do this")
    with pytest.raises(ArithmeticError, match=r"^a bug$"), main._setting_up():
        raise ArithmeticError("a bug")


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
