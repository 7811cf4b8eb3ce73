"""A torso made for an observation space: any that environments may have.

| space                              | becomes                                                  |
|------------------------------------|----------------------------------------------------------|
| Box [height, width, channels]      | an image, through convolutions                           |
| Box [channels, height, width]      | the same, if there are at most 4 channels                |
| Box [stack, height, width, channels] | an image whose channels are those of all its frames    |
| Box [height, width] of bytes       | an image of one channel                                  |
| any other Box                      | a vector                                                 |
| Discrete, MultiDiscrete            | one-hot vectors                                          |
| MultiBinary                        | a vector                                                 |

Images and arrays of integers are divided by the largest number that their space allows. All vectors
go through dense layers together, and where there are several parts, they are joined by one more.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gymnasium
import keras
import numpy as np
import tensorflow as tf
from gymnasium import spaces

from seed_rl.observations import check_specs, tensor_specs
from seed_rl.setting_checks import check_layer_size, check_number
from seed_rl.torsos import DenseTorso, Torso, image_torso

_MAX_ONE_HOT = 100_000  # classes; a dense layer of 64 on so many has 6.4 million parameters
_MAX_CHANNELS_IN_FRONT = 4


class AutomaticTorso(Torso):
    """Takes observations of a space; see the module's docstring.

    Args:
      space: of one observation.
      hidden_sizes: of the dense layers for vectors.
      activation: theirs.
      initializer: makes the initialiser of their weights.
      joint_size: of the dense layer over all parts, where there are several; 0 for none.
      image_scale: what images are divided by; None: by the largest number the space allows.
      dtype: a Keras dtype policy.

    Raises:
      UnsupportedSpaceError: the space cannot be used.
      ValueError: a Discrete space has too many values to be one-hot.
    """

    takes_nests = True

    def __init__(
        self,
        space: gymnasium.Space,
        hidden_sizes: Sequence[int],
        activation: str,
        initializer: Callable[[], keras.initializers.Initializer | str],
        joint_size: int,
        image_scale: float | None,
        dtype: str,
    ):
        check_layer_size("joint_size", joint_size, or_zero=True)
        if image_scale is not None:
            check_number("image_scale", image_scale, above=0)
        self._specs = tensor_specs(space)
        self._encodings = [_encoding(leaf, image_scale) for leaf in _leaf_spaces(space)]
        self._images = [image_torso(e.shape, dtype) for e in self._encodings if e.is_image]
        self._dense: DenseTorso | None = None
        if len(self._images) < len(self._encodings):
            self._dense = DenseTorso(hidden_sizes, activation, initializer(), dtype)
        self._joint: DenseTorso | None = None
        if joint_size and len(self._parts) > 1:
            self._joint = DenseTorso([joint_size], "relu", initializer(), dtype)

    @property
    def _parts(self) -> list[Torso]:
        return [*self._images, *([self._dense] if self._dense else [])]

    @property
    def has_images(self) -> bool:
        """Whether some of the observation goes through convolutions."""
        return bool(self._images)

    @property
    def variables(self) -> list[tf.Variable]:
        parts = [*self._parts, *([self._joint] if self._joint else [])]
        return [variable for part in parts for variable in part.variables]

    def build(self, observation_shape: Any, observation_dtype: Any = "uint8") -> int:
        del observation_dtype  # the space has it
        encodings = self._encodings
        if isinstance(self._specs, tf.TensorSpec):
            encodings = [self._stacked(tuple(observation_shape))]
        else:
            check_specs(observation_shape, self._specs, "The torso was made")
        images = [e.shape for e in encodings if e.is_image]
        size = sum(
            torso.build(shape, "float32") for torso, shape in zip(self._images, images, strict=True)
        )
        if self._dense is not None:
            vector_size = sum(math.prod(e.shape) for e in encodings if not e.is_image)
            size += self._dense.build((vector_size,), "float32")
        return size if self._joint is None else self._joint.build((size,), "float32")

    def _stacked(self, shape: tuple[int, ...]) -> "_Encoding":
        """The encoding of the only array, whose shape differs where the network stacks frames."""
        encoding, own_shape = self._encodings[0], tuple(self._specs.shape)
        if shape == own_shape:
            return encoding
        if not encoding.is_image or encoding.shape != own_shape or shape[:2] != own_shape[:2]:
            raise ValueError(
                "The network can stack images [height, width, channels] only; the observations are "
                f"{own_shape}. Stack them in the environment: gym_env.wrappers = [@frame_stack]."
            )
        return encoding._replace(shape=shape)

    def __call__(self, observation: Any) -> tf.Tensor:
        leaves = tf.nest.flatten(observation)
        encoded = [e.encode(leaf) for e, leaf in zip(self._encodings, leaves, strict=True)]
        images = [x for x, e in zip(encoded, self._encodings, strict=True) if e.is_image]
        vectors = [x for x, e in zip(encoded, self._encodings, strict=True) if not e.is_image]
        features = [torso(x) for torso, x in zip(self._images, images, strict=True)]
        if self._dense is not None:
            features.append(self._dense(_concatenated(vectors)))
        joined = _concatenated(features)
        return joined if self._joint is None else self._joint(joined)


def _concatenated(tensors: list[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis=-1)


class _Encoding(NamedTuple):
    """How one array of an observation becomes a float32 image or vector."""

    is_image: bool
    shape: tuple[int, ...]  # [height, width, channels], or [size]
    encode: Callable[[tf.Tensor], tf.Tensor]  # [B, ...] → [B, *shape]


def _leaf_spaces(space: gymnasium.Space) -> Iterator[gymnasium.Space]:
    """Yields the spaces of arrays in the order of tf.nest."""
    if isinstance(space, spaces.Dict):
        for key in sorted(space.spaces):
            yield from _leaf_spaces(space.spaces[key])
    elif isinstance(space, spaces.Tuple):
        for part in space.spaces:
            yield from _leaf_spaces(part)
    else:
        yield space


def _encoding(space: gymnasium.Space, image_scale: float | None) -> _Encoding:
    if isinstance(space, spaces.Discrete):
        return _one_hot_encoding([int(space.n)], [int(space.start)])
    if isinstance(space, spaces.MultiDiscrete):
        return _one_hot_encoding(space.nvec.ravel().tolist(), space.start.ravel().tolist())
    assert space.shape is not None
    shape = tuple(space.shape)
    if isinstance(space, spaces.Box) and _is_image(space):
        return _image_encoding(shape, image_scale or _largest(space))
    is_integer = isinstance(space, spaces.Box) and np.dtype(space.dtype).kind in "iu"
    scale = _largest(space) if is_integer else 1.0
    size = math.prod(shape)
    return _Encoding(
        False, (size,), lambda x: tf.reshape(tf.cast(x, tf.float32), [-1, size]) / scale
    )


def _one_hot_encoding(numbers: list[int], starts: list[int]) -> _Encoding:
    size = sum(numbers)
    if size > _MAX_ONE_HOT:
        raise ValueError(
            f"A discrete observation of {size:,} values is too many to be one-hot (at most "
            f"{_MAX_ONE_HOT:,}). Let the environment observe numbers, or bind a network of your "
            "own."
        )

    def encode(x: tf.Tensor) -> tf.Tensor:
        choices = tf.reshape(tf.cast(x, tf.int64), [-1, len(numbers)])
        return _concatenated(
            [
                tf.one_hot(choices[:, i] - start, number)
                for i, (number, start) in enumerate(zip(numbers, starts, strict=True))
            ]
        )

    return _Encoding(False, (size,), encode)


def _is_image(space: spaces.Box) -> bool:
    rank = len(space.shape)
    if 0 in space.shape:  # nothing to convolve: a vector without numbers
        return False
    return rank in (3, 4) or (rank == 2 and space.dtype == np.uint8)


def _image_encoding(shape: tuple[int, ...], scale: float) -> _Encoding:
    def scaled(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, tf.float32) / scale

    if len(shape) == 2:
        return _Encoding(True, (*shape, 1), lambda x: scaled(x)[..., None])
    if len(shape) == 4:
        stack, height, width, channels = shape
        stacked = (height, width, stack * channels)

        def merge(x: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tf.transpose(scaled(x), [0, 2, 3, 1, 4]), [-1, *stacked])

        return _Encoding(True, stacked, merge)
    if shape[0] <= _MAX_CHANNELS_IN_FRONT < min(shape[1:]):
        channels_last = (*shape[1:], shape[0])
        return _Encoding(True, channels_last, lambda x: tf.transpose(scaled(x), [0, 2, 3, 1]))
    return _Encoding(True, shape, scaled)


def _largest(space: gymnasium.Space) -> float:
    """The largest number, by absolute value; 1 if that is none to divide by."""
    if not isinstance(space, spaces.Box):
        return 1.0
    bounds = np.abs([np.max(space.high), np.min(space.low)], dtype=np.float64)
    largest = float(bounds.max())
    return largest if 1.0 < largest <= 2**16 else 1.0
