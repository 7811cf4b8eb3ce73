"""Playing episodes with a trained policy."""

import gin
import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from seed_rl.environment import make_environment_batch
from seed_rl.evaluation import EvaluationResult, evaluate


class Scripted(gymnasium.Env):
    """Episode k of environment i lasts `lengths[i]` steps and pays 100 i + 10 k + action a step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(8)
    lengths = (2, 5, 3)
    truncated = False
    fail_at = None  # episode, step of environment 0, once

    def __init__(self, env_index, log):
        self.env_index, self.log = env_index, log
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.steps = 0
        self.log.setdefault(self.env_index, []).append([])
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.fail_at == (self.episode, self.steps) and not self.log.get("failed"):
            self.log["failed"] = True
            raise RuntimeError("torn")
        self.log[self.env_index][-1].append(int(action))
        ended = self.steps == self.lengths[self.env_index]
        raw = 100 * self.env_index + 10 * self.episode + int(action)
        return (
            np.zeros(3, np.float32),
            0.5,
            ended and not self.truncated,
            ended and self.truncated,
            {"raw_reward": raw},
        )

    def render(self):
        return np.full((48, 64, 3), 10 * self.steps, np.uint8)


@pytest.fixture
def play(tiny_agent):
    """Returns a function that evaluates on Scripted environments: (result, actions they took)."""

    class Agent(tiny_agent):
        """Prefers action 4 and likes action 3 least."""

        def __init__(self):
            super().__init__(num_outputs=8)
            self.network.weights.assign(tf.zeros_like(self.network.weights))
            self.network.bias.assign([0, 0, 0, -1, 1, 0, 0, 0])

    def run(num_envs, num_episodes, agent=None, settings=None, **kwargs):
        log = {}
        env_class = type("Env", (Scripted,), settings or {})

        def make(env_index=0):
            return env_class(env_index, log)

        environments = make_environment_batch(make, range(num_envs), 0)
        result = evaluate((agent or Agent)(), environments, num_episodes, **kwargs)
        return result, log

    return run


def test_every_environment_plays_its_share_from_its_first_episode_on(play):
    # 5 = 3 + 2, although the short episodes of environment 0 would fill all five first.
    result, _ = play(2, 5)
    # Raw returns: length · (100 i + 10 k + 4).
    expected = [2 * 4, 2 * 14, 2 * 24, 5 * 104, 5 * 114]
    assert sorted(result.returns.tolist()) == expected
    assert result.returns.dtype == np.float32
    assert result.normalized_scores is None


def test_more_environments_than_episodes(play):
    result, _ = play(3, 2)
    assert sorted(result.returns.tolist()) == [2 * 4, 5 * 104]


def test_greedy_takes_the_best_action_and_sampling_does_as_in_training(play):
    assert play(1, 1)[0].returns.tolist() == [2 * 4]
    assert play(1, 1, greedy=False)[0].returns.tolist() == [2 * 3]


@pytest.mark.parametrize("truncated", [False, True])
def test_the_recurrent_state_follows_its_environment_and_starts_anew_with_the_episode(
    play, tiny_agent, truncated
):
    class StepCounter(tiny_agent):
        def greedy_policy(self, env_ids, prev_actions, env_outputs, agent_state):
            outputs, state = super().greedy_policy(env_ids, prev_actions, env_outputs, agent_state)
            return outputs._replace(action=state[0]), state

    result, log = play(3, 6, agent=StepCounter, settings={"truncated": truncated})
    for env_id, length in enumerate(Scripted.lengths):
        assert log[env_id][:2] == [list(range(1, length + 1))] * 2
    # 1 + 2 + … + n, and 100 i + 10 k a step.
    expected = [
        n * (100 * i + 10 * k) + n * (n + 1) // 2
        for i, n in enumerate(Scripted.lengths)
        for k in (0, 1)
    ]
    assert sorted(result.returns.tolist()) == sorted(expected)


def test_the_previous_action_is_given_to_the_network(play, tiny_agent):
    class Counting(tiny_agent):
        def greedy_policy(self, env_ids, prev_actions, env_outputs, agent_state):
            outputs, state = super().greedy_policy(env_ids, prev_actions, env_outputs, agent_state)
            return outputs._replace(action=(prev_actions + 1) % 8), state

    _, log = play(2, 2, agent=Counting)
    assert log[0][0] == [1, 2]
    assert log[1][0] == [1, 2, 3, 4, 5]


def test_an_episode_torn_by_a_failure_does_not_count(play):
    result, log = play(1, 2, settings={"fail_at": (0, 2)})
    assert log["failed"]
    # Made anew, the environment begins with episode 0 again.
    assert result.returns.tolist() == [2 * 4, 2 * 14]


def test_scores_are_normalised_one_by_one(play):
    result, _ = play(1, 2, normalized_score=lambda raw_return: 100 * (raw_return - 8) / 40)
    np.testing.assert_allclose(result.normalized_scores, [0.0, 50.0])


def test_the_video_shows_the_first_environments_episodes(play, tmp_path):
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / "play.avi"
    play(2, 4, video_path=str(path))
    video = cv2.VideoCapture(str(path))
    # The first observation, and then what follows each step of two episodes of two steps: the
    # environment is reset at once when an episode ends, so that the next one's first follows.
    frames = [video.read()[1] for _ in range(int(video.get(cv2.CAP_PROP_FRAME_COUNT)))]
    assert all(frame.shape == (48, 64, 3) for frame in frames)
    # The environment draws 10 × steps; JPEG is not exact.
    assert [round(frame.mean() / 10) for frame in frames] == [0, 1, 0, 1, 0]


def test_no_episodes_are_refused(play):
    with pytest.raises(ValueError, match="num_episodes must be at least 1, got 0"):
        play(1, 0)


def test_the_report():
    returns = np.array([1.0, 2.0, 6.0, 11.0], np.float32)
    scores = np.array([10.0, 20.0, 60.0, 110.0])
    # Mean 5, median 4; deviations -4, -3, 1, 6: variance 62 / 3, standard error √(62 / 12).
    assert EvaluationResult(returns, scores).report().splitlines() == [
        "episodes        4",
        "mean return     5.000",
        "median return   4.000",
        "standard error  2.273",
        "mean human-normalised score    50.0 %",
        "median human-normalised score  40.0 %",
    ]


def test_one_episode_has_no_standard_error():
    report = EvaluationResult(np.array([3.0], np.float32), None).report()
    assert "standard error  nan" in report and "normalised" not in report


def test_returns_are_sorted_by_task_where_environments_have_one(play):
    gin.external_configurable(lambda env_id: f"task {env_id}", "task_of_scripted")
    gin.external_configurable(lambda task, result: result / 4, "score_of_scripted")
    with gin.unlock_config():
        gin.bind_parameter("TaskStatistics.task_of_env", gin.get_configurable("task_of_scripted"))
        gin.bind_parameter("TaskStatistics.score", gin.get_configurable("score_of_scripted"))
    try:
        result, _ = play(2, 3)
    finally:
        gin.clear_config()
    # Action 4 all along: episodes of environment 0 have two steps, of environment 1 five.
    assert result.task_returns == {"task 0": [2 * 4, 2 * 14], "task 1": [5 * 104]}
    # A quarter of 18, and of 520, which is capped at 100.
    assert result.mean_capped_score == pytest.approx((4.5 + 100) / 2)
    assert result.report().splitlines()[-3:] == [
        "mean return of task 0  18.000 (2 episodes)",
        "mean return of task 1  520.000 (1 episodes)",
        "mean capped human-normalised score  52.2 %",
    ]
