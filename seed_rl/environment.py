"""Environments as the actor loop drives them: a batch, whatever it is made of.

    batch = make_environment_batch("my_package.my_module:make", env_indices, seed)
    send(batch.reset())
    while True:
        for rows in batch.step(actions):
            actions[rows.indices] = send(rows)

`structures.EnvOutput` says what a learner is told when an episode ends. An environment that is
single, or resets itself in the same step, in the next one, or not at all gives the same rows.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from seed_rl.environment_factory import load_factory, make_environments, make_single
from seed_rl.rewards import UnusableNumberError, as_number
from seed_rl.spaces import (
    ActionTranslator,
    ObservationError,
    ObservationLayout,
    UnsupportedSpaceError,
    action_specs,
    observation_specs,
)
from seed_rl.structures import EnvOutput
from seed_rl.user_error import UserError

__all__ = [
    "EnvironmentBatch",
    "EnvironmentFailedError",
    "ObservationError",
    "Rows",
    "UnsupportedSpaceError",
    "action_specs",
    "make_environment_batch",
    "observation_specs",
]

logger = logging.getLogger(__name__)

# A reward of a larger magnitude is taken for a fault of the environment, although 32 bits would
# hold it: squared in a loss, and summed over a batch, it would drown everything else. Scores of
# known games, and their sums over an episode, stay far below.
MAX_ABS_REWARD = 1e9


class EnvironmentFailedError(RuntimeError):
    """An environment failed too many times in a row; the last exception is the cause.

    It fails when it raises, when it gives a reward or an observation that is not finite, a reward
    beyond MAX_ABS_REWARD, or, after observations that did, one that does not fit its space.
    """


class Rows(NamedTuple):
    """The results of some environments, to be sent together."""

    indices: np.ndarray  # int32 [n], which of the batch's environments, each at most once
    env_outputs: EnvOutput  # every array [n, …]
    raw_rewards: np.ndarray  # float32 [n], before any scaling or clipping
    torn: np.ndarray  # bool [n], a failure ended the episode before: nothing it did counts


class EnvironmentBatch(abc.ABC):
    """Some environments that are stepped together.

    Attributes:
        num_envs: how many.
        env_indices: tuple of their indices among the environments of the whole run.
        observation_space: of one environment.
        action_space: of one environment as an agent sees it, see `spaces.canonical_action_space`.
    """

    def __init__(
        self,
        env_indices: Sequence[int],
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        max_failures: int,
    ):
        self.env_indices = tuple(int(i) for i in env_indices)
        self.num_envs = len(self.env_indices)
        self.observation_space = observation_space
        self._layout = ObservationLayout(observation_space)
        self._translate = ActionTranslator(action_space)
        self.action_space = self._translate.canonical
        self._failure_log = _FailureLog(max_failures)
        self._has_fitted = False  # whether an observation has ever fitted the observation space
        self._episode_steps = np.zeros(self.num_envs, np.int32)
        self._torn = np.zeros(self.num_envs, bool)  # since the last rows of all environments
        self._everyone = np.arange(self.num_envs, dtype=np.int32)
        self._everyone.setflags(write=False)

    @abc.abstractmethod
    def reset(self) -> Rows:
        """Starts an episode everywhere: one row an environment, with reward 0 and done False.

        The first call seeds environment i with the seed + env_indices[i], later ones do not.

        Raises:
            EnvironmentFailedError: an environment cannot be started.
            ObservationError: the first observation does not fit the observation space.
        """

    @abc.abstractmethod
    def step(self, actions: Any) -> list[Rows]:
        """Takes one action in every environment.

        Args:
            actions: nest like `action_space`, every array [num_envs, …]. Where an environment was
                left out of the rows before, or was in several of them, its last answer counts.

        Returns:
            The rows to be sent, in this order; never none at all. Their arrays hold until the
            next call.

        Raises:
            EnvironmentFailedError: an environment failed max_failures times in a row.
            ValueError: the actions do not fit the action space.
        """

    @abc.abstractmethod
    def render(self) -> Any:
        """Returns a frame of the first environment, None where it cannot be drawn."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes every environment; a failure to do so is only logged."""

    def _is_hopeless(self, error: Exception) -> bool:
        """Whether the environment is not what it says it is, which no fresh start would mend."""
        return isinstance(error, ObservationError) and not self._has_fitted

    def _first_rows(self, leaves: list[np.ndarray]) -> Rows:
        """The rows of episodes that begin without one before them."""
        self._episode_steps[:] = 0
        nothing = np.zeros(self.num_envs, np.float32)
        no = np.zeros(self.num_envs, bool)
        return self._all_rows(nothing, nothing.copy(), no, no.copy(), leaves)

    def _all_rows(
        self,
        rewards: np.ndarray,
        raw_rewards: np.ndarray,
        done: np.ndarray,
        abandoned: np.ndarray,
        leaves: list[np.ndarray],
    ) -> Rows:
        """A row for every environment; `_episode_steps` must already be those of the rows."""
        observation = self._layout.nest(leaves)
        steps = self._episode_steps.copy()
        output = EnvOutput(rewards, done, observation, abandoned, steps)
        torn, self._torn = self._torn, np.zeros(self.num_envs, bool)
        return Rows(self._everyone, output, raw_rewards, torn)

    def _ordinary_rows(
        self,
        indices: np.ndarray,
        rewards: np.ndarray,
        raw_rewards: np.ndarray,
        leaves: list[np.ndarray],
    ) -> Rows:
        """Rows of environments whose episode goes on, or shows its final observation."""
        no = np.zeros(len(indices), bool)
        output = EnvOutput(
            rewards, no, self._layout.nest(leaves), no.copy(), self._episode_steps[indices]
        )
        return Rows(indices, output, raw_rewards, no.copy())


