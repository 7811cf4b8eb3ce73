"""Returns by task, for runs in which environments have different tasks, such as levels of a game.

Imports no TensorFlow: environment modules use it too, and actors import those.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence

import gin
import numpy as np

from seed_rl.structures import EpisodeInfo


def mean_capped_score(scores: Iterable[float], cap: float = 100.0) -> float:
    """Returns the mean over tasks of min(score, cap), in percent.

    The figure by which agents of many tasks are compared (Espeholt et al. 2018, section 5.3): one
    task in which an agent is far better than a human does not make up for others.

    Args:
      scores: one a task, in percent of a human's.
      cap: in percent.

    Raises:
      ValueError: there are no scores.
    """
    capped = [min(float(score), cap) for score in scores]
    if not capped:
        raise ValueError("A mean score needs the score of one task at least")
    return float(np.mean(capped))


@gin.configurable(denylist=["env_ids"])
class TaskStatistics:
    """Sorts finished episodes by the tasks of their environments.

    Without `task_of_env` there are no tasks, and nothing to tell.
    """

    def __init__(
        self,
        env_ids: Sequence[int],
        task_of_env: Callable[[int], str] | None = None,
        score: Callable[[str, float], float] | None = None,
        num_recent: int = 100,
    ):
        """Args:
        env_ids: the environments of the run, or of the evaluation.
        task_of_env: (env_id) -> the name of its task.
        score: (task, return) -> percent of a human's score; None: tasks have none.
        num_recent: the mean capped score takes the latest so many episodes of every task.

        Raises:
          whatever task_of_env and score raise for what they do not know.
        """
        self._task_of = {} if task_of_env is None else {int(i): task_of_env(i) for i in env_ids}
        self.tasks = tuple(dict.fromkeys(self._task_of.values()))
        self._score = score
        if score is not None:
            for task in self.tasks:
                score(task, 0.0)  # a task without a score is found now, not after some hours
        self._recent: dict[str, collections.deque] = {
            task: collections.deque(maxlen=num_recent) for task in self.tasks
        }
        self._new: dict[str, list[float]] = {}

    def record(self, episodes: Iterable[EpisodeInfo]) -> None:
        """Adds finished episodes: EpisodeInfos with leaves [k]. What counts is raw_returns."""
        if not self._task_of:
            return
        for info in episodes:
            for env_id, episode_return in zip(info.env_ids, info.raw_returns, strict=True):
                task = self._task_of[int(env_id)]
                self._recent[task].append(float(episode_return))
                self._new.setdefault(task, []).append(float(episode_return))

    def take_scalars(self) -> dict[str, float]:
        """Returns what is new since the last call, by the names that TensorBoard shows.

        'episode/<task>/return' is the mean of the raw returns of the episodes since then. The mean
        capped score is told when there is a new episode, see `mean_capped_score`.
        """
        new, self._new = self._new, {}
        scalars = {f"episode/{task}/return": float(np.mean(new[task])) for task in sorted(new)}
        score = self.mean_capped_score() if new else None
        if score is not None:
            scalars["episode/mean_capped_normalized_score"] = score
        return scalars

    def recent_returns(self) -> dict[str, list[float]]:
        """Returns the raw returns of the latest episodes of every task that has any."""
        return {task: list(recent) for task, recent in self._recent.items() if recent}

    def mean_capped_score(self) -> float | None:
        """Returns the mean over all tasks of the capped score of their mean returns, in percent.

        None if tasks have no scores, or while some task has no episode yet: tasks with short
        episodes would stand for all.
        """
        returns = self.recent_returns()
        if self._score is None or not self.tasks or len(returns) < len(self.tasks):
            return None
        return mean_capped_score(
            self._score(task, float(np.mean(values))) for task, values in returns.items()
        )
