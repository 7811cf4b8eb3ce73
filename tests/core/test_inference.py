"""Central inference with a scripted policy, beside a plain recomputation of each environment."""

import functools
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

from seed_rl.episode_statistics import EpisodeStatistics
from seed_rl.grpc_service import TensorSpec
from seed_rl.inference import (
    CentralInference,
    TrainingFinished,
    inference_input_specs,
    inference_output_specs,
)
from seed_rl.queue_sink import QueueSink
from seed_rl.structures import EnvOutput

SOON = 20.0  # seconds; how long a test waits for what happens at once
OBSERVATION = TensorSpec((2,), np.float32)
ACTION = TensorSpec((), np.int32)


class Output(NamedTuple):
    action: Any
    value: Any


class ScriptedAgent:
    """Counts in its state and acts on all it is given; every row depends on itself alone."""

    num_actions = 7

    def __init__(self, unroll_length, num_overlapping_steps=0, num_eval_envs=0):
        self.num_eval_envs = num_eval_envs
        self.unroll_length = unroll_length
        self.num_overlapping_steps = num_overlapping_steps
        self.sizes = []  # of the batches it was called with

    def initial_state(self, batch_size):
        return {"sum": np.full((batch_size, 2), 3, np.float32)}

    def policy(self, env_ids, prev_actions, env_outputs, agent_state):
        self.sizes.append(len(env_ids))
        done = env_outputs.done[:, None]
        before = np.where(done, np.float32(3), agent_state["sum"])
        # Small whole numbers: float32 holds them exactly, whatever the order of additions.
        actions = prev_actions[:, None].astype(np.float32)
        total = (before + env_outputs.observation + actions) % np.float32(1000)
        action = (total.sum(-1) + env_ids + env_outputs.reward) % self.num_actions
        value = np.stack([total[:, 0], env_outputs.reward], -1)
        return Output(action.astype(np.int32), value.astype(np.float32)), {"sum": total}


class ListSink:
    """Keeps finished unrolls by environment."""

    def __init__(self):
        self.unrolls = {}

    def put(self, unrolls):
        for row in range(len(unrolls.env_id)):
            unroll = Unrolled(
                unrolls.agent_state["sum"][row],
                unrolls.prev_actions[row],
                EnvOutput(*(leaf[row] for leaf in unrolls.env_outputs)),
                Output(*(leaf[row] for leaf in unrolls.agent_outputs)),
                int(unrolls.policy_version[row]),
            )
            self.unrolls.setdefault(int(unrolls.env_id[row]), []).append(unroll)


class Unrolled(NamedTuple):
    state: Any
    prev_actions: Any
    env_outputs: EnvOutput
    agent_outputs: Output
    policy_version: int


class Setup:
    """A CentralInference with everything around it in sight."""

    def __init__(self, agent, num_envs, sink=None, batch_sizes=(1, 2, 4), policies=None):
        self.agent = agent
        self.sink = sink or ListSink()
        self.statistics = EpisodeStatistics(num_envs, action_repeat=1)
        self.eval_statistics = EpisodeStatistics(num_envs, action_repeat=1)
        self.version = 0
        self.policies = policies or [agent.policy]
        self.inference = CentralInference(
            agent,
            self.policies,
            OBSERVATION,
            ACTION,
            num_envs,
            self.sink,
            self.statistics,
            lambda: self.version,
            batch_sizes,
            self.eval_statistics,
        )
        agent.sizes.clear()

    def step(self, env_ids, run_ids, outputs=None, raw_rewards=None, policy=0):
        env_ids = np.asarray(env_ids, np.int32)
        outputs = outputs or quiet(len(env_ids))
        raw = outputs.reward if raw_rewards is None else np.asarray(raw_rewards, np.float32)
        run_ids = np.broadcast_to(np.asarray(run_ids, np.int64), env_ids.shape)
        return self.inference.step(self.policies[policy], env_ids, run_ids, outputs, raw)


def quiet(size, reward=0.0, done=False, abandoned=False, observation=1.0):
    """EnvOutput of `size` rows, the same in each or given as sequences."""

    def rows(value, dtype, shape=()):
        value = np.asarray(value, dtype).reshape((-1,) + (1,) * len(shape))
        return np.broadcast_to(value, (size, *shape)).copy()

    return EnvOutput(
        reward=rows(reward, np.float32),
        done=rows(done, bool),
        observation=rows(observation, np.float32, (2,)),
        abandoned=rows(abandoned, bool),
        episode_step=rows(0, np.int32),
    )


