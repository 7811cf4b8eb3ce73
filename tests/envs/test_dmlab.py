"""The DeepMind Lab environment, on a fake of the engine."""

import subprocess
import sys
import types
from pathlib import Path

import fake_deepmind_lab as fake
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from seed_rl.environment import EnvironmentFailedError, make_environment_batch
from seed_rl.envs import dmlab
from seed_rl.envs.dmlab import DEFAULT_ACTION_SET, DmLab, instruction_ids
from seed_rl.user_error import UserError

LEVEL = "explore_goal_locations_small"
FORWARD, BACK, LOOK_LEFT = 0, 1, 4


@pytest.fixture(autouse=True)
def _engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepmind_lab", fake)
    monkeypatch.setattr(fake, "episode_frames", 40)
    monkeypatch.setattr(fake, "instances", [])


def engine(number=-1):
    return fake.instances[number]


# The fake itself: the traps of the real engine are there


def test_the_fake_reads_arrays_with_gaps_wrongly_as_the_engine_does():
    lab = fake.Lab("lt_chasm", ["INSTR"])
    lab.reset(seed=1)
    table = np.arange(14, dtype=np.intc).reshape(7, 2)
    lab.step(table[:, 0])
    assert lab.steps == [((0, 1, 2, 3, 4, 5, 6), 1)]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda lab: lab.reset(seed=np.int64(3)), ValueError),
        (lambda lab: lab.step(np.zeros(7, np.int64)), ValueError),
        (lambda lab: lab.step(np.zeros(6, np.intc)), ValueError),
        (lambda lab: lab.step([0] * 7), TypeError),
        (lambda lab: (lab.close(), lab.reset(seed=3)), fake.Crash),
        (
            lambda lab: (lab.step(np.zeros(7, np.intc), num_steps=99), lab.observations()),
            RuntimeError,
        ),
        (lambda lab: fake.Lab(fake.WITHOUT_MAP, ["INSTR"]).reset(), fake.Crash),
        (lambda lab: fake.Lab("lt_chasm", ["INSTR"], config={"width": 96}), TypeError),
        (lambda lab: fake.Lab("lt_chasm", ["RGBB"]), ValueError),
        (lambda lab: fake.Lab("lt_chasms", ["INSTR"]), RuntimeError),
        (lambda lab: type("Mine", (fake.Lab,), {}), TypeError),
    ],
)
def test_the_fake_refuses_what_the_engine_refuses(call, error):
    lab = fake.Lab("lt_chasm", ["INSTR"])
    with pytest.raises(RuntimeError):
        lab.observations()
    lab.reset(seed=1)
    with pytest.raises(error):
        call(lab)


# What the engine is told


def test_the_engines_arguments():
    DmLab(LEVEL)
    assert engine().level == "contributed/dmlab30/explore_goal_locations_small"
    assert engine().observation_names == ["RGB_INTERLEAVED"]
    assert engine().config == {"width": "96", "height": "72"}
    assert engine().renderer == "software" and engine().level_cache is None


def test_every_argument_reaches_the_engine():
    cache = types.SimpleNamespace(fetch=lambda key, path: False, write=lambda key, path: None)
    DmLab(
        "lt_chasm",
        width=48,
        height=32,
        renderer="hardware",
        level_cache=cache,
        dataset_path="/pictures",
        config={"fps": 30, "appendCommand": "x"},
    )
    assert engine().level == "lt_chasm"
    assert engine().renderer == "hardware" and engine().level_cache is cache
    assert engine().config == {
        "width": "48",
        "height": "32",
        "datasetPath": "/pictures",
        "fps": "30",
        "appendCommand": "x",
    }


def test_further_settings_win_and_the_space_follows_them():
    env = DmLab(LEVEL, config={"width": 40, "allowHoldOutLevels": False})
    assert engine().config["width"] == "40" and engine().config["allowHoldOutLevels"] == "false"
    assert env.observation_space.shape == (72, 40, 3)
    assert env.reset(seed=1)[0].shape == (72, 40, 3)


