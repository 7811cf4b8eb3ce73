"""R2D2's loss against loops in numpy that follow the paper, one step after the other."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from seed_rl.agents.r2d2 import losses
from seed_rl.structures import EnvOutput

B, ACTIONS = 4, 3


def h(x):
    return np.sign(x) * (math.sqrt(abs(x) + 1) - 1) + 1e-3 * x


def h_inverse(y):
    """By bisection in float64, so that it owes nothing to a formula."""
    low, high = -1e7, 1e7
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if h(middle) < y else (low, middle)
    return (low + high) / 2


def test_rescaling_by_hand():
    # h(3) = sqrt(4) - 1 + 0.003, h(-8) = -(3 - 1) - 0.008
    np.testing.assert_allclose(
        losses.value_function_rescaling(tf.constant([0.0, 3.0, -8.0])),
        [0.0, 1.003, -2.008],
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        losses.inverse_value_function_rescaling(tf.constant([0.0, 1.003, -2.008])),
        [0.0, 3.0, -8.0],
        rtol=1e-6,
    )


def test_rescaling_there_and_back():
    x = np.concatenate([-np.geomspace(1e-6, 1e6, 200), [0.0], np.geomspace(1e-6, 1e6, 200)])
    x = x.astype(np.float32)
    there = losses.value_function_rescaling(x)
    np.testing.assert_allclose(there, [h(float(v)) for v in x], rtol=1e-5)
    np.testing.assert_allclose(losses.inverse_value_function_rescaling(there), x, rtol=1e-5)
    assert losses.inverse_value_function_rescaling(there).dtype == tf.float32


def plain_n_step_target(rewards, done, q_target, gamma, n_steps):
    num_steps, batch = rewards.shape
    targets = np.zeros((num_steps, batch))
    for b in range(batch):
        for t in range(num_steps):
            last = min(t + n_steps, num_steps) - 1
            discount = 1.0
            for k in range(t, last + 1):
                targets[t, b] += discount * rewards[k, b]
                discount *= gamma
                if done[k, b]:
                    break
            else:
                targets[t, b] += discount * q_target[last, b]
    return targets


@pytest.mark.parametrize("n_steps", range(1, 11))
def test_n_step_targets(n_steps):
    rng = np.random.default_rng(n_steps)
    rewards = rng.normal(size=(7, B)).astype(np.float32)
    q_target = rng.normal(size=(7, B)).astype(np.float32)
    done = rng.random((7, B)) < 0.25
    targets = losses.n_step_bellman_target(rewards, done, q_target, 0.9, n_steps)
    expected = plain_n_step_target(rewards, done, q_target, 0.9, n_steps)
    np.testing.assert_allclose(targets, expected, rtol=1e-5, atol=1e-5)


def test_n_step_targets_by_hand():
    # γ = 0.5, n = 2, an end after the second of four steps.
    targets = losses.n_step_bellman_target(
        rewards=np.array([[1], [2], [4], [8]], np.float32),
        done=np.array([[False], [True], [False], [False]]),
        q_target=np.array([[10], [20], [30], [40]], np.float32),
        gamma=0.5,
        n_steps=2,
    )
    # 1 + 0.5·2; 2; 4 + 0.5·8 + 0.25·40; 8 + 0.5·40, a step less
    np.testing.assert_allclose(targets, [[2.0], [2.0], [18.0], [28.0]])


def test_beyond_the_unroll_n_makes_no_difference():
    rng = np.random.default_rng(0)
    rewards, q_target = rng.normal(size=(2, 7, B)).astype(np.float32)
    done = rng.random((7, B)) < 0.2
    targets = losses.n_step_bellman_target(rewards, done, q_target, 0.9, 10**12)
    expected = plain_n_step_target(rewards, done, q_target, 0.9, 7)
    np.testing.assert_allclose(targets, expected, rtol=1e-5, atol=1e-5)


def test_senseless_settings():
    one = np.zeros((1, 1), np.float32)
    with pytest.raises(ValueError, match="n_steps must be at least 1; got 0"):
        losses.n_step_bellman_target(one, one > 0, one, 0.9, 0)


class Output(NamedTuple):
    action: Any
    q_values: Any


class RecurrentTable(tf.Module):
    """A recurrent Q-function small enough to be written again in numpy.

    state' = decay · (0 where done, else state) + observation; Q[a] = state' · weights[a] + bias[a]
    + 0.1 · (prev_action == a)
    """

    def __init__(self, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.weights = tf.Variable(rng.normal(size=ACTIONS), dtype=tf.float32)
        self.bias = tf.Variable(rng.normal(size=ACTIONS), dtype=tf.float32)
        self.decay = tf.Variable(0.5)

    def __call__(self, inputs, agent_state, unroll):
        assert unroll
        prev_actions, env_outputs = inputs
        done, observation = (
            tf.unstack(tf.convert_to_tensor(x)) for x in (env_outputs.done, env_outputs.observation)
        )
        states = []
        for d, x in zip(done, observation, strict=True):
            agent_state = self.decay * tf.where(d, 0.0, agent_state) + x
            states.append(agent_state)
        state = tf.stack(states)[..., None]
        q_values = state * self.weights + self.bias + 0.1 * tf.one_hot(prev_actions, ACTIONS)
        return Output(tf.argmax(q_values, -1, tf.int32), q_values), agent_state

    def plain(self, prev_actions, env_outputs, state):
        weights, bias, decay = (
            v.numpy().astype(float) for v in (self.weights, self.bias, self.decay)
        )
        q_values = np.zeros((*prev_actions.shape, ACTIONS))
        state = state.astype(float).copy()
        for t in range(len(prev_actions)):
            for b in range(B):
                state[b] = decay * (0 if env_outputs.done[t, b] else state[b])
                state[b] += env_outputs.observation[t, b]
                for a in range(ACTIONS):
                    q_values[t, b, a] = state[b] * weights[a] + bias[a]
                    q_values[t, b, a] += 0.1 * (prev_actions[t, b] == a)
        return q_values


def random_batch(seed, num_steps, abandoned_share=0.0, done_share=0.2):
    rng = np.random.default_rng(seed)
    shape = (num_steps, B)
    abandoned = rng.random(shape) < abandoned_share
    env_outputs = EnvOutput(
        reward=np.where(abandoned, 0, rng.normal(size=shape) * 3).astype(np.float32),
        done=(rng.random(shape) < done_share) | abandoned,
        observation=rng.normal(size=shape).astype(np.float32),
        abandoned=abandoned,
        episode_step=np.zeros(shape, np.int32),
    )
    prev_actions, actions = (rng.integers(0, ACTIONS, shape).astype(np.int32) for _ in range(2))
    return prev_actions, env_outputs, actions, rng.normal(size=B).astype(np.float32)


def plain_errors(q_values, target_q_values, env_outputs, actions, gamma, n_steps):
    """errors [T, B], NaN where nothing is learned."""
    num_transitions = len(actions) - 1
    errors = np.full((num_transitions, B), np.nan)
    for b in range(B):

        def value(t, b=b):  # of the state at step t, for the steps before it
            return h_inverse(target_q_values[t, b, np.argmax(q_values[t, b])])

        for t in range(num_transitions):
            if env_outputs.abandoned[t + 1, b]:
                continue
            target, discount = 0.0, 1.0
            for k in range(t, min(t + n_steps, num_transitions)):
                if env_outputs.abandoned[k + 1, b]:  # cut: the state at k is the last there is
                    target += discount * value(k)
                    break
                target += discount * env_outputs.reward[k + 1, b]
                discount *= gamma
                if env_outputs.done[k + 1, b]:
                    break
            else:
                target += discount * value(min(t + n_steps, num_transitions))
            errors[t, b] = h(target) - q_values[t, b, actions[t, b]]
    return errors


def plain_loss_and_priorities(networks, batch, burn_in, gamma, n_steps, eta):
    prev_actions, env_outputs, actions, state = batch
    q_values, target_q_values = (
        network.plain(prev_actions, env_outputs, state)[burn_in:] for network in networks
    )
    rest = EnvOutput(*(leaf[burn_in:] for leaf in env_outputs))
    errors = plain_errors(q_values, target_q_values, rest, actions[burn_in:], gamma, n_steps)
    loss, priorities = [], []
    for b in range(B):
        used = errors[~np.isnan(errors[:, b]), b]
        loss.append(0.5 * np.sum(used**2))
        priorities.append(eta * np.abs(used).max() + (1 - eta) * np.abs(used).mean())
    return loss, priorities


@pytest.mark.parametrize("abandoned_share", [0.0, 0.25])
@pytest.mark.parametrize(("burn_in", "num_steps"), [(0, 9), (3, 12), (40, 61)])
@pytest.mark.parametrize("n_steps", [1, 2, 5, 10])
def test_loss_and_priorities(n_steps, burn_in, num_steps, abandoned_share):
    networks = RecurrentTable(0), RecurrentTable(1)
    batch = random_batch(n_steps + burn_in, num_steps, abandoned_share)
    prev_actions, env_outputs, actions, state = batch
    result = losses.compute_loss_and_priorities(
        *networks,
        state,
        prev_actions,
        env_outputs,
        Output(actions, None),
        gamma=0.95,
        burn_in=burn_in,
        n_steps=n_steps,
        eta=0.7,
    )
    loss, priorities = plain_loss_and_priorities(networks, batch, burn_in, 0.95, n_steps, 0.7)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-4)
    np.testing.assert_allclose(result.priorities, priorities, rtol=1e-4)


def test_the_defaults_are_the_paper_s():
    networks = RecurrentTable(0), RecurrentTable(1)
    batch = random_batch(3, 20)
    prev_actions, env_outputs, actions, state = batch
    result = losses.compute_loss_and_priorities(
        *networks, state, prev_actions, env_outputs, Output(actions, None), 0.997, 4
    )
    loss, priorities = plain_loss_and_priorities(networks, batch, 4, 0.997, n_steps=5, eta=0.9)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-4)
    np.testing.assert_allclose(result.priorities, priorities, rtol=1e-4)


def test_an_unroll_in_which_nothing_was_done():
    prev_actions, env_outputs, actions, state = random_batch(0, 5)
    env_outputs = env_outputs._replace(abandoned=np.ones((5, B), bool))
    result = losses.compute_loss_and_priorities(
        RecurrentTable(0),
        RecurrentTable(1),
        state,
        prev_actions,
        env_outputs,
        Output(actions, None),
        0.9,
        0,
    )
    np.testing.assert_array_equal(result.loss, np.zeros(B))
    np.testing.assert_array_equal(result.priorities, np.zeros(B))


def loss_of(network, target, batch, burn_in):
    prev_actions, env_outputs, actions, state = batch
    result = losses.compute_loss_and_priorities(
        network,
        target,
        state,
        prev_actions,
        env_outputs,
        Output(actions, None),
        gamma=0.9,
        burn_in=burn_in,
        n_steps=2,
    )
    return tf.reduce_sum(result.loss)


def test_the_gradient_is_that_of_the_learned_q_values_alone():
    """Against finite differences with the targets and the state after the burn-in held fixed."""
    network, target, burn_in = RecurrentTable(0), RecurrentTable(1), 3
    # No episode ends, so that the parameters in the burn-in do matter for what comes after it.
    batch = random_batch(5, 9, done_share=0.0)
    prev_actions, env_outputs, actions, state = batch
    with tf.GradientTape() as tape:
        loss = loss_of(network, target, batch, burn_in)
    gradients = tape.gradient(loss, [network.weights, network.bias, network.decay])

    q_values = network.plain(prev_actions, env_outputs, state)[burn_in:]
    target_q_values = target.plain(prev_actions, env_outputs, state)[burn_in:]
    rest = EnvOutput(*(leaf[burn_in:] for leaf in env_outputs))
    errors = plain_errors(q_values, target_q_values, rest, actions[burn_in:], 0.9, 2)
    learned = np.take_along_axis(q_values[:-1], actions[burn_in:-1, :, None], axis=-1)[..., 0]
    fixed_targets = errors + learned

    # The state after the burn-in, as a constant.
    states = state.astype(float)
    for t in range(burn_in):
        states = 0.5 * np.where(env_outputs.done[t], 0, states) + env_outputs.observation[t]

    def fixed_loss(weights=0.0, bias=0.0, decay=0.0):
        clone = RecurrentTable(0)
        clone.weights.assign_add(np.broadcast_to(weights, ACTIONS))
        clone.bias.assign_add(np.broadcast_to(bias, ACTIONS))
        clone.decay.assign_add(decay)
        later = EnvOutput(*(leaf[burn_in:] for leaf in env_outputs))
        q = clone.plain(prev_actions[burn_in:], later, states)
        learned = np.take_along_axis(q[:-1], actions[burn_in:-1, :, None], axis=-1)[..., 0]
        return 0.5 * np.sum((fixed_targets - learned) ** 2)

    def slope(**step):
        up, down = fixed_loss(**step), fixed_loss(**{name: -x for name, x in step.items()})
        return (up - down) / 2e-2

    close = {"rtol": 2e-3, "atol": 2e-3}
    for number, step in enumerate(np.eye(ACTIONS) * 1e-2):
        np.testing.assert_allclose(gradients[0][number], slope(weights=step), **close)
        np.testing.assert_allclose(gradients[1][number], slope(bias=step), **close)
    np.testing.assert_allclose(gradients[2], slope(decay=1e-2), **close)


def test_no_gradient_reaches_the_target_network_or_comes_from_priorities():
    network, target = RecurrentTable(0), RecurrentTable(1)
    prev_actions, env_outputs, actions, state = random_batch(5, 9)
    with tf.GradientTape(persistent=True) as tape:
        result = losses.compute_loss_and_priorities(
            network, target, state, prev_actions, env_outputs, Output(actions, None), 0.9, 3
        )
    assert tape.gradient(result.loss, [target.weights, target.bias, target.decay]) == [None] * 3
    assert tape.gradient(result.priorities, [network.weights, network.bias]) == [None] * 2


def test_rewards_are_clipped_only_if_asked():
    batch = random_batch(6, 6)
    networks = RecurrentTable(0), RecurrentTable(1)

    def loss(env_outputs, **settings):
        prev_actions, _, actions, state = batch
        arguments = (*networks, state, prev_actions, env_outputs, Output(actions, None), 0.9, 0)
        return losses.compute_loss_and_priorities(*arguments, **settings).loss.numpy()

    clipped = batch[1]._replace(reward=np.clip(batch[1].reward, -0.5, 0.5))
    np.testing.assert_allclose(loss(batch[1], max_abs_reward=0.5), loss(clipped), rtol=1e-6)
    assert not np.allclose(loss(batch[1]), loss(clipped))


@pytest.mark.parametrize("burn_in", [-1, 5, 9])
def test_burn_in_must_leave_something(burn_in):
    with pytest.raises(ValueError, match="must leave at least 2 of the 6 steps"):
        loss_of(RecurrentTable(0), RecurrentTable(1), random_batch(0, 6), burn_in)


def test_it_compiles_with_xla():
    networks, batch = (RecurrentTable(0), RecurrentTable(1)), random_batch(8, 10, 0.2)
    compiled = tf.function(lambda b: loss_of(*networks, b, 2), jit_compile=True)
    np.testing.assert_allclose(compiled(batch), loss_of(*networks, batch, 2), rtol=1e-4)
