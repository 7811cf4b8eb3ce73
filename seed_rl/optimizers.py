"""Optimizers with the learning rate schedules of the papers."""

from typing import Any

import gin
import keras

from seed_rl.setting_checks import check_number


def _schedule(learning_rate: float, decay: str, num_training_steps: int) -> Any:
    check_number("learning_rate", learning_rate, at_least=0)
    if decay == "constant":
        return learning_rate
    if decay == "linear":
        return keras.optimizers.schedules.PolynomialDecay(
            learning_rate, max(1, num_training_steps), end_learning_rate=0.0
        )
    raise ValueError(f"decay must be 'constant' or 'linear', got {decay!r}")


def _check_memory(name: str, value: float) -> None:
    """Checks the share of a running mean that stays at each step; all of it would be for ever."""
    check_number(name, value, at_least=0, below=1)


@gin.configurable
def adam(
    num_training_steps: int,
    learning_rate: float = 4.8e-4,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    decay: str = "constant",
) -> keras.optimizers.Optimizer:
    """Returns Adam; `decay='linear'` takes the learning rate to 0 at `num_training_steps`."""
    _check_memory("beta_1", beta_1)
    _check_memory("beta_2", beta_2)
    check_number("epsilon", epsilon, at_least=0)
    return keras.optimizers.Adam(
        _schedule(learning_rate, decay, num_training_steps),
        beta_1=beta_1,
        beta_2=beta_2,
        epsilon=epsilon,
    )


@gin.configurable
def rmsprop(
    num_training_steps: int,
    learning_rate: float = 6e-4,
    rho: float = 0.99,
    momentum: float = 0.0,
    epsilon: float = 0.1,
    decay: str = "linear",
) -> keras.optimizers.Optimizer:
    """Returns RMSProp with IMPALA's Atari settings; `epsilon` stands under the square root."""
    _check_memory("rho", rho)
    _check_memory("momentum", momentum)
    check_number("epsilon", epsilon, at_least=0)
    return keras.optimizers.RMSprop(
        _schedule(learning_rate, decay, num_training_steps),
        rho=rho,
        momentum=momentum,
        epsilon=epsilon,
    )
