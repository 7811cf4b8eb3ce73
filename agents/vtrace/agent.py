"""The V-trace agent: what it supplies to the learner."""

from collections.abc import Callable, Sequence
from typing import Any

import gin
import gymnasium
import numpy as np
import tensorflow as tf

from seed_rl import optimizers
from seed_rl.agent import Agent, LossOutputs
from seed_rl.agents.vtrace import losses, networks
from seed_rl.agents.vtrace.networks import AgentOutput
from seed_rl.distributions import get_parametric_distribution_for_action_space
from seed_rl.environment_factory import has_parameter
from seed_rl.normalization import Moments
from seed_rl.observations import tensor_specs
from seed_rl.precision import network_in_precision
from seed_rl.queue_sink import QueueSink
from seed_rl.structures import EnvOutput
from seed_rl.unrolls import Unroll
from seed_rl.user_error import UserError


@gin.configurable
class VTraceAgent(Agent):
    """Actor-critic with V-trace targets; every unroll is trained on once."""

    def __init__(
        self,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        network: Callable[..., Any] = networks.AutoNetwork,
        optimizer: Callable[[int], Any] = optimizers.adam,
        unroll_length: int = 100,
        batch_size: int = 32,
        queue_capacity: int = 0,
        discount: float = 0.99,
        lambda_: float = 1.0,
        baseline_cost: float = 0.5,
        entropy_cost: float = 0.00025,
        target_entropy: float | None = None,
        entropy_cost_adjustment_speed: float = 10.0,
        kl_cost: float = 0.0,
        max_abs_reward: float = 0.0,
        max_gradient_norm: float = 0.0,
        precision: str = "float32",
    ):
        """Args:
        observation_space: of one environment.
        action_space: of one environment.
        network: makes the network, from the parametric distribution of the actions, and the
          observation_space if it has that parameter.
        optimizer: makes the Keras optimizer, from the number of training steps of the whole run.
        unroll_length: agent steps an unroll.
        batch_size: unrolls a training step.
        queue_capacity: unrolls that wait for training at most; 0: one batch.
        discount: γ, an agent step.
        lambda_: λ of V-trace (Espeholt et al. 2018, remark 2).
        baseline_cost: weight of the value loss.
        entropy_cost: weight of the entropy bonus, and where it starts with `target_entropy`.
        target_entropy: nats; if given, the weight is adjusted so that the entropy stays near it.
        entropy_cost_adjustment_speed: how much faster the weight moves than other parameters.
        kl_cost: weight of KL(behaviour policy ‖ target policy).
        max_abs_reward: rewards are clipped to ± this in the loss; 0: not at all.
        max_gradient_norm: gradients are scaled down to this global norm; 0: not at all.
        precision: in which the network computes, see seed_rl.precision: 'float32', 'bfloat16' or
          'float16'. Parameters, loss and V-trace are float32.
        """
        losses.check_numbers(discount, lambda_, max_abs_reward)
        if unroll_length < 1 or batch_size < 1:
            raise UserError(
                "VTraceAgent.unroll_length and batch_size must be at least 1, got "
                f"{unroll_length} and {batch_size}"
            )
        self.unroll_length = unroll_length
        self.batch_size = batch_size
        self._queue_capacity = queue_capacity or batch_size
        if self._queue_capacity < batch_size:
            raise UserError(
                f"VTraceAgent.queue_capacity={queue_capacity} must be at least the batch_size, "
                f"{batch_size}: a batch would never be complete"
            )
        self.precision = precision
        network = network_in_precision(network, precision)
        self._optimizer = optimizer
        self._max_gradient_norm = max_gradient_norm
        self._loss_settings = {
            "discount": discount,
            "lambda_": lambda_,
            "baseline_cost": baseline_cost,
            "kl_cost": kl_cost,
            "max_abs_reward": max_abs_reward,
        }
        self._target_entropy = target_entropy
        self._adjustment_speed = entropy_cost_adjustment_speed
        if target_entropy is not None and entropy_cost <= 0:
            raise UserError(
                "with VTraceAgent.target_entropy, entropy_cost is where its weight starts and must "
                f"be positive, got {entropy_cost}"
            )
        # A logarithm, so that the cost stays positive whatever the optimizer does, in units of
        # the adjustment speed, since an optimizer such as Adam takes steps of one size.
        self._entropy_cost_parameter = tf.Variable(
            np.log(entropy_cost or 1.0) / entropy_cost_adjustment_speed, dtype=tf.float32
        )
        self._fixed_entropy_cost = entropy_cost

        self._distribution = get_parametric_distribution_for_action_space(action_space)
        if has_parameter(network, "observation_space"):
            self._network = network(self._distribution, observation_space=observation_space)
        else:
            self._network = network(self._distribution)
        specs = tensor_specs(observation_space)
        if isinstance(specs, tf.TensorSpec):
            self._network.build(tuple(specs.shape), specs.dtype.as_numpy_dtype)
        else:
            self._network.build(specs)
        # Networks of one's own need not have any.
        self._batch_statistics: Callable[[Any], list[Moments]] = getattr(
            self._network, "batch_statistics", lambda _: []
        )
        self._update_statistics = getattr(self._network, "update_statistics", lambda _: None)

    def initial_state(self, batch_size: int) -> Any:
        return self._network.initial_state(batch_size)

    def policy(
        self, env_ids: Any, prev_actions: Any, env_outputs: EnvOutput, agent_state: Any
    ) -> tuple[AgentOutput, Any]:
        del env_ids  # every environment explores alike
        return self._network(prev_actions, env_outputs, agent_state)

    def greedy_policy(
        self, env_ids: Any, prev_actions: Any, env_outputs: EnvOutput, agent_state: Any
    ) -> tuple[AgentOutput, Any]:
        outputs, agent_state = self.policy(env_ids, prev_actions, env_outputs, agent_state)
        return outputs._replace(action=self._distribution.mode(outputs.policy_logits)), agent_state

    def make_unroll_sink(self, unroll_specs: Unroll) -> QueueSink:
        del unroll_specs
        return QueueSink(self.batch_size, self._queue_capacity)

    def make_optimizer(self, num_training_steps: int) -> Any:
        return self._optimizer(num_training_steps)

    def loss(self, batch: Unroll) -> LossOutputs:
        outputs, _ = self._network(
            batch.prev_actions, batch.env_outputs, batch.agent_state, unroll=True, is_training=True
        )
        result = losses.compute_loss(
            self._distribution,
            behaviour_policy_logits=batch.agent_outputs.policy_logits,
            behaviour_actions=batch.agent_outputs.action,
            target_policy_logits=outputs.policy_logits,
            baseline=outputs.baseline,
            env_outputs=batch.env_outputs,
            entropy_cost=self._entropy_cost(),
            **self._loss_settings,
        )
        loss = result.loss
        if self._target_entropy is not None:
            loss += losses.entropy_adjustment_loss(
                self._log_entropy_cost(), result.metrics["entropy"], self._target_entropy
            )
        metrics = {f"vtrace/{name}": value for name, value in result.metrics.items()}
        return LossOutputs(loss, metrics, (), weight=result.num_used)

    def batch_statistics(self, batch: Unroll) -> list[Moments]:
        return self._batch_statistics(batch.env_outputs.observation)

    def update_statistics(self, statistics: Sequence[Moments]) -> None:
        self._update_statistics(statistics)

    def _log_entropy_cost(self) -> tf.Tensor:
        return self._adjustment_speed * self._entropy_cost_parameter

    def _entropy_cost(self) -> tf.Tensor | float:
        if self._target_entropy is None:
            return self._fixed_entropy_cost
        return tf.exp(self._log_entropy_cost())

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        variables = list(self._network.trainable_variables)
        if self._target_entropy is not None:
            variables.append(self._entropy_cost_parameter)
        return variables

    @property
    def checkpoint_items(self) -> dict[str, Any]:
        return {"network": self._network, "entropy_cost": self._entropy_cost_parameter}

    @property
    def max_gradient_norm(self) -> float:
        return self._max_gradient_norm
