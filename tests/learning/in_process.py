"""Trains an agent in one process and one thread: the real parts without the wire, repeatably."""

from collections.abc import Callable

import gin
import numpy as np
import tensorflow as tf

from seed_rl import config
from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
from seed_rl.environment import make_environment_batch
from seed_rl.episode_statistics import EpisodeStatistics
from seed_rl.inference import CentralInference, unroll_specs
from seed_rl.nests import map_nest
from seed_rl.training import Trainer


def write(nest, indices, values) -> None:
    """Writes rows into the arrays of `nest`."""
    map_nest(lambda array, rows: array.__setitem__(indices, rows), nest, values)


class InProcessTraining:
    """Learner and one actor, taking turns: train whenever a batch is ready, then act."""

    def __init__(self, gin_config: str, bindings: list[str], num_envs: int, seed: int):
        """Args:
        gin_config: of seed_rl.configs.
        bindings: gin bindings that win over it.
        num_envs: environments.
        seed: of environments and network.
        """
        # One thread: there is nobody to wait for.
        no_limit = (
            f"VTraceAgent.queue_capacity={4 * num_envs}"
            if "vtrace" in gin_config
            else "R2D2Agent.max_backlog=1_000_000"
        )
        bindings = [*bindings, no_limit]
        experiment = config.load([gin_config], bindings, for_actor=False)
        tf.keras.utils.set_random_seed(seed)
        self._environments = make_environment_batch(experiment.environment, range(num_envs), seed)
        self.agent = config.make_agent(
            experiment.agent,
            self._environments.observation_space,
            self._environments.action_space,
            num_envs,
        )
        self.total_frames = int(gin.query_parameter("Learner.total_frames"))
        steps = self.total_frames * self.agent.train_steps_per_frame(action_repeat=1)
        self._trainer = Trainer(self.agent, self.agent.make_optimizer(round(steps)))
        self.statistics = EpisodeStatistics(num_envs, action_repeat=1)
        self._policy = tf.function(self.agent.policy, autograph=False)
        specs = (
            agent_observation_specs(self._environments.observation_space),
            agent_action_specs(self._environments.action_space),
        )
        self._sink = self.agent.make_unroll_sink(
            unroll_specs(self.agent, self._policy, *specs, num_envs)
        )
        self.inference = CentralInference(
            self.agent,
            [self._policy],
            *specs,
            num_envs,
            self._sink,
            self.statistics,
            lambda: self._trainer.num_steps,
            [num_envs],
        )
        self._run_ids = np.ones(num_envs, np.int64)
        self._pending = [self._environments.reset()]
        self._actions = map_nest(
            lambda s: np.zeros((num_envs, *s.shape), s.dtype),
            agent_action_specs(self._environments.action_space),
        )

    def run(self, stop: Callable[[], bool]) -> None:
        """Trains until `stop()` or the configured number of frames."""
        while self.inference.num_steps < self.total_frames and not stop():
            for rows in self._pending:
                actions = self.inference.step(
                    self._policy,
                    rows.indices,
                    self._run_ids[rows.indices],
                    rows.env_outputs,
                    rows.raw_rewards,
                )
                write(self._actions, rows.indices, actions)
            self._pending = self._environments.step(self._actions)
            while (metrics := self._trainer.train_from(self._sink, timeout=0.0)) is not None:
                self.metrics = metrics