class PlainEnvironment:
    """What the learner must know of one environment, recomputed step by step from its start."""

    def __init__(self, env_id, agent):
        self.env_id, self.agent = env_id, agent
        self.run_id = None
        self.unrolls, self.episodes, self.num_steps = [], [], 0

    def step(self, run_id, output, raw_reward, version):
        """`output` has rank-0 leaves; returns the action."""
        first = run_id != self.run_id
        if first:
            self.run_id = run_id
            self.state = self.agent.initial_state(1)["sum"][0]
            self.action = np.int32(0)
            self.history = []  # (state before, version, prev_action, env_output, agent_output)
            self.running = np.zeros(3)
            output = output._replace(
                reward=np.float32(0), done=np.bool_(True), abandoned=np.bool_(True)
            )
        else:
            self._count(output, raw_reward)
        batch = EnvOutput(*(np.asarray(x)[None] for x in output))
        outputs, state = self.agent.policy(
            np.array([self.env_id]), self.action[None], batch, {"sum": self.state[None]}
        )
        outputs = Output(outputs.action[0], outputs.value[0])
        self.history.append((self.state, version, self.action, output, outputs))
        self.state, self.action = state["sum"][0], outputs.action
        self._cut()
        return self.action

    def _count(self, output, raw_reward):
        step = 0 if output.abandoned else 1
        self.num_steps += step
        self.running += [step, output.reward, raw_reward]
        if output.done:
            self.episodes.append((self.env_id, *self.running))
            self.running = np.zeros(3)

    def _cut(self):
        """Unroll k holds real steps kT - overlap to kT + T, zeros where there were none yet."""
        length, overlap = self.agent.unroll_length, self.agent.num_overlapping_steps
        if len(self.history) == 1 or (len(self.history) - 1) % length:
            return
        first = len(self.history) - 1 - length - overlap
        state, version = self.history[max(0, first)][:2]
        window = [self.zero_step()] * max(0, -first) + self.history[max(0, first) :]
        prev_actions, env_outputs, agent_outputs = zip(*(w[2:] for w in window), strict=True)
        self.unrolls.append(
            Unrolled(
                state,
                np.array(prev_actions),
                EnvOutput(*(np.array(column) for column in zip(*env_outputs, strict=True))),
                Output(*(np.array(column) for column in zip(*agent_outputs, strict=True))),
                version,
            )
        )

    @staticmethod
    def zero_step():
        output = EnvOutput(
            np.float32(0), np.bool_(False), np.zeros(2, np.float32), np.bool_(False), np.int32(0)
        )
        return None, None, np.int32(0), output, Output(np.int32(0), np.zeros(2, np.float32))


def assert_same_unrolls(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.state, other.state)
        np.testing.assert_array_equal(one.prev_actions, other.prev_actions)
        for name in EnvOutput._fields:
            np.testing.assert_array_equal(
                getattr(one.env_outputs, name), getattr(other.env_outputs, name), name
            )
        np.testing.assert_array_equal(one.agent_outputs.action, other.agent_outputs.action)
        np.testing.assert_array_equal(one.agent_outputs.value, other.agent_outputs.value)
        assert one.policy_version == other.policy_version


def random_outputs(rng, size):
    done = rng.random(size) < 0.15
    return EnvOutput(
        reward=rng.integers(0, 5, size).astype(np.float32),
        done=done,
        observation=rng.integers(0, 50, (size, 2)).astype(np.float32),
        abandoned=done & (rng.random(size) < 0.5),
        episode_step=rng.integers(0, 99, size).astype(np.int32),
    )


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("unroll_length", "overlap"), [(1, 0), (4, 0), (4, 1), (4, 3), (5, 2)])
def test_everything_agrees_with_a_plain_recomputation(unroll_length, overlap, seed):
    """Random batches: any environments, some twice, at times restarted, of any size."""
    num_envs = 5
    rng = np.random.default_rng(seed)
    setup = Setup(ScriptedAgent(unroll_length, overlap), num_envs)
    plain_agent = ScriptedAgent(unroll_length, overlap)
    plain = [PlainEnvironment(i, plain_agent) for i in range(num_envs)]
    run_ids = np.arange(1, num_envs + 1) * 100
    for _ in range(250):
        env_ids = rng.integers(0, num_envs, rng.integers(1, 7))
        if rng.random() < 0.7:
            env_ids = np.unique(env_ids)
        restarted = rng.integers(0, num_envs)
        run_ids[restarted] += rng.random() < 0.05
        outputs = random_outputs(rng, len(env_ids))
        raw_rewards = 10 * outputs.reward + 1
        setup.version += int(rng.random() < 0.3)
        answers = setup.step(env_ids, run_ids[env_ids], outputs, raw_rewards)
        expected = [
            plain[env_id].step(
                run_ids[env_id],
                EnvOutput(*(x[row] for x in outputs)),
                raw_rewards[row],
                setup.version,
            )
            for row, env_id in enumerate(env_ids)
        ]
        assert answers.dtype == np.int32
        np.testing.assert_array_equal(answers, expected)
    for env_id in range(num_envs):
        assert plain[env_id].unrolls
        assert_same_unrolls(setup.sink.unrolls[env_id], plain[env_id].unrolls)
    assert setup.inference.num_steps == sum(p.num_steps for p in plain)
    episodes = [
        (int(env_id), int(frames), float(returns), float(raw))
        for info in setup.statistics.take_finished()
        for frames, returns, raw, env_id in zip(*info, strict=True)
    ]
    assert sorted(episodes) == sorted(episode for p in plain for episode in p.episodes)
    assert episodes


