"""Factories, by name and by call, and environments of the old gym API."""

import functools
import sys
import types

import gin
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from seed_rl.environment import (
    EnvironmentFailedError,
    UnsupportedSpaceError,
    make_environment_batch,
)
from seed_rl.environment_factory import load_factory
from seed_rl.user_error import UserError

ACTION = np.zeros(1, np.int64)


class Counting(gymnasium.Env):
    """Observes its own number."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, number=0):
        self._number = number

    def reset(self, *, seed=None, options=None):
        return np.array([self._number], np.float32), {}


def first_observations(factory, env_indices):
    return make_environment_batch(factory, env_indices, 0).reset().env_outputs.observation[:, 0]


def test_a_factory_is_told_what_it_asks_for():
    assert first_observations(lambda env_index: Counting(env_index), [3, 8]).tolist() == [3, 8]
    assert first_observations(lambda: Counting(4), [3, 8]).tolist() == [4, 4]

    def vector(env_indices):
        return SyncVectorEnv([functools.partial(Counting, i) for i in env_indices])

    assert first_observations(vector, [3, 8]).tolist() == [3, 8]


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("made_up_environments")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_factory_is_found_by_its_name(module):
    module.make = lambda: Counting(6)
    assert first_observations("made_up_environments:make", [0]).tolist() == [6]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("no_such_package.x:make", ModuleNotFoundError, "no module 'no_such_package'"),
        ("seed_rl.no_such:make", ModuleNotFoundError, r"no module 'seed_rl\.no_such'"),
        ("made_up_environments:nope", ValueError, "no function 'nope'.*has: make"),
        ("made_up_environments", ValueError, "package.module:function"),
        ("made_up_environments:number", ValueError, "not a function"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(module, name, error, words):
    module.make, module.number = Counting, 3
    with pytest.raises(error, match=words):
        load_factory(name)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "needs_ale.py").write_text("import ale_py\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "ale_py", None)  # its import raises from now on
    with pytest.raises(ModuleNotFoundError, match=r"'ale_py'.*pip install -e '\.\[atari\]'"):
        load_factory("needs_ale:make")

    def lazy():
        import ale_py  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match=r"'ale_py'.*pip install -e '\.\[atari\]'"):
        make_environment_batch(lazy, [0], 0)


def test_a_package_that_a_configurable_misses_is_named():
    def needs_something():
        import no_such_package  # noqa: F401

    # gin raises an exception of its own in place of the import's.
    configurable = gin.external_configurable(needs_something, "needs_something_in_a_test")
    with pytest.raises(ModuleNotFoundError, match=r"the package 'no_such_package', which is not"):
        make_environment_batch(configurable, [0], 0)


def test_a_misspelt_module_that_a_configurable_names_is_no_missing_package():
    configurable = gin.external_configurable(
        functools.partial(load_factory, "no_such_module:make"), "names_a_module_in_a_test"
    )
    with pytest.raises(ModuleNotFoundError, match="There is no module 'no_such_module'") as caught:
        make_environment_batch(configurable, [0], 0)
    assert "not installed" not in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "error", "words"),
    [
        (lambda: 3, TypeError, r"must return a gymnasium.Env.*returned a builtins\.int"),
        (lambda env_indices: Counting(), TypeError, "must return a gymnasium.vector.VectorEnv"),
        (
            lambda env_indices: SyncVectorEnv([Counting] * 3),
            ValueError,
            "VectorEnv of 3 environments, but 2 are needed",
        ),
        (
            lambda env_index: Counting() if env_index == 0 else SyncVectorEnv([Counting]),
            TypeError,
            "VectorEnv for the single environment 1",
        ),
        (
            lambda: types.SimpleNamespace(
                possible_agents=["a", "b"],
                reset=None,
                step=None,
                observation_space=lambda agent: None,
                action_space=lambda agent: None,
            ),
            UserError,
            "SimpleNamespace, an environment of several agents",
        ),
    ],
)
def test_a_wrong_result_says_what_is_wrong(factory, error, words):
    with pytest.raises(error, match=words):
        make_environment_batch(factory, [0, 1], 0)


def old_space(kind, **attributes):
    """A space of another package: known by its class's name and its attributes only."""
    return type(kind, (), attributes)()


