"""The losses of the V-trace agent, as functions of what an unroll holds.

Everything is time-major, [T + 1, B, ...]. The action of step t leads to step t + 1, whose
`reward` and `done` belong to it; so T actions are learned from, and the last step only gives the
value to bootstrap from.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from seed_rl.agents.vtrace import vtrace
from seed_rl.distributions import ParametricDistribution
from seed_rl.structures import EnvOutput
from seed_rl.tensors import dimensions, split_structure


class VTraceLoss(NamedTuple):
    """A loss to minimise and what to log beside it."""

    loss: Any  # float32 scalar
    metrics: dict[str, Any]  # float32 scalars; no gradient flows through them
    num_used: Any  # float32 scalar: over how many steps the loss's means are


def compute_loss(
    parametric_action_distribution: ParametricDistribution,
    behaviour_policy_logits: tf.Tensor,
    behaviour_actions: Any,
    target_policy_logits: tf.Tensor,
    baseline: tf.Tensor,
    env_outputs: EnvOutput,
    discount: float = 0.99,
    lambda_: float = 1.0,
    baseline_cost: float = 0.5,
    entropy_cost: float | tf.Tensor = 0.00025,
    kl_cost: float = 0.0,
    max_abs_reward: float = 0.0,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
) -> VTraceLoss:
    """The loss of IMPALA (Espeholt et al. 2018, section 4.2) with a term for the policy's change.

        loss = - mean(log pi(a_t|x_t) advantage_t)                     'policy_loss'
               + baseline_cost * mean((v_t - V(x_t))**2) / 2           'baseline_loss'
               - entropy_cost * mean(entropy(pi(.|x_t)))               'entropy_loss'
               + kl_cost * mean(KL(mu(.|x_t) || pi(.|x_t)))            'kl_loss'

    Means are over the steps learned from, in time and batch, as SEED RL has it (IMPALA sums): the
    costs and the learning rate do not depend on the batch size or the unroll length.

    Where `env_outputs.abandoned[t + 1]` is true, nothing happened between t and t + 1 but a reset:
    the target of step t is its own value V(x_t), which earlier steps bootstrap from, and step t is
    in no mean. If that is every step, the loss is 0.

    Args:
      parametric_action_distribution: what the logits parametrise.
      behaviour_policy_logits: float32 [T + 1, B, param_size], mu, of the policy that acted.
      behaviour_actions: the actions it took, [T + 1, B, ...].
      target_policy_logits: float32 [T + 1, B, param_size], pi, of the policy being learned.
      baseline: float32 [T + 1, B], V, of the network being learned.
      env_outputs: [T + 1, B, ...]; only reward, done and abandoned are used.
      discount: gamma, an agent step.
      lambda_: see vtrace.from_importance_weights.
      baseline_cost: weight of the baseline loss.
      entropy_cost: weight of the entropy; no gradient flows to it.
      kl_cost: weight of the divergence.
      max_abs_reward: rewards are clipped to [-max_abs_reward, max_abs_reward]; 0: not at all.
      clip_rho_threshold: see vtrace.from_importance_weights.
      clip_pg_rho_threshold: see vtrace.from_importance_weights.

    Returns:
      The loss and metrics: the four terms as weighted above, 'entropy' and 'kl' (means, in nats),
      'entropy_cost', 'value' (mean of V), 'value_target' (mean of v), 'advantage' (mean),
      'rho_clip_fraction' (the share of steps whose importance weight is above
      clip_rho_threshold), 'explained_variance' (of the targets by the values: 1 is perfect, 0 no
      better than a constant), 'steps_used' (the share of steps learned from).

    Raises:
      ValueError: shapes do not fit together, or a number is out of its range.
    """
    check_numbers(discount, lambda_, max_abs_reward)
    behaviour_policy_logits = tf.convert_to_tensor(behaviour_policy_logits, tf.float32)
    target_policy_logits = tf.convert_to_tensor(target_policy_logits, tf.float32)
    baseline = tf.convert_to_tensor(baseline, tf.float32)
    _check_shapes(
        parametric_action_distribution,
        {"behaviour": behaviour_policy_logits, "target": target_policy_logits},
        baseline,
        env_outputs,
    )
    acted, _ = split_structure(
        (behaviour_policy_logits, behaviour_actions, target_policy_logits, baseline),
        dimensions(baseline)[0] - 1,
    )
    behaviour_policy_logits, behaviour_actions, target_policy_logits, values = acted
    distribution = parametric_action_distribution
    target_log_probs = distribution.log_prob(target_policy_logits, behaviour_actions)
    behaviour_log_probs = distribution.log_prob(behaviour_policy_logits, behaviour_actions)
    # What came of an action is found one step later.
    rewards, done, abandoned = (
        x[1:] for x in (env_outputs.reward, env_outputs.done, env_outputs.abandoned)
    )
    if max_abs_reward:
        rewards = tf.clip_by_value(rewards, -max_abs_reward, max_abs_reward)
    returns = vtrace.from_importance_weights(
        target_action_log_probs=target_log_probs,
        behaviour_action_log_probs=behaviour_log_probs,
        discounts=tf.where(tf.logical_or(done, abandoned), 0.0, discount),
        # With no discount and its own value for a reward, a step has a temporal difference of 0.
        rewards=tf.where(abandoned, tf.stop_gradient(values), rewards),
        values=values,
        bootstrap_value=baseline[-1],
        clip_rho_threshold=clip_rho_threshold,
        clip_pg_rho_threshold=clip_pg_rho_threshold,
        lambda_=lambda_,
    )

    used = tf.cast(tf.logical_not(abandoned), tf.float32)
    entropy = _mean(distribution.entropy(target_policy_logits), used)
    kl = _mean(distribution.kl_divergence(behaviour_policy_logits, target_policy_logits), used)
    entropy_cost = tf.stop_gradient(tf.cast(entropy_cost, tf.float32))
    terms = {
        "policy_loss": -_mean(target_log_probs * returns.pg_advantages, used),
        "baseline_loss": baseline_cost * 0.5 * _mean(tf.square(returns.vs - values), used),
        "entropy_loss": -entropy_cost * entropy,
        "kl_loss": kl_cost * kl,
    }
    metrics = {
        **terms,
        "entropy": entropy,
        "entropy_cost": entropy_cost,
        "kl": kl,
        "value": _mean(values, used),
        "value_target": _mean(returns.vs, used),
        "advantage": _mean(returns.pg_advantages, used),
        "rho_clip_fraction": _clip_fraction(
            target_log_probs - behaviour_log_probs, clip_rho_threshold, used
        ),
        "explained_variance": _explained_variance(returns.vs, values, used),
        "steps_used": tf.reduce_mean(used),
    }
    return VTraceLoss(
        loss=tf.add_n(list(terms.values())),
        metrics={name: tf.stop_gradient(value) for name, value in metrics.items()},
        num_used=tf.reduce_sum(used),
    )


def entropy_adjustment_loss(
    log_entropy_cost: tf.Tensor, mean_entropy: tf.Tensor, target_entropy: float
) -> tf.Tensor:
    """A loss whose descent steers the policy's entropy to a target.

    The entropy cost exp(log_entropy_cost) is the Lagrange multiplier of the constraint that the
    entropy be at least the target (as in Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905,
    section 5). The gradient is mean_entropy - target_entropy: descent raises the cost while the
    entropy is below the target and lowers it while it is above. In the logarithm a step changes
    the cost by a factor, so it stays positive and its scale does not matter.

    Args:
      log_entropy_cost: float32 scalar, the variable's value.
      mean_entropy: float32 scalar, in nats, as in the loss's metrics; no gradient flows to it.
      target_entropy: in nats.
    """
    return log_entropy_cost * tf.stop_gradient(mean_entropy - target_entropy)


def _mean(x: tf.Tensor, used: tf.Tensor) -> tf.Tensor:
    """The mean of the elements where `used` is 1, not 0; 0 if there are none."""
    return tf.reduce_sum(x * used) / tf.maximum(tf.reduce_sum(used), 1.0)


def _clip_fraction(log_rhos: tf.Tensor, threshold: float | None, used: tf.Tensor) -> tf.Tensor:
    if threshold is None:
        return tf.constant(0.0)
    return _mean(tf.cast(tf.exp(log_rhos) > threshold, tf.float32), used)


def _explained_variance(targets: tf.Tensor, values: tf.Tensor, used: tf.Tensor) -> tf.Tensor:
    def variance(x: tf.Tensor) -> tf.Tensor:
        return _mean(tf.square(x - _mean(x, used)), used)

    return 1.0 - variance(targets - values) / tf.maximum(variance(targets), 1e-8)


def check_numbers(discount: float, lambda_: float, max_abs_reward: float) -> None:
    """Raises a ValueError for settings of the loss that are out of their range."""
    for name, number in {"discount": discount, "lambda_": lambda_}.items():
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must be in [0, 1]; got {number}.")
    if max_abs_reward < 0.0:
        raise ValueError(f"max_abs_reward must not be negative; got {max_abs_reward}.")


def _check_shapes(
    distribution: ParametricDistribution,
    policy_logits: dict[str, tf.Tensor],
    baseline: tf.Tensor,
    env_outputs: EnvOutput,
) -> None:
    shape = baseline.shape
    if shape.rank != 2 or (shape[0] is not None and shape[0] < 2):
        raise ValueError(
            f"The loss needs a baseline [T + 1, B] with T of at least 1; got shape {shape}."
        )
    for name, logits in policy_logits.items():
        if not logits.shape.is_compatible_with([*shape, distribution.param_size]):
            raise ValueError(
                f"The loss needs {name}_policy_logits of shape "
                f"{(*shape, distribution.param_size)}; got {logits.shape}."
            )
    for name in ("reward", "done", "abandoned"):
        got = tf.convert_to_tensor(getattr(env_outputs, name)).shape
        if not got.is_compatible_with(shape):
            raise ValueError(f"The loss needs env_outputs.{name} of shape {shape}; got {got}.")