class SingleEnvironments(EnvironmentBatch):
    """Environments that are stepped one after the other.

    Args:
        factory: makes one environment, see `environment_factory`.
        envs: what it made for every one of env_indices.
        env_indices: see EnvironmentBatch.
        seed: see `EnvironmentBatch.reset`.
        max_failures: failures in a row that end the run, for each environment.
    """

    def __init__(
        self,
        factory: Callable,
        envs: Sequence[gymnasium.Env],
        env_indices: Sequence[int],
        seed: int,
        max_failures: int,
    ):
        super().__init__(env_indices, envs[0].observation_space, envs[0].action_space, max_failures)
        self._factory = factory
        self._envs = list(envs)
        self._failures = [0] * self.num_envs
        self._seeds: list[int | None] = [int(seed) + index for index in self.env_indices]
        for env, index in zip(envs, self.env_indices, strict=True):
            self._check_alike(env, index)

    def _check_alike(self, env: gymnasium.Env, env_index: int) -> None:
        alike = observation_specs(env.observation_space) == observation_specs(
            self.observation_space
        )
        # The translation of the first environment's actions serves all of them.
        if not alike or env.action_space != self._envs[0].action_space:
            raise UnsupportedSpaceError(
                f"All environments must have the same spaces. Environment {env_index} has "
                f"{env.observation_space} and {env.action_space}, environment "
                f"{self.env_indices[0]} has {self._envs[0].observation_space} and "
                f"{self._envs[0].action_space}."
            )

    def reset(self) -> Rows:
        leaves = self._layout.empty(self.num_envs)
        for i in range(self.num_envs):
            self._begin_episode(i, leaves)
        return self._first_rows(leaves)

    def step(self, actions: Any) -> list[Rows]:
        translated = self._translate(actions, self.num_envs)
        leaves = self._layout.empty(self.num_envs)
        rewards = np.zeros(self.num_envs, np.float32)
        raw_rewards = np.zeros(self.num_envs, np.float32)
        done = np.zeros(self.num_envs, bool)
        abandoned = np.zeros(self.num_envs, bool)
        cut: list[int] = []
        final: list[list[np.ndarray]] = []
        self._episode_steps += 1
        for i, action in enumerate(self._translate.split(translated, self.num_envs)):
            try:
                observation, reward, terminated, truncated, info = _five_values(
                    self._envs[i].step(action)
                )
                rewards[i] = as_number(reward)
                raw_rewards[i] = as_number(info.get("raw_reward", reward), "raw reward")
                # Nobody is shown the observation in which an episode ends by itself.
                values = [] if terminated else self._layout.leaves(observation)
                _check_rewards(rewards[i], raw_rewards[i])
                _check_finite(values)
            except Exception as error:
                rewards[i] = raw_rewards[i] = 0.0
                done[i] = abandoned[i] = self._torn[i] = True
                self._restart(i, error, leaves)
                continue
            self._failures[i] = 0
            if terminated:
                done[i] = True
                self._begin_episode(i, leaves)
            elif truncated:
                done[i] = abandoned[i] = True
                cut.append(i)
                # Copied now: an environment may reuse its observation in the coming reset.
                final.append([value.copy() for value in values])
                self._begin_episode(i, leaves)
            else:
                _put(leaves, i, values)
        return self._rows(rewards, raw_rewards, done, abandoned, leaves, cut, final)

    def _rows(
        self,
        rewards: np.ndarray,
        raw_rewards: np.ndarray,
        done: np.ndarray,
        abandoned: np.ndarray,
        leaves: list[np.ndarray],
        cut: list[int],
        final: list[list[np.ndarray]],
    ) -> list[Rows]:
        rows = []
        if cut:
            indices = np.array(cut, np.int32)
            final_leaves = [np.stack(column) for column in zip(*final, strict=True)]
            rows.append(
                self._ordinary_rows(indices, rewards[indices], raw_rewards[indices], final_leaves)
            )
            rewards[indices] = 0.0
            raw_rewards[indices] = 0.0
        self._episode_steps[done] = 0
        rows.append(self._all_rows(rewards, raw_rewards, done, abandoned, leaves))
        return rows

    def _write(self, i: int, observation: Any, leaves: list[np.ndarray]) -> None:
        values = self._layout.leaves(observation)
        self._has_fitted = True
        _check_finite(values)
        _put(leaves, i, values)

    def _begin_episode(self, i: int, leaves: list[np.ndarray]) -> None:
        """Resets environment i and writes its first observation."""
        seed, self._seeds[i] = self._seeds[i], None
        try:
            observation = _first_observation(self._envs[i].reset(seed=seed))
            self._write(i, observation, leaves)
        except Exception as error:
            if self._is_hopeless(error):
                raise
            self._restart(i, error, leaves)

    def _restart(self, i: int, error: Exception, leaves: list[np.ndarray]) -> None:
        """Makes environment i anew until it starts, and writes its first observation."""
        env_index = self.env_indices[i]
        while True:
            self._failures[i] += 1
            self._failure_log.note(f"Environment {env_index}", self._failures[i], error)
            _close(self._envs[i], f"environment {env_index}")
            try:
                self._envs[i] = make_single(self._factory, env_index)
                observation = _first_observation(self._envs[i].reset())
                self._write(i, observation, leaves)
            except Exception as again:
                error = again
                continue
            return

    def render(self) -> Any:
        return _render(self._envs[0])

    def close(self) -> None:
        for env, env_index in zip(self._envs, self.env_indices, strict=True):
            _close(env, f"environment {env_index}")


