"""The sum tree beside numpy's cumulative sum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_rl.sum_tree import SumTree

CAPACITIES = st.integers(1, 300)
# Whole numbers, so that sums are exact in any order.
MASSES = st.integers(0, 10)


def tree_of(masses):
    tree = SumTree(len(masses))
    tree.set(np.arange(len(masses)), np.asarray(masses, np.float64))
    return tree


@given(st.lists(MASSES, min_size=1, max_size=300).filter(any))
def test_every_prefix_sum_is_found_where_numpy_says(masses):
    tree = tree_of(masses)
    assert tree.total == sum(masses)
    x = np.arange(sum(masses)) + 0.5
    expected = np.searchsorted(np.cumsum(masses), x, side="right")
    np.testing.assert_array_equal(tree.find(x), expected)


@given(st.data(), CAPACITIES)
@settings(max_examples=50)
def test_it_holds_what_was_set_last(data, capacity):
    tree = SumTree(capacity)
    expected = np.zeros(capacity)
    for _ in range(data.draw(st.integers(1, 5))):
        updates = data.draw(st.lists(st.tuples(st.integers(0, capacity - 1), MASSES), max_size=20))
        for index, mass in updates:
            expected[index] = mass
        indices, masses = zip(*updates, strict=True) if updates else ((), ())
        tree.set(np.array(indices, np.int64), np.array(masses, np.float64))
        np.testing.assert_array_equal(tree.get(np.arange(capacity)), expected)
        assert tree.total == expected.sum()
    if expected.any():
        x = np.arange(expected.sum())
        np.testing.assert_array_equal(
            tree.find(x), np.searchsorted(np.cumsum(expected), x, side="right")
        )


def test_the_borders_belong_to_the_index_that_begins_there():
    # Running sums by hand: 1, 1, 3, 6, 6.
    tree = tree_of([1, 0, 2, 3, 0])
    found = tree.find(np.array([0, 0.99, 1, 2.99, 3, 5.99]))
    np.testing.assert_array_equal(found, [0, 0, 2, 2, 3, 3])


def test_a_point_beyond_the_total_finds_the_last_index_with_mass():
    np.testing.assert_array_equal(tree_of([1, 0, 2, 3, 0]).find(np.array([6.0, 1e300])), [3, 3])


@pytest.mark.parametrize("capacity", [1, 2, 7, 32, 33, 1000, 59_049, 100_001])
def test_every_index_of_any_capacity_is_reached(capacity):
    tree = tree_of(np.ones(capacity))
    x = np.unique(np.linspace(0, capacity - 1, 1000).astype(np.int64))
    np.testing.assert_array_equal(tree.find(x + 0.5), x)


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=200).filter(any), st.randoms())
@settings(max_examples=200)
def test_an_index_without_mass_is_never_found_whatever_the_rounding(masses, random):
    tree = tree_of(masses)
    x = [random.random() * tree.total for _ in range(50)]
    x += [tree.total, np.nextafter(tree.total, 0), 0.0, *np.cumsum(masses)]
    found = tree.find(np.array(x))
    assert np.all(np.asarray(masses)[found] > 0)


def test_sums_do_not_drift():
    rng = np.random.default_rng(0)
    tree = SumTree(1000)
    for _ in range(2000):
        # Large masses come and go: a sum kept by differences would keep their rounding errors.
        tree.set(rng.integers(0, 1000, 50), 10.0 ** rng.uniform(-10, 15, 50))
    tree.set(np.arange(1000), np.full(1000, 1e-10))
    assert tree.total == pytest.approx(1e-7, rel=1e-12)
    tree.set(np.arange(1000), np.zeros(1000))
    assert tree.total == 0


def test_the_tree_takes_little_more_than_its_masses():
    assert SumTree(1_000_000).nbytes < 10 * 1_000_000


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_out_of_range_is_refused(index):
    with pytest.raises(IndexError, match=r"\[0, 3\)"):
        SumTree(3).set(np.array([index]), np.ones(1))


@pytest.mark.parametrize("mass", [-1.0, np.nan, np.inf])
def test_a_mass_that_is_none_is_refused_and_changes_nothing(mass):
    tree = tree_of([1, 2, 3])
    with pytest.raises(ValueError, match="finite and at least 0"):
        tree.set(np.array([0, 1]), np.array([5, mass]))
    np.testing.assert_array_equal(tree.get(np.arange(3)), [1, 2, 3])


def test_without_mass_there_is_nothing_to_find():
    with pytest.raises(ValueError, match="nothing to find"):
        SumTree(3).find(np.zeros(1))
    with pytest.raises(ValueError, match="at least 1"):
        SumTree(0)
