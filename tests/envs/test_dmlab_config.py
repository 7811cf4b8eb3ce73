"""The configurations of DeepMind Lab, from the file to the first actions, on a fake engine."""

import sys

import fake_deepmind_lab as fake
import gin
import numpy as np
import pytest

from seed_rl import config
from seed_rl.environment import make_environment_batch
from seed_rl.nests import map_nest
from seed_rl.task_statistics import TaskStatistics

# Entropy cost, λ, learning rate and ε of Adam, copied by hand from the paper's table.
COMMON = (0.00025, 1.0, 4.8e-4, 3.125e-7)
TUNED = {
    "explore_goal_locations_small": (9.706e-4, 0.95, 2.259e-4, 3.125e-9),
    "lasertag_three_opponents_small": (1.304e-3, 0.9, 3.983e-4, 3.125e-11),
    "rooms_keys_doors_puzzle": (2e-3, 0.922, 1e-4, 3.125e-11),
    "rooms_watermaze": (1e-5, 0.99, 1e-4, 3.125e-7),
}
FILES = {
    "dmlab_vtrace": ("explore_goal_locations_small", COMMON),
    "dmlab_dmlab30_vtrace": ("dmlab30", COMMON),
    **{f"dmlab_{level}_vtrace": (level, tuned) for level, tuned in TUNED.items()},
}


@pytest.fixture(autouse=True)
def _engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepmind_lab", fake)
    monkeypatch.setattr(fake, "episode_frames", 20)
    monkeypatch.setattr(fake, "instances", [])
    yield
    gin.clear_config()


def value(name):
    return gin.query_parameter(name)


@pytest.mark.parametrize("name", FILES)
def test_the_papers_settings(name):
    config.load([name], [], for_actor=False)
    level, tuned = FILES[name]
    assert value("%LEVELS") == level
    assert tuned == (
        value("VTraceAgent.entropy_cost"),
        value("VTraceAgent.lambda_"),
        value("adam.learning_rate"),
        value("adam.epsilon"),
    )
    assert (value("VTraceAgent.unroll_length"), value("VTraceAgent.batch_size")) == (100, 32)
    assert (value("VTraceAgent.discount"), value("VTraceAgent.baseline_cost")) == (0.99, 0.5)
    assert (value("VTraceAgent.max_abs_reward"), value("adam.beta_1")) == (1.0, 0.0)
    assert (value("DmLab.width"), value("DmLab.height")) == (96, 72)
    assert (value("%ACTION_REPEAT"), value("adam.decay")) == (4, "linear")
    assert value("Learner.total_frames") == (10**10 if level == "dmlab30" else 10**9)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("for_actor", [False, True])
def test_every_file_makes_its_environments(name, for_actor, tmp_path):
    bindings = [f"DmLab.level_cache = '{tmp_path}'"]
    experiment = config.load([name], bindings, for_actor=for_actor)
    make_environment_batch(experiment.environment, range(3), seed=1).close()
    levels = [lab.level.removeprefix("contributed/dmlab30/") for lab in fake.instances]
    if name == "dmlab_dmlab30_vtrace":
        assert len(set(levels)) == 3
    else:
        assert levels == [FILES[name][0]] * 3
    assert {lab.config["width"] for lab in fake.instances} == {"96"}
    assert all(lab.level_cache is not None for lab in fake.instances)


@pytest.mark.parametrize("name", ["dmlab_vtrace", "dmlab_r2d2"])
def test_from_the_configuration_to_actions_and_back(name, tmp_path):
    """What a learner and an actor do, in one process."""
    bindings = [
        f"DmLab.level_cache = '{tmp_path}'",
        "LEVELS = ('rooms_watermaze', 'natlab_fixed_large_map')",
    ]
    experiment = config.load([name], bindings, for_actor=False)
    batch = make_environment_batch(experiment.environment, range(2), seed=1)
    spaces = batch.observation_space, batch.action_space
    agent = config.make_agent(experiment.agent, *spaces, num_envs=2)
    tasks = TaskStatistics(range(2))
    assert tasks.tasks == ("rooms_watermaze", "natlab_fixed_large_map")
    assert tasks.mean_capped_score() is None
    state = map_nest(np.asarray, agent.initial_state(2))
    actions = np.zeros(2, np.int32)
    (rows,) = [batch.reset()]
    num_ended = 0
    for _ in range(11):  # two episodes of 5 steps and one more
        outputs, state = agent.policy(rows.indices, actions, rows.env_outputs, state)
        actions = np.asarray(outputs.action)
        assert actions.shape == (2,) and ((actions >= 0) & (actions < 9)).all()
        (rows,) = batch.step(actions)
        num_ended += int(rows.env_outputs.done.sum())
    assert num_ended == 4
    assert [lab.num_compiled for lab in fake.instances] == [3, 3]
    assert {num_frames for lab in fake.instances for _, num_frames in lab.steps} == {4}


def test_evaluation_on_hold_out_levels():
    bindings = [
        "LEVELS = 'rooms_collect_good_objects_train'",
        "dmlab_environment.hold_out_levels = True",
        "DmLab.level_cache = None",
    ]
    experiment = config.load(["dmlab_vtrace"], bindings, for_actor=False)
    make_environment_batch(experiment.environment, range(1), seed=1).close()
    (lab,) = fake.instances
    assert lab.level.endswith("rooms_collect_good_objects_test")
    assert lab.config["mixerSeed"] == "1611489005"
    assert TaskStatistics(range(1)).tasks == ("rooms_collect_good_objects_train",)
