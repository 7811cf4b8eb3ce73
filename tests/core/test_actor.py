"""The actor against a real server whose learner is scripted."""

import subprocess
import sys
import threading
import time
import types

import gymnasium
import numpy as np
import pytest

from seed_rl import actor as actor_module
from seed_rl.actor import Actor, LearnerLostError
from seed_rl.environment import make_environment_batch
from seed_rl.grpc_service import (
    EnvironmentsInUseError,
    MessageTooLargeError,
    RemoteFunctionError,
    Server,
    SignatureError,
    TensorSpec,
    UnavailableError,
)
from seed_rl.inference import TrainingFinished, inference_input_specs, inference_output_specs
from seed_rl.unroll_queue import QueueClosedError

SOON = 30.0  # seconds; how long a test waits for what happens at once


DYING_ACTOR = """
import sys, numpy as np
from seed_rl.grpc_service import Client
from seed_rl.structures import EnvOutput
client = Client(sys.argv[1], environments=range(5, 7))
zeros, flags = np.zeros(2, np.float32), np.zeros(2, bool)
env_outputs = EnvOutput(zeros, flags, np.zeros((2, 2), np.float32), flags, np.zeros(2, np.int32))
while True:
    client.inference(np.array([5, 6], np.int32), np.array([1, 1]), env_outputs, zeros)
"""


