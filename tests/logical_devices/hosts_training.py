"""Training on two hosts, whose devices each train too: the same as on one device alone.

Both hosts run this file at the same time, and each compares what it has learned from its half of
every batch with what one device learns from all of it.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from cases_training import APPROXIMATE, CLOSE, Training, check_same

from seed_rl.hosts import ALONE
from seed_rl.unrolls import split_batch
from seed_rl.user_error import UserError

NUM_HOSTS = 2


class _Step(NamedTuple):
    """One step: what trained, and what Trainer.step gave."""

    hosts: Any
    one: Training
    here: Training
    of_one: Any
    of_here: Any


@pytest.fixture
def train(make_agent, make_batch, place):
    """Returns a function that trains this host and one device alone, for so many steps."""

    def make(name, num_devices, num_steps, change=lambda batch: None, **options):
        placement = place(num_devices)
        hosts = placement.hosts
        assert hosts.size == NUM_HOSTS
        one = Training(make_agent, name, place(1)._replace(hosts=ALONE), **options)
        here = Training(make_agent, name, placement, batch_size=4, **options)
        for number in range(num_steps):
            batch = make_batch(name, number)
            change(batch)
            own = split_batch(batch, NUM_HOSTS)[hosts.index]
            yield _Step(hosts, one, here, one.trainer.step(batch), here.trainer.step(own))

    return make


@pytest.mark.parametrize(("name", "num_devices"), [("vtrace", 1), ("vtrace", 2), ("r2d2", 2)])
def test_hosts_learn_what_one_learns_from_all_they_have(train, name, num_devices):
    steps = list(train(name, num_devices, 20))
    for step in steps:
        (metrics, feedback), (got_metrics, got_feedback) = step.of_one, step.of_here
        assert got_metrics.keys() == metrics.keys()
        for key in metrics.keys() - set(APPROXIMATE):
            np.testing.assert_allclose(got_metrics[key], metrics[key], **CLOSE, err_msg=key)
        for got, want in zip(tf.nest.flatten(got_feedback), tf.nest.flatten(feedback), strict=True):
            own = np.array_split(want, NUM_HOSTS)[step.hosts.index]
            np.testing.assert_allclose(got, own, **CLOSE)
    check_same(steps[-1].here, steps[-1].one)


def test_what_is_not_finite_on_one_host_is_skipped_by_all(train):
    def spoil(batch):
        batch.unrolls.env_outputs.abandoned[:] = False
        batch.unrolls.env_outputs.reward[2, 6] = np.nan  # of the second host's half

    (step,) = train("r2d2", 1, 1, spoil)
    for metrics, _ in (step.of_one, step.of_here):
        assert not np.isfinite(metrics["training/gradient_norm"])
    check_same(step.here, step.one)


def test_float16_scales_the_loss_alike_on_all(train):
    steps = list(train("vtrace", 1, 3, precision="float16"))
    for step in steps:
        got, want = (float(of[0]["training/loss_scale"]) for of in (step.of_here, step.of_one))
        assert got == want
    for (got,), (want,) in zip(steps[-1].here.values(), steps[-1].one.values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)


def test_variables_become_those_of_the_first_host(place):
    hosts = place(1).hosts
    large = 2**53 + 1  # no float32, and no float64
    variables = [
        tf.Variable([1.5, -2.0] if hosts.is_chief else [0.0, 9.0]),
        tf.Variable(large if hosts.is_chief else 0, dtype=tf.int64),
    ]
    hosts.broadcast(variables)
    np.testing.assert_array_equal(variables[0], [1.5, -2.0])
    assert variables[1].numpy() == large


def test_a_meeting_says_the_same_to_all(place):
    hosts = place(1).hosts
    first = hosts.is_chief
    assert hosts.meet(True, first, 10**10 if first else 7) == (2, 1, 10**10 + 7)


def test_hosts_that_are_configured_differently_are_told(place):
    hosts = place(1).hosts
    hosts.check_same(["batch_size=4", "num_envs=16"])
    with pytest.raises(UserError, match=rf"host {hosts.index} has batch_size={hosts.index}, and"):
        hosts.check_same([f"batch_size={hosts.index}", "num_envs=16"])
    with pytest.raises(UserError, match="different versions of seed_rl, or different agents"):
        hosts.check_same(["a=1"] * (1 + hosts.index))
