"""Normalised observations."""

import numpy as np
import pytest
import tensorflow as tf

from seed_rl import normalization
from seed_rl.normalization import ObservationNormalizer, RunningMoments

SPECS = {
    "image": tf.TensorSpec((2, 2, 3), tf.float32),
    "number": tf.TensorSpec((), tf.int32),
    "vector": tf.TensorSpec((3,), tf.float64),
}


def batches(number=4, offset=50.0):
    rng = np.random.default_rng(0)
    return [
        (offset + rng.normal(size=(5 + i, 2, 3)) * [1.0, 10.0, 0.1]).astype(np.float32)
        for i in range(number)
    ]


@pytest.mark.parametrize("jit_compile", [False, True])
def test_moments_are_those_of_all_batches_together(jit_compile):
    moments = RunningMoments((3,))
    update = tf.function(lambda x: moments.update(moments.of(x)), jit_compile=jit_compile)
    seen = []
    for x in batches():
        update(x)
        seen.append(x.reshape(-1, 3))
        everything = np.concatenate(seen)
        np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-5)
        np.testing.assert_allclose(moments.variance, everything.var(0), rtol=1e-4)
        assert moments.count == len(everything)


def test_a_large_mean_does_not_swallow_the_variance():
    moments = RunningMoments((1,))
    rng = np.random.default_rng(0)
    for _ in range(50):
        moments.update(moments.of((4096.0 + rng.integers(0, 2, (64, 1))).astype(np.float32)))
    np.testing.assert_allclose(moments.variance, 0.25, rtol=0.02)


def test_normalised_numbers():
    moments = RunningMoments((2,))
    x = np.array([[1.0, 7.0], [3.0, 7.0]], np.float32)
    np.testing.assert_array_equal(moments.normalize(x), x)  # nothing is known yet
    moments.update(moments.of(x))
    # mean (2, 7), variance (1, 0); a constant stays finite, and what is far away is clipped.
    np.testing.assert_allclose(moments.normalize(x), [[-1, 0], [1, 0]], atol=1e-4)
    np.testing.assert_allclose(moments.normalize([[40.0, 7.05]]), [[10, 5]], rtol=1e-3)


def test_old_observations_are_forgotten_at_last(monkeypatch):
    monkeypatch.setattr(normalization, "_MAX_COUNT", 10.0)
    moments = RunningMoments((1,))
    moments.update(moments.of(np.zeros((1000, 1), np.float32)))
    for _ in range(20):
        moments.update(moments.of(np.ones((10, 1), np.float32)))
    np.testing.assert_allclose(moments.mean, 1.0, atol=1e-5)


def test_only_vectors_of_floats_are_normalised():
    normalizer = ObservationNormalizer(SPECS)
    rng = np.random.default_rng(0)
    observation = {
        "image": rng.normal(size=(4, 5, 2, 2, 3)).astype(np.float32),
        "number": rng.integers(0, 9, (4, 5)).astype(np.int32),
        "vector": 7 + rng.normal(size=(4, 5, 3)),
    }
    normalizer.update(normalizer.moments(observation))
    result = normalizer(observation)
    np.testing.assert_array_equal(result["image"], observation["image"])
    np.testing.assert_array_equal(result["number"], observation["number"])
    assert result["vector"].dtype == tf.float32
    np.testing.assert_allclose(tf.reduce_mean(result["vector"], (0, 1)), np.zeros(3), atol=1e-5)
    assert len(normalizer.variables) == 3 and not normalizer.trainable_variables
