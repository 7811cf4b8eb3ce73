"""Writes frames to a video file."""

from typing import Any

import numpy as np

from seed_rl.user_error import UserError


class VideoError(UserError):
    """A video cannot be written."""


class VideoWriter:
    """Writes RGB frames to an .mp4 or .avi file; the first frame fixes the size."""

    def __init__(self, path: str, frames_per_second: float = 30.0):
        """Args:
        path: ends in .mp4 or .avi.
        frames_per_second: of playback.

        Raises:
          VideoError: OpenCV is not installed, or the ending is another.
        """
        codecs = {".mp4": "mp4v", ".avi": "MJPG"}
        ending = path[path.rfind(".") :]
        if ending not in codecs:
            raise VideoError(f"a video's name must end in {' or '.join(codecs)}, got {path}")
        try:
            import cv2
        except ImportError as error:
            raise VideoError(
                "writing a video needs OpenCV: pip install opencv-python-headless"
            ) from error
        self._cv2 = cv2
        self._path = path
        self._codec = cv2.VideoWriter.fourcc(*codecs[ending])
        self._frames_per_second = frames_per_second
        self._writer: Any = None
        self._shape: tuple[int, ...] = ()  # of every frame

    def add(self, frame: Any) -> None:
        """Appends `frame`, uint8 [height, width, 3], RGB.

        Raises:
          VideoError: there is no frame, it is none of this kind or of another size than the first,
            or the file cannot be written.
        """
        if frame is None:
            raise VideoError(
                "the environment draws no frames; make it with render_mode='rgb_array' "
                "(for gym_env: --gin_bindings=\"gym_env.kwargs={'render_mode': 'rgb_array'}\")"
            )
        frame = np.asarray(frame)
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise VideoError(
                "a video needs frames of uint8 [height, width, 3], the environment draws "
                f"{frame.dtype} {list(frame.shape)}"
            )
        if self._writer is None:
            self._shape = frame.shape
            height, width = frame.shape[:2]
            self._writer = self._cv2.VideoWriter(
                self._path, self._codec, self._frames_per_second, (width, height)
            )
            if not self._writer.isOpened():
                raise VideoError(f"cannot write a video to {self._path}; does its folder exist?")
        if frame.shape != self._shape:  # which OpenCV would leave out without a word
            raise VideoError(
                f"the environment draws frames of {list(self._shape)} and then {list(frame.shape)}"
            )
        self._writer.write(np.ascontiguousarray(frame[..., ::-1]))

    def close(self) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.release()
