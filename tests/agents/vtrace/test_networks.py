import gin
import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from seed_rl import torsos
from seed_rl.agents.vtrace import networks
from seed_rl.distributions import get_parametric_distribution_for_action_space
from seed_rl.structures import EnvOutput

T, B, ACTIONS = 4, 3, 5
VECTOR, IMAGE, NATURE_IMAGE = (7,), (12, 16, 3), (36, 40, 2)
NETWORKS = {
    "deep": (lambda: networks.ImpalaDeep(ACTIONS, lstm_units=8), IMAGE),
    "deep without LSTM": (lambda: networks.ImpalaDeep(ACTIONS, lstm_units=0), IMAGE),
    "shallow": (lambda: networks.ImpalaShallow(ACTIONS), NATURE_IMAGE),
    "shallow with LSTM": (lambda: networks.ImpalaShallow(ACTIONS, lstm_units=8), NATURE_IMAGE),
    "shallow with stacks": (lambda: networks.ImpalaShallow(ACTIONS, stack_size=3), NATURE_IMAGE),
    "deep with LSTM and stacks": (
        lambda: networks.ImpalaDeep(ACTIONS, lstm_units=8, stack_size=2),
        IMAGE,
    ),
    "MLP": (lambda: networks.MLP(ACTIONS), VECTOR),
    "MLP with LSTM": (lambda: networks.MLP(ACTIONS, lstm_units=8), VECTOR),
    "MLP, two torsos": (lambda: networks.MLP(ACTIONS, separate_value_torso=True), VECTOR),
    "football": (lambda: networks.GFootball(ACTIONS), IMAGE),
}
RECURRENT = [name for name in NETWORKS if name == "deep" or "with " in name]


@pytest.fixture(params=NETWORKS)
def network_and_inputs(request):
    return make(request.param)


def make(name, seed=0):
    keras.utils.set_random_seed(seed)
    constructor, observation_shape = NETWORKS[name]
    network = constructor()
    network.build(observation_shape)
    rng = np.random.default_rng(0)
    for variable in network.trainable_variables:  # biases too: each variable must matter
        variable.assign_add(0.05 * rng.normal(size=variable.shape))
    return network, random_inputs(observation_shape)


def random_inputs(observation_shape, seed=0):
    rng = np.random.default_rng(seed)
    observation = (
        rng.integers(0, 256, (T, B, *observation_shape)).astype(np.uint8)
        if len(observation_shape) == 3
        else rng.normal(size=(T, B, *observation_shape)).astype(np.float32)
    )
    done = np.zeros((T, B), bool)
    done[2, 1] = True
    env_outputs = EnvOutput(
        reward=rng.normal(size=(T, B)).astype(np.float32),
        done=done,
        observation=observation,
        abandoned=np.zeros((T, B), bool),
        episode_step=np.zeros((T, B), np.int32),
    )
    prev_actions = rng.integers(0, ACTIONS, (T, B)).astype(np.int32)
    return prev_actions, env_outputs


def at(inputs, index):
    return tf.nest.map_structure(lambda x: x[index], inputs)


