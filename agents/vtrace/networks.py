"""Actor-critic networks: a torso, optionally an LSTM, a policy head and a value head.

All of them are called alike:

    net.build(observation_shape)  # or by the first call, for networks that stack no frames
    core_state = net.initial_state(batch_size)
    output, core_state = net(prev_actions, env_outputs, core_state)                 # [B, ...]
    output, core_state = net(prev_actions, env_outputs, core_state, unroll=True)    # [T, B, ...]

Variables are created at the first call, or by `net.build(observation_shape)`, whose argument is the
shape of one observation, or a nest of tf.TensorSpec where observations are dicts or tuples. Build a
network before restoring a checkpoint into it.

With a `stack_size` above 1 observations are single frames [height, width, channels], and the
torso sees stacks of them (see seed_rl.frame_stacking), which `core_state` then carries too.

The first argument of each constructor says what the policy head parametrises: a number of discrete
actions, or a distribution from `get_parametric_distribution_for_action_space`.

The argument `dtype` is a Keras dtype policy for the torso: 'float32', or 'mixed_bfloat16', which
computes in bfloat16 and keeps variables in float32. The heads and all results are float32.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import gin
import gymnasium
import keras
import tensorflow as tf

from seed_rl import observations
from seed_rl.automatic_torso import AutomaticTorso
from seed_rl.distributions import Categorical, ParametricDistribution
from seed_rl.frame_stacking import FrameStack
from seed_rl.normalization import Moments, ObservationNormalizer
from seed_rl.recurrent import LSTMCore
from seed_rl.setting_checks import check_layer_size
from seed_rl.structures import EnvOutput
from seed_rl.tensors import batch_apply
from seed_rl.torsos import DenseTorso, Torso, nature_torso, residual_torso, variables_of


class AgentOutput(NamedTuple):
    """What a network says about each step; leading dimensions [B] or, unrolled, [T, B]."""

    action: Any  # as the action space has it
    policy_logits: Any  # float32 [..., param_size], the parameters of the policy
    baseline: Any  # float32 [...], the value estimate


class StackingState(NamedTuple):
    """What a network that stacks frames carries from one step to the next."""

    core: Any  # of the LSTM, or ()
    frames: Any  # of the FrameStack


class ActorCritic(tf.Module):
    """The network that all of this module are: they differ in their torsos.

    Args:
      parametric_action_distribution: what the policy head parametrises.
      torso: turns observations into features.
      lstm_units: the size of the LSTM between torso and heads; 0 for none.
      use_prev_action_and_reward: whether the previous action (one-hot where discrete) and the
        previous reward, clipped to [-1, 1], join the torso's features. None: if there is an LSTM.
      value_torso: a torso of its own for the value head; by default both share one.
      head_gains: the gains of orthogonal initialisers of the policy and value head; by default they
        are initialised as Keras does it.
      head_initializer: instead of `head_gains`, the name of a Keras initialiser for both heads.
      dtype: a Keras dtype policy.
      stack_size: how many successive frames the torso sees together.
      normalize_observations: whether vectors are normalised by the statistics of what was trained
        on, see `ObservationNormalizer`; `update_statistics` then has to be told of it.
    """

    def __init__(
        self,
        parametric_action_distribution: ParametricDistribution | int,
        torso: Torso,
        lstm_units: int = 0,
        use_prev_action_and_reward: bool | None = None,
        value_torso: Torso | None = None,
        head_gains: tuple[float, float] | None = None,
        head_initializer: str = "glorot_uniform",
        dtype: str = "float32",
        stack_size: int = 1,
        normalize_observations: bool = False,
        name: str | None = None,
    ):
        super().__init__(name=name)
        if isinstance(parametric_action_distribution, int):
            parametric_action_distribution = Categorical(parametric_action_distribution)
        check_layer_size("lstm_units", lstm_units, or_zero=True)
        if value_torso is not None and lstm_units:
            raise ValueError("A separate value torso cannot be combined with an LSTM.")
        self._distribution = parametric_action_distribution
        self._frame_stack = FrameStack(stack_size)
        self._torso = torso
        self._value_torso = value_torso
        self._use_prev_action_and_reward = (
            lstm_units > 0 if use_prev_action_and_reward is None else use_prev_action_and_reward
        )
        self._core = None
        if lstm_units:
            self._core = LSTMCore(lstm_units, keras.dtype_policies.get(dtype).compute_dtype)
        self._heads = _Heads(
            parametric_action_distribution.param_size,
            *(
                [keras.initializers.get(head_initializer)] * 2
                if head_gains is None
                else [keras.initializers.Orthogonal(gain) for gain in head_gains]
            ),
        )
        # Keras layers are kept in plain objects, and their variables here: so tf.Module,
        # checkpoints and SavedModels find each exactly once, by a name that Keras has no part in.
        self._layer_variables: dict[str, list[tf.Variable]] = {}
        self._observation_specs: Any = None
        self._normalize_observations = normalize_observations
        self._normalizer: ObservationNormalizer | None = None

    def initial_state(self, batch_size: int) -> Any:
        """The state at the start of an episode; () if there is neither an LSTM nor a stack.

        Raises:
          ValueError: the network stacks frames and does not know their shape yet.
        """
        core = () if self._core is None else self._core.initial_state(batch_size)
        if self._frame_stack.size == 1:
            return core
        specs = self._observation_specs
        if specs is None:
            raise ValueError("A network that stacks frames must be built before initial_state.")
        return StackingState(
            core, self._frame_stack.initial_state(batch_size, tuple(specs.shape), specs.dtype)
        )

    def build(self, observation_shape: Any, observation_dtype: Any = "uint8") -> None:
        """Creates the variables, unless they exist.

        Args:
          observation_shape: of one observation, or a nest of tf.TensorSpec where it is nested.
          observation_dtype: of observations that are a single array.

        Raises:
          ValueError: the network cannot process such observations.
        """
        if self._observation_specs is not None:
            return
        specs = observations.as_specs(observation_shape, observation_dtype)
        self._check_structure(specs)
        with tf.init_scope():
            torso_inputs: Any = (specs,)
            if not tf.nest.is_nested(specs):
                stacked_shape = self._frame_stack.stacked_shape(tuple(specs.shape))
                torso_inputs = (stacked_shape, specs.dtype)
            torso_size = self._torso.build(*torso_inputs)
            value_torso_size = torso_size
            if self._value_torso is not None:
                value_torso_size = self._value_torso.build(*torso_inputs)
            extra = 1 + self._distribution.encoded_size if self._use_prev_action_and_reward else 0
            sizes = (torso_size + extra, value_torso_size + extra)
            if self._core is not None:
                self._core.build(torso_size + extra)
                sizes = (self._core.units, self._core.units)
            self._heads.build(*sizes)
        self._layer_variables = {"torso": self._torso.variables, "heads": self._heads.variables}
        if self._value_torso is not None:
            self._layer_variables["value_torso"] = self._value_torso.variables
        with tf.init_scope():
            if self._normalize_observations:
                self._normalizer = ObservationNormalizer(specs)
        self._observation_specs = specs

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
        self,
        prev_actions: Any,
        env_outputs: EnvOutput,
        core_state: Any,
        unroll: bool = False,
        is_training: bool = False,
    ) -> tuple[AgentOutput, Any]:
        """Evaluates policy and value.

        Args:
          prev_actions: the actions that led to `env_outputs`.
          env_outputs: what the environments gave.
          core_state: the recurrent state before the (first) step.
          unroll: whether inputs are [T, B, ...] instead of [B, ...].
          is_training: whether nobody plays the actions, so that they need not be sampled: they are
            the modes of the distributions.

        Returns:
          The outputs and the recurrent state after the (last) step.

        Raises:
          ValueError: the observation is not of the structure and shape the network was built for.
        """
        env_outputs = EnvOutput(*env_outputs)
        observation = tf.nest.map_structure(tf.convert_to_tensor, env_outputs.observation)
        self._check_or_build(observation, leading=2 if unroll else 1)
        frames: Any = ()
        if self._frame_stack.size > 1:
            core_state, frames = core_state
            stack = self._frame_stack.unroll if unroll else self._frame_stack.step
            observation, frames = stack(observation, env_outputs.done, frames)
        inputs = (prev_actions, env_outputs.reward, observation)
        features = batch_apply(self._features, inputs) if unroll else self._features(*inputs)
        if self._core is not None:
            run_core = self._core if unroll else self._core.step
            hidden, core_state = run_core(features[0], env_outputs.done, core_state)
            features = (hidden, hidden)
        choose = self._distribution.mode if is_training else self._distribution.sample

        def heads(policy_features, value_features):
            policy_logits, baseline = self._heads(policy_features, value_features)
            return AgentOutput(choose(policy_logits), policy_logits, baseline)

        state = StackingState(core_state, frames) if self._frame_stack.size > 1 else core_state
        return (batch_apply(heads, features) if unroll else heads(*features)), state

    def _features(self, prev_actions, reward, observation) -> tuple[tf.Tensor, tf.Tensor]:
        """What the policy and what the value are computed from, float32 [B, F]."""
        extra = []
        if self._use_prev_action_and_reward:
            clipped_reward = tf.clip_by_value(tf.cast(reward, tf.float32), -1.0, 1.0)
            extra = [clipped_reward[:, None], self._distribution.encode(prev_actions)]
        if self._normalizer is not None:
            observation = self._normalizer(observation)
        policy_features = tf.concat([self._torso(observation), *extra], axis=-1)
        if self._value_torso is None:
            return policy_features, policy_features
        return policy_features, tf.concat([self._value_torso(observation), *extra], axis=-1)

    def _check_or_build(self, observation: Any, leading: int) -> None:
        name = type(self).__name__
        self._check_structure(observation)
        specs = observations.specs_of(observation, leading, name)
        if self._observation_specs is None:
            self.build(specs)
        expected = self._observation_specs
        observations.check_specs(specs, expected, f"{name} was built")
        if self._frame_stack.size > 1 and specs.dtype != expected.dtype:
            raise ValueError(
                f"{name} was built to stack frames of {expected.dtype.name}; "
                f"got {specs.dtype.name}."
            )

    def _check_structure(self, observation: Any) -> None:
        """Refuses nests that the torso, or the stacking of frames, cannot take."""
        if not tf.nest.is_nested(observation):
            return
        kind = type(observation).__name__
        if not self._torso.takes_nests:
            raise ValueError(
                f"{type(self).__name__} takes observations that are a single tensor; got a {kind}. "
                "AutoNetwork takes any: bind VTraceAgent.network = @AutoNetwork."
            )
        if self._frame_stack.size > 1:
            raise ValueError(
                f"stack_size={self._frame_stack.size} stacks observations that are one image; got "
                f"a {kind}. Stack them in the environment: gym_env.wrappers = [@frame_stack]."
            )


class _Heads:
    """One dense layer for the policy's parameters and one for the value."""

    def __init__(
        self,
        param_size: int,
        policy_initializer: keras.initializers.Initializer,
        value_initializer: keras.initializers.Initializer,
    ):
        self._policy = keras.layers.Dense(
            param_size, kernel_initializer=policy_initializer, dtype="float32"
        )
        self._value = keras.layers.Dense(1, kernel_initializer=value_initializer, dtype="float32")

    def build(self, policy_features: int, value_features: int) -> None:
        self._policy.build((None, policy_features))
        self._value.build((None, value_features))

    @property
    def variables(self) -> list[tf.Variable]:
        return variables_of([self._policy, self._value])

    def __call__(self, policy_features, value_features) -> tuple[tf.Tensor, tf.Tensor]:
        return self._policy(policy_features), tf.squeeze(self._value(value_features), axis=-1)


