"""What scripts/soak.py trains on: CartPole, every step of which is counted in a file.

The count outlives its process, however that ends.
"""

import mmap
import os
import pathlib
import secrets
import struct
from typing import Any

import gymnasium

from seed_rl.envs.gym_env import gym_env

_COUNT = struct.Struct("<q")


class Counted(gymnasium.Wrapper):
    """Counts the steps of an environment in a file of its own in the directory $SOAK_COUNTS."""

    def __init__(self, env: gymnasium.Env, env_index: int):
        super().__init__(env)
        directory = pathlib.Path(os.environ["SOAK_COUNTS"])
        path = directory / f"{env_index}_{os.getpid()}_{secrets.token_hex(4)}"
        path.write_bytes(_COUNT.pack(0))
        with open(path, "r+b") as file:
            self._count = mmap.mmap(file.fileno(), _COUNT.size)
        self._steps = 0

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self._steps += 1
        _COUNT.pack_into(self._count, 0, self._steps)
        return result


def make(env_index: int = 0) -> gymnasium.Env:
    """Makes one environment."""
    return Counted(gym_env(), env_index)


def total_steps(directory: pathlib.Path) -> int:
    """Steps of all environments that ever counted in `directory`."""
    contents = (path.read_bytes() for path in directory.iterdir())
    return sum(_COUNT.unpack(content)[0] for content in contents if len(content) == _COUNT.size)
