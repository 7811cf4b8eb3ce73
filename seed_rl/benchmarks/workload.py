"""The workload of the benchmarks: an agent with the Nature-CNN on Atari frames, stacked by it."""

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from seed_rl.agent import Agent
from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
from seed_rl.agents.r2d2.agent import R2D2Agent
from seed_rl.agents.r2d2.networks import DuelingLSTMDQNNet
from seed_rl.agents.vtrace.agent import VTraceAgent
from seed_rl.agents.vtrace.networks import ImpalaShallow
from seed_rl.envs import atari

OBSERVATION_SPACE = gymnasium.spaces.Box(0, 255, (84, 84, 1), np.uint8)
NUM_ACTIONS = 18
ACTION_SPACE = gymnasium.spaces.Discrete(NUM_ACTIONS)


def _make_vtrace(num_envs: int) -> Agent:
    """V-trace with batches of IMPALA's size: 32 unrolls of 20 agent steps."""
    del num_envs
    return VTraceAgent(
        OBSERVATION_SPACE,
        ACTION_SPACE,
        network=functools.partial(ImpalaShallow, stack_size=4),
        unroll_length=20,
        batch_size=32,
        max_abs_reward=1.0,
        max_gradient_norm=40.0,
    )


def _make_r2d2(num_envs: int) -> Agent:
    """R2D2 as in atari_r2d2_small.gin, but for larger batches and a replay that is soon full."""
    return R2D2Agent(
        OBSERVATION_SPACE,
        ACTION_SPACE,
        num_envs,
        network=functools.partial(DuelingLSTMDQNNet, stack_size=4, lstm_units=256, head_units=256),
        unroll_length=20,
        burn_in=10,
        batch_size=16,
        replay_size=10_000,
        min_replay_size=64,
        replay_ratio=1.0,
    )


AGENTS: dict[str, Callable[[int], Agent]] = {"vtrace": _make_vtrace, "r2d2": _make_r2d2}


def make_agent(name: str = "vtrace", num_envs: int = 64) -> Agent:
    """Returns the agent of that name in AGENTS."""
    return AGENTS[name](num_envs)


def specs() -> tuple[Any, Any]:
    """Returns (observation specs, action specs)."""
    return agent_observation_specs(OBSERVATION_SPACE), agent_action_specs(ACTION_SPACE)


def game_frames(num_frames: int, game: str = "Pong") -> np.ndarray:
    """Returns successive frames of random play, uint8 [num_frames, 84, 84, 1]."""
    env = atari.create_environment(game=game, frame_stack=1)
    rng = np.random.default_rng(0)
    frames = [env.reset(seed=0)[0]]
    while len(frames) < num_frames:
        frame, _, terminated, truncated, _ = env.step(rng.integers(NUM_ACTIONS))
        frames.append(env.reset()[0] if terminated or truncated else frame)
    return np.stack(frames)
