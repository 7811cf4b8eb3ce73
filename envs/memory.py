"""An environment that only an agent with a memory can solve."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from seed_rl.user_error import UserError


class MemoryEnvironment(gymnasium.Env):
    """A cue at the first step decides which action is right `delay` steps later.

    The first observation is the cue, one-hot; all later ones are zeros. An episode has delay + 1
    actions, of which only the last one counts: reward 1 if it is the cue's number, else 0. The
    best mean return is 1; without a memory it is 1 / num_cues.

    Args:
        delay: steps between the cue and the action that counts, at least 1.
        num_cues: how many cues, and actions, there are; at least 2.

    Raises:
        UserError: delay or num_cues is too small.
    """

    def __init__(self, delay: int, num_cues: int):
        if delay < 1 or num_cues < 2:
            raise UserError(
                "A memory environment needs delay ≥ 1 and num_cues ≥ 2, got "
                f"delay={delay} and num_cues={num_cues}"
            )
        self.observation_space = spaces.Box(0.0, 1.0, (num_cues,), np.float32)
        self.action_space = spaces.Discrete(num_cues)
        self._delay = delay
        self._num_cues = num_cues
        self._cue = 0
        self._num_actions = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Draws a cue and shows it."""
        super().reset(seed=seed)
        self._cue = int(self.np_random.integers(self._num_cues))
        self._num_actions = 0
        observation = np.zeros(self._num_cues, np.float32)
        observation[self._cue] = 1.0
        return observation, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Takes one action; the one after `delay` others ends the episode."""
        self._num_actions += 1
        terminated = self._num_actions > self._delay
        reward = float(terminated and int(action) == self._cue)
        return np.zeros(self._num_cues, np.float32), reward, terminated, False, {}


@gin.configurable
def memory_environment(env_index: int = 0, delay: int = 10, num_cues: int = 2) -> gymnasium.Env:
    """Makes a MemoryEnvironment; all of a run's environments are alike but for their seeds."""
    del env_index
    return MemoryEnvironment(delay, num_cues)
