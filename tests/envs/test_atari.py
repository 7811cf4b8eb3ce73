"""Atari against raw ALE screens, and the single environment against the C++ ones."""

import functools
import subprocess
import sys

import gin
import numpy as np
import pytest
from gymnasium import spaces

from seed_rl.environment import make_environment_batch
from seed_rl.envs import atari

ale_py = pytest.importorskip("ale_py")
cv2 = pytest.importorskip("cv2")


def raw_game(game, num_noops, seed=0):
    """ALE itself, after a reset with num_noops no-ops."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(ale_py.roms.get_rom_path(game))
    ale.reset_game()
    for _ in range(num_noops):
        ale.act(ale_py.Action.NOOP)
    return ale


@functools.cache
def bilinear_weights(length, size):
    """[size, length]: pixels have width 1, a new one's centre lies between two old centres."""
    centres = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
    below = np.minimum(centres.astype(int), length - 2)
    matrix = np.zeros((size, length))
    matrix[np.arange(size), below] = 1 - (centres - below)
    matrix[np.arange(size), below + 1] = centres - below
    return matrix


def resized_bilinearly(screen, size):
    height, width = (bilinear_weights(length, size) for length in screen.shape)
    return height @ screen.astype(float) @ width.T


@pytest.mark.parametrize("action_repeat", [1, 2, 3, 4])
def test_observations_and_rewards_from_raw_screens(action_repeat):
    env = atari.create_environment(
        game="Assault",
        action_repeat=action_repeat,
        frame_stack=3,
        noop_min=7,
        noop_max=7,
    )
    observation, _ = env.reset(seed=5)
    ale = raw_game("assault", num_noops=7, seed=5)
    blank = np.zeros((84, 84))
    frames = [blank, blank, resized_bilinearly(ale.getScreenGrayscale(), 84)]
    rng = np.random.default_rng(0)
    total = 0.0
    for _ in range(100):
        assert observation.shape == (84, 84, 3) and observation.dtype == np.uint8
        # OpenCV computes in fixed point.
        assert np.abs(observation - np.stack(frames[-3:], -1)).max() <= 1.0
        action = int(rng.integers(18)) if rng.random() < 0.3 else 1  # FIRE, mostly
        screens, expected = [], 0
        for _ in range(action_repeat):
            expected += ale.act(ale_py.Action(action))
            screens.append(ale.getScreenGrayscale())
        pooled = screens[0] if action_repeat == 1 else np.maximum(screens[-2], screens[-1])
        frames.append(resized_bilinearly(pooled, 84))
        observation, reward, terminated, truncated, info = env.step(action)
        assert (reward, info["raw_reward"], terminated, truncated) == (expected,) * 2 + (0, 0)
        total += reward
    assert total > 0
    # It moves on: an action repeat of one once returned the first frame for ever.
    assert len({frame.tobytes() for frame in frames}) > 15
    assert env.render().shape == (210, 160, 3)


def test_area_interpolation_from_raw_screens():
    env = atari.create_environment(
        game="Breakout", interpolation="area", screen_size=42, frame_stack=1, noop_max=1
    )
    observation, _ = env.reset(seed=0)
    screen = raw_game("breakout", num_noops=1).getScreenGrayscale()
    # 210 × 160 is 5 rows and 3.81 columns for each of 42 × 42: sum the parts of pixels covered.
    edges = np.arange(43) * 160 / 42
    columns = np.clip(
        np.minimum(edges[1:, None], np.arange(1, 161))
        - np.maximum(edges[:-1, None], np.arange(160)),
        0,
        1,
    )
    expected = screen.reshape(42, 5, 160).mean(1) @ columns.T / (160 / 42)
    assert np.abs(observation[..., 0] - expected).max() <= 1.0