@gin.configurable
class ImpalaDeep(ActorCritic):
    """The deep network of IMPALA for DeepMind Lab (Espeholt et al. 2018, figure 3).

    Three residual stacks of 16, 32 and 32 channels, a dense layer of 256, the previous reward and
    action, an LSTM.

    Args:
      num_actions: a number of discrete actions, or a distribution.
      lstm_units: the size of the LSTM; 0 for none.
      use_prev_action_and_reward: whether the heads, or the LSTM, see these two.
      dtype: a Keras dtype policy.
      stack_size: how many successive observations it sees together.
    """

    def __init__(
        self,
        num_actions: ParametricDistribution | int,
        lstm_units: int = 256,
        use_prev_action_and_reward: bool = True,
        dtype: str = "float32",
        stack_size: int = 1,
        name: str = "impala_deep",
    ):
        super().__init__(
            num_actions,
            residual_torso((16, 32, 32), dtype=dtype),
            lstm_units,
            use_prev_action_and_reward,
            dtype=dtype,
            stack_size=stack_size,
            name=name,
        )


@gin.configurable
class ImpalaShallow(ActorCritic):
    """The Nature-CNN (Mnih et al. 2015) with a policy and a value head.

    Args:
      parametric_action_distribution: a number of discrete actions, or a distribution.
      stack_size: how many successive observations it sees together.
      lstm_units: the size of an LSTM before the heads; 0 for none.
      use_prev_action_and_reward: whether the heads, or the LSTM, see these two; None: if there is
        an LSTM.
      dtype: a Keras dtype policy.
    """

    def __init__(
        self,
        parametric_action_distribution: ParametricDistribution | int,
        lstm_units: int = 0,
        use_prev_action_and_reward: bool | None = None,
        dtype: str = "float32",
        stack_size: int = 1,
        name: str = "impala_shallow",
    ):
        super().__init__(
            parametric_action_distribution,
            nature_torso(dtype),
            lstm_units,
            use_prev_action_and_reward,
            head_gains=(0.01, 1.0),  # the first policy is nearly uniform
            dtype=dtype,
            stack_size=stack_size,
            name=name,
        )


