"""Recurrent dueling Q-networks.

All of them are called alike:

    state = net.initial_state(batch_size)
    output, state = net((prev_actions, env_outputs), state)               # [B, ...]
    output, state = net((prev_actions, env_outputs), state, unroll=True)  # [T, B, ...]

Variables are created by the constructor, which is told the shape of one observation, or the
observation space.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import gin
import gymnasium
import keras
import tensorflow as tf

from seed_rl import observations
from seed_rl.automatic_torso import AutomaticTorso
from seed_rl.frame_stacking import FrameStack
from seed_rl.normalization import Moments, ObservationNormalizer
from seed_rl.recurrent import LSTMCore
from seed_rl.setting_checks import check_layer_size
from seed_rl.structures import EnvOutput
from seed_rl.tensors import batch_apply
from seed_rl.torsos import DenseTorso, Torso, nature_torso, variables_of


class AgentOutput(NamedTuple):
    """What a network says about each step; leading dimensions [B] or, unrolled, [T, B]."""

    action: Any  # int32 [...], the greedy action
    q_values: Any  # float32 [..., num_actions], rescaled by h


class AgentState(NamedTuple):
    """What a network carries from one step to the next."""

    core: Any  # LSTMState
    frames: Any  # of the FrameStack; () where nothing is stacked


class DuelingLSTMDQN(tf.Module):
    """The network that all of this module are: they differ in their torsos.

    The torso's features, the previous reward and the one-hot previous action go into an LSTM, and
    its output into two heads, value and advantage, with a hidden layer each (Wang et al. 2016).
    The advantage head has no bias, and its mean over the actions is subtracted.

    Args:
      num_actions: number of discrete actions.
      observation_shape: of one observation; a nest of tf.TensorSpec where it is no single array.
      torso: turns (stacked) observations into features.
      stack_size: how many successive frames the torso sees together; the observations are single
        ones. A stack never looks across the start of an episode.
      lstm_units: the size of the LSTM.
      head_units: the size of the hidden layer of each head.
      observation_dtype: of observations that are a single array.
      dtype: a Keras dtype policy; results are float32.
      normalize_observations: whether vectors are normalised by the statistics of what was trained
        on, see `ObservationNormalizer`; `update_statistics` then has to be told of it.

    Raises:
      ValueError: such observations cannot be processed.
    """

    def __init__(
        self,
        num_actions: int,
        observation_shape: Any,
        torso: Torso,
        stack_size: int,
        lstm_units: int,
        head_units: int,
        observation_dtype: Any,
        dtype: str,
        name: str,
        normalize_observations: bool = False,
    ):
        super().__init__(name=name)
        if num_actions < 1:
            raise ValueError(f"A Q-network needs at least one action; got {num_actions}.")
        self._num_actions = num_actions
        specs = observations.as_specs(observation_shape, observation_dtype)
        self._specs = specs
        self._nested = tf.nest.is_nested(specs)
        if self._nested and stack_size > 1:
            raise ValueError(
                f"stack_size={stack_size} stacks observations that are one image; these are a "
                f"{type(specs).__name__}. Stack them in the environment: "
                "gym_env.wrappers = [@frame_stack]."
            )
        self._frame_stack = FrameStack(stack_size)
        self._torso = torso
        self._core = LSTMCore(lstm_units, keras.dtype_policies.get(dtype).compute_dtype)
        self._heads = _DuelingHeads(num_actions, head_units)
        with tf.init_scope():
            torso_inputs: Any = (self._specs,)
            if not self._nested:
                stacked_shape = self._frame_stack.stacked_shape(tuple(self._specs.shape))
                torso_inputs = (stacked_shape, self._specs.dtype)
            torso_size = torso.build(*torso_inputs)
            self._core.build(torso_size + 1 + num_actions)
            self._heads.build(lstm_units)
        # Keras layers are kept in plain objects, and their variables here: so tf.Module,
        # checkpoints and SavedModels find each exactly once, by a name that Keras has no part in.
        self._layer_variables = {"torso": torso.variables, "heads": self._heads.variables}
        self._normalizer: ObservationNormalizer | None = None
        if normalize_observations:
            with tf.init_scope():
                self._normalizer = ObservationNormalizer(self._specs)

    def initial_state(self, batch_size: int) -> AgentState:
        """The state at the start of an episode: zeros."""
        frames: Any = ()
        if self._frame_stack.size > 1:
            frames = self._frame_stack.initial_state(
                batch_size, tuple(self._specs.shape), self._specs.dtype
            )
        return AgentState(self._core.initial_state(batch_size), frames)

    def batch_statistics(self, observation: Any) -> list[Moments]:
        """Returns what `update_statistics` has to be told of the observations of a training step.

        Args:
          observation: leaves [..., *shape]. Nothing is told of it unless `normalize_observations`.
        """
        return [] if self._normalizer is None else self._normalizer.moments(observation)

    def update_statistics(self, statistics: Sequence[Moments]) -> None:
        """Takes what `batch_statistics` returned into the statistics."""
        if self._normalizer is not None:
            self._normalizer.update(statistics)

    def __call__(
        self, inputs: tuple[Any, EnvOutput], agent_state: Any, unroll: bool = False
    ) -> tuple[AgentOutput, AgentState]:
        """Evaluates all actions.

        Args:
          inputs: (prev_actions, env_outputs), the actions that led to what the environments gave,
            and that; leaves [B, ...], or [T, B, ...] if `unroll`.
          agent_state: the state before the (first) step.
          unroll: whether inputs are [T, B, ...].

        Returns:
          The outputs and the state after the (last) step.

        Raises:
          ValueError: the observation is not of the structure and shape the network was made for.
        """
        prev_actions, env_outputs = inputs
        env_outputs = EnvOutput(*env_outputs)
        core_state, frames = agent_state
        done = tf.convert_to_tensor(env_outputs.done)
        observation = self._checked(env_outputs.observation, leading=2 if unroll else 1)
        stack = self._frame_stack.unroll if unroll else self._frame_stack.step
        observation, frames = stack(observation, done, frames)

        def features_of(observation, reward, prev_action):
            one_hot = tf.one_hot(prev_action, self._num_actions)
            reward = tf.cast(reward, tf.float32)[:, None]
            if self._normalizer is not None:
                observation = self._normalizer(observation)
            return tf.concat([self._torso(observation), reward, one_hot], axis=-1)

        features_inputs = (observation, env_outputs.reward, prev_actions)
        if unroll:
            hidden, core_state = self._core(
                batch_apply(features_of, features_inputs), done, core_state
            )
            q_values = batch_apply(self._heads, (hidden,))
        else:
            hidden, core_state = self._core.step(features_of(*features_inputs), done, core_state)
            q_values = self._heads(hidden)
        action = tf.argmax(q_values, axis=-1, output_type=tf.int32)
        return AgentOutput(action, q_values), AgentState(core_state, frames)

    def _checked(self, observation: Any, leading: int) -> Any:
        name = type(self).__name__
        observation = tf.nest.map_structure(tf.convert_to_tensor, observation)
        if tf.nest.is_nested(observation) and not self._nested:
            raise ValueError(
                f"{name} takes observations that are a single tensor; got a "
                f"{type(observation).__name__}."
            )
        observations.check_specs(
            observations.specs_of(observation, leading, name), self._specs, f"{name} was made"
        )
        return observation


class _DuelingHeads:
    """Value and advantage, added up to Q-values (Wang et al. 2016, equation 9)."""

    def __init__(self, num_actions: int, hidden_units: int):
        check_layer_size("head_units", hidden_units)

        def dense(units: int, **options: Any) -> keras.layers.Layer:
            return keras.layers.Dense(units, dtype="float32", **options)

        self._value = [dense(hidden_units, activation="relu"), dense(1)]
        self._advantage = [
            dense(hidden_units, activation="relu"),
            dense(num_actions, use_bias=False),
        ]

    def build(self, num_features: int) -> None:
        for hidden, last in (self._value, self._advantage):
            hidden.build((None, num_features))
            last.build((None, hidden.units))

    @property
    def variables(self) -> list[tf.Variable]:
        return variables_of([*self._value, *self._advantage])

    def __call__(self, features: tf.Tensor) -> tf.Tensor:
        """float32 [B, F] → Q-values, float32 [B, num_actions]."""
        value = self._value[1](self._value[0](features))
        advantage = self._advantage[1](self._advantage[0](features))
        return value + advantage - tf.reduce_mean(advantage, axis=-1, keepdims=True)


@gin.configurable
class DuelingLSTMDQNNet(DuelingLSTMDQN):
    """The network of R2D2 for Atari (Kapturowski et al. 2019; SEED RL, section A.3.1).

    The convolutions of Mnih et al. 2015, a dense layer of 512, the previous reward and action, an
    LSTM of 512, dueling heads with hidden layers of 512.

    Args:
      num_actions: number of discrete actions.
      observation_shape: of one observation, (height, width, channels).
      stack_size: how many successive observations the convolutions see together.
      lstm_units: the size of the LSTM.
      head_units: the size of the hidden layer of each head.
      observation_dtype: of the observations.
      dtype: a Keras dtype policy.
    """

    def __init__(
        self,
        num_actions: int,
        observation_shape: Sequence[int],
        stack_size: int = 1,
        lstm_units: int = 512,
        head_units: int = 512,
        observation_dtype: Any = "uint8",
        dtype: str = "float32",
        name: str = "dueling_lstm_dqn_net",
    ):
        super().__init__(
            num_actions,
            observation_shape,
            nature_torso(dtype),
            stack_size,
            lstm_units,
            head_units,
            observation_dtype,
            dtype,
            name,
        )


@gin.configurable
class DuelingLSTMDQNMLP(DuelingLSTMDQN):
    """The same with dense layers in place of the convolutions: for vectors, and small images.

    Args:
      num_actions: number of discrete actions.
      observation_shape: of one observation; anything that is not a vector is flattened.
      stack_size: how many successive frames the dense layers see together; 1 for vectors.
      hidden_sizes: the sizes of the dense layers.
      lstm_units: the size of the LSTM.
      head_units: the size of the hidden layer of each head.
      observation_dtype: of the observations.
      dtype: a Keras dtype policy.
    """

    def __init__(
        self,
        num_actions: int,
        observation_shape: Sequence[int],
        stack_size: int = 1,
        hidden_sizes: Sequence[int] = (128,),
        lstm_units: int = 128,
        head_units: int = 128,
        observation_dtype: Any = "float32",
        dtype: str = "float32",
        name: str = "dueling_lstm_dqn_mlp",
    ):
        super().__init__(
            num_actions,
            observation_shape,
            DenseTorso(hidden_sizes, "relu", "glorot_uniform", dtype),
            stack_size,
            lstm_units,
            head_units,
            observation_dtype,
            dtype,
            name,
        )


@gin.configurable
class DuelingLSTMDQNAuto(DuelingLSTMDQN):
    """The same for any observation space: convolutions for images, dense layers for vectors.

    Dicts and tuples of them are joined by one more dense layer; seed_rl.automatic_torso says what
    is done with each kind of space.

    Args:
      num_actions: number of discrete actions.
      observation_space: of one environment.
      stack_size: how many successive observations it sees together, if they are one image.
      hidden_sizes: the sizes of the dense layers for vectors.
      joint_size: the size of the dense layer that joins several parts; 0 only concatenates them.
      lstm_units: the size of the LSTM.
      head_units: the size of the hidden layer of each head.
      image_scale: what images are divided by; None: the largest number their space allows, which is
        right for pixels. Codes, as in MiniGrid, may say that they go up to 255 and stay below 11.
      normalize_observations: whether vectors are normalised by their running mean and variance,
        which are saved with the network.
      dtype: a Keras dtype policy.
    """

    def __init__(
        self,
        num_actions: int,
        observation_space: gymnasium.Space,
        stack_size: int = 1,
        hidden_sizes: Sequence[int] = (128,),
        joint_size: int = 256,
        lstm_units: int = 128,
        head_units: int = 128,
        image_scale: float | None = None,
        normalize_observations: bool = False,
        dtype: str = "float32",
        name: str = "dueling_lstm_dqn_auto",
    ):
        torso = AutomaticTorso(
            observation_space,
            hidden_sizes,
            "relu",
            lambda: "glorot_uniform",
            joint_size,
            image_scale,
            dtype,
        )
        super().__init__(
            num_actions,
            observations.tensor_specs(observation_space),
            torso,
            stack_size,
            lstm_units,
            head_units,
            None,
            dtype,
            name,
            normalize_observations,
        )
