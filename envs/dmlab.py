"""DeepMind Lab (Beattie et al. 2016): first-person 3D levels, with the settings of IMPALA and SEED.

The engine, the module `deepmind_lab`, is in no package registry: docs/dmlab.md says how to build
it. It is imported when the first environment is made.
"""

from __future__ import annotations

import importlib
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from seed_rl.environment_factory import missing_package
from seed_rl.envs import dmlab_levels
from seed_rl.envs.dmlab_cache import LevelCache
from seed_rl.user_error import UserError

__all__ = ["DEFAULT_ACTION_SET", "DmLab", "LevelCache", "create_environment", "instruction_ids"]

# The parts of an engine's action, in order, with their least and largest values.
ACTION_PARTS = (
    ("look right (+) or left (-), pixels a frame", -512, 512),
    ("look down (+) or up (-), pixels a frame", -512, 512),
    ("strafe right (+) or left (-)", -1, 1),
    ("move forward (+) or back (-)", -1, 1),
    ("fire", 0, 1),
    ("jump", 0, 1),
    ("crouch", 0, 1),
)

DEFAULT_ACTION_SET = (
    (0, 0, 0, 1, 0, 0, 0),  # forward
    (0, 0, 0, -1, 0, 0, 0),  # back
    (0, 0, -1, 0, 0, 0, 0),  # strafe left
    (0, 0, 1, 0, 0, 0, 0),  # strafe right
    (-20, 0, 0, 0, 0, 0, 0),  # look left
    (20, 0, 0, 0, 0, 0, 0),  # look right
    (-20, 0, 0, 1, 0, 0, 0),  # look left, moving forward
    (20, 0, 0, 1, 0, 0, 0),  # look right, moving forward
    (0, 0, 0, 0, 1, 0, 0),  # fire
)

# Any number that training does not use: the engine mixes it into the seed of every episode, so that
# none of the mazes of training comes up in an evaluation.
HOLD_OUT_MIXER_SEED = 0x600D5EED

RENDERERS = ("software", "hardware")

_IMAGE = "RGB_INTERLEAVED"
_INSTRUCTION = "INSTR"
_NUM_SEEDS = 2**31  # the engine keeps a seed in a C int


class MapCache(Protocol):
    """What the engine asks for compiled maps, see LevelCache."""

    def fetch(self, key: str, pk3_path: str) -> bool:
        """Writes the map to the file pk3_path; returns whether there is one."""

    def write(self, key: str, pk3_path: str) -> None:
        """Keeps the file pk3_path as the map `key`."""


@gin.configurable("dmlab_environment")
def create_environment(
    env_index: int = 0,
    levels: str | Sequence[str] = dmlab_levels.ALL_LEVELS,
    hold_out_levels: bool = False,
) -> DmLab:
    """Makes a `DmLab`, whose other settings are bound to it by gin, on one of several levels.

    Args:
        env_index: which of the run's environments it is: levels take turns.
        levels: one or several, see `dmlab_levels.expand_levels`; 'dmlab30' is all 30.
        hold_out_levels: play the levels' variants for evaluation, and mazes not seen in training.

    Raises:
        see `DmLab`.
    """
    level = dmlab_levels.level_of_env(env_index, levels)
    if hold_out_levels:
        level = dmlab_levels.evaluation_level(level)
    return DmLab(level, hold_out=hold_out_levels)


