"""Checks of settings."""

import math

import pytest

from seed_rl.setting_checks import check_layer_size, check_layer_sizes, check_number
from seed_rl.user_error import UserError


@pytest.mark.parametrize(
    ("bounds", "right", "wrong", "expected"),
    [
        ({"at_least": 1}, [1, 2.5, 10**30], [0.999, -1], "at least 1 and finite"),
        ({"above": 0}, [1e-30, 7], [0, -0.0, -3], "greater than 0 and finite"),
        ({"at_least": 0, "at_most": 1}, [0, 0.5, 1], [-1e-9, 1.1], r"in \[0, 1\]"),
        ({"at_least": 0, "below": 1}, [0, 0.999], [1, -1], r"in \[0, 1\)"),
        ({"above": 0, "at_most": 1}, [1e-9, 1], [0, 2], r"in \(0, 1\]"),
    ],
)
def test_numbers(bounds, right, wrong, expected):
    for value in right:
        check_number("Agent.eta", value, **bounds)
    for value in [*wrong, math.inf, -math.inf, math.nan]:
        with pytest.raises(UserError, match=rf"^Agent\.eta must be {expected}, got {value}$"):
            check_number("Agent.eta", value, **bounds)


@pytest.mark.parametrize("size", [0, -1, 2.0, "3", None, True, (3,)])
def test_what_is_no_size_of_a_layer(size):
    with pytest.raises(UserError, match="units must be a whole number of at least 1, got"):
        check_layer_size("units", size)
    with pytest.raises(UserError, match="sizes must be whole numbers of at least 1, one a layer"):
        check_layer_sizes("sizes", [4, size])


@pytest.mark.parametrize("sizes", [64, "64", None, {64: 1}, {64}])
def test_what_is_no_list_of_sizes(sizes):
    with pytest.raises(UserError, match=r"such as \(64, 64\), or \(64,\) for a single one; got"):
        check_layer_sizes("sizes", sizes)


def test_what_is_right():
    check_layer_size("units", 1)
    check_layer_size("units", 0, or_zero=True)
    for sizes in ((), [64], (1, 2, 3)):
        check_layer_sizes("sizes", sizes)
    with pytest.raises(UserError, match="of at least 0, got -1"):
        check_layer_size("units", -1, or_zero=True)
