"""Tries an environment as an actor would drive it, and says in plain words what is found."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import optree
from gymnasium import spaces

from seed_rl.environment import (
    EnvironmentBatch,
    EnvironmentFailedError,
    Rows,
    make_environment_batch,
)
from seed_rl.spaces import observation_specs
from seed_rl.user_error import UserError

_NUM_ENVS = 2
_COMPARED_STEPS = 50
_MAX_SECONDS = 30.0  # a slow environment is not tried for longer
_LARGE_REWARD = 100.0
_LARGE_OBSERVATION = 100.0


class EnvironmentCheckError(UserError):
    """An environment does what no learner can work with."""


def check_environment(
    factory: str | Callable, seed: int, num_steps: int, say: Callable[[str], None]
) -> Rows:
    """Steps two environments with random actions, and says what it finds.

    Args:
        factory: see `make_environment_batch`.
        seed: of environments and actions.
        num_steps: of each environment, at most; slow environments get fewer.
        say: takes each line of the report as it is known. Warnings begin with 'warning: '.

    Returns:
        The last rows, which an agent can be tried on.

    Raises:
        EnvironmentCheckError: a reset or a step failed, or a number was not finite.
        UnsupportedSpaceError: a space cannot be used.
        ObservationError: an observation does not fit its space.
        whatever `make_environment_batch` raises for a factory that cannot be called.
    """
    batch = make_environment_batch(factory, range(_NUM_ENVS), seed, max_failures=1)
    try:
        say(f"observation   {_described(observation_specs(batch.observation_space))}")
        say(f"action        {batch.action_space}, as the agent sees it")
        trial = _Trial(batch, seed)
        trial.run(num_steps)
    finally:
        batch.close()
    for line in [*trial.report(), *trial.warnings()]:
        say(line)
    difference = _first_difference(factory, seed, trial)
    if difference:
        say(f"warning: {difference}")
    return trial.last_rows


def _described(specs: Any) -> Any:
    return optree.tree_map(lambda s: _Plain(f"{s.dtype} {list(s.shape)}"), specs)


class _Plain(str):
    """Text that is shown without quotes inside of dicts and tuples."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Trial:
    """What was seen of a batch of environments under random actions."""

    def __init__(self, batch: EnvironmentBatch, seed: int):
        self._batch = batch
        self._rng = np.random.default_rng(seed)
        self.digests: list[bytes] = []  # of the rows of each step, the first of the reset
        self._seconds = 0.0
        self._num_steps = 0
        self._steps = np.zeros(batch.num_envs, np.int64)  # of the running episodes
        self._returns = np.zeros(batch.num_envs)
        self._ended: list[tuple[bool, int, float]] = []  # cut, length, return
        self._rewards = [np.inf, -np.inf]
        self._largest = 0.0
        self._outside: set[str] = set()
        self.last_rows: Any = None

    def run(self, num_steps: int) -> None:
        """Resets, and takes up to `num_steps` random actions in every environment."""
        rows = self._tried("reset", self._batch.reset)
        self._see([rows])
        end = time.monotonic() + _MAX_SECONDS
        while self._num_steps < num_steps and time.monotonic() < end:
            actions = _random_actions(self._batch.action_space, self._batch.num_envs, self._rng)
            start = time.perf_counter()
            step = self._num_steps + 1
            all_rows = self._tried(f"step {step}", functools.partial(self._batch.step, actions))
            self._seconds += time.perf_counter() - start
            self._num_steps = step
            self._see(all_rows)

    def _tried(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except EnvironmentFailedError as error:
            cause = error.__cause__ or error
            raise EnvironmentCheckError(
                f"the environment fails in {what}: {type(cause).__name__}: {cause}"
            ) from error

    def _see(self, all_rows: list[Rows]) -> None:
        digest = hashlib.blake2b()
        for rows in all_rows:
            output = rows.env_outputs
            for array in (rows.indices, output.reward, output.done, output.abandoned):
                digest.update(array.tobytes())
            for leaf in optree.tree_leaves(output.observation):
                digest.update(leaf.tobytes())
                self._largest = max(self._largest, _largest_unscaled(leaf))
            self._count(rows)
            for k in range(len(rows.indices)):
                one = optree.tree_map(lambda x, k=k: x[k], output.observation)
                self._outside.update(_outside(self._batch.observation_space, one, "observation"))
            if len(rows.indices) == self._batch.num_envs:
                self.last_rows = rows
        self.digests.append(digest.digest())

    def _count(self, rows: Rows) -> None:
        output = rows.env_outputs
        for k, i in enumerate(rows.indices):
            self._returns[i] += rows.raw_rewards[k]
            if self._num_steps and not output.abandoned[k]:  # which comes without a step
                reward = float(output.reward[k])
                self._rewards = [min(self._rewards[0], reward), max(self._rewards[1], reward)]
            if not output.done[k]:
                self._steps[i] = output.episode_step[k]
                continue
            cut = bool(output.abandoned[k])
            # The last step of an episode that ends by itself shows the next one already.
            length = int(self._steps[i]) + (0 if cut else 1)
            self._ended.append((cut, length, float(self._returns[i])))
            self._steps[i], self._returns[i] = 0, 0.0

    def report(self) -> Iterator[str]:
        """Yields what anyone wants to know."""
        total = self._num_steps * self._batch.num_envs
        yield (
            f"steps         {self._num_steps:,} of {self._batch.num_envs} environments each, with "
            f"random actions; {total / max(self._seconds, 1e-9):,.0f} a second in this process"
        )
        yield f"rewards       {self._rewards[0]:g} to {self._rewards[1]:g}"
        if self._ended:
            cuts, lengths, returns = zip(*self._ended, strict=True)
            yield (
                f"episodes      {len(cuts) - sum(cuts)} ended, {sum(cuts)} were cut; mean "
                f"{np.mean(lengths):.1f} steps, return {np.mean(returns):.3g}"
            )

    def warnings(self) -> Iterator[str]:
        """Yields what a learner takes, and learns badly from."""
        for name in sorted(self._outside):
            yield f"warning: {name} lies outside of the bounds of its space at times"
        if len(set(self.digests)) == 1:
            yield "warning: observation and reward never changed"
        if self._rewards == [0.0, 0.0]:
            yield "warning: every reward was 0: random play finds none, exploration will be hard"
        if max(np.abs(self._rewards)) > _LARGE_REWARD:
            yield (
                f"warning: rewards beyond ± {_LARGE_REWARD:g} make large gradients; scale or clip "
                "them: gym_env.wrappers = [@scale_reward]"
            )
        if self._largest > _LARGE_OBSERVATION:
            yield (
                f"warning: observations go up to {self._largest:g}; for vectors, "
                "AutoNetwork.normalize_observations = True brings them to one scale"
            )
        if not self._ended:
            yield (
                "warning: no episode ended, and returns are known only then; to limit their time: "
                "gym_env.wrappers = [@time_limit]"
            )


def _largest_unscaled(leaf: np.ndarray) -> float:
    """The largest magnitude among numbers that networks take as they are; 0 where they scale."""
    if not leaf.size or leaf.dtype.kind not in "iuf":
        return 0.0
    largest = float(np.abs(leaf.astype(np.float64)).max())
    # A network divides integers by their bound, unless that is beyond 16 bits.
    return largest if leaf.dtype.kind == "f" or largest > 2**16 else 0.0


def _first_difference(factory: str | Callable, seed: int, trial: _Trial) -> str:
    """Says where a second run with the same seed and actions went another way; '' if nowhere."""
    batch = make_environment_batch(factory, range(_NUM_ENVS), seed, max_failures=1)
    try:
        again = _Trial(batch, seed)
        again.run(min(_COMPARED_STEPS, len(trial.digests) - 1))
    finally:
        batch.close()
    pairs = zip(again.digests, trial.digests, strict=False)
    step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if step is None:
        return ""
    if step == 0:
        return "the same seed gives another first observation: runs cannot be repeated"
    return (
        f"step {step} gives another result for the same seed and actions: runs cannot be repeated"
    )


def _random_actions(space: gymnasium.Space, num_envs: int, rng: np.random.Generator) -> Any:
    """Draws actions of a canonical action space, every array [num_envs, …]."""
    if isinstance(space, spaces.Tuple):
        return tuple(_random_actions(s, num_envs, rng) for s in space.spaces)
    if isinstance(space, spaces.Discrete):
        return rng.integers(int(space.n), size=num_envs, dtype=np.int32)
    if isinstance(space, spaces.MultiDiscrete):
        return rng.integers(space.nvec, size=(num_envs, *space.nvec.shape)).astype(np.int32)
    assert space.shape is not None
    return rng.uniform(-1.0, 1.0, (num_envs, *space.shape)).astype(np.float32)


def _outside(space: gymnasium.Space, value: Any, name: str) -> Iterator[str]:
    """Yields the names of the arrays that their spaces do not contain."""
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _outside(part, value[key], f"{name}/{key}")
    elif isinstance(space, spaces.Tuple):
        for i, part in enumerate(space.spaces):
            yield from _outside(part, value[i], f"{name}/{i}")
    elif isinstance(space, spaces.Box):
        if not ((value >= space.low).all() and (value <= space.high).all()):
            yield name
    elif not space.contains(value):
        yield name