class VectorEnvironments(EnvironmentBatch):
    """A `gymnasium.vector.VectorEnv`, in any of its autoreset modes.

    Args:
        factory: makes the VectorEnv, see `environment_factory`.
        env: what it made.
        env_indices: see EnvironmentBatch.
        seed: see `EnvironmentBatch.reset`.
        max_failures: failures in a row that end the run.
    """

    def __init__(
        self,
        factory: Callable,
        env: VectorEnv,
        env_indices: Sequence[int],
        seed: int,
        max_failures: int,
    ):
        super().__init__(
            env_indices, env.single_observation_space, env.single_action_space, max_failures
        )
        self._factory = factory
        self._env = env
        self._mode = _autoreset_mode(env)
        self._seeds: list[int] | None = [int(seed) + index for index in self.env_indices]
        self._failures = 0
        # NEXT_STEP: which environments spend the next step on their reset, and what is told then.
        self._resetting = np.zeros(self.num_envs, bool)
        self._held = _Held.none(self.num_envs)

    def reset(self) -> Rows:
        seeds, self._seeds = self._seeds, None
        try:
            leaves = self._checked(_seeded_reset(self._env, seeds))
        except Exception as error:
            if self._is_hopeless(error):
                raise
            leaves = self._restart(error)
        self._resetting = np.zeros(self.num_envs, bool)
        return self._first_rows(leaves)

    def step(self, actions: Any) -> list[Rows]:
        translated = self._translate(actions, self.num_envs)
        rows = self._step(translated)
        while not rows:  # every environment ended: nothing to tell before all of them are reset
            rows = self._step(translated)
        return rows

    def _step(self, actions: Any) -> list[Rows]:
        try:
            observation, rewards, terminations, truncations, infos = _five_values(
                self._env.step(actions)
            )
            step = _VectorStep(
                self._layout.leaves(observation, (self.num_envs,)),
                np.array(rewards, np.float32),
                _raw_rewards(rewards, infos),
                np.asarray(terminations, bool),
                np.asarray(truncations, bool),
            )
            self._check_step(step)
        except Exception as error:
            return [self._torn_rows(error)]
        self._failures = 0
        if self._mode == AutoresetMode.NEXT_STEP:
            return self._next_step_rows(step)
        self._episode_steps += 1
        if not step.ended.any():
            return [self._running_rows(step)]
        if self._mode == AutoresetMode.SAME_STEP:
            return self._ended_rows(step, step.leaves, _final_leaves(self._layout, step, infos))
        return self._reset_ended(step)

    def _running_rows(self, step: _VectorStep) -> Rows:
        no = np.zeros(self.num_envs, bool)
        return self._all_rows(step.rewards, step.raw_rewards, no, no.copy(), step.leaves)

    def _ended_rows(
        self, step: _VectorStep, leaves: list[np.ndarray], final_leaves: list[np.ndarray]
    ) -> list[Rows]:
        """The rows of a step after which some episodes have ended and others begun.

        Args:
            step: what the environment returned.
            leaves: the observations to go on from.
            final_leaves: the final observations of the episodes that were cut, only theirs.
        """
        rows = []
        cut = step.cut
        if cut.any():
            indices = np.flatnonzero(cut).astype(np.int32)
            rows.append(
                self._ordinary_rows(
                    indices, step.rewards[indices], step.raw_rewards[indices], final_leaves
                )
            )
            step.rewards[indices] = 0.0
            step.raw_rewards[indices] = 0.0
        self._episode_steps[step.ended] = 0
        rows.append(self._all_rows(step.rewards, step.raw_rewards, step.ended, cut, leaves))
        return rows

    def _reset_ended(self, step: _VectorStep) -> list[Rows]:
        """Resets the environments that ended, for a VectorEnv that does not do it itself."""
        ended = step.ended
        final_leaves = [leaf[step.cut] for leaf in step.leaves]
        # Copied: the environment may write the first observations over the ones it gave.
        leaves = [leaf.copy() for leaf in step.leaves]
        try:
            result = self._env.reset(options={"reset_mask": ended.copy()})
            first = self._checked(_first_observation(result))
        except Exception as error:
            rows = self._ended_rows(step, self._restart(error), final_leaves)
            self._tear(rows[-1], ~ended)
            return rows
        for leaf, value in zip(leaves, first, strict=True):
            leaf[ended] = value[ended]
        return self._ended_rows(step, leaves, final_leaves)

    def _tear(self, rows: Rows, torn: np.ndarray) -> None:
        """Turns rows of all environments, where `torn`, into those of an abandoned episode."""
        output = rows.env_outputs
        rows.torn[torn] = True
        output.reward[torn] = 0.0
        rows.raw_rewards[torn] = 0.0
        output.done[torn] = True
        output.abandoned[torn] = True
        output.episode_step[torn] = 0
        self._episode_steps[torn] = 0

    def _next_step_rows(self, step: _VectorStep) -> list[Rows]:
        """The rows of a VectorEnv that spends the step after an episode's end on the reset."""
        resetting, self._resetting = self._resetting, step.ended & ~self._resetting
        self._episode_steps += 1
        if resetting.any():
            self._episode_steps[resetting] = 0
            step.rewards[resetting] = self._held.rewards[resetting]
            step.raw_rewards[resetting] = self._held.raw_rewards[resetting]
        abandoned = resetting & self._held.abandoned
        self._hold(step, self._resetting)
        leaves = step.leaves
        held_back = self._resetting & step.terminations
        if not held_back.any():
            return [self._all_rows(step.rewards, step.raw_rewards, resetting, abandoned, leaves)]
        indices = np.flatnonzero(~held_back).astype(np.int32)
        if not len(indices):
            return []
        output = EnvOutput(
            step.rewards[indices],
            resetting[indices],
            self._layout.nest([leaf[indices] for leaf in leaves]),
            abandoned[indices],
            self._episode_steps[indices],
        )
        return [Rows(indices, output, step.raw_rewards[indices], np.zeros(len(indices), bool))]

    def _hold(self, step: _VectorStep, ended: np.ndarray) -> None:
        """Keeps what is told of the ended episodes once their successors have begun."""
        if not ended.any():
            return
        finished = ended & step.terminations
        self._held = _Held(
            np.where(finished, step.rewards, np.float32(0)),
            np.where(finished, step.raw_rewards, np.float32(0)),
            ended & ~finished,
        )

    def _torn_rows(self, error: Exception) -> Rows:
        """Starts all environments anew; every episode is abandoned that had not ended before."""
        leaves = self._restart(error)
        finished = self._resetting & ~self._held.abandoned
        rewards = np.where(finished, self._held.rewards, np.float32(0))
        raw_rewards = np.where(finished, self._held.raw_rewards, np.float32(0))
        self._torn = ~self._resetting  # the others had ended, or been cut, before the failure
        self._resetting = np.zeros(self.num_envs, bool)
        self._episode_steps[:] = 0
        done = np.ones(self.num_envs, bool)
        return self._all_rows(rewards, raw_rewards, done, ~finished, leaves)

    def _check_step(self, step: _VectorStep) -> None:
        """Raises ValueError; passes over final observations, which nobody is shown."""
        for name in ("rewards", "raw_rewards", "terminations", "truncations"):
            shape = getattr(step, name).shape
            if shape != (self.num_envs,):
                raise ValueError(f"the {name} have shape {shape}, expected ({self.num_envs},)")
        shown = np.ones(self.num_envs, bool)
        if self._mode != AutoresetMode.SAME_STEP:
            shown = ~step.terminations
        floats = [leaf for leaf in step.leaves if leaf.dtype.kind == "f"]
        _check_rewards(step.rewards, step.raw_rewards)
        _check_finite([leaf[shown] for leaf in floats])

    def _checked(self, observation: Any) -> list[np.ndarray]:
        leaves = self._layout.leaves(observation, (self.num_envs,))
        self._has_fitted = True
        _check_finite(leaves)
        return leaves

    def _restart(self, error: Exception) -> list[np.ndarray]:
        """Makes the VectorEnv anew until it starts; returns the leaves of its observations."""
        who = f"The VectorEnv of environments {self.env_indices[0]} … {self.env_indices[-1]}"
        while True:
            self._failures += 1
            self._failure_log.note(who, self._failures, error)
            _close(self._env, who)
            try:
                env = make_environments(self._factory, self.env_indices)
                assert isinstance(env, VectorEnv)
                self._env = env
                return self._checked(_seeded_reset(self._env, None))
            except Exception as again:
                error = again

    def render(self) -> Any:
        frames = _render(self._env)
        return frames[0] if isinstance(frames, (tuple, list)) and frames else frames

    def close(self) -> None:
        _close(self._env, f"the VectorEnv of environments {self.env_indices}")


