"""The 30 levels of DMLab-30: names, test variants, and scores of humans and of random play.

Levels are named as in the table, 'rooms_watermaze', or by the engine's path,
'contributed/dmlab30/rooms_watermaze'. Any other name is one of the engine's other levels.
"""

from __future__ import annotations

import csv
import difflib
import importlib.resources
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gin
import numpy as np

from seed_rl.task_statistics import mean_capped_score
from seed_rl.user_error import UserError

DMLAB30_FOLDER = "contributed/dmlab30/"  # of the engine
ALL_LEVELS = "dmlab30"  # stands for all 30 where levels are listed


class Level(NamedTuple):
    """One level of DMLab-30."""

    name: str  # for training
    test_name: str  # for evaluation; for most levels the same
    random_score: float  # mean return of uniformly random actions
    human_score: float


def _read_levels() -> dict[str, Level]:
    table = importlib.resources.files("seed_rl.envs") / "data" / "dmlab30_scores.csv"
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        row["train_level"]: Level(
            row["train_level"], row["test_level"], float(row["random"]), float(row["human"])
        )
        for row in rows
    }


# Training name → Level, in the order in which DMLab-30 lists them.
DMLAB30: Mapping[str, Level] = types.MappingProxyType(_read_levels())

_BY_EITHER_NAME = {**{level.test_name: level for level in DMLAB30.values()}, **DMLAB30}


def level_name(level: str) -> str:
    """Returns the name of a level without the engine's folder of DMLab-30."""
    return level.removeprefix(DMLAB30_FOLDER)


def level_path(level: str) -> str:
    """Returns what the engine calls a level; one that is not of DMLab-30 is passed on as it is."""
    name = level_name(level)
    return DMLAB30_FOLDER + name if name in _BY_EITHER_NAME else level


def evaluation_level(level: str) -> str:
    """Returns the name of the level's variant for evaluation; a level without one as it is."""
    known = _BY_EITHER_NAME.get(level_name(level))
    return known.test_name if known else level


def needs_hold_out_levels(level: str) -> bool:
    """Whether the engine refuses the level unless it is told that hold-out levels are allowed."""
    name = level_name(level)
    return name in _BY_EITHER_NAME and name not in DMLAB30


def suggestions(level: str) -> str:
    """Returns ' Did you mean …?' with the levels of DMLab-30 of a similar name, or nothing."""
    if level_name(level) in _BY_EITHER_NAME:
        return ""
    name = level.rpartition("/")[2].lower()
    near = difflib.get_close_matches(name, _BY_EITHER_NAME, n=3, cutoff=0.6)
    return f" Did you mean {', '.join(near)}?" if near else ""


def expand_levels(levels: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the levels of a run, in order.

    Args:
        levels: one level or several; 'dmlab30' stands for all 30.

    Raises:
        UserError: there is none, or one is no text.
    """
    listed = [levels] if isinstance(levels, str) else list(levels)
    if not listed or not all(isinstance(level, str) and level for level in listed):
        raise UserError(
            f"levels must be the name of a level or a list of such, {ALL_LEVELS!r} for all 30 of "
            f"DMLab-30, got {levels!r}"
        )
    expanded: list[str] = []
    for level in listed:
        expanded += DMLAB30 if level == ALL_LEVELS else [level]
    return tuple(expanded)


@gin.configurable("dmlab_level_of_env")
def level_of_env(env_index: int, levels: str | Sequence[str] = ALL_LEVELS) -> str:
    """Returns the name of the level that environment env_index plays: levels take turns.

    Args:
        env_index: which of the run's environments it is, from 0.
        levels: see `expand_levels`.
    """
    expanded = expand_levels(levels)
    return level_name(expanded[env_index % len(expanded)])


@gin.configurable("dmlab_human_normalized_score")
def human_normalized_score(level: str, returns: Any) -> Any:
    """Returns the score in percent: 0 is random play, 100 a human's.

    Args:
        level: one of DMLab-30, by its name for training or for evaluation.
        returns: undiscounted, unclipped returns of episodes; a number, or an array of any shape.

    Returns:
        A float, or a float64 array of the shape of `returns`.

    Raises:
        UserError: the level is not one of the 30.
    """
    known = _BY_EITHER_NAME.get(level_name(level))
    if known is None:
        raise UserError(
            f"{level!r} is no level of DMLab-30: a human's score is not known.{suggestions(level)}"
            " For other levels set TaskStatistics.score = None."
        )
    returns = np.asarray(returns, np.float64)
    score = (returns - known.random_score) / (known.human_score - known.random_score) * 100.0
    return score if returns.ndim else float(score)


def mean_capped_human_normalized_score(level_returns: Mapping[str, Any], cap: float = 100.0) -> Any:
    """Returns the mean over levels of the score of the mean return, none above `cap`, in percent.

    That is DMLab-30's own measure (Espeholt et al. 2018, section 5.3).

    Args:
        level_returns: level → returns of its episodes, an array of at least one.
        cap: in percent.

    Raises:
        UserError: a level is not one of the 30.
        ValueError: there is no level, or one without a return.
    """
    for level, returns in level_returns.items():
        if not np.size(returns):
            raise ValueError(f"There is no return of the level {level!r}: its mean is not known")
    return mean_capped_score(
        (human_normalized_score(level, np.mean(r)) for level, r in level_returns.items()), cap
    )
