"""One training step: loss, gradients, optimizer; on one device, or on several in step."""

import math
from typing import Any

import tensorflow as tf
from absl import logging

from seed_rl.agent import Agent, LossOutputs, UnrollSink
from seed_rl.batch_parts import BatchPart, join_hosts, join_replicas, reduce_over_replicas
from seed_rl.devices import Placement, default_placement, tpu_decode, tpu_encode
from seed_rl.normalization import Moments
from seed_rl.precision import LossScale
from seed_rl.prefetching import PlacedBatch
from seed_rl.unrolls import split_batch
from seed_rl.user_error import UserError


class DivergedError(UserError):
    """Too many training steps in a row had a loss or gradient that is not finite."""


class Trainer(tf.Module):
    """Applies an agent's loss to its variables, compiled into one tf.function.

    Where several devices train, each has a replica of the variables and gets an equal part of the
    batch. Gradients are averaged over them before they are clipped and applied, so that the
    replicas stay the same, and the same as if one device had trained on the whole batch. So it is
    with several hosts, of which each brings a batch of its own.
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
        placement: on which devices; None: on the one that TensorFlow takes by itself. Where
          several hosts train, each calls `step` at the same time, with a batch of its own.

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
        compiled = jit_compile and one_device
        if self._placement.hosts.size == 1:
            self._step = tf.function(self._train_step, jit_compile=compiled, autograph=False)
        else:
            # Between the two halves the hosts talk.
            self._step = self._step_with_other_hosts
        self._host_part = tf.function(
            self._compute_host_part, jit_compile=compiled, autograph=False
        )
        self._host_apply = tf.function(self._apply_on_host, jit_compile=compiled, autograph=False)
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
            part, metrics = self._replica_step(batch)
        else:
            results = _by_replica(strategy, strategy.run(self._replica_step, (batch,)))
            parts, metrics_of_each = zip(*results, strict=True)
            part, metrics = join_replicas(parts), metrics_of_each[0]
        return {**part.metrics, **metrics}, part.feedback

    def _replica_step(self, batch: Any) -> tuple[BatchPart, dict[str, tf.Tensor]]:
        part = self._replica_part(batch)
        metrics = self._replica_apply(part.loss, part.gradients, part.statistics)
        # What has been applied need not leave the device.
        return part._replace(gradients=[], statistics=[]), metrics

    def _step_with_other_hosts(self, batch: Any) -> tuple[dict[str, tf.Tensor], Any]:
        part = join_hosts(self._host_part(batch), self._placement.hosts)
        metrics = self._host_apply(part.loss, part.gradients, part.statistics)
        return {**part.metrics, **metrics}, part.feedback

    def _compute_host_part(self, batch: Any) -> BatchPart:
        strategy = self._placement.strategy
        if strategy is None:
            return self._replica_part(batch)
        return join_replicas(_by_replica(strategy, strategy.run(self._replica_part, (batch,))))

    def _apply_on_host(self, *of_all_hosts: Any) -> dict[str, tf.Tensor]:
        strategy = self._placement.strategy
        if strategy is None:
            return self._replica_apply(*of_all_hosts)
        metrics = strategy.run(self._replica_apply, of_all_hosts)  # the same of all replicas
        return {k: strategy.experimental_local_results(v)[0] for k, v in metrics.items()}

    def _replica_part(self, batch: Any) -> BatchPart:
        """What this replica's part of a batch gives; loss and gradients are those of all."""
        if self._placement.encodes:
            batch = tpu_decode(batch)
        outputs, gradients = self._loss_and_gradients(batch)
        return reduce_over_replicas(
            BatchPart(
                outputs.loss,
                gradients,
                tf.cast(outputs.weight, tf.float32),
                self._agent.batch_statistics(batch),
                outputs.metrics,
                outputs.feedback,
            )
        )

    def _replica_apply(
        self, loss: tf.Tensor, gradients: list[tf.Tensor], statistics: list[Moments]
    ) -> dict[str, tf.Tensor]:
        """Changes this replica's variables; returns metrics, which are the same on all."""
        self._agent.update_statistics(statistics)
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
        self._apply(tf.distribute.get_replica_context(), gradients, finite)
        return metrics

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


def _by_replica(strategy: tf.distribute.Strategy, nest: Any) -> list[Any]:
    """A nest of values of each replica → a nest for each replica of this process."""
    leaves = [strategy.experimental_local_results(x) for x in tf.nest.flatten(nest)]
    return [tf.nest.pack_sequence_as(nest, part) for part in zip(*leaves, strict=True)]


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
