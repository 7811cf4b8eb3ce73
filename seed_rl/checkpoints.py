"""Saving and resuming a learner."""

import pathlib
from typing import Any

import tensorflow as tf
from absl import logging

from seed_rl.user_error import UserError

# What TensorFlow raises for files that are damaged or hold other variables; reading past a file's
# end is an IndexError.
_RESTORE_ERRORS = (
    tf.errors.OpError,
    AssertionError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


class CheckpointError(UserError):
    """A checkpoint is missing or does not fit."""


class Checkpoints:
    """The checkpoints in a log directory: the newest few, written atomically.

    Beside the agent and the optimizer they hold the counts a run goes on from: environment frames
    and training steps.
    """

    def __init__(self, logdir: str, items: dict[str, Any], max_to_keep: int = 3):
        """Args:
        logdir: the run's directory; checkpoints go to its folder `checkpoints`.
        items: trackable objects by name.
        max_to_keep: how many of the newest to keep.
        """
        self.frames = tf.Variable(0, dtype=tf.int64, trainable=False, name="frames")
        self.training_steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="training_steps")
        self._checkpoint = tf.train.Checkpoint(
            frames=self.frames, training_steps=self.training_steps, **items
        )
        self._directory = str(pathlib.Path(logdir) / "checkpoints")
        _remove_damaged_listing(self._directory)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, self._directory, max_to_keep=max_to_keep
        )

    def save(self, frames: int, training_steps: int) -> str:
        """Saves everything; returns the checkpoint's path."""
        self.frames.assign(frames)
        self.training_steps.assign(training_steps)
        return self._manager.save(checkpoint_number=training_steps)

    def restore_latest(self) -> bool:
        """Restores the newest checkpoint that can be read; returns whether there is one.

        A checkpoint that is corrupt (a torn write, a full disk) is skipped with a warning.

        Raises:
          CheckpointError: there are checkpoints and none of them can be restored.
        """
        candidates = list(reversed(self._manager.checkpoints)) or self._unlisted()
        problems = []
        for path in candidates:
            try:
                status = self._checkpoint.restore(path)
                status.expect_partial()  # to play, the optimizer is not needed
                status.assert_existing_objects_matched()
            except _RESTORE_ERRORS as error:
                first_line = next(iter(str(error).splitlines()), type(error).__name__)
                problems.append(f"{path}: {first_line[:200]}")
                logging.warning("skipping a checkpoint that cannot be restored: %s", problems[-1])
                continue
            return True
        if candidates:
            raise CheckpointError(
                "none of the checkpoints can be restored; they are damaged or belong to another "
                "agent, network or environment. Choose another --logdir, or remove "
                f"{self._directory}. " + "; ".join(problems)
            )
        return False

    def _unlisted(self) -> list[str]:
        """Finds checkpoints, the newest first, where the file that lists them is lost."""
        paths = pathlib.Path(self._directory).glob("ckpt-*.index")
        numbers = [p.stem.removeprefix("ckpt-") for p in paths]
        newest_first = sorted((int(n) for n in numbers if n.isdigit()), reverse=True)
        return [str(pathlib.Path(self._directory) / f"ckpt-{n}") for n in newest_first]


def _remove_damaged_listing(directory: str) -> None:
    """Removes the file that lists the checkpoints if TensorFlow would fail to read it."""
    try:
        tf.train.get_checkpoint_state(directory)
    except ValueError as error:
        logging.warning("removing the damaged list of checkpoints in %s: %s", directory, error)
        (pathlib.Path(directory) / "checkpoint").unlink()
