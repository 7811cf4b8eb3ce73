"""V-trace: off-policy targets for an actor-critic (Espeholt et al. 2018)."""

from typing import Any, NamedTuple

import tensorflow as tf


class VTraceReturns(NamedTuple):
    """Targets [T, B, ...]; no gradient flows through them."""

    vs: Any  # float32, what the value of each step should be
    pg_advantages: Any  # float32, what multiplies grad log pi of each action


def from_importance_weights(
    target_action_log_probs: Any,
    behaviour_action_log_probs: Any,
    discounts: Any,
    rewards: Any,
    values: Any,
    bootstrap_value: Any,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTraceReturns:
    """Computes V-trace targets and policy-gradient advantages.

    "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures",
    https://arxiv.org/abs/1802.01561, section 4.1. With rho_t = pi(a_t|x_t) / mu(a_t|x_t),

        v_t = V(x_t) + delta_t + gamma_t c_t (v_{t+1} - V(x_{t+1}))                  (remark 1)
        delta_t = min(clip_rho, rho_t) (r_t + gamma_t V(x_{t+1}) - V(x_t))
        c_t = lambda min(1, rho_t)                                                   (remark 2)
        advantage_t = min(clip_pg_rho, rho_t) (r_t + gamma_t v_{t+1} - V(x_t))       (section 4.2)

    where V(x_T) = v_T is the bootstrap value. T is at least 1. Any number of dimensions may follow
    [T, B]; those of the log-probabilities and the discounts may be 1 where the values' are not.

    Args:
      target_action_log_probs: float32 [T, B, ...], log pi(a_t|x_t) of the policy being learned.
      behaviour_action_log_probs: float32 [T, B, ...], log mu(a_t|x_t) of the policy that acted.
      discounts: float32 [T, B, ...], gamma_t, the discount between step t and t + 1: 0 where the
        action a_t ended the episode.
      rewards: float32 [T, B, ...], r_t, the reward that action a_t brought.
      values: float32 [T, B, ...], V(x_t).
      bootstrap_value: float32 [B, ...], V(x_T).
      clip_rho_threshold: rho-bar, where the temporal differences are clipped; None: nowhere.
      clip_pg_rho_threshold: the same for the advantages; None: nowhere.
      lambda_: in [0, 1]; smaller values trade variance for bias, 0 is one-step bootstrapping.

    Raises:
      ValueError: the arguments' shapes do not fit together.
    """
    target_action_log_probs = tf.convert_to_tensor(target_action_log_probs, tf.float32)
    behaviour_action_log_probs = tf.convert_to_tensor(behaviour_action_log_probs, tf.float32)
    discounts = tf.convert_to_tensor(discounts, tf.float32)
    rewards = tf.convert_to_tensor(rewards, tf.float32)
    values = tf.convert_to_tensor(values, tf.float32)
    bootstrap_value = tf.convert_to_tensor(bootstrap_value, tf.float32)
    _check_shapes(
        values,
        bootstrap_value,
        same={"rewards": rewards},
        broadcast={
            "target_action_log_probs": target_action_log_probs,
            "behaviour_action_log_probs": behaviour_action_log_probs,
            "discounts": discounts,
        },
    )

    rhos = tf.exp(target_action_log_probs - behaviour_action_log_probs)
    next_values = tf.concat([values[1:], bootstrap_value[None]], axis=0)
    deltas = _clip(rhos, clip_rho_threshold) * (rewards + discounts * next_values - values)
    decays = discounts * lambda_ * tf.minimum(1.0, rhos)
    vs = values + _discounted_sums(deltas, decays)
    next_vs = tf.concat([vs[1:], bootstrap_value[None]], axis=0)
    pg_advantages = _clip(rhos, clip_pg_rho_threshold) * (rewards + discounts * next_vs - values)
    return VTraceReturns(tf.stop_gradient(vs), tf.stop_gradient(pg_advantages))


def _clip(rhos: tf.Tensor, threshold: float | None) -> tf.Tensor:
    return rhos if threshold is None else tf.minimum(threshold, rhos)


def _discounted_sums(deltas: tf.Tensor, decays: tf.Tensor) -> tf.Tensor:
    """y_t = deltas_t + decays_t * y_{t+1}, with y_T = 0; a loop that XLA compiles one step of."""
    return tf.scan(
        lambda later, step: step[0] + step[1] * later,
        (deltas, decays),
        initializer=tf.zeros_like(deltas[0]),
        reverse=True,
    )


def _check_shapes(
    values: tf.Tensor,
    bootstrap_value: tf.Tensor,
    same: dict[str, tf.Tensor],
    broadcast: dict[str, tf.Tensor],
) -> None:
    shape = values.shape
    if shape.rank is None or shape.rank < 2 or shape[0] == 0:
        raise ValueError(f"V-trace needs values [T, B, ...] with T of at least 1; got {shape}.")
    if not bootstrap_value.shape.is_compatible_with(shape[1:]):
        raise ValueError(
            f"V-trace needs a bootstrap_value of shape {shape[1:]}, as values of shape {shape} "
            f"have after their first dimension; got {bootstrap_value.shape}."
        )
    for name, tensor in same.items():
        if not tensor.shape.is_compatible_with(shape):
            raise ValueError(
                f"V-trace needs {name} of the values' shape {shape}; got {tensor.shape}."
            )
    for name, tensor in broadcast.items():
        fits = tensor.shape.rank == shape.rank and all(
            size == expected or None in (size, expected) or (axis >= 2 and size == 1)
            for axis, (size, expected) in enumerate(zip(tensor.shape, shape, strict=True))
        )
        if not fits:
            raise ValueError(
                f"V-trace needs {name} of the values' shape {shape}, or with ones for the "
                f"dimensions after [T, B]; got {tensor.shape}."
            )
