"""Google Research Football (Kurach et al. 2020), with the settings of SEED RL.

The engine, the package `gfootball`, is compiled by scripts/install_football.sh, see
docs/football.md. It is imported when the first environment is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import glob
import importlib
import io
import logging
import os
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from seed_rl.old_gym import gymnasium_space
from seed_rl.user_error import UserError

__all__ = ["FootballEnvironment", "PackedBitsObservation", "create_environment", "unpackbits"]

REPRESENTATIONS = ("extracted", "simple115v2", "pixels", "pixels_gray")
REWARDS = ("scoring", "checkpoints")
SMM_SIZES = {"default": (96, 72), "medium": (120, 90), "large": (144, 108)}  # (width, height)

# Settings of the engine that are made here, and what says what they are to be.
_SET_HERE = {
    "level": "football_environment.scenario",
    "players": "this package: an agent plays one player",
    "game_engine_random_seed": "the seed of the run",
    "episode_number": "the seed of the run",
}
_NUM_SEEDS = 2_000_000_000  # as many as the engine draws its own from
# The bits of a word that hold its 16 planes, in order: the first byte is the lower one.
_BITS = (*(1 << bit for bit in range(7, -1, -1)), *(1 << bit for bit in range(15, 7, -1)))


@gin.configurable("football_environment")
def create_environment(
    env_index: int = 0,
    scenario: str = "11_vs_11_hard_stochastic",
    rewards: str = "scoring",
    representation: str = "extracted",
    smm_size: str | Sequence[int] = "default",
    stacked: bool = True,
    pack_bits: bool = True,
    number_of_left_players_agent_controls: int = 1,
    engine_options: Mapping[str, Any] | None = None,
) -> gymnasium.Env:
    """Makes a `FootballEnvironment`, see there for all arguments but these two.

    Args:
        env_index: which of the run's environments it is; they differ in their seeds alone.
        pack_bits: whether 'extracted' observations are packed, see `PackedBitsObservation`. The
            network then has to unpack them: ConvolutionalTorso.preprocess = @unpackbits.

    Raises:
        see `FootballEnvironment`.
    """
    del env_index
    env = FootballEnvironment(
        scenario=scenario,
        rewards=rewards,
        representation=representation,
        smm_size=smm_size,
        stacked=stacked,
        number_of_left_players_agent_controls=number_of_left_players_agent_controls,
        engine_options=engine_options,
    )
    return PackedBitsObservation(env) if pack_bits and representation == "extracted" else env


class FootballEnvironment(gymnasium.Env):
    """One scenario of Google Research Football; the agent plays one player of the left team.

    There are 19 actions. info['raw_reward'] is the change of the goal difference, so that returns
    are reported in goals, whatever is added for learning.

    Every episode ends as terminated, also when its time is up. A match of 3,000 steps is over
    then by the rules of the game, and its score is what counts: nothing follows whose value could
    be added. The paper does the same.

    Args:
        scenario: such as '11_vs_11_hard_stochastic' or 'academy_empty_goal_close'.
        rewards: 'scoring', +1 and -1 for goals, or 'scoring,checkpoints', which adds up to 1 for
            carrying the ball towards the other goal, once an episode.
        representation: 'extracted', minimaps (SMM), uint8 [height, width, 4] of 0 and 255: left
            team, right team, ball, active player; 'simple115v2', a vector of 115 float32; 'pixels'
            or 'pixels_gray', the rendered match, in one environment a process only.
        smm_size: of minimaps, and of pixels: 'default' (96 x 72), 'medium' (120 x 90), 'large'
            (144 x 108), or (width, height).
        stacked: observe the newest 4 observations, the oldest first, along the last axis.
        number_of_left_players_agent_controls: 1. Several are refused: an agent here has one
            observation, one action and one reward a step.
        engine_options: further settings of the engine, for example {'render_resolution_x': 320};
            not its level, players or seed.

    Raises:
        UserError: an argument is wrong, or the engine is installed and does not load.
        ModuleNotFoundError: the engine is not installed.
    """

    def __init__(
        self,
        scenario: str,
        rewards: str = "scoring",
        representation: str = "extracted",
        smm_size: str | Sequence[int] = "default",
        stacked: bool = True,
        number_of_left_players_agent_controls: int = 1,
        engine_options: Mapping[str, Any] | None = None,
    ):
        _check_number_of_players(number_of_left_players_agent_controls)
        _check_known("representation", representation, REPRESENTATIONS)
        rewards, channel_dimensions = _checked_rewards(rewards), _width_and_height(smm_size)
        _check_options(engine_options or {})
        football_env, scenarios = _import_engine()
        # The engine would end the process if it did not know it.
        _check_known("scenario", scenario, _scenario_names(scenarios))
        options = dict(engine_options or {})
        is_drawn = representation.startswith("pixels")
        if is_drawn:
            _load_renderer()
        self._env = football_env.create_environment(
            env_name=scenario,
            stacked=stacked,
            representation=representation,
            rewards=rewards,
            render=is_drawn,
            channel_dimensions=channel_dimensions,
            other_config_options=options,
        )
        self._config = self._env.unwrapped._config
        self._draws_team_order = "reverse_team_processing" not in options
        self.observation_space = gymnasium_space(self._env.observation_space)
        self.action_space = gymnasium_space(self._env.action_space)
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Starts an episode; with a seed, this and those after it depend on nothing before."""
        super().reset(seed=seed)
        self._config.update(self._episode_settings(is_seeded=seed is not None))
        return self._env.reset(), {}

    def _episode_settings(self, is_seeded: bool) -> dict[str, Any]:
        """What makes the next episode reproducible: the engine's own `seed` does nothing."""
        engine_seed = int(self.np_random.integers(_NUM_SEEDS))
        settings: dict[str, Any] = {"game_engine_random_seed": engine_seed}
        if self._draws_team_order and not self._config.ScenarioConfig().deterministic:
            # The engine derives it from its first seed, and keeps it for ever.
            settings["reverse_team_processing"] = bool(engine_seed % 2)
        if is_seeded:
            settings["episode_number"] = 0  # teams take turns at the kick-off
        return settings

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Takes one action, for 10 of the engine's physics steps (0.1 s)."""
        observation, reward, done, info = self._env.step(action)
        info = {**info, "raw_reward": float(info["score_reward"])}
        return observation, float(reward), bool(done), False, info

    def render(self) -> np.ndarray:
        """Returns the match, uint8 RGB; from then on every step draws it, which is slow."""
        _load_renderer()
        return self._env.render(mode="rgb_array")

    def close(self) -> None:
        """Gives the engine back to its pool, for the next environment of this process."""
        self._env.close()


