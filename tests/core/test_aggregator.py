"""State kept for each environment."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from seed_rl.aggregator import Aggregator
from seed_rl.grpc_service import TensorSpec


class Row(NamedTuple):
    count: Any
    vector: Any


@pytest.fixture
def aggregator():
    return Aggregator(4, Row(TensorSpec((), np.int64), TensorSpec((2,), np.float32)))


def row(counts, vectors):
    return Row(np.array(counts, np.int64), np.array(vectors, np.float32))


def test_everything_is_zero_at_first(aggregator):
    read = aggregator.read([0, 1, 2, 3])
    assert isinstance(read, Row)
    assert read.count.dtype == np.int64 and read.vector.dtype == np.float32
    np.testing.assert_array_equal(read.count, np.zeros(4))
    np.testing.assert_array_equal(read.vector, np.zeros((4, 2)))


def test_replace_touches_the_named_rows_only_and_read_follows_the_order_asked(aggregator):
    aggregator.replace([2, 0], row([20, 5], [[1, 2], [3, 4]]))
    read = aggregator.read([0, 2, 1, 0])
    np.testing.assert_array_equal(read.count, [5, 20, 0, 5])
    np.testing.assert_array_equal(read.vector, [[3, 4], [1, 2], [0, 0], [3, 4]])


def test_add_counts_an_id_that_comes_twice_twice(aggregator):
    aggregator.replace([1], row([100], [[1, 1]]))
    aggregator.add([1, 3, 1], row([1, 2, 3], [[1, 0], [0, 1], [2, 0]]))
    read = aggregator.read([1, 3])
    np.testing.assert_array_equal(read.count, [104, 2])
    np.testing.assert_array_equal(read.vector, [[4, 1], [0, 1]])


def test_reset_zeroes_the_named_rows_only(aggregator):
    aggregator.replace([0, 1, 2, 3], row([1, 2, 3, 4], np.ones((4, 2))))
    aggregator.reset([1, 3])
    np.testing.assert_array_equal(aggregator.read([0, 1, 2, 3]).count, [1, 0, 3, 0])


def test_what_was_read_is_a_copy(aggregator):
    read = aggregator.read([0])
    read.count[:] = 9
    aggregator.replace([0], row([1], [[1, 1]]))
    assert read.count[0] == 9
    assert aggregator.read([0]).count[0] == 1


def test_replace_refuses_repeated_ids_and_changes_nothing(aggregator):
    with pytest.raises(ValueError, match=r"distinct.*\[2\]"):
        aggregator.replace([2, 2], row([1, 2], np.ones((2, 2))))
    assert aggregator.read([2]).count[0] == 0


def test_values_that_do_not_fit_are_named(aggregator):
    with pytest.raises(ValueError, match=r"values\.vector must be float32 of shape \(1, 2\)"):
        aggregator.replace([0], row([1], [[1, 2, 3]]))
    with pytest.raises(ValueError, match=r"\[0, 4\)"):
        aggregator.read([4])


def test_specs_may_be_arrays_or_tensorflow_specs():
    import tensorflow as tf

    aggregator = Aggregator(2, (np.zeros(3, np.uint8), tf.TensorSpec((), tf.float32)))
    first, second = aggregator.read([1])
    assert (first.shape, first.dtype) == ((1, 3), np.uint8)
    assert (second.shape, second.dtype) == ((1,), np.float32)
