"""Returns by task."""

import gin
import numpy as np
import pytest

from seed_rl.structures import EpisodeInfo
from seed_rl.task_statistics import TaskStatistics, mean_capped_score


def episodes(**returns_of_env):
    """EpisodeInfos, one an environment: e0=[1, 2] are two episodes of environment 0."""
    infos = []
    for name, raw in returns_of_env.items():
        raw_returns = np.array(raw, np.float32)
        infos.append(
            EpisodeInfo(
                num_frames=np.full(len(raw), 4, np.int64),
                returns=raw_returns - 1000,  # the agent's, which must not count
                raw_returns=raw_returns,
                env_ids=np.full(len(raw), int(name[1:]), np.int32),
            )
        )
    return infos


def parity(env_id):
    return "odd" if env_id % 2 else "even"


# A human has 10 on 'even' and 200 on 'odd'; random play has 0.
def percent(task, episode_return):
    return episode_return / {"even": 10, "odd": 200}[task] * 100


def test_returns_are_sorted_by_the_task_of_their_environment():
    statistics = TaskStatistics(range(4), parity)
    assert statistics.tasks == ("even", "odd")
    statistics.record(episodes(e0=[1, 2], e3=[10], e2=[6]))
    statistics.record(episodes(e1=[20]))
    assert statistics.take_scalars() == {"episode/even/return": 3.0, "episode/odd/return": 15.0}


def test_what_was_told_is_not_told_again_but_stays_in_the_score():
    statistics = TaskStatistics(range(2), parity, percent)
    statistics.record(episodes(e0=[2]))
    # Some task has no episode yet.
    assert statistics.take_scalars() == {"episode/even/return": 2.0}
    statistics.record(episodes(e1=[50]))
    assert statistics.take_scalars() == {
        "episode/odd/return": 50.0,
        "episode/mean_capped_normalized_score": pytest.approx((20 + 25) / 2),
    }
    assert statistics.take_scalars() == {}
    statistics.record(episodes(e0=[4]))  # mean of 'even': 3
    assert statistics.take_scalars() == {
        "episode/even/return": 4.0,
        "episode/mean_capped_normalized_score": pytest.approx((30 + 25) / 2),
    }


def test_the_score_of_a_tasks_mean_is_capped_and_not_that_of_an_episode():
    statistics = TaskStatistics(range(2), parity, percent)
    statistics.record(episodes(e0=[18, 0], e1=[1000, 1000]))
    # 'even': mean 9 of 10; 'odd': 500 %, capped.
    assert statistics.mean_capped_score() == pytest.approx((90 + 100) / 2)


def test_the_score_forgets_old_episodes():
    statistics = TaskStatistics(range(2), parity, percent, num_recent=2)
    statistics.record(episodes(e0=[0, 0, 2, 4], e1=[0]))
    assert statistics.mean_capped_score() == pytest.approx((30 + 0) / 2)
    assert statistics.recent_returns() == {"even": [2.0, 4.0], "odd": [0.0]}


def test_without_tasks_there_is_nothing_to_tell():
    statistics = TaskStatistics(range(2))
    statistics.record(episodes(e0=[1], e1=[2]))
    assert statistics.tasks == () and statistics.take_scalars() == {}
    assert statistics.recent_returns() == {} and statistics.mean_capped_score() is None


def test_without_scores_there_are_returns_only():
    statistics = TaskStatistics(range(1), parity)
    statistics.record(episodes(e0=[1]))
    assert statistics.take_scalars() == {"episode/even/return": 1.0}


def test_a_task_without_a_score_is_found_at_once():
    with pytest.raises(KeyError):
        TaskStatistics(range(2), lambda env_id: "unknown", percent)


def test_both_are_bound_by_gin():
    register = gin.external_configurable
    register(parity, "parity_of_env")
    register(percent, "percent_of_human")
    try:
        gin.parse_config(
            "TaskStatistics.task_of_env = @parity_of_env\n"
            "TaskStatistics.score = @percent_of_human\n"
        )
        statistics = TaskStatistics(range(2))
        statistics.record(episodes(e0=[5], e1=[20]))
        assert statistics.mean_capped_score() == pytest.approx((50 + 10) / 2)
    finally:
        gin.clear_config()


def test_a_mean_of_capped_scores():
    assert mean_capped_score([50.0, 250.0, -30.0]) == pytest.approx(40.0)
    assert mean_capped_score([50.0, 250.0], cap=200.0) == pytest.approx(125.0)
    with pytest.raises(ValueError, match="one task at least"):
        mean_capped_score([])
