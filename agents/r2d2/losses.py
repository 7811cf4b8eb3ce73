"""The loss and the priorities of R2D2, as functions of what an unroll holds.

Everything is time-major. The action of step t leads to step t + 1, whose `reward` and `done` belong
to it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from seed_rl.structures import EnvOutput
from seed_rl.tensors import dimensions, split_structure

RESCALING_EPSILON = 1e-3  # ε of h


class LossAndPriorities(NamedTuple):
    """What a batch of unrolls is worth."""

    loss: Any  # float32 [B]
    priorities: Any  # float32 [B]; no gradient flows through them


class TDErrors(NamedTuple):
    """How far Q-values are from their targets."""

    errors: Any  # float32 [T, B]; a gradient flows to the Q-values learned, not to the targets
    targets: Any  # float32 [T, B]
    used: Any  # bool [T, B]: false where nothing was done that could be learned from


def value_function_rescaling(x: Any) -> tf.Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + ε x (Pohlen et al. 2018, proposition A.1), ε = 1e-3.

    Args:
      x: float32 of any shape.
    """
    x = tf.convert_to_tensor(x)
    # sqrt(1 + |x|) - 1 = |x| / (sqrt(1 + |x|) + 1), without the loss of digits near 0.
    return x / (tf.sqrt(tf.abs(x) + 1.0) + 1.0) + RESCALING_EPSILON * x


def inverse_value_function_rescaling(x: Any) -> tf.Tensor:
    """h⁻¹: sign(x) (((sqrt(1 + 4 ε (|x| + 1 + ε)) - 1) / (2 ε))² - 1).

    From Pohlen et al. 2018, proposition A.2. Written as below, it keeps its digits in float32: the
    formula takes the difference of numbers near 1 and divides it by 2 ε.

    Args:
      x: float32 of any shape.
    """
    x = tf.convert_to_tensor(x)
    epsilon, magnitude = RESCALING_EPSILON, tf.abs(x)
    # With s = sqrt(|h⁻¹(x)| + 1) the equation |x| = (s - 1) + ε (s² - 1) gives, for r = s - 1 ≥ 0,
    # ε r² + (1 + 2 ε) r = |x|, whose root has no difference in this form.
    b = 1.0 + 2.0 * epsilon
    r = 2.0 * magnitude / (b + tf.sqrt(b * b + 4.0 * epsilon * magnitude))
    return tf.sign(x) * r * (r + 2.0)


def n_step_bellman_target(
    rewards: Any, done: Any, q_target: Any, gamma: float, n_steps: int
) -> tf.Tensor:
    """n-step returns that stop where an episode ends.

        target[t] = sum over k < n of gamma^k r[t + k] + gamma^n q_target[t + n - 1]

    as far as the first done, whose reward is the last that counts. Near the end of the unroll, n
    shrinks to the steps that are left.

    Args:
      rewards: float32 [T, B], of the action of step t.
      done: bool [T, B], whether that action ended the episode.
      q_target: float32 [T, B], the value of the state that it led to.
      gamma: discount of a step.
      n_steps: n, at least 1. All that are greater than T are the same: each step's target then
        looks to the end of the unroll.

    Returns:
      float32 [T, B].

    Raises:
      ValueError: n_steps is less than 1.
    """
    if n_steps < 1:
        raise ValueError(f"n_steps must be at least 1; got {n_steps}.")
    rewards, q_target = tf.convert_to_tensor(rewards), tf.convert_to_tensor(q_target)
    discounts = gamma * (1.0 - tf.cast(done, q_target.dtype))
    # Of one step; then each round looks one step further: the targets of the step after, seen from
    # here. The last step has none after it and keeps what it has.
    targets = rewards + discounts * q_target
    num_steps = dimensions(rewards)[0]
    if isinstance(num_steps, int):
        n_steps = min(n_steps, num_steps)
    for _ in range(n_steps - 1):
        further = rewards[:-1] + discounts[:-1] * targets[1:]
        targets = tf.concat([further, targets[-1:]], axis=0)
    return targets


def td_errors(
    q_values: Any,
    actions: Any,
    next_values: Any,
    env_outputs: EnvOutput,
    gamma: float,
    n_steps: int,
    max_abs_reward: float = 0.0,
) -> TDErrors:
    """Temporal-difference errors in rescaled values (Kapturowski et al. 2019, section 2.3).

    Where `abandoned` is true at step t + 1, nothing happened between t and t + 1 but a reset, as
    after a time limit: the step is not learned from, and those before it bootstrap from the value
    of step t.

    Args:
      q_values: float32 [T + 1, B, num_actions], of the network that learns.
      actions: int [T + 1, B], what was done.
      next_values: float32 [T + 1, B], what each step is worth to the steps before, rescaled by h.
      env_outputs: [T + 1, B]; only reward, done and abandoned are used.
      gamma: discount of a step.
      n_steps: see n_step_bellman_target.
      max_abs_reward: rewards are clipped to ± this; 0: not at all.
    """
    rewards, done, abandoned = (
        tf.convert_to_tensor(x)[1:]
        for x in (env_outputs.reward, env_outputs.done, env_outputs.abandoned)
    )
    if max_abs_reward:
        rewards = tf.clip_by_value(rewards, -max_abs_reward, max_abs_reward)
    values = inverse_value_function_rescaling(next_values)
    targets = n_step_bellman_target(
        # A step of which nothing came is worth what its state is worth: earlier steps find it here.
        rewards=tf.where(abandoned, values[:-1], rewards),
        done=tf.logical_or(done, abandoned),
        q_target=values[1:],
        gamma=gamma,
        n_steps=n_steps,
    )
    targets = tf.stop_gradient(value_function_rescaling(targets))
    learned = tf.gather(q_values[:-1], actions[:-1], axis=-1, batch_dims=2)
    used = tf.logical_not(abandoned)
    return TDErrors(tf.where(used, targets - learned, 0.0), targets, used)