def assert_close(a, b, tolerance=1e-5):
    tf.nest.map_structure(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


def test_shapes(network_and_inputs):
    network, inputs = network_and_inputs
    state = network.initial_state(B)
    for unroll, leading in ((True, (T, B)), (False, (B,))):
        arguments = inputs if unroll else at(inputs, 0)
        output, new_state = network(*arguments, state, unroll=unroll)
        assert output.action.shape == leading
        assert output.action.dtype == tf.int32
        assert output.policy_logits.shape == (*leading, ACTIONS)
        assert output.baseline.shape == leading
        tf.nest.assert_same_structure(state, new_state)


def test_an_unroll_equals_its_steps(network_and_inputs):
    network, inputs = network_and_inputs
    state = network.initial_state(B)
    unrolled, last_state = network(*inputs, state, unroll=True, is_training=True)
    for t in range(T):
        output, state = network(*at(inputs, t), state, is_training=True)
        assert_close(output, at(unrolled, t))
    assert_close(state, last_state)


def test_rows_do_not_affect_each_other(network_and_inputs):
    network, inputs = network_and_inputs
    step = at(inputs, 0)
    alone, _ = network(*at(step, slice(0, 1)), network.initial_state(1), is_training=True)
    padding = tf.nest.map_structure(lambda x: np.concatenate([x[:1], np.zeros_like(x)]), step)
    padded, _ = network(*padding, network.initial_state(B + 1), is_training=True)
    assert_close(at(padded, slice(0, 1)), alone)


def test_a_network_that_stacks_frames_must_know_them():
    network = networks.ImpalaShallow(ACTIONS, stack_size=4)
    with pytest.raises(ValueError, match="must be built before initial_state"):
        network.initial_state(1)
    network.build(NATURE_IMAGE)
    prev_actions, env_outputs = at(random_inputs(NATURE_IMAGE), 0)
    floats = env_outputs._replace(observation=env_outputs.observation.astype(np.float32))
    with pytest.raises(ValueError, match="built to stack frames of uint8; got float32"):
        network(prev_actions, floats, network.initial_state(B))
    with pytest.raises(ValueError, match=r"must be \[height, width, channels\]; got \(7,\)"):
        networks.ImpalaShallow(ACTIONS, stack_size=4).build(VECTOR)


@pytest.mark.parametrize("name", RECURRENT)
def test_memory_ends_with_the_episode(name):
    network, (prev_actions, env_outputs) = make(name)
    rng = np.random.default_rng(1)
    state = tf.nest.map_structure(
        lambda x: (50 * rng.random(size=x.shape)).astype(x.dtype.as_numpy_dtype),
        network.initial_state(B),
    )
    done = np.zeros((T, B), bool)
    done[2] = True
    inputs = (prev_actions, env_outputs._replace(done=done))
    whole, _ = network(*inputs, state, unroll=True, is_training=True)
    first, _ = network(*at(inputs, slice(0, 2)), state, unroll=True, is_training=True)
    fresh = network.initial_state(B)
    second, _ = network(*at(inputs, slice(2, T)), fresh, unroll=True, is_training=True)
    assert_close(at(whole, slice(0, 2)), first)
    assert_close(at(whole, slice(2, T)), second)
    forgetful, _ = network(*at(inputs, slice(0, 2)), fresh, unroll=True, is_training=True)
    assert np.abs(forgetful.baseline - first.baseline).max() > 1e-3  # there was a memory


def loss_and_gradients(network, prev_actions, env_outputs, state):
    with tf.GradientTape() as tape:
        output, state = network(prev_actions, env_outputs, state, unroll=True, is_training=True)
        loss = tf.reduce_sum(output.policy_logits**2) + tf.reduce_sum((output.baseline - 1) ** 2)
    return loss, output, state, tape.gradient(loss, network.trainable_variables)


@pytest.mark.parametrize("name", NETWORKS)
def test_compiles_under_xla(name):
    """Training and inference agree with the uncompiled ones.

    Rounding can tip a maximum or a rectifier that is all but undecided, and then the gradient flows
    elsewhere. Random weights meet that now and then; a fault would show with all of them.
    """
    for seed in range(3):
        try:
            check_xla(*make(name, seed))
            return
        except AssertionError:
            if seed == 2:
                raise


def check_xla(network, inputs):
    def train(prev_actions, env_outputs, state):
        return loss_and_gradients(network, prev_actions, env_outputs, state)

    state = network.initial_state(B)
    compiled = tf.function(train, jit_compile=True)(*inputs, state)
    assert_close(compiled, train(*inputs, state), 1e-4)

    step = at(inputs, 0)
    sampled, new_state = tf.function(network.__call__, jit_compile=True)(*step, state)
    expected, expected_state = network(*step, state)
    assert_close((sampled[1:], new_state), (expected[1:], expected_state), 1e-4)
    assert ((sampled.action >= 0) & (sampled.action < ACTIONS)).numpy().all()


def test_every_variable_is_trained(network_and_inputs):
    network, inputs = network_and_inputs
    prev_actions, env_outputs = inputs
    state = network.initial_state(B)
    gradients = loss_and_gradients(network, prev_actions, env_outputs, state)[-1]
    assert all(np.abs(gradient).max() > 0 for gradient in gradients)
    assert all(isinstance(v, tf.Variable) for v in network.trainable_variables)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        # Three stacks of five convolutions, a dense layer, two heads, each with a bias; an LSTM.
        ("deep", 2 * (15 + 1 + 2) + 3),
        ("deep without LSTM", 2 * (15 + 1 + 2)),
        ("football", 2 * (20 + 1 + 2)),
        ("shallow", 2 * (3 + 1 + 2)),
        ("shallow with LSTM", 2 * (3 + 1 + 2) + 3),
        ("MLP", 2 * (2 + 2)),
        ("MLP, two torsos", 2 * (2 + 2 + 2)),
    ],
)
def test_number_of_variables(name, number):
    network, _ = make(name)
    assert len(network.trainable_variables) == number
    assert len({id(v) for v in network.trainable_variables}) == number


