"""What turns observations into features at the bottom of a network."""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import gin
import keras
import tensorflow as tf

from seed_rl.setting_checks import check_layer_sizes

_MIN_SIZE_OF_NATURE = 36  # pixels; its strides leave nothing of less


class Torso(abc.ABC):
    """Turns a batch of observations into float32 features [B, F]."""

    takes_nests = False  # whether observations may be dicts and tuples

    @property
    @abc.abstractmethod
    def variables(self) -> list[tf.Variable]:
        """The variables; none before `build`."""

    @abc.abstractmethod
    def build(self, observation_shape: Any, observation_dtype: Any = "uint8") -> int:
        """Creates the variables and returns F.

        Args:
          observation_shape: of one observation; where these are nested, which a torso that
            `takes_nests` can process, a nest of tf.TensorSpec.
          observation_dtype: of the observations, unless they are nested.

        Raises:
          ValueError: the torso cannot process such observations.
        """

    @abc.abstractmethod
    def __call__(self, observation: Any) -> tf.Tensor:
        """Observations, a tensor or nest of tensors [B, ...] → float32 [B, F]."""


class LayeredTorso(Torso):
    """Keras layers on observations that are one array; uint8 is scaled to [0, 1].

    Args:
      layers: applied one after the other; the last one returns [B, F].
      dtype: a Keras dtype policy.
    """

    def __init__(self, layers: Sequence[keras.layers.Layer], dtype: str):
        self._compute_dtype = keras.dtype_policies.get(dtype).compute_dtype
        self._layers = layers

    @property
    def variables(self) -> list[tf.Variable]:
        return variables_of(self._layers)

    def build(self, observation_shape: tuple[int, ...], observation_dtype: Any = "uint8") -> int:
        self.check_observation_shape(observation_shape)
        shape: tuple[Any, ...] = (None, *observation_shape)
        for layer in self._layers:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)
        return shape[-1]

    @abc.abstractmethod
    def check_observation_shape(self, observation_shape: tuple[int, ...]) -> None:
        """Raises a ValueError if the torso cannot process such observations."""

    def __call__(self, observation: tf.Tensor) -> tf.Tensor:
        is_image = observation.dtype == tf.uint8
        features = tf.cast(observation, self._compute_dtype)
        if is_image:
            features /= 255
        for layer in self._layers:
            features = layer(features)
        return tf.cast(features, tf.float32)


@gin.configurable(denylist=["layers", "min_size", "dtype"])
class ConvolutionalTorso(LayeredTorso):
    """Images through convolutions and one dense layer.

    Args:
      layers: from images to features.
      min_size: the least height and width that they can process.
      dtype: a Keras dtype policy.
      preprocess: makes images [B, height, width, channels] of observations that are sent in a
        smaller form, [B, ...]; it runs on the accelerator. Frames are stacked before it.
    """

    def __init__(
        self,
        layers: Sequence[keras.layers.Layer],
        min_size: int,
        dtype: str,
        preprocess: Callable[..., Any] | None = None,
    ):
        super().__init__(layers, dtype)
        self._min_size = min_size
        self._preprocess = preprocess

    def build(self, observation_shape: tuple[int, ...], observation_dtype: Any = "uint8") -> int:
        if self._preprocess is not None:
            image = self._preprocess(tf.zeros((1, *observation_shape), observation_dtype))
            observation_shape, observation_dtype = tuple(image.shape[1:]), image.dtype
        return super().build(observation_shape, observation_dtype)

    def __call__(self, observation: tf.Tensor) -> tf.Tensor:
        if self._preprocess is not None:
            observation = self._preprocess(observation)
        return super().__call__(observation)

    def check_observation_shape(self, observation_shape: tuple[int, ...]) -> None:
        if len(observation_shape) != 3 or min(observation_shape[:2]) < self._min_size:
            raise ValueError(
                "A convolutional network needs observations [height, width, channels] of at least "
                f"{self._min_size} x {self._min_size} pixels; got shape {observation_shape}. "
                "Networks with MLP or Auto in their names take others."
            )


class DenseTorso(LayeredTorso):
    """Dense layers over observations of any shape, flattened."""

    def __init__(
        self,
        hidden_sizes: Sequence[int],
        activation: str,
        initializer: keras.initializers.Initializer | str,
        dtype: str,
    ):
        check_layer_sizes("hidden_sizes", hidden_sizes)
        dense = [
            keras.layers.Dense(size, activation, kernel_initializer=initializer, dtype=dtype)
            for size in hidden_sizes
        ]
        super().__init__([keras.layers.Reshape((-1,), dtype=dtype), *dense], dtype)

    def check_observation_shape(self, observation_shape: tuple[int, ...]) -> None:
        pass  # scalars are vectors of one element, images are flattened


