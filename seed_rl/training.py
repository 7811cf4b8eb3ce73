"""One training step: loss, gradients, optimizer."""

import math
from typing import Any

import tensorflow as tf
from absl import logging

from seed_rl.agent import Agent, UnrollSink
from seed_rl.user_error import UserError


class DivergedError(UserError):
    """Too many training steps in a row had a loss or gradient that is not finite."""


class Trainer(tf.Module):
    """Applies an agent's loss to its variables, compiled into one tf.function."""

    def __init__(
        self,
        agent: Agent,
        optimizer: Any,
        jit_compile: bool = False,
        max_skipped_steps: int = 10,
    ):
        """Args:
        agent: supplies the loss and the variables.
        optimizer: Keras optimizer.
        jit_compile: compile the step with XLA, as a TPU requires. A CPU is faster without.
        max_skipped_steps: training ends when more steps in a row than these had to be skipped.
        """
        super().__init__()
        self.num_steps = 0  # those of a run that is resumed included
        self.num_skipped = 0  # batches whose loss or gradient was not finite
        self._skipped_in_a_row = 0
        self._max_skipped_steps = max_skipped_steps
        self._agent = agent
        self._optimizer = optimizer
        self._step = tf.function(self._train_step, jit_compile=jit_compile, autograph=False)
        # Slots must exist before the first step is traced, and before a checkpoint is restored.
        optimizer.build(list(agent.trainable_variables))

    def train_from(self, sink: UnrollSink, timeout: float) -> dict[str, tf.Tensor] | None:
        """Trains on the sink's next batch.

        Args:
          sink: gives the batch and is told when it was trained on.
          timeout: seconds to wait for the batch.

        Returns:
          float32 scalars by name, none if the batch was skipped because its loss or gradient is not
          finite; None if there was no batch within `timeout`.

        Raises:
          DivergedError: too many batches in a row had to be skipped. The variables are finite.
        """
        batch = sink.next_batch(timeout)
        if batch is None:
            return None
        metrics, feedback = self.step(batch)
        if all(map(math.isfinite, (metrics[name] for name in _MUST_BE_FINITE))):
            self.num_steps += 1
            self._skipped_in_a_row = 0
            sink.training_done(batch, feedback, self.num_steps)
            return metrics
        self._note_skipped(metrics)
        sink.training_done(batch, None, self.num_steps)
        return {}

    def _note_skipped(self, metrics: dict[str, tf.Tensor]) -> None:
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        what = (
            f"after training step {self.num_steps}, a batch has a loss of "
            f"{float(metrics['training/loss'])} and a gradient of norm "
            f"{float(metrics['training/gradient_norm'])}; it is not learned from"
        )
        logging.warning("%s (%d so far)", what, self.num_skipped)
        if self._skipped_in_a_row > self._max_skipped_steps:
            raise DivergedError(
                f"{what}. That is {self._skipped_in_a_row} in a row, so training has diverged. Try "
                "a lower learning rate, a lower max_gradient_norm, or smaller rewards, from the "
                "last checkpoint, which is good."
            )

    def step(self, batch: Any) -> tuple[dict[str, tf.Tensor], Any]:
        """Trains on `batch` once.

        Args:
          batch: what the agent's sink gave: a nest of arrays of the same shapes every time.

        Returns:
          (metrics, feedback): float32 scalars by name, and what the loss has for the sink.
        """
        return self._step(batch)

    def _train_step(self, batch: Any) -> tuple[dict[str, tf.Tensor], Any]:
        variables = list(self._agent.trainable_variables)
        with tf.GradientTape() as tape:
            outputs = self._agent.loss(batch)
        gradients = tape.gradient(
            outputs.loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        gradients = list(map(_dense, gradients))
        norm = tf.linalg.global_norm(gradients)
        finite = tf.math.is_finite(norm) & tf.math.is_finite(outputs.loss)
        if self._agent.max_gradient_norm > 0:
            gradients, _ = tf.clip_by_global_norm(gradients, self._agent.max_gradient_norm, norm)
        metrics = {
            **outputs.metrics,
            "training/loss": outputs.loss,
            "training/gradient_norm": norm,
            "training/learning_rate": tf.cast(self._optimizer.learning_rate, tf.float32),
        }
        self._apply(gradients, variables, finite)
        self._agent.after_training_step()
        return metrics, outputs.feedback

    def _apply(self, gradients: list[tf.Tensor], variables: list[Any], finite: tf.Tensor) -> None:
        """Changes the variables, unless not `finite`: then they and the optimizer stay as they are.

        They are put back rather than not changed, since not every device and strategy can run an
        optimizer under a condition. What is not finite would spoil all variables, and the
        checkpoints after them.
        """
        changed = [*variables, *_variables_of(self._optimizer)]
        before = [tf.identity(v) for v in changed]
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
        for variable, value in zip(changed, before, strict=True):
            variable.assign(tf.where(finite, variable, value))


# Metrics of a batch without which it is not learned from.
_MUST_BE_FINITE = ("training/loss", "training/gradient_norm")


def _variables_of(optimizer: Any) -> list[tf.Variable]:
    """The optimizer's own variables as TensorFlow's, not Keras's."""
    return [getattr(v, "value", v) for v in optimizer.variables]


def _dense(gradient: Any) -> tf.Tensor:
    """An embedding's gradient comes as rows; they are added up to a tensor."""
    return tf.convert_to_tensor(gradient)
