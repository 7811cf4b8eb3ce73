"""Optimizers, beside their formulas written out."""

import numpy as np
import pytest
import tensorflow as tf

from seed_rl.optimizers import adam, rmsprop

GRADIENTS = [np.array([1.0, -2.0]), np.array([0.5, 3.0]), np.array([-1.0, 0.25])]


def run(optimizer):
    """Returns the variable after each of the gradients."""
    variable = tf.Variable([1.0, 2.0])
    values = []
    for gradient in GRADIENTS:
        optimizer.apply_gradients([(tf.constant(gradient, tf.float32), variable)])
        values.append(variable.numpy())
    return values


def test_adam():
    x, m, v = np.array([1.0, 2.0]), np.zeros(2), np.zeros(2)
    expected = []
    for t, g in enumerate(GRADIENTS, 1):
        m = 0.8 * m + 0.2 * g
        v = 0.9 * v + 0.1 * g**2
        x = x - 0.1 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-6)
        expected.append(x)
    got = run(adam(10, learning_rate=0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-6))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_rmsprop_has_epsilon_under_the_root_and_momentum():
    x, v, step = np.array([1.0, 2.0]), np.zeros(2), np.zeros(2)
    expected = []
    for g in GRADIENTS:
        v = 0.9 * v + 0.1 * g**2
        step = 0.5 * step + 0.1 * g / np.sqrt(v + 0.3)
        x = x - step
        expected.append(x)
    got = run(rmsprop(10, learning_rate=0.1, rho=0.9, momentum=0.5, epsilon=0.3, decay="constant"))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("make", [adam, rmsprop])
def test_linear_decay_ends_at_zero_and_stays_there(make):
    optimizer = make(4, learning_rate=0.8, decay="linear")
    rates = []
    variable = tf.Variable([1.0])
    for _ in range(6):
        rates.append(float(optimizer.learning_rate))
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    np.testing.assert_allclose(rates, [0.8, 0.6, 0.4, 0.2, 0.0, 0.0], atol=1e-7)


def test_an_unknown_decay_is_named():
    with pytest.raises(ValueError, match="'constant' or 'linear', got 'cosine'"):
        adam(4, decay="cosine")


@pytest.mark.parametrize("make", [adam, rmsprop])
@pytest.mark.parametrize("learning_rate", [-1.0, float("inf"), float("nan")])
def test_learning_rates_that_are_none(make, learning_rate):
    with pytest.raises(ValueError, match="learning_rate must be at least 0 and finite, got"):
        make(100, learning_rate=learning_rate)


@pytest.mark.parametrize(
    ("make", "name"), [(adam, "beta_1"), (adam, "beta_2"), (rmsprop, "rho"), (rmsprop, "momentum")]
)
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_shares_of_the_past_that_are_none(make, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\), got"):
        make(100, **{name: value})


@pytest.mark.parametrize("make", [adam, rmsprop])
@pytest.mark.parametrize("epsilon", [-1e-8, float("inf"), float("nan")])
def test_epsilons_that_are_none(make, epsilon):
    with pytest.raises(ValueError, match="epsilon must be at least 0 and finite, got"):
        make(100, epsilon=epsilon)