def test_evaluation_allows_hold_out_levels_and_mixes_another_seed():
    DmLab("rooms_collect_good_objects_test")
    assert engine().config["allowHoldOutLevels"] == "true"
    assert "mixerSeed" not in engine().config
    DmLab(LEVEL, hold_out=True)
    assert engine().config["allowHoldOutLevels"] == "true"
    assert engine().config["mixerSeed"] == "1611489005"  # 0x600D5EED
    assert int(engine().config["mixerSeed"]) < 2**31


def test_a_cache_is_made_of_a_folder(tmp_path):
    for _ in range(2):
        env = DmLab(LEVEL, level_cache=str(tmp_path / "maps"))
        env.reset(seed=4)
    assert [lab.num_compiled for lab in fake.instances] == [1, 0]
    assert len(list((tmp_path / "maps").iterdir())) == 1


# Episodes


def test_an_episode_from_its_beginning_to_its_end():
    env = DmLab(LEVEL, action_repeat=16)
    assert env.observation_space == spaces.Box(0, 255, (72, 96, 3), np.uint8)
    assert env.action_space == spaces.Discrete(9)
    first, info = env.reset(seed=1)
    assert first.shape == (72, 96, 3) and first.dtype == np.uint8 and (first == 0).all()
    assert info == {}
    observation, reward, *ends, _ = env.step(FORWARD)
    assert (observation == 16).all() and reward == 16.0 and ends == [False, False]
    observation, reward, *ends, _ = env.step(BACK)
    assert (observation == 32).all() and reward == -16.0 and ends == [False, False]
    # 8 of the 40 frames are left, and after them there is nothing to see.
    observation, reward, *ends, _ = env.step(FORWARD)
    assert (observation == 32).all() and reward == 8.0 and ends == [True, False]
    observation, _ = env.reset()
    assert (observation == 0).all()


def test_frames_are_drawn_once_a_step_and_not_at_the_end():
    env = DmLab(LEVEL, action_repeat=10)
    env.reset(seed=1)
    assert engine().num_drawn == 1
    for drawn in (2, 3, 4, 4):
        env.step(FORWARD)
        assert engine().num_drawn == drawn
    env.render()
    assert engine().num_drawn == 4


def test_actions_arrive_as_they_are_meant():
    env = DmLab(LEVEL, action_repeat=3)
    env.reset(seed=1)
    for action in range(9):
        env.step(np.int64(action))
    assert engine().steps == [(action, 3) for action in DEFAULT_ACTION_SET]


@pytest.mark.parametrize("order", ["C", "F"])
def test_own_actions_in_any_layout(order):
    own = np.array([[-512, 512, -1, 1, 0, 1, 1], [1, 2, 0, -1, 1, 0, 0]], order=order)
    env = DmLab(LEVEL, action_set=own, action_repeat=1)
    assert env.action_space == spaces.Discrete(2)
    env.reset(seed=1)
    env.step(1)
    env.step(0)
    assert [action for action, _ in engine().steps] == [
        (1, 2, 0, -1, 1, 0, 0),
        (-512, 512, -1, 1, 0, 1, 1),
    ]


def test_the_default_actions_are_the_papers():
    parts = np.array(DEFAULT_ACTION_SET)
    look, strafe, move, fire = parts[:, 0], parts[:, 2], parts[:, 3], parts[:, 4]
    assert look.tolist() == [0, 0, 0, 0, -20, 20, -20, 20, 0]
    assert strafe.tolist() == [0, 0, -1, 1, 0, 0, 0, 0, 0]
    assert move.tolist() == [1, -1, 0, 0, 0, 0, 1, 1, 0]
    assert fire.tolist() == [0] * 8 + [1]
    assert not parts[:, [1, 5, 6]].any()


def test_seeds_are_reproducible_and_differ_between_episodes():
    def seeds(seed, num_episodes=3):
        env = DmLab(LEVEL)
        env.reset(seed=seed)
        for _ in range(num_episodes - 1):
            env.reset()
        return engine().seeds

    assert seeds(5) == seeds(np.int64(5))
    assert len({*seeds(5), *seeds(6)}) == 6
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds(7))
    assert seeds(None, 1) != seeds(None, 1)