def test_batches_are_padded_to_the_smallest_size_that_holds_them():
    setup = Setup(ScriptedAgent(5), num_envs=8, batch_sizes=(4, 1, 6))
    for size in (1, 2, 4, 5, 6, 8):
        assert setup.step(np.arange(size), 1).shape == (size,)
    assert setup.agent.sizes == [1, 4, 4, 6, 6, 8]


def test_the_first_row_of_a_run_opens_an_episode_and_is_no_step():
    setup = Setup(ScriptedAgent(1), num_envs=1)
    setup.step([0], 7, quiet(1, reward=5.0, observation=2.0))
    assert setup.inference.num_steps == 0
    setup.step([0], 7, quiet(1, reward=6.0))
    assert setup.inference.num_steps == 1
    (unroll,) = setup.sink.unrolls[0]
    assert unroll.env_outputs.reward.tolist() == [0.0, 6.0]
    assert unroll.env_outputs.done.tolist() == [True, False]
    assert unroll.env_outputs.abandoned.tolist() == [True, False]
    np.testing.assert_array_equal(unroll.env_outputs.observation[0], [2, 2])


def test_an_abandoned_row_is_no_step():
    setup = Setup(ScriptedAgent(3), num_envs=2)
    setup.step([0, 1], 7)
    setup.step([0, 1], 7, quiet(2, done=[True, True], abandoned=[True, False]))
    assert setup.inference.num_steps == 1


def test_rows_of_one_environment_in_one_batch_are_taken_in_their_order():
    # The state of environment 1 adds up observations: 3 + 1, then + 10 and the action, and so on.
    setup = Setup(ScriptedAgent(2), num_envs=3)
    observations = [1.0, 50.0, 10.0, 60.0, 100.0]
    answers = setup.step([1, 0, 1, 2, 1], 7, quiet(5, observation=observations))

    def act(total, env_id):
        return (2 * total + env_id) % 7

    first = act(3 + 1, 1)
    second = act(3 + 1 + 10 + first, 1)
    third = act(3 + 1 + 10 + first + 100 + second, 1)
    assert answers.tolist() == [first, act(53, 0), second, act(63, 2), third]
    (unroll,) = setup.sink.unrolls[1]
    assert unroll.env_outputs.observation[:, 0].tolist() == [1, 10, 100]
    assert unroll.prev_actions.tolist() == [0, first, second]


def test_a_late_call_of_a_dead_actor_in_the_same_batch_leaves_no_trace_in_the_new_run():
    setup = Setup(ScriptedAgent(2), num_envs=1)
    setup.step([0], 1)
    setup.step([0, 0], [1, 2], quiet(2, observation=[5.0, 7.0]))
    setup.step([0], 2, quiet(1, observation=8.0))
    setup.step([0], 2, quiet(1, observation=9.0))
    (unroll,) = setup.sink.unrolls[0]
    assert unroll.env_outputs.observation[:, 0].tolist() == [7, 8, 9]
    assert unroll.prev_actions[0] == 0


def test_finished_training_is_told_to_those_that_are_expected():
    """Of several hosts, each expects its own environments."""
    setup = Setup(ScriptedAgent(2), num_envs=4)
    setup.inference.finish(expected=range(2, 4))
    for env_ids, everybody in (([0], False), ([2], False), ([3], True)):
        with pytest.raises(TrainingFinished):
            setup.step(env_ids, 1)
        assert setup.inference.everybody_knows == everybody


