"""Saving and resuming: a run goes on as if it had never been interrupted."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf
from absl import logging as absl_logging

from seed_rl.checkpoints import CheckpointError, Checkpoints
from seed_rl.optimizers import adam, rmsprop
from seed_rl.training import Trainer

OPTIMIZERS = {
    "adam": lambda n: adam(n, learning_rate=0.1, decay="linear"),
    "rmsprop": lambda n: rmsprop(n, learning_rate=0.1, momentum=0.5, decay="linear"),
}


class Run:
    """An agent with trainer and checkpoints, as a learner has them."""

    def __init__(self, logdir, agent, max_to_keep=3, with_optimizer=True):
        self.agent = agent
        self.optimizer = agent.make_optimizer(20)
        self.trainer = Trainer(agent, self.optimizer)
        items = {"optimizer": self.optimizer} if with_optimizer else {}
        self.checkpoints = Checkpoints(
            str(logdir), {**items, **agent.checkpoint_items}, max_to_keep
        )

    def train(self, batches):
        for batch in batches:
            self.trainer.step(batch)
        return self

    def parameters(self):
        return [v.numpy() for v in self.agent.trainable_variables]


@pytest.fixture
def warnings(monkeypatch):
    """The warnings that were logged."""
    logged = []
    monkeypatch.setattr(absl_logging, "warning", lambda text, *args: logged.append(text % args))
    return logged


def scramble(agent):
    """Other parameters than those an agent of this seed begins with."""
    for variable in agent.trainable_variables:
        variable.assign(tf.ones_like(variable) * 9)
    return agent


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_exactly_as_without_the_interruption(
    tmp_path, tiny_agent, regression_batch, name
):
    batches = [regression_batch(i) for i in range(9)]
    whole = Run(tmp_path, tiny_agent(make_optimizer=OPTIMIZERS[name])).train(batches[:5])
    whole.checkpoints.save(frames=1234, training_steps=5)
    whole.train(batches[5:])

    resumed = Run(tmp_path, scramble(tiny_agent(make_optimizer=OPTIMIZERS[name])))
    assert resumed.checkpoints.restore_latest()
    assert int(resumed.checkpoints.frames) == 1234
    assert int(resumed.checkpoints.training_steps) == 5
    assert int(resumed.optimizer.iterations) == 5
    assert int(resumed.agent.num_updates) == 5
    resumed.train(batches[5:])
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        np.testing.assert_array_equal(one, other)

    # The comparison is sharp enough: without the optimizer's memory the parameters differ.
    forgetful = Run(
        tmp_path, scramble(tiny_agent(make_optimizer=OPTIMIZERS[name])), with_optimizer=False
    )
    assert forgetful.checkpoints.restore_latest()
    forgetful.train(batches[5:])
    assert not np.allclose(forgetful.parameters()[0], whole.parameters()[0], rtol=1e-3)


def test_counts_go_beyond_32_bits(tmp_path, tiny_agent):
    Run(tmp_path, tiny_agent()).checkpoints.save(frames=40_000_000_000, training_steps=7)
    resumed = Run(tmp_path, tiny_agent())
    assert resumed.checkpoints.restore_latest()
    assert int(resumed.checkpoints.frames) == 40_000_000_000


def test_a_new_directory_has_nothing_to_restore(tmp_path, tiny_agent):
    run = Run(tmp_path / "new", scramble(tiny_agent()))
    assert run.checkpoints.restore_latest() is False
    np.testing.assert_array_equal(run.agent.network.bias, [9, 9])
    assert int(run.checkpoints.frames) == 0


def test_checkpoints_bear_the_number_of_training_steps_and_the_newest_stay(tmp_path, tiny_agent):
    run = Run(tmp_path, tiny_agent(), max_to_keep=2)
    paths = [run.checkpoints.save(frames=10 * n, training_steps=n) for n in (3, 20, 100)]
    assert [pathlib.Path(p).name for p in paths] == ["ckpt-3", "ckpt-20", "ckpt-100"]
    left = sorted(p.name for p in (tmp_path / "checkpoints").glob("*.index"))
    assert left == ["ckpt-100.index", "ckpt-20.index"]


def test_saving_twice_at_one_step_keeps_the_later(tmp_path, tiny_agent):
    run = Run(tmp_path, tiny_agent())
    run.checkpoints.save(frames=10, training_steps=3)
    run.agent.network.bias.assign([7, 8])
    run.checkpoints.save(frames=11, training_steps=3)
    resumed = Run(tmp_path, tiny_agent())
    assert resumed.checkpoints.restore_latest()
    assert int(resumed.checkpoints.frames) == 11
    np.testing.assert_array_equal(resumed.agent.network.bias, [7, 8])


def test_a_checkpoint_is_never_written_over(tmp_path, tiny_agent):
    """A process may be killed at any moment of a save; the checkpoint before must still be good."""
    run = Run(tmp_path, tiny_agent())
    run.checkpoints.save(frames=10, training_steps=3)
    before = index_file(tmp_path, 3).read_bytes(), data_file(tmp_path, 3).read_bytes()
    run.agent.network.bias.assign([7, 8])
    run.checkpoints.save(frames=11, training_steps=3)
    after = index_file(tmp_path, 3).read_bytes(), data_file(tmp_path, 3).read_bytes()
    assert before == after


def test_a_higher_number_is_always_a_newer_checkpoint(tmp_path, tiny_agent):
    run = Run(tmp_path, tiny_agent(), max_to_keep=2)
    paths = [
        run.checkpoints.save(frames=n, training_steps=s) for n, s in enumerate([0, 0, 0, 9, 5])
    ]
    names = [pathlib.Path(path).name for path in paths]
    assert names == ["ckpt-0", "ckpt-1", "ckpt-2", "ckpt-9", "ckpt-10"]


def data_file(tmp_path, number):
    (path,) = (tmp_path / "checkpoints").glob(f"ckpt-{number}.data-*")
    return path


def index_file(tmp_path, number):
    return tmp_path / "checkpoints" / f"ckpt-{number}.index"


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path):
    """Changes one byte in the middle, as a bad disk does."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