@pytest.mark.parametrize(
    ("constructor", "observation_shape", "parameters"),
    [
        # (84 - 8) / 4 + 1 = 20, (20 - 4) / 2 + 1 = 9, 9 - 3 + 1 = 7
        (
            lambda: networks.ImpalaShallow(6),
            (84, 84, 4),
            (8 * 8 * 4 * 32 + 32)
            + (4 * 4 * 32 * 64 + 64)
            + (3 * 3 * 64 * 64 + 64)
            + (7 * 7 * 64 * 512 + 512)
            + 513 * 6
            + 513,
        ),
        # 72 x 96 halves three times to 9 x 12; features are joined by reward and nine actions.
        (
            lambda: networks.ImpalaDeep(9),
            (72, 96, 3),
            (9 * 3 * 16 + 16)
            + 4 * (9 * 16 * 16 + 16)
            + (9 * 16 * 32 + 32)
            + 9 * (9 * 32 * 32 + 32)
            + (9 * 12 * 32 * 256 + 256)
            + 4 * 256 * (256 + 1 + 9 + 256 + 1)
            + 257 * 9
            + 257,
        ),
        # 72 x 96 halves four times to 5 x 6 (rounded up); no reward, no action.
        (
            lambda: networks.GFootball(19),
            (72, 96, 16),
            (9 * 16 * 16 + 16)
            + 4 * (9 * 16 * 16 + 16)
            + (9 * 16 * 32 + 32)
            + 14 * (9 * 32 * 32 + 32)
            + (5 * 6 * 32 * 256 + 256)
            + 257 * 19
            + 257,
        ),
        (lambda: networks.MLP(2), (4,), 5 * 64 + 65 * 64 + 65 * 2 + 65),
    ],
)
def test_number_of_parameters_is_the_papers(constructor, observation_shape, parameters):
    network = constructor()
    network.build(observation_shape)
    assert sum(np.prod(v.shape) for v in network.trainable_variables) == parameters


def test_checkpoint(network_and_inputs, tmp_path, request):
    network, inputs = network_and_inputs
    expected, _ = network(*inputs, network.initial_state(B), unroll=True, is_training=True)
    path = tf.train.Checkpoint(network=network).save(tmp_path / "checkpoint")
    names = [name for name, _ in tf.train.list_variables(path) if name.startswith("network/")]
    assert len(names) == len(network.trainable_variables)

    constructor, observation_shape = NETWORKS[request.node.callspec.params["network_and_inputs"]]
    restored = constructor()
    restored.build(observation_shape)
    status = tf.train.Checkpoint(network=restored).restore(path)
    status.assert_existing_objects_matched()
    output, _ = restored(*inputs, restored.initial_state(B), unroll=True, is_training=True)
    assert_close(output, expected)