@gin.configurable
class MLP(ActorCritic):
    """Dense layers, for vector observations; others are flattened.

    Args:
      parametric_action_distribution: a number of discrete actions, or a distribution.
      hidden_sizes: the sizes of the dense layers.
      activation: the Keras name of their activation.
      lstm_units: the size of an LSTM before the heads; 0 for none.
      separate_value_torso: whether policy and value have dense layers each; not with an LSTM.
      use_prev_action_and_reward: whether the heads, or the LSTM, see these two; None: if there is
        an LSTM.
      orthogonal_init: whether weights start orthogonal, with a gain of sqrt(2) for the dense
        layers, `policy_gain` for the policy head and 1 for the value head; otherwise as Keras
        initialises them.
      policy_gain: a small one makes the first policy nearly uniform.
      normalize_observations: whether observations are normalised by their running mean and
        variance, which are saved with the network.
      dtype: a Keras dtype policy.
    """

    def __init__(
        self,
        parametric_action_distribution: ParametricDistribution | int,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        lstm_units: int = 0,
        separate_value_torso: bool = False,
        use_prev_action_and_reward: bool | None = None,
        orthogonal_init: bool = True,
        policy_gain: float = 0.01,
        normalize_observations: bool = False,
        dtype: str = "float32",
        name: str = "mlp",
    ):
        def torso() -> DenseTorso:
            initializer = (
                keras.initializers.Orthogonal(math.sqrt(2)) if orthogonal_init else "glorot_uniform"
            )
            return DenseTorso(hidden_sizes, activation, initializer, dtype)

        super().__init__(
            parametric_action_distribution,
            torso(),
            lstm_units,
            use_prev_action_and_reward,
            value_torso=torso() if separate_value_torso else None,
            head_gains=(policy_gain, 1.0) if orthogonal_init else None,
            dtype=dtype,
            normalize_observations=normalize_observations,
            name=name,
        )