def wait_until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Scripted(gymnasium.Env):
    """Observes (env_index, steps); writes its actions down."""

    observation_space = gymnasium.spaces.Box(-1000, 1000, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(100)
    truncate_at = None  # env_index, step
    terminate_at = None  # env_index, step
    fail_at = None  # env_index, step, once

    def __init__(self, env_index, log):
        self.env_index, self.log = env_index, log

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        self.log.append((self.env_index, self.steps, int(action)))
        if self.fail_at == (self.env_index, self.steps) and "failed" not in self.log:
            self.log.append("failed")
            raise RuntimeError("torn")
        truncated = self.truncate_at == (self.env_index, self.steps)
        terminated = self.terminate_at == (self.env_index, self.steps)
        return self._observation(), float(self.steps), terminated, truncated, {"raw_reward": 7.0}

    def _observation(self):
        return np.array([self.env_index, self.steps], np.float32)


class Learner:
    """Serves `inference`: keeps the calls, answers 10 · (number of the call) + row, modulo 100.

    After `num_calls` it raises `last`; it sets `done` before.
    """

    def __init__(
        self, address, num_calls, last, num_environments=100, observation=(2,), action="", **kwargs
    ):
        self.calls, self.done = [], threading.Event()
        self._num_calls, self._last = num_calls, last
        self.server = Server(
            [address], num_environments=num_environments, max_batch_wait=0.0, **kwargs
        )
        self.server.bind(
            self.inference,
            input_signature=inference_input_specs(TensorSpec(observation, np.float32)),
            output_signature=inference_output_specs(TensorSpec((), np.int32, action)),
        )

    def inference(self, env_ids, run_ids, env_outputs, raw_rewards):
        if len(self.calls) == self._num_calls:
            self.done.set()
            raise self._last
        values = (env_ids, run_ids, *env_outputs, raw_rewards)
        self.calls.append([np.array(value) for value in values])
        return ((10 * (len(self.calls) - 1) + np.arange(len(env_ids))) % 100).astype(np.int32)

    def column(self, index):
        return [call[index].tolist() for call in self.calls]


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/learner"


@pytest.fixture
def make_actor(address):
    """Returns a function that makes (actor, what the environments wrote down)."""
    batches = []

    def make(num_envs=2, first_env_id=5, settings=None, **kwargs):
        log = []
        env_class = type("Env", (Scripted,), settings or {})
        env_indices = range(first_env_id, first_env_id + num_envs)
        batch = make_environment_batch(
            lambda env_index=0: env_class(env_index, log), env_indices, 0
        )
        batches.append(batch)
        return Actor(batch, first_env_id, address, **kwargs), log

    yield make
    for batch in batches:
        batch.close()


def test_rows_go_out_in_order_and_answers_reach_their_environments(address, make_actor):
    actor, log = make_actor(num_envs=3)
    learner = Learner(address, 3, TrainingFinished("enough"))
    with learner.server:
        learner.server.start()
        actor.run()  # ends, because training is finished
    assert learner.column(0) == [[5, 6, 7]] * 3
    assert learner.calls[0][0].dtype == np.int32
    run_ids = learner.column(1)
    assert run_ids[0] == run_ids[1] == run_ids[2]
    assert len(set(run_ids[0])) == 3
    assert learner.column(2) == [[0.0] * 3, [1.0] * 3, [2.0] * 3]  # rewards
    assert learner.column(3) == [[False] * 3] * 3
    assert learner.column(4) == [[[5, n], [6, n], [7, n]] for n in range(3)]
    assert learner.column(6) == [[n] * 3 for n in range(3)]  # episode_step
    assert learner.column(7) == [[0.0] * 3, [7.0] * 3, [7.0] * 3]  # raw rewards
    assert log == [
        (env, step, 10 * (step - 1) + env - 5) for step in (1, 2, 3) for env in (5, 6, 7)
    ]


def test_the_log_says_when_there_is_a_learner(address, make_actor, monkeypatch):
    said = []
    monkeypatch.setattr(
        actor_module.logging, "info", lambda words, *values: said.append(words % values)
    )
    actor, _ = make_actor(num_envs=3)
    learner = Learner(address, 1, TrainingFinished("enough"))
    with learner.server:
        learner.server.start()
        actor.run()
    assert said == [
        f"connected to the learner at {address}, with the environments 5 to 7",
        "training is finished",
    ]


def test_a_truncated_episode_shows_its_final_observation_first(address, make_actor):
    actor, log = make_actor(settings={"truncate_at": (6, 2)})
    learner = Learner(address, 5, TrainingFinished("enough"))
    with learner.server:
        learner.server.start()
        actor.run()
    # Environment 6 is cut at its second step: a row of its own, then one with the others.
    assert learner.column(0) == [[5, 6], [5, 6], [6], [5, 6], [5, 6]]
    assert learner.column(4)[2:] == [[[6, 2]], [[5, 2], [6, 0]], [[5, 3], [6, 1]]]
    assert learner.column(3)[2:] == [[False], [False, True], [False, False]]
    assert learner.column(5)[2:] == [[False], [False, True], [False, False]]
    assert len({tuple(run_ids) for run_ids in learner.column(1) if len(run_ids) == 2}) == 1
    # The answer of call 2, 20, was for the final observation; what counts is that of call 3.
    assert [entry for entry in log if entry[0] == 6] == [
        (6, 1, 1),
        (6, 2, 11),
        (6, 1, 31),
        (6, 2, 41),
    ]
    assert [entry for entry in log if entry[0] == 5][:3] == [(5, 1, 0), (5, 2, 10), (5, 3, 30)]


def test_rows_of_some_environments_leave_the_answers_of_the_others_as_they_were(address):
    """A vector environment that spends a step on its reset: nothing is told of it before."""
    log = []
    env_class = type("Env", (Scripted,), {"terminate_at": (6, 2)})

    def make(env_indices):
        return gymnasium.vector.SyncVectorEnv(
            [lambda index=index: env_class(index, log) for index in env_indices]
        )

    environments = make_environment_batch(make, [5, 6], 0)
    learner = Learner(address, 5, TrainingFinished("enough"))
    with learner.server:
        learner.server.start()
        Actor(environments, 5, address).run()
    environments.close()
    assert learner.column(0) == [[5, 6], [5, 6], [5], [5, 6], [5, 6]]
    assert learner.column(3)[3] == [False, True]
    assert [entry for entry in log if entry[0] == 5][:4] == [
        (5, 1, 0),
        (5, 2, 10),
        (5, 3, 20),
        (5, 4, 30),
    ]
    assert [entry for entry in log if entry[0] == 6] == [
        (6, 1, 1),
        (6, 2, 11),
        (6, 1, 31),
        (6, 2, 41),
    ]


def test_an_environment_that_failed_goes_on_under_a_new_run_id_alone(address, make_actor):
    actor, _ = make_actor(settings={"fail_at": (5, 2)})
    learner = Learner(address, 4, TrainingFinished("enough"))
    with learner.server:
        learner.server.start()
        actor.run()
    first, second = zip(*learner.column(1), strict=True)
    assert first[0] == first[1] != first[2] == first[3]
    assert len(set(second)) == 1
    assert learner.column(3)[2] == [True, False]


def test_after_a_lost_learner_everything_begins_anew(address, make_actor):
    actor, _ = make_actor()
    first = Learner(address, 3, QueueClosedError("stopping"))
    second = Learner(address, 2, TrainingFinished("enough"))
    thread = threading.Thread(target=actor.run, daemon=True)
    with first.server:
        first.server.start()
        thread.start()
        assert first.done.wait(SOON)
    with second.server:
        second.server.start()
        thread.join(SOON)
        assert not thread.is_alive()
    old, new = set(first.column(1)[0]), set(second.column(1)[0])
    assert len(old) == len(new) == 2
    assert not old & new
    assert second.column(0) == [[5, 6], [5, 6]]
    assert second.column(4)[0] == [[5, 0], [6, 0]]  # the environments were reset
    assert second.column(2)[0] == [0.0, 0.0]


def test_a_learner_that_vanishes_while_it_owes_an_answer_is_awaited(address, make_actor):
    actor, _ = make_actor()
    entered, release = threading.Event(), threading.Event()

    class Hanging(Learner):
        def inference(self, *args):
            entered.set()
            release.wait(SOON)
            return super().inference(*args)

    first = Hanging(address, 3, TrainingFinished("never"))
    second = Learner(address, 2, TrainingFinished("enough"))
    thread = threading.Thread(target=actor.run, daemon=True)
    first.server.start()
    thread.start()
    assert entered.wait(SOON)
    first.server.shutdown(grace=0.0)
    with second.server:
        second.server.start()
        thread.join(SOON)
        assert not thread.is_alive()
    release.set()
    assert len(second.calls) == 2


def test_a_failure_of_the_learners_function_reaches_the_actor(address, make_actor):
    actor, _ = make_actor()
    learner = Learner(address, 1, FloatingPointError("the loss is NaN"))
    with learner.server:
        learner.server.start()
        with pytest.raises(RemoteFunctionError, match="the loss is NaN"):
            actor.run()


def test_too_many_environments_are_a_clear_error(address, make_actor):
    actor, _ = make_actor(num_envs=3, first_env_id=2)
    learner = Learner(address, 1, TrainingFinished("enough"), num_environments=4)
    with learner.server:
        learner.server.start()
        with pytest.raises(
            SignatureError, match=r"environments 2 to 4 were .* has 4, 0 to 3; .*--num_envs"
        ):
            actor.run()
    assert not learner.calls


def test_a_learner_made_for_other_observations_is_a_clear_error(address, make_actor):
    actor, log = make_actor()
    learner = Learner(address, 1, TrainingFinished("enough"), observation=(3,))
    with learner.server:
        learner.server.start()
        with pytest.raises(SignatureError, match=r"another environment.*observation.*--gin_config"):
            actor.run()
    assert not learner.calls
    assert log == []  # not even a reset


@pytest.mark.parametrize(
    ("learners", "right"), [("action, one of 100", True), ("action, one of 18", False)]
)
def test_a_learner_made_for_other_actions_is_a_clear_error(address, make_actor, learners, right):
    actor, _ = make_actor()
    learner = Learner(address, 1, TrainingFinished("enough"), action=learners)
    with learner.server:
        learner.server.start()
        if right:
            actor.run()
        else:
            with pytest.raises(SignatureError, match=r"one of 18.* actor's are .*one of 100"):
                actor.run()
    assert len(learner.calls) == right


@pytest.mark.parametrize("whose", ["actor", "learner"])
def test_observations_that_fit_in_no_message_are_a_clear_error(address, make_actor, whose):
    limits = {whose: {"max_message_bytes": 80}}
    actor, _ = make_actor(**limits.get("actor", {}))
    learner = Learner(address, 1, TrainingFinished("enough"), **limits.get("learner", {}))
    if whose == "actor":  # its limit holds for the handshake, too
        expected = r"max_message_bytes|larger than max"
    else:
        expected = r"more than the 80 that fit .*--env_batch_size.*Learner.max_message_bytes=N"
    with learner.server:
        learner.server.start()
        with pytest.raises(MessageTooLargeError, match=expected):
            actor.run()
    assert not learner.calls


def test_a_second_actor_with_the_same_environments_is_refused(address, make_actor):
    """And the first notices nothing; one with others joins it."""
    first, _ = make_actor(num_envs=2, first_env_id=4)
    second, log = make_actor(num_envs=3, first_env_id=2, takeover_secs=0.3)
    other, _ = make_actor(num_envs=2, first_env_id=6)
    learner = Learner(address, 10**9, TrainingFinished("never"))
    stop = threading.Event()
    with learner.server:
        learner.server.start()
        thread = threading.Thread(target=first.run, args=(stop.is_set,))
        thread.start()
        wait_until(lambda: learner.calls)
        with pytest.raises(
            EnvironmentsInUseError,
            match=r"environments 2 to 4 .* 4 to 5 are in use .* this machine .*--task",
        ):
            second.run()
        assert log == []
        other.run(lambda: any(6 in call[0] for call in learner.calls))
        num_calls = len(learner.calls)
        wait_until(lambda: len(learner.calls) > num_calls + 5)
        stop.set()
        thread.join(SOON)
    assert not thread.is_alive()
    runs = {run for call in learner.calls for env, run in zip(*call[:2], strict=True) if env == 4}
    assert len(runs) == 1


def test_a_new_actor_has_the_environments_of_one_that_died(address, make_actor):
    """Killed in the midst of a call: its successor, a process of its own, takes over."""
    learner = Learner(address, 10**9, TrainingFinished("never"))
    with learner.server:
        learner.server.start()
        process = subprocess.Popen([sys.executable, "-c", DYING_ACTOR, address])
        wait_until(lambda: len(learner.calls) > 3)
        process.kill()
        process.wait()
        dead = len(learner.calls)
        actor, _ = make_actor(num_envs=2, first_env_id=5)
        actor.run(lambda: len(learner.calls) > dead + 3)
    assert learner.column(0)[-1] == [5, 6]
    assert learner.column(1)[-1] != learner.column(1)[0]


def test_it_stops_when_told_to_while_it_acts(address, make_actor):
    actor, _ = make_actor()
    learner = Learner(address, 10**9, TrainingFinished("never"))
    with learner.server:
        learner.server.start()
        actor.run(lambda: len(learner.calls) >= 5)
    assert len(learner.calls) == 5


class NoLearner:
    """A clock that goes on while its owner sleeps, and a client that finds no server."""

    def __init__(self, monkeypatch):
        self.now, self.naps, self.num_connects = 1000.0, [], 0
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(actor_module, "time", clock)
        monkeypatch.setattr(actor_module, "Client", self._connect)

    def _sleep(self, seconds):
        self.naps.append(seconds)
        self.now += seconds

    def _connect(self, address, **kwargs):
        self.num_connects += 1
        raise UnavailableError("nobody there")


def test_no_learner_for_too_long_ends_the_actor(monkeypatch, address, make_actor):
    world = NoLearner(monkeypatch)
    actor, _ = make_actor(reconnect_secs=60.0)
    with pytest.raises(LearnerLostError, match=f"at {address} for 60 seconds"):
        actor.run()
    # The longest pause is 10 seconds, and half as much again.
    assert 60.0 < world.now - 1000.0 <= 75.0
    assert world.num_connects >= 5


def test_it_stops_soon_when_told_to_while_it_waits_for_a_learner(monkeypatch, address, make_actor):
    world = NoLearner(monkeypatch)
    actor, _ = make_actor(reconnect_secs=600.0)
    actor.run(lambda: world.now > 1050.0)
    assert max(world.naps) < 1.0
    assert world.now < 1051.0


HANGING = """
import time
import numpy as np, gymnasium
from seed_rl.actor import Actor
from seed_rl.environment import make_environment_batch

class Hanging(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        if {when!r} == "reset":
            time.sleep(1000)
        return np.zeros(2, np.float32), {{}}
    def step(self, action):
        time.sleep(1000)

batch = make_environment_batch(lambda env_index=0: Hanging(), [4, 5], 0)
Actor(batch, 4, {address!r}, max_env_seconds=0.5).run()
"""


@pytest.mark.parametrize("when", ["reset", "step"])
def test_an_actor_whose_environments_hang_ends_with_the_reason(address, when):
    learner = Learner(address, 3, TrainingFinished("enough"))
    with learner.server:
        learner.server.start()
        result = subprocess.run(
            [sys.executable, "-c", HANGING.format(when=when, address=address)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 3
    assert f"error: {when} of the environments 4 to 5 has taken more than 0.5 s" in result.stderr
