"""Google Research Football on its engine, which scripts/install_football.sh compiles."""

import importlib.util
import subprocess
import sys

import gin
import numpy as np
import pytest
from gymnasium import spaces

from seed_rl import config
from seed_rl.environment import make_environment_batch
from seed_rl.envs import football
from seed_rl.user_error import UserError

if importlib.util.find_spec("gfootball") is None:
    pytest.skip(
        "football's engine is not installed: scripts/install_football.sh compiles it",
        allow_module_level=True,
    )

EMPTY_GOAL = "academy_empty_goal_close"
SIZES = {"default": (72, 96), "medium": (90, 120), "large": (108, 144)}
RIGHT, SHOOT = 5, 12  # actions of the engine's default set


@pytest.fixture(autouse=True)
def _no_bindings():
    yield
    gin.clear_config()


def make(scenario=EMPTY_GOAL, **arguments):
    return football.create_environment(scenario=scenario, **arguments)


def run_and_shoot(env, seed=1):
    """The results of one episode of running at the goal, and shooting near it."""
    results = [env.reset(seed=seed)]
    for step in range(400):
        results.append(env.step(SHOOT if step >= 20 else RIGHT))
        if results[-1][2] or results[-1][3]:
            return results
    raise AssertionError("the episode did not end")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scenario", [EMPTY_GOAL, "11_vs_11_hard_stochastic"])
def test_packing_real_observations_is_exact(scenario, size):
    plain = make(scenario, smm_size=size, pack_bits=False)
    packed = make(scenario, smm_size=size)
    assert plain.observation_space == spaces.Box(0, 255, (*SIZES[size], 16), np.uint8)
    assert packed.observation_space == spaces.Box(0, 65535, (*SIZES[size], 1), np.uint16)
    assert packed.action_space == spaces.Discrete(19)
    planes, words = plain.reset(seed=3)[0], packed.reset(seed=3)[0]
    for _ in range(10):
        assert set(np.unique(planes)) == {0, 255}
        np.testing.assert_array_equal(football.unpackbits(words).numpy(), planes)
        planes, words = plain.step(RIGHT)[0], packed.step(RIGHT)[0]
    for env in (plain, packed):
        assert env.observation_space.contains(env.reset()[0])
        env.close()


def test_what_the_planes_show():
    env = make("11_vs_11_hard_stochastic", stacked=False, pack_bits=False)
    planes, _ = env.reset(seed=1)
    assert planes.shape == (72, 96, 4)
    left, right, ball, active = (int((planes[..., i] > 0).sum()) for i in range(4))
    assert 9 <= left <= 11 and 9 <= right <= 11  # two players may share a pixel
    assert (ball, active) == (1, 1)
    env.close()


def test_a_goal_ends_the_episode_and_counts():
    env = make()
    results = run_and_shoot(env)
    *before, (_, reward, terminated, truncated, info) = results[1:]
    assert (reward, terminated, truncated, info["raw_reward"]) == (1.0, True, False, 1.0)
    assert type(reward) is float
    assert all(result[1] == 0.0 and not result[2] for result in before)
    env.close()


def test_checkpoints_are_rewarded_and_only_goals_reported():
    env = make(rewards="scoring, checkpoints")
    results = run_and_shoot(env)[1:]
    assert sum(result[1] for result in results) == pytest.approx(2.0)  # the goal, and 10 · 0.1
    assert sum(result[4]["raw_reward"] for result in results) == 1.0
    env.close()


def test_time_up_is_the_end():
    """400 steps in this scenario, in which nothing happens to a player who stands still."""
    env = make("academy_run_to_score", representation="simple115v2")
    env.reset(seed=1)
    assert not any(env.step(0)[2] for _ in range(399))
    ends = [env.step(0)[2:4]]
    if not ends[0][0]:
        ends.append(env.step(0)[2:4])  # the first step of a match takes no time
    assert ends[-1] == (True, False)
    env.close()


def test_one_seed_is_one_course_of_play():
    def course(env, seed, episodes=2):
        frames = []
        for episode in range(episodes):
            frames.append(env.reset(seed=seed if episode == 0 else None)[0])
            frames += [env.step(action % 19)[0] for action in range(30)]
        return np.stack(frames)

    arguments = {"scenario": "11_vs_11_hard_stochastic", "representation": "simple115v2"}
    first, second = make(**arguments), make(**arguments)
    expected = course(first, 7)
    other = course(second, 8)
    assert (other != expected).any()
    np.testing.assert_array_equal(course(second, 7), expected)  # whatever it played before
    np.testing.assert_array_equal(course(first, 8), other)
    assert (expected[:31] != expected[31:]).any()  # episodes differ
    for env in (first, second):
        env.close()


def test_vectors():
    env = make(representation="simple115v2", stacked=False)
    observation, _ = env.reset(seed=1)
    assert observation.shape == env.observation_space.shape == (115,)
    assert observation.dtype == np.float32
    env.close()


def test_the_match_can_be_drawn():
    """In a process of its own, as only one environment of each can be drawn; as in an evaluation,
    beside TensorFlow, whose LLVM is not the renderer's.
    """
    code = """
import tensorflow
from seed_rl.envs import football
env = football.create_environment(
    scenario="academy_empty_goal_close",
    representation="pixels_gray",
    engine_options={"render_resolution_x": 160, "render_resolution_y": 90},
)
assert env.reset(seed=1)[0].shape == env.observation_space.shape == (72, 96, 4)
assert env.step(5)[0].std() > 1
frame = env.render()
assert frame.shape == (90, 160, 3) and frame.dtype == "uint8" and frame.std() > 1, frame.shape
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unknown_scenarios_do_not_end_the_process():
    with pytest.raises(UserError, match=r"no scenario of football. Did you mean.*goal_close"):
        make("academy_empty_goal_clos")


def test_episodes_are_not_logged(capfd):
    from absl import logging

    logging.set_verbosity(logging.INFO)
    logging.use_absl_handler()
    env = make()
    run_and_shoot(env)
    logging.info("something else")
    env.close()
    shown = capfd.readouterr().err
    assert "something else" in shown and "Episode reward" not in shown


def test_a_batch_of_environments_plays_several_episodes():
    config.load(["football_vtrace"], [], for_actor=True)
    batch = make_environment_batch(football.create_environment, range(3), seed=1)
    rows = batch.reset()
    num_ended = np.zeros(3)
    for step in range(60):
        (rows,) = batch.step(np.full(3, SHOOT if step % 10 == 9 else RIGHT))
        num_ended += rows.env_outputs.done
        assert rows.env_outputs.observation.shape == (3, 72, 96, 1)
        assert not rows.env_outputs.abandoned.any()
    assert num_ended.all()
    batch.close()
