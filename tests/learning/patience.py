"""An environment in which everything hangs on the first of two actions."""

import gymnasium
import numpy as np


class Patience(gymnasium.Env):
    """Action 0 at the first step ends the episode; action 1 leads to a step with a reward of 1.

    With returns cut at the first observation of an episode instead of at the end of the one before,
    or with rewards of the episode before, the first action has no consequences and is never learnt.
    """

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._waited = False
        return np.array([1, 0], np.float32), {}

    def step(self, action):
        if self._waited:
            return np.zeros(2, np.float32), 1.0, True, False, {}
        self._waited = True
        return np.array([0, 1], np.float32), 0.0, bool(action == 0), False, {}
