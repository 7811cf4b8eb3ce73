"""Episode returns and lengths, kept by the learner for every environment."""

import collections
import threading
from typing import Any, NamedTuple

import numpy as np

from seed_rl.aggregator import Aggregator
from seed_rl.env_ids import check_env_ids
from seed_rl.grpc_service import TensorSpec
from seed_rl.structures import EnvOutput, EpisodeInfo


class _Totals(NamedTuple):
    num_frames: Any
    returns: Any
    raw_returns: Any


class EpisodeStatistics:
    """Sums up rewards and steps by environment and keeps the latest finished episodes.

    Safe for use by many threads.
    """

    def __init__(self, num_envs: int, action_repeat: int, num_recent: int = 100):
        """Args:
        num_envs: number of environments.
        action_repeat: environment frames an agent step.
        num_recent: episodes that `recent_mean_return` averages.
        """
        self._action_repeat = action_repeat
        self._running = Aggregator(
            num_envs,
            _Totals(
                num_frames=TensorSpec((), np.int64),
                returns=TensorSpec((), np.float32),
                raw_returns=TensorSpec((), np.float32),
            ),
        )
        self._finished: list[EpisodeInfo] = []
        self._recent: collections.deque = collections.deque(maxlen=num_recent)
        self._lock = threading.Lock()
        self.num_episodes = 0

    def restart(self, env_ids: Any) -> None:
        """Forgets the running episodes of `env_ids` [n], whose environments started anew."""
        with self._lock:
            self._running.reset(env_ids)

    def record(self, env_ids: Any, env_outputs: EnvOutput, raw_rewards: Any) -> None:
        """Adds one transition of each of `env_ids` [n]; the ids are distinct.

        An abandoned record is no step of the environment (see EnvOutput): it only ends its episode.
        """
        ids = check_env_ids(env_ids, self._running.num_envs)
        with self._lock:
            frames = np.where(env_outputs.abandoned, 0, self._action_repeat).astype(np.int64)
            self._running.add(
                ids,
                _Totals(
                    num_frames=frames,
                    returns=np.asarray(env_outputs.reward, np.float32),
                    raw_returns=np.asarray(raw_rewards, np.float32),
                ),
            )
            ended = ids[np.asarray(env_outputs.done, bool)]
            if ended.size:
                self._finish(ended)

    def take_finished(self) -> list[EpisodeInfo]:
        """Returns the episodes that ended since the last call: EpisodeInfos with leaves [k]."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def recent_mean_return(self) -> float | None:
        """Mean raw return of the latest finished episodes; None when there is none yet."""
        with self._lock:
            return float(np.mean(self._recent)) if self._recent else None

    def _finish(self, ended: np.ndarray) -> None:
        totals = self._running.read(ended)
        self._finished.append(
            EpisodeInfo(
                totals.num_frames, totals.returns, totals.raw_returns, ended.astype(np.int32)
            )
        )
        self._recent.extend(totals.raw_returns.tolist())
        self.num_episodes += ended.size
        self._running.reset(ended)
