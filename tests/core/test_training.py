"""The training step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from seed_rl.queue_sink import QueueSink
from seed_rl.training import DivergedError, Trainer


def sgd(learning_rate=0.1):
    return keras.optimizers.SGD(learning_rate)


def gradients(agent, batch):
    """Of the mean over rows and outputs of (x W + b - y)², by hand."""
    x, y = batch
    error = x @ agent.network.weights.numpy() + agent.network.bias.numpy() - y
    return 2 * x.T @ error / error.size, 2 * error.sum(0) / error.size


def test_a_step_goes_down_the_gradient_and_says_what_it_saw(tiny_agent, regression_batch):
    agent = tiny_agent()
    batch = regression_batch(1)
    weights, bias = agent.network.weights.numpy(), agent.network.bias.numpy()
    d_weights, d_bias = gradients(agent, batch)
    squares = np.square(batch[0] @ weights + bias - batch[1]).mean(-1)
    metrics, feedback = Trainer(agent, sgd()).step(batch)
    np.testing.assert_allclose(agent.network.weights, weights - 0.1 * d_weights, rtol=1e-5)
    np.testing.assert_allclose(agent.network.bias, bias - 0.1 * d_bias, rtol=1e-5)
    np.testing.assert_allclose(feedback, squares, rtol=1e-5)
    assert float(metrics["training/loss"]) == pytest.approx(squares.mean(), rel=1e-5)
    assert float(metrics["loss/largest"]) == pytest.approx(squares.max(), rel=1e-5)
    norm = np.sqrt(np.square(d_weights).sum() + np.square(d_bias).sum())
    assert float(metrics["training/gradient_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(metrics["training/learning_rate"]) == pytest.approx(0.1)
    assert int(agent.num_updates) == 1  # after_training_step ran


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_batch_that_is_not_finite_is_skipped_as_if_it_had_not_been(
    tiny_agent, regression_batch, bad, max_norm, jit_compile
):
    """Against a run without it, with an optimizer that has a memory and a schedule."""
    bad_batch = regression_batch(1)
    bad_batch[1][0, 0] = bad

    def train(batches):
        agent = tiny_agent(max_norm=max_norm)
        schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 4, end_learning_rate=0.0)
        optimizer = keras.optimizers.Adam(schedule)
        trainer = Trainer(agent, optimizer, jit_compile)
        sink = ListSink(batches)
        metrics = [trainer.train_from(sink, 1.0) for _ in batches]
        return agent, optimizer, trainer, sink, metrics

    good = [regression_batch(seed) for seed in (2, 3)]
    agent, optimizer, trainer, sink, metrics = train([good[0], bad_batch, good[1]])
    expected, expected_optimizer, *_ = train(good)
    for one, other in (
        (agent.network.weights, expected.network.weights),
        (agent.network.bias, expected.network.bias),
        *zip(optimizer.variables, expected_optimizer.variables, strict=True),
    ):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6)
        assert np.isfinite(np.asarray(one)).all()
    assert (trainer.num_steps, trainer.num_skipped) == (2, 1)
    assert metrics[1] == {}
    assert [(step, feedback is None) for step, feedback in sink.done] == [
        (1, False),
        (1, True),
        (2, False),
    ]


def test_training_ends_when_too_many_batches_in_a_row_are_not_finite(tiny_agent, regression_batch):
    agent = tiny_agent()
    bad = regression_batch(1)
    bad[1][0, 0] = np.nan
    trainer = Trainer(agent, sgd(), max_skipped_steps=2)
    sink = ListSink([bad, bad, regression_batch(2), bad, bad, bad])
    for _ in range(5):  # no three in a row so far
        trainer.train_from(sink, 1.0)
    weights = agent.network.weights.numpy()
    with pytest.raises(DivergedError, match=r"3 in a row.*lower learning rate.*checkpoint"):
        trainer.train_from(sink, 1.0)
    np.testing.assert_array_equal(agent.network.weights, weights)
    assert trainer.num_skipped == 5


class ListSink:
    """Gives these batches, and keeps (step, feedback) of those that were trained on."""

    def __init__(self, batches):
        self.batches, self.done = list(batches), []

    def next_batch(self, timeout):
        return self.batches.pop(0)

    def training_done(self, batch, feedback, training_step):
        self.done.append((training_step, feedback))


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_gradients_are_scaled_down_to_the_norm_and_never_up(tiny_agent, regression_batch, share):
    batch = regression_batch(2)
    d_weights, d_bias = gradients(tiny_agent(), batch)
    norm = np.sqrt(np.square(d_weights).sum() + np.square(d_bias).sum())
    agent = tiny_agent(max_norm=float(share * norm))
    before = agent.network.weights.numpy()
    metrics, _ = Trainer(agent, sgd(1.0)).step(batch)
    np.testing.assert_allclose(
        before - agent.network.weights.numpy(), min(share, 1.0) * d_weights, rtol=1e-4, atol=1e-6
    )
    # What is logged is the norm before clipping.
    assert float(metrics["training/gradient_norm"]) == pytest.approx(norm, rel=1e-5)


def test_the_logged_learning_rate_is_the_one_that_was_used(tiny_agent, regression_batch):
    agent = tiny_agent()
    trainer = Trainer(agent, agent.make_optimizer(10))
    scheduled = Trainer(
        agent,
        keras.optimizers.SGD(
            keras.optimizers.schedules.PolynomialDecay(0.4, 4, end_learning_rate=0.0)
        ),
    )
    assert float(trainer.step(regression_batch(0))[0]["training/learning_rate"]) == pytest.approx(
        0.1
    )
    rates = [
        float(scheduled.step(regression_batch(i))[0]["training/learning_rate"]) for i in range(3)
    ]
    np.testing.assert_allclose(rates, [0.4, 0.3, 0.2], rtol=1e-5)


def test_a_variable_that_the_loss_does_not_use_stays_as_it_is(tiny_agent, regression_batch):
    class Wider(tiny_agent):
        unused = tf.Variable([1.0, 2.0])

        @property
        def trainable_variables(self):
            return [*super().trainable_variables, self.unused]

    agent = Wider()
    Trainer(agent, sgd()).step(regression_batch(1))
    np.testing.assert_array_equal(agent.unused, [1, 2])


def test_variables_of_keras_layers_are_trained_too(tiny_agent, regression_batch):
    class KerasAgent(tiny_agent):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(2)
            self.layer.build((None, 3))

        def loss(self, batch):
            squares = tf.square(self.layer(batch[0]) - batch[1])
            return super().loss(batch)._replace(loss=tf.reduce_mean(squares))

        @property
        def trainable_variables(self):
            return self.layer.trainable_variables

    agent = KerasAgent()
    (x, y), kernel = regression_batch(1), agent.layer.kernel.numpy()
    Trainer(agent, sgd()).step((x, y))
    error = x @ kernel - y
    expected = kernel - 0.1 * 2 * x.T @ error / error.size
    np.testing.assert_allclose(agent.layer.kernel.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_xla_and_plain_steps_agree(tiny_agent, regression_batch):
    results = []
    for jit_compile in (False, True):
        agent = tiny_agent(max_norm=0.5)
        trainer = Trainer(agent, agent.make_optimizer(10), jit_compile)
        for number in range(5):
            metrics, feedback = trainer.step(regression_batch(number))
        results.append(
            [agent.network.weights, agent.network.bias, feedback]
            + [metrics[name] for name in sorted(metrics)]
        )
        assert int(agent.num_updates) == 5
    for plain, compiled in zip(*results, strict=True):
        np.testing.assert_allclose(plain, compiled, rtol=1e-4, atol=1e-6)


def test_equal_shapes_are_traced_once(tiny_agent, regression_batch):
    class Counting(tiny_agent):
        traces = 0

        def loss(self, batch):
            self.traces += 1
            return super().loss(batch)

    agent = Counting()
    trainer = Trainer(agent, sgd())
    for number in range(3):
        trainer.step(regression_batch(number))
    assert agent.traces == 1


def test_train_from_takes_a_batch_counts_and_tells_the_sink(tiny_agent, regression_batch):
    class OneBatch(QueueSink):
        def __init__(self):
            self.batches, self.told = [regression_batch(1)], []

        def next_batch(self, timeout):
            return self.batches.pop() if self.batches else None

        def training_done(self, batch, feedback, training_step):
            self.told.append((batch, np.asarray(feedback).shape, training_step))

    sink, agent = OneBatch(), tiny_agent()
    trainer = Trainer(agent, sgd())
    trainer.num_steps = 41
    assert "training/loss" in trainer.train_from(sink, 0.0)
    assert trainer.train_from(sink, 0.0) is None
    assert trainer.num_steps == 42
    ((batch, feedback_shape, training_step),) = sink.told
    np.testing.assert_array_equal(batch[0], regression_batch(1)[0])
    assert (feedback_shape, training_step) == ((4,), 42)
