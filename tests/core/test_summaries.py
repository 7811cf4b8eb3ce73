"""What TensorBoard gets to see."""

import gin
import numpy as np
import pytest
import tensorflow as tf

from seed_rl.structures import EpisodeInfo
from seed_rl.summaries import SummaryWriter


@gin.configurable(module="test_summaries")
def configurable_for_summaries(number=1):
    return number


def events(logdir):
    """Scalars as {name: [(step, value)]}, and the tags of all that is no scalar."""
    scalars, others = {}, []
    for path in sorted(logdir.glob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(tf.make_ndarray(value.tensor))
                    scalars.setdefault(value.tag, []).append((event.step, number))
                else:
                    others.append(value.tag)
    return scalars, others


def info(frames, returns, raw_returns):
    return EpisodeInfo(
        np.array(frames, np.int64),
        np.array(returns, np.float32),
        np.array(raw_returns, np.float32),
        np.zeros(len(frames), np.int32),
    )


def test_scalars_stand_at_their_frames(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    writer.scalars({"loss/total": 1.5, "speed": 7}, frames=100)
    writer.scalars({"loss/total": np.float32(0.25)}, frames=40_000_000_000)
    writer.flush()
    scalars, _ = events(tmp_path)
    assert scalars == {
        "loss/total": [(100, 1.5), (40_000_000_000, 0.25)],
        "speed": [(100, 7.0)],
    }
    writer.close()


def test_episodes_are_averaged_one_by_one_not_group_by_group(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    groups = [info([10, 20, 60], [1, 2, 3], [10, 20, 30]), info([30], [6], [60])]
    writer.episodes(groups, 5)
    writer.episodes([], 6)
    writer.episodes(groups[1:], 7, prefix="eval/episode_")
    writer.close()
    scalars, _ = events(tmp_path)
    assert scalars == {
        "episode/return": [(5, 30.0)],
        "episode/return_as_trained": [(5, 3.0)],
        "episode/length_frames": [(5, 30.0)],
        "eval/episode_return": [(7, 60.0)],
        "eval/episode_return_as_trained": [(7, 6.0)],
        "eval/episode_length_frames": [(7, 30.0)],
    }


@pytest.fixture
def bound():
    gin.clear_config()
    gin.parse_config("configurable_for_summaries.number = 42")
    yield
    gin.clear_config()


def test_the_operative_config_is_saved_as_a_file_that_gin_reads(tmp_path, bound):
    assert configurable_for_summaries() == 42
    writer = SummaryWriter(str(tmp_path))
    writer.operative_config()
    writer.close()
    assert "operative_config" in events(tmp_path)[1]
    gin.clear_config()
    gin.parse_config_file(str(tmp_path / "operative_config.gin"))
    assert configurable_for_summaries() == 42