@pytest.mark.parametrize("name", ["shallow with LSTM", "MLP, two torsos"])
def test_saved_model(name, tmp_path):
    network, inputs = make(name)
    step, state = at(inputs, 0), network.initial_state(B)
    wrapper = tf.Module()
    wrapper.network = network
    wrapper.act = tf.function(lambda *x: network(*x, is_training=True))
    concrete = wrapper.act.get_concrete_function(*tf.nest.map_structure(tf.constant, step), state)
    tf.saved_model.save(wrapper, str(tmp_path), signatures=None)
    del concrete
    loaded = tf.saved_model.load(str(tmp_path))
    output, new_state = loaded.act(*tf.nest.map_structure(tf.constant, step), state)
    expected, expected_state = network(*step, state, is_training=True)
    assert_close(tf.nest.flatten(output), tf.nest.flatten(expected))
    assert_close(tf.nest.flatten(new_state), tf.nest.flatten(expected_state))


def test_the_first_call_may_be_inside_a_function():
    network = networks.MLP(ACTIONS, lstm_units=8)
    inputs = random_inputs(VECTOR)
    call = tf.function(lambda *x: network(*x, unroll=True, is_training=True), jit_compile=True)
    output, _ = call(*inputs, network.initial_state(B))
    again, _ = network(*inputs, network.initial_state(B), unroll=True, is_training=True)
    assert_close(output, again)


@pytest.mark.parametrize(
    ("space", "prev_actions"),
    [
        (spaces.MultiDiscrete([2, 3]), np.ones((T, B, 2), np.int32)),
        (spaces.Box(-1, 1, (2,)), np.full((T, B, 2), 0.5, np.float32)),
        (
            spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,))]),
            (np.ones((T, B), np.int32), np.full((T, B, 2), 0.5, np.float32)),
        ),
    ],
)
@pytest.mark.parametrize("lstm_units", [0, 8])
def test_other_action_spaces(space, prev_actions, lstm_units):
    distribution = get_parametric_distribution_for_action_space(space)
    network = networks.MLP(distribution, lstm_units=lstm_units, use_prev_action_and_reward=True)
    _, env_outputs = random_inputs(VECTOR)
    state = network.initial_state(B)
    output, _ = network(prev_actions, env_outputs, state, unroll=True)
    tf.nest.map_structure(
        lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype) or pytest.fail(f"{x} {y}"),
        output.action,
        prev_actions,
    )
    assert output.policy_logits.shape == (T, B, distribution.param_size)
    zeros = tf.nest.map_structure(np.zeros_like, prev_actions)
    other, _ = network(zeros, env_outputs, state, unroll=True)
    assert np.abs(other.baseline - output.baseline).max() > 1e-3


@pytest.mark.parametrize("name", ["MLP", "MLP with LSTM", "shallow", "deep", "football"])
def test_previous_action_and_clipped_reward_are_seen_where_they_should(name):
    network, (prev_actions, env_outputs) = make(name)
    state = network.initial_state(B)

    def value(prev_actions, reward):
        inputs = (prev_actions, env_outputs._replace(reward=np.full((T, B), reward, np.float32)))
        return network(*inputs, state, unroll=True)[0].baseline

    base = value(prev_actions, 1.0)
    sees = name in ("MLP with LSTM", "deep")
    assert (np.abs(base - value((prev_actions + 1) % ACTIONS, 1.0)).max() > 1e-5) == sees
    assert (np.abs(base - value(prev_actions, -1.0)).max() > 1e-5) == sees
    np.testing.assert_array_equal(base, value(prev_actions, 7.0))


def test_a_residual_block_adds_to_its_input():
    block = torsos.ResidualBlock(2, "glorot_uniform", "float32")
    x = np.random.default_rng(0).normal(size=(1, 4, 5, 2)).astype(np.float32)
    block.build(x.shape)
    first, first_bias, second, second_bias = (v.value for v in block.trainable_variables)
    first_bias.assign([0.3, -0.4])
    hidden = tf.nn.conv2d(np.maximum(x, 0), first, 1, "SAME") + first_bias
    expected = x + tf.nn.conv2d(np.maximum(hidden, 0), second, 1, "SAME") + second_bias
    np.testing.assert_allclose(block(x), expected, rtol=1e-4, atol=1e-5)


