"""Episode returns and lengths."""

import numpy as np
import pytest

from seed_rl.episode_statistics import EpisodeStatistics
from seed_rl.structures import EnvOutput


def record(statistics, env_ids, rewards, done, abandoned=None, raw_scale=10.0):
    rewards = np.asarray(rewards, np.float32)
    done = np.asarray(done, bool)
    statistics.record(
        np.asarray(env_ids, np.int32),
        EnvOutput(
            reward=rewards,
            done=done,
            observation=np.zeros((len(done), 1), np.float32),
            abandoned=np.zeros(len(done), bool) if abandoned is None else np.asarray(abandoned),
            episode_step=np.zeros(len(done), np.int32),
        ),
        rewards * np.float32(raw_scale),
    )


def finished(statistics):
    """Finished episodes as (env_id, frames, return, raw return)."""
    return [
        (int(env_id), int(frames), float(returns), float(raw))
        for info in statistics.take_finished()
        for frames, returns, raw, env_id in zip(*info, strict=True)
    ]


def test_an_episode_counts_its_last_reward_and_the_next_one_begins_at_nothing():
    statistics = EpisodeStatistics(1, action_repeat=1)
    for reward, done in ((1, False), (2, False), (4, True), (8, False), (16, True)):
        record(statistics, [0], [reward], [done])
    assert finished(statistics) == [(0, 3, 7.0, 70.0), (0, 2, 24.0, 240.0)]


def test_lengths_are_environment_frames():
    statistics = EpisodeStatistics(1, action_repeat=4)
    for done in (False, False, True):
        record(statistics, [0], [1], [done])
    assert finished(statistics) == [(0, 12, 3.0, 30.0)]


def test_an_abandoned_record_ends_the_episode_and_is_no_step_of_it():
    # Cut by a time limit: the last step as usual, then the record that opens the next episode.
    statistics = EpisodeStatistics(1, action_repeat=4)
    record(statistics, [0], [1], [False])
    record(statistics, [0], [2], [False])
    record(statistics, [0], [0], [True], [True])
    assert finished(statistics) == [(0, 8, 3.0, 30.0)]
    record(statistics, [0], [5], [True])
    assert finished(statistics) == [(0, 4, 5.0, 50.0)]


def test_environments_are_kept_apart():
    statistics = EpisodeStatistics(3, action_repeat=1)
    record(statistics, [0, 1, 2], [1, 10, 100], [False, False, False])
    record(statistics, [2, 0], [200, 2], [True, False])
    record(statistics, [1, 0], [20, 4], [True, True])
    assert finished(statistics) == [
        (2, 2, 300.0, 3000.0),
        (1, 2, 30.0, 300.0),
        (0, 3, 7.0, 70.0),
    ]
    assert statistics.num_episodes == 3


def test_a_restart_forgets_the_running_episode_of_that_environment_only():
    statistics = EpisodeStatistics(2, action_repeat=1)
    record(statistics, [0, 1], [1, 10], [False, False])
    statistics.restart([0])
    record(statistics, [0, 1], [2, 20], [True, True])
    assert finished(statistics) == [(0, 1, 2.0, 20.0), (1, 2, 30.0, 300.0)]
    assert statistics.num_episodes == 2


def test_finished_episodes_are_told_once_and_have_their_dtypes():
    statistics = EpisodeStatistics(2, action_repeat=1)
    assert statistics.take_finished() == []
    record(statistics, [0, 1], [1, 2], [True, True])
    (info,) = statistics.take_finished()
    assert info.num_frames.dtype == np.int64
    assert info.returns.dtype == info.raw_returns.dtype == np.float32
    assert info.env_ids.dtype == np.int32
    assert statistics.take_finished() == []


def test_the_recent_mean_is_of_raw_returns_of_the_latest_episodes():
    statistics = EpisodeStatistics(1, action_repeat=1, num_recent=3)
    assert statistics.recent_mean_return() is None
    for reward in (1, 2, 3, 7):
        record(statistics, [0], [reward], [True])
    assert statistics.recent_mean_return() == pytest.approx(10 * (2 + 3 + 7) / 3)
    statistics.take_finished()
    assert statistics.recent_mean_return() == pytest.approx(40.0)
    assert statistics.num_episodes == 4