def test_finished_training_is_told_to_every_environment():
    setup = Setup(ScriptedAgent(2), num_envs=4)
    setup.step([0, 1], 1)
    setup.step([2], 1)
    assert not setup.inference.everybody_knows
    setup.inference.finish()
    assert not setup.inference.everybody_knows
    for env_ids, everybody in (([0, 1], False), ([2], True)):
        with pytest.raises(TrainingFinished, match="trained on all the frames"):
            setup.step(env_ids, 1)
        assert setup.inference.everybody_knows == everybody
    assert setup.inference.num_steps == 0


def test_wrong_input_is_named():
    setup = Setup(ScriptedAgent(2), num_envs=2)
    with pytest.raises(ValueError, match=r"\[0, 2\), got \[2\]"):
        setup.step([2], 1)
    with pytest.raises(ValueError, match=r"unroll_length \(2\) must be greater.*steps \(2\)"):
        Setup(ScriptedAgent(2, 2), num_envs=2)


def test_each_bound_function_runs_its_own_policy():
    agent = ScriptedAgent(3)

    def constant(env_ids, prev_actions, env_outputs, agent_state):
        outputs, state = agent.policy(env_ids, prev_actions, env_outputs, agent_state)
        return outputs._replace(action=np.full(len(env_ids), 99, np.int32)), state

    setup = Setup(agent, num_envs=2, policies=[agent.policy, constant])
    first, second = setup.inference.functions()
    assert first.__name__ == second.__name__ == "inference"
    rows = np.array([0, 1], np.int32), np.array([5, 5]), quiet(2), np.zeros(2, np.float32)
    assert second(*rows).tolist() == [99, 99]
    # Same run: state and last action, 99, were kept whatever the policy. Now 3 + 1 + 1 + 99 = 104.
    assert first(*rows).tolist() == [208 % 7, 209 % 7]


def test_signature_of_the_bound_function():
    env_ids, run_ids, outputs, raw_rewards = inference_input_specs({"x": OBSERVATION})
    assert (env_ids.shape, env_ids.dtype) == ((None,), np.int32)
    assert (run_ids.shape, run_ids.dtype) == ((None,), np.int64)
    assert (raw_rewards.shape, raw_rewards.dtype) == ((None,), np.float32)
    assert (outputs.observation["x"].shape, outputs.observation["x"].dtype) == (
        (None, 2),
        np.float32,
    )
    dtypes = [getattr(outputs, n).dtype for n in ("reward", "done", "abandoned", "episode_step")]
    assert dtypes == [np.float32, np.bool_, np.bool_, np.int32]
    actions = inference_output_specs((ACTION, TensorSpec((3,), np.float32)))
    assert [(a.shape, a.dtype) for a in actions] == [((None,), np.int32), ((None, 3), np.float32)]


