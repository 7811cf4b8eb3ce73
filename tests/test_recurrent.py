import numpy as np
import pytest
import tensorflow as tf

from seed_rl.recurrent import LSTMCore, LSTMState

T, B, F, UNITS = 5, 3, 4, 6


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(core, inputs, done, state):
    """Step by step in float64 from the textbook's equations."""
    weights = {v.name.split(":")[0]: v.numpy().astype(np.float64) for v in core.variables}
    hidden, cell = (np.asarray(x, np.float64) for x in state)
    outputs = []
    for x, reset in zip(inputs, done, strict=True):
        hidden, cell = (np.where(reset[:, None], 0, x) for x in (hidden, cell))
        gates = x @ weights["kernel"] + hidden @ weights["recurrent_kernel"] + weights["bias"]
        i, f, g, o = np.split(gates, 4, axis=-1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        outputs.append(hidden)
    return np.stack(outputs), hidden, cell


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    core = LSTMCore(UNITS)
    core.build(F)
    for variable in core.variables:
        variable.assign(rng.normal(size=variable.shape))
    inputs = rng.normal(size=(T, B, F)).astype(np.float32)
    done = np.zeros((T, B), bool)
    done[0, 0] = done[2, 1] = done[4, 1] = True  # at the start, in the middle, at the end
    state = LSTMState(*rng.normal(size=(2, B, UNITS)).astype(np.float32))
    return core, inputs, done, state


def test_equals_the_textbooks_equations(case):
    core, inputs, done, state = case
    outputs, (hidden, cell) = core(inputs, done, state)
    expected = by_hand(core, inputs, done, state)
    for got, value in zip((outputs, hidden, cell), expected, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5)


def test_an_unroll_equals_its_steps(case):
    core, inputs, done, state = case
    outputs, last_state = core(inputs, done, state)
    for t in range(T):
        output, state = core.step(inputs[t], done[t], state)
        np.testing.assert_allclose(output, outputs[t], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.hidden, last_state.hidden, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.cell, last_state.cell, rtol=1e-5, atol=1e-6)


def test_an_unroll_with_done_in_the_middle_equals_two_unrolls(case):
    core, inputs, done, state = case
    done = np.zeros_like(done)
    done[3] = True
    outputs, _ = core(inputs, done, state)
    first, _ = core(inputs[:3], done[:3], state)
    second, _ = core(inputs[3:], np.zeros((2, B), bool), core.initial_state(B))
    np.testing.assert_allclose(outputs, np.concatenate([first, second]), rtol=1e-5, atol=1e-6)


def test_gradients_equal_finite_differences(case):
    core, inputs, done, state = case
    rng = np.random.default_rng(1)
    output_weights = rng.normal(size=(T, B, UNITS))
    cell_weights = rng.normal(size=(B, UNITS))

    def loss_by_hand(inputs, state):
        outputs, _, cell = by_hand(core, inputs, done, state)
        return np.sum(outputs * output_weights) + np.sum(cell * cell_weights)

    arguments = [tf.constant(inputs), tf.constant(state.hidden), tf.constant(state.cell)]
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        outputs, (_, cell) = core(arguments[0], done, LSTMState(*arguments[1:]))
        loss = tf.reduce_sum(outputs * output_weights) + tf.reduce_sum(cell * cell_weights)
    gradients = tape.gradient(loss, [*arguments, *core.trainable_variables])
    assert all(gradient is not None for gradient in gradients)

    step = 1e-5
    values = [inputs.astype(np.float64), *(np.float64(x) for x in state)]
    for gradient, value in zip(gradients[:3], values, strict=True):
        direction = rng.normal(size=value.shape)
        original = value.copy()
        value[...] = original + step * direction
        above = loss_by_hand(values[0], values[1:])
        value[...] = original - step * direction
        below = loss_by_hand(values[0], values[1:])
        value[...] = original
        slope = (above - below) / (2 * step)
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-3, atol=1e-3)
    for variable, gradient in zip(core.trainable_variables, gradients[3:], strict=True):
        direction = rng.normal(size=variable.shape)
        original = variable.numpy()
        slopes = []
        for scale in (1e-2, -1e-2):
            variable.assign(original + scale * direction)
            slopes.append(loss_by_hand(values[0], values[1:]) / 2e-2)
        variable.assign(original)
        slope = slopes[0] - slopes[1]
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-2, atol=1e-2)


