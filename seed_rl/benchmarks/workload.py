"""The workload of the benchmarks: V-trace with the Nature-CNN on Atari frames, stacked by it."""

import functools
from typing import Any

import gymnasium
import numpy as np

from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
from seed_rl.agents.vtrace.agent import VTraceAgent
from seed_rl.agents.vtrace.networks import ImpalaShallow

OBSERVATION_SPACE = gymnasium.spaces.Box(0, 255, (84, 84, 1), np.uint8)
ACTION_SPACE = gymnasium.spaces.Discrete(18)
UNROLL_LENGTH = 20  # agent steps
BATCH_SIZE = 32  # unrolls


def make_agent() -> VTraceAgent:
    """Returns the agent, with batches of IMPALA's size: 32 unrolls of 20 agent steps."""
    return VTraceAgent(
        OBSERVATION_SPACE,
        ACTION_SPACE,
        network=functools.partial(ImpalaShallow, stack_size=4),
        unroll_length=UNROLL_LENGTH,
        batch_size=BATCH_SIZE,
        max_abs_reward=1.0,
        max_gradient_norm=40.0,
    )


def specs() -> tuple[Any, Any]:
    """Returns (observation specs, action specs)."""
    return agent_observation_specs(OBSERVATION_SPACE), agent_action_specs(ACTION_SPACE)
