"""A save that fails is tried again; a full disk, or one that is gone, does not end the training."""

import contextlib
import errno
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf
from absl import logging as absl_logging

from seed_rl.checkpoints import Checkpoints
from seed_rl.learner import make_logdir
from seed_rl.saving import SaveError, Saver, describe
from seed_rl.summaries import SummaryWriter
from seed_rl.user_error import UserError

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


class Disk:
    """Counts what is written to it; full while `error` is set."""

    def __init__(self):
        self.now, self.error, self.checkpoints, self.data = 0.0, None, [], []
        self.saver = Saver(
            lambda: self._write(self.checkpoints),
            lambda: self._write(self.data),
            interval=600.0,
            clock=lambda: self.now,
        )

    def _write(self, files):
        if self.error is not None:
            raise self.error
        files.append(self.now)
        return f"file {self.now}"

    def train(self, until):
        while self.now < until:
            self.now += 1.0
            self.saver.save_if_due()


@pytest.fixture
def warnings(monkeypatch):
    """The warnings that were logged."""
    logged = []
    monkeypatch.setattr(absl_logging, "warning", lambda text, *args: logged.append(text % args))
    return logged


def test_saves_come_at_their_interval():
    disk = Disk()
    disk.now = 1000.0  # setting up took its time
    disk.saver.start()
    disk.train(until=3000.0)
    assert disk.checkpoints == disk.data == [1600.0, 2200.0, 2800.0]
    assert disk.saver.num_failed == 0


def test_a_save_that_fails_is_a_warning_and_tried_again_after_a_minute(warnings):
    disk = Disk()
    disk.error = NO_SPACE
    disk.train(until=700.0)  # fails at 600 and 660
    assert disk.saver.num_failed == 4  # the checkpoint and the data, twice
    assert "the checkpoint could not be written" in warnings[0]
    assert "No space left on device" in warnings[0]
    disk.error = None
    disk.train(until=1400.0)
    assert disk.checkpoints == [720.0, 1320.0]
    assert len(warnings) == 4


def test_what_is_no_fault_of_the_files_is_no_warning():
    disk = Disk()
    disk.error = ArithmeticError("a bug")
    with pytest.raises(ArithmeticError):
        disk.saver.save()


def test_the_last_save_tells_of_its_failure(warnings):
    disk = Disk()
    assert disk.saver.save() is None
    disk.error = tf.errors.ResourceExhaustedError(None, None, "{{node x}} a/b; full [Op:SaveV2]")
    error = disk.saver.save()
    assert isinstance(error, SaveError)
    assert "the last checkpoint could not be written: a/b; full. What" in str(error)


def test_data_that_cannot_be_written_do_not_make_the_checkpoint_fail(warnings):
    disk = Disk()

    def full():
        raise NO_SPACE

    saver = Saver(lambda: disk._write(disk.checkpoints), full, interval=600.0)
    assert saver.save() is None
    assert disk.checkpoints == [0.0]
    assert saver.num_failed == len(warnings) == 1


def test_messages_are_one_line():
    assert describe(OSError("one\n  two")) == "one two"


# ---- A disk that is really full -----------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a disk of 128 kB."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("may not mount a small disk")
    yield disk
    # Lazily: a writer that nobody closed may still hold its file.
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk):
    with pytest.raises(OSError, match="No space"), open(disk / "fill", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def points(logdir):
    """{tag: [step]} of all event files, each read as far as it is whole, as TensorBoard does."""
    found: dict = {}
    for path in sorted(logdir.glob("events.*")):
        with contextlib.suppress(tf.errors.DataLossError):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    found.setdefault(value.tag, []).append(event.step)
    return found


def test_a_full_disk_costs_no_checkpoint_and_saving_goes_on_when_there_is_room(
    small_disk, tiny_agent
):
    agent = tiny_agent()
    checkpoints = Checkpoints(str(small_disk), agent.checkpoint_items)
    saver = Saver(lambda: checkpoints.save(10, 1), lambda: None, 600.0)
    assert saver.save() is None
    fill(small_disk)
    before = sorted(os.listdir(small_disk / "checkpoints"))
    assert "No space left" in str(saver.save())
    # Nothing torn is left to take up the room that there is.
    assert sorted(os.listdir(small_disk / "checkpoints")) == before
    other = Checkpoints(str(small_disk), tiny_agent().checkpoint_items)
    assert other.restore_latest()
    assert int(other.frames) == 10
    (small_disk / "fill").unlink()
    assert saver.save() is None
    assert saver.num_failed == 1


def test_points_for_which_there_is_no_room_are_lost_and_later_ones_are_not(small_disk, warnings):
    writer = SummaryWriter(str(small_disk))
    writer.scalars({"before": 1.0}, 1)
    writer.flush()
    fill(small_disk)
    for step in range(2, 6):
        writer.scalars({f"lost{i}": 1.0 for i in range(1000)}, step)
        writer.flush()
    assert writer.num_failed == 4
    assert len(warnings) == 1 and "No space left" in warnings[0]
    assert len(list(small_disk.glob("events.*"))) == 1  # attempts leave nothing behind
    (small_disk / "fill").unlink()
    writer.scalars({"after": 1.0}, 6)
    writer.close()
    assert points(small_disk)["after"] == [6]
    assert points(small_disk)["before"] == [1]


def remount(disk, mode):
    subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)


