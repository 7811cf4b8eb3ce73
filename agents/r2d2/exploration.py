"""How R2D2 explores: every environment with an ε of its own."""

from typing import Any

import tensorflow as tf


def get_envs_epsilon(
    env_ids: Any, num_training_envs: int, num_eval_envs: int, eval_epsilon: float
) -> tf.Tensor:
    """Returns the probability of a random action in each environment.

    It is 0.4 ** linspace(1, 8, num_training_envs) over the training environments, of which the
    first explores most (Horgan et al. 2018, section 4.1, with α = 7 and base ε = 0.4; SEED RL,
    section A.3.1), and `eval_epsilon` in the others.

    Args:
      env_ids: int [B], at least 0. Those beyond all, of whoever tries an agent with more
        environments than it was made for, only evaluate too.
      num_training_envs: how many environments are trained on: those with the lowest ids.
      num_eval_envs: how many only evaluate: those with the highest ids.
      eval_epsilon: ε of these.

    Returns:
      float32 [B].

    Raises:
      ValueError: there is no environment to train on, or a number is out of its range.
    """
    if num_training_envs < 1 or num_eval_envs < 0:
        raise ValueError(
            "There must be at least one training environment and no negative number of others; got "
            f"num_training_envs={num_training_envs}, num_eval_envs={num_eval_envs}."
        )
    if not 0.0 <= eval_epsilon <= 1.0:
        raise ValueError(f"eval_epsilon is a probability; got {eval_epsilon}.")
    training = 0.4 ** tf.linspace(1.0, 8.0, num_training_envs)
    env_ids = tf.convert_to_tensor(env_ids)
    trains = env_ids < num_training_envs
    return tf.where(trains, tf.gather(training, tf.where(trains, env_ids, 0)), float(eval_epsilon))


def apply_epsilon_greedy(
    actions: Any,
    env_ids: Any,
    num_training_envs: int,
    num_eval_envs: int,
    eval_epsilon: float,
    num_actions: int,
) -> tf.Tensor:
    """Replaces each action, with its environment's probability, by one drawn from all uniformly.

    Args:
      actions: int [B], the greedy ones.
      env_ids: int [B].
      num_training_envs: see get_envs_epsilon, as the two after it.
      num_eval_envs: see there.
      eval_epsilon: see there.
      num_actions: how many actions there are.

    Returns:
      Actions [B], of the type of `actions`.

    Raises:
      ValueError: see get_envs_epsilon.
    """
    actions = tf.convert_to_tensor(actions)
    epsilons = get_envs_epsilon(env_ids, num_training_envs, num_eval_envs, eval_epsilon)
    explores = tf.random.uniform(tf.shape(actions)) < epsilons
    anything = tf.random.uniform(tf.shape(actions), maxval=num_actions, dtype=tf.int32)
    return tf.where(explores, tf.cast(anything, actions.dtype), actions)
