"""Environments by name."""

import sys
import types
from typing import Any

import gin
import gymnasium
import numpy as np
import pytest

from seed_rl.environment import make_environment_batch
from seed_rl.envs.gym_env import gym_env
from seed_rl.envs.memory import MemoryEnvironment, memory_environment


@pytest.fixture(autouse=True)
def clear_gin():
    gin.clear_config()
    yield
    gin.clear_config()


def test_an_id_of_gymnasium_is_bound_by_gin():
    gin.parse_config("gym_env.env_id = 'CartPole-v1'\ngym_env.kwargs = {'max_episode_steps': 2}")
    batch = make_environment_batch("seed_rl.envs.gym_env:gym_env", [0, 1], 7)
    rows = batch.reset()
    # CartPole draws its first state in [-0.05, 0.05) with the generator gymnasium seeds.
    for k in range(2):
        rng, _ = gymnasium.utils.seeding.np_random(7 + k)
        expected = rng.uniform(-0.05, 0.05, 4).astype(np.float32)
        np.testing.assert_array_equal(rows.env_outputs.observation[k], expected)
    batch.step(np.zeros(2, np.int64))
    final, first = batch.step(np.zeros(2, np.int64))
    assert not final.env_outputs.done.any() and first.env_outputs.abandoned.all()


def test_a_function_with_arguments():
    env = gym_env(
        env_id="seed_rl.envs.memory:memory_environment", kwargs={"delay": 2, "num_cues": 3}
    )
    assert isinstance(env, MemoryEnvironment) and env.action_space.n == 3


def test_an_id_that_a_module_registers(tmp_path, monkeypatch):
    (tmp_path / "registers_one.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('MadeUp-v3', 'seed_rl.envs.memory:memory_environment')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert isinstance(gym_env(env_id="registers_one:MadeUp-v3").unwrapped, MemoryEnvironment)
    finally:
        gymnasium.registry.pop("MadeUp-v3", None)


@pytest.mark.parametrize(
    ("env_id", "error", "words"),
    [
        ("CartPol-v1", ValueError, "'CartPol-v1'.*Did you mean CartPole-v1"),
        ("CartPole-v7", ValueError, "Did you mean CartPole-v1"),
        ("qqqqqqqqqqqq", ValueError, "no environment 'qqqqqqqqqqqq'"),
        ("no_such_package:Foo-v0", ModuleNotFoundError, "'no_such_package', which is not inst"),
        ("no_such_package:make", ModuleNotFoundError, "no module 'no_such_package'"),
        ("seed_rl.envs.memory:nope", ValueError, "no function 'nope'"),
        ("seed_rl.envs.atari:create_vector_environment", TypeError, "makes a VectorEnv"),
    ],
)
def test_unknown_names(env_id, error, words):
    with pytest.raises(error, match=words):
        gym_env(env_id=env_id)


def test_missing_packages_are_named(monkeypatch):
    for package, env_id, extra in (
        ("ale_py", "ALE/Pong-v5", "atari"),
        ("gym", "gym:CartPole-v1", "gym"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            ModuleNotFoundError, match=rf"'{package}'.*pip install -e '\.\[{extra}\]'"
        ):
            gym_env(env_id=env_id)


def test_ids_of_a_made_up_old_gym(monkeypatch):
    class Old:
        observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self):
            return np.zeros(1, np.float32)

        def step(self, action):
            return np.ones(1, np.float32), 1.0, True, {}

    arguments = []

    def make(env_id, disable_env_checker=None, **kwargs):
        arguments.append((env_id, disable_env_checker, kwargs))
        return Old()

    gym = types.SimpleNamespace(make=make, envs=types.SimpleNamespace(registry={"Old-v0": None}))
    monkeypatch.setitem(sys.modules, "gym", gym)
    env = gym_env(env_id="gym:Old-v0", kwargs={"a": 1})
    assert env.reset()[0] == 0 and env.step(0)[2:4] == (True, False)
    assert arguments == [("Old-v0", True, {"a": 1})]
    with pytest.raises(ValueError, match=r"gym knows no environment 'Odl-v0'.*Old-v0"):
        gym_env(env_id="gym:Odl-v0")


def test_ids_of_the_real_old_gym():
    gym: Any = pytest.importorskip("gym")
    has_five_values = tuple(int(x) for x in gym.__version__.split(".")[:2]) >= (0, 26)

    class Steps(gym.Env):
        observation_space = gym.spaces.Box(0.0, 9.0, (1,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.t = np.zeros(1, np.float32)
            return (self.t.copy(), {"seed": seed}) if has_five_values else self.t.copy()

        def step(self, action):
            self.t += 1
            ended = (bool(action), False) if has_five_values else (bool(action),)
            return (self.t.copy(), 1.0, *ended, {})

    gym.envs.registration.register(id="Steps-v0", entry_point=Steps, max_episode_steps=2)
    gin.parse_config("gym_env.env_id = 'gym:Steps-v0'")
    batch = make_environment_batch("seed_rl.envs.gym_env:gym_env", [0], 1)
    assert batch.reset().env_outputs.observation.tolist() == [[0]]

    def step(action):
        outputs = [rows.env_outputs for rows in batch.step(np.array([action]))]
        return [(o.done[0], o.observation[0, 0], o.abandoned[0]) for o in outputs]

    assert step(0) == [(False, 1, False)]
    assert step(0) == [(False, 2, False), (True, 0, True)]  # cut by the time limit
    assert step(1) == [(True, 0, False)]


def test_memory_environment_shows_its_cue_once_and_counts_the_last_action():
    for seed in range(6):
        for right in (True, False):
            env = memory_environment(delay=3, num_cues=3)
            observation, _ = env.reset(seed=seed)
            assert sorted(observation) == [0, 0, 1] and observation.dtype == np.float32
            cue = int(observation.argmax())
            actions = [(cue + 1) % 3] * 3 + [cue] if right else [cue] * 3 + [(cue + 1) % 3]
            results = [env.step(action) for action in actions]
            assert all(not result[0].any() for result in results)
            assert [result[1] for result in results] == [0, 0, 0, float(right)]
            assert [result[2] for result in results] == [False, False, False, True]
            assert not any(result[3] for result in results)


def test_memory_environment_draws_all_cues_evenly():
    env = memory_environment(delay=1, num_cues=4)
    env.reset(seed=0)
    cues = np.array([env.reset()[0].argmax() for _ in range(4000)])
    # 1,000 of each are expected, with a standard deviation of 27.
    assert np.abs(np.bincount(cues, minlength=4) - 1000).max() < 140


@pytest.mark.parametrize("kwargs", [{"delay": 0}, {"num_cues": 1}])
def test_memory_environment_refuses_what_makes_no_sense(kwargs):
    with pytest.raises(ValueError, match="delay ≥ 1 and num_cues ≥ 2"):
        memory_environment(**kwargs)
