"""Specs of what travels between environments and agents."""

from typing import Any

import gymnasium
import numpy as np

from seed_rl.grpc_service import TensorSpec
from seed_rl.nests import map_nest
from seed_rl.spaces import action_specs, observation_specs


def agent_observation_specs(space: gymnasium.Space) -> Any:
    """Returns the nest of TensorSpec of one observation.

    Raises:
      UnsupportedSpaceError: the space cannot be used.
    """
    return map_nest(lambda s: TensorSpec(s.shape, s.dtype, s.name), observation_specs(space))


def agent_action_specs(space: gymnasium.Space) -> Any:
    """Returns the nest of TensorSpec of one action as agents put it out.

    Discrete actions are int32, whatever integer type the space has; continuous ones float32.

    Raises:
      UnsupportedSpaceError: the space cannot be used.
    """

    def spec(s: Any) -> TensorSpec:
        dtype = np.int32 if np.dtype(s.dtype).kind in "iu" else np.float32
        return TensorSpec(s.shape, np.dtype(dtype), s.name)

    return map_nest(spec, action_specs(space))
