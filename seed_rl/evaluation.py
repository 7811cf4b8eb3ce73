"""Plays episodes with a trained policy and says how well it does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gin
import numpy as np
import tensorflow as tf

from seed_rl.agent import Agent
from seed_rl.agent_specs import agent_action_specs
from seed_rl.environment import EnvironmentBatch, Rows
from seed_rl.nests import map_nest
from seed_rl.structures import EpisodeInfo
from seed_rl.task_statistics import TaskStatistics
from seed_rl.video import VideoWriter


class EvaluationResult(NamedTuple):
    """What `evaluate` found."""

    returns: np.ndarray  # float32 [num_episodes], raw
    normalized_scores: np.ndarray | None  # float [num_episodes], percent of a human's score
    task_returns: Mapping[str, Sequence[float]] = {}  # task → raw returns, where there are tasks
    mean_capped_score: float | None = None  # over all tasks, percent

    def report(self) -> str:
        """Says it in words, a line a figure."""
        returns = self.returns
        error = returns.std(ddof=1) / np.sqrt(returns.size) if returns.size > 1 else float("nan")
        lines = [
            f"episodes        {returns.size}",
            f"mean return     {returns.mean():.3f}",
            f"median return   {np.median(returns):.3f}",
            f"standard error  {error:.3f}",
        ]
        if self.normalized_scores is not None:
            lines += [
                f"mean human-normalised score    {self.normalized_scores.mean():.1f} %",
                f"median human-normalised score  {np.median(self.normalized_scores):.1f} %",
            ]
        for task, task_returns in self.task_returns.items():
            mean, count = np.mean(task_returns), len(task_returns)
            lines.append(f"mean return of {task}  {mean:.3f} ({count} episodes)")
        if self.mean_capped_score is not None:
            lines.append(f"mean capped human-normalised score  {self.mean_capped_score:.1f} %")
        return "\n".join(lines)


@gin.configurable(denylist=["agent", "environments"])
def evaluate(
    agent: Agent,
    environments: EnvironmentBatch,
    num_episodes: int,
    greedy: bool = True,
    normalized_score: Callable[..., float] | None = None,
    video_path: str | None = None,
) -> EvaluationResult:
    """Plays `num_episodes` episodes.

    Every environment plays its share of them from its first episode on, so that short episodes
    do not count more often than long ones. An episode that a failure tore is played again. Where
    environments have tasks, see TaskStatistics, the result has the returns of each.

    Args:
      agent: with its variables restored.
      environments: what to play.
      num_episodes: how many; each environment plays num_episodes / num_envs, rounded up, at most.
      greedy: take the best action; otherwise sample as in training.
      normalized_score: (raw_return=…) -> percent of a human's score, if one is known.
      video_path: a file to write the first environment's frames to.

    Returns:
      EvaluationResult.
    """
    if num_episodes < 1:
        raise ValueError(f"--num_episodes must be at least 1, got {num_episodes}")
    policy = tf.function(agent.greedy_policy if greedy else agent.policy, autograph=False)
    player = _Player(agent, environments, policy)  # resets the environments
    quota = np.full(environments.num_envs, num_episodes // environments.num_envs)
    quota[: num_episodes % environments.num_envs] += 1
    returns: list[float] = []
    players: list[int] = []
    played = np.zeros(environments.num_envs, np.int64)
    writer = VideoWriter(video_path) if video_path else None
    try:
        if writer:
            writer.add(environments.render())
        while len(returns) < num_episodes:
            for index, episode_return in player.step():
                if played[index] < quota[index]:
                    returns.append(episode_return)
                    players.append(index)
                played[index] += 1
            if writer and played[0] < max(1, quota[0]):
                writer.add(environments.render())
    finally:
        if writer:
            writer.close()
    all_returns = np.array(returns, np.float32)
    scores = None
    if normalized_score is not None:
        scores = np.array([normalized_score(raw_return=float(r)) for r in all_returns])
    tasks = _by_task(environments.env_indices, players, all_returns)
    return EvaluationResult(all_returns, scores, tasks.recent_returns(), tasks.mean_capped_score())


def _by_task(env_ids: Sequence[int], players: list[int], returns: np.ndarray) -> TaskStatistics:
    """Sorts returns [num_episodes] by task; `players` says which of env_ids played each episode."""
    tasks = TaskStatistics(env_ids, num_recent=len(returns))
    played_by = np.array([env_ids[i] for i in players], np.int32)
    unknown = np.zeros(len(returns), np.int64)  # the lengths
    tasks.record([EpisodeInfo(unknown, returns, returns, played_by)])
    return tasks


class _Player:
    """Steps environments with a policy in one process, as actor and learner do in two."""

    def __init__(self, agent: Agent, environments: EnvironmentBatch, policy: Callable):
        self._environments = environments
        self._policy = policy
        self._states = map_nest(np.array, agent.initial_state(environments.num_envs))
        self._actions: Any = None
        self._returns = np.zeros(environments.num_envs, np.float64)
        self._pending = [environments.reset()]

    def step(self) -> list[tuple[int, float]]:
        """Acts once everywhere; returns (index, raw return) of the episodes that ended."""
        ended: list[tuple[int, float]] = []
        for rows in self._pending:
            self._returns[rows.indices] += rows.raw_rewards
            done = rows.env_outputs.done
            ended += [(int(i), float(self._returns[i])) for i in rows.indices[done & ~rows.torn]]
            self._returns[rows.indices[done]] = 0.0
            self._act(rows)
        self._pending = self._environments.step(self._actions)
        return ended

    def _act(self, rows: Rows) -> None:
        if self._actions is None:
            self._actions = map_nest(
                lambda spec: np.zeros((self._environments.num_envs, *spec.shape), spec.dtype),
                agent_action_specs(self._environments.action_space),
            )
        at = rows.indices
        outputs, states = self._policy(
            at,
            map_nest(lambda x: x[at], self._actions),
            rows.env_outputs,
            map_nest(lambda x: x[at], self._states),
        )
        _write(self._actions, at, outputs.action)
        _write(self._states, at, states)


def _write(nest: Any, indices: np.ndarray, values: Any) -> None:
    def write(array: np.ndarray, value: Any) -> None:
        array[indices] = np.asarray(value)

    map_nest(write, nest, values)
