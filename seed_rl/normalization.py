"""Observations with mean 0 and variance 1, by statistics of what was trained on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

# Statistics count at most so many observations: then new ones weigh a little more than old ones,
# which a changing policy no longer sees. It is far below where float32 stops counting, 2**24.
_MAX_COUNT = 1e6
_CLIP = 10.0  # standard deviations
_EPSILON = 1e-4


class Moments(NamedTuple):
    """The mean and the variance of each element over a number of arrays."""

    number: Any  # float32 scalar
    mean: Any  # float32 [*shape]
    variance: Any  # float32 [*shape]


class ObservationNormalizer(tf.Module):
    """Normalises the vectors among observations: arrays of floats of at most two dimensions.

    Images and integers pass through. The statistics are variables that no gradient changes: the
    learner updates them by the observations of each training step, inference uses them as they are,
    and they are saved and exported with the network. Before the first training step observations
    pass through unchanged.

    Args:
      specs: nest of tf.TensorSpec of one observation.
    """

    def __init__(self, specs: Any, name: str = "observation_normalizer"):
        super().__init__(name=name)
        self._moments = [
            RunningMoments(spec.shape) if is_vector(spec) else None
            for spec in tf.nest.flatten(specs)
        ]

    def __call__(self, observation: Any) -> Any:
        """Normalises a nest of tensors [..., *shape]; vectors become float32."""
        leaves = [
            leaf if moments is None else moments.normalize(leaf)
            for leaf, moments in zip(tf.nest.flatten(observation), self._moments, strict=True)
        ]
        return tf.nest.pack_sequence_as(observation, leaves)

    def moments(self, observation: Any) -> list[Moments]:
        """Returns the moments of each vector of a nest of tensors [..., *shape], for `update`.

        In a replica context of tf.distribute, they are those of all replicas' observations.
        """
        return [
            moments.of(leaf)
            for leaf, moments in zip(tf.nest.flatten(observation), self._moments, strict=True)
            if moments is not None
        ]

    def update(self, batch: Sequence[Moments]) -> None:
        """Takes what `moments` returned into the statistics."""
        running = [moments for moments in self._moments if moments is not None]
        for moments, new in zip(running, batch, strict=True):
            moments.update(new)


def is_vector(spec: tf.TensorSpec) -> bool:
    """Whether an ObservationNormalizer normalises such an array."""
    return spec.dtype.is_floating and spec.shape.rank <= 2


class RunningMoments(tf.Module):
    """Mean and variance of each element, of all that was ever seen.

    Batches are merged as Chan, Golub and LeVeque 1979 do it, without sums of squares, which cancel
    where the mean is large.

    Args:
      shape: of one observation.
    """

    def __init__(self, shape: Any, name: str = "running_moments"):
        super().__init__(name=name)
        self._rank = len(shape)
        # Where several devices train, all of them come to the same values: one's is taken.
        settings: dict[str, Any] = {
            "trainable": False,
            "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
        }
        self.count = tf.Variable(0.0, name="count", **settings)
        self.mean = tf.Variable(tf.zeros(shape), name="mean", **settings)
        self.variance = tf.Variable(tf.ones(shape), name="variance", **settings)

    def normalize(self, x: tf.Tensor) -> tf.Tensor:
        """[..., *shape] of floats → float32, at most 10 standard deviations from the mean."""
        centred = (tf.cast(x, tf.float32) - self.mean) * tf.math.rsqrt(self.variance + _EPSILON)
        known = self.count > 0
        return tf.where(known, tf.clip_by_value(centred, -_CLIP, _CLIP), tf.cast(x, tf.float32))

    def of(self, x: tf.Tensor) -> Moments:
        """The moments of a batch [..., *shape]; in a replica context, of all replicas' batches."""
        x = tf.stop_gradient(tf.cast(x, tf.float32))
        axes = list(range(x.shape.rank - self._rank))
        number = tf.cast(tf.reduce_prod(tf.shape(x)[: len(axes)]), tf.float32)
        return _of_all_replicas(Moments(number, *tf.nn.moments(x, axes)))

    def update(self, batch: Moments) -> None:
        """Merges a batch, of which the moments are given."""
        number, mean, variance = batch
        total = self.count + number
        share = number / total
        delta = mean - self.mean
        spread = tf.square(delta) * share * (1.0 - share)
        self.variance.assign(self.variance * (1.0 - share) + variance * share + spread)
        self.mean.assign_add(delta * share)
        self.count.assign(tf.minimum(total, _MAX_COUNT))


def merge_moments(parts: Moments) -> Moments:
    """The moments of several parts together.

    Args:
      parts: of each part, stacked: leaves [P] and [P, *shape].
    """
    number, means, variances = (tf.convert_to_tensor(x, tf.float32) for x in parts)
    total = tf.reduce_sum(number)
    # By [P, 1, …]: as many dimensions as the arrays have.
    shares = tf.reshape(number / total, [-1] + [1] * (means.shape.rank - 1))
    mean = tf.reduce_sum(shares * means, axis=0)
    spread = variances + tf.square(means - mean)
    return Moments(total, mean, tf.reduce_sum(shares * spread, axis=0))


def _of_all_replicas(batch: Moments) -> Moments:
    """The moments of the batches of all replicas, which are of equal size."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return batch
    number, mean, variance = batch
    average = tf.distribute.ReduceOp.MEAN
    common_mean = context.all_reduce(average, mean)
    variance = context.all_reduce(average, variance + tf.square(mean - common_mean))
    return Moments(number * context.num_replicas_in_sync, common_mean, variance)