@gin.configurable(denylist=["level", "hold_out"])
class DmLab(gymnasium.Env):
    """One level of DeepMind Lab.

    Observations are uint8 RGB [height, width, 3]; with `instructions` a dict of 'image', which is
    that, and 'instruction', int32 [max_words], see `instruction_ids`.

    Every episode ends as terminated, never as truncated, although most levels end by their own
    time limit: the engine shows nothing after the last frame, so there is no observation whose
    value could stand for the rest, and the paper treats the end as one, too. The observation that
    `step` then returns is the one before, a second time. No agent should make use of it.

    Args:
        level: of DMLab-30, 'rooms_watermaze', or the engine's path of any other level.
        width: of an observation, pixels.
        height: of an observation, pixels.
        action_repeat: frames for each action; only the last one is drawn.
        action_set: the engine's actions that the agent chooses from, see ACTION_PARTS.
        hold_out: allow levels that are held out for evaluation, and mix HOLD_OUT_MIXER_SEED into
            all seeds. A level such as 'rooms_collect_good_objects_test' is allowed anyway.
        renderer: 'software', or 'hardware' on a GPU with EGL.
        level_cache: where compiled maps are kept: a folder, see LevelCache, or an object with the
            same two methods; None: every map is compiled.
        dataset_path: a local folder with the pictures of the Psychlab levels that show some.
        instructions: observe the level's instructions in words.
        max_words: the length of an instruction; shorter ones are padded, longer ones cut.
        vocabulary_size: how many numbers there are for words, and the one for padding.
        config: further settings of the engine or the level, such as {'fps': '30'}; they win over
            those above.

    Raises:
        UserError: an argument is wrong, or the engine knows no such level or setting.
        ModuleNotFoundError: the engine is not installed.
    """

    def __init__(
        self,
        level: str,
        width: int = 96,
        height: int = 72,
        action_repeat: int = 4,
        action_set: Sequence[Sequence[int]] = DEFAULT_ACTION_SET,
        hold_out: bool = False,
        renderer: str = "software",
        level_cache: str | MapCache | None = None,
        dataset_path: str = "",
        instructions: bool = False,
        max_words: int = 24,
        vocabulary_size: int = 1000,
        config: Mapping[str, Any] | None = None,
    ):
        if not isinstance(level, str) or not level:
            raise UserError(f"level must be the name of a level, got {level!r}")
        _check_sizes(width=width, height=height, action_repeat=action_repeat, max_words=max_words)
        if vocabulary_size < 2:
            raise UserError(
                f"vocabulary_size must be at least 2, padding and a word, got {vocabulary_size}"
            )
        if renderer not in RENDERERS:
            raise UserError(f"renderer must be one of {RENDERERS}, got {renderer!r}")
        self.level = dmlab_levels.level_name(level)
        self._actions = _engine_actions(action_set)
        self._action_repeat = action_repeat
        self._instructions = instructions
        self._max_words, self._vocabulary_size = max_words, vocabulary_size
        self._dataset_path = dataset_path
        settings = _engine_config(level, width, height, hold_out, dataset_path, config)
        self._lab: Any = self._start_engine(level, settings, renderer, level_cache)
        self._is_closed = False
        self._observation: Any = None
        self._image: np.ndarray | None = None
        # What the engine was told, which `config` may have changed.
        shape = (int(settings["height"]), int(settings["width"]), 3)
        self.observation_space = self._make_observation_space(shape)
        self.action_space = spaces.Discrete(len(self._actions))
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array"

    def _make_observation_space(self, shape: tuple[int, int, int]) -> gymnasium.Space:
        image = spaces.Box(0, 255, shape, np.uint8)
        if not self._instructions:
            return image
        words = spaces.Box(0, self._vocabulary_size - 1, (self._max_words,), np.int32)
        return spaces.Dict({"image": image, "instruction": words})

    def _start_engine(
        self, level: str, settings: dict[str, str], renderer: str, level_cache: Any
    ) -> Any:
        observations = [_IMAGE, _INSTRUCTION] if self._instructions else [_IMAGE]
        cache = _map_cache(level_cache)
        deepmind_lab = _import_engine()
        try:
            return deepmind_lab.Lab(
                dmlab_levels.level_path(level),
                observations,
                config=settings,
                renderer=renderer,
                level_cache=cache,
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"DeepMind Lab refuses the level {level!r} with the settings {settings}: "
                f"{error}.{dmlab_levels.suggestions(level)}{self._dataset_hint()}"
            ) from error

    def _dataset_hint(self) -> str:
        if self._dataset_path or not self.level.startswith("psychlab"):
            return ""
        return (
            " Psychlab levels that show pictures need their folder in DmLab.dataset_path, see "
            "docs/dmlab.md."
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict]:
        """Starts an episode, in a maze that is drawn anew; with a seed, the draws start from it.

        Raises:
            RuntimeError: the environment is closed, or the engine cannot load the level.
        """
        self._check_open()
        super().reset(seed=None if seed is None else int(seed))
        # A Python int: the engine takes no other integer.
        engine_seed = int(self.np_random.integers(_NUM_SEEDS))
        try:
            self._lab.reset(seed=engine_seed)
        except RuntimeError as error:
            hint = self._dataset_hint()
            if not hint:
                raise
            raise RuntimeError(
                f"The level {self.level!r} does not start: {error}.{hint}"
            ) from error
        self._observation = self._observe()
        return self._observation, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        """Repeats one action; the reward is the sum over its frames, fewer if the episode ends.

        Raises:
            RuntimeError: the environment is closed.
            gymnasium.error.ResetNeeded: no episode is running.
            ValueError: there is no such action.
        """
        self._check_open()
        if not self._lab.is_running():
            raise gymnasium.error.ResetNeeded(
                f"No episode of the level {self.level!r} is running: call reset() first, and after "
                "every step that is terminated"
            )
        if not 0 <= action < len(self._actions):
            raise ValueError(f"action must be in 0 … {len(self._actions) - 1}, got {action}")
        reward = self._lab.step(self._actions[action], num_steps=self._action_repeat)
        terminated = not self._lab.is_running()
        if not terminated:  # else there is nothing to observe
            self._observation = self._observe()
        return self._observation, float(reward), terminated, False, {}

    def _observe(self) -> Any:
        """Returns a new observation; drawing it is most of a step's work."""
        seen = self._lab.observations()
        self._image = seen[_IMAGE]
        if not self._instructions:
            return self._image
        ids = instruction_ids(seen[_INSTRUCTION], self._max_words, self._vocabulary_size)
        return {"image": self._image, "instruction": ids}

    def _check_open(self) -> None:
        if self._is_closed:  # the engine would crash, and take the process with it
            raise RuntimeError(
                f"This environment of the level {self.level!r} is closed: make a new one"
            )

    def render(self) -> np.ndarray | None:
        """Returns the image observed last, uint8 [height, width, 3]; None before the first."""
        return self._image

    def close(self) -> None:
        """Frees the engine; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._lab.close()


def instruction_ids(instruction: str, max_words: int, vocabulary_size: int) -> np.ndarray:
    """Returns numbers for the words of a text, for an embedding.

    Args:
        instruction: words that blanks separate; case does not matter.
        max_words: the length of the result; further words are left out.
        vocabulary_size: one more than the largest number.

    Returns:
        int32 [max_words]: a hash of every word in 1 … vocabulary_size - 1, then zeros. It is the
        same in all processes and on all machines; different words may share one.
    """
    ids = np.zeros(max_words, np.int32)
    for i, word in enumerate(instruction.lower().split()[:max_words]):
        ids[i] = 1 + zlib.crc32(word.encode()) % (vocabulary_size - 1)
    return ids


def _map_cache(level_cache: Any) -> MapCache | None:
    # The empty text would be the folder that the process happens to be in.
    if isinstance(level_cache, (str, os.PathLike)) and os.fspath(level_cache):
        return LevelCache(level_cache)
    if level_cache is None or (hasattr(level_cache, "fetch") and hasattr(level_cache, "write")):
        return level_cache
    raise UserError(
        "level_cache must be a folder, an object with the methods fetch and write, or None, got "
        f"{level_cache!r}"
    )


def _import_engine() -> Any:
    try:
        return importlib.import_module("deepmind_lab")
    except ModuleNotFoundError as error:
        if error.name != "deepmind_lab":
            raise missing_package(error, "DeepMind Lab") from error
        raise ModuleNotFoundError(
            "DeepMind Lab needs its engine, the module 'deepmind_lab', which is not installed. No "
            "pip install finds it, as it is in no package registry: build it from its source as "
            "docs/dmlab.md says.",
            name="deepmind_lab",
        ) from error


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {value!r}")


def _engine_config(
    level: str,
    width: int,
    height: int,
    hold_out: bool,
    dataset_path: str,
    config: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Returns the settings as the engine takes them: texts by name."""
    settings: dict[str, Any] = {"width": width, "height": height}
    if dataset_path:
        settings["datasetPath"] = os.path.expanduser(dataset_path)
    if hold_out or dmlab_levels.needs_hold_out_levels(level):
        settings["allowHoldOutLevels"] = True
    if hold_out:
        settings["mixerSeed"] = HOLD_OUT_MIXER_SEED
    return {name: _as_text(value) for name, value in {**settings, **(config or {})}.items()}


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _engine_actions(action_set: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns the actions as the engine takes them, each np.intc [7] and contiguous.

    Made once: the engine reads another layout wrongly, and says nothing.

    Raises:
        UserError: an action has not 7 whole numbers, or one that is out of range.
    """
    if not len(action_set):
        raise UserError("action_set must hold at least one action, got none")
    actions = []
    for action in action_set:
        values = np.asarray(action)
        if values.shape != (len(ACTION_PARTS),) or values.dtype.kind not in "iu":
            parts = "; ".join(f"{name}, {low} … {high}" for name, low, high in ACTION_PARTS)
            raise UserError(
                f"Every action of action_set must be {len(ACTION_PARTS)} whole numbers ({parts}), "
                f"got {action!r}"
            )
        for value, (name, low, high) in zip(values, ACTION_PARTS, strict=True):
            if not low <= value <= high:
                raise UserError(
                    f"{name} must be in {low} … {high}, but action_set has the action {action!r}"
                )
        actions.append(np.array(values, np.intc, order="C"))
    return actions
