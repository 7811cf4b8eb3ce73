"""What the checker says about environments."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from seed_rl.check_env import EnvironmentCheckError, check_environment
from seed_rl.environment import ObservationError, UnsupportedSpaceError

NOWHERE = float("nan")


class Walk(gymnasium.Env):
    """Steps left or right; ends after `length` steps. Subclasses break it."""

    observation_space = spaces.Dict(
        at=spaces.Box(-100, 100, (1,), np.float32), kind=spaces.Discrete(2, start=1)
    )
    action_space = spaces.Discrete(2)
    length = 5
    cuts = False
    scale = 1.0

    def observe(self):
        return {"at": np.float32([self.at]), "kind": 1}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = self.np_random.uniform(0, 1), 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        self.at += 2 * action - 1
        over = self.steps >= self.length
        return self.observe(), self.reward(), over and not self.cuts, over and self.cuts, {}

    def reward(self):
        return self.scale * self.steps


def report(env, steps=20):
    lines = []
    check_environment(env, 0, steps, lines.append)
    return lines, [line for line in lines if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("cuts", "ends"), [(False, "8 ended, 0 were cut"), (True, "0 ended, 8 were cut")]
)
def test_a_good_environment(cuts, ends):
    lines, warnings = report(type("Good", (Walk,), {"cuts": cuts}))
    assert warnings == []
    text = "\n".join(lines)
    assert "{'at': float32 [1], 'kind': int64 []}" in text
    assert "Discrete(2), as the agent sees it" in text
    assert "20 of 2 environments each" in text
    # 1 + 2 + 3 + 4 + 5 = 15
    assert f"{ends}; mean 5.0 steps, return 15" in text
    assert "rewards       1 to 5" in text


def test_what_a_learner_refuses_is_an_error():
    class Texts(Walk):
        observation_space = spaces.Dict(mission=spaces.Text(3))

    class WrongShape(Walk):
        observation_space = spaces.Box(-9, 9, (2,), np.float32)

        def observe(self):
            return np.zeros(3, np.float32)

    class WrongType(WrongShape):
        def observe(self):
            return np.array(["a", "b"])

    class NotFinite(Walk):
        def reward(self):
            return NOWHERE if self.steps == 3 else 0.0

    class Failing(Walk):
        def reward(self):
            return 1 / (self.steps - 2)

    class FailingReset(Walk):
        def reset(self, *, seed=None, options=None):
            raise RuntimeError("no licence")

    with pytest.raises(UnsupportedSpaceError, match="mission"):
        report(Texts)
    with pytest.raises(ObservationError, match=r"of shape \(2,\).*got shape \(3,\)"):
        report(WrongShape)
    with pytest.raises(ObservationError, match=r"dtype float32.*dtype <U1"):
        report(WrongType)
    unusable = r"fails in step 3: UnusableNumberError: the reward"
    with pytest.raises(EnvironmentCheckError, match=unusable):
        report(NotFinite)
    with pytest.raises(EnvironmentCheckError, match="fails in step 2: ZeroDivisionError"):
        report(Failing)
    with pytest.raises(EnvironmentCheckError, match="fails in reset: RuntimeError: no licence"):
        report(FailingReset)


def test_what_cannot_be_repeated_is_a_warning():
    class Unseeded(Walk):
        def reset(self, *, seed=None, options=None):
            return super().reset()

    class Drifting(Walk):
        def step(self, action):
            self.at += np.random.default_rng().uniform()
            return super().step(action)

    ((first,), (later,)) = (report(env)[1] for env in (Unseeded, Drifting))
    assert "the same seed gives another first observation" in first
    assert "step 1 gives another result for the same seed and actions" in later


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"length": 1000}, "no episode ended"),
        ({"scale": 0.0}, "every reward was 0"),
        ({"scale": -50.0}, "rewards beyond"),
        ({"observe": lambda self: {"at": np.float32([101]), "kind": 1}}, "at lies outside"),
        ({"observe": lambda self: {"at": np.float32([1]), "kind": 0}}, "kind lies outside"),
        (
            {"observation_space": spaces.Dict(at=spaces.Box(-1e4, 1e4, (1,)))}
            | {"observe": lambda self: {"at": np.float32([self.at + 2000])}},
            "normalize_observations",
        ),
        (
            {"observation_space": spaces.Dict(at=spaces.Box(-(2**63), 2**40, (1,), np.int64))}
            | {"observe": lambda self: {"at": np.array([-(2**63), 70_000][self.steps % 2])[None]}},
            "observations go up to 9.22337e+18",
        ),
    ],
)
def test_what_is_learned_from_badly_is_a_warning(attributes, words):
    _, warnings = report(type("Odd", (Walk,), attributes))
    assert any(words in warning for warning in warnings), warnings


def test_an_environment_in_which_nothing_happens():
    attributes = {"observe": lambda self: {"at": np.float32([0]), "kind": 1}, "scale": 0.0}
    _, warnings = report(type("Dead", (Walk,), {**attributes, "length": 1000}))
    assert any("never changed" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("env_id", "code", "words"),
    [
        ("CartPole-v1", 0, "VTraceAgent takes them"),
        ("made_up_texts:make", 2, "error: The observation/mission space"),
    ],
)
def test_the_run_mode(env_id, code, words, tmp_path):
    (tmp_path / "made_up_texts.py").write_text(
        "import gymnasium\n"
        "def make():\n"
        "    env = gymnasium.make('CartPole-v1')\n"
        "    env.observation_space = gymnasium.spaces.Dict(mission=gymnasium.spaces.Text(3))\n"
        "    return env\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "seed_rl.main", "--run_mode=check_env", "--num_steps=30"),
            *("--gin_config=gym_vtrace", f"--gin_bindings=gym_env.env_id='{env_id}'"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
