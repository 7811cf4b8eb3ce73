"""In which precision networks compute.

Parameters, losses, V-trace and results are float32 in any case. What changes is the arithmetic of
the layers that take the time: convolutions, dense layers and the products inside an LSTM.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from seed_rl.environment_factory import has_parameter
from seed_rl.user_error import UserError

# By name, the Keras dtype policy that networks take as their `dtype`.
_POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}


def network_in_precision(network: Callable[..., Any], precision: str) -> Callable[..., Any]:
    """Returns the network's constructor with its `dtype` bound.

    Args:
      network: makes a network; bound only if the precision is another than float32.
      precision: 'float32'; 'bfloat16', for TPUs, newer GPUs and CPUs; 'float16', for older GPUs.

    Raises:
      UserError: there is no such precision, or the network has no parameter `dtype`.
    """
    if precision not in _POLICIES:
        raise UserError(f"precision must be one of {', '.join(_POLICIES)}, got {precision!r}")
    if precision == "float32":
        return network
    if not has_parameter(network, "dtype"):
        raise UserError(
            f"precision={precision!r} needs a network with a parameter `dtype`, a Keras dtype "
            "policy; this one has none"
        )
    return functools.partial(network, dtype=_POLICIES[precision])


class LossScale(tf.Module):
    """What a loss is multiplied by so that gradients in float16 do not vanish.

    The scale is halved whenever gradients overflow, and doubled after so many steps without
    (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2).
    """

    def __init__(self, initial: float = 2.0**15, period: int = 2_000):
        """Args:
        initial: the scale to begin with.
        period: training steps without overflow before it is doubled.
        """
        super().__init__(name="loss_scale")
        self._period = period
        self.value = tf.Variable(initial, dtype=tf.float32, trainable=False)
        self._good_steps = tf.Variable(0, dtype=tf.int32, trainable=False)

    def update(self, finite: tf.Tensor) -> None:
        """Adapts the scale; `finite`: bool scalar, whether the gradients were."""
        good_steps = self._good_steps + 1
        grows = good_steps >= self._period
        grown = tf.where(grows, 2.0 * self.value, self.value)
        self.value.assign(tf.where(finite, grown, tf.maximum(1.0, 0.5 * self.value)))
        self._good_steps.assign(tf.where(finite & ~grows, good_steps, 0))