class PackedBitsObservation(gymnasium.ObservationWrapper):
    """Packs 16 planes of 0 and 255 into one uint16, which makes an observation 8 times smaller.

    uint8 [..., C] → uint16 [..., ceil(C / 16)]. Of the 16 channels of a word, channel c < 8 is in
    bit 7 - c and channel c ≥ 8 in bit 23 - c; missing ones are 0. Any number but 0 counts as 255.

    Args:
        env: observes uint8 planes.

    Raises:
        UserError: it observes something else.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or not space.shape:
            raise UserError(
                "PackedBitsObservation packs observations that are uint8 planes, [..., channels]; "
                f"this environment has the observation space {space}"
            )
        *plane_shape, channels = space.shape
        self.observation_space = spaces.Box(0, 65535, (*plane_shape, -(-channels // 16)), np.uint16)
        self._has_half_word = channels % 16 in range(1, 9)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """uint8 [..., C] → uint16 [..., ceil(C / 16)]."""
        packed = np.packbits(observation, axis=-1)
        if self._has_half_word:
            packed = np.concatenate([packed, np.zeros_like(packed[..., :1])], axis=-1)
        return packed.view("<u2")


@gin.configurable
def unpackbits(frame: Any) -> Any:
    """Unpacks what `PackedBitsObservation` packed, on the device that it is called on.

    Args:
        frame: a uint16 tensor [..., N].

    Returns:
        uint8 tensor [..., 16 N] of 0 and 255. Channels that only fill up a word are 0.

    Raises:
        UserError: the frame is not of uint16.
    """
    # Here, since actors import this module and must not import TensorFlow.
    import tensorflow as tf

    frame = tf.convert_to_tensor(frame)
    if frame.dtype != tf.uint16:
        raise UserError(
            f"unpackbits needs packed observations, of uint16; got {frame.dtype.name}. Either let "
            "the environment pack them (football_environment.pack_bits = True), or do not unpack "
            "them (ConvolutionalTorso.preprocess = None)."
        )
    is_set = tf.bitwise.bitwise_and(frame[..., None], tf.constant(_BITS, tf.uint16)) > 0
    planes = tf.cast(is_set, tf.uint8) * 255
    leading, words = tf.shape(frame)[:-1], frame.shape[-1]
    result = tf.reshape(planes, tf.concat([leading, [16 * words]], axis=0))
    return tf.ensure_shape(result, [*frame.shape[:-1], 16 * words])


def _check_number_of_players(number: int) -> None:
    if number != 1:
        raise UserError(
            "number_of_left_players_agent_controls must be 1, got "
            f"{number!r}: an agent here has one observation, one action and one reward a step. To "
            "let a policy play several players, write an environment whose action is a tuple."
        )


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _SET_HERE:
            raise UserError(
                f"engine_options must not hold {name!r}, which is set by {_SET_HERE[name]}"
            )


def _check_known(what: str, name: Any, known: Iterable[str]) -> None:
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"{name!r} is no {what} of football.{hint} There are: {', '.join(names)}")


def _checked_rewards(rewards: str) -> str:
    """Returns the rewards as the engine wants them: without spaces."""
    names = [name.strip() for name in str(rewards).split(",")]
    for name in names:
        _check_known("reward", name, REWARDS)
    if "scoring" not in names:
        raise UserError(
            f"rewards must include 'scoring', got {rewards!r}. Take 'scoring' or "
            "'scoring,checkpoints'."
        )
    return ",".join(names)


def _width_and_height(smm_size: str | Sequence[int]) -> tuple[int, int]:
    if isinstance(smm_size, str):
        _check_known("smm_size", smm_size, SMM_SIZES)
        return SMM_SIZES[smm_size]
    size = tuple(smm_size)
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        raise UserError(
            f"smm_size must be one of {', '.join(SMM_SIZES)}, or (width, height), got {smm_size!r}"
        )
    return size


def _scenario_names(scenarios: Any) -> list[str]:
    """The names of the modules of the engine's package of scenarios, also of those added to it."""
    prefix = f"{scenarios.__name__}."
    found = pkgutil.walk_packages(scenarios.__path__, prefix)
    return [module.name.removeprefix(prefix) for module in found if not module.ispkg]