def test_no_gradient_flows_back_through_a_reset(case):
    core, inputs, done, state = case
    done = np.zeros_like(done)
    done[2] = True
    inputs = tf.constant(inputs)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs, _ = core(inputs, done, state)
        loss = tf.reduce_sum(outputs[2:])
    gradient = tape.gradient(loss, inputs).numpy()
    np.testing.assert_array_equal(gradient[:2], 0.0)
    assert (np.abs(gradient[2:]).sum(axis=(1, 2)) > 0).all()


def test_a_reset_forgets_even_a_broken_state(case):
    core, inputs, done, _ = case
    nan = np.full((B, UNITS), np.nan, np.float32)
    outputs, _ = core(inputs, np.ones_like(done), LSTMState(nan, nan))
    assert np.isfinite(outputs).all()


def test_compiles_under_xla(case):
    core, inputs, done, state = case

    def outputs_and_gradients(inputs, done, state):
        with tf.GradientTape() as tape:
            outputs, last_state = core(inputs, done, state)
            loss = tf.reduce_sum(outputs**2) + tf.reduce_sum(last_state.cell)
        return outputs, last_state, tape.gradient(loss, core.trainable_variables)

    compiled = tf.function(outputs_and_gradients, jit_compile=True)(inputs, done, state)
    plain = tf.function(outputs_and_gradients)(inputs, done, state)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), compiled, plain
    )


def test_the_graph_does_not_grow_with_the_unroll():
    core = LSTMCore(UNITS)

    @tf.function
    def run(inputs, done, state):
        return core(inputs, done, state)

    def size(length):
        concrete = run.get_concrete_function(
            tf.TensorSpec([length, B, F]),
            tf.TensorSpec([length, B], tf.bool),
            LSTMState(tf.TensorSpec([B, UNITS]), tf.TensorSpec([B, UNITS])),
        )
        return len(concrete.graph.as_graph_def().node)

    assert size(3) == size(50)


def test_bfloat16_products_give_float32_results(case):
    core, inputs, done, state = case
    low = LSTMCore(UNITS, dtype="bfloat16")
    low.build(F)
    for to, source in zip(low.variables, core.variables, strict=True):
        to.assign(source)
    outputs, last_state = low(inputs, done, state)
    assert outputs.dtype == last_state.cell.dtype == tf.float32
    exact, _ = core(inputs, done, state)
    np.testing.assert_allclose(outputs, exact, atol=0.1)
    assert not np.array_equal(outputs, exact)


def test_starts_by_remembering():
    core = LSTMCore(UNITS)
    core.build(F)
    bias = next(v for v in core.variables if v.name.startswith("bias")).numpy()
    np.testing.assert_array_equal(bias, np.repeat([0.0, 1.0, 0.0, 0.0], UNITS))


@pytest.mark.parametrize(
    ("inputs", "done", "message"),
    [
        (np.zeros((B, F), np.float32), np.zeros((T, B), bool), r"inputs \[T, B, F\]"),
        (np.zeros((T, B, F), np.float32), np.zeros(B, bool), "`done` of shape"),
    ],
)
def test_wrong_shapes_are_named(case, inputs, done, message):
    core, _, _, state = case
    with pytest.raises(ValueError, match=message):
        core(inputs, done, state)


def test_needs_units():
    with pytest.raises(ValueError, match="lstm_units must be a whole number of at least 1, got 0"):
        LSTMCore(0)
