"""Client processes that call central inference as fast as it answers."""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from seed_rl.grpc_service import Client, RpcError
from seed_rl.nests import map_nest
from seed_rl.structures import EnvOutput


class Load(NamedTuple):
    """How many clients call, and with how many environments each."""

    num_clients: int
    envs_per_client: int

    @property
    def num_envs(self) -> int:
        return self.num_clients * self.envs_per_client


def constant_env_outputs(num_rows: int, observation_specs: Any, seed: int = 0) -> EnvOutput:
    """Returns an EnvOutput of leaves [num_rows, …] with random observations; no episode ends."""
    rng = np.random.default_rng(seed)

    def observation(spec: Any) -> np.ndarray:
        shape = (num_rows, *spec.shape)
        if spec.dtype.kind in "iu":
            return rng.integers(0, 256, shape).astype(spec.dtype)
        return rng.normal(size=shape).astype(spec.dtype)

    return EnvOutput(
        reward=np.zeros(num_rows, np.float32),
        done=np.zeros(num_rows, np.bool_),
        observation=map_nest(observation, observation_specs),
        abandoned=np.zeros(num_rows, np.bool_),
        episode_step=np.ones(num_rows, np.int32),
    )


def _feed(address: str, first_env_id: int, num_rows: int, observation_specs: Any) -> None:
    env_ids = np.arange(first_env_id, first_env_id + num_rows, dtype=np.int32)
    run_ids = np.ones(num_rows, np.int64)
    env_outputs = constant_env_outputs(num_rows, observation_specs)
    raw_rewards = np.zeros(num_rows, np.float32)
    with contextlib.suppress(RpcError), Client(address, connect_timeout=60.0) as client:
        while True:
            client.inference(env_ids, run_ids, env_outputs, raw_rewards)


@contextlib.contextmanager
def feeding(address: str, load: Load, observation_specs: Any) -> Iterator[None]:
    """Runs the clients of `load` while the block runs."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_feed,
            args=(address, i * load.envs_per_client, load.envs_per_client, observation_specs),
            daemon=True,
        )
        for i in range(load.num_clients)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def rate(counter: Any, warm_up_seconds: float, seconds: float) -> float:
    """Returns how much `counter()` grows a second, after it has begun to grow and a warm-up."""
    start = counter()
    deadline = time.monotonic() + 120.0
    while counter() == start:
        if time.monotonic() > deadline:
            raise RuntimeError("nothing arrived within two minutes")
        time.sleep(0.05)
    time.sleep(warm_up_seconds)
    before, began = counter(), time.monotonic()
    time.sleep(seconds)
    return (counter() - before) / (time.monotonic() - began)