DAMAGES = {
    "data cut": lambda tmp_path, n: halve(data_file(tmp_path, n)),
    "data empty": lambda tmp_path, n: data_file(tmp_path, n).write_bytes(b""),
    "data gone": lambda tmp_path, n: data_file(tmp_path, n).unlink(),
    "data garbled": lambda tmp_path, n: garble(data_file(tmp_path, n)),
    "index cut": lambda tmp_path, n: halve(index_file(tmp_path, n)),
    "index empty": lambda tmp_path, n: index_file(tmp_path, n).write_bytes(b""),
    "index gone": lambda tmp_path, n: index_file(tmp_path, n).unlink(),
}


def two_checkpoints(tmp_path, tiny_agent):
    """Numbers 1 and 2, of which the bias is 1 and 2 and the frames are 10 and 20."""
    run = Run(tmp_path, tiny_agent())
    for number in (1, 2):
        run.agent.network.bias.assign([number, number])
        run.checkpoints.save(frames=10 * number, training_steps=number)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, tiny_agent, warnings, damage):
    two_checkpoints(tmp_path, tiny_agent)
    DAMAGES[damage](tmp_path, 2)
    resumed = Run(tmp_path, scramble(tiny_agent()))
    assert resumed.checkpoints.restore_latest()
    assert int(resumed.checkpoints.frames) == 10
    np.testing.assert_array_equal(resumed.agent.network.bias, [1, 1])
    (warning,) = warnings
    assert "ckpt-2" in warning and "skipping" in warning


def test_a_run_that_went_on_from_an_older_checkpoint_resumes_from_what_it_saved_last(
    tmp_path, tiny_agent, warnings
):
    run = Run(tmp_path, tiny_agent())
    for number in (10, 20):
        run.checkpoints.save(frames=number, training_steps=number)
    halve(data_file(tmp_path, 20))
    resumed = Run(tmp_path, tiny_agent())
    assert resumed.checkpoints.restore_latest()
    resumed.checkpoints.save(frames=15, training_steps=15)
    again = Run(tmp_path, tiny_agent())
    assert again.checkpoints.restore_latest()
    assert int(again.checkpoints.frames) == 15


def killed_before_the_index(tmp_path):
    index_file(tmp_path, 2).unlink()


def killed_before_the_data(tmp_path):
    """TensorFlow writes into a directory first, and moves the files into place then."""
    temporary = tmp_path / "checkpoints" / "ckpt-2_temp"
    temporary.mkdir()
    data_file(tmp_path, 2).rename(temporary / "part-00000-of-00001.data-00000-of-00001")
    index_file(tmp_path, 2).rename(temporary / "part-00000-of-00001.index")


