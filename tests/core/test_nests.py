"""Checks of nests against specs."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from seed_rl.grpc_service import TensorSpec
from seed_rl.nests import check_like, map_nest


class Pair(NamedTuple):
    left: Any
    right: Any


SPECS = Pair(TensorSpec((2,), np.float32), {"a": TensorSpec((), np.int64)})


def values(left_dtype=np.float32, left_shape=(3, 2), key="a"):
    return Pair(np.ones(left_shape, left_dtype), {key: np.arange(3)})


def test_map_nest_walks_several_nests_of_every_kind():
    summed = map_nest(lambda a, b: a + b, Pair(1, {"a": [2]}), Pair(10, {"a": [20]}))
    assert summed == Pair(11, {"a": [22]})


def test_fitting_values_come_back_as_leaves():
    left, right = check_like(values(), SPECS, (3,), "values")
    np.testing.assert_array_equal(left, np.ones((3, 2)))
    np.testing.assert_array_equal(right, [0, 1, 2])


def test_a_wrong_dtype_names_leaf_expected_and_got():
    with pytest.raises(ValueError) as error:
        check_like(values(left_dtype=np.float64), SPECS, (3,), "values")
    assert str(error.value) == (
        "values.left must be float32 of shape (3, 2), got float64 of shape (3, 2)"
    )


def test_a_wrong_shape_names_leaf_expected_and_got():
    with pytest.raises(ValueError) as error:
        check_like(Pair(np.ones((3, 2), np.float32), {"a": np.arange(4)}), SPECS, (3,), "steps")
    assert str(error.value) == (
        "steps.right['a'] must be int64 of shape (3,), got int64 of shape (4,)"
    )


def test_a_missing_or_misnamed_leaf_is_another_structure():
    with pytest.raises(ValueError, match="structure"):
        check_like(Pair(np.ones((3, 2), np.float32), {}), SPECS, (3,), "values")
    with pytest.raises(ValueError, match=r"structure.*'b'"):
        check_like(values(key="b"), SPECS, (3,), "values")


def test_a_tuple_may_stand_for_a_named_tuple_of_the_same_leaves():
    left, _ = check_like(tuple(values()), SPECS, (3,), "values")
    assert left.shape == (3, 2)