@pytest.mark.parametrize(
    ("game", "options", "num_steps"),
    [
        ("Pong", {}, 80),
        ("Breakout", {}, 250),  # random play ends several episodes, and draws new no-ops
        ("SpaceInvaders", {"action_repeat": 1}, 120),
        ("MsPacman", {"sticky_action_probability": 0.25, "action_repeat": 3}, 80),
        ("Breakout", {"full_action_set": False, "frame_stack": 1, "clip_rewards": True}, 80),
        ("Qbert", {"max_episode_frames": 80, "frame_stack": 2, "clip_rewards": True}, 50),
    ],
)
def test_single_and_vector_environments_agree(game, options, num_steps):
    def make_single():
        return atari.create_environment(game=game, interpolation="area", noop_min=0, **options)

    def make_vector(env_indices):
        return atari.create_vector_environment(env_indices, game=game, **options)

    batches = [make_environment_batch(make, [3, 8], 17) for make in (make_single, make_vector)]
    pairs = [[batch.reset() for batch in batches]]
    rng = np.random.default_rng(1)
    num_ended = 0
    action_space = batches[0].action_space
    assert isinstance(action_space, spaces.Discrete)
    for _ in range(num_steps):
        single, vector = pairs[-1]
        assert single.env_outputs.observation.shape == (2, 84, 84, options.get("frame_stack", 4))
        for ours, theirs in zip(single.env_outputs, vector.env_outputs, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(single.raw_rewards, vector.raw_rewards)
        actions = rng.integers(action_space.n, size=2)
        steps = [batch.step(actions) for batch in batches]
        assert [s.indices.tolist() for s in steps[0]] == [s.indices.tolist() for s in steps[1]]
        pairs.append([rows[-1] for rows in steps])
        num_ended += pairs[-1][0].env_outputs.done.sum()
    if game == "Qbert":
        assert num_ended == 2 * (50 // 20)  # 20 actions of 4 frames each, then a cut
    if (game, options) == ("Breakout", {}):
        assert num_ended > 0


def test_seeds_decide_the_games():
    def screens(seed):
        env = atari.create_environment(game="Breakout")
        return [env.reset(seed=seed)[0]] + [env.step(1 + t % 4)[0] for t in range(30)]

    assert np.array_equal(screens(1), screens(1))
    assert not np.array_equal(screens(1), screens(2))


def test_no_ops_are_drawn_evenly_between_their_bounds():
    rng = np.random.RandomState(0)
    draws = [atari.draw_uniformly(rng, 1, 30) for _ in range(30_000)]
    counts = np.bincount(draws, minlength=31)
    assert counts[0] == 0 and len(counts) == 31
    # 1,000 of each are expected, with a standard deviation of 31.
    assert np.abs(counts[1:] - 1000).max() < 160


def test_the_default_draws_one_to_thirty_no_ops(monkeypatch):
    bounds = []

    def draw(rng, low, high):
        bounds.append((low, high))
        return low

    monkeypatch.setattr(atari, "draw_uniformly", draw)
    env = atari.create_environment(game="Pong")
    first, _ = env.reset(seed=0)
    assert bounds == [(1, 30)]
    screen = raw_game("pong", num_noops=1).getScreenGrayscale()
    assert np.abs(first[..., -1] - resized_bilinearly(screen, 84)).max() <= 1.0


def test_defaults_are_those_of_r2d2():
    env = atari.create_environment()
    assert env.action_space.n == 18
    assert env.observation_space.shape == (84, 84, 4)
    assert atari.create_environment(game="Pong", full_action_set=False).action_space.n == 6
    assert env._max_episode_frames == 108_000 and env._action_repeat == 4


def test_the_final_observation_of_a_cut_episode_is_pooled_from_its_last_two_frames():
    env = atari.create_environment(
        game="SpaceInvaders", max_episode_frames=10, frame_stack=1, noop_min=0, noop_max=0
    )
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(2)] == [False, False]
    observation, _, terminated, truncated, _ = env.step(0)
    assert truncated and not terminated
    ale = raw_game("space_invaders", num_noops=9)
    before = ale.getScreenGrayscale()
    ale.act(ale_py.Action.NOOP)
    expected = resized_bilinearly(np.maximum(before, ale.getScreenGrayscale()), 84)
    assert np.abs(observation[..., 0] - expected).max() <= 1.0


def test_a_lost_life_ends_the_episode_only_if_asked_to():
    def play(life_loss_ends_episode):
        env = atari.create_environment(
            game="Breakout", life_loss_ends_episode=life_loss_ends_episode
        )
        env.reset(seed=0)
        ended_with = []
        for _ in range(400):  # with FIRE alone every ball is lost
            _, _, terminated, _, info = env.step(1)
            if terminated:
                ended_with.append(info["lives"])
                if len(ended_with) == 5:
                    return ended_with
                _, info = env.reset()
                assert info["lives"] == (ended_with[-1] or 5)
        return ended_with

    assert play(True) == [4, 3, 2, 1, 0]
    assert set(play(False)) == {0}


def test_sticky_actions_repeat_the_action_before():
    def observations(probability):
        env = atari.create_environment(
            game="Breakout", sticky_action_probability=probability, noop_min=0, noop_max=0
        )
        first, _ = env.reset(seed=3)
        return np.array([first] + [env.step(a)[0] for a in [1, 2, 3] * 10])

    assert not np.array_equal(observations(0.0), observations(0.5))
    with pytest.raises(ValueError, match="sticky_action_probability"):
        observations(1.5)


@pytest.mark.parametrize(
    ("option", "value"),
    [("interpolation", "bilinear"), ("noop_min", 1), ("life_loss_ends_episode", True)],
)
def test_what_the_vector_environments_cannot_do_is_named(option, value):
    words = rf"create_vector_environment\.{option} can only be .*Use create_environment"
    with pytest.raises(ValueError, match=words):
        atari.create_vector_environment([0], **{option: value})


@pytest.mark.parametrize(
    "option",
    [
        {"action_repeat": 0},
        {"frame_stack": 0},
        {"screen_size": 84.0},
        {"interpolation": "cubic"},
        {"noop_min": 5, "noop_max": 4},
        {"max_episode_frames": 0},
    ],
)
def test_options_out_of_range_are_named(option):
    (name, *_) = option
    with pytest.raises(ValueError, match=name):
        atari.create_environment(**option)


@pytest.mark.parametrize(
    "make",
    [
        lambda game: atari.create_environment(game=game),
        lambda game: atari.create_vector_environment([0], game),
    ],
)
def test_an_unknown_game_gets_near_names(make):
    with pytest.raises(ValueError, match=r"'Pnog' is no Atari game.*Did you mean.*pong"):
        make("Pnog")


def test_a_vector_environments_metadata_is_its_own():
    ours = atari.create_vector_environment([0])
    ale_py.AtariVectorEnv("pong", 1)  # which writes NextStep into its class
    assert ours.metadata["autoreset_mode"].value == "SameStep"


def test_environments_are_made_by_gin():
    gin.clear_config()
    try:
        gin.parse_config("create_vector_environment.game = 'Boxing'")
        gin.parse_config("human_normalized_score.game = 'Boxing'")
        batch = make_environment_batch("seed_rl.envs.atari:create_vector_environment", [0, 1], 0)
        assert batch.observation_space.shape == (84, 84, 4)
        assert batch.render().shape == (336, 336, 3)
        # The table has 0.1 for random play and 12.1 for a human.
        assert atari.human_normalized_score(raw_return=6.1) == pytest.approx(50.0)
    finally:
        gin.clear_config()


def test_human_normalized_scores_worked_by_hand():
    # Pong: random −20.7, human 14.6. Ms. Pac-Man: random 307.3, human 6951.6.
    assert atari.human_normalized_score("Pong", 21.0) == pytest.approx(100 * 41.7 / 35.3)
    scores = atari.human_normalized_score("ms_pacman", np.array([307.3, 6951.6, 0.0]))
    np.testing.assert_allclose(scores, [0.0, 100.0, -100 * 307.3 / 6644.3])
    assert atari.human_normalized_score("MsPacman", 307.3) == pytest.approx(0.0)
    with pytest.raises(ValueError, match=r"'Tetris' is no game of Atari-57"):
        atari.human_normalized_score("Tetris", 1.0)


def test_scores_need_neither_ale_nor_opencv_nor_tensorflow():
    code = (
        "import sys\n"
        "for name in ('ale_py', 'cv2', 'tensorflow', 'gym'): sys.modules[name] = None\n"
        "import seed_rl.environment, seed_rl.envs.gym_env, seed_rl.envs.memory\n"
        "from seed_rl.envs import atari\n"
        "assert atari.human_normalized_score('Pong', 14.6) == 100.0\n"
        "try: atari.create_environment()\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "pip install -e '.[atari]'" in result.stdout


def test_the_cpp_environments_draw_what_networks_see():
    env = atari.create_vector_environment(env_indices=[0, 1], game="Pong")
    observation, _ = env.reset(seed=3)
    observation, *_ = env.step(np.zeros(2, np.int32))
    frames = env.render()
    assert len(frames) == 2
    for i, frame in enumerate(frames):
        assert frame.shape == (336, 336, 3) and frame.dtype == np.uint8
        for channel in range(3):
            np.testing.assert_array_equal(frame[1::4, 2::4, channel], observation[i, :, :, -1])
    env.close()
