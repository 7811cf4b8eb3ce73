"""What an agent supplies to the learner."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from seed_rl.normalization import Moments
from seed_rl.structures import EnvOutput
from seed_rl.unrolls import Unroll


class LossOutputs(NamedTuple):
    """What an agent's loss gives back."""

    loss: Any  # float32 scalar, to be minimised
    metrics: dict[str, Any]  # float32 scalars to log
    feedback: Any  # nest of tensors handed to UnrollSink.training_done; () where there is none
    # How many elements the loss is the mean of, where that is not the same for batches of one size:
    # where some are masked out. It must not depend on the variables. See Agent.loss.
    weight: Any = 1.0


class UnrollSink(abc.ABC):
    """Where finished unrolls go and where training batches come from: a queue or a replay."""

    @abc.abstractmethod
    def put(self, unrolls: Unroll) -> None:
        """Takes n finished unrolls (leaves [n, T + 1, …]); may wait, which slows inference down.

        Raises:
          QueueClosedError: the sink is closed.
        """

    @abc.abstractmethod
    def next_batch(self, timeout: float) -> Any | None:
        """Returns the next training batch (nest of arrays), or None if `timeout` seconds pass."""

    @abc.abstractmethod
    def training_done(self, batch: Any, feedback: Any, training_step: int) -> None:
        """Is told that training step number `training_step` took `batch`, with its feedback.

        The feedback is None if the batch was skipped, because its loss was not finite.
        """

    @abc.abstractmethod
    def metrics(self) -> dict[str, float]:
        """Returns scalars to log, such as queue_length (unrolls) or policy_lag (training steps)."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wakes whoever waits, with QueueClosedError."""

    def save(self, logdir: str) -> None:  # noqa: B027, to keep nothing is the usual case
        """Saves, beside a checkpoint, what a resumed run would miss.

        Args:
          logdir: the run's directory.

        Raises:
          OSError: it cannot be written.
        """

    def restore(self, logdir: str) -> str:
        """Restores what `save` saved; called before anything is put, when a run is resumed.

        Args:
          logdir: the run's directory.

        Returns:
          What to tell the user about it; empty if nothing.
        """
        del logdir
        return ""


class SinkWrapper(UnrollSink):
    """Another sink, by which everything goes that a subclass does not do in its own way."""

    def __init__(self, sink: UnrollSink):
        self._sink = sink

    def put(self, unrolls: Unroll) -> None:
        self._sink.put(unrolls)

    def next_batch(self, timeout: float) -> Any | None:
        return self._sink.next_batch(timeout)

    def training_done(self, batch: Any, feedback: Any, training_step: int) -> None:
        self._sink.training_done(batch, feedback, training_step)

    def metrics(self) -> dict[str, float]:
        return self._sink.metrics()

    def close(self) -> None:
        self._sink.close()

    def save(self, logdir: str) -> None:
        self._sink.save(logdir)

    def restore(self, logdir: str) -> str:
        return self._sink.restore(logdir)


class Agent(abc.ABC):
    """An agent, as the learner uses it:

        agent = make_agent(observation_space, action_space)
        sink = agent.make_unroll_sink(unroll_specs)
        # inference, for every batch of environments:
        agent_outputs, agent_state = agent.policy(env_ids, prev_actions, env_outputs, agent_state)
        # and whenever an environment has completed an unroll:
        sink.put(unrolls)
        # training:
        batch = sink.next_batch()
        loss, metrics, feedback = agent.loss(batch)  # then a step of the optimizer
        agent.after_training_step()
        sink.training_done(batch, feedback, training_step)

    Environments that only evaluate act at the same time, by the same `policy`, which tells them by
    their env_ids; their unrolls go nowhere and their steps are no frames of the training.

    Everything under `policy` and `loss` is TensorFlow, traced into tf.functions that must compile
    under XLA with static shapes. An Agent is a tf.Module too, or holds one, as `checkpoint_items`.
    """

    unroll_length: int  # T, agent steps
    num_overlapping_steps: int = 0  # burn-in, agent steps
    batch_size: int  # unrolls a training step
    num_eval_envs: int = 0  # the last of the env_ids, which only evaluate
    precision: str = "float32"  # see seed_rl.precision; with 'float16' losses are scaled

    @abc.abstractmethod
    def initial_state(self, batch_size: int) -> Any:
        """Returns the recurrent state at the start of an episode: leaves [batch_size, …]."""

    @abc.abstractmethod
    def policy(
        self, env_ids: Any, prev_actions: Any, env_outputs: EnvOutput, agent_state: Any
    ) -> tuple[Any, Any]:
        """Chooses actions for B environments (leaves [B, …]).

        Returns:
          (agent_outputs, agent_state): a named tuple with a field `action`, and the next state.
        """

    @abc.abstractmethod
    def greedy_policy(
        self, env_ids: Any, prev_actions: Any, env_outputs: EnvOutput, agent_state: Any
    ) -> tuple[Any, Any]:
        """Is `policy` without exploration: the most likely or most valued actions."""

    @abc.abstractmethod
    def make_unroll_sink(self, unroll_specs: Unroll) -> UnrollSink:
        """Returns where finished unrolls go.

        Args:
          unroll_specs: an Unroll of TensorSpecs, as one unroll is stored: leaves [T + 1, …].
        """

    @abc.abstractmethod
    def make_optimizer(self, num_training_steps: int) -> Any:
        """Returns a Keras optimizer whose schedule, if it has one, ends at `num_training_steps`."""

    @abc.abstractmethod
    def loss(self, batch: Any) -> LossOutputs:
        """Returns the loss of a batch of the sink's.

        Where several devices train, each one gets an equal part of the batch (leaves [T + 1, B, …]
        of an Unroll, or [B, …], cut along B), and the losses and gradients of the parts are
        averaged, weighted by `LossOutputs.weight`. For a loss that is a mean over elements, and
        says in the weight how many, that is exactly the loss of the whole batch. Metrics are
        averaged alike, but for those named *_max. The parts' feedback is concatenated along its
        first dimension, B.
        """

    @property
    @abc.abstractmethod
    def trainable_variables(self) -> Sequence[Any]:
        """The tf.Variables that the optimizer changes."""

    @property
    @abc.abstractmethod
    def checkpoint_items(self) -> dict[str, Any]:
        """Trackable objects to save by name, beside the optimizer and the counts of the learner."""

    @property
    def max_gradient_norm(self) -> float:
        """Global norm that gradients are scaled down to; 0 leaves them as they are."""
        return 0.0

    def batch_statistics(self, batch: Any) -> list[Moments]:
        """Runs inside the training step after the loss: for statistics of what is trained on.

        Where several devices train, it runs on each, with its part of the batch, in the replica
        context of tf.distribute, and returns the same on each; see seed_rl.normalization.
        """
        del batch
        return []  # most have none

    def update_statistics(self, statistics: Sequence[Moments]) -> None:  # noqa: B027
        """Runs next, with what `batch_statistics` returned, of all devices and hosts together."""

    def after_training_step(self) -> None:  # noqa: B027, nothing to do is the usual case
        """Runs inside the compiled training step after the variables changed (target networks)."""

    def train_steps_per_frame(self, action_repeat: int) -> float:
        """Training steps for each environment frame: how often the data come round."""
        return 1.0 / (self.batch_size * self.unroll_length * action_repeat)
