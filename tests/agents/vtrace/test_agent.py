"""What the V-trace agent refuses when it is made."""

import gymnasium
import numpy as np
import pytest

from seed_rl.agents.vtrace.agent import VTraceAgent
from seed_rl.agents.vtrace.networks import MLP


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"discount": 2.0}, r"discount must be in \[0, 1\]; got 2"),
        ({"lambda_": -0.5}, r"lambda_ must be in \[0, 1\]; got -0.5"),
        ({"max_abs_reward": -1.0}, "max_abs_reward must not be negative; got -1"),
        ({"unroll_length": 0}, "unroll_length and batch_size must be at least 1, got 0 and 32"),
        ({"batch_size": -3}, "unroll_length and batch_size must be at least 1, got 100 and -3"),
    ],
)
def test_senseless_settings_are_refused(settings, expected):
    spaces = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(2)
    VTraceAgent(*spaces, network=MLP)
    with pytest.raises(ValueError, match=expected):
        VTraceAgent(*spaces, network=MLP, **settings)
