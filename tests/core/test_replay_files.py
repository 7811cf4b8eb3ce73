"""Replays on disk: they come back whole or not at all."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from seed_rl.grpc_service import TensorSpec
from seed_rl.replay import PrioritizedReplay
from seed_rl.replay_files import ReplayFileError

SPECS = {"frames": TensorSpec((5000,), np.uint8), "number": TensorSpec((), np.int32)}


def values_of(numbers):
    numbers = np.asarray(numbers, np.int32)
    frames = np.random.default_rng(0).integers(0, 256, (100, 5000)).astype(np.uint8)
    frames[::2] = frames[::2, :1]  # every other one can be compressed
    return {"frames": frames[numbers], "number": numbers}


def filled(size=5, numbers=range(8)):
    replay = PrioritizedReplay(size, SPECS, 0.6, seed=0)
    replay.insert(values_of(numbers), 1.0 + np.asarray(numbers))
    return replay


def frequencies(replay):
    numbers = replay.sample(40_000, 1.0)[2]["number"]
    return np.bincount(numbers, minlength=10) / 40_000


def test_items_priorities_indices_and_counts_come_back(tmp_path):
    filled().save(tmp_path / "replay")
    replay = PrioritizedReplay(5, SPECS, 0.6, seed=1)
    replay.load(tmp_path / "replay")
    assert (replay.num_inserted, len(replay)) == (8, 5)
    assert replay.bytes_used == filled().bytes_used
    # Numbers 3 … 7 of priorities 4 … 8, 30 in all; four standard deviations are below 0.01.
    expected = [0, 0, 0, 4 / 30, 5 / 30, 6 / 30, 7 / 30, 8 / 30, 0, 0]
    np.testing.assert_allclose(frequencies(replay), expected, atol=0.01)
    sample = replay.sample_with_insertions(50, 0.9)
    np.testing.assert_array_equal(sample.insertions, sample.values["number"])
    np.testing.assert_array_equal(sample.indices, sample.insertions % 5)
    np.testing.assert_array_equal(
        sample.values["frames"], values_of(sample.values["number"])["frames"]
    )
    replay.insert(values_of([9]), [1.0])  # the oldest item, number 3, makes room
    assert frequencies(replay)[3] == 0


def test_a_smaller_replay_takes_the_newest_items(tmp_path):
    filled().save(tmp_path / "replay")
    replay = PrioritizedReplay(2, SPECS, 0.6)
    replay.load(tmp_path / "replay")
    assert (replay.num_inserted, len(replay)) == (8, 2)
    np.testing.assert_allclose(frequencies(replay)[5:8], [0, 7 / 15, 8 / 15], atol=0.011)


def test_a_replay_is_saved_where_there_is_no_checkpoint_yet(tmp_path):
    """As of several hosts only the first one writes checkpoints."""
    filled().save(tmp_path / "log" / "checkpoints" / "replay")
    replay = PrioritizedReplay(5, SPECS, 0.6)
    replay.load(tmp_path / "log" / "checkpoints" / "replay")
    assert len(replay) == len(filled())


def test_an_empty_replay_can_be_saved(tmp_path):
    PrioritizedReplay(5, SPECS, 0.6).save(tmp_path / "replay")
    replay = PrioritizedReplay(5, SPECS, 0.6)
    replay.load(tmp_path / "replay")
    assert replay.num_inserted == 0


def test_any_damage_is_noticed_and_leaves_the_replay_empty_and_usable(tmp_path):
    path = tmp_path / "replay"
    filled().save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [whole[: rng.integers(len(whole))] for _ in range(20)] + [whole + b"0", b""]
    for position in [*range(60), *rng.integers(0, len(whole), 60)]:
        damaged.append(
            whole[:position]
            + bytes([whole[position] ^ 1 << rng.integers(8)])
            + whole[position + 1 :]
        )
    replay = PrioritizedReplay(5, SPECS, 0.6)
    empty = replay.bytes_used
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ReplayFileError, match="replay"):
            replay.load(path)
        assert (replay.num_inserted, len(replay), replay.bytes_used) == (0, 0, empty)
    path.write_bytes(whole)
    replay.load(path)
    assert len(replay) == 5


def test_items_of_another_kind_are_refused_with_both_kinds(tmp_path):
    filled().save(tmp_path / "replay")
    other = {**SPECS, "number": TensorSpec((), np.int64)}
    with pytest.raises(ReplayFileError, match=r"(?s)'number'.*int64.*In the file.*int32"):
        PrioritizedReplay(5, other, 0.6).load(tmp_path / "replay")


def test_a_replay_that_is_not_empty_is_not_loaded_over(tmp_path):
    replay = filled()
    replay.save(tmp_path / "replay")
    with pytest.raises(ValueError, match="8 items"):
        replay.load(tmp_path / "replay")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "replay"
    filled().save(path)
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            filled(numbers=range(3)).save(path)
    assert path.read_bytes() == before
    filled(numbers=range(3)).save(path)
    assert path.read_bytes() != before
    assert [file.name for file in tmp_path.iterdir()] == ["replay"]


KILLED_WHILE_SAVING = """
import os, signal, sys
import numpy as np
from seed_rl import replay_files
replay_files.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
replay_files.write_items(sys.argv[1], replay_files.Header({}, 1, 1), [bytes(100)], [1.0])
"""


def test_what_a_process_left_that_was_killed_while_saving_goes_with_the_next_save(tmp_path):
    path = tmp_path / "replay"
    filled().save(path)
    before = path.read_bytes()
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED_WHILE_SAVING, str(path)], timeout=120)
        assert done.returncode == -signal.SIGKILL
        assert path.read_bytes() == before
        assert len(list(tmp_path.iterdir())) == 2
    filled(numbers=range(3)).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["replay"]
