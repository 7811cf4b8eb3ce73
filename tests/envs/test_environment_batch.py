"""What a learner is told when episodes end, written out by hand."""

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from seed_rl.environment import (
    EnvironmentFailedError,
    ObservationError,
    make_environment_batch,
)
from seed_rl.user_error import UserError

ON, END, CUT, BOTH = (False, False), (True, False), (False, True), (True, True)

# (reward, how the step ends) of every step, one list an episode.
ENDING = [
    [(1.0, ON), (2.0, END)],
    [(3.0, ON), (4.0, CUT)],
    [(5.0, BOTH)],
    [(6.0, ON)] * 20,
]
STEADY = [[(10.0, ON)] * 40]

# (reward, done, observation, abandoned, episode_step) of every row of ENDING, in order; the
# observation is 10 × episode + step.
ENDING_ROWS = [
    (0.0, False, 0, False, 0),
    (1.0, False, 1, False, 1),
    (2.0, True, 10, False, 0),
    (3.0, False, 11, False, 1),
    (4.0, False, 12, False, 2),
    (0.0, True, 20, True, 0),
    (5.0, True, 30, False, 0),
    (6.0, False, 31, False, 1),
    (6.0, False, 32, False, 2),
]
STEADY_ROWS = [(0.0, False, 0, False, 0)] + [
    (10.0, False, step, False, step) for step in range(1, 12)
]


class Scripted(gymnasium.Env):
    """Follows a script whatever the actions; writes every observation into the same array."""

    observation_space = spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, script, fresh_observations=True, raw_factor=None):
        self._script, self._fresh, self._raw_factor = script, fresh_observations, raw_factor
        self._episode, self._step = -1, 0
        self._buffer = np.zeros(1, np.float32)
        self.seeds = []

    def _observation(self):
        self._buffer[0] = 10 * self._episode + self._step
        return self._buffer.copy() if self._fresh else self._buffer

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self._episode, self._step = self._episode + 1, 0
        return self._observation(), {}

    def step(self, action):
        reward, (terminated, truncated) = self._script[self._episode][self._step]
        self._step += 1
        info = {} if self._raw_factor is None else {"raw_reward": reward * self._raw_factor}
        return self._observation(), reward, terminated, truncated, info


SCRIPTS = (ENDING, STEADY)


def single(**kwargs):
    return lambda env_index: Scripted(SCRIPTS[env_index], **kwargs)


def vectorized(mode, make_one):
    """A factory of a VectorEnv of `make_one(env_index)`s."""

    def make(env_indices):
        makers = [functools.partial(make_one, index) for index in env_indices]
        return SyncVectorEnv(makers, autoreset_mode=mode)

    return make


def vector(mode, **kwargs):
    return vectorized(mode, single(**kwargs))


def made_in(form, make_one):
    """`make_one(env_index)` as it is, or vectorised in an autoreset mode."""
    if form == "single":
        return lambda env_index: make_one(env_index)
    return vectorized(form, make_one)


SAME_STEP_FORMS = {
    "single": single(fresh_observations=False),
    "same step": vector(AutoresetMode.SAME_STEP),
    "disabled": vector(AutoresetMode.DISABLED, fresh_observations=False),
}
FORMS = {**SAME_STEP_FORMS, "next step": vector(AutoresetMode.NEXT_STEP)}


def play(factory, num_steps, env_indices=(0, 1)):
    """Returns the rows of a reset and of num_steps steps, copied."""
    batch = make_environment_batch(factory, env_indices, seed=3)
    steps = [[copied(batch.reset())]]
    for _ in range(num_steps):
        # Copied only after the whole step: earlier rows of a step must outlive later ones.
        steps.append([copied(rows) for rows in batch.step(np.zeros(len(env_indices), np.int64))])
    return steps


def copied(rows):
    output = rows.env_outputs
    output = output._replace(observation=output.observation.copy())
    return rows._replace(env_outputs=output)


def rows_of(env, steps):
    """The sequence of rows that one environment gives."""
    found = []
    for rows in (rows for step in steps for rows in step):
        for k in np.flatnonzero(rows.indices == env):
            reward, done, observation, abandoned, step = (x[k] for x in rows.env_outputs)
            found.append((reward, done, observation[0], abandoned, step))
    return found