@gin.configurable
class AutoNetwork(ActorCritic):
    """The network for any observation space: convolutions for images, dense layers for vectors.

    Dicts and tuples of them are joined by one more dense layer; seed_rl.automatic_torso says what
    is done with each kind of space. For a vector it is the same as `MLP`.

    Args:
      parametric_action_distribution: a number of discrete actions, or a distribution.
      observation_space: of one environment.
      hidden_sizes: the sizes of the dense layers for vectors.
      activation: the Keras name of their activation.
      joint_size: the size of the dense layer that joins several parts; 0 only concatenates them.
      lstm_units: the size of an LSTM before the heads; 0 for none.
      separate_value_torso: whether policy and value have torsos each; not with an LSTM. None: if
        there is neither an LSTM nor an image, since convolutions are what takes the time.
      use_prev_action_and_reward: whether the heads, or the LSTM, see these two; None: if there is
        an LSTM.
      policy_gain: a small one makes the first policy nearly uniform.
      image_scale: what images are divided by; None: the largest number their space allows, which is
        right for pixels. Codes, as in MiniGrid, may say that they go up to 255 and stay below 11.
      normalize_observations: whether vectors are normalised by their running mean and variance,
        which are saved with the network.
      stack_size: how many successive observations it sees together, if they are one image.
      dtype: a Keras dtype policy.
    """

    def __init__(
        self,
        parametric_action_distribution: ParametricDistribution | int,
        observation_space: gymnasium.Space,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        joint_size: int = 256,
        lstm_units: int = 0,
        separate_value_torso: bool | None = None,
        use_prev_action_and_reward: bool | None = None,
        policy_gain: float = 0.01,
        image_scale: float | None = None,
        normalize_observations: bool = False,
        stack_size: int = 1,
        dtype: str = "float32",
        name: str = "auto_network",
    ):
        def make_torso() -> AutomaticTorso:
            return AutomaticTorso(
                observation_space,
                hidden_sizes,
                activation,
                lambda: keras.initializers.Orthogonal(math.sqrt(2)),
                joint_size,
                image_scale,
                dtype,
            )

        torso = make_torso()
        if separate_value_torso is None:
            separate_value_torso = not lstm_units and not torso.has_images
        super().__init__(
            parametric_action_distribution,
            torso,
            lstm_units,
            use_prev_action_and_reward,
            value_torso=make_torso() if separate_value_torso else None,
            head_gains=(policy_gain, 1.0),
            dtype=dtype,
            stack_size=stack_size,
            normalize_observations=normalize_observations,
            name=name,
        )


@gin.configurable
class GFootball(ActorCritic):
    """The network of SEED RL for Google Research Football (Espeholt et al. 2020).

    Four residual stacks of 16, 32, 32 and 32 channels and a dense layer of 256; neither an LSTM nor
    previous action and reward; weights start LeCun-normal.

    Args:
      parametric_action_distribution: a number of discrete actions, or a distribution.
      dtype: a Keras dtype policy.
    """

    def __init__(
        self,
        parametric_action_distribution: ParametricDistribution | int,
        dtype: str = "float32",
        name: str = "gfootball",
    ):
        super().__init__(
            parametric_action_distribution,
            residual_torso((16, 32, 32, 32), "lecun_normal", dtype),
            head_initializer="lecun_normal",
            dtype=dtype,
            name=name,
        )
