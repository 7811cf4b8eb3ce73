"""A recurrent core that forgets at the start of every episode."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf


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
        if units < 1:
            raise ValueError(f"An LSTM needs at least one unit; got {units}.")
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
        gates = self._project(inputs)
        return _run_unroll(gates, done, self._recurrent_weights(), LSTMState(*state))

    def step(
        self, inputs: tf.Tensor, done: tf.Tensor, state: LSTMState
    ) -> tuple[tf.Tensor, LSTMState]:
        """One step: like `__call__`, without the time dimension."""
        inputs, done = tf.convert_to_tensor(inputs), tf.convert_to_tensor(done)
        _check(inputs, done, rank=2)
        gates = self._project(inputs)
        state = _step(gates, done, self._recurrent_weights(), LSTMState(*state))
        return state.hidden, state

    def _project(self, inputs: tf.Tensor) -> tf.Tensor:
        self.build(inputs.shape[-1])
        inputs = tf.cast(inputs, self._dtype)
        projected = tf.tensordot(inputs, tf.cast(self._kernel, self._dtype), 1)
        return tf.cast(projected, tf.float32) + self._bias

    def _recurrent_weights(self) -> tf.Tensor:
        return tf.cast(self._recurrent_kernel, self._dtype)


def _step(
    gates: tf.Tensor, done: tf.Tensor, recurrent_weights: tf.Tensor, state: LSTMState
) -> LSTMState:
    """gates: the inputs' part of them, float32 [B, 4 * units]."""
    keep = tf.logical_not(done)[:, None]
    hidden = tf.where(keep, state.hidden, 0.0)
    cell = tf.where(keep, state.cell, 0.0)
    recurrent = tf.matmul(tf.cast(hidden, recurrent_weights.dtype), recurrent_weights)
    gates += tf.cast(recurrent, tf.float32)
    input_gate, forget_gate, candidate, output_gate = tf.split(gates, 4, axis=-1)
    cell = tf.sigmoid(forget_gate) * cell + tf.sigmoid(input_gate) * tf.tanh(candidate)
    return LSTMState(hidden=tf.sigmoid(output_gate) * tf.tanh(cell), cell=cell)


def _run_unroll(
    gates: tf.Tensor, done: tf.Tensor, recurrent_weights: tf.Tensor, state: LSTMState
) -> tuple[tf.Tensor, LSTMState]:
    """gates: the inputs' part of them, float32 [T, B, 4 * units]; T is known statically."""
    length = gates.shape[0]
    if length is None:
        length = tf.shape(gates)[0]
    gates_by_step = tf.TensorArray(tf.float32, length).unstack(gates)
    done_by_step = tf.TensorArray(tf.bool, length).unstack(done)
    outputs = tf.TensorArray(tf.float32, length, element_shape=state.hidden.shape)

    def body(t, state, outputs):
        state = _step(gates_by_step.read(t), done_by_step.read(t), recurrent_weights, state)
        return t + 1, state, outputs.write(t, state.hidden)

    _, state, outputs = tf.while_loop(
        lambda t, *_: t < length,
        body,
        (0, state, outputs),
        # XLA allocates what the gradient needs of every step beforehand.
        maximum_iterations=length,
    )
    return outputs.stack(), state


def _check(inputs: tf.Tensor, done: tf.Tensor, rank: int) -> None:
    if inputs.shape.rank != rank or inputs.shape[-1] is None:
        dimensions = "[T, B, F]" if rank == 3 else "[B, F]"
        raise ValueError(
            f"The LSTM needs inputs {dimensions} of known F; got shape {inputs.shape}."
        )
    if not done.shape.is_compatible_with(inputs.shape[:-1]):
        raise ValueError(f"The LSTM needs `done` of shape {inputs.shape[:-1]}; got {done.shape}.")
