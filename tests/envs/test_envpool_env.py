"""Environments of EnvPool."""

import sys
import types

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from seed_rl.environment import make_environment_batch
from seed_rl.envs.envpool_env import envpool_env
from seed_rl.user_error import UserError


class Pool:
    """Counts; an episode ends at `length`, and the step after it resets, as EnvPool has it."""

    made: list = []  # noqa: RUF012

    def __init__(self, length, num_envs, seed, num_threads, truncates=True):
        assert num_threads == 1
        self.length, self.seed, self.truncates = np.array(length), seed, truncates
        self.count = np.zeros(num_envs, np.int32)
        self.actions = []
        self.closed = False
        Pool.made.append(self)

    def _observe(self):
        return self.count[:, None].astype(np.float32)

    def reset(self):
        self.count[:] = 0
        return self._observe(), {"env_id": np.arange(len(self.count))}

    def step(self, actions):
        assert actions.dtype == np.int32
        self.actions.append(actions)
        over = self.count >= self.length
        self.count = np.where(over, 0, self.count + 1)
        ended = self.count >= self.length
        no = np.zeros_like(ended)
        rewards = np.where(over, 0.0, 0.5).astype(np.float32)
        infos = {"reward": rewards * 10, "players": {"env_id": np.arange(2)}}
        ends = (no, ended) if self.truncates else (ended, no)
        return self._observe(), rewards, *ends, infos

    def close(self):
        self.closed = True


@pytest.fixture
def envpool(monkeypatch):
    def make_spec(env_id, **options):
        if "nonsense" in options:
            raise TypeError("unexpected keyword argument 'nonsense'")
        return types.SimpleNamespace(
            observation_space=spaces.Box(0, 99, (1,), np.float32), action_space=spaces.Discrete(3)
        )

    def make(env_id, env_type, **options):
        assert (env_id, env_type) == ("Count-v0", "gymnasium")
        return Pool(**options)

    module = types.SimpleNamespace(
        list_all_envs=lambda: ["Count-v0"], make_spec=make_spec, make=make
    )
    monkeypatch.setitem(sys.modules, "envpool", module)
    monkeypatch.setattr(Pool, "made", [])


def batch_of(seed=0, **options):
    def make(env_indices):
        return envpool_env(env_indices, "Count-v0", options)

    return make_environment_batch(make, [4, 5], seed, max_failures=1)


def told(rows):
    output = rows.env_outputs
    return (
        rows.indices.tolist(),
        output.observation[:, 0].tolist(),
        output.reward.tolist(),
        output.done.tolist(),
        output.abandoned.tolist(),
        rows.raw_rewards.tolist(),
    )


@pytest.mark.usefixtures("envpool")
def test_a_cut_episode_shows_its_final_observation_and_then_the_next_episode():
    batch = batch_of(length=[2, 3])
    batch.reset()
    (rows,) = batch.step(np.array([0, 1]))
    assert told(rows) == ([0, 1], [1, 1], [0.5, 0.5], [False] * 2, [False] * 2, [5, 5])
    (rows,) = batch.step(np.array([0, 1]))  # the first one's time is up
    assert told(rows) == ([0, 1], [2, 2], [0.5, 0.5], [False] * 2, [False] * 2, [5, 5])
    (rows,) = batch.step(np.array([0, 1]))
    assert told(rows) == ([0, 1], [0, 3], [0, 0.5], [True, False], [True, False], [0, 5])


@pytest.mark.usefixtures("envpool")
def test_a_finished_episode_is_told_with_the_first_observation_of_the_next():
    batch = batch_of(length=[2, 3], truncates=False)
    batch.reset()
    batch.step(np.array([0, 1]))
    (rows,) = batch.step(np.array([0, 1]))
    assert rows.indices.tolist() == [1]
    (rows,) = batch.step(np.array([0, 1]))
    # The other one has ended in the same step, and is told of in the next.
    assert told(rows) == ([0], [0], [0.5], [True], [False], [5])


@pytest.mark.usefixtures("envpool")
def test_every_environment_has_its_own_seed():
    batch = batch_of(seed=2**31 - 5, length=[2, 2])
    assert Pool.made == []
    batch.reset()
    batch.reset()
    assert [pool.seed for pool in Pool.made] == [[2**31 - 1, 0]]
    batch.close()
    assert Pool.made[0].closed


@pytest.mark.usefixtures("envpool")
def test_wrong_input():
    with pytest.raises(UserError, match=r"no environment 'Coun-v0'. Did you mean Count-v0\?"):
        envpool_env([0], "Coun-v0")
    with pytest.raises(UserError, match=r"'Count-v0' with .*nonsense.*unexpected keyword"):
        envpool_env([0], "Count-v0", {"nonsense": 1})
    with pytest.raises(UserError, match="must not hold 'batch_size'"):
        envpool_env([0], "Count-v0", {"batch_size": 1})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ModuleNotFoundError, match=r"'envpool'.*pip install -e '\.\[envpool\]'"):
        envpool_env([0], "CartPole-v1")


def real(env_id, num=2, seed=0, **kwargs):
    pytest.importorskip("envpool")

    def make(env_indices):
        return envpool_env(env_indices, env_id, kwargs)

    return make_environment_batch(make, range(num), seed, max_failures=1)


def test_the_real_cartpole_ends_and_is_cut_as_gymnasiums():
    """gymnasium's CartPole goes the same way from the state in EnvPool's first observation."""
    batch = real("CartPole-v1", max_episode_steps=500)
    twin = gymnasium.make("CartPole-v1").unwrapped
    twin.reset()
    rows = batch.reset()
    twin.state = rows.env_outputs.observation[0].astype(np.float64)
    actions = np.array([0, 1])
    for _ in range(11):
        state, _, twin_done, _, _ = twin.step(0)
        rows = batch.step(actions)
        if twin_done:
            break
        assert not rows[0].env_outputs.done[0]
        np.testing.assert_allclose(rows[0].env_outputs.observation[0], state, atol=1e-4)
    assert twin_done
    # Told with the first observation of the next episode, near the middle.
    told_now = rows[-1] if 0 in rows[-1].indices else batch.step(actions)[-1]
    k = told_now.indices.tolist().index(0)
    assert told_now.env_outputs.done[k] and not told_now.env_outputs.abandoned[k]
    assert told_now.env_outputs.reward[k] == 1
    assert np.abs(told_now.env_outputs.observation[k]).max() <= 0.05


def test_the_real_time_limit_cuts():
    batch = real("Pendulum-v1", max_episode_steps=3)
    batch.reset()
    ends = []
    for _ in range(5):
        for rows in batch.step(np.zeros((2, 1), np.float32)):
            output = rows.env_outputs
            ends.append((output.done.all(), output.abandoned.all(), output.episode_step.tolist()))
    assert [e[:2] for e in ends] == [(False, False)] * 3 + [(True, True)] + [(False, False)]
    assert [e[2][0] for e in ends] == [1, 2, 3, 0, 1]


def test_real_seeds_and_dicts():
    first = [real("CartPole-v1", seed=s).reset().env_outputs.observation for s in (7, 7, 8)]
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[0][1], first[2][0])  # environment i starts from seed + i
    batch = real("MiniGrid-Empty-5x5-v0")
    batch.reset()
    (rows,) = batch.step(np.array([0, 1]))
    assert set(rows.env_outputs.observation) == {"image", "direction", "mission"}
    assert rows.env_outputs.observation["image"].shape == (2, 7, 7, 3)
