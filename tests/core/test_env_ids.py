"""Checks on environment ids."""

import numpy as np
import pytest

from seed_rl.env_ids import check_env_ids


def test_good_ids_come_back_as_int64():
    ids = check_env_ids(np.array([3, 0, 3], np.int32), 4)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, [3, 0, 3])


def test_no_ids_at_all_are_fine():
    assert check_env_ids([], 4).shape == (0,)
    assert check_env_ids(np.zeros(0, np.int32), 4, distinct=True).dtype == np.int64


@pytest.mark.parametrize("bad", [[4], [-1], [0, 7]])
def test_ids_out_of_range_are_named(bad):
    with pytest.raises(ValueError, match=rf"\[0, 4\), got \[{bad[-1]}\]"):
        check_env_ids(bad, 4)


@pytest.mark.parametrize("bad", [[[0, 1]], 2, [0.0, 1.0], [True, False]])
def test_ids_of_another_rank_or_type_are_refused(bad):
    with pytest.raises(ValueError, match="one-dimensional integers"):
        check_env_ids(bad, 4)


def test_repeated_ids_are_named_where_they_must_be_distinct():
    with pytest.raises(ValueError, match=r"several times: \[1, 3\]"):
        check_env_ids([3, 1, 0, 1, 3], 4, distinct=True)
    np.testing.assert_array_equal(check_env_ids([3, 1, 0], 4, distinct=True), [3, 1, 0])
