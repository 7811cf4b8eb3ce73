"""One training step: loss, gradients, optimizer; on one device, or on several in step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from seed_rl.agent import Agent, LossOutputs, UnrollSink
from seed_rl.devices import Placement, default_placement, tpu_decode, tpu_encode
from seed_rl.precision import LossScale
from seed_rl.prefetching import PlacedBatch
from seed_rl.unrolls import split_batch
from seed_rl.user_error import UserError


class DivergedError(UserError):
    """Too many training steps in a row had a loss or gradient that is not finite."""


class _ReplicaResult(NamedTuple):
    """What one replica says about its part of a batch."""

    step_metrics: dict[str, tf.Tensor]  # of the whole batch: the same on every replica
    agent_metrics: dict[str, tf.Tensor]  # of its part
    feedback: Any
    share: tf.Tensor  # of the whole batch's loss; those of all replicas add up to 1


class Trainer(tf.Module):
    """Applies an agent's loss to its variables, compiled into one tf.function.

    Where several devices train, each has a replica of the variables and gets an equal part of the
    batch. Gradients are averaged over them before they are clipped and applied, so that the
    replicas stay the same, and the same as if one device had trained on the whole batch.
    """

    def __init__(
        self,
        agent: Agent,
        optimizer: Any,
        jit_compile: bool = False,
        max_skipped_steps: int = 10,
        placement: Placement | None = None,
    ):
        """Args:
        agent: supplies the loss and the variables.
        optimizer: Keras optimizer; made, like the agent, in the placement's scope.
        jit_compile: compile the step with XLA, as a TPU requires. A CPU is faster without.
        max_skipped_steps: training ends when more steps in a row than these had to be skipped.
        placement: on which devices; None: on the one that TensorFlow takes by itself.

        Raises:
          UserError: the agent's batch does not divide by the number of devices.
        """
        super().__init__()
        self.num_steps = 0  # those of a run that is resumed included
        self.num_skipped = 0  # batches whose loss or gradient was not finite
        self._skipped_in_a_row = 0
        self._max_skipped_steps = max_skipped_steps
        self._agent = agent
        self._optimizer = optimizer
        self._placement = placement or default_placement()
        self._check_batch_size()
        with self._placement.scope():
            # Slots must exist before the first step is traced, and before a checkpoint is restored.
            optimizer.build(list(agent.trainable_variables))
            self._loss_scale = LossScale() if agent.precision == "float16" else None
        # XLA compiles for one device: of several, each one's part, between which they talk.
        one_device = self._placement.strategy is None
        self._step = tf.function(
            self._train_step, jit_compile=jit_compile and one_device, autograph=False
        )
        self._loss_and_gradients = self._compute_loss_and_gradients
        if jit_compile and not one_device and not self._placement.compiles:
            self._loss_and_gradients = tf.function(
                self._compute_loss_and_gradients, jit_compile=True, autograph=False
            )

    def _check_batch_size(self) -> None:
        replicas, size = self._placement.num_replicas, self._agent.batch_size
        if size % replicas:
            raise UserError(
                f"a batch of {size} unrolls cannot be divided equally among {replicas} devices "
                f"that train: choose a batch_size that is a multiple of {replicas}, such as "
                f"{-(-size // replicas) * replicas}, or another number of devices"
            )

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
        if float(metrics.get("training/loss_scale", 1.0)) > 1.0:
            return  # float16 overflows at first, and now and then: the scale is halved
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
          batch: what the agent's sink gave: a nest of arrays of the same shapes every time; or a
            PlacedBatch of it.

        Returns:
          (metrics, feedback): float32 scalars by name, and what the loss has for the sink.
        """
        if isinstance(batch, PlacedBatch):
            return self._step(batch.placed)
        one_device = self._placement.strategy is None and not self._placement.encodes
        return self._step(batch if one_device else self.place(batch))

    def place(self, batch: Any) -> Any:
        """Sends each replica of this process its part of the batch; returns what `_step` takes."""
        strategy = self._placement.strategy
        encode = tpu_encode if self._placement.encodes else _to_tensors
        if strategy is None:
            with tf.device(self._placement.training_devices[0]):
                return encode(batch)
        parts = split_batch(batch, self._placement.num_replicas)
        return strategy.experimental_distribute_values_from_function(
            lambda context: encode(parts[context.replica_id_in_sync_group])
        )

    def _train_step(self, batch: Any) -> tuple[dict[str, tf.Tensor], Any]:
        strategy = self._placement.strategy
        if strategy is None:
            result = self._replica_step(batch)
            return {**result.agent_metrics, **result.step_metrics}, result.feedback
        result = strategy.run(self._replica_step, args=(batch,))
        return _joined(_by_replica(strategy, result))

    def _replica_step(self, batch: Any) -> _ReplicaResult:
        context = tf.distribute.get_replica_context()
        if self._placement.encodes:
            batch = tpu_decode(batch)
        outputs, gradients = self._loss_and_gradients(batch)
        self._agent.update_statistics(batch)
        loss, share = outputs.loss, tf.constant(1.0)
        if context.num_replicas_in_sync > 1:
            share = _share(context, tf.cast(outputs.weight, tf.float32))
            loss, *gradients = context.all_reduce(
                tf.distribute.ReduceOp.SUM, [x * share for x in (loss, *gradients)]
            )
        norm = tf.linalg.global_norm(gradients)
        finite = tf.math.is_finite(norm) & tf.math.is_finite(loss)
        if self._agent.max_gradient_norm > 0:
            gradients, _ = tf.clip_by_global_norm(gradients, self._agent.max_gradient_norm, norm)
        # What is applied must depend on all that the loss read. TensorFlow's graph optimizer drops
        # the order between a read and a later write once it has seen a path of data between them,
        # even if it then folds that path away (the loss's "ones like me" at the root of its
        # gradient), and the loss would now and then read a variable that was already changed.
        gradients = [tf.where(finite, g, 0.0) for g in gradients]
        metrics = {
            "training/loss": loss,
            "training/gradient_norm": norm,
            "training/learning_rate": tf.cast(self._optimizer.learning_rate, tf.float32),
        }
        if self._loss_scale is not None:
            metrics["training/loss_scale"] = tf.identity(self._loss_scale.value)
        self._apply(context, gradients, finite)
        return _ReplicaResult(metrics, outputs.metrics, outputs.feedback, share)

    def _compute_loss_and_gradients(self, batch: Any) -> tuple[LossOutputs, list[tf.Tensor]]:
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        with tf.GradientTape() as tape:
            outputs = self._agent.loss(batch)
            scaled = outputs.loss * scale if self._loss_scale is not None else outputs.loss
        gradients = tape.gradient(
            scaled,
            list(self._agent.trainable_variables),
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        gradients = list(map(_dense, gradients))
        if self._loss_scale is not None:
            gradients = [g / scale for g in gradients]
        return outputs, gradients

    def _apply(self, context: Any, gradients: list[tf.Tensor], finite: tf.Tensor) -> None:
        """Changes the variables, unless not `finite`: then they and the optimizer stay as they are.

        They are put back rather than not changed, since not every device and strategy can run an
        optimizer under a condition. What is not finite would spoil all variables, and the
        checkpoints after them.
        """
        variables = list(self._agent.trainable_variables)
        changed = [*variables, *_variables_of(self._optimizer)]
        before = [tf.identity(v) for v in changed]
        replicas = context.num_replicas_in_sync
        if replicas > 1:  # Keras's optimizers add up what replicas hand them
            gradients = [g / replicas for g in gradients]
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
        if replicas == 1:
            for variable, value in zip(changed, before, strict=True):
                _put_back(variable, value, finite)
            self._after_step(finite)
            return

        def finish(strategy: Any, before: list[Any], finite: Any) -> None:
            for variable, value in zip(changed, before, strict=True):
                strategy.extended.update(variable, _put_back, args=(value, finite), group=False)
            self._after_step(strategy.experimental_local_results(finite)[0])

        # Replicas must not assign to their variables each by itself. A TPU's, which are one
        # program, may: there this calls `finish` as it is.
        merge = tf.__internal__.distribute.interim.maybe_merge_call
        merge(finish, context.strategy, before, finite)

    def _after_step(self, finite: tf.Tensor) -> None:
        if self._loss_scale is not None:
            self._loss_scale.update(finite)
        self._agent.after_training_step()


def _share(context: Any, weight: tf.Tensor) -> tf.Tensor:
    """Of this replica in the mean over all, by their weights; equal if all of these are 0."""
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, weight)
    return tf.where(total > 0, weight / total, 1.0 / context.num_replicas_in_sync)