def test_bytes_are_scaled_to_one():
    network, inputs = make("shallow")
    as_bytes, _ = network(*inputs, (), unroll=True)
    observation = inputs[1].observation.astype(np.float32) / 255
    scaled, _ = network(inputs[0], inputs[1]._replace(observation=observation), (), unroll=True)
    assert_close(as_bytes.baseline, scaled.baseline)


def test_the_first_policy_is_nearly_uniform():
    network = networks.MLP(ACTIONS)
    output, _ = network(*random_inputs(VECTOR), (), unroll=True)
    assert np.abs(output.policy_logits).max() < 0.1
    assert np.abs(output.baseline).max() > 0.1


def test_actions_are_sampled_unless_training():
    network, inputs = make("MLP")
    step = at(inputs, 0)
    many = tf.nest.map_structure(lambda x: np.repeat(x[:1], 200, axis=0), step)
    played, _ = network(*many, ())
    modes, _ = network(*many, (), is_training=True)
    assert len(np.unique(played.action)) > 1
    np.testing.assert_array_equal(modes.action, np.argmax(modes.policy_logits, axis=-1))


def test_low_precision_gives_float32_results():
    network = networks.ImpalaShallow(ACTIONS, lstm_units=8, dtype="mixed_bfloat16")
    inputs = random_inputs(NATURE_IMAGE)
    output, state = network(*inputs, network.initial_state(B), unroll=True)
    assert output.policy_logits.dtype == output.baseline.dtype == state.cell.dtype == tf.float32
    assert all(v.dtype == tf.float32 for v in network.trainable_variables)


def test_gin_configures_networks():
    with gin.unlock_config():
        gin.parse_config(
            "seed_rl.agents.vtrace.networks.MLP.hidden_sizes = (3,)\nImpalaDeep.lstm_units = 0"
        )
    try:
        network = networks.MLP(ACTIONS)
        network.build(VECTOR)
        assert any(v.shape == (7, 3) for v in network.trainable_variables)
        assert networks.ImpalaDeep(ACTIONS).initial_state(1) == ()
    finally:
        gin.clear_config()


@pytest.mark.parametrize(
    ("constructor", "observation_shape", "message"),
    [
        (networks.ImpalaDeep, VECTOR, r"\[height, width, channels\].*\(7,\).*MLP"),
        (networks.ImpalaShallow, (35, 84, 4), r"36 x 36.*\(35, 84, 4\)"),
        (networks.GFootball, (84, 84), r"\[height, width, channels\]"),
    ],
)
def test_observations_that_do_not_fit_are_named(constructor, observation_shape, message):
    with pytest.raises(ValueError, match=message):
        constructor(ACTIONS).build(observation_shape)


def test_nested_observations_are_named():
    network, (prev_actions, env_outputs) = make("MLP")
    nested = env_outputs._replace(observation={"position": env_outputs.observation})
    with pytest.raises(ValueError, match="single tensor; got a dict"):
        network(prev_actions, nested, (), unroll=True)


def test_another_observation_shape_is_named():
    network, _ = make("MLP")
    with pytest.raises(ValueError, match=r"built for observations of shape \(7,\); got \(8,\)"):
        network(*random_inputs((8,)), (), unroll=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_sizes": 64}, "hidden_sizes must be whole numbers of at least 1"),
        ({"hidden_sizes": (64, 0)}, "hidden_sizes must be whole numbers of at least 1"),
        ({"lstm_units": -1}, "lstm_units must be a whole number of at least 0, got -1"),
    ],
)
def test_sizes_that_no_layer_has(settings, message):
    with pytest.raises(ValueError, match=message):
        networks.MLP(ACTIONS, **settings)


def test_two_torsos_and_an_lstm_exclude_each_other():
    with pytest.raises(ValueError, match="separate value torso"):
        networks.MLP(ACTIONS, lstm_units=8, separate_value_torso=True)