def test_the_first_observations_depend_on_the_seed_and_on_the_episodes_before():
    """So a seed repeats a run in a new environment, which is what the checker looks at."""
    (one, _), (other, _) = (DmLab(LEVEL).reset(seed=5) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    env = DmLab(LEVEL)
    env.reset(seed=5)
    again, _ = env.reset(seed=5)
    assert engine().seeds[0] == engine().seeds[1] and not np.array_equal(one, again)


def test_the_last_image_is_rendered():
    env = DmLab(LEVEL, instructions=True)
    assert env.render_mode == "rgb_array" and env.render() is None
    env.reset(seed=1)
    env.step(FORWARD)
    assert (env.render() == 4).all() and env.render().shape == (72, 96, 3)


# Instructions


def test_instructions_are_observed_as_numbers_of_words():
    env = DmLab("language_execute_random_task", instructions=True, max_words=7, action_repeat=1)
    observation, _ = env.reset(seed=1)
    assert env.observation_space["instruction"] == spaces.Box(0, 999, (7,), np.int32)
    assert observation in env.observation_space
    later = env.step(FORWARD)[0]
    assert later in env.observation_space
    # 'Find the red object 0' and '… 1'
    first, second = observation["instruction"], later["instruction"]
    assert (first[:4] == second[:4]).all() and first[4] != second[4]
    assert (first[:5] > 0).all() and (first[5:] == 0).all()


def test_a_level_without_instructions_has_none_of_their_numbers():
    observation, _ = DmLab(LEVEL, instructions=True).reset(seed=1)
    assert not observation["instruction"].any()


def test_the_numbers_of_words():
    # zlib.crc32(b"123456789") is 0xCBF43926, the check value of CRC-32.
    ids = instruction_ids(" 123456789\tA a ", max_words=4, vocabulary_size=1000)
    assert ids.dtype == np.int32
    assert ids[0] == 1 + 0xCBF43926 % 999
    assert ids[1] == ids[2] != ids[0] and ids[3] == 0
    assert instruction_ids("a b c", 2, 1000).shape == (2,)
    assert instruction_ids("a b c", 3, 2).tolist() == [1, 1, 1]


# Wrong calls


def test_a_closed_environment_says_so_and_does_not_crash():
    env = DmLab(LEVEL)
    env.reset(seed=1)
    env.close()
    env.close()
    assert engine().num_closed == 1
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        env.reset()
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        env.step(FORWARD)


def test_a_step_without_an_episode_asks_for_a_reset():
    env = DmLab(LEVEL, action_repeat=40)
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"call reset\(\) first"):
        env.step(FORWARD)
    env.reset(seed=1)
    assert env.step(FORWARD)[2]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(FORWARD)


@pytest.mark.parametrize("action", [-1, 9])
def test_an_action_that_does_not_exist_is_refused(action):
    env = DmLab(LEVEL)
    env.reset(seed=1)
    with pytest.raises(ValueError, match=r"action must be in 0 … 8"):
        env.step(action)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"width": 0}, "width must be a whole number of at least 1, got 0"),
        ({"height": 7.5}, "height must be"),
        ({"action_repeat": 0}, "action_repeat must be"),
        ({"max_words": True}, "max_words must be"),
        ({"vocabulary_size": 1}, "vocabulary_size must be at least 2"),
        ({"renderer": "gpu"}, "renderer must be one of"),
        ({"action_set": ()}, "at least one action"),
        ({"action_set": ((0, 0, 0, 1),)}, "must be 7 whole numbers"),
        ({"action_set": ((0, 0, 0, 0.5, 0, 0, 0),)}, "must be 7 whole numbers"),
        ({"action_set": ((0, 0, 0, 2, 0, 0, 0),)}, "move forward"),
        ({"action_set": ((-513, 0, 0, 0, 0, 0, 0),)}, "-512 … 512"),
        ({"level": "room_watermaze"}, "Did you mean rooms_watermaze"),
        ({"level": "contributed/dmlab30/natlab_fixed_large_maps"}, "natlab_fixed_large_map"),
        ({"config": {"wdith": 3}}, "wdith"),
        ({"level": 5}, "level must be"),
        ({"level_cache": 5}, "level_cache must be a folder"),
        ({"level_cache": ""}, "level_cache must be a folder"),
    ],
)
def test_wrong_settings_are_named(settings, named):
    with pytest.raises(UserError) as error:
        DmLab(**{"level": LEVEL, **settings})
    assert named in str(error.value)


