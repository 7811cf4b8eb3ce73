import gin
import keras
import numpy as np
import pytest
import tensorflow as tf

from seed_rl.agents.r2d2 import networks
from seed_rl.structures import EnvOutput

T, B, ACTIONS = 5, 3, 4
IMAGE, VECTOR = (36, 40, 1), (6,)
SMALL = {"lstm_units": 8, "head_units": 8}
NETWORKS = {
    "convolutions": lambda: networks.DuelingLSTMDQNNet(ACTIONS, IMAGE, **SMALL),
    "convolutions on stacks": lambda: networks.DuelingLSTMDQNNet(ACTIONS, IMAGE, 4, **SMALL),
    "dense": lambda: networks.DuelingLSTMDQNMLP(ACTIONS, VECTOR, hidden_sizes=(16,), **SMALL),
    "dense on stacked images": lambda: networks.DuelingLSTMDQNMLP(
        ACTIONS, (5, 5, 2), 3, hidden_sizes=(16,), observation_dtype="uint8", **SMALL
    ),
}
SHAPES = dict(zip(NETWORKS, (IMAGE, IMAGE, VECTOR, (5, 5, 2)), strict=True))


def make(name):
    keras.utils.set_random_seed(0)
    network = NETWORKS[name]()
    rng = np.random.default_rng(0)
    for variable in network.trainable_variables:  # biases too: each variable must matter
        variable.assign_add(0.05 * rng.normal(size=variable.shape))
    return network


def random_inputs(observation_shape, seed=0):
    rng = np.random.default_rng(seed)
    is_image = len(observation_shape) == 3
    shape = (T, B, *observation_shape)
    done = np.zeros((T, B), bool)
    done[2, 1] = done[0, 2] = True
    env_outputs = EnvOutput(
        reward=rng.normal(size=(T, B)).astype(np.float32),
        done=done,
        observation=rng.integers(0, 256, shape).astype(np.uint8)
        if is_image
        else rng.normal(size=shape).astype(np.float32),
        abandoned=np.zeros((T, B), bool),
        episode_step=np.zeros((T, B), np.int32),
    )
    return rng.integers(0, ACTIONS, (T, B)).astype(np.int32), env_outputs


def at(nest, index):
    return tf.nest.map_structure(lambda x: x[index], nest)