def _import_engine() -> tuple[Any, Any]:
    """Returns the modules gfootball.env and gfootball.scenarios."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where gym asks to be replaced
            importlib.import_module("gym")
        engine = importlib.import_module("gfootball.env")
        scenarios = importlib.import_module("gfootball.scenarios")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Google Research Football needs the package {error.name!r}, which is not installed. "
            "A plain pip install of the engine, gfootball, does not do: run "
            "scripts/install_football.sh, see docs/football.md.",
            name=error.name,
        ) from error
    except ImportError as error:
        raise UserError(
            f"The engine of Google Research Football is installed and does not load: {error}. It "
            "is compiled for one version of Python and of the distribution: run "
            "scripts/install_football.sh again, see docs/football.md."
        ) from error
    logging.getLogger("absl").addFilter(_is_no_episode_report)
    return engine, scenarios


def _load_renderer() -> None:
    """Loads Mesa's software renderer in such a way that it uses its own LLVM.

    In a process that has imported TensorFlow it would find parts of TensorFlow's, and crash.
    """
    for library in glob.glob("/usr/lib/*/dri/swrast_dri.so"):
        with contextlib.suppress(OSError):  # of another architecture
            ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_DEEPBIND)


def _is_no_episode_report(record: logging.LogRecord) -> bool:
    """Keeps the engine from logging a line for every episode."""
    return record.filename != "football_env_core.py" or record.levelno > logging.INFO
