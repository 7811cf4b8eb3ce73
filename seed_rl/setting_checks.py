"""Checks of settings, so that a wrong one is told of in the same words wherever it stands."""

import math
from collections.abc import Sequence
from typing import Any

from seed_rl.user_error import UserError


def check_number(
    name: str,
    value: float,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Raises UserError unless a number is finite and within its bounds.

    Args:
      name: of the setting, as a user binds it.
      value: the number; NaN is within no bounds.
      at_least: the smallest that is right.
      above: in its place, what it must be greater than.
      at_most: the largest that is right.
      below: in its place, what it must be less than.
    """
    within = (
        -math.inf < value < math.inf
        and (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    )
    if not within:
        expected = _bounds(at_least, above, at_most, below)
        raise UserError(f"{name} must be {expected}, got {value}")


def check_layer_size(name: str, size: Any, or_zero: bool = False) -> None:
    """Raises UserError unless `size` is one that a layer can have.

    Args:
      name: of the setting, as a user binds it.
      size: a whole number of at least 1.
      or_zero: whether 0 is right too: it stands for no such layer.
    """
    least = 0 if or_zero else 1
    if not _is_size(size, least):
        raise UserError(f"{name} must be a whole number of at least {least}, got {size!r}")


def check_layer_sizes(name: str, sizes: Any) -> None:
    """Raises UserError unless `sizes` are those of successive layers; there may be none.

    Args:
      name: of the setting, as a user binds it.
      sizes: sequence of whole numbers of at least 1.
    """
    is_sequence = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not is_sequence or not all(_is_size(size, 1) for size in sizes):
        raise UserError(
            f"{name} must be whole numbers of at least 1, one a layer, such as (64, 64), or (64,) "
            f"for a single one; got {sizes!r}"
        )


def _bounds(
    at_least: float | None, above: float | None, at_most: float | None, below: float | None
) -> str:
    if at_most is None and below is None:
        least = f"at least {at_least}" if above is None else f"greater than {above}"
        return f"{least} and finite"
    opening = f"[{at_least}" if above is None else f"({above}"
    closing = f"{at_most}]" if below is None else f"{below})"
    return f"in {opening}, {closing}"


def _is_size(size: Any, least: int) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= least
