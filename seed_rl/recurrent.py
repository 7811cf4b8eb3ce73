"""A recurrent core that forgets at the start of every episode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from seed_rl.setting_checks import check_layer_size


class LSTMState(NamedTuple):
    """What an LSTM carries from one step to the next."""

    hidden: Any  # float32 [B, units]
    cell: Any  # float32 [B, units]


class LSTMCore(tf.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997, with forget gates) over steps of several episodes.

    Where `done` is true the state is zeroed *before* the step consumes its input, since that is
    the first input of a new episode.

    The inputs' part of all gates is one matrix product for all steps; only the product of the
    recurrent kernel is inside the loop, which is a `tf.while_loop`, so that XLA compiles a single
    step however many there are.

    Gates are ordered input, forget, candidate, output. The forget gate starts with a bias of 1.

    Args:
      units: the size of the output and of both parts of the state.
      dtype: of the matrix products; everything else, and every result, is float32.
    """

    def __init__(self, units: int, dtype: str = "float32", name: str = "lstm_core"):
        super().__init__(name=name)
        check_layer_size("lstm_units", units)
        self._units = units
        self._dtype = tf.as_dtype(dtype)
        self._kernel: tf.Variable | None = None
        self._recurrent_kernel: tf.Variable | None = None
        self._bias: tf.Variable | None = None

    @property
    def units(self) -> int:
        """The size of the output."""
        return self._units

    def build(self, input_size: int) -> None:
        """Creates the variables. The first call does it, unless it is done before."""
        if self._kernel is not None:
            return
        units = self._units
        with tf.init_scope():
            kernel = keras.initializers.GlorotUniform()((input_size, 4 * units))
            recurrent_kernel = keras.initializers.Orthogonal()((units, 4 * units))
            bias = tf.concat([tf.zeros(units), tf.ones(units), tf.zeros(2 * units)], 0)
            self._kernel = tf.Variable(kernel, name="kernel")
            self._recurrent_kernel = tf.Variable(recurrent_kernel, name="recurrent_kernel")
            self._bias = tf.Variable(bias, name="bias")

    def initial_state(self, batch_size: int) -> LSTMState:
        """The state at the start of an episode: zeros."""
        zeros = tf.zeros([batch_size, self._units])
        return LSTMState(zeros, zeros)

    def __call__(
        self, inputs: tf.Tensor, done: tf.Tensor, state: LSTMState
    ) -> tuple[tf.Tensor, LSTMState]:
        """Runs over an unroll.

        Args:
          inputs: float [T, B, F]; T is at least 1.
          done: bool [T, B], whether the input of a step is the first of its episode.
          state: the state before the first step.

        Returns:
          The outputs, float32 [T, B, units], and the state after the last step.
        """
        inputs, done = tf.convert_to_tensor(inputs), tf.convert_to_tensor(done)
        _check(inputs, done, rank=3)
        gates, weights = self._project(inputs), self._recurrent_weights()
        hidden, cell = _unroll(gates, done, weights, *LSTMState(*state))
        return hidden, LSTMState(hidden[-1], cell[-1])

    def step(
        self, inputs: tf.Tensor, done: tf.Tensor, state: LSTMState
    ) -> tuple[tf.Tensor, LSTMState]:
        """One step: like `__call__`, without the time dimension."""
        inputs, done = tf.convert_to_tensor(inputs), tf.convert_to_tensor(done)
        _check(inputs, done, rank=2)
        gates = self._project(inputs)
        result = _step(gates, done, self._recurrent_weights(), LSTMState(*state))
        return result.hidden, LSTMState(result.hidden, result.cell)

    def _project(self, inputs: tf.Tensor) -> tf.Tensor:
        self.build(inputs.shape[-1])
        inputs = tf.cast(inputs, self._dtype)
        projected = tf.tensordot(inputs, tf.cast(self._kernel, self._dtype), 1)
        return tf.cast(projected, tf.float32) + self._bias

    def _recurrent_weights(self) -> tf.Tensor:
        return tf.cast(self._recurrent_kernel, self._dtype)


class _StepResult(NamedTuple):
    """What a step computes and what its gradient needs, float32 [B, ...]."""

    hidden: tf.Tensor  # [B, units]
    cell: tf.Tensor  # [B, units]
    activations: tf.Tensor  # [B, 4 * units], of the four gates


def _step(
    gates: tf.Tensor, done: tf.Tensor, recurrent_weights: tf.Tensor, state: LSTMState
) -> _StepResult:
    """gates: the inputs' part of them, float32 [B, 4 * units]."""
    hidden, cell = (_forget(x, done) for x in state)
    recurrent = tf.matmul(tf.cast(hidden, recurrent_weights.dtype), recurrent_weights)
    gates += tf.cast(recurrent, tf.float32)
    input_gate, forget_gate, candidate, output_gate = tf.split(gates, 4, axis=-1)
    input_gate, forget_gate = tf.sigmoid(input_gate), tf.sigmoid(forget_gate)
    candidate, output_gate = tf.tanh(candidate), tf.sigmoid(output_gate)
    cell = forget_gate * cell + input_gate * candidate
    activations = tf.concat([input_gate, forget_gate, candidate, output_gate], axis=-1)
    return _StepResult(output_gate * tf.tanh(cell), cell, activations)


