"""A training batch in parts, and what they give together: those of replicas and those of hosts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from seed_rl.hosts import HostGroup
from seed_rl.normalization import Moments, merge_moments


class BatchPart(NamedTuple):
    """What a part of a batch says about how to train."""

    loss: Any  # float32 scalar
    gradients: list[Any]  # by the agent's trainable variables
    weight: Any  # float32 scalar: over how many elements the loss is a mean
    statistics: list[Moments]  # of what the agent normalises
    metrics: dict[str, Any]  # float32 scalars
    feedback: Any  # leaves [B, …], for the sink that the part came from


def join_replicas(parts: Sequence[BatchPart]) -> BatchPart:
    """What the parts of a host's replicas are together, after `reduce_over_replicas`."""
    weights = tf.stack([part.weight for part in parts])
    return parts[0]._replace(
        weight=tf.reduce_sum(weights),
        metrics=_join_metrics([part.metrics for part in parts], _shares(weights)),
        feedback=tf.nest.map_structure(
            lambda *leaves: tf.concat(leaves, axis=0), *(part.feedback for part in parts)
        ),
    )


def reduce_over_replicas(part: BatchPart) -> BatchPart:
    """Makes loss and gradients those of all replicas' parts; called in a replica context."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return part
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, part.weight)
    share = _share(part.weight, total, context.num_replicas_in_sync)
    loss, *gradients = context.all_reduce(
        tf.distribute.ReduceOp.SUM, [x * share for x in (part.loss, *part.gradients)]
    )
    return part._replace(loss=loss, gradients=gradients)


def join_hosts(part: BatchPart, hosts: HostGroup) -> BatchPart:
    """What the parts of all hosts are together; the feedback stays that of this host's own part.

    Every host calls it at the same time, and comes to the same.
    """
    names = sorted(part.metrics)
    table = hosts.gather(
        [part.weight, part.loss, [part.metrics[name] for name in names], part.statistics]
    )
    weights, losses, metrics, statistics = table
    shares = _shares(weights)
    gradients = hosts.sum([gradient * shares[hosts.index] for gradient in part.gradients])
    rows = [{name: metrics[i][host] for i, name in enumerate(names)} for host in range(hosts.size)]
    return part._replace(
        loss=tf.reduce_sum(shares * losses),
        gradients=gradients,
        weight=tf.reduce_sum(weights),
        statistics=[merge_moments(moments) for moments in statistics],
        metrics=_join_metrics(rows, shares),
    )


def _shares(weights: tf.Tensor) -> tf.Tensor:
    """The shares [P] of all parts, of which the weights [P] are given."""
    return _share(weights, tf.reduce_sum(weights), weights.shape[0])


def _share(weight: tf.Tensor, total: tf.Tensor, num_parts: int) -> tf.Tensor:
    """Of a part in the mean over all, by its weight; equal if the weights' total is 0."""
    return tf.where(total > 0, weight / total, 1.0 / num_parts)


def _join_metrics(parts: Sequence[dict[str, Any]], shares: tf.Tensor) -> dict[str, Any]:
    """Means by the parts' shares [P], and maxima of what is named so."""
    joined = {}
    for name in parts[0]:
        values = tf.stack([part[name] for part in parts])
        mean = tf.reduce_sum(shares * values)
        joined[name] = tf.reduce_max(values) if name.endswith("_max") else mean
    return joined