def layout(steps):
    return [[rows.indices.tolist() for rows in step] for step in steps]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_tells_an_agent_the_same(form):
    steps = play(FORMS[form], num_steps=10)
    ending, steady = rows_of(0, steps), rows_of(1, steps)
    assert len(ending) >= len(ENDING_ROWS)
    assert ending[: len(ENDING_ROWS)] == ENDING_ROWS
    assert steady == STEADY_ROWS[: len(steady)] and len(steady) == 11


@pytest.mark.parametrize("form", SAME_STEP_FORMS)
def test_a_cut_episode_is_sent_first_and_alone(form):
    steps = play(SAME_STEP_FORMS[form], num_steps=6)
    both = [[0, 1]]
    assert layout(steps) == [both, both, both, both, [[0], [0, 1]], both, both]


def test_next_step_autoreset_holds_a_finished_episode_back():
    steps = play(FORMS["next step"], num_steps=9)
    both, other = [[0, 1]], [[1]]
    # reset, 1, (2 held), 2, 3, 4, cut, (5 held), 5, 6
    assert layout(steps) == [both, both, other, both, both, both, both, other, both, both]


@pytest.mark.parametrize("form", FORMS)
def test_one_environment_alone_always_has_rows(form):
    steps = play(FORMS[form], num_steps=8, env_indices=(0,))
    assert all(steps) and all(rows.indices.tolist() == [0] for step in steps for rows in step)
    assert rows_of(0, steps)[: len(ENDING_ROWS)] == ENDING_ROWS


def test_dtypes():
    (rows,) = play(FORMS["single"], num_steps=0)[0]
    dtypes = [x.dtype for x in rows.env_outputs]
    assert dtypes == [np.float32, bool, np.float32, bool, np.int32]
    assert rows.indices.dtype == np.int32 and rows.raw_rewards.dtype == np.float32


@pytest.mark.parametrize("form", ["single", *list(AutoresetMode)])
def test_raw_rewards_are_the_environments_own(form):
    make = single if form == "single" else lambda **kwargs: vector(form, **kwargs)
    steps = play(make(raw_factor=100.0), num_steps=10)
    raw = [
        rows.raw_rewards[k]
        for step in steps
        for rows in step
        for k in np.flatnonzero(rows.indices == 0)
    ]
    assert raw[: len(ENDING_ROWS)] == [100 * row[0] for row in ENDING_ROWS]


@pytest.mark.parametrize("form", ["single", *list(AutoresetMode)])
def test_the_first_reset_alone_is_seeded_with_the_index(form):
    made = []

    class Recorded(Scripted):
        def __init__(self):
            super().__init__(STEADY * 9)
            made.append(self)

    factory = made_in(form, lambda env_index: Recorded())
    batch = make_environment_batch(factory, [4, 9], seed=100)
    batch.reset()
    batch.reset()
    assert [env.seeds for env in made] == [[104, None], [109, None]]
    assert batch.env_indices == (4, 9) and batch.num_envs == 2


