"""Atari 2600 games through ale-py, with the settings of R2D2 (Kapturowski et al. 2019).

`create_environment` makes a single environment, `create_vector_environment` several of them on
ale-py's C++ `AtariVectorEnv`, which is faster. Where their options agree they give the same frames,
rewards and ends for the same seed and actions. They differ in these points:

- the C++ one resizes with OpenCV's INTER_AREA only, the single one also bilinearly (the paper's);
- the C++ one draws 0 … noop_max no-ops, the single one noop_min … noop_max;
- in the final observation of an episode that is cut by max_episode_frames, the C++ one shows the
  last frames but one.

Both forget the frames before a reset: an episode's first stack holds zeros beside its first frame.
"""

from __future__ import annotations

import csv
import difflib
import functools
import importlib
import importlib.resources
from collections.abc import Iterable, Sequence
from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from seed_rl.environment_factory import missing_package
from seed_rl.user_error import UserError

INTERPOLATIONS = ("bilinear", "area")
_NUM_SEEDS = 2**31  # ALE keeps its seed in a C int


@gin.configurable
def create_environment(
    env_index: int = 0,
    game: str = "Pong",
    full_action_set: bool = True,
    action_repeat: int = 4,
    screen_size: int = 84,
    interpolation: str = "bilinear",
    frame_stack: int = 4,
    noop_min: int = 1,
    noop_max: int = 30,
    sticky_action_probability: float = 0.0,
    max_episode_frames: int = 108_000,
    life_loss_ends_episode: bool = False,
    clip_rewards: bool = False,
) -> gymnasium.Env:
    """Makes one `AtariEnvironment`; see there for everything but env_index.

    Args:
        env_index: which of the run's environments it is; they differ in their seeds alone.
    """
    del env_index
    return AtariEnvironment(
        game=game,
        full_action_set=full_action_set,
        action_repeat=action_repeat,
        screen_size=screen_size,
        interpolation=interpolation,
        frame_stack=frame_stack,
        noop_min=noop_min,
        noop_max=noop_max,
        sticky_action_probability=sticky_action_probability,
        max_episode_frames=max_episode_frames,
        life_loss_ends_episode=life_loss_ends_episode,
        clip_rewards=clip_rewards,
    )


