"""Observations as networks take them: a tensor, or dicts and tuples of tensors."""

from typing import Any

import gymnasium
import tensorflow as tf

from seed_rl.agent_specs import agent_observation_specs


def tensor_specs(space: gymnasium.Space) -> Any:
    """Returns the nest of tf.TensorSpec of one observation.

    Raises:
      UnsupportedSpaceError: the space cannot be used.
    """
    # Only leaves differ: dicts and tuples are TensorFlow's kinds of nests too.
    return _map_specs(
        lambda s: tf.TensorSpec(s.shape, tf.as_dtype(s.dtype)), agent_observation_specs(space)
    )


def _map_specs(fn: Any, specs: Any) -> Any:
    if isinstance(specs, dict):
        return {key: _map_specs(fn, s) for key, s in specs.items()}
    if type(specs) is tuple:
        return tuple(_map_specs(fn, s) for s in specs)
    return fn(specs)


def as_specs(observation_shape: Any, observation_dtype: Any) -> Any:
    """Returns the nest of tf.TensorSpec that `build` of a network is told.

    Args:
      observation_shape: the shape of observations that are one array, or a nest of tf.TensorSpec.
      observation_dtype: of observations that are one array.
    """
    leaves = tf.nest.flatten(observation_shape)
    if leaves and all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        return observation_shape
    return tf.TensorSpec(tuple(observation_shape), tf.as_dtype(observation_dtype))


def specs_of(observation: Any, leading: int, who: str) -> Any:
    """Returns the nest of tf.TensorSpec of one observation of a batch.

    Args:
      observation: nest of tensors [B, ...] or [T, B, ...].
      leading: how many dimensions come before those of one observation.
      who: the network's name, for the message.

    Raises:
      ValueError: a shape is not known beyond the leading dimensions.
    """

    def spec(x: tf.Tensor) -> tf.TensorSpec:
        shape = x.shape[leading:] if x.shape.rank is not None else x.shape
        if x.shape.rank is None or x.shape.rank < leading or None in tuple(shape):
            raise ValueError(
                f"{who} needs observations {'[T, B, ...]' if leading == 2 else '[B, ...]'} of "
                f"static shape beyond those dimensions; got {x.shape}."
            )
        return tf.TensorSpec(shape, x.dtype)

    return tf.nest.map_structure(spec, observation)


def check_specs(specs: Any, expected: Any, who_was_made: str) -> None:
    """Compares observations with those that a network was built for; dtypes may differ.

    Args:
      specs: from `specs_of`.
      expected: the same kind of nest.
      who_was_made: 'ImpalaDeep was built', for the message.

    Raises:
      ValueError: the structure or a shape differs.
    """
    try:
        tf.nest.assert_same_structure(specs, expected)
    except (TypeError, ValueError):
        raise ValueError(
            f"{who_was_made} for observations {shapes(expected)}; got {shapes(specs)}."
        ) from None
    if [s.shape for s in tf.nest.flatten(specs)] != [s.shape for s in tf.nest.flatten(expected)]:
        raise ValueError(
            f"{who_was_made} for observations of shape {shapes(expected)}; got {shapes(specs)}."
        )


def shapes(specs: Any) -> Any:
    """Returns the nest of shapes, as tuples, for messages."""
    return tf.nest.map_structure(lambda s: tuple(s.shape), specs)
