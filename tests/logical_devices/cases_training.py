"""Training on several devices: the same as on one."""

import numpy as np
import pytest
import tensorflow as tf

from seed_rl.inference_policies import variables_of
from seed_rl.training import Trainer
from seed_rl.user_error import UserError

# Sums over a batch in another order differ in the last digits of float32.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Means of what is no mean itself; for the log alone.
APPROXIMATE = ("vtrace/explained_variance", "vtrace/steps_used")


class Training:
    """An agent and its trainer on some devices."""

    def __init__(self, make_agent, name, placement, jit_compile=False, **options):
        with placement.scope():
            self.agent = make_agent(name, **options)
            self.optimizer = self.agent.make_optimizer(100)
        self.trainer = Trainer(self.agent, self.optimizer, jit_compile, placement=placement)

    def values(self):
        """All variables, by replica, and the optimizer's."""
        variables = [*variables_of(self.agent), *(v.value for v in self.optimizer.variables)]
        return [[r.numpy() for r in getattr(v, "values", [v])] for v in variables]


def check_same(training, one):
    for replicas, (expected,) in zip(training.values(), one.values(), strict=True):
        for value in replicas:
            np.testing.assert_allclose(value, expected, **CLOSE)


@pytest.mark.parametrize("name", ["vtrace", "r2d2"])
def test_one_two_and_four_devices_learn_the_same(make_agent, make_batch, place, name):
    batches = [make_batch(name, number) for number in range(20)]
    one = Training(make_agent, name, place(1))
    initial = [v.numpy() for v in one.agent.trainable_variables]
    expected = [one.trainer.step(batch) for batch in batches]
    for variable, before in zip(one.agent.trainable_variables, initial, strict=True):
        assert np.abs(variable.numpy() - before).max() > 0.01  # else there is nothing to agree on
    for number in (2, 4):
        training = Training(make_agent, name, place(number))
        assert len(training.values()[0]) == number
        for batch, (metrics, feedback) in zip(batches, expected, strict=True):
            got_metrics, got_feedback = training.trainer.step(batch)
            assert got_metrics.keys() == metrics.keys()
            for key in metrics.keys() - set(APPROXIMATE):
                np.testing.assert_allclose(got_metrics[key], metrics[key], **CLOSE, err_msg=key)
            tf.nest.map_structure(
                lambda got, want: np.testing.assert_allclose(got, want, **CLOSE),
                got_feedback,
                feedback,
            )
        check_same(training, one)


@pytest.mark.parametrize("name", ["vtrace", "r2d2"])
def test_gradients_are_those_of_the_whole_batch(make_agent, make_batch, place, name):
    """By steps of plain descent, without clipping, on batches of which every part is masked."""
    options = {"optimizer": lambda n: tf.keras.optimizers.SGD(1.0), "max_gradient_norm": 0.0}
    one, two = (Training(make_agent, name, place(n), **options) for n in (1, 2))
    before = [value.copy() for (value,) in one.values()]
    for training in (one, two):
        training.trainer.step(make_batch(name, 3))
    for (got, other), (want,), old in zip(two.values(), one.values(), before, strict=True):
        np.testing.assert_array_equal(got, other)
        np.testing.assert_allclose(got - old, want - old, rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_step_to_learn_from_teaches_nothing(make_agent, make_batch, place):
    batch = make_batch("vtrace", 1)
    everything = np.ones_like(batch.env_outputs.abandoned)
    batch = batch._replace(
        env_outputs=batch.env_outputs._replace(abandoned=everything, done=everything)
    )
    one, two = (Training(make_agent, "vtrace", place(n)) for n in (1, 2))
    for training in (one, two):
        training.trainer.step(batch)
    check_same(two, one)


@pytest.mark.parametrize("part", [0, 7])
def test_what_is_not_finite_in_one_part_is_skipped_by_all(make_agent, make_batch, place, part):
    two = Training(make_agent, "r2d2", place(2))
    two.trainer.step(make_batch("r2d2", 1))
    trained = [v.numpy() for v in two.agent.trainable_variables]
    slots = [v.numpy() for v in two.optimizer.variables]
    bad = make_batch("r2d2", 2)
    bad.unrolls.env_outputs.reward[2, part] = np.nan
    bad.unrolls.env_outputs.abandoned[:] = False
    metrics, _ = two.trainer.step(bad)
    assert not np.isfinite(metrics["training/gradient_norm"])
    for variable, value in zip(two.agent.trainable_variables, trained, strict=True):
        for replica in variable.values:
            np.testing.assert_array_equal(replica, value)
    for variable, value in zip(two.optimizer.variables, slots, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_encoded_batches_and_compiled_parts_change_nothing(make_agent, make_batch, place):
    one = Training(make_agent, "vtrace", place(1))
    encoded = Training(make_agent, "vtrace", place(2)._replace(encodes=True))
    compiled = Training(make_agent, "vtrace", place(2), jit_compile=True)
    alone = Training(make_agent, "vtrace", place(1)._replace(encodes=True))
    for number in range(3):
        for training in (one, encoded, compiled, alone):
            training.trainer.step(make_batch("vtrace", number))
    for training in (encoded, compiled, alone):
        check_same(training, one)


def test_float16_scales_the_loss_alike_on_all(make_agent, make_batch, place):
    one, two = (Training(make_agent, "vtrace", place(n), precision="float16") for n in (1, 2))
    for training in (one, two):
        for number in range(2):
            metrics, _ = training.trainer.step(make_batch("vtrace", number))
    assert float(metrics["training/loss_scale"]) in (2.0**15, 2.0**14)
    for (got, other), (want,) in zip(two.values(), one.values(), strict=True):
        np.testing.assert_array_equal(got, other)
        np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)


def test_a_batch_that_does_not_divide_is_refused_at_the_start(make_agent, place):
    with pytest.raises(UserError, match=r"batch of 6 unrolls .* among 4 devices .* such as 8"):
        Training(make_agent, "vtrace", place(4), batch_size=6)
