"""A TensorBoard trace of some training steps: `--profile_steps=100:110`."""

import re

import tensorflow as tf
from absl import logging

from seed_rl.user_error import UserError


def parse_steps(text: str) -> range:
    """'100:110' → the training steps 100 to 109; '' → none.

    Raises:
      UserError: the text has another form.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(
            f"--profile_steps={text}: give the first training step and the one after the last, "
            "such as 100:110"
        )
    return range(int(match[1]), int(match[2]))


class StepProfiler:
    """Writes a trace of a range of training steps, counted from the start of this process."""

    def __init__(self, steps: range, logdir: str):
        """Args:
        steps: which; empty: none.
        logdir: the run's directory, in which TensorBoard finds the trace under Profile.
        """
        self._steps, self._logdir = steps, logdir
        self._running = False

    def before_step(self, step: int) -> None:
        """Is told that training step number `step`, from 0, is about to run."""
        if step in self._steps and not self._running:
            tf.profiler.experimental.start(self._logdir)
            self._running = True
            logging.info("tracing training steps %d to %d", step, self._steps.stop - 1)
        elif self._running and step not in self._steps:
            self.close()

    def close(self) -> None:
        """Writes the trace that is being taken, if there is one."""
        if self._running:
            self._running = False
            tf.profiler.experimental.stop()
            logging.info("wrote a trace to %s/plugins/profile", self._logdir)
