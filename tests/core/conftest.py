"""A small agent, for tests of what the learner does with any agent."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from seed_rl.agent import Agent, LossOutputs
from seed_rl.optimizers import adam
from seed_rl.queue_sink import QueueSink


class TinyOutput(NamedTuple):
    action: Any
    scores: Any


class _Network(tf.Module):
    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        rng = np.random.default_rng(num_inputs)
        self.weights = tf.Variable(rng.normal(size=(num_inputs, num_outputs)), dtype=tf.float32)
        self.bias = tf.Variable(tf.zeros([num_outputs]))


class TinyAgent(Agent):
    """A linear network; a batch is (x [B, inputs], y [B, outputs]) and the loss mean squared error.

    Acts by the highest score when greedy and by the lowest otherwise, so that the two differ. Its
    state counts the steps of the episode.
    """

    unroll_length = 2
    batch_size = 2

    def __init__(self, num_inputs=3, num_outputs=2, make_optimizer=None, max_norm=0.0):
        self.network = _Network(num_inputs, num_outputs)
        self.num_updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._make_optimizer = make_optimizer or (lambda n: adam(n, learning_rate=0.1))
        self._max_norm = max_norm

    def initial_state(self, batch_size):
        return (tf.zeros([batch_size], tf.int32),)

    def _scores(self, env_outputs, agent_state):
        steps = tf.where(env_outputs.done, 0, agent_state[0]) + 1
        scores = tf.matmul(env_outputs.observation, self.network.weights) + self.network.bias
        return scores, (steps,)

    def policy(self, env_ids, prev_actions, env_outputs, agent_state):
        scores, state = self._scores(env_outputs, agent_state)
        return TinyOutput(tf.argmin(scores, -1, tf.int32), scores), state

    def greedy_policy(self, env_ids, prev_actions, env_outputs, agent_state):
        scores, state = self._scores(env_outputs, agent_state)
        return TinyOutput(tf.argmax(scores, -1, tf.int32), scores), state

    def make_unroll_sink(self, unroll_specs):
        return QueueSink(self.batch_size, self.batch_size)

    def make_optimizer(self, num_training_steps):
        return self._make_optimizer(num_training_steps)

    def loss(self, batch):
        x, y = batch
        error = tf.matmul(x, self.network.weights) + self.network.bias - y
        squares = tf.reduce_mean(tf.square(error), -1)
        return LossOutputs(
            tf.reduce_mean(squares), {"loss/largest": tf.reduce_max(squares)}, squares
        )

    @property
    def trainable_variables(self):
        return [self.network.weights, self.network.bias]

    @property
    def checkpoint_items(self):
        return {"network": self.network, "num_updates": self.num_updates}

    @property
    def max_gradient_norm(self):
        return self._max_norm

    def after_training_step(self):
        self.num_updates.assign_add(1)


@pytest.fixture
def tiny_agent():
    """The class of the agent."""
    return TinyAgent


@pytest.fixture
def regression_batch():
    """Returns a function that makes batch number n for a TinyAgent."""

    def make(number, num_inputs=3, num_outputs=2, size=4):
        rng = np.random.default_rng(1000 + number)
        return (
            rng.normal(size=(size, num_inputs)).astype(np.float32),
            rng.normal(size=(size, num_outputs)).astype(np.float32),
        )

    return make
