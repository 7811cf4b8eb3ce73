"""Inference on devices of its own, and the whole learner on several."""

import threading

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from seed_rl.actor import Actor
from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
from seed_rl.devices import Placement
from seed_rl.environment import make_environment_batch
from seed_rl.inference_policies import InferencePolicies, variables_of
from seed_rl.learner import Learner
from seed_rl.structures import EnvOutput
from seed_rl.training import Trainer
from seed_rl.user_error import UserError


def copies_of(make_agent, name, placement):
    copies = []
    for device in placement.copies:
        with tf.device(device):
            copies.append(make_agent(name))
    return copies


def inputs_of(agent, seed=0):
    rng = np.random.default_rng(seed)
    outputs = EnvOutput(
        rng.normal(size=2).astype(np.float32),
        np.array([False, True]),
        rng.normal(size=(2, 3)).astype(np.float32),
        np.array([False, False]),
        np.zeros(2, np.int32),
    )
    return np.arange(2, dtype=np.int32), np.zeros(2, np.int32), outputs, agent.initial_state(2)


def test_the_first_cpus_train_and_the_others_infer(place):
    placement = place(2)
    assert [d[-5:] for d in placement.training_devices] == ["CPU:0", "CPU:1"]
    assert [d[-5:] for d in placement.inference_devices] == ["CPU:2", "CPU:3"]
    assert placement.copies == placement.inference_devices
    assert placement.describe() == (
        "training on CPU:0, CPU:1 (MirroredStrategy, 2 replicas); inference on CPU:2, CPU:3"
    )


def test_where_all_train_all_infer(place):
    placement = place(4)
    assert placement.inference_devices == placement.training_devices
    assert placement.copies == placement.training_devices[1:]


@pytest.mark.parametrize("number", [0, 5])
def test_more_devices_than_there_are_is_an_error_that_lists_them(place, number):
    with pytest.raises(UserError, match=rf"num_training_cpus={number}, but there are 4.*CPU:3"):
        place(number)


@pytest.mark.parametrize("name", ["vtrace", "r2d2"])
@pytest.mark.parametrize("encodes", [False, True])
def test_copies_run_on_their_device_and_keep_the_stated_lag(
    make_agent, make_batch, place, name, encodes
):
    placement = place(2)._replace(encodes=encodes)
    with placement.scope():
        agent = make_agent(name)
        optimizer = agent.make_optimizer(10)
    copies = copies_of(make_agent, name, placement)
    for variable in variables_of(copies[0]):
        variable.assign(tf.ones_like(variable))  # as if its factory had drawn others
    policies = InferencePolicies(agent, copies, placement, period=3)
    trainer = Trainer(agent, optimizer, placement=placement)
    kernel, copied = agent.trainable_variables[0], copies[0].trainable_variables[0]
    np.testing.assert_array_equal(copied, kernel)
    lags = []
    for step in range(1, 7):
        trainer.step(make_batch(name, step))
        policies.update(step)
        lags.append(policies.lag(step))
        assert np.array_equal(copied, kernel) == (step % 3 == 0)
        assert policies.version(step) == step - lags[-1]
    assert lags == [1, 2, 0, 1, 2, 0]
    for policy, device in zip(policies.policies, placement.inference_devices, strict=True):
        outputs, state = policy(*inputs_of(agent))
        expected, _ = agent.policy(*inputs_of(agent))
        for leaf in tf.nest.flatten((outputs, state)):
            assert leaf.device.endswith(device)
        np.testing.assert_allclose(outputs[1], expected[1], rtol=1e-5, atol=1e-6)


def test_another_factory_is_found_out(make_agent, place):
    placement = place(3)
    agent = make_agent("vtrace")
    wider = make_agent("vtrace", network=lambda d: _mlp(d, 16))
    with pytest.raises(ValueError, match="factory must make the same every time"):
        InferencePolicies(agent, [wider], placement)


def _mlp(distribution, size):
    from seed_rl.agents.vtrace.networks import MLP

    return MLP(distribution, hidden_sizes=(size,), normalize_observations=True)


class Steps(gymnasium.Env):
    """Episodes of seven steps that pay for action 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = np.full(3, 0.1 * self.steps, np.float32)
        return observation, float(action), self.steps == 7, False, {}


@pytest.fixture
def run_learner(tmp_path, make_agent):
    """Returns a function that runs a learner of two environments on a placement."""

    def run(placement, frames):
        with placement.scope():
            agent = make_agent("vtrace", batch_size=4)
        address = f"unix:{tmp_path}/socket"
        learner = Learner(
            agent,
            agent_observation_specs(Steps.observation_space),
            agent_action_specs(Steps.action_space),
            2,
            [address],
            str(tmp_path / "log"),
            total_frames=frames,
            placement=placement,
            agent_copies=copies_of(
                lambda name: make_agent(name, batch_size=4), "vtrace", placement
            ),
            prefetch=True,
            profile_steps=range(2, 4),
        )
        actor = Actor(make_environment_batch(Steps, [0, 1], 0), 0, address)
        stop = threading.Event()
        thread = threading.Thread(target=actor.run, args=(stop.is_set,), daemon=True)
        thread.start()
        try:
            learner.run(threading.Event())
        finally:
            stop.set()
            thread.join(60.0)
        return learner, agent

    return run


def test_a_run_on_two_devices_with_another_for_inference_goes_on_with_one(
    tmp_path, place, run_learner
):
    placement = place(2)
    learner, agent = run_learner(placement, 200)
    steps = learner._trainer.num_steps
    assert steps >= 10  # of 16 agent steps each; some unrolls are still under way
    assert (tmp_path / "log" / "saved_model" / "saved_model.pb").exists()
    assert list((tmp_path / "log" / "plugins" / "profile").glob("*/*.xplane.pb"))
    one = placement.training_devices[:1]
    alone = Placement(one, one)
    resumed, again = run_learner(alone, learner.frames)
    assert resumed._trainer.num_steps == steps
    for got, expected in zip(again.trainable_variables, agent.trainable_variables, strict=True):
        np.testing.assert_array_equal(got, expected)