class _Held(NamedTuple):
    """What is told of ended episodes one step later, [num_envs]."""

    rewards: np.ndarray
    raw_rewards: np.ndarray
    abandoned: np.ndarray

    @classmethod
    def none(cls, num_envs: int) -> _Held:
        nothing = np.zeros(num_envs, np.float32)
        return cls(nothing, nothing.copy(), np.zeros(num_envs, bool))


class _VectorStep(NamedTuple):
    """What one step of a VectorEnv returned, [num_envs, …]."""

    leaves: list[np.ndarray]
    rewards: np.ndarray
    raw_rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray

    @property
    def ended(self) -> np.ndarray:
        return self.terminations | self.truncations

    @property
    def cut(self) -> np.ndarray:
        """Where the episode was cut while it could have gone on."""
        return self.truncations & ~self.terminations


def _autoreset_mode(env: VectorEnv) -> AutoresetMode:
    # gymnasium's own default where the environment does not say.
    mode = (env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP)
    try:
        return AutoresetMode(mode)
    except ValueError:
        if isinstance(mode, str) and mode in AutoresetMode.__members__:
            return AutoresetMode[mode]
        raise UserError(
            f"The VectorEnv has the autoreset_mode {mode!r} in its metadata, which is none of "
            f"{', '.join(map(str, AutoresetMode))}."
        ) from None