def test_levels_with_pictures_say_where_these_belong():
    env = DmLab("psychlab_continuous_recognition")
    with pytest.raises(RuntimeError, match=r"DmLab\.dataset_path"):
        env.reset(seed=1)
    DmLab("psychlab_continuous_recognition", dataset_path="/pictures").reset(seed=1)


# The factory, and the batch that actors step


def test_environments_take_turns_with_the_levels():
    levels = ("rooms_watermaze", "lt_chasm")
    for env_index in range(3):
        dmlab.create_environment(env_index, levels)
    assert [lab.level for lab in fake.instances] == [
        "contributed/dmlab30/rooms_watermaze",
        "lt_chasm",
        "contributed/dmlab30/rooms_watermaze",
    ]


def test_hold_out_levels_are_the_variants_for_evaluation():
    dmlab.create_environment(0, "rooms_exploit_deferred_effects_train", hold_out_levels=True)
    assert engine().level == "contributed/dmlab30/rooms_exploit_deferred_effects_test"
    assert engine().config["mixerSeed"] == "1611489005"


def test_an_actors_batch_goes_from_episode_to_episode():
    batch = make_environment_batch(lambda env_index: DmLab(LEVEL, action_repeat=20), (0, 1), seed=3)
    assert (batch.reset().env_outputs.observation == 0).all()
    for done, seen in ((False, 20), (True, 0), (False, 20)):
        (rows,) = batch.step(np.array([FORWARD, BACK], np.int32))
        output = rows.env_outputs
        assert output.reward.tolist() == [20.0, -20.0]
        assert output.done.tolist() == [done] * 2 and not output.abandoned.any()
        assert (output.observation == seen).all()
    assert engine(0).seeds[0] != engine(1).seeds[0]
    batch.close()
    assert [lab.num_closed for lab in fake.instances] == [1, 1]


def test_an_environment_that_fails_is_made_anew_without_a_crash(monkeypatch):
    batch = make_environment_batch(lambda env_index: DmLab(LEVEL), (0,), seed=3, max_failures=2)
    batch.reset()
    engine().step = None  # and so every call of it fails
    (rows,) = batch.step(np.array([FORWARD]))
    assert rows.env_outputs.abandoned.all()
    assert len(fake.instances) == 2 and engine(0).num_closed == 1
    engine().step = None
    monkeypatch.setattr(fake.Lab, "reset", None)
    with pytest.raises(EnvironmentFailedError, match="2 times in a row"):
        batch.step(np.array([FORWARD]))


# Imports


def test_a_missing_engine_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    with pytest.raises(ModuleNotFoundError) as error:
        make_environment_batch("seed_rl.envs.dmlab:create_environment", (0,), seed=1)
    message = str(error.value)
    assert "'deepmind_lab'" in message and "docs/dmlab.md" in message
    assert "No pip install finds it" in message


SIDE = """
import sys
import numpy as np
import fake_deepmind_lab as fake
from seed_rl import config
from seed_rl.environment import make_environment_batch
assert "deepmind_lab" not in sys.modules
sys.modules["deepmind_lab"] = fake
bindings = [f"DmLab.level_cache = '{sys.argv[1]}'"]
experiment = config.load(["dmlab_dmlab30_vtrace"], bindings, for_actor=True)
batch = make_environment_batch(experiment.environment, range(28, 33), seed=1)
batch.reset()
for _ in range(3):
    batch.step(np.zeros(5, np.int32))
print([lab.level.rpartition("/")[2] for lab in fake.instances])
print(sorted({"tensorflow", "keras"} & set(sys.modules)))
"""


def test_actors_step_all_levels_without_tensorflow(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SIDE, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    levels, heavy = done.stdout.splitlines()
    assert levels == str(
        [
            "explore_object_rewards_few",
            "explore_object_rewards_many",
            "rooms_collect_good_objects_train",
            "rooms_exploit_deferred_effects_train",
            "rooms_select_nonmatching_object",
        ]
    )
    assert heavy == "[]"
    assert list(tmp_path.iterdir())
