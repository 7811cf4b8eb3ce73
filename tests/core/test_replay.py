"""Prioritised replay beside probabilities, weights and counts computed by hand or by numpy."""

import collections
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_rl.grpc_service import TensorSpec
from seed_rl.replay import PrioritizedReplay
from seed_rl.user_error import UserError

NUMBER = TensorSpec((), np.int64)
FRAMES = {"frames": TensorSpec((20, 30, 10), np.uint8), "reward": TensorSpec((20,), np.float32)}


def replay_of(priorities, size=None, exponent=0.6, **kwargs):
    """A replay of the numbers 0, 1, … with these priorities."""
    replay = PrioritizedReplay(size or len(priorities), NUMBER, exponent, seed=0, **kwargs)
    replay.insert(np.arange(len(priorities)), priorities)
    return replay


def stored(replay):
    """The numbers a replay holds."""
    return set(replay.sample(200 * max(1, len(replay)), 0.0)[2].tolist())


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return np.sum((counts - expected) ** 2 / expected)


# Of χ² with 9 degrees of freedom, the value exceeded with probability 0.001 (any table).
CHI_SQUARE_9 = 27.88


@pytest.mark.parametrize("exponent", [0.0, 0.5, 0.9, 1.0, 2.0])
def test_frequencies_of_samples_are_in_proportion_to_powers_of_priorities(exponent):
    priorities = np.arange(1, 11) / 7
    _, _, numbers = replay_of(priorities).sample(50_000, exponent)
    probabilities = priorities**exponent / np.sum(priorities**exponent)
    assert chi_square(np.bincount(numbers, minlength=10), probabilities) < CHI_SQUARE_9


def test_frequencies_follow_updates_overwriting_and_changes_of_the_exponent():
    replay = replay_of(np.ones(10))
    replay.sample(10, 0.5)
    replay.insert(np.arange(10, 13), [9.0, 4.0, 1.0])  # in the slots of 0, 1, 2
    replay.update_priorities([3, 4, 3], [100.0, 25.0, 16.0])
    # By slot: 9, 4, 1, 16, 25, 1, 1, 1, 1, 1.
    roots = np.array([3, 2, 1, 4, 5, 1, 1, 1, 1, 1])
    for exponent, masses in ((0.5, roots), (1.0, roots**2), (0.5, roots)):
        indices, _, numbers = replay.sample(50_000, exponent)
        assert chi_square(np.bincount(indices, minlength=10), masses / masses.sum()) < CHI_SQUARE_9
        np.testing.assert_array_equal(numbers, np.where(indices < 3, indices + 10, indices))


def test_weights_are_those_of_the_formula():
    replay = replay_of([1.0, 2.0, 5.0], exponent=0.5)
    indices, weights, _ = replay.sample(100, 1.0)
    # P = 1/8, 1/4, 5/8 and N = 3: (1 / (N P))^½ over the first one's is 1, √½, √(1/5).
    np.testing.assert_allclose(weights, np.sqrt([1, 1 / 2, 1 / 5])[indices], rtol=1e-6)
    assert set(indices.tolist()) == {0, 1, 2}
    assert weights.dtype == np.float32
    assert indices.dtype == np.int64


def test_the_largest_weight_of_every_sample_is_one():
    replay = replay_of([1.0, 2.0, 5.0])
    for _ in range(20):
        assert replay.sample(2, 0.7)[1].max() == 1


@pytest.mark.parametrize(("exponent", "priority_exp"), [(0.0, 1.0), (0.6, 0.0)])
def test_weights_are_one_without_either_exponent(exponent, priority_exp):
    _, weights, _ = replay_of([1.0, 2.0, 5.0], exponent=exponent).sample(50, priority_exp)
    np.testing.assert_array_equal(weights, np.ones(50))


def test_the_oldest_items_are_overwritten():
    replay = PrioritizedReplay(3, NUMBER, 0.6, seed=0)
    assert replay.insert(np.array([0, 1]), [1, 1]).tolist() == [0, 1]
    assert (len(replay), replay.num_inserted) == (2, 2)
    assert replay.insert(np.array([2, 3]), [1, 1]).tolist() == [2, 0]
    assert (len(replay), replay.num_inserted) == (3, 4)
    assert stored(replay) == {1, 2, 3}


def test_more_items_at_once_than_there_is_room_for_leave_the_last_ones():
    replay = PrioritizedReplay(3, NUMBER, 0.6, seed=0)
    indices = replay.insert(np.arange(8), np.arange(1, 9))
    assert indices.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert stored(replay) == {5, 6, 7}
    _, _, numbers = replay.sample(30_000, 1.0)
    # Priorities 6, 7, 8 of 21; three standard deviations of each frequency are below 0.009.
    counts = np.bincount(numbers, minlength=8)[5:]
    np.testing.assert_allclose(counts / 30_000, np.array([6, 7, 8]) / 21, atol=0.009)


def test_an_item_of_priority_zero_is_drawn_only_without_priorities():
    replay = replay_of([0.0, 1.0, 0.0])
    assert set(replay.sample(200, 0.9)[2].tolist()) == {1}
    assert stored(replay) == {0, 1, 2}