class OldApi:
    """An environment of the old API with a time limit of 3 steps; action 1 ends it before."""

    observation_space = old_space(
        "Box", low=np.zeros(1), high=np.full(1, 9.0), shape=(1,), dtype=np.dtype(np.float32)
    )
    action_space = old_space("Discrete", n=2)

    def __init__(self):
        self.seeds, self.is_closed = [], False

    def seed(self, seed=None):
        self.seeds.append(seed)

    def reset(self):
        self.t = 0
        return np.zeros(1, np.float32)

    def step(self, action):
        self.t += 1
        info = {"TimeLimit.truncated": action == 0} if self.t == 3 or action == 1 else {}
        return np.full(1, self.t, np.float32), np.float32(2), self.t == 3 or action == 1, info

    def render(self, mode="human"):
        return mode

    def close(self):
        self.is_closed = True


def told(all_rows):
    return [
        tuple(x[0].item() for x in (o.reward, o.done, o.observation[:, 0], o.abandoned))
        for o in (rows.env_outputs for rows in all_rows)
    ]


def test_a_factory_that_raises_is_named():
    def make():
        return {}["missing"]

    with pytest.raises(UserError, match=r"make raised KeyError when it made an env.*'missing'"):
        make_environment_batch(make, [0], 0)


def test_an_old_environment_tells_ends_from_time_limits():
    env = OldApi()
    batch = make_environment_batch(lambda: env, [5], seed=10)
    assert told([batch.reset()]) == [(0.0, False, 0.0, False)]
    assert env.seeds == [15]
    assert told(batch.step(ACTION)) == [(2.0, False, 1.0, False)]
    assert told(batch.step(ACTION + 1)) == [(2.0, True, 0.0, False)]
    batch.step(ACTION)
    batch.step(ACTION)
    assert told(batch.step(ACTION)) == [(2.0, False, 3.0, False), (0.0, True, 0.0, True)]
    assert env.seeds == [15]
    assert batch.render() == "rgb_array"
    batch.close()
    assert env.is_closed


def test_the_old_api_of_gym_0_26():
    class Newer(OldApi):
        def reset(self, *, seed=None, options=None):
            self.seeds.append(("reset", seed))
            return super().reset(), {"info": 1}

        def step(self, action):
            observation, reward, done, _ = super().step(action)
            return observation, reward, False, done, {}

    env = Newer()
    batch = make_environment_batch(lambda: env, [5], seed=10)
    assert told([batch.reset()]) == [(0.0, False, 0.0, False)]
    assert env.seeds == [("reset", 15)]
    assert told(batch.step(ACTION + 1)) == [(2.0, False, 1.0, False), (0.0, True, 0.0, True)]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((0.0, 1.0, False), r"step\(\) of .* returned 3 values, expected"),
        (None, r"step\(\) of .* returned 1 values, expected"),
        ((0.0, 1.0, False, None), "returned the info None, expected a dict"),
    ],
)
def test_what_step_of_an_old_environment_returns_wrongly_is_said(returned, words):
    class Wrong(OldApi):
        def step(self, action):
            return returned

    batch = make_environment_batch(Wrong, [0], 0, max_failures=1)
    batch.reset()
    with pytest.raises(EnvironmentFailedError, match=words):
        batch.step(ACTION)


def test_a_pair_that_is_an_observation_is_not_taken_for_gym_0_26():
    number = old_space("Discrete", n=5)

    class Pair(OldApi):
        observation_space = old_space(
            "Tuple", spaces=[number, old_space("Dict", spaces={"x": number})]
        )

        def reset(self):
            return np.int64(3), {"x": np.int64(4)}

    observation = make_environment_batch(Pair, [0], 0).reset().env_outputs.observation
    assert observation[0].tolist() == [3] and observation[1]["x"].tolist() == [4]


def test_unsupported_spaces_of_the_old_package():
    class Strange(OldApi):
        action_space = old_space("Space")

    with pytest.raises(UnsupportedSpaceError, match=r"Space is not supported.*Box, Discrete"):
        make_environment_batch(Strange, [0], 0)
