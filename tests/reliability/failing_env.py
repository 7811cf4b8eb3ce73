"""An environment that misbehaves in its first step, as FAILURE says, if it is number 5."""

import os

import gymnasium
import numpy as np


class Failing(gymnasium.Env):
    """Observes zeros."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, env_index: int):
        self._fails = env_index == 5

    def reset(self, *, seed=None, options=None):
        self._step = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._step += 1
        failure = os.environ["FAILURE"] if self._fails and self._step == 1 else ""
        if failure == "raise":
            raise RuntimeError("the simulator crashed")
        reward = {"nan": np.nan, "huge": 1e38}.get(failure, 1.0)
        shape = 3 if failure == "shape" else 2
        return np.zeros(shape, np.float32), reward, False, False, {}


def make(env_index: int = 0) -> gymnasium.Env:
    """Makes one environment."""
    return Failing(env_index)
