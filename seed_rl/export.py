"""Writes a trained policy as a SavedModel, for use without this package."""

import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from seed_rl.agent import Agent
from seed_rl.nests import map_nest
from seed_rl.structures import EnvOutput


class _PolicyModule(tf.Module):
    """The functions of the SavedModel, and the variables they use."""

    def __init__(self, agent: Agent, observation_specs: Any, action_specs: Any):
        super().__init__()
        self._items = dict(agent.checkpoint_items)

        def rows(shape: tuple, dtype: Any) -> tf.TensorSpec:
            return tf.TensorSpec((None, *shape), tf.as_dtype(dtype))

        state = map_nest(lambda x: rows(x.shape[1:], x.dtype), agent.initial_state(1))
        inputs = (
            rows((), np.int32),
            map_nest(lambda s: rows(s.shape, s.dtype), action_specs),
            EnvOutput(
                reward=rows((), np.float32),
                done=rows((), np.bool_),
                observation=map_nest(lambda s: rows(s.shape, s.dtype), observation_specs),
                abandoned=rows((), np.bool_),
                episode_step=rows((), np.int32),
            ),
            state,
        )
        self.policy = tf.function(agent.policy, input_signature=inputs, autograph=False)
        self.greedy_policy = tf.function(
            agent.greedy_policy, input_signature=inputs, autograph=False
        )
        self.initial_state = tf.function(
            lambda: agent.initial_state(1), input_signature=(), autograph=False
        )


def export_policy(agent: Agent, observation_specs: Any, action_specs: Any, logdir: str) -> str:
    """Writes `logdir`/saved_model and returns its path.

    The model has `policy` and `greedy_policy`, (env_ids [B], prev_actions, env_outputs,
    agent_state) -> (agent_outputs, agent_state), and `initial_state()` of one environment.
    """
    path = str(pathlib.Path(logdir) / "saved_model")
    tf.saved_model.save(_PolicyModule(agent, observation_specs, action_specs), path)
    return path
