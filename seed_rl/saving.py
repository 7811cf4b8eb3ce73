"""Saves that may fail, for want of room or of a directory, without ending the training."""

import time
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from seed_rl.user_error import UserError

# What a file system makes go wrong, as Python tells it and as TensorFlow does.
FILE_ERRORS = (OSError, tf.errors.OpError)

_RETRY_SECONDS = 60.0  # a save that failed is tried again so soon, or when the next one is due


class SaveError(UserError):
    """Even the last checkpoint of a run could not be written."""


class Saver:
    """Saves now and then; a save that fails is a warning, counted, and tried again."""

    def __init__(
        self,
        save_checkpoint: Callable[[], str] | None,
        save_data: Callable[[], None],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Args:
        save_checkpoint: writes the checkpoint, without which a run cannot go on; returns its path.
          None: another host does.
        save_data: writes what makes going on faster, such as the replay.
        interval: seconds between saves.
        clock: returns the time in seconds.
        """
        self._save_checkpoint = save_checkpoint
        self._save_data = save_data
        self._interval = interval
        self._clock = clock
        self._next = clock() + interval
        self.num_failed = 0

    def start(self) -> None:
        """Says that training begins now, from where the time to the first save counts."""
        self._next = self._clock() + self._interval

    def save_if_due(self) -> None:
        """Saves if `interval` has gone by, or less where the save before failed."""
        if self._clock() < self._next:
            return
        failures = self.num_failed
        self.save()
        failed = self.num_failed > failures
        self._next = self._clock() + min(self._interval, _RETRY_SECONDS if failed else float("inf"))

    def save(self) -> SaveError | None:
        """Saves; returns what was in the way if the checkpoint could not be written."""
        error = self._attempt("the checkpoint", self._checkpoint)
        self._attempt("the data to go on from", self._save_data)
        if error is None:
            return None
        return SaveError(
            f"the last checkpoint could not be written: {describe(error)}. What was trained since "
            "the one before is lost; make room, or make the log directory writable, and start the "
            "same command again"
        )

    def _checkpoint(self) -> None:
        if self._save_checkpoint is not None:
            logging.info("saved checkpoint %s", self._save_checkpoint())

    def _attempt(self, what: str, save: Callable[[], None]) -> Exception | None:
        try:
            save()
        except FILE_ERRORS as error:
            self.num_failed += 1
            logging.warning(
                "%s could not be written: %s. Training goes on, and it is tried again (%d saves "
                "have failed so far)",
                what,
                describe(error),
                self.num_failed,
            )
            return error
        return None


def describe(error: Exception) -> str:
    """The message in one line, without the names of TensorFlow's operations."""
    message = " ".join(str(error).split())
    if message.startswith("{{") and "}} " in message:
        message = message.partition("}} ")[2]
    return message.partition(" [Op:")[0][:300]
