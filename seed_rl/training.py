"""One training step: loss, gradients, optimizer."""

import math
from typing import Any

import tensorflow as tf

from seed_rl.agent import Agent, UnrollSink
from seed_rl.user_error import UserError


class DivergedError(UserError):
    """A training step's gradient is not finite."""


class Trainer(tf.Module):
    """Applies an agent's loss to its variables, compiled into one tf.function."""

    def __init__(self, agent: Agent, optimizer: Any, jit_compile: bool = False):
        """Args:
        agent: supplies the loss and the variables.
        optimizer: Keras optimizer.
        jit_compile: compile the step with XLA, as a TPU requires. A CPU is faster without.
        """
        super().__init__()
        self.num_steps = 0  # those of a run that is resumed included
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
          float32 scalars by name; None if there was no batch within `timeout`.

        Raises:
          DivergedError: the gradient is not finite. The variables still are.
        """
        batch = sink.next_batch(timeout)
        if batch is None:
            return None
        metrics, feedback = self.step(batch)
        self.num_steps += 1
        if not math.isfinite(metrics["training/gradient_norm"]):
            raise DivergedError(
                f"training step {self.num_steps}: the gradient is not finite (the loss is "
                f"{float(metrics['training/loss'])}), and was not applied. Try a lower learning "
                "rate, a lower max_gradient_norm, or rewards scaled down, from the checkpoint."
            )
        sink.training_done(batch, feedback, self.num_steps)
        return metrics

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
        norm = tf.linalg.global_norm(gradients)
        # A gradient that is not finite would spoil all variables, and the checkpoints after them.
        finite = tf.math.is_finite(norm)
        gradients = [tf.where(finite, g, tf.zeros_like(g)) for g in map(_dense, gradients)]
        if self._agent.max_gradient_norm > 0:
            gradients, _ = tf.clip_by_global_norm(
                gradients, self._agent.max_gradient_norm, tf.where(finite, norm, 0.0)
            )
        metrics = {
            **outputs.metrics,
            "training/loss": outputs.loss,
            "training/gradient_norm": norm,
            "training/learning_rate": tf.cast(self._optimizer.learning_rate, tf.float32),
        }
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self._agent.after_training_step()
        return metrics, outputs.feedback


def _dense(gradient: Any) -> tf.Tensor:
    """An embedding's gradient comes as rows; they are added up to a tensor."""
    return tf.convert_to_tensor(gradient)