@tf.custom_gradient
def _unroll(
    gates: tf.Tensor,
    done: tf.Tensor,
    recurrent_weights: tf.Tensor,
    first_hidden: tf.Tensor,
    first_cell: tf.Tensor,
) -> Any:
    """All steps: the hidden and the cell after each, float32 [T, B, units].

    Args:
      gates: the inputs' part of them, float32 [T, B, 4 * units].
      done: bool [T, B].
      recurrent_weights: [units, 4 * units].
      first_hidden: float32 [B, units], before the first step.
      first_cell: float32 [B, units].

    The gradient is written out because differentiating the loop adds up the recurrent weights'
    gradient step by step, each a matrix as large as the weights; it is one product over all steps.
    """

    def forward(t, state):
        result = _step(gates_at.read(t), done_at.read(t), recurrent_weights, LSTMState(*state))
        return (result.hidden, result.cell), result

    gates_at, done_at = _by_step(gates), _by_step(done)
    hidden, cell, activations = _loop(gates, forward, (first_hidden, first_cell))

    def gradient(d_hidden, d_cell):
        input_gate, forget_gate, candidate, output_gate = tf.split(activations, 4, axis=-1)
        hidden_before = _forget(tf.concat([first_hidden[None], hidden[:-1]], 0), done)
        cell_before = _forget(tf.concat([first_cell[None], cell[:-1]], 0), done)
        squashed = tf.tanh(cell)
        # Derivatives of all steps at once: of the hidden by the cell, and of the cell (the hidden,
        # for the output gate) by each gate before its activation.
        hidden_by_cell = output_gate * (1 - squashed**2)
        by_gates = tf.concat(
            [
                candidate * input_gate * (1 - input_gate),
                cell_before * forget_gate * (1 - forget_gate),
                input_gate * (1 - candidate**2),
                squashed * output_gate * (1 - output_gate),
            ],
            axis=-1,
        )

        def backward(t, later):
            d_hidden_t = d_hidden_at.read(t) + later[0]
            d_cell_t = d_cell_at.read(t) + later[1] + d_hidden_t * hidden_by_cell_at.read(t)
            d_gates_t = by_gates_at.read(t) * tf.concat([d_cell_t] * 3 + [d_hidden_t], axis=-1)
            low = tf.cast(d_gates_t, recurrent_weights.dtype)
            d_before = tf.cast(tf.matmul(low, transposed_weights), tf.float32)
            d_cell_before = d_cell_t * forget_gate_at.read(t)
            done_t = done_at.read(t)
            before = (_forget(d_before, done_t), _forget(d_cell_before, done_t))
            return before, (d_gates_t, *before)

        # Once, here: a product with a transposed matrix repacks all of it, every step.
        transposed_weights = tf.transpose(recurrent_weights)
        done_at = _by_step(done)
        d_hidden_at, d_cell_at = _by_step(d_hidden), _by_step(d_cell)
        hidden_by_cell_at, by_gates_at = _by_step(hidden_by_cell), _by_step(by_gates)
        forget_gate_at = _by_step(forget_gate)
        zeros = (tf.zeros_like(first_hidden), tf.zeros_like(first_cell))
        d_gates, d_hidden_before, d_cell_before = _loop(gates, backward, zeros, reverse=True)
        d_weights = tf.tensordot(
            tf.cast(hidden_before, recurrent_weights.dtype),
            tf.cast(d_gates, recurrent_weights.dtype),
            [[0, 1], [0, 1]],
        )
        return d_gates, None, d_weights, d_hidden_before[0], d_cell_before[0]

    return (hidden, cell), gradient


def _forget(x: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
    return tf.where(done[..., None], 0.0, x)


def _by_step(x: tf.Tensor) -> tf.TensorArray:
    return tf.TensorArray(x.dtype, x.shape[0] or tf.shape(x)[0]).unstack(x)


def _loop(like: tf.Tensor, step: Callable, state: Any, reverse: bool = False) -> list[tf.Tensor]:
    """Runs `step(t, state) -> (state, results)` for each t of `like`; stacks its three results."""
    length = like.shape[0] or tf.shape(like)[0]

    def body(i, state, arrays):
        t = length - 1 - i if reverse else i
        state, results = step(t, state)
        arrays = [array.write(t, x) for array, x in zip(arrays, results, strict=True)]
        return i + 1, state, arrays

    _, _, arrays = tf.while_loop(
        lambda i, *_: i < length,
        body,
        (0, state, [tf.TensorArray(tf.float32, length) for _ in range(3)]),
        maximum_iterations=length,
    )
    return [array.stack() for array in arrays]


def _check(inputs: tf.Tensor, done: tf.Tensor, rank: int) -> None:
    if inputs.shape.rank != rank or inputs.shape[-1] is None:
        dimensions = "[T, B, F]" if rank == 3 else "[B, F]"
        raise ValueError(
            f"The LSTM needs inputs {dimensions} of known F; got shape {inputs.shape}."
        )
    if not done.shape.is_compatible_with(inputs.shape[:-1]):
        raise ValueError(f"The LSTM needs `done` of shape {inputs.shape[:-1]}; got {done.shape}.")
