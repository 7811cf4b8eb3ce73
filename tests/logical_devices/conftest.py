"""For cases that need several logical CPU devices: TensorFlow is told before it initialises.

So each `cases_*.py` runs in a process of its own, which test_logical_devices.py starts; or by hand:

    SEED_RL_LOGICAL_CPUS=4 pytest tests/logical_devices/cases_training.py

Those in `hosts_*.py` run in two processes at once, SEED_RL_HOSTS=localhost:1234,localhost:1235 and
SEED_RL_HOST_INDEX say which one this is.
"""

import os

import numpy as np
import pytest

NUM_DEVICES = int(os.environ.get("SEED_RL_LOGICAL_CPUS", "0"))

if NUM_DEVICES:
    import gymnasium
    import tensorflow as tf

    from seed_rl.agents.r2d2.agent import R2D2Agent
    from seed_rl.agents.vtrace.agent import VTraceAgent
    from seed_rl.devices import make_placement
    from seed_rl.hosts import connect_hosts
    from seed_rl.optimizers import adam
    from seed_rl.replay_sink import ReplayBatch
    from seed_rl.structures import EnvOutput
    from seed_rl.unrolls import Unroll

    HOSTS = make_placement(
        accelerator="cpu",
        num_logical_cpus=NUM_DEVICES,
        connect=lambda: connect_hosts(
            os.environ.get("SEED_RL_HOSTS", "").split(","),
            int(os.environ.get("SEED_RL_HOST_INDEX", "0")),
            insecure=True,
        ),
    ).hosts

    OBSERVATION_SPACE = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    ACTION_SPACE = gymnasium.spaces.Discrete(2)
    NUM_UNROLLS, NUM_STEPS = 8, 5  # of a batch; of an unroll, T + 1

    def _vtrace(**options):
        from seed_rl.agents.vtrace.networks import MLP

        settings = {
            # Everything that a batch can influence in another way than by a plain mean.
            "network": lambda d, dtype="float32": MLP(
                d, hidden_sizes=(8,), normalize_observations=True, dtype=dtype
            ),
            "optimizer": lambda n: adam(n, learning_rate=0.02),
            "unroll_length": NUM_STEPS - 1,
            "batch_size": NUM_UNROLLS,
            "entropy_cost": 0.01,
            "target_entropy": 0.5,
            "kl_cost": 0.1,
            "max_gradient_norm": 0.3,
        }
        return VTraceAgent(OBSERVATION_SPACE, ACTION_SPACE, **{**settings, **options})

    def _r2d2(**options):
        from seed_rl.agents.r2d2.networks import DuelingLSTMDQNAuto

        settings = {
            "network": lambda num_actions, observation_space, dtype="float32": DuelingLSTMDQNAuto(
                num_actions,
                observation_space,
                hidden_sizes=(8,),
                lstm_units=4,
                head_units=4,
                normalize_observations=True,
                dtype=dtype,
            ),
            "optimizer": lambda n: adam(n, learning_rate=0.02),
            "unroll_length": NUM_STEPS - 2,
            "burn_in": 1,
            "batch_size": NUM_UNROLLS,
            "n_steps": 2,
            "target_update_period": 3,
            "max_gradient_norm": 0.5,
            "replay_size": 100,
            "min_replay_size": 10,
        }
        return R2D2Agent(OBSERVATION_SPACE, ACTION_SPACE, 4, **{**settings, **options})

    MAKERS = {"vtrace": _vtrace, "r2d2": _r2d2}


@pytest.fixture
def place():
    """Returns a function that makes the placement with so many CPUs that train."""

    def make(num_training):
        return make_placement(
            accelerator="cpu",
            num_logical_cpus=NUM_DEVICES,
            num_training_cpus=num_training,
            connect=lambda: HOSTS,
        )

    return make


@pytest.fixture
def make_agent():
    """Returns a function that makes an agent by name, always with the same variables."""

    def make(name, **options):
        tf.keras.utils.set_random_seed(7)
        return MAKERS[name](**options)

    return make


@pytest.fixture
def make_batch():
    """Returns a function that makes training batch number n for an agent, by name."""

    def make(name, number):
        rng = np.random.default_rng(number)
        shape = (NUM_STEPS, NUM_UNROLLS)
        # Parts of the batch differ in how many steps are masked out: some have none at all.
        abandoned = rng.random(shape) < np.linspace(0.0, 1.4, NUM_UNROLLS)
        outputs = EnvOutput(
            reward=rng.normal(size=shape).astype(np.float32),
            done=abandoned | (rng.random(shape) < 0.1),
            observation=rng.normal(size=(*shape, 3)).astype(np.float32),
            abandoned=abandoned,
            episode_step=np.zeros(shape, np.int32),
        )
        actions = rng.integers(0, 2, shape).astype(np.int32)
        tf.keras.utils.set_random_seed(number)
        agent = MAKERS[name]()
        state = tf.nest.map_structure(
            lambda x: rng.normal(size=x.shape).astype(np.float32),
            agent.initial_state(NUM_UNROLLS),
        )
        acted, _ = agent.policy(
            np.zeros(NUM_STEPS * NUM_UNROLLS, np.int32),
            actions.ravel(),
            EnvOutput(*(x.reshape(-1, *x.shape[2:]) for x in outputs)),
            agent.initial_state(NUM_STEPS * NUM_UNROLLS),
        )
        acted = tf.nest.map_structure(lambda x: x.numpy().reshape(*shape, *x.shape[1:]), acted)
        unroll = Unroll(
            agent_state=state,
            prev_actions=rng.integers(0, 2, shape).astype(np.int32),
            env_outputs=outputs,
            agent_outputs=acted._replace(action=actions),
            env_id=np.arange(NUM_UNROLLS, dtype=np.int32),
            policy_version=np.zeros(NUM_UNROLLS, np.int64),
        )
        if name == "vtrace":
            return unroll
        weights = rng.uniform(0.1, 1.0, NUM_UNROLLS).astype(np.float32)
        indices = np.arange(NUM_UNROLLS)
        return ReplayBatch(unroll, weights, indices, indices)

    return make
