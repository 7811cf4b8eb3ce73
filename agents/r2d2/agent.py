"""The R2D2 agent: what it supplies to the learner."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gin
import gymnasium
import numpy as np
import tensorflow as tf
from absl import logging

from seed_rl import optimizers
from seed_rl.agent import Agent, LossOutputs
from seed_rl.agents.r2d2 import exploration, losses, networks
from seed_rl.agents.r2d2.networks import AgentOutput
from seed_rl.environment_factory import has_parameter
from seed_rl.normalization import Moments
from seed_rl.precision import network_in_precision
from seed_rl.replay import PrioritizedReplay
from seed_rl.replay_memory import check_replay_fits
from seed_rl.replay_sink import ReplayBatch, ReplaySink
from seed_rl.setting_checks import check_number
from seed_rl.structures import EnvOutput
from seed_rl.unrolls import Unroll
from seed_rl.user_error import UserError

# What training and inference need beside the replay, for the network and the batches of the paper.
_RESERVED_BYTES = 2 * 2**30


@gin.configurable
class R2D2Agent(Agent):
    """Recurrent double Q-learning from prioritised replay (Kapturowski et al. 2019).

    The defaults are the settings of SEED RL for Atari-57 (Espeholt et al. 2020, section A.3.1), but
    for the network, which is made for the observation space.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        num_envs: int,
        network: Callable[..., Any] = networks.DuelingLSTMDQNAuto,
        optimizer: Callable[[int], Any] = optimizers.adam,
        unroll_length: int = 80,
        burn_in: int = 40,
        batch_size: int = 64,
        discount: float = 0.997,
        n_steps: int = 5,
        target_update_period: int = 2500,
        replay_size: int | None = 100_000,
        replay_max_bytes: float | None = None,
        min_replay_size: int = 5_000,
        replay_ratio: float = 0.75,
        priority_exponent: float = 0.9,
        importance_sampling_exponent: float = 0.6,
        eta: float = 0.9,
        max_abs_reward: float = 0.0,
        max_gradient_norm: float = 80.0,
        num_eval_envs: int | None = 0,
        eval_epsilon: float = 1e-3,
        use_stored_state: bool = True,
        save_replay: bool = False,
        max_backlog: int = 0,
        precision: str = "float32",
    ):
        """Args:
        observation_space: of one environment.
        action_space: of one environment; Discrete.
        num_envs: environments of all actors together.
        network: makes a network, from num_actions and the observation_space, or, if it has no such
          parameter, from num_actions, observation_shape and observation_dtype.
        optimizer: makes the Keras optimizer, from the number of training steps of the whole run.
        unroll_length: agent steps an unroll that are learned from.
        burn_in: agent steps before them that only warm the recurrent state up. Successive unrolls
          overlap by so many.
        batch_size: unrolls a training step.
        discount: γ, an agent step.
        n_steps: n of the n-step targets.
        target_update_period: training steps between copies to the target network.
        replay_size: unrolls held; None leaves it to replay_max_bytes.
        replay_max_bytes: bytes held at most; None: no limit but replay_size.
        min_replay_size: unrolls collected before training starts.
        replay_ratio: how often an unroll is trained on in the mean.
        priority_exponent: unrolls are drawn in proportion to their priority to this power.
        importance_sampling_exponent: of the weights against the bias of that.
        eta: the share of the largest error in an unroll's priority; the rest is the mean error's.
        max_abs_reward: rewards are clipped to ± this in the loss; 0: not at all.
        max_gradient_norm: gradients are scaled down to this global norm; 0: not at all.
        num_eval_envs: environments, the last ones, that only evaluate; None: as large a share as
          the paper's 30 of 640, rounded.
        eval_epsilon: share of random actions in them.
        use_stored_state: start from the recurrent state in which the unroll was recorded; if not,
          from zeros.
        save_replay: save the replay beside every checkpoint, so that a resumed run has it at once.
        max_backlog: unrolls that training may be behind what the ratio asks for before inference
          waits; 0: two batches.
        precision: in which the network computes, see seed_rl.precision: 'float32', 'bfloat16' or
          'float16'. Parameters, targets and loss are float32.
        """
        if not isinstance(action_space, gymnasium.spaces.Discrete):
            raise UserError(
                "R2D2 learns Q-values of discrete actions, but the action space is "
                f"{action_space}: use V-trace, or make the actions discrete"
            )
        self.unroll_length, self.num_overlapping_steps = unroll_length, burn_in
        self.batch_size = batch_size
        if num_eval_envs is None:
            num_eval_envs = (num_envs * 30 + 320) // 640
        self.num_eval_envs = num_eval_envs
        self._replay_settings: dict[str, Any] = {
            "size": replay_size,
            "importance_sampling_exponent": importance_sampling_exponent,
            "max_bytes": replay_max_bytes,
        }
        self._sink_settings: dict[str, Any] = {
            "min_unrolls": min_replay_size,
            "replay_ratio": replay_ratio,
            "priority_exponent": priority_exponent,
            "save": save_replay,
            "max_backlog": max_backlog,
        }
        self._loss_settings: dict[str, Any] = {
            "gamma": discount,
            "n_steps": n_steps,
            "max_abs_reward": max_abs_reward,
        }
        self._eta = eta
        self._check_numbers(target_update_period, max_gradient_norm, eval_epsilon)
        self._optimizer = optimizer
        self._max_gradient_norm = max_gradient_norm
        self._target_update_period = target_update_period
        self._use_stored_state = use_stored_state
        self._num_actions = int(action_space.n)
        self._explore = functools.partial(
            exploration.apply_epsilon_greedy,
            num_training_envs=max(1, num_envs - num_eval_envs),
            num_eval_envs=num_eval_envs,
            eval_epsilon=eval_epsilon,
            num_actions=self._num_actions,
        )
        self.precision = precision
        network = network_in_precision(network, precision)
        self._network, self._target_network = (
            network(num_actions=self._num_actions, **_described(observation_space, network))
            for _ in range(2)
        )
        # Networks of one's own need not have any.
        self._batch_statistics: Callable[[Any], list[Moments]] = getattr(
            self._network, "batch_statistics", lambda _: []
        )
        self._update_statistics = getattr(self._network, "update_statistics", lambda _: None)
        self._num_updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._copy_to_target()

    def _check_numbers(self, target_update_period, max_gradient_norm, eval_epsilon) -> None:
        replay, sink, loss = self._replay_settings, self._sink_settings, self._loss_settings
        for name, value, least in (
            ("unroll_length", self.unroll_length, 1),
            ("burn_in", self.num_overlapping_steps, 0),
            ("batch_size", self.batch_size, 1),
            ("n_steps", loss["n_steps"], 1),
            ("min_replay_size", sink["min_unrolls"], 1),
            ("max_backlog", sink["max_backlog"], 0),
            ("num_eval_envs", self.num_eval_envs, 0),
            ("priority_exponent", sink["priority_exponent"], 0),
            ("importance_sampling_exponent", replay["importance_sampling_exponent"], 0),
            ("max_abs_reward", loss["max_abs_reward"], 0),
            ("max_gradient_norm", max_gradient_norm, 0),
        ):
            check_number(f"R2D2Agent.{name}", value, at_least=least)
        for name, value in (
            ("discount", loss["gamma"]),
            ("eta", self._eta),
            ("eval_epsilon", eval_epsilon),
        ):
            check_number(f"R2D2Agent.{name}", value, at_least=0, at_most=1)
        check_number("R2D2Agent.replay_ratio", sink["replay_ratio"], above=0)
        check_number(
            "R2D2Agent.target_update_period", target_update_period, at_least=1, below=2**63
        )
        self._check_replay_size()
        if self.unroll_length <= self.num_overlapping_steps:
            raise UserError(
                f"R2D2Agent.unroll_length ({self.unroll_length}) must be greater than its burn_in "
                f"({self.num_overlapping_steps})"
            )

    def _check_replay_size(self) -> None:
        settings, min_unrolls = self._replay_settings, self._sink_settings["min_unrolls"]
        for name in ("size", "max_bytes"):
            if settings[name] is not None:
                check_number(f"R2D2Agent.replay_{name}", settings[name], at_least=1)
                settings[name] = int(settings[name])
        size = settings["size"]
        if size is not None and size < min_unrolls:
            raise UserError(
                f"R2D2Agent.replay_size ({size}) must be at least its min_replay_size "
                f"({min_unrolls}): what training begins with would not be kept"
            )

    def initial_state(self, batch_size: int) -> Any:
        return self._network.initial_state(batch_size)

    def policy(
        self, env_ids: Any, prev_actions: Any, env_outputs: EnvOutput, agent_state: Any
    ) -> tuple[AgentOutput, Any]:
        outputs, agent_state = self._network((prev_actions, env_outputs), agent_state)
        return outputs._replace(action=self._explore(outputs.action, env_ids)), agent_state

    def greedy_policy(
        self, env_ids: Any, prev_actions: Any, env_outputs: EnvOutput, agent_state: Any
    ) -> tuple[AgentOutput, Any]:
        del env_ids
        return self._network((prev_actions, env_outputs), agent_state)

    def make_unroll_sink(self, unroll_specs: Unroll) -> ReplaySink:
        """See Agent. Says how much memory the replay will take.

        Raises:
          UserError: there is not that much.
        """
        limits = {name: self._replay_settings[name] for name in ("size", "max_bytes")}
        logging.info(
            "%s", check_replay_fits(unroll_specs, **limits, reserved_bytes=_RESERVED_BYTES)
        )
        return ReplaySink(
            PrioritizedReplay(specs=unroll_specs, **self._replay_settings),
            self.batch_size,
            initial_priorities=self.initial_priorities,
            **self._sink_settings,
        )

    def initial_priorities(self, unrolls: Unroll) -> np.ndarray:
        """Priorities of finished unrolls from the Q-values that acted (section 2.3).

        The acting network stands for both, the one that learns and the target network.

        Args:
          unrolls: leaves [n, burn_in + T + 1, …].

        Returns:
          float32 [n].
        """

        def time_major(x: Any) -> np.ndarray:
            return np.swapaxes(x[:, self.num_overlapping_steps :], 0, 1)

        q_values = time_major(unrolls.agent_outputs.q_values)
        outputs = unrolls.env_outputs
        errors = losses.td_errors(
            q_values,
            time_major(unrolls.agent_outputs.action),
            q_values.max(axis=-1),
            EnvOutput(
                time_major(outputs.reward),
                time_major(outputs.done),
                (),
                time_major(outputs.abandoned),
                (),
            ),
            **self._loss_settings,
        )
        return losses.priorities_of(errors, self._eta).numpy()

    def make_optimizer(self, num_training_steps: int) -> Any:
        return self._optimizer(num_training_steps)

    def loss(self, batch: ReplayBatch) -> LossOutputs:
        unrolls = batch.unrolls
        state = unrolls.agent_state
        if not self._use_stored_state:
            state = tf.nest.map_structure(tf.zeros_like, state)
        result = losses.compute_loss_and_priorities(
            self._network,
            self._target_network,
            state,
            unrolls.prev_actions,
            unrolls.env_outputs,
            unrolls.agent_outputs,
            burn_in=self.num_overlapping_steps,
            eta=self._eta,
            **self._loss_settings,
        )
        loss = tf.reduce_mean(result.loss * batch.weights)
        metrics = {
            "r2d2/loss_unweighted": tf.reduce_mean(result.loss),
            "r2d2/priority_mean": tf.reduce_mean(result.priorities),
            "r2d2/priority_max": tf.reduce_max(result.priorities),
            "r2d2/weight_mean": tf.reduce_mean(batch.weights),
            "r2d2/acting_q_value": tf.reduce_mean(
                tf.reduce_max(unrolls.agent_outputs.q_values, axis=-1)
            ),
        }
        return LossOutputs(loss, metrics, result.priorities)

    def batch_statistics(self, batch: ReplayBatch) -> list[Moments]:
        return self._batch_statistics(batch.unrolls.env_outputs.observation)

    def update_statistics(self, statistics: Sequence[Moments]) -> None:
        self._update_statistics(statistics)

    def after_training_step(self) -> None:
        """Copies the network to the target network, once in target_update_period calls."""
        due = self._num_updates.assign_add(1) % self._target_update_period == 0
        for target, source in self._variable_pairs():
            target.assign(tf.where(due, source, target))

    def _copy_to_target(self) -> None:
        for target, source in self._variable_pairs():
            target.assign(source)

    def _variable_pairs(self) -> list[tuple[tf.Variable, tf.Variable]]:
        return list(
            zip(
                self._target_network.variables,  # with the statistics of observations
                self._network.variables,
                strict=True,
            )
        )

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        return list(self._network.trainable_variables)

    @property
    def checkpoint_items(self) -> dict[str, Any]:
        return {
            "network": self._network,
            "target_network": self._target_network,
            "num_updates": self._num_updates,
        }

    @property
    def max_gradient_norm(self) -> float:
        return self._max_gradient_norm

    def train_steps_per_frame(self, action_repeat: int) -> float:
        """Training steps for each environment frame, from the replay ratio."""
        unrolls_per_frame = 1.0 / (self.unroll_length * action_repeat)
        return self._sink_settings["replay_ratio"] * unrolls_per_frame / self.batch_size


def _described(space: gymnasium.Space, network: Callable[..., Any]) -> dict[str, Any]:
    """The arguments by which a network is told of observations."""
    if has_parameter(network, "observation_space"):
        return {"observation_space": space}
    if not isinstance(space, gymnasium.spaces.Box):
        raise UserError(
            "this network of R2D2's takes observations that are one array, but the observation "
            f"space is {space}: bind R2D2Agent.network = @DuelingLSTMDQNAuto, which takes any"
        )
    return {"observation_shape": space.shape, "observation_dtype": space.dtype}
