"""Cutting steps into unrolls, beside a plain list that does the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_rl.grpc_service import TensorSpec
from seed_rl.unroll_store import UnrollStore

SPECS = {"reward": TensorSpec((), np.float32), "frame": TensorSpec((2,), np.uint8)}


def steps(numbers):
    """Steps that can be told apart: number n has reward n and frame [n, n + 1]."""
    numbers = np.asarray(numbers)
    return {
        "reward": numbers.astype(np.float32),
        "frame": np.stack([numbers, numbers + 1], -1).astype(np.uint8),
    }


def append_all(store, env_id, numbers):
    """Appends to one environment; returns the rewards of the unrolls that were completed."""
    unrolls = []
    for number in numbers:
        completed, unroll = store.append([env_id], steps([number]))
        assert completed.tolist() in ([], [env_id])
        unrolls += unroll["reward"].tolist()
    return unrolls


def test_an_unroll_has_one_step_more_than_its_length_and_shares_it_with_the_next():
    store = UnrollStore(1, 3, SPECS)
    assert append_all(store, 0, range(1, 11)) == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 10]]


def test_overlapping_unrolls_open_with_the_end_of_the_one_before_and_the_first_with_zeros():
    store = UnrollStore(1, 3, SPECS, num_overlapping_steps=2)
    assert append_all(store, 0, range(1, 11)) == [
        [0, 0, 1, 2, 3, 4],
        [2, 3, 4, 5, 6, 7],
        [5, 6, 7, 8, 9, 10],
    ]


def test_an_overlap_longer_than_the_unroll_reaches_further_back():
    # Each unroll of 1 + 3 + 1 steps adds one: the last four of one open the next.
    store = UnrollStore(1, 1, SPECS, num_overlapping_steps=3)
    assert append_all(store, 0, range(1, 6)) == [
        [0, 0, 0, 1, 2],
        [0, 0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize("when", [2, 4, 5])
def test_a_reset_drops_what_was_collected_and_begins_with_zeros_again(when):
    store = UnrollStore(1, 3, SPECS, num_overlapping_steps=2)
    append_all(store, 0, range(101, 101 + when))
    store.reset([0])
    assert append_all(store, 0, range(1, 5)) == [[0, 0, 1, 2, 3, 4]]


def test_every_leaf_is_kept_and_the_completed_environments_are_named_in_order():
    store = UnrollStore(3, 2, SPECS)
    for number in (10, 20):
        completed, _ = store.append([2, 0], steps([number, number + 1]))
        assert completed.size == 0
    completed, unrolls = store.append([2, 1, 0], steps([30, 50, 31]))
    assert completed.dtype == np.int64
    assert completed.tolist() == [2, 0]
    np.testing.assert_array_equal(unrolls["reward"], [[10, 20, 30], [11, 21, 31]])
    np.testing.assert_array_equal(
        unrolls["frame"],
        [[[10, 11], [20, 21], [30, 31]], [[11, 12], [21, 22], [31, 32]]],
    )
    assert unrolls["frame"].dtype == np.uint8


def test_without_a_completed_unroll_the_leaves_are_empty_yet_of_their_shape():
    store = UnrollStore(3, 2, SPECS)
    completed, unrolls = store.append([1], steps([1]))
    assert completed.shape == (0,)
    assert unrolls["reward"].shape == (0, 3)
    assert unrolls["frame"].shape == (0, 3, 2)


def test_environments_advance_each_at_its_own_pace():
    store = UnrollStore(2, 2, SPECS)
    append_all(store, 0, [1, 2])
    np.testing.assert_array_equal(store.positions([0, 1]), [2, 0])
    completed, unrolls = store.append([0, 1], steps([3, 9]))
    assert completed.tolist() == [0]
    np.testing.assert_array_equal(unrolls["reward"], [[1, 2, 3]])
    np.testing.assert_array_equal(store.positions([1, 0]), [1, 1])


def test_a_reset_leaves_other_environments_alone():
    store = UnrollStore(2, 2, SPECS)
    store.append([0, 1], steps([1, 11]))
    store.append([0, 1], steps([2, 12]))
    store.reset([0])
    completed, unrolls = store.append([0, 1], steps([3, 13]))
    assert completed.tolist() == [1]
    np.testing.assert_array_equal(unrolls["reward"], [[11, 12, 13]])


def test_unrolls_are_copies():
    store = UnrollStore(1, 1, SPECS, num_overlapping_steps=1)
    store.append([0], steps([1]))
    _, first = store.append([0], steps([2]))
    first["reward"][:] = 77
    _, second = store.append([0], steps([3]))
    np.testing.assert_array_equal(second["reward"], [[1, 2, 3]])
    np.testing.assert_array_equal(first["reward"], [[77, 77, 77]])


def test_unroll_specs():
    specs = UnrollStore(1, 4, SPECS, num_overlapping_steps=3).unroll_specs
    assert (specs["reward"].shape, specs["reward"].dtype) == ((8,), np.float32)
    assert (specs["frame"].shape, specs["frame"].dtype) == ((8, 2), np.uint8)


def test_repeated_ids_are_an_error_and_change_nothing():
    store = UnrollStore(2, 1, SPECS)
    with pytest.raises(ValueError, match=r"distinct.*\[1\]"):
        store.append([1, 0, 1], steps([1, 2, 3]))
    np.testing.assert_array_equal(store.positions([0, 1]), [0, 0])


@pytest.mark.parametrize("call", ["append", "reset", "positions"])
def test_ids_out_of_range_are_an_error(call):
    store = UnrollStore(2, 1, SPECS)
    arguments = ([2], steps([1])) if call == "append" else ([2],)
    with pytest.raises(ValueError, match=r"\[0, 2\), got \[2\]"):
        getattr(store, call)(*arguments)


def test_a_wrong_leaf_is_named_and_nothing_is_stored():
    store = UnrollStore(2, 1, SPECS)
    with pytest.raises(ValueError, match=r"values\['frame'\] must be uint8 of shape \(1, 2\)"):
        store.append([0], {**steps([1]), "frame": np.zeros((1, 3), np.uint8)})
    with pytest.raises(ValueError, match=r"values\['reward'\].*float32.*got float64"):
        store.append([0], {**steps([1]), "reward": np.zeros(1)})
    with pytest.raises(ValueError, match="structure"):
        store.append([0], {"reward": np.zeros(1, np.float32)})
    np.testing.assert_array_equal(store.positions([0]), [0])


@pytest.mark.parametrize("sizes", [(0, 0), (1, -1)])
def test_senseless_lengths_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        UnrollStore(1, sizes[0], SPECS, num_overlapping_steps=sizes[1])


class PlainStore:
    """The definition: the steps since the reset, after zeros, in windows that move on by T."""

    def __init__(self, num_envs, unroll_length, overlap):
        self.unroll_length, self.overlap = unroll_length, overlap
        self.steps = [[0.0] * overlap for _ in range(num_envs)]

    def append(self, env_ids, numbers):
        completed = []
        for env_id, number in zip(env_ids, numbers, strict=True):
            history = self.steps[env_id]
            history.append(float(number))
            taken = len(history) - self.overlap - 1
            if taken and taken % self.unroll_length == 0:
                completed.append((env_id, history[taken - self.unroll_length :]))
        return completed

    def reset(self, env_ids):
        for env_id in env_ids:
            self.steps[env_id] = [0.0] * self.overlap


NUM_ENVS = 4
env_subsets = st.lists(st.integers(0, NUM_ENVS - 1), unique=True, max_size=NUM_ENVS)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    unroll_length=st.integers(1, 5),
    overlap=st.integers(0, 6),
    operations=st.lists(st.tuples(st.sampled_from("aaaaar"), env_subsets), max_size=60),
)
def test_any_sequence_of_appends_and_resets_agrees_with_a_plain_list(
    unroll_length, overlap, operations
):
    specs = TensorSpec((), np.float32)
    store = UnrollStore(NUM_ENVS, unroll_length, specs, overlap)
    plain = PlainStore(NUM_ENVS, unroll_length, overlap)
    number = 0
    for operation, env_ids in operations:
        if operation == "r":
            store.reset(env_ids)
            plain.reset(env_ids)
            continue
        numbers = np.arange(number + 1, number + 1 + len(env_ids), dtype=np.float32)
        number += len(env_ids)
        completed, unrolls = store.append(env_ids, numbers)
        expected = plain.append(env_ids, numbers)
        assert completed.tolist() == [env_id for env_id, _ in expected]
        assert unrolls.tolist() == [window for _, window in expected]
