"""Writing videos."""

import sys

import numpy as np
import pytest

from seed_rl.video import VideoError, VideoWriter

cv2 = pytest.importorskip("cv2")


def read(path):
    video = cv2.VideoCapture(str(path))
    frames = []
    while True:
        there_is_one, frame = video.read()
        if not there_is_one:
            return frames
        frames.append(frame[..., ::-1])  # OpenCV has BGR


@pytest.mark.parametrize("ending", ["mp4", "avi"])
def test_frames_come_back_in_order_size_and_colour(tmp_path, ending):
    path = tmp_path / f"play.{ending}"
    writer = VideoWriter(str(path))
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]
    for colour in colours:
        writer.add(np.full((48, 64, 3), colour, np.uint8))
    writer.close()
    frames = read(path)
    assert [frame.shape for frame in frames] == [(48, 64, 3)] * 3
    for frame, colour in zip(frames, colours, strict=True):  # compression changes it a little
        np.testing.assert_allclose(frame.mean((0, 1)), colour, atol=20)


def test_another_ending_is_refused():
    with pytest.raises(VideoError, match=r"\.mp4 or \.avi, got play\.gif"):
        VideoWriter("play.gif")


def test_an_environment_that_draws_nothing_is_told_how_to():
    with pytest.raises(VideoError, match="render_mode='rgb_array'"):
        VideoWriter("play.mp4").add(None)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "no" / "such" / "play.avi"
    with pytest.raises(VideoError, match=f"{path}; does its folder exist"):
        VideoWriter(str(path)).add(np.zeros((48, 64, 3), np.uint8))


@pytest.mark.parametrize(
    "frame", [np.zeros((48, 64), np.uint8), np.zeros((48, 64, 3)), np.zeros((48, 64, 4), np.uint8)]
)
def test_frames_that_are_no_pictures_are_refused(tmp_path, frame):
    with pytest.raises(VideoError, match=r"uint8 \[height, width, 3\]"):
        VideoWriter(str(tmp_path / "play.avi")).add(frame)


def test_frames_of_another_size_are_refused(tmp_path):
    writer = VideoWriter(str(tmp_path / "play.avi"))
    writer.add(np.zeros((48, 64, 3), np.uint8))
    with pytest.raises(VideoError, match=r"\[48, 64, 3\] and then \[64, 48, 3\]"):
        writer.add(np.zeros((64, 48, 3), np.uint8))
    writer.close()


def test_closing_without_a_frame_is_fine(tmp_path):
    VideoWriter(str(tmp_path / "play.avi")).close()


def test_without_opencv_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(VideoError, match="pip install opencv-python-headless"):
        VideoWriter("play.mp4")
