"""The books of scripts/soak.py: what they accept, and what they call a broken promise."""

import pathlib
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

from soak import BATCH_SIZE, MEMORY_MIN_SAMPLES, UNROLL_LENGTH, Life, Soak

NOON = time.mktime((2030, 6, 1, 12, 0, 0, 0, 0, -1))


@pytest.fixture
def soak(tmp_path):
    """Two actors of three environments."""
    return Soak(tmp_path, num_actors=2, envs_per_actor=3, seed=1)


def killed(soak, resumed):
    """A learner that stepped 100 to 1100, saved at noon and was killed ten seconds later."""
    log = "I0601 12:00:00.000000 140 saving.py:70] saved checkpoint /log/ckpt-7\n"
    (soak.directory / "learner_1.log").write_text("started\n" + log)
    # Twenty steps a second; a checkpoint at noon holds what was stepped two seconds earlier.
    soak.samples = [(NOON + t, 900 + 20 * t) for t in range(-30, 10)]
    life = Life(resumed=0, steps_before=100, steps_after=1100, actor_kills=2, was_killed=True)
    soak.lives = [life]
    soak._check_life(1, life, end=resumed)
    return soak.problems


# The last checkpoint was begun at 860 steps or later. So of 1000, at most 1100 - 860 = 240 are
# lost, and 3 for each actor kill, and 6 at the end.
@pytest.mark.parametrize("resumed", [1000, 800, 1000 - 240 - 2 * 3 - 6])
def test_what_a_killed_learner_may_lose(soak, resumed):
    assert not killed(soak, resumed)


@pytest.mark.parametrize("resumed", [1001, 1000 - 240 - 2 * 3 - 7])
def test_frames_out_of_nowhere_and_frames_that_are_lost_are_broken_promises(soak, resumed):
    (problem,) = killed(soak, resumed)
    assert f"1000 frames stepped, {resumed} counted" in problem
    assert "0 … 252" in problem


@pytest.mark.parametrize(("end", "is_good"), [(5000, True), (4991, True), (4990, False)])
def test_a_learner_that_is_stopped_loses_no_more_than_what_is_on_its_way(soak, end, is_good):
    life = Life(resumed=1000, steps_before=100, steps_after=4100, actor_kills=1)
    soak.lives = [life]
    soak._check_life(1, life, end)  # 3 for the kill, 6 at the end
    assert (not soak.problems) == is_good


def test_frames_that_are_not_trained_on(soak):
    soak.lives = [Life(actor_kills=5)]
    steps = BATCH_SIZE * UNROLL_LENGTH
    # 2 batches, 2 unrolls of each of 6 environments, 3 for each of 5 kills and of 2 actors.
    bound = UNROLL_LENGTH * (2 * BATCH_SIZE + 12 + 3 * 7)
    soak._check_trained(10 * steps + bound, 10)
    assert not soak.problems
    soak._check_trained(10 * steps + bound + 1, 10)
    soak._check_trained(10 * steps - 1, 10)  # trained on twice
    assert len(soak.problems) == 2


@pytest.mark.parametrize(("growth", "is_flat"), [(10, True), (12, False)])
def test_memory_that_grows(soak, growth, is_flat):
    megabyte, quarter = 2**20, MEMORY_MIN_SAMPLES // 4
    sizes = [50, 70, 100, 100 + growth]  # of a warm-up nothing is said
    soak._check_flat("it", [size * megabyte for size in sizes for _ in range(quarter)])
    assert (not soak.problems) == is_flat  # 3 % and 8 MiB


def test_a_short_life_says_nothing_of_memory(soak):
    soak._check_flat("it", [100, 200, 10**9, 10**10])
    assert not soak.problems