class ResidualBlock(keras.layers.Layer):
    """x + convolution(relu(convolution(relu(x)))) with 3 x 3 kernels, as many channels as x."""

    def __init__(self, channels: int, initializer: str, dtype: str):
        super().__init__(dtype=dtype)
        self._first = _convolution(channels, initializer, dtype)
        self._second = _convolution(channels, initializer, dtype)

    def build(self, input_shape):
        self._first.build(input_shape)
        self._second.build(input_shape)
        self.built = True

    def call(self, inputs):
        hidden = self._first(keras.ops.relu(inputs))
        return inputs + self._second(keras.ops.relu(hidden))

    def compute_output_shape(self, input_shape):
        return input_shape


def residual_torso(
    channels: Sequence[int], initializer: str = "glorot_uniform", dtype: str = "float32"
) -> ConvolutionalTorso:
    """The deep residual torso of IMPALA (Espeholt et al. 2018, figure 3).

    A stack for each of `channels`: a 3 x 3 convolution, 3 x 3 max-pooling with stride 2 and two
    residual blocks. Then a dense layer of 256.
    """
    layers: list[keras.layers.Layer] = []
    for number in channels:
        layers += [
            _convolution(number, initializer, dtype),
            keras.layers.MaxPooling2D(3, strides=2, padding="same", dtype=dtype),
            ResidualBlock(number, initializer, dtype),
            ResidualBlock(number, initializer, dtype),
        ]
    layers += [
        keras.layers.ReLU(dtype=dtype),
        keras.layers.Flatten(dtype=dtype),
        keras.layers.Dense(256, "relu", kernel_initializer=initializer, dtype=dtype),
    ]
    return ConvolutionalTorso(layers, min_size=1, dtype=dtype)


def nature_torso(dtype: str = "float32") -> ConvolutionalTorso:
    """The torso of the DQN of Mnih et al. 2015: three convolutions and a dense layer of 512.

    Weights start orthogonal with a gain of sqrt(2), which keeps the size of what tells two frames
    apart from layer to layer. Keras's own initialisation shrinks it, until most of the features
    die before anything is learned (seen on Pong).
    """
    layers = [
        _rectified_convolution(32, 8, 4, "valid", dtype),
        _rectified_convolution(64, 4, 2, "valid", dtype),
        _rectified_convolution(64, 3, 1, "valid", dtype),
        *_rectified_dense(512, dtype),
    ]
    return ConvolutionalTorso(layers, min_size=_MIN_SIZE_OF_NATURE, dtype=dtype)


def small_image_torso(dtype: str = "float32") -> ConvolutionalTorso:
    """For images of any size that the strides of `nature_torso` would skip over, such as 7 x 7.

    Three 3 x 3 convolutions of 32, 64 and 64 channels, the last two with stride 2, and a dense
    layer of 256, with the weights of `nature_torso`.
    """
    layers = [
        _rectified_convolution(32, 3, 1, "same", dtype),
        _rectified_convolution(64, 3, 2, "same", dtype),
        _rectified_convolution(64, 3, 2, "same", dtype),
        *_rectified_dense(256, dtype),
    ]
    return ConvolutionalTorso(layers, min_size=1, dtype=dtype)


def image_torso(image_shape: tuple[int, ...], dtype: str = "float32") -> ConvolutionalTorso:
    """Returns the torso for images [height, width, channels]: `nature_torso`, or the small one."""
    large = min(image_shape[:2]) >= _MIN_SIZE_OF_NATURE
    return nature_torso(dtype) if large else small_image_torso(dtype)


def _rectified_convolution(
    filters: int, size: int, stride: int, padding: str, dtype: str
) -> keras.layers.Layer:
    return keras.layers.Conv2D(
        filters,
        size,
        stride,
        padding,
        activation="relu",
        kernel_initializer=keras.initializers.Orthogonal(math.sqrt(2)),
        dtype=dtype,
    )


def _rectified_dense(units: int, dtype: str) -> list[keras.layers.Layer]:
    initializer = keras.initializers.Orthogonal(math.sqrt(2))
    return [
        keras.layers.Flatten(dtype=dtype),
        keras.layers.Dense(units, "relu", kernel_initializer=initializer, dtype=dtype),
    ]


def _convolution(channels: int, initializer: str, dtype: str) -> keras.layers.Conv2D:
    return keras.layers.Conv2D(
        channels, 3, padding="same", kernel_initializer=initializer, dtype=dtype
    )


def variables_of(layers: Sequence[keras.layers.Layer]) -> list[tf.Variable]:
    """Returns the layers' variables as TensorFlow's own."""
    return [variable.value for layer in layers for variable in layer.variables]