def priorities_of(errors: TDErrors, eta: float = 0.9) -> tf.Tensor:
    """eta * max of |error| + (1 - eta) * mean of |error|, over the steps that are learned from.

    (Kapturowski et al. 2019, section 2.3.)

    Returns:
      float32 [B]; 0 where no step is learned from.
    """
    magnitudes = tf.abs(tf.stop_gradient(errors.errors))
    count = tf.reduce_sum(tf.cast(errors.used, tf.float32), axis=0)
    mean = tf.reduce_sum(magnitudes, axis=0) / tf.maximum(count, 1.0)
    return eta * tf.reduce_max(magnitudes, axis=0) + (1.0 - eta) * mean


def double_q_values(q_values: Any, target_q_values: Any) -> tf.Tensor:
    """The value, by one network, of the actions that the other one prefers (van Hasselt 2016).

    Args:
      q_values: float32 [..., num_actions], of the network that chooses.
      target_q_values: the same of the network that values.

    Returns:
      float32 [...].
    """
    best = tf.argmax(q_values, axis=-1, output_type=tf.int32)
    return tf.gather(target_q_values, best, axis=-1, batch_dims=best.shape.rank)


def unroll_q_values(
    training_agent: Callable,
    target_agent: Callable,
    agent_state: Any,
    prev_actions: Any,
    env_outputs: EnvOutput,
    burn_in: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Q-values of both networks after the burn-in.

    Both begin in the stored state and run over the burn-in, without gradient, to get to a state
    that their present parameters would have led to (Kapturowski et al. 2019, section 3).

    Returns:
      (q_values, target_q_values), float32 [T + 1, B, num_actions].
    """
    inputs = (prev_actions, EnvOutput(*env_outputs))
    prefix, rest = split_structure(inputs, burn_in)

    def run(network: Callable) -> tf.Tensor:
        state = agent_state
        if burn_in:
            _, state = network(prefix, state, unroll=True)
            state = tf.nest.map_structure(tf.stop_gradient, state)
        return network(rest, state, unroll=True)[0].q_values

    return run(training_agent), tf.stop_gradient(run(target_agent))


def compute_loss_and_priorities(
    training_agent: Callable,
    target_agent: Callable,
    agent_state: Any,
    prev_actions: Any,
    env_outputs: EnvOutput,
    agent_outputs: Any,
    gamma: float,
    burn_in: int,
    n_steps: int = 5,
    eta: float = 0.9,
    max_abs_reward: float = 0.0,
) -> LossAndPriorities:
    """Double Q-learning with n-step targets in rescaled values (Kapturowski et al. 2019).

        loss = 0.5 * sum over t of (h(target_t) - Q(x_t, a_t))²
        target_t = n-step return with bootstrap value h⁻¹(Q_target(x, argmax_a Q(x, a)))

    The loss is of the T steps after the burn-in, and not weighted by importance.

    Args:
      training_agent: `net((prev_actions, env_outputs), agent_state, unroll=True)` as
        DuelingLSTMDQNNet, the network that learns.
      target_agent: the same with the target network's parameters.
      agent_state: the recurrent state stored with the unrolls, leaves [B, ...].
      prev_actions: int [burn_in + T + 1, B].
      env_outputs: EnvOutput of leaves [burn_in + T + 1, B, ...].
      agent_outputs: what the acting network put out; only `action` is used.
      gamma: discount of a step.
      burn_in: steps that only warm the recurrent state up.
      n_steps: n.
      eta: weight of the largest error in the priority.
      max_abs_reward: rewards are clipped to ± this; 0: not at all.

    Returns:
      loss and priorities, both float32 [B].

    Raises:
      ValueError: there is no step after the burn-in, or n_steps is less than 1.
    """
    num_steps = dimensions(tf.convert_to_tensor(prev_actions))[0]
    if isinstance(num_steps, int) and not 0 <= burn_in < num_steps - 1:
        raise ValueError(
            f"burn_in must leave at least 2 of the {num_steps} steps of an unroll; got {burn_in}."
        )
    q_values, target_q_values = unroll_q_values(
        training_agent, target_agent, agent_state, prev_actions, env_outputs, burn_in
    )
    _, (env_outputs, actions) = split_structure(
        (EnvOutput(*env_outputs), agent_outputs.action), burn_in
    )
    errors = td_errors(
        q_values,
        actions,
        double_q_values(q_values, target_q_values),
        env_outputs,
        gamma,
        n_steps,
        max_abs_reward,
    )
    loss = 0.5 * tf.reduce_sum(tf.square(errors.errors), axis=0)
    return LossAndPriorities(loss, priorities_of(errors, eta))