class Fragile(gymnasium.Env):
    """Raises where its plan, shared by all that are made, says so."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, plan, log):
        self._plan, self._log = plan, log
        log.append("made")

    def _follow(self):
        what = self._plan.pop(0) if self._plan else "fine"
        if what == "raise":
            raise RuntimeError("the simulator crashed")
        return what

    def reset(self, *, seed=None, options=None):
        self._follow()
        return np.array([7.0], np.float32), {}

    def step(self, action):
        what = self._follow()
        return np.array([8.0], np.float32), 5.0, what == "end", what == "cut", {}

    def close(self):
        self._log.append("closed")


def fragile(plan, form):
    log: list[str] = []
    return made_in(form, lambda env_index: Fragile(plan, log)), log


def told(all_rows):
    return [
        (
            output.reward[0].item(),
            output.done[0].item(),
            output.observation[0, 0].item(),
            output.abandoned[0].item(),
            output.episode_step[0].item(),
        )
        for output in (rows.env_outputs for rows in all_rows)
    ]


@pytest.mark.parametrize("form", ["single", *list(AutoresetMode)])
def test_an_environment_that_raises_is_made_anew_and_its_episode_torn(form, caplog):
    factory, log = fragile(["fine", "fine", "raise", "raise", "fine", "fine"], form)
    batch = make_environment_batch(factory, [6], seed=0)
    batch.reset()
    action = np.zeros(1, np.int64)
    steps = [batch.step(action) for _ in range(3)]
    assert [told(rows) for rows in steps] == [
        [(5.0, False, 8.0, False, 1)],
        [(0.0, True, 7.0, True, 0)],  # the new one failed once too
        [(5.0, False, 8.0, False, 1)],
    ]
    assert [torn(rows) for rows in steps] == [[False], [True], [False]]
    assert log == ["made", "closed", "made", "closed", "made"]
    assert "6" in caplog.text and "the simulator crashed" in caplog.text


def torn(all_rows):
    return [rows.torn[0].item() for rows in all_rows]


@pytest.mark.parametrize("form", ["single", AutoresetMode.DISABLED])
@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("end", [(5.0, True, 7.0, False, 0)]),
        ("cut", [(5.0, False, 8.0, False, 1), (0.0, True, 7.0, True, 0)]),
    ],
)
def test_a_failing_reset_does_not_change_how_the_episode_before_ended(form, ending, expected):
    factory, _ = fragile(["fine", ending, "raise", "fine"], form)
    batch = make_environment_batch(factory, [0], seed=0)
    batch.reset()
    rows = batch.step(np.zeros(1, np.int64))
    assert told(rows) == expected
    assert not any(torn(rows))


@pytest.mark.parametrize("ending", ["end", "cut"])
def test_a_vector_env_that_raises_at_its_delayed_reset(ending):
    factory, _ = fragile(["fine", ending, "raise", "fine"], AutoresetMode.NEXT_STEP)
    batch = make_environment_batch(factory, [0], seed=0)
    batch.reset()
    rows = batch.step(np.zeros(1, np.int64))
    if ending == "cut":
        assert told(rows) == [(5.0, False, 8.0, False, 1)]
        rows = batch.step(np.zeros(1, np.int64))
        assert told(rows) == [(0.0, True, 7.0, True, 0)]
    else:
        assert told(rows) == [(5.0, True, 7.0, False, 0)]
    assert torn(rows) == [False]


def test_the_others_of_a_vector_env_are_abandoned_when_a_reset_fails():
    plans = [["fine", "end", "raise", "fine"], []]
    factory = vectorized(AutoresetMode.DISABLED, lambda env_index: Fragile(plans[env_index], []))
    batch = make_environment_batch(factory, [0, 1], seed=0)
    batch.reset()
    (rows,) = batch.step(np.zeros(2, np.int64))
    output = rows.env_outputs
    assert output.reward.tolist() == [5.0, 0.0]
    assert output.done.tolist() == [True, True]
    assert output.abandoned.tolist() == [False, True]
    assert output.episode_step.tolist() == [0, 0]
    assert rows.torn.tolist() == [False, True]


@pytest.mark.parametrize("form", ["single", *list(AutoresetMode)])
def test_too_many_failures_in_a_row_end_the_run(form):
    # Each line is a step. The success in between lets the count begin anew.
    plan = ["fine"]
    plan += ["raise", "raise", "fine"]
    plan += ["fine"]
    plan += ["raise", "raise", "fine"]
    plan += ["raise"]
    factory, _ = fragile(plan, form)
    batch = make_environment_batch(factory, [6], seed=0, max_failures=3)
    batch.reset()
    for _ in range(3):
        batch.step(np.zeros(1, np.int64))
    with pytest.raises(EnvironmentFailedError, match=r"6.*failed 3 times in a row.*crashed"):
        batch.step(np.zeros(1, np.int64))


class Numbers(gymnasium.Env):
    """Gives one planned (reward, observation) a step, over all who share the plan; then (1, 2)."""

    observation_space = spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, plan, ends=False, first=0.0):
        self._plan, self._ends, self._first = plan, ends, first

    def reset(self, *, seed=None, options=None):
        return np.array([self._first], np.float32), {}

    def step(self, action):
        reward, observation = self._plan.pop(0) if self._plan else (1.0, 2.0)
        return np.array([observation], np.float32), reward, self._ends, False, {}


def numbers(form, *args, **kwargs):
    if form == "single":
        return lambda: Numbers(*args, **kwargs)
    return vectorized(form, lambda env_index: Numbers(*args, **kwargs))


BAD_NUMBERS = [
    (np.nan, 2.0),
    (np.inf, 2.0),
    (1e39, 2.0),  # more than 32 bits hold
    (1e38, 2.0),
    (-1e38, 2.0),
    (1.0, np.nan),
]


@pytest.mark.parametrize("form", ["single", *list(AutoresetMode)])
@pytest.mark.parametrize("bad", BAD_NUMBERS)
def test_a_number_that_no_network_can_learn_from_tears_the_episode(form, bad, caplog):
    batch = make_environment_batch(numbers(form, [(1.0, 2.0), bad]), [6], seed=0)
    batch.reset()
    steps = [batch.step(np.zeros(1, np.int64)) for _ in range(3)]
    assert [told(rows) for rows in steps] == [
        [(1.0, False, 2.0, False, 1)],
        [(0.0, True, 0.0, True, 0)],
        [(1.0, False, 2.0, False, 1)],
    ]
    assert [torn(rows) for rows in steps] == [[False], [True], [False]]
    assert "6" in caplog.text
    assert ("magnitude of 1e+38" if abs(bad[0]) == 1e38 else "not finite") in caplog.text


def test_a_large_reward_may_be_meant():
    batch = make_environment_batch(numbers("single", [(-9e8, 2.0)]), [6], seed=0)
    batch.reset()
    (rows,) = batch.step(np.zeros(1, np.int64))
    assert rows.raw_rewards[0] == -9e8
    assert not rows.torn[0]


@pytest.mark.parametrize("form", ["single", *list(AutoresetMode)])
def test_numbers_that_are_never_finite_end_the_run(form):
    factory = numbers(form, [(np.nan, 0.0)] * 100)
    batch = make_environment_batch(factory, [6], seed=0, max_failures=3)
    batch.reset()
    with pytest.raises(EnvironmentFailedError, match=r"6.*3 times in a row.*not finite"):
        for _ in range(3):
            batch.step(np.zeros(1, np.int64))
    batch = make_environment_batch(numbers(form, [], first=np.nan), [6], seed=0, max_failures=3)
    with pytest.raises(EnvironmentFailedError, match=r"6.*3 times in a row.*not finite"):
        batch.reset()


@pytest.mark.parametrize("form", ["single", AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_the_observation_in_which_an_episode_ends_may_be_anything(form):
    batch = make_environment_batch(numbers(form, [(3.0, np.nan)], ends=True), [0], seed=0)
    batch.reset()
    rows = batch.step(np.zeros(1, np.int64))
    assert told(rows) == [(3.0, True, 0.0, False, 0)]
    assert torn(rows) == [False]


class Misshapen(gymnasium.Env):
    """Gives one planned observation a call, over all who share the plan; then a fitting one."""

    observation_space = spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, plan):
        self._plan = plan

    def _observation(self):
        return self._plan.pop(0) if self._plan else np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        return self._observation(), {}

    def step(self, action):
        return self._observation(), 1.0, False, False, {}


WRONG_OBSERVATIONS = [np.zeros(3, np.float32), np.array(["a", "b"]), None]


@pytest.mark.parametrize("wrong", WRONG_OBSERVATIONS, ids=["shape", "dtype", "none"])
def test_an_observation_that_no_longer_fits_its_space_tears_the_episode(wrong, caplog):
    fitting = np.ones(2, np.float32)
    batch = make_environment_batch(lambda: Misshapen([fitting, wrong]), [6], seed=0)
    batch.reset()
    (rows,) = batch.step(np.zeros(1, np.int64))
    # The new one begins with its plan, too.
    np.testing.assert_array_equal(rows.env_outputs.observation, [fitting])
    assert rows.torn[0] and rows.env_outputs.abandoned[0]
    assert "Environment 6 failed" in caplog.text and "ObservationError" in caplog.text


def test_observations_that_do_not_fit_again_and_again_end_the_run():
    plan = [np.zeros(2, np.float32), *[np.zeros(3, np.float32)] * 9]
    batch = make_environment_batch(lambda: Misshapen(plan), [6], seed=0, max_failures=3)
    batch.reset()
    with pytest.raises(EnvironmentFailedError, match=r"6.*3 times in a row.*\(3,\)"):
        batch.step(np.zeros(1, np.int64))


def test_a_vector_env_whose_rewards_have_another_shape_fails(caplog):
    class Columns(gymnasium.vector.SyncVectorEnv):
        def step(self, actions):
            observation, rewards, *rest = super().step(actions)
            return observation, rewards[:, None], *rest

    def make(env_indices):
        return Columns([lambda: Numbers([]) for _ in env_indices])

    batch = make_environment_batch(make, [6, 7], seed=0, max_failures=2)
    batch.reset()
    batch.step(np.zeros(2, np.int64))
    assert "the rewards have shape (2, 1), expected (2,)" in caplog.text
    with pytest.raises(EnvironmentFailedError, match=r"6 … 7 failed 2 times in a row.*\(2, 1\)"):
        batch.step(np.zeros(2, np.int64))


def test_a_failure_that_comes_again_shows_where_it_was_raised_only_once(caplog):
    plan = ["fine"] + ["raise", "fine"] * 4
    factory, _ = fragile(plan, "single")
    batch = make_environment_batch(factory, [6], seed=0, max_failures=5)
    batch.reset()
    for _ in range(4):
        batch.step(np.zeros(1, np.int64))
    assert caplog.text.count("Environment 6 failed and is made anew") == 4
    assert caplog.text.count("Traceback") == 1
    assert caplog.text.count('raise RuntimeError("the simulator crashed")') == 1


def test_a_reward_that_is_no_number_is_named():
    batch = make_environment_batch(numbers("single", [("a lot", 0.0)] * 9), [6], 0, max_failures=2)
    batch.reset()
    with pytest.raises(EnvironmentFailedError, match=r"6.*a lot"):
        for _ in range(2):
            batch.step(np.zeros(1, np.int64))


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (np.ones(2), r"the reward must be a number, got array\(\[1., 1.\]\)"),
        (None, "the reward must be a number, got None"),
        (1j, "the reward must be a number, got 1j"),
    ],
)
def test_what_is_in_place_of_a_reward_is_shown(reward, words):
    batch = make_environment_batch(lambda: Scripted([[(reward, ON)]]), [6], 0, max_failures=1)
    batch.reset()
    with pytest.raises(EnvironmentFailedError, match=words):
        batch.step(np.zeros(1, np.int64))


def test_a_reward_in_an_array_of_one_is_taken():
    script = [[(np.array([[2.5]]), ON), (3.0, ON)]]
    batch = make_environment_batch(lambda: Scripted(script), [0], 0, max_failures=1)
    batch.reset()
    (rows,) = batch.step(np.zeros(1, np.int64))
    assert rows.env_outputs.reward.tolist() == [2.5] == rows.raw_rewards.tolist()


class Returning(Scripted):
    """Returns from `reset` or `step` what it is given."""

    def __init__(self, returned, by):
        super().__init__(STEADY)
        self._returned, self._by = returned, by

    def reset(self, **kwargs):
        return self._returned if self._by == "reset" else super().reset(**kwargs)

    def step(self, action):
        return self._returned


@pytest.mark.parametrize("is_vector", [False, True])
@pytest.mark.parametrize(
    ("by", "returned", "words"),
    [
        ("reset", np.zeros(1, np.float32), r"reset\(\) returned a ndarray, expected .*\(obs"),
        ("reset", (np.zeros(1, np.float32), None), "a tuple of ndarray, NoneType, expected"),
        ("step", (np.zeros(1), 0.0, True, {}), r"step\(\) returned a tuple of ndarray, float, bo"),
        ("step", (np.zeros(1), 0.0, True, True, None), "bool, NoneType, expected.*info is a dict"),
        ("step", None, "step.* returned a NoneType, expected"),
    ],
)
def test_what_reset_and_step_return_in_place_of_their_tuples_is_said(
    is_vector, by, returned, words
):
    class Vector(gymnasium.vector.VectorEnv):
        num_envs = 1
        single_observation_space, single_action_space = BOX, spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return returned if by == "reset" else (np.zeros((1, 2), np.float32), {})

        def step(self, actions):
            return returned

        def close(self):
            pass

    def make_vector(env_indices):
        return Vector()

    make = make_vector if is_vector else lambda: Returning(returned, by)
    batch = make_environment_batch(make, [0], 0, max_failures=1)
    with pytest.raises(EnvironmentFailedError, match=f"{words}.*API of the old gym"):
        batch.reset()
        batch.step(np.zeros(1, np.int64))


@pytest.mark.parametrize("mode", [True, "sometimes", 7])
def test_an_autoreset_mode_that_is_none_is_named(mode):
    with pytest.raises(UserError, match=f"autoreset_mode {mode!r}.*SAME_STEP"):
        make_environment_batch(in_mode(mode), [0], 0)


@pytest.mark.parametrize("mode", ["SAME_STEP", "SameStep", AutoresetMode.SAME_STEP])
def test_an_autoreset_mode_may_be_named(mode):
    batch = make_environment_batch(in_mode(mode), [0], 0)
    batch.reset()
    (rows,) = batch.step(np.zeros(1, np.int64))
    # In this mode alone the step that ends an episode shows the next one.
    assert rows.env_outputs.done.tolist() == [True]


def in_mode(mode):
    class Ending(gymnasium.vector.VectorEnv):
        """Every step is the last one of an episode."""

        num_envs = 1
        single_observation_space, single_action_space = BOX, spaces.Discrete(2)
        metadata = {"autoreset_mode": mode}  # noqa: RUF012, as gymnasium has it

        def reset(self, *, seed=None, options=None):
            return np.zeros((1, 2), np.float32), {}

        def step(self, actions):
            yes = np.ones(1, bool)
            return np.zeros((1, 2), np.float32), np.ones(1), yes, ~yes, {}

    def make(env_indices):
        return Ending()

    return make


def with_observation(value, space):
    class Fixed(gymnasium.Env):
        observation_space = space
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return value, {}

    return lambda: Fixed()


BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


@pytest.mark.parametrize(
    ("value", "space"),
    [
        (np.array([0.25, 0.5], np.float64), BOX),
        (np.array([0.25, 0.5], np.float16), BOX),
        ([0.25, 0.5], BOX),
        (np.array([1, 0], np.int64), spaces.MultiBinary(2)),
        (np.array([3, 200], np.int64), spaces.Box(0, 255, (2,), np.uint8)),
        (3, spaces.Discrete(5)),
    ],
)
def test_observations_are_cast_where_that_is_safe(value, space):
    output = make_environment_batch(with_observation(value, space), [0], 0).reset().env_outputs
    assert output.observation.dtype == space.dtype
    np.testing.assert_array_equal(output.observation[0], value)


@pytest.mark.parametrize(
    ("value", "space", "words"),
    [
        (np.zeros(3, np.float32), BOX, r"expected.*\(2,\).*float32.*got.*\(3,\)"),
        (np.zeros(2, np.float32), spaces.Box(0, 255, (2,), np.uint8), r"expected.*uint8.*float32"),
        (np.array([0, 256]), spaces.Box(0, 255, (2,), np.uint8), r"uint8.*int64.*do not fit"),
        ({"a": 1}, BOX, r"expected.*got"),
        (np.zeros(2, np.float32), spaces.Dict(a=BOX), r"keys \['a'\].*ndarray"),
        ({"b": 1}, spaces.Dict(a=BOX), r"keys \['a'\], got \['b'\]"),
        (np.zeros(2, np.float32), spaces.Tuple([BOX]), r"tuple of 1, got ndarray"),
    ],
)
def test_an_observation_that_does_not_fit_its_space_is_an_error(value, space, words):
    batch = make_environment_batch(with_observation(value, space), [0], 0)
    with pytest.raises(ObservationError, match=f"(?i){words}"):
        batch.reset()


def test_a_partial_reset_need_not_show_the_other_environments():
    class Forgetful(SyncVectorEnv):
        def reset(self, *, seed=None, options=None):
            mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool)).copy()
            observation, infos = super().reset(seed=seed, options=options)
            observation[~mask] = -1
            return observation, infos

    def make(env_indices):
        makers = [functools.partial(single(), index) for index in env_indices]
        return Forgetful(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)

    steps = play(make, num_steps=10)
    assert rows_of(0, steps)[: len(ENDING_ROWS)] == ENDING_ROWS
    assert rows_of(1, steps) == STEADY_ROWS[:11]


class Nested(gymnasium.Env):
    """Observes a dict with a tuple in it; every number is the step."""

    observation_space = spaces.Dict(
        z=spaces.Tuple([spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(50)]),
        a=spaces.MultiBinary(3),
    )
    action_space = spaces.Discrete(2)
    _t = 0

    def _observe(self):
        return {
            "z": (np.full((2, 2), self._t, np.uint8), np.int64(self._t)),
            "a": np.full(3, self._t % 2, np.int8),
        }

    def reset(self, *, seed=None, options=None):
        self._t = 0
        return self._observe(), {}

    def step(self, action):
        self._t += 1
        return self._observe(), 0.0, False, self._t == 3, {}


@pytest.mark.parametrize("form", ["single", *list(AutoresetMode)])
def test_nested_observations(form):
    batch = make_environment_batch(made_in(form, lambda env_index: Nested()), [0, 1], 0)
    seen = [batch.reset()]
    for _ in range(4):
        seen.extend(batch.step(np.zeros(2, np.int64)))
    # 3 is the final observation of the cut episode, 0 the first one of the next.
    for t, rows in zip([0, 1, 2, 3, 0], seen, strict=False):
        observation = rows.env_outputs.observation
        assert set(observation) == {"a", "z"} and isinstance(observation["z"], tuple)
        np.testing.assert_array_equal(observation["z"][0], np.full((2, 2, 2), t, np.uint8))
        np.testing.assert_array_equal(observation["z"][1], [t, t])
        np.testing.assert_array_equal(observation["a"], np.full((2, 3), t % 2))


def test_a_vector_env_that_hides_the_final_observation_is_an_error():
    class Hiding(SyncVectorEnv):
        def step(self, actions):
            *result, infos = super().step(actions)
            infos.pop("final_obs", None)
            return *result, infos

    def make(env_indices):
        return Hiding([Nested], autoreset_mode=AutoresetMode.SAME_STEP)

    batch = make_environment_batch(make, [0], 0)
    batch.reset()
    for _ in range(2):
        batch.step(np.zeros(1, np.int64))
    with pytest.raises(ObservationError, match="final_obs"):
        batch.step(np.zeros(1, np.int64))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"env_indices": []}, "env_indices"),
        ({"env_indices": [1, 1]}, "env_indices"),
        ({"seed": -1}, "seed"),
        ({"max_failures": 0}, "max_failures"),
    ],
)
def test_wrong_arguments(kwargs, words):
    arguments: dict = {"factory": Nested, "env_indices": [0], "seed": 0, **kwargs}
    with pytest.raises(ValueError, match=words):
        make_environment_batch(**arguments)


def test_actions_of_another_shape_are_an_error():
    batch = make_environment_batch(Nested, [0, 1], 0)
    batch.reset()
    with pytest.raises(ValueError, match=r"\(2,\).*got \(3,\)"):
        batch.step(np.zeros(3, np.int64))


def test_environments_with_different_spaces_are_an_error():
    def make(env_index):
        env = Nested()
        env.action_space = spaces.Discrete(2 + env_index)
        return env

    with pytest.raises(ValueError, match="same spaces"):
        make_environment_batch(make, [0, 1], 0)


def test_render_gives_the_first_environments_frame():
    class Drawn(Nested):
        def __init__(self, env_index):
            self._frame = np.full((2, 2, 3), env_index, np.uint8)

        def render(self):
            return self._frame

    assert make_environment_batch(Drawn, [5, 6], 0).render()[0, 0, 0] == 5
    factory = vectorized(AutoresetMode.NEXT_STEP, Drawn)
    assert make_environment_batch(factory, [7], 0).render()[0, 0, 0] == 7
