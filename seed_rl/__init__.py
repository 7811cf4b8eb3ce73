"""SEED RL: reinforcement learning with central inference on the learner."""

from seed_rl.version import __version__ as __version__