@gin.configurable
def create_vector_environment(
    env_indices: Sequence[int],
    game: str = "Pong",
    full_action_set: bool = True,
    action_repeat: int = 4,
    screen_size: int = 84,
    interpolation: str = "area",
    frame_stack: int = 4,
    noop_min: int = 0,
    noop_max: int = 30,
    sticky_action_probability: float = 0.0,
    max_episode_frames: int = 108_000,
    life_loss_ends_episode: bool = False,
    clip_rewards: bool = False,
    num_threads: int = 1,
) -> VectorEnv:
    """Makes ale-py's C++ environments for all of env_indices, which reset in the same step.

    Args:
        env_indices: which of the run's environments they are.
        num_threads: threads that step them. One, as there usually is an actor a core.
        game: this and all others are as in `AtariEnvironment`, where the C++ ones can do it.

    Raises:
        UserError: an option is out of range, unknown, or not known to the C++ environments.
        ModuleNotFoundError: ale-py is not installed.
    """
    _check_options(
        action_repeat,
        screen_size,
        interpolation,
        frame_stack,
        noop_min,
        noop_max,
        sticky_action_probability,
        max_episode_frames,
    )
    _refuse("interpolation", interpolation, "area")
    _refuse("noop_min", noop_min, 0)
    # The C++ environments would start a new game after every lost life.
    _refuse("life_loss_ends_episode", life_loss_ends_episode, False)
    ale_py = _import("ale_py")
    rom_id = _rom_id(game, ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    env = ale_py.AtariVectorEnv(
        rom_id,
        len(env_indices),
        num_threads=num_threads,
        max_num_frames_per_episode=max_episode_frames,
        repeat_action_probability=sticky_action_probability,
        full_action_space=full_action_set,
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=screen_size,
        img_width=screen_size,
        grayscale=True,
        stack_num=frame_stack,
        frameskip=action_repeat,
        maxpool=action_repeat > 1,
        noop_max=noop_max + 1,  # it draws fewer than this
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,  # done here, where the raw reward can be kept
        use_fire_reset=False,
    )
    return ChannelLastAtari(env, clip_rewards)


def _refuse(option: str, value: Any, only: Any) -> None:
    if value != only:
        raise UserError(
            f"create_vector_environment.{option} can only be {only!r}, as ale-py's C++ "
            f"environments do nothing else; it is {value!r}. Use create_environment for that."
        )


def _check_options(
    action_repeat: int,
    screen_size: int,
    interpolation: str,
    frame_stack: int,
    noop_min: int,
    noop_max: int,
    sticky_action_probability: float,
    max_episode_frames: int,
) -> None:
    for name, value in (
        ("action_repeat", action_repeat),
        ("screen_size", screen_size),
        ("frame_stack", frame_stack),
        ("max_episode_frames", max_episode_frames),
    ):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {value!r}")
    if interpolation not in INTERPOLATIONS:
        raise UserError(f"interpolation must be one of {INTERPOLATIONS}, got {interpolation!r}")
    if not 0 <= noop_min <= noop_max:
        raise UserError(
            f"Expected 0 ≤ noop_min ≤ noop_max, got noop_min={noop_min}, noop_max={noop_max}"
        )
    if not 0.0 <= sticky_action_probability <= 1.0:
        raise UserError(
            f"sticky_action_probability must be in [0, 1], got {sticky_action_probability}"
        )


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_package(error, "Atari") from error


class AtariEnvironment(gymnasium.Env):
    """One Atari game.

    Observations are uint8 [screen_size, screen_size, frame_stack], grey, the newest frame last.

    Args:
        game: 'Pong', 'MsPacman' or 'ms_pacman'.
        full_action_set: all 18 actions, else only those that do something in the game.
        action_repeat: frames for each action, at least 1. From 2 on an observation is the maximum
            over the last two frames, as some games draw their sprites in every other frame only.
        screen_size: height and width of an observation.
        interpolation: 'bilinear' or 'area', how the screen is made smaller.
        frame_stack: how many of the newest observations are shown.
        noop_min: the fewest no-op frames at the start of a game.
        noop_max: the most; their number is drawn evenly.
        sticky_action_probability: of repeating the frame's last action instead (Machado et al.
            2018 recommend 0.25).
        max_episode_frames: an episode is truncated after so many frames, no-ops not counted.
        life_loss_ends_episode: a lost life terminates the episode, and the next one goes on in
            the same game.
        clip_rewards: to [-1, 1]; info['raw_reward'] then has the game's own.

    Raises:
        UserError: the game is unknown, or an option out of range.
        ModuleNotFoundError: ale-py or OpenCV is not installed.
    """

    def __init__(
        self,
        game: str,
        full_action_set: bool,
        action_repeat: int,
        screen_size: int,
        interpolation: str,
        frame_stack: int,
        noop_min: int,
        noop_max: int,
        sticky_action_probability: float,
        max_episode_frames: int,
        life_loss_ends_episode: bool,
        clip_rewards: bool,
    ):
        _check_options(
            action_repeat,
            screen_size,
            interpolation,
            frame_stack,
            noop_min,
            noop_max,
            sticky_action_probability,
            max_episode_frames,
        )
        ale_py, cv2 = _import("ale_py"), _import("cv2")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._rom_path = ale_py.roms.get_rom_path(_rom_id(game, ale_py))
        self._ale = ale_py.ALEInterface()
        self._ale.setFloat("repeat_action_probability", sticky_action_probability)
        self._rng = self._seed(int(np.random.default_rng().integers(_NUM_SEEDS)))
        ale = self._ale
        self._actions = ale.getLegalActionSet() if full_action_set else ale.getMinimalActionSet()
        self._noop = ale_py.Action.NOOP
        self._resize = functools.partial(
            cv2.resize,
            dsize=(screen_size, screen_size),
            interpolation=cv2.INTER_LINEAR if interpolation == "bilinear" else cv2.INTER_AREA,
        )
        self._action_repeat = action_repeat
        self._noop_min, self._noop_max = noop_min, noop_max
        self._max_episode_frames = max_episode_frames
        self._life_loss_ends_episode = life_loss_ends_episode
        self._clip_rewards = clip_rewards
        self._game_goes_on = False
        self._lives = 0
        self._episode_frames = 0
        shape = (screen_size, screen_size, frame_stack)
        self._stack = np.zeros(shape, np.uint8)
        self._screens = np.zeros((2, *ale.getScreenDims()), np.uint8)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.action_space = spaces.Discrete(len(self._actions))
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array"

    def _seed(self, seed: int) -> np.random.RandomState:
        """Loads the game with a seed; returns the generator of its no-ops."""
        self._ale.setInt("random_seed", seed)
        self._ale.loadROM(self._rom_path)
        # RandomState(seed) is the generator std::mt19937(seed) of the C++ environments.
        return np.random.RandomState(seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Starts an episode; with a seed, in a newly loaded game."""
        super().reset(seed=seed)
        if seed is not None:
            self._rng = self._seed(seed % _NUM_SEEDS)
        if seed is not None or not self._game_goes_on:
            self._start_game()
        self._game_goes_on = False
        self._episode_frames = 0
        self._lives = self._ale.lives()
        self._ale.getScreenGrayscale(self._screens[0])
        self._stack = np.zeros_like(self._stack)
        return self._observe(self._screens[0]), {"lives": self._lives}

    def _start_game(self) -> None:
        self._ale.reset_game()
        for _ in range(draw_uniformly(self._rng, self._noop_min, self._noop_max)):
            self._ale.act(self._noop)
            if self._ale.game_over():
                self._ale.reset_game()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Repeats one action, for fewer frames if the episode ends among them."""
        ale_action = self._actions[int(action)]
        num_frames = min(self._action_repeat, self._max_episode_frames - self._episode_frames)
        raw_reward = 0.0
        terminated = False
        last_screens = []
        for frame in range(num_frames):
            raw_reward += self._ale.act(ale_action)
            terminated = self._has_ended()
            if terminated or frame >= num_frames - 2:
                screen = self._screens[frame % 2]
                self._ale.getScreenGrayscale(screen)
                last_screens.append(screen)
            if terminated:
                break
        self._episode_frames += frame + 1
        self._lives = self._ale.lives()
        self._game_goes_on = terminated and not self._ale.game_over()
        truncated = not terminated and self._episode_frames >= self._max_episode_frames
        info = {"lives": self._lives, "raw_reward": raw_reward}
        reward = min(1.0, max(-1.0, raw_reward)) if self._clip_rewards else raw_reward
        observation = self._observe(functools.reduce(np.maximum, last_screens))
        return observation, reward, terminated, truncated, info

    def _has_ended(self) -> bool:
        if self._ale.game_over():
            return True
        return self._life_loss_ends_episode and self._ale.lives() < self._lives

    def _observe(self, screen: np.ndarray) -> np.ndarray:
        """Returns the stack with `screen` as its newest observation."""
        stack = np.empty_like(self._stack)
        stack[..., :-1] = self._stack[..., 1:]
        stack[..., -1] = self._resize(screen)
        self._stack = stack
        return stack

    def render(self) -> np.ndarray:
        """Returns the whole screen, uint8 RGB [210, 160, 3]."""
        return self._ale.getScreenRGB()


def draw_uniformly(rng: np.random.RandomState, low: int, high: int) -> int:
    """Draws one of low … high as the C++ environments do, so that equal seeds give equal games.

    This is the multiplication method of Lemire (2019), "Fast Random Integer Generation in an
    Interval", which libstdc++ uses for std::uniform_int_distribution on 32-bit generators.
    """
    count = high - low + 1
    while True:
        product = int(rng.randint(0, 2**32, dtype=np.uint32)) * count
        if product % 2**32 >= 2**32 % count:
            return low + product // 2**32


class ChannelLastAtari(VectorWrapper):
    """ale-py's `AtariVectorEnv` with the frames of a stack last, as the networks want them.

    Args:
        env: an AtariVectorEnv with grey observations and unclipped rewards.
        clip_rewards: to [-1, 1]; infos['raw_reward'] then has the game's own.
    """

    def __init__(self, env: VectorEnv, clip_rewards: bool):
        super().__init__(env)
        # The class shares one dictionary among all of its objects.
        self.metadata = dict(env.metadata)
        frame_stack, height, width = env.single_observation_space.shape  # type: ignore[misc]
        shape = (height, width, frame_stack)
        self.single_observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = spaces.Box(0, 255, (env.num_envs, *shape), np.uint8)
        self._clip_rewards = clip_rewards
        self._observation = np.zeros(self.observation_space.shape, np.uint8)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts all games; seed is None, an int, or one for each environment."""
        if seed is not None:
            several = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
            seed = np.asarray(several) % _NUM_SEEDS
        observation, infos = self.env.reset(seed=seed, options=options)
        self._observation = _channel_last(observation)
        return self._observation, infos

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict]:
        """See VectorEnv; infos['final_obs'] has the final observations where episodes ended."""
        observation, rewards, terminations, truncations, infos = self.env.step(actions)
        if "final_obs" in infos:
            infos["final_obs"] = _channel_last(infos["final_obs"])
        rewards = rewards.astype(np.float32)
        infos["raw_reward"] = rewards
        if self._clip_rewards:
            rewards = np.clip(rewards, -1.0, 1.0)
        self._observation = _channel_last(observation)
        return self._observation, rewards, terminations, truncations, infos

    def render(self) -> Any:
        """Returns the newest frame of each game as networks see it, four times enlarged, in RGB.

        The C++ environments draw nothing else.
        """
        newest = self._observation[..., -1].repeat(4, axis=1).repeat(4, axis=2)
        return tuple(np.repeat(frame[..., None], 3, axis=-1) for frame in newest)


def _channel_last(stacked: np.ndarray) -> np.ndarray:
    """uint8 [n, stack, height, width] → [n, height, width, stack]."""
    num_envs, frame_stack, height, width = stacked.shape
    result = np.empty((num_envs, height, width, frame_stack), stacked.dtype)
    for k in range(frame_stack):  # several times faster than numpy's copy of a transposed view
        result[..., k] = stacked[:, k]
    return result


def _rom_id(game: str, ale_py: Any) -> str:
    return _known_game(game, ale_py.roms.get_all_rom_ids(), "Atari game that ale-py has")


def _known_game(game: str, known: Iterable[str], what: str) -> str:
    """Returns the one of `known` that is `game` but for case and underscores."""

    def plain(name: str) -> str:
        return name.replace("_", "").lower()

    names = {plain(name): name for name in known}
    if plain(game) in names:
        return names[plain(game)]
    near = difflib.get_close_matches(plain(game), names, n=5, cutoff=0.5)
    hint = f" Did you mean {', '.join(names[n] for n in near)}?" if near else ""
    raise UserError(f"{game!r} is no {what}.{hint}")


@functools.cache
def _scores() -> dict[str, tuple[float, float]]:
    """(random, human) score of each of the 57 games."""
    table = importlib.resources.files("seed_rl.envs") / "data" / "atari57_scores.csv"
    with table.open(encoding="utf-8") as file:
        return {
            row["game"]: (float(row["random"]), float(row["human"])) for row in csv.DictReader(file)
        }


@gin.configurable
def human_normalized_score(game: str, raw_return: Any) -> Any:
    """Returns the score in percent: 0 is random play, 100 a human's.

    Args:
        game: one of the 57 games with known scores, 'MsPacman' or 'ms_pacman'.
        raw_return: undiscounted, unclipped return of an episode; a number or an array of them.

    Raises:
        UserError: the game is not one of the 57.
    """
    random, human = _scores()[_known_game(game, _scores(), "game of Atari-57")]
    return (raw_return - random) / (human - random) * 100.0
