"""Stacks of successive frames, made inside the network from single ones.

So each frame is sent, kept and copied once, instead of once in every stack it belongs to: a quarter
of the bytes between environment and accelerator for the usual stack of 4.
"""

from typing import Any

import tensorflow as tf


class FrameStack:
    """Shows each frame together with those before it, as channels, the newest last.

    A stack never looks across the start of an episode: frames of the episode before are zeros, as
    are those that do not exist yet.

    The state of B environments is their last `size` - 1 frames, [B, height, width,
    (size - 1) * channels], of which those of an earlier episode are zeros already; it is () if
    there is nothing to stack.
    """

    def __init__(self, size: int):
        """Args:
        size: how many frames a stack shows, at least 1; with 1, frames are left as they are.

        Raises:
          ValueError: the size is less than 1.
        """
        if size < 1:
            raise ValueError(f"A stack has at least one frame; got stack_size={size}.")
        self.size = size

    def stacked_shape(self, frame_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one stack.

        Args:
          frame_shape: (height, width, channels); anything if the size is 1.

        Raises:
          ValueError: such frames cannot be stacked.
        """
        if self.size == 1:
            return frame_shape
        if len(frame_shape) != 3:
            raise ValueError(
                f"Frames to be stacked must be [height, width, channels]; got {frame_shape}. "
                "A stack_size of 1 takes observations of any shape."
            )
        return (*frame_shape[:2], self.size * frame_shape[2])

    def initial_state(self, batch_size: int, frame_shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns the state at the start of an episode: no frames."""
        if self.size == 1:
            return ()
        height, width, channels = frame_shape
        return tf.zeros([batch_size, height, width, (self.size - 1) * channels], dtype)

    def step(self, frames: tf.Tensor, done: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        """Stacks one frame of each of B environments.

        Args:
          frames: [B, height, width, channels].
          done: bool [B], whether the frame is the first of its episode.
          state: from the step before.

        Returns:
          The stacks, [B, height, width, size * channels], and the next state.
        """
        if self.size == 1:
            return frames, ()
        stacked = tf.concat([_blank(state, done), frames], axis=-1)
        return stacked, stacked[..., frames.shape[-1] :]

    def unroll(self, frames: tf.Tensor, done: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        """Stacks the frames of an unroll: like T calls of `step`, at once.

        Args:
          frames: [T, B, height, width, channels].
          done: bool [T, B].
          state: from before the first step.

        Returns:
          The stacks, [T, B, height, width, size * channels], and the state after the last step.
        """
        if self.size == 1:
            return frames, ()
        channels = frames.shape[-1]
        num_steps = frames.shape[0] or tf.shape(frames)[0]
        earlier = [
            state[None, ..., i * channels : (i + 1) * channels] for i in range(self.size - 1)
        ]
        history = tf.concat([*earlier, frames], axis=0)  # [size - 1 + T, B, …]
        # Of the frames before the unroll, the state has blanked those that are out of sight.
        starts = tf.pad(done, [[self.size - 1, 0], [0, 0]])
        shown = [frames]
        out_of_sight = tf.zeros_like(done)
        for age in range(1, self.size):
            first = self.size - 1 - age
            # A frame is seen until an episode starts after it.
            out_of_sight |= starts[first + 1 : first + 1 + num_steps]
            shown.insert(0, _blank(history[first : first + num_steps], out_of_sight))
        stacked = tf.concat(shown, axis=-1)
        return stacked, stacked[-1, ..., channels:]


def _blank(frames: tf.Tensor, where: tf.Tensor) -> tf.Tensor:
    where = tf.reshape(where, tf.concat([tf.shape(where), [1, 1, 1]], axis=0))
    return tf.where(where, tf.zeros([], frames.dtype), frames)