def _seeded_reset(env: Any, seeds: list[int] | None) -> Any:
    """Resets every environment of a VectorEnv; returns the observations."""
    if seeds is None:
        return _first_observation(env.reset())
    try:
        result = env.reset(seed=seeds)
    except TypeError:  # ale-py's takes an array, and no list
        result = env.reset(seed=np.array(seeds))
    return _first_observation(result)


def _raw_rewards(rewards: Any, infos: dict) -> np.ndarray:
    """float32 [num_envs], from the infos where they have them."""
    raw = np.array(rewards, np.float32)
    for source in (infos, infos.get("final_info")):
        if isinstance(source, dict) and "raw_reward" in source:
            known = np.asarray(source.get("_raw_reward", np.ones(len(raw), bool)), bool)
            raw[known] = np.asarray(source["raw_reward"])[known]
    return raw


def _final_leaves(layout: ObservationLayout, step: _VectorStep, infos: dict) -> list[np.ndarray]:
    """The final observations of the cut episodes of a VectorEnv that resets in the same step."""
    indices = np.flatnonzero(step.cut)
    if not len(indices):
        return []
    final = infos.get("final_obs")
    if final is None:
        raise ObservationError(
            "A VectorEnv that resets in the same step must give the final observation of a "
            "truncated episode in infos['final_obs'], and did not."
        )
    if isinstance(final, np.ndarray) and final.dtype == object:
        each = [layout.leaves(final[i]) for i in indices]
        return [np.stack(column) for column in zip(*each, strict=True)]
    return [leaf[indices] for leaf in layout.leaves(final, step.terminations.shape)]


