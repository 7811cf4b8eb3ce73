"""Scalars for TensorBoard, and the configuration saved beside them."""

import pathlib
from collections.abc import Mapping

import gin
import numpy as np
import tensorflow as tf

from seed_rl.structures import EpisodeInfo


class SummaryWriter:
    """Writes scalars against environment frames."""

    def __init__(self, logdir: str):
        self._logdir = pathlib.Path(logdir)
        self._writer = tf.summary.create_file_writer(str(self._logdir))

    def scalars(self, values: Mapping[str, float], frames: int) -> None:
        """Writes `values` by name at `frames` environment frames."""
        with self._writer.as_default(step=frames):
            for name, value in values.items():
                tf.summary.scalar(name, float(value))

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
        self._logdir.joinpath("operative_config.gin").write_text(text)
        with self._writer.as_default(step=0):
            tf.summary.text("operative_config", "\n".join("    " + s for s in text.splitlines()))

    def flush(self) -> None:
        """Makes what was written visible to readers."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()
