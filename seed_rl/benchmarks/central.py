"""Measures central inference over the wire, with a policy of one's choice."""

import tempfile
from collections.abc import Sequence
from typing import Any

from seed_rl.benchmarks.feeders import Load, feeding, rate
from seed_rl.benchmarks.sinks import DiscardingSink
from seed_rl.episode_statistics import EpisodeStatistics
from seed_rl.grpc_service import Server
from seed_rl.inference import (
    CentralInference,
    Policy,
    inference_input_specs,
    inference_output_specs,
)


def central_rows_per_second(
    agent: Any,
    policies: Sequence[Policy],
    specs: tuple[Any, Any],
    load: Load,
    batch_size: int,
    padded_size: int,
    seconds: float,
) -> float:
    """Returns rows a second through clients, wire, batcher, per-environment state, unroll store.

    Args:
      agent: has what CentralInference asks of one.
      policies: what is run for a batch, one a thread.
      specs: (observation specs, action specs).
      load: the clients.
      batch_size: environments a batch at most.
      padded_size: size that batches are padded to.
      seconds: of the measurement, after a warm-up.
    """
    inference = CentralInference(
        agent,
        policies,
        *specs,
        load.num_envs,
        DiscardingSink(),
        EpisodeStatistics(load.num_envs, action_repeat=1),
        lambda: 0,
        [padded_size],
    )
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/s"
        server = Server([address], num_environments=load.num_envs)
        server.bind(
            inference.functions(),
            name="inference",
            input_signature=inference_input_specs(specs[0]),
            output_signature=inference_output_specs(specs[1]),
            max_batch_size=batch_size,
        )
        server.start()
        try:
            with feeding(address, load, specs[0]):
                return rate(lambda: inference.num_steps, 2.0, seconds)
        finally:
            server.shutdown()