def _first_observation(result: Any) -> Any:
    """Returns the observation that `reset` returned; raises ValueError if it returned no pair."""
    if isinstance(result, tuple) and len(result) == 2 and hasattr(result[1], "get"):
        return result[0]
    raise ValueError(
        f"reset() returned {_kind_of(result)}, expected a tuple of (observation, info), where info "
        f"is a dict. {_OLD_API}"
    )


def _five_values(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Returns what `step` returned; raises ValueError if it is something else than it has to be."""
    if isinstance(result, tuple) and len(result) == 5 and hasattr(result[4], "get"):
        return result
    raise ValueError(
        f"step() returned {_kind_of(result)}, expected a tuple of (observation, reward, "
        f"terminated, truncated, info), where info is a dict. {_OLD_API}"
    )


_OLD_API = "A class with the API of the old gym must not derive from gymnasium's classes."


def _kind_of(result: Any) -> str:
    if not isinstance(result, tuple):
        return f"a {type(result).__name__}"
    return f"a tuple of {', '.join(type(value).__name__ for value in result)}"


def _check_rewards(rewards: Any, raw_rewards: Any) -> None:
    """Raises UnusableNumberError for rewards (of any shape) beyond all measure, or not finite."""
    for name, value in (("reward", rewards), ("raw reward", raw_rewards)):
        largest = float(np.max(np.abs(value)))
        if not np.isfinite(largest):
            raise UnusableNumberError(
                f"the {name} is not finite (NaN, infinite, or too large for 32 bits)"
            )
        if largest > MAX_ABS_REWARD:
            raise UnusableNumberError(
                f"the {name} has a magnitude of {largest:.6g}, and more than {MAX_ABS_REWARD:g} is "
                "taken for a fault; if it is meant, scale the rewards"
            )


def _check_finite(values: Sequence[np.ndarray]) -> None:
    """Raises UnusableNumberError for NaN or infinity: one would spoil every parameter."""
    for value in values:
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise UnusableNumberError(
                "the observation is not finite (NaN, infinite, or too large for its dtype)"
            )


def _put(leaves: list[np.ndarray], i: int, values: list[np.ndarray]) -> None:
    for leaf, value in zip(leaves, values, strict=True):
        leaf[i] = value


class _FailureLog:
    """Tells of failures: each in one line, and where it came from once."""

    def __init__(self, max_failures: int):
        self._max_failures = max_failures
        self._shown: set[tuple[type, str, int]] = set()  # places of which a traceback was logged

    def note(self, who: str, failures: int, error: Exception) -> None:
        """Logs a failure, or raises EnvironmentFailedError if that was one too many.

        Args:
            who: the environment.
            failures: how many this makes in a row.
            error: what it raised.
        """
        if failures >= self._max_failures:
            raise EnvironmentFailedError(
                f"{who} failed {failures} times in a row, which is as often as is allowed. The "
                f"last failure was {type(error).__name__}: {error}"
            ) from error
        place = _place(error)
        logger.warning(
            "%s failed and is made anew: %r (%d in a row; %d end this process)",
            who,
            error,
            failures,
            self._max_failures,
            exc_info=None if place in self._shown else error,
        )
        self._shown.add(place)


def _place(error: Exception) -> tuple[type, str, int]:
    """Where an exception was raised: what it is, the file, the line."""
    traceback = error.__traceback__
    if traceback is None:
        return type(error), "", 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return type(error), traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


def _close(env: Any, who: str) -> None:
    try:
        env.close()
    except Exception as error:
        logger.warning("Closing %s failed: %r", who, error)


def _render(env: Any) -> Any:
    try:
        return env.render()
    except NotImplementedError:
        return None


def make_environment_batch(
    factory: str | Callable, env_indices: Sequence[int], seed: int, max_failures: int = 10
) -> EnvironmentBatch:
    """Makes the environments of one actor.

    Args:
        factory: a function, or 'package.module:function'; see `environment_factory`.
        env_indices: which of the run's environments these are, all different.
        seed: environment i starts from seed + env_indices[i].
        max_failures: an environment that fails is logged and made anew; after so many times in a
            row EnvironmentFailedError is raised.

    Raises:
        ModuleNotFoundError: the factory's module, or a package it needs, is not installed.
        TypeError: the factory returned something that is no environment.
        ValueError: the factory's name is wrong, or another argument is.
        UnsupportedSpaceError: an environment has a space that cannot be used.
    """
    if not len(env_indices) or len(set(env_indices)) != len(env_indices):
        raise ValueError(f"env_indices must be one or more different ones, got {env_indices}")
    if max_failures < 1:
        raise ValueError(f"max_failures must be at least 1, got {max_failures}")
    if seed < 0:
        raise ValueError(f"The seed of environments must not be negative, got {seed}")
    function = load_factory(factory)
    made = make_environments(function, env_indices)
    if isinstance(made, VectorEnv):
        return VectorEnvironments(function, made, env_indices, seed, max_failures)
    return SingleEnvironments(function, made, env_indices, seed, max_failures)
