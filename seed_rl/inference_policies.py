"""One compiled policy for each inference device, with variables that keep up with training."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from seed_rl.agent import Agent
from seed_rl.checkpoints import variables_under
from seed_rl.devices import Placement, tpu_decode, tpu_encode


class InferencePolicies:
    """The policies of all inference devices.

    The first training device, where it infers, reads the variables that are trained. Every other
    one has an agent of its own, whose variables are copies: `update` brings them up to date after
    every so many training steps. While it does, an inference step may see some variables of
    before and some of after, as it may on the device that trains.
    """

    def __init__(
        self,
        agent: Agent,
        copies: Sequence[Agent],
        placement: Placement,
        jit_compile: bool = False,
        period: int = 1,
    ):
        """Args:
        agent: the one that is trained.
        copies: one for each of `placement.copies`, made on that device by the same factory.
        placement: says which devices infer.
        jit_compile: compile the policies with XLA.
        period: training steps between updates of the copies.

        Raises:
          ValueError: there is another number of copies than of devices that need one.
        """
        if len(copies) != len(placement.copies):
            raise ValueError(f"{len(placement.copies)} devices need a copy, got {len(copies)}")
        self._agent, self._copies = agent, list(copies)
        self._placement, self._jit_compile, self._period = placement, jit_compile, period
        self._steps_copied = 0
        self._update = tf.function(self._copy, autograph=False)
        self.update(0, force=True)
        by_device = dict(zip(placement.copies, self._copies, strict=True))
        self.policies = [
            self._policy(by_device.get(device, agent), device)
            for device in placement.inference_devices
        ]

    def update(self, training_step: int, force: bool = False) -> None:
        """Copies what was trained to the devices that only infer, if it is time.

        Args:
          training_step: training steps done.
          force: copy whether it is time or not.
        """
        if not force and training_step - self._steps_copied < self._period:
            return
        self._steps_copied = training_step
        if self._copies:
            self._update()

    def lag(self, training_step: int) -> int:
        """Returns how many training steps the copies are behind; 0 where there are none."""
        return training_step - self._steps_copied if self._copies else 0

    def version(self, training_step: int) -> int:
        """Returns after how many training steps the variables were what the oldest policy has."""
        return training_step - self.lag(training_step)

    def _copy(self) -> None:
        for copy, device in zip(self._copies, self._placement.copies, strict=True):
            with tf.device(device):
                for target, source in _pairs(copy, self._agent):
                    target.assign(tf.convert_to_tensor(source))

    def _policy(self, agent: Agent, device: str) -> Callable[..., tuple[Any, Any]]:
        if len(self._placement.inference_devices) == 1 and not self._copies:
            return tf.function(agent.policy, jit_compile=self._jit_compile, autograph=False)
        encodes = self._placement.encodes

        def policy(*inputs: Any) -> tuple[Any, Any]:
            return agent.policy(*(tpu_decode(inputs) if encodes else inputs))

        compiled = tf.function(policy, jit_compile=self._jit_compile or encodes, autograph=False)

        def on_device(*inputs: Any) -> tuple[Any, Any]:
            encoded = tpu_encode(inputs) if encodes else inputs
            with tf.device(device):
                return compiled(*encoded)

        return on_device


def variables_of(agent: Agent) -> list[tf.Variable]:
    """Returns all variables that an agent saves, in an order that is its factory's alone."""
    return variables_under(tf.train.Checkpoint(**agent.checkpoint_items))


def _pairs(copy: Agent, agent: Agent) -> list[tuple[tf.Variable, tf.Variable]]:
    pairs = list(zip(variables_of(copy), variables_of(agent), strict=True))
    for target, source in pairs:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"the copy of an agent has {target.name} {target.dtype.name} {target.shape} where "
                f"the agent has {source.name} {source.dtype.name} {source.shape}: its factory must "
                "make the same every time"
            )
    return pairs
