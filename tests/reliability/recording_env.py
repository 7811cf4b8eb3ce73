"""An environment whose observations and rewards say where they come from.

The process that steps it can be told, by environment variables, where to kill itself:
SUICIDE_IN=step|reset, SUICIDE_AT=<number of the call of its first environment>.
"""

import os
import secrets
import signal
import time

import gymnasium
import numpy as np

EPISODE_STEPS = 10
LIVES = 1024
_STEPS = 16  # more than EPISODE_STEPS


def encode(life, step):
    """The reward of a step: float32 holds it, and an episode's sum, exactly."""
    return float(_STEPS * life + step)


def life_of_return(total: float) -> float:
    """Which life a whole episode's return is of; no whole number if of several."""
    steps = EPISODE_STEPS * (EPISODE_STEPS + 1) / 2
    return (total - steps) / (_STEPS * EPISODE_STEPS)


class Recording(gymnasium.Env):
    """Observes (env_index, life, episode, step); a life is one object, drawn at random."""

    observation_space = gymnasium.spaces.Dict(
        {
            "where": gymnasium.spaces.Box(-1, 2**31 - 1, (4,), np.int32),
            # So that sending it takes its time, in which a process may be killed.
            "picture": gymnasium.spaces.Box(0, 255, (200_000,), np.uint8),
        }
    )
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, env_index: int):
        self._env_index = env_index
        self._life = secrets.randbelow(LIVES)
        self._episode = -1
        self._calls = {"step": 0, "reset": 0}

    def _may_die(self, call: str) -> None:
        self._calls[call] += 1
        if os.environ.get("SUICIDE_IN") == call and self._calls[call] == int(
            os.environ["SUICIDE_AT"]
        ):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # until it comes

    def _observation(self):
        where = np.array([self._env_index, self._life, self._episode, self._step], np.int32)
        return {"where": where, "picture": np.full(200_000, self._life % 256, np.uint8)}

    def reset(self, *, seed=None, options=None):
        self._may_die("reset")
        self._episode, self._step = self._episode + 1, 0
        return self._observation(), {}

    def step(self, action):
        self._may_die("step")
        self._step += 1
        ended = self._step == EPISODE_STEPS
        return self._observation(), encode(self._life, self._step), ended, False, {}


def make(env_index: int = 0) -> gymnasium.Env:
    """Makes one environment."""
    return Recording(env_index)
