"""Traces of training steps."""

import pytest
import tensorflow as tf

from seed_rl.profiling import StepProfiler, parse_steps
from seed_rl.user_error import UserError


def test_steps_are_read_from_the_flag():
    assert parse_steps("100:110") == range(100, 110)
    assert len(parse_steps("")) == 0


@pytest.mark.parametrize("text", ["100", "5:5", "7:3", "a:b", "1:2:3", "-1:4", ":4"])
def test_other_forms_are_refused(text):
    with pytest.raises(UserError, match="such as 100:110"):
        parse_steps(text)


@pytest.fixture
def traced(monkeypatch):
    """What is done to TensorFlow's profiler."""
    calls = []
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda logdir: calls.append(logdir))
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: calls.append("stop"))
    return calls


def test_the_steps_are_traced_and_no_others(traced):
    profiler = StepProfiler(range(2, 4), "logs")
    seen = []
    for step in range(6):
        profiler.before_step(step)
        seen.append(list(traced))
    profiler.close()
    nothing, running, written = [], ["logs"], ["logs", "stop"]
    assert seen == [nothing, nothing, running, running, written, written]


def test_a_step_without_a_batch_is_asked_for_again_and_traced_once(traced):
    profiler = StepProfiler(range(2), "logs")
    for step in (0, 0, 0, 1, 1):
        profiler.before_step(step)
    assert traced == ["logs"]
    profiler.close()
    profiler.close()
    assert traced == ["logs", "stop"]


def test_no_steps_no_trace(traced):
    profiler = StepProfiler(range(0), "logs")
    profiler.before_step(0)
    profiler.close()
    assert traced == []
