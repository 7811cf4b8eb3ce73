"""Saving and resuming a learner."""

import contextlib
import pathlib
import shutil
from typing import Any

import keras
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
        self._max_to_keep = max_to_keep
        self._directory = str(pathlib.Path(logdir) / "checkpoints")
        _remove_damaged_listing(self._directory)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, self._directory, max_to_keep=max_to_keep
        )

    def variables(self) -> list[tf.Variable]:
        """All variables that are saved, in an order that is the same in every process."""
        return variables_under(self._checkpoint)

    def save(self, frames: int, training_steps: int) -> str:
        """Saves everything; returns the checkpoint's path.

        The checkpoint bears the number of training steps; where there is one of this number or a
        higher one, it bears the next after the highest. So a higher number is always a newer
        checkpoint, and one that is good is never written over: whenever the process is killed there
        is a good one.

        Raises:
          OSError, tf.errors.OpError: it cannot be written; those before are as they were.
        """
        self._remove_torn()
        self.frames.assign(frames)
        self.training_steps.assign(training_steps)
        number = max([training_steps, *(n + 1 for n in self._numbers())])
        try:
            path = self._manager.save(checkpoint_number=number)
        except BaseException:
            self._remove_torn()
            raise
        self._remove_forgotten()
        return path

    def _numbers(self) -> list[int]:
        """Of all checkpoints there are, in rising order."""
        paths = pathlib.Path(self._directory).glob("ckpt-*.index")
        return sorted(n for n in (_number(path.stem) for path in paths) if n >= 0)

    def _remove_torn(self) -> None:
        """Removes what a save left that was killed or had no room: it takes room for nothing.

        For the learner alone, which is the only one that saves: what looks torn to another process
        may be in the making.
        """
        directory = pathlib.Path(self._directory)
        with contextlib.suppress(OSError):  # the save will say what is wrong
            for path in directory.glob("ckpt-*_temp"):
                shutil.rmtree(path, ignore_errors=True)
            for path in directory.glob("ckpt-*.data-*"):
                if not path.with_name(path.name.partition(".data-")[0] + ".index").exists():
                    path.unlink()

    def restore_latest(self) -> bool:
        """Restores the newest checkpoint that can be read; returns whether there is one.

        A checkpoint that is corrupt (a torn write, a full disk) is skipped with a warning.

        Raises:
          CheckpointError: there are checkpoints and none of them can be restored.
        """
        candidates = self._newest_first()
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

    def _remove_forgotten(self) -> None:
        """Removes old checkpoints that TensorFlow has lost track of.

        It does when the clock was set back, or when it was killed before it wrote its list.
        """
        listed = {pathlib.Path(path).name for path in self._manager.checkpoints}
        directory = pathlib.Path(self._directory)
        with contextlib.suppress(OSError):
            for number in self._numbers()[: -self._max_to_keep]:
                if f"ckpt-{number}" not in listed:
                    for path in directory.glob(f"ckpt-{number}.*"):
                        path.unlink()

    def _newest_first(self) -> list[str]:
        """The checkpoints that are listed, and before them newer ones.

        A checkpoint is not in the list if the process was killed before it wrote that, and none is
        where the list is lost.
        """
        listed = list(reversed(self._manager.checkpoints))
        newest_listed = _number(pathlib.Path(listed[0]).name) if listed else -1
        unlisted = [n for n in reversed(self._numbers()) if n > newest_listed]
        directory = pathlib.Path(self._directory)
        paths = [str(directory / f"ckpt-{n}") for n in unlisted]
        return [path for path in paths if path not in listed] + listed


def variables_under(root: Any) -> list[tf.Variable]:
    """Returns the variables of a trackable object and of all that it holds, each once."""
    found: dict[Any, tf.Variable] = {}
    for item in tf.train.TrackableView(root).descendants():
        if isinstance(item, keras.Variable):
            item = item.value
        if isinstance(item, tf.Variable):
            found.setdefault(item.ref(), item)
    return list(found.values())


def _number(name: str) -> int:
    """The number of a checkpoint's name, -1 if it is none."""
    number = name.removeprefix("ckpt-")
    return int(number) if number.isdigit() else -1


def _remove_damaged_listing(directory: str) -> None:
    """Removes the file that lists the checkpoints if TensorFlow would fail to read it."""
    try:
        tf.train.get_checkpoint_state(directory)
    except ValueError as error:
        logging.warning("removing the damaged list of checkpoints in %s: %s", directory, error)
        (pathlib.Path(directory) / "checkpoint").unlink()
