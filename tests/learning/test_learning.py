"""The whole agent learns: small tasks, in one process, on fixed seeds.

Thresholds lie between chance and what a right implementation reaches, so that a wrong sign in the
loss, rewards and dones that are not shifted against actions, or a recurrent state that is lost turn
them red.
"""

import pytest
import tensorflow as tf
from in_process import InProcessTraining

from seed_rl.agents.r2d2 import networks


def recent_return_reaches(training: InProcessTraining, threshold: float) -> bool:
    statistics = training.statistics

    def reached() -> bool:
        recent = statistics.recent_mean_return()
        return statistics.num_episodes >= 100 and recent is not None and recent >= threshold

    training.run(reached)
    return reached()


@pytest.mark.timeout(600)
def test_cartpole_balances_for_longer_than_chance():
    # Random play lasts about 22 steps.
    training = InProcessTraining("gym_vtrace", ["Learner.total_frames=60_000"], 16, seed=1)
    assert recent_return_reaches(training, 150.0)


@pytest.mark.timeout(600)
def test_an_action_is_credited_with_what_comes_of_it():
    bindings = ["Learner.total_frames=20_000", "gym_env.env_id='patience:Patience'"]
    training = InProcessTraining("gym_vtrace", bindings, 16, seed=1)
    assert recent_return_reaches(training, 0.9)  # the optimum is 1, chance 0.5


@pytest.mark.timeout(600)
def test_an_lstm_remembers_the_cue():
    training = InProcessTraining("memory_vtrace", ["Learner.total_frames=60_000"], 16, seed=1)
    assert recent_return_reaches(training, 0.95)  # the optimum is 1


@pytest.mark.timeout(600)
def test_without_memory_the_cue_is_lost():
    bindings = ["Learner.total_frames=30_000", "MLP.lstm_units=0"]
    training = InProcessTraining("memory_vtrace", bindings, 16, seed=1)
    # Chance is 0.5; the mean of 100 episodes is above 0.75 once in millions of times.
    assert not recent_return_reaches(training, 0.8)
    assert 0.25 <= training.statistics.recent_mean_return() <= 0.75


@pytest.mark.timeout(600)
def test_r2d2_balances_for_longer_than_chance():
    training = InProcessTraining("gym_r2d2", ["Learner.total_frames=60_000"], 16, seed=1)
    assert recent_return_reaches(training, 150.0)


@pytest.mark.timeout(600)
def test_r2d2_credits_an_action_with_what_comes_of_it():
    bindings = ["Learner.total_frames=20_000", "gym_env.env_id='patience:Patience'"]
    training = InProcessTraining("gym_r2d2", bindings, 16, seed=1)
    assert recent_return_reaches(training, 0.9)  # the optimum is 1, chance 0.5


@pytest.mark.timeout(600)
def test_stored_state_carries_a_cue_over_more_steps_than_an_unroll_has():
    training = InProcessTraining("memory_r2d2", [], 16, seed=1)
    assert recent_return_reaches(training, 0.95)  # the optimum is 1


@pytest.fixture
def no_last_actions(monkeypatch):
    """Networks without the action before as an input, by which a policy can pass the cue on."""
    call = networks.DuelingLSTMDQN.__call__
    calls = []

    def without(self, inputs, *args, **kwargs):
        calls.append(inputs)
        prev_actions, env_outputs = inputs
        return call(self, (tf.zeros_like(prev_actions), env_outputs), *args, **kwargs)

    monkeypatch.setattr(networks.DuelingLSTMDQN, "__call__", without)
    yield
    assert calls  # else the networks are others, and still have it


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_last_actions")
def test_stored_state_needs_no_help_from_the_last_actions():
    training = InProcessTraining("memory_r2d2", [], 16, seed=1)
    assert recent_return_reaches(training, 0.95)  # the optimum is 1


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_last_actions")
def test_without_stored_state_and_burn_in_the_cue_is_lost():
    bindings = [
        "Learner.total_frames=40_000",
        "R2D2Agent.use_stored_state=False",
        "R2D2Agent.burn_in=0",
    ]
    training = InProcessTraining("memory_r2d2", bindings, 16, seed=1)
    # Chance is 0.5; the mean of 100 episodes is above 0.75 once in millions of times.
    assert not recent_return_reaches(training, 0.8)
    assert 0.25 <= training.statistics.recent_mean_return() <= 0.75
