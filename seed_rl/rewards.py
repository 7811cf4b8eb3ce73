"""Rewards as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


class UnusableNumberError(ValueError):
    """An environment gave a number that no network can learn from."""


def as_number(value: Any, name: str = "reward") -> float:
    """Returns a reward as a number, also one that is in an array of one.

    Args:
        value: what an environment gave.
        name: what it is, for the message.

    Raises:
        UnusableNumberError: it is something else.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise UnusableNumberError(f"the {name} must be a number, got {value!r}")
    return float(array.item())