def test_with_all_priorities_zero_items_are_equally_likely():
    replay = replay_of(np.zeros(10))
    _, weights, numbers = replay.sample(20_000, 0.9)
    assert chi_square(np.bincount(numbers, minlength=10), np.full(10, 0.1)) < CHI_SQUARE_9
    np.testing.assert_array_equal(weights, np.ones(20_000))


def test_an_item_that_took_over_a_slot_keeps_its_priority():
    replay = replay_of([1.0, 1.0, 1.0])
    sample = replay.sample_with_insertions(100, 0.0)
    np.testing.assert_array_equal(sample.insertions, sample.values)
    replay.insert(np.array([3]), [1.0])
    updated = replay.update_priorities(sample.indices, np.zeros(100), sample.insertions)
    assert updated == np.sum(sample.indices != 0)
    # All that were sampled have priority 0 now, so that only the newcomer is drawn.
    assert set(replay.sample(100, 1.0)[2].tolist()) == {3}


def test_without_insertion_numbers_the_slot_is_updated():
    replay = replay_of([0.0, 0.0, 0.0])
    assert replay.update_priorities([1], [2.0]) == 1
    assert set(replay.sample(100, 1.0)[2].tolist()) == {1}


@pytest.mark.parametrize("priority", [-1.0, np.nan, np.inf])
def test_a_priority_that_is_none_is_refused_and_changes_nothing(priority):
    replay = replay_of([1.0, 1.0], size=3)
    with pytest.raises(ValueError, match="row 1"):
        replay.insert(np.array([5, 6]), [1.0, priority])
    with pytest.raises(ValueError, match="row 1"):
        replay.update_priorities([0, 1], [1.0, priority])
    assert stored(replay) == {0, 1}
    assert replay.num_inserted == 2


def test_wrong_use_is_refused():
    replay = PrioritizedReplay(3, NUMBER, 0.6)
    with pytest.raises(ValueError, match="empty"):
        replay.sample(1, 0.9)
    replay.insert(np.array([1]), [1.0])
    with pytest.raises(ValueError, match="num_samples"):
        replay.sample(0, 0.9)
    for exponent in (-0.1, np.nan, np.inf):
        with pytest.raises(ValueError, match="priority_exp"):
            replay.sample(1, exponent)
        with pytest.raises(ValueError, match="importance_sampling_exponent"):
            PrioritizedReplay(3, NUMBER, exponent)
    for indices in ([1], [-1], [0.0], [[0]]):  # slot 1 was never filled
        with pytest.raises(ValueError, match="indices"):
            replay.update_priorities(indices, [1.0])
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        replay.update_priorities([0, 0], [1.0])
    with pytest.raises(ValueError, match=r"int64 of shape \(1,\)"):
        replay.insert(np.array([1.5]), [1.0])


def test_priorities_whose_powers_cannot_be_summed_are_refused():
    replay = replay_of([1.0, 1e200])
    with pytest.raises(ValueError, match="scale the priorities down"):
        replay.sample(1, 2.0)
    assert set(replay.sample(50, 1.0)[2].tolist()) == {1}  # and it still works


def frames_of(rng, num_items, noise):
    """Frames of one brightness each, or noise that nothing can compress."""
    shape = (num_items, *FRAMES["frames"].shape)
    frames = rng.integers(0, 256, shape if noise else (num_items, 20, 1, 1)).astype(np.uint8)
    return {
        "frames": np.ascontiguousarray(np.broadcast_to(frames, shape)),
        "reward": rng.normal(size=(num_items, 20)).astype(np.float32),
    }


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=12), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_budget_is_never_exceeded_and_the_newest_items_are_kept(inserts, seed):
    rng = np.random.default_rng(seed)
    max_bytes = 50_000  # eight items of noise, some 200 bytes each of the others
    replay = PrioritizedReplay(None, FRAMES, 0.6, max_bytes=max_bytes, seed=seed)
    inserted = collections.deque()
    for noise, num_items in inserts:
        values = frames_of(rng, num_items, noise)
        replay.insert(values, np.ones(num_items))
        inserted.extend(zip(values["frames"], values["reward"], strict=True))
        assert replay.bytes_used <= max_bytes
        assert replay.num_inserted == len(inserted)
        assert bool(len(replay)) == bool(inserted)
    if inserted:
        sample = replay.sample_with_insertions(50, 0.9)
        assert sample.insertions.min() >= len(inserted) - len(replay)
        for k, insertion in enumerate(sample.insertions):
            np.testing.assert_array_equal(sample.values["frames"][k], inserted[insertion][0])
            np.testing.assert_array_equal(sample.values["reward"][k], inserted[insertion][1])


def test_a_budget_is_made_use_of():
    replay = PrioritizedReplay(None, FRAMES, 0.6, max_bytes=100_000)
    rng = np.random.default_rng(0)
    for _ in range(40):
        replay.insert(frames_of(rng, 1, noise=True), [1.0])
    # An item of noise takes 6,000 + 80 bytes and some 50 for the objects.
    assert 100_000 - 6_200 < replay.bytes_used <= 100_000
    assert replay.bytes_per_item == pytest.approx(6_080, abs=80)