def in_thread(function):
    """Starts `function` in a thread; returns a function that joins it and gives its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()

    def join():
        thread.join(SOON)
        assert not thread.is_alive(), "still waiting"
        assert result, "raised"
        return result[0]

    return join


def test_a_full_sink_holds_up_only_whom_it_must():
    class GatedSink(ListSink):
        def __init__(self):
            super().__init__()
            self.entered, self.gate = threading.Event(), threading.Event()

        def put(self, unrolls):
            self.entered.set()
            assert self.gate.wait(SOON)
            super().put(unrolls)

    sink = GatedSink()
    setup = Setup(ScriptedAgent(2), num_envs=2, sink=sink)
    setup.step([0], 1)
    setup.step([0], 1)
    waiting = in_thread(lambda: setup.step([0], 1))
    assert sink.entered.wait(SOON)
    joined = in_thread(lambda: setup.step([1], 1))
    assert joined().shape == (1,)
    assert not sink.unrolls
    sink.gate.set()
    waiting()
    assert list(sink.unrolls) == [0]


def test_back_pressure_neither_deadlocks_nor_loses_unrolls():
    """Three callers with two environments each, two policies, room for two unrolls."""
    num_callers, num_steps, length = 3, 40, 3
    agent = ScriptedAgent(length)
    full = threading.Event()

    class SmallSink(QueueSink):
        def put(self, unrolls):
            if self.metrics()["queue_length"] == 2:
                full.set()
            super().put(unrolls)

    sink = SmallSink(batch_size=1, capacity=2)
    setup = Setup(agent, 2 * num_callers, sink, policies=[agent.policy, agent.policy])

    def act(caller):
        for number in range(num_steps + 1):
            env_ids = [2 * caller, 2 * caller + 1]
            setup.step(env_ids, 1, quiet(2, observation=float(number)), policy=caller % 2)
        return True

    callers = [in_thread(functools.partial(act, caller)) for caller in range(num_callers)]
    assert full.wait(SOON)  # nothing is taken before training has fallen behind
    taken = {}
    for _ in range(2 * num_callers * (num_steps // length)):
        batch = sink.next_batch(SOON)
        assert batch is not None
        numbers = batch.env_outputs.observation[:, 0, 0].tolist()
        taken.setdefault(int(batch.env_id[0]), []).append(numbers)
    assert all(join() for join in callers)
    assert sink.next_batch(0.0) is None
    expected = [[float(3 * k + i) for i in range(4)] for k in range(num_steps // length)]
    assert taken == dict.fromkeys(range(2 * num_callers), expected)
    assert setup.inference.num_steps == 2 * num_callers * num_steps


def test_a_call_overtaken_by_a_restart_leaves_no_trace_in_the_new_run():
    """An actor dies while one device works on its call; its successor's goes to another device."""
    agent = ScriptedAgent(2)
    entered, gate = threading.Event(), threading.Event()

    def slow(*inputs):
        entered.set()
        assert gate.wait(SOON)
        return agent.policy(*inputs)

    setup = Setup(agent, num_envs=2, policies=[agent.policy, slow])
    setup.step([0, 1], 1)
    late = in_thread(lambda: setup.step([0, 1], 1, quiet(2, observation=50.0), policy=1))
    assert entered.wait(SOON)
    first = int(setup.step([0], 2, quiet(1, observation=7.0))[0])
    gate.set()
    assert late().shape == (2,)
    answers = [first]
    for observation in (8.0, 9.0):
        answers.append(int(setup.step([0], 2, quiet(1, observation=observation))[0]))
    (unroll,) = setup.sink.unrolls[0]
    assert unroll.env_outputs.observation[:, 0].tolist() == [7, 8, 9]
    assert unroll.prev_actions.tolist() == [0, *answers[:2]]
    assert unroll.agent_outputs.action.tolist() == answers
    assert answers[1] == 2 * (3 + 7 + 8 + first) % 7
    setup.step([1], 1)  # its run goes on: the late call counted for it
    assert setup.sink.unrolls[1][0].env_outputs.observation[:, 0].tolist() == [1, 50, 1]


def test_restarts_are_counted():
    setup = Setup(ScriptedAgent(unroll_length=2), num_envs=3)
    setup.step([0, 1], 1)
    setup.step([0, 1, 2], 1)
    assert setup.inference.num_restarts == 0
    setup.step([0, 1, 2], [1, 2, 2])
    setup.step([0, 1], 3)
    assert setup.inference.num_restarts == 4


def test_environments_that_only_evaluate():
    setup = Setup(ScriptedAgent(unroll_length=2, num_eval_envs=2), num_envs=4)
    all_ids = [3, 0, 2, 1]
    plain = [PlainEnvironment(i, setup.agent) for i in range(4)]
    for t in range(6):
        output = quiet(4, reward=[30.0 + t, t, 20.0 + t, 10.0 + t], done=t in (3, 5))
        actions = setup.step(all_ids, 1, output)
        # They act like all others.
        for row, env_id in enumerate(all_ids):
            one = EnvOutput(*(leaf[row] for leaf in output))
            assert actions[row] == plain[env_id].step(1, one, one.reward, 0)
    assert sorted(setup.sink.unrolls) == [0, 1]
    for env_id in (0, 1):
        assert_same_unrolls(setup.sink.unrolls[env_id], plain[env_id].unrolls)
    assert setup.inference.num_steps == 5 * 2

    def ended(statistics):
        rows = [zip(e.env_ids, e.raw_returns, strict=True) for e in statistics.take_finished()]
        return sorted((int(i), float(r)) for part in rows for i, r in part)

    # The first reward belongs to the start and does not count: 1 + 2 + 3, and 4 + 5.
    assert ended(setup.statistics) == sorted([(0, 6.0), (0, 9.0), (1, 36.0), (1, 29.0)])
    assert ended(setup.eval_statistics) == sorted([(2, 66.0), (2, 49.0), (3, 96.0), (3, 69.0)])


def test_a_group_of_only_evaluating_or_only_training_environments():
    setup = Setup(ScriptedAgent(unroll_length=1, num_eval_envs=1), num_envs=2)
    for _ in range(3):
        setup.step([1], 1)
    assert setup.sink.unrolls == {}
    assert setup.inference.num_steps == 0
    for _ in range(3):
        setup.step([0], 1)
    assert len(setup.sink.unrolls[0]) == 2
    assert setup.inference.num_steps == 2
