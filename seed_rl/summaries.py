"""Scalars for TensorBoard, and the configuration saved beside them."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import gin
import numpy as np
import tensorflow as tf
from absl import logging

from seed_rl.saving import FILE_ERRORS, describe
from seed_rl.structures import EpisodeInfo


class SummaryWriter:
    """Writes scalars against environment frames.

    What cannot be written, for want of room or of the directory, is lost, with a warning: training
    goes on. Later points go to a new file, since the old one may end in the middle of a point.
    """

    def __init__(self, logdir: str):
        self._logdir = pathlib.Path(logdir)
        self._writer: Any = None
        self._path: pathlib.Path | None = None  # the writer's file
        self._has_flushed = False  # whether the file holds anything
        self._files_before: set[pathlib.Path] = set()
        self._is_failing = False
        self._lets_go_by = False  # until the next flush
        self.num_failed = 0  # how often what was written until a flush was lost, or some of it
        self._attempt(lambda: None)

    def scalars(self, values: Mapping[str, float], frames: int) -> None:
        """Writes `values` by name at `frames` environment frames."""

        def write() -> None:
            with self._writer.as_default(step=frames):
                for name, value in values.items():
                    tf.summary.scalar(name, float(value))

        self._attempt(write)

    def episodes(self, episodes: list[EpisodeInfo], frames: int, prefix: str = "episode/") -> None:
        """Writes the means over finished episodes; nothing when there are none.

        Args:
          episodes: EpisodeInfos with leaves [k].
          frames: environment frames so far.
          prefix: put before the names, such as 'eval/episode_'.
        """
        if not episodes:
            return
        merged = EpisodeInfo(*(np.concatenate(field) for field in zip(*episodes, strict=True)))
        self.scalars(
            {
                f"{prefix}return": merged.raw_returns.mean(),
                f"{prefix}return_as_trained": merged.returns.mean(),
                f"{prefix}length_frames": merged.num_frames.mean(),
            },
            frames,
        )

    def operative_config(self) -> None:
        """Saves the gin bindings in force, as text in TensorBoard and as operative_config.gin."""
        text = gin.operative_config_str()

        def write() -> None:
            self._logdir.joinpath("operative_config.gin").write_text(text)
            with self._writer.as_default(step=0):
                tf.summary.text(
                    "operative_config", "\n".join("    " + s for s in text.splitlines())
                )

        self._attempt(write)

    def flush(self) -> None:
        """Makes what was written visible to readers."""

        def write() -> None:
            self._writer.flush()
            # Writing to a file that was removed succeeds, and nobody will ever read it.
            if self._path is not None and not self._path.exists():
                raise FileNotFoundError(f"{self._path} is gone")
            self._has_flushed = True
            self._is_failing = False

        self._attempt(write)
        self._lets_go_by = False

    def close(self) -> None:
        """Flushes and closes the file."""
        self.flush()
        self._attempt(lambda: self._writer.close())

    def _attempt(self, write: Callable[[], None]) -> None:
        """Calls `write` with a writer there; what goes wrong with the file is a warning."""
        if self._lets_go_by:
            return
        try:
            if self._writer is None:
                self._open()
            write()
        except FILE_ERRORS as error:
            self.num_failed += 1
            self._lets_go_by = True
            self._abandon()
            if not self._is_failing:  # one warning until it works again
                logging.warning(
                    "TensorBoard's data could not be written: %s. These points are lost; training "
                    "goes on, and the next ones are tried again",
                    describe(error),
                )
            self._is_failing = True

    def _open(self) -> None:
        self._logdir.mkdir(parents=True, exist_ok=True)
        self._files_before = self._files()
        self._has_flushed = False
        self._writer = tf.summary.create_file_writer(str(self._logdir))
        self._path = next(iter(self._files() - self._files_before), None)

    def _files(self) -> set[pathlib.Path]:
        return set(self._logdir.glob(f"events.out.tfevents.*.{os.getpid()}.*"))

    def _abandon(self) -> None:
        """Gives the file up; a retry that came to nothing leaves none behind."""
        with contextlib.suppress(*FILE_ERRORS):
            if self._writer is not None:
                self._writer.close()
        self._writer = None
        self._path = None
        if not self._has_flushed:
            for path in self._files() - self._files_before:
                with contextlib.suppress(OSError):
                    path.unlink()