def test_count_and_budget_limit_together():
    replay = PrioritizedReplay(5, FRAMES, 0.6, max_bytes=20_000)
    rng = np.random.default_rng(0)
    replay.insert(frames_of(rng, 8, noise=False), np.ones(8))
    assert len(replay) == 5
    replay.insert(frames_of(rng, 8, noise=True), np.ones(8))
    assert len(replay) == 3  # three times 6.1 kB


def test_a_budget_is_used_to_the_last_byte():
    items = frames_of(np.random.default_rng(0), 3, noise=True)
    unlimited = PrioritizedReplay(5, FRAMES, 0.6)
    unlimited.insert(items, np.ones(3))
    for budget, held in ((unlimited.bytes_used, 3), (unlimited.bytes_used - 1, 2)):
        replay = PrioritizedReplay(5, FRAMES, 0.6, max_bytes=budget)
        replay.insert(items, np.ones(3))
        assert len(replay) == held


def test_updates_of_items_that_a_budget_dropped_are_left_out():
    replay = PrioritizedReplay(None, FRAMES, 0.6, max_bytes=25_000)
    rng = np.random.default_rng(0)
    dropped = replay.insert(frames_of(rng, 3, noise=True), np.ones(3))
    newest = replay.insert(frames_of(rng, 3, noise=True), np.ones(3))
    assert replay.update_priorities(dropped, np.ones(3)) == 0
    assert replay.update_priorities(newest, np.ones(3)) == 3


def test_bytes_used_are_those_of_the_objects():
    replay = PrioritizedReplay(100, FRAMES, 0.6)
    before = replay.bytes_used
    replay.insert(frames_of(np.random.default_rng(0), 50, noise=False), np.ones(50))
    objects = sum(sys.getsizeof(item) for item in replay._items if item is not None)
    assert 0 <= replay.bytes_used - before - objects <= 50 * 24
    replay.insert(frames_of(np.random.default_rng(0), 500, noise=True), np.ones(500))
    replay.insert(frames_of(np.random.default_rng(0), 50, noise=False), np.ones(50))
    replay.insert(frames_of(np.random.default_rng(0), 50, noise=False), np.ones(50))
    assert 0 <= replay.bytes_used - before - 2 * objects <= 100 * 24


def test_limits_that_are_none_are_refused():
    with pytest.raises(UserError, match="neither is given"):
        PrioritizedReplay(None, NUMBER, 0.6)
    with pytest.raises(UserError, match="size must be at least 1"):
        PrioritizedReplay(0, NUMBER, 0.6)
    with pytest.raises(UserError, match=r"one item can take 6,1\d\d bytes"):
        PrioritizedReplay(None, FRAMES, 0.6, max_bytes=6000)


def test_the_same_seed_draws_the_same_items():
    draws = [replay_of(np.ones(50)).sample(20, 0.9)[0].tolist() for _ in range(2)]
    assert draws[0] == draws[1]


def test_threads_do_not_disturb_each_other():
    replay = PrioritizedReplay(None, FRAMES, 0.6, max_bytes=60_000, seed=0)
    replay.insert(frames_of(np.random.default_rng(0), 1, noise=True), [1.0])
    errors = []

    def insert(seed):
        rng = np.random.default_rng(seed)
        for noise in rng.random(60) < 0.5:
            values = frames_of(rng, 3, noise)
            # The sum of an item's frames goes with it, so that a mixed-up item shows.
            values["reward"][:, 0] = values["frames"].sum(axis=(1, 2, 3))
            replay.insert(values, rng.random(3))

    def sample(seed):
        rng = np.random.default_rng(seed)
        for exponent in rng.choice([0.0, 0.5, 0.9], 60):
            sample = replay.sample_with_insertions(4, exponent)
            sums = sample.values["frames"].sum(axis=(1, 2, 3))
            later = sample.insertions > 0
            np.testing.assert_array_equal(sample.values["reward"][later, 0], sums[later])
            replay.update_priorities(sample.indices, rng.random(4), sample.insertions)
            assert replay.bytes_used <= 60_000

    def run(target, seed):
        try:
            target(seed)
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(target, seed))
        for seed, target in enumerate([insert, insert, sample, sample, sample])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert replay.num_inserted == 1 + 2 * 60 * 3


def test_nothing_waits_while_a_sample_is_unpacked(monkeypatch):
    replay = replay_of(np.ones(5))
    decode = replay._codec.decode

    def insert_meanwhile(items):
        inserter = threading.Thread(target=replay.insert, args=(np.array([7]), [1.0]))
        inserter.start()
        inserter.join(30)
        assert not inserter.is_alive()
        return decode(items)

    monkeypatch.setattr(replay._codec, "decode", insert_meanwhile)
    replay.sample(2, 0.9)
    assert replay.num_inserted == 6