def test_a_disk_that_turns_read_only(small_disk, tiny_agent, warnings):
    checkpoints = Checkpoints(str(small_disk), tiny_agent().checkpoint_items)
    saver = Saver(lambda: checkpoints.save(10, 1), lambda: None, 600.0)
    remount(small_disk, "ro")
    assert "Read-only file system" in str(saver.save())
    with pytest.raises(UserError, match=r"--logdir=.* cannot be written to.*Read-only"):
        make_logdir(str(small_disk))
    writer = SummaryWriter(str(small_disk))
    writer.scalars({"lost": 1.0}, 1)
    writer.flush()
    assert writer.num_failed == 1
    assert len(warnings) == 2  # of the checkpoint, and of TensorBoard's data
    remount(small_disk, "rw")
    assert saver.save() is None
    writer.scalars({"after": 1.0}, 2)
    writer.close()
    assert points(small_disk) == {"after": [2]}


# ---- A directory that is gone --------------------------------------------------------------------


def test_points_go_on_in_a_directory_that_was_removed(tmp_path, warnings):
    log = tmp_path / "log"
    writer = SummaryWriter(str(log))
    writer.scalars({"lost": 1.0}, 1)
    writer.flush()
    shutil.rmtree(log)
    writer.scalars({"lost": 1.0}, 2)
    writer.flush()
    assert len(warnings) == 1 and "is gone" in warnings[0]
    writer.scalars({"after": 1.0}, 3)
    writer.close()
    assert points(log) == {"after": [3]}
    assert writer.num_failed == 1


def test_checkpoints_go_on_in_a_directory_that_was_removed(tmp_path, tiny_agent):
    checkpoints = Checkpoints(str(tmp_path / "log"), tiny_agent().checkpoint_items)
    checkpoints.save(10, 1)
    shutil.rmtree(tmp_path / "log")
    checkpoints.save(20, 2)
    other = Checkpoints(str(tmp_path / "log"), tiny_agent().checkpoint_items)
    assert other.restore_latest()
    assert int(other.frames) == 20


def test_a_file_in_the_place_of_the_directory_is_a_warning(tmp_path, warnings):
    (tmp_path / "log").touch()
    writer = SummaryWriter(str(tmp_path / "log"))
    writer.operative_config()
    writer.close()
    assert writer.num_failed >= 1
    assert len(warnings) == 1


# ---- Clocks --------------------------------------------------------------------------------------


def test_a_clock_that_jumps_back_does_not_make_older_checkpoints_the_newest(
    tmp_path, tiny_agent, monkeypatch
):
    now = 2e9
    monkeypatch.setattr("time.time", lambda: now)
    checkpoints = Checkpoints(str(tmp_path), tiny_agent().checkpoint_items, max_to_keep=2)
    for number in (1, 2, 3, 4):
        checkpoints.save(10 * number, number)
        now -= 86400.0
        # As if the process had been started again.
        checkpoints = Checkpoints(str(tmp_path), tiny_agent().checkpoint_items, max_to_keep=2)
        assert checkpoints.restore_latest()
        assert int(checkpoints.frames) == 10 * number
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.index"))
    assert left == ["ckpt-3.index", "ckpt-4.index"]


def test_no_interval_is_measured_by_a_clock_that_can_be_set():
    root = pathlib.Path(__file__).parents[2]
    wall_clocks = ("time.time(", "time.time_ns(", "datetime.now(", "from time import", "utcnow(")
    found = [
        f"{path.relative_to(root)}: {clock}"
        for folder in ("seed_rl", "agents", "envs", "grpc_service")
        for path in (root / folder).rglob("*.py")
        for clock in wall_clocks
        if clock in path.read_text()
    ]
    assert (root / "seed_rl" / "learner.py").exists()
    assert not found