@pytest.mark.parametrize("kill", [killed_before_the_data, killed_before_the_index])
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before_and_no_litter(
    tmp_path, tiny_agent, warnings, kill
):
    two_checkpoints(tmp_path, tiny_agent)
    listing = tmp_path / "checkpoints" / "checkpoint"
    run = Run(tmp_path / "other", tiny_agent())
    run.checkpoints.save(frames=10, training_steps=1)
    listing.write_bytes((tmp_path / "other" / "checkpoints" / "checkpoint").read_bytes())
    kill(tmp_path)
    resumed = Run(tmp_path, tiny_agent())
    assert resumed.checkpoints.restore_latest()
    assert int(resumed.checkpoints.frames) == 10
    assert not warnings
    resumed.checkpoints.save(frames=30, training_steps=3)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {
        "checkpoint",
        *(f"ckpt-{n}.{end}" for n in (1, 3) for end in ("index", "data-00000-of-00001")),
    }


def test_a_kill_after_the_checkpoint_and_before_its_listing_loses_nothing(tmp_path, tiny_agent):
    run = Run(tmp_path, tiny_agent())
    run.checkpoints.save(frames=10, training_steps=1)
    listing = tmp_path / "checkpoints" / "checkpoint"
    before = listing.read_bytes()
    run.checkpoints.save(frames=20, training_steps=2)
    listing.write_bytes(before)
    resumed = Run(tmp_path, tiny_agent())
    assert resumed.checkpoints.restore_latest()
    assert int(resumed.checkpoints.frames) == 20


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_checkpoints_damaged_is_an_error_that_says_what_to_do(tmp_path, tiny_agent, damage):
    two_checkpoints(tmp_path, tiny_agent)
    DAMAGES[damage](tmp_path, 1)
    DAMAGES[damage](tmp_path, 2)
    with pytest.raises(
        CheckpointError, match=r"another --logdir, or remove .*checkpoints"
    ) as error:
        Run(tmp_path, tiny_agent()).checkpoints.restore_latest()
    assert "ckpt-1" in str(error.value) and "ckpt-2" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sizes", [(4, 2), (3, 5)])
def test_a_network_of_another_shape_is_a_clear_error(tmp_path, tiny_agent, sizes):
    two_checkpoints(tmp_path, tiny_agent)
    with pytest.raises(CheckpointError, match="another agent, network or environment"):
        Run(tmp_path, tiny_agent(*sizes)).checkpoints.restore_latest()


def test_a_network_of_more_variables_is_a_clear_error(tmp_path, tiny_agent):
    two_checkpoints(tmp_path, tiny_agent)
    agent = tiny_agent()
    agent.network.another = tf.Variable([1.0])
    with pytest.raises(CheckpointError, match="another agent, network or environment"):
        Run(tmp_path, agent).checkpoints.restore_latest()


@pytest.mark.parametrize("content", [None, b"", b"\xffgarbage"])
def test_checkpoints_are_found_without_the_file_that_lists_them(tmp_path, tiny_agent, content):
    run = Run(tmp_path, tiny_agent())
    for number in (9, 10):  # by number, not by name
        run.checkpoints.save(frames=10 * number, training_steps=number)
    listing = tmp_path / "checkpoints" / "checkpoint"
    listing.unlink()
    if content is not None:
        listing.write_bytes(content)
    resumed = Run(tmp_path, tiny_agent())
    assert resumed.checkpoints.restore_latest()
    assert int(resumed.checkpoints.frames) == 100


def test_a_moved_log_directory_resumes(tmp_path, tiny_agent):
    two_checkpoints(tmp_path / "old", tiny_agent)
    (tmp_path / "old").rename(tmp_path / "new")
    resumed = Run(tmp_path / "new", scramble(tiny_agent()))
    assert resumed.checkpoints.restore_latest()
    assert int(resumed.checkpoints.frames) == 20


def test_restoring_the_agent_alone_says_nothing_of_the_rest(tmp_path, tiny_agent, caplog):
    two_checkpoints(tmp_path, tiny_agent)
    agent = scramble(tiny_agent())
    checkpoints = Checkpoints(str(tmp_path), agent.checkpoint_items)
    with caplog.at_level("WARNING"):
        tf.get_logger().addHandler(caplog.handler)
        try:
            assert checkpoints.restore_latest()
            del checkpoints
        finally:
            tf.get_logger().removeHandler(caplog.handler)
    np.testing.assert_array_equal(agent.network.bias, [2, 2])
    assert not caplog.records