def _by_replica(strategy: tf.distribute.Strategy, nest: Any) -> list[Any]:
    """A nest of values of each replica → a nest for each replica of this process."""
    leaves = [strategy.experimental_local_results(x) for x in tf.nest.flatten(nest)]
    return [tf.nest.pack_sequence_as(nest, part) for part in zip(*leaves, strict=True)]


def _joined(results: Sequence[_ReplicaResult]) -> tuple[dict[str, tf.Tensor], Any]:
    """The metrics and the feedback of the whole batch."""
    shares = tf.stack([result.share for result in results])
    shares /= tf.reduce_sum(shares)  # those of other processes are not here
    metrics = dict(results[0].step_metrics)
    for name in results[0].agent_metrics:
        values = tf.stack([result.agent_metrics[name] for result in results])
        mean = tf.reduce_sum(shares * values)
        metrics[name] = tf.reduce_max(values) if name.endswith("_max") else mean
    feedback = tf.nest.map_structure(
        lambda *parts: tf.concat(parts, axis=0), *(result.feedback for result in results)
    )
    return metrics, feedback


def _to_tensors(nest: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, nest)


def _put_back(variable: tf.Variable, value: tf.Tensor, finite: tf.Tensor) -> None:
    variable.assign(tf.where(finite, variable, value))


# Metrics of a batch without which it is not learned from.
_MUST_BE_FINITE = ("training/loss", "training/gradient_norm")


def _variables_of(optimizer: Any) -> list[tf.Variable]:
    """The optimizer's own variables as TensorFlow's, not Keras's."""
    return [getattr(v, "value", v) for v in optimizer.variables]


def _dense(gradient: Any) -> tf.Tensor:
    """An embedding's gradient comes as rows; they are added up to a tensor."""
    return tf.convert_to_tensor(gradient)
