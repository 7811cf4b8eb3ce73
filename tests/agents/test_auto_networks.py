"""Networks and agents for any observation space."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
from seed_rl.agents.r2d2.agent import R2D2Agent
from seed_rl.agents.r2d2.networks import DuelingLSTMDQNAuto, DuelingLSTMDQNMLP
from seed_rl.agents.vtrace.agent import VTraceAgent
from seed_rl.agents.vtrace.networks import MLP, AutoNetwork, ImpalaShallow
from seed_rl.export import export_policy
from seed_rl.structures import EnvOutput
from seed_rl.training import Trainer
from seed_rl.unrolls import Unroll

T, B, ACTIONS = 3, 2, 4
VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float32)
NESTED = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
        "rest": spaces.Tuple([VECTOR, spaces.Discrete(4)]),
    }
)


def env_outputs(space, leading, seed=0):
    space.seed(seed)
    count = int(np.prod(leading))
    samples = [space.sample() for _ in range(count)]
    observation = tf.nest.map_structure(
        lambda *x: tf.constant(np.stack(x).reshape((*leading, *np.shape(x[0])))), *samples
    )
    done = np.zeros(leading, bool)
    done[-1, 0] = True
    return EnvOutput(
        np.ones(leading, np.float32), done, observation, np.zeros(leading, bool), None
    )._replace(episode_step=np.zeros(leading, np.int32))


def at(nest, t):
    return tf.nest.map_structure(lambda x: x[t], nest)


def assert_close(a, b):
    tf.nest.map_structure(lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-5), a, b)


@pytest.mark.parametrize("lstm_units", [0, 8])
def test_a_vtrace_network_unrolls_a_nest_as_it_steps(lstm_units):
    network = AutoNetwork(ACTIONS, NESTED, lstm_units=lstm_units)
    actions = np.ones((T, B), np.int32)
    outputs = env_outputs(NESTED, (T, B))
    state = network.initial_state(B)
    unrolled, last = network(actions, outputs, state, unroll=True, is_training=True)
    for t in range(T):
        output, state = network(actions[t], at(outputs, t), state, is_training=True)
        assert_close(output, at(unrolled, t))
    assert_close(state, last)


def test_an_r2d2_network_unrolls_a_nest_as_it_steps():
    network = DuelingLSTMDQNAuto(ACTIONS, NESTED)
    actions = np.ones((T, B), np.int32)
    outputs = env_outputs(NESTED, (T, B))
    state = network.initial_state(B)
    unrolled, last = network((actions, outputs), state, unroll=True)
    for t in range(T):
        output, state = network((actions[t], at(outputs, t)), state)
        assert_close(output, at(unrolled, t))
    assert_close(state, last)


def variables(make):
    keras.utils.set_random_seed(3)
    network = make()
    if isinstance(network, AutoNetwork | MLP):
        network.build(VECTOR.shape, VECTOR.dtype)
    return network


@pytest.mark.parametrize(
    ("auto", "plain"),
    [
        (
            lambda: AutoNetwork(ACTIONS, VECTOR),
            lambda: MLP(ACTIONS, separate_value_torso=True),
        ),
        (
            lambda: AutoNetwork(ACTIONS, VECTOR, lstm_units=4),
            lambda: MLP(ACTIONS, lstm_units=4),
        ),
        (
            lambda: DuelingLSTMDQNAuto(ACTIONS, VECTOR),
            lambda: DuelingLSTMDQNMLP(ACTIONS, VECTOR.shape),
        ),
    ],
)
def test_for_a_vector_it_is_the_network_of_dense_layers(auto, plain, tmp_path):
    auto, plain = variables(auto), variables(plain)
    for a, b in zip(auto.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    # A checkpoint of the one can be restored into the other.
    path = tf.train.Checkpoint(network=plain).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(network=auto).restore(path).assert_consumed()


def test_images_are_stacked_in_the_network():
    network = AutoNetwork(ACTIONS, NESTED["image"], stack_size=3)
    network.build((7, 7, 3), "uint8")
    assert network.initial_state(B).frames.shape == (B, 7, 7, 6)
    with pytest.raises(ValueError, match=r"stack_size=3 .* got a dict.*@frame_stack"):
        AutoNetwork(ACTIONS, NESTED, stack_size=3).build(
            {"image": tf.TensorSpec((7, 7, 3)), "rest": tf.TensorSpec((5,))}
        )
    with pytest.raises(ValueError, match=r"stack_size=3 .* are a dict.*@frame_stack"):
        DuelingLSTMDQNAuto(ACTIONS, NESTED, stack_size=3)


def batch_of(agent, space):
    """One training batch for V-trace, [T + 1, B, ...]."""
    outputs = env_outputs(space, (T + 1, B), seed=1)
    actions = np.ones((T + 1, B), np.int32)
    state = agent.initial_state(B)
    env_ids = np.zeros(B, np.int32)
    agent_outputs = [agent.policy(env_ids, actions[0], at(outputs, t), state)[0] for t in range(4)]
    return Unroll(
        agent_state=state,
        prev_actions=actions,
        env_outputs=outputs,
        agent_outputs=tf.nest.map_structure(lambda *x: tf.stack(x), *agent_outputs),
        env_id=env_ids,
        policy_version=np.zeros(B, np.int64),
    )


def test_vtrace_learns_from_nests_by_default():
    agent = VTraceAgent(NESTED, spaces.Discrete(ACTIONS), unroll_length=T, batch_size=B)
    trainer = Trainer(agent, agent.make_optimizer(10))
    before = [v.numpy() for v in agent.trainable_variables]
    metrics, _ = trainer.step(batch_of(agent, NESTED))
    assert np.isfinite(metrics["training/loss"])
    assert all(
        np.any(v.numpy() != old) for v, old in zip(agent.trainable_variables, before, strict=True)
    )


@pytest.mark.parametrize(
    ("space", "network"),
    [
        (NESTED, lambda *x, **y: AutoNetwork(*x, **y, normalize_observations=True)),
        (VECTOR, lambda distribution: MLP(distribution, normalize_observations=True)),
    ],
    ids=["AutoNetwork", "MLP"],
)
def test_statistics_are_learned_used_and_saved(space, network, tmp_path):
    if space is NESTED:  # gin tells networks of the space by the parameter's name

        def named(distribution, observation_space):
            return network(distribution, observation_space)
    else:
        named = network

    def make():
        return VTraceAgent(
            space, spaces.Discrete(ACTIONS), network=named, unroll_length=T, batch_size=B
        )

    agent = make()
    trainer = Trainer(agent, agent.make_optimizer(10))
    batch = batch_of(agent, space)
    trainer.step(batch)
    mean = next(v for v in agent._network.variables if v.name.startswith("mean"))
    vectors = batch.env_outputs.observation
    vectors = (vectors["rest"][0] if space is NESTED else vectors).numpy().reshape(-1, 5)
    np.testing.assert_allclose(mean, vectors.mean(0), rtol=1e-4, atol=1e-5)
    assert not any(v is mean for v in agent.trainable_variables)

    step = at(batch.env_outputs, 0)
    arguments = (batch.env_id, batch.prev_actions[0], step, agent.initial_state(B))
    before = agent.greedy_policy(*arguments)[0]
    path = tf.train.Checkpoint(**agent.checkpoint_items).save(tmp_path / "checkpoint")
    restored = make()
    tf.train.Checkpoint(**restored.checkpoint_items).restore(path).assert_consumed()
    assert_close(restored.greedy_policy(*arguments)[0].baseline, before.baseline)
    mean.assign_add(tf.fill([5], 0.5))
    assert np.abs(agent.greedy_policy(*arguments)[0].baseline - before.baseline).max() > 1e-4


def test_a_nested_policy_is_exported(tmp_path):
    agent = VTraceAgent(NESTED, spaces.Discrete(ACTIONS), unroll_length=T, batch_size=B)
    specs = agent_observation_specs(NESTED), agent_action_specs(spaces.Discrete(ACTIONS))
    loaded = tf.saved_model.load(export_policy(agent, *specs, str(tmp_path)))
    batch = batch_of(agent, NESTED)
    arguments = (batch.env_id, batch.prev_actions[0], at(batch.env_outputs, 0), ())
    tensors = tf.nest.map_structure(tf.convert_to_tensor, arguments)
    outputs = loaded.greedy_policy(*tensors)[0]
    expected = agent.greedy_policy(*tensors)[0]
    assert_close(tf.nest.flatten(outputs), tf.nest.flatten(expected))


def test_r2d2_takes_any_space_by_default_and_normalises_in_both_networks():
    def network(num_actions, observation_space):
        return DuelingLSTMDQNAuto(num_actions, observation_space, normalize_observations=True)

    R2D2Agent(NESTED, spaces.Discrete(ACTIONS), 1)
    agent = R2D2Agent(NESTED, spaces.Discrete(ACTIONS), 1, network=network, target_update_period=1)
    agent._update_statistics(agent._batch_statistics(env_outputs(NESTED, (T, B)).observation))
    agent.after_training_step()
    own, target = (agent.checkpoint_items[n].variables for n in ("network", "target_network"))
    assert_close([v.numpy() for v in own], [v.numpy() for v in target])
    assert next(v for v in target if v.name.startswith("count")) == T * B


def test_a_network_for_single_arrays_refuses_a_nest():
    action_space = spaces.Discrete(ACTIONS)
    with pytest.raises(ValueError, match=r"single tensor; got a dict.*@AutoNetwork"):
        VTraceAgent(NESTED, action_space, network=ImpalaShallow)