def assert_close(a, b, tolerance=1e-5):
    tf.nest.map_structure(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


def random_state(network, seed=1):
    rng = np.random.default_rng(seed)
    return tf.nest.map_structure(
        lambda x: (rng.random(size=x.shape) * 50).astype(x.dtype.as_numpy_dtype),
        network.initial_state(B),
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_an_unroll_equals_its_steps(name):
    network, inputs = make(name), random_inputs(SHAPES[name])
    state = random_state(network)
    unrolled, last_state = network(inputs, state, unroll=True)
    assert unrolled.q_values.shape == (T, B, ACTIONS)
    assert unrolled.q_values.dtype == tf.float32
    np.testing.assert_array_equal(unrolled.action, np.argmax(unrolled.q_values, -1))
    assert unrolled.action.dtype == tf.int32
    for t in range(T):
        output, state = network(at(inputs, t), state)
        assert_close(output, at(unrolled, t))
    assert_close(state, last_state)
    tf.nest.assert_same_structure(state, network.initial_state(B))


@pytest.mark.parametrize("name", NETWORKS)
def test_neither_memory_nor_stacks_look_across_the_start_of_an_episode(name):
    network, (prev_actions, env_outputs) = make(name), random_inputs(SHAPES[name])
    done = np.zeros((T, B), bool)
    done[2] = True
    inputs = (prev_actions, env_outputs._replace(done=done))
    whole, _ = network(inputs, random_state(network), unroll=True)
    second, _ = network(at(inputs, slice(2, T)), network.initial_state(B), unroll=True)
    assert_close(at(whole, slice(2, T)), second)
    # And within an episode they do look back.
    before, _ = network(at(inputs, slice(0, 2)), random_state(network), unroll=True)
    fresh, _ = network(at(inputs, slice(0, 2)), network.initial_state(B), unroll=True)
    assert np.abs(before.q_values - fresh.q_values).max() > 1e-4


@pytest.mark.parametrize("name", NETWORKS)
def test_every_variable_is_learned_and_every_input_matters(name):
    network, inputs = make(name), random_inputs(SHAPES[name])
    with tf.GradientTape() as tape:
        outputs, _ = network(inputs, network.initial_state(B), unroll=True)
        loss = tf.reduce_sum(outputs.q_values**2)
    for variable, gradient in zip(
        network.trainable_variables, tape.gradient(loss, network.trainable_variables), strict=True
    ):
        assert np.abs(tf.convert_to_tensor(gradient)).max() > 0, variable.name
    prev_actions, env_outputs = inputs
    for other in (
        ((prev_actions + 1) % ACTIONS, env_outputs),
        (prev_actions, env_outputs._replace(reward=env_outputs.reward + 1)),
        (prev_actions, env_outputs._replace(observation=env_outputs.observation // 2)),
    ):
        changed, _ = network(other, network.initial_state(B), unroll=True)
        assert np.abs(changed.q_values - outputs.q_values).max() > 1e-4


def test_dueling_heads():
    """Against the formula in numpy: the LSTM's output is made known by replacing the LSTM."""
    network = make("dense")
    features = np.random.default_rng(2).normal(size=(B, SMALL["lstm_units"])).astype(np.float32)
    q_values = network._heads(features)
    (w1, b1, w2, b2), (a1, c1, a2) = (
        [v.numpy() for v in network._heads.variables[:4]],
        [v.numpy() for v in network._heads.variables[4:]],
    )
    value = np.maximum(features @ w1 + b1, 0) @ w2 + b2
    advantage = np.maximum(features @ a1 + c1, 0) @ a2
    expected = value + advantage - advantage.mean(-1, keepdims=True)
    np.testing.assert_allclose(q_values, expected, rtol=1e-4, atol=1e-5)


def test_the_paper_s_sizes():
    network = networks.DuelingLSTMDQNNet(18, (84, 84, 1), stack_size=4)
    shapes = [tuple(v.shape) for v in network.trainable_variables]
    for shape in (
        (8, 8, 4, 32),
        (4, 4, 32, 64),
        (3, 3, 64, 64),
        (3136, 512),
        (512 + 1 + 18, 4 * 512),  # of the LSTM: features, reward, action
        (512, 4 * 512),
        (512, 512),
        (512, 1),
        (512, 18),
    ):
        assert shape in shapes
    assert shapes.count((512, 512)) == 2  # the hidden layers of value and advantage
    assert (18,) not in shapes  # the advantage has no bias
    assert network.initial_state(2).frames.shape == (2, 84, 84, 3)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_compiles_with_xla(name):
    network, inputs = make(name), random_inputs(SHAPES[name])
    state = random_state(network)
    compiled = tf.function(network, jit_compile=True)
    assert_close(
        compiled(inputs, state, unroll=True)[0].q_values,
        network(inputs, state, unroll=True)[0].q_values,
        1e-4,
    )
    assert_close(
        compiled(at(inputs, 0), state)[0].q_values, network(at(inputs, 0), state)[0].q_values, 1e-4
    )


def test_bfloat16_computes_in_bfloat16_and_stores_in_float32():
    network = networks.DuelingLSTMDQNMLP(ACTIONS, VECTOR, dtype="mixed_bfloat16", **SMALL)
    inputs = random_inputs(VECTOR)
    output, state = network(inputs, network.initial_state(B), unroll=True)
    assert {v.dtype for v in network.trainable_variables} == {tf.float32}
    assert output.q_values.dtype == state.core.hidden.dtype == tf.float32


def test_gin_can_bind_it():
    with gin.unlock_config():
        gin.parse_config("DuelingLSTMDQNMLP.lstm_units = 5")
    try:
        network = networks.DuelingLSTMDQNMLP(ACTIONS, VECTOR)
        assert network.initial_state(1).core.hidden.shape == (1, 5)
    finally:
        gin.clear_config()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_sizes": 5}, r"hidden_sizes must be whole numbers .* such as \(64, 64\).*got 5"),
        ({"hidden_sizes": (8, -5)}, r"hidden_sizes must be whole numbers .*got \(8, -5\)"),
        ({"hidden_sizes": "64"}, r"hidden_sizes must be whole numbers .*got '64'"),
        ({"lstm_units": -1}, "lstm_units must be a whole number of at least 1, got -1"),
        ({"lstm_units": 2.5}, "lstm_units must be a whole number of at least 1, got 2.5"),
        ({"head_units": 0}, "head_units must be a whole number of at least 1, got 0"),
        ({"stack_size": 0}, "at least one frame; got stack_size=0"),
    ],
)
def test_sizes_that_no_layer_has(settings, message):
    with pytest.raises(ValueError, match=message):
        networks.DuelingLSTMDQNMLP(ACTIONS, VECTOR, **settings)


def test_wrong_input():
    with pytest.raises(ValueError, match="at least one action; got 0"):
        networks.DuelingLSTMDQNMLP(0, VECTOR)
    with pytest.raises(ValueError, match=r"\[height, width, channels\].*MLP or Auto"):
        networks.DuelingLSTMDQNNet(ACTIONS, VECTOR)
    network = make("dense")
    prev_actions, env_outputs = random_inputs((7,))
    with pytest.raises(ValueError, match=r"made for observations of shape \(6,\); got \(7,\)"):
        network((prev_actions, env_outputs), network.initial_state(B), unroll=True)
