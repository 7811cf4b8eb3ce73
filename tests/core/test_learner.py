"""The learner's loop, with a small agent and real actors over a socket."""

import errno
import itertools
import os
import threading

import gin
import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from seed_rl import learner as learner_module
from seed_rl.actor import Actor
from seed_rl.agent import LossOutputs
from seed_rl.agent_specs import agent_action_specs, agent_observation_specs
from seed_rl.environment import make_environment_batch
from seed_rl.grpc_service import Client, SignatureError
from seed_rl.learner import Learner, make_logdir, padded_sizes
from seed_rl.saving import SaveError
from seed_rl.structures import EnvOutput
from seed_rl.user_error import UserError

SOON = 60.0  # seconds; how long a test waits for what happens at once


class Countdown(gymnasium.Env):
    """Episodes of three steps that pay 1, 2 and 3."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.full(3, 0.1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return (
            np.full(3, 0.1 * self.steps, np.float32),
            float(self.steps),
            self.steps == 3,
            False,
            {},
        )


SPECS = (
    agent_observation_specs(Countdown.observation_space),
    agent_action_specs(Countdown.action_space),
)


@pytest.fixture
def make_agent(tiny_agent):
    """Returns a function that makes a TinyAgent whose loss takes unrolls."""

    class Agent(tiny_agent):
        def __init__(self, stop=None, stop_after=0):
            super().__init__()
            self.batches, self._stop, self._stop_after = [], stop, stop_after

        def make_unroll_sink(self, unroll_specs):
            sink = super().make_unroll_sink(unroll_specs)
            next_batch = sink.next_batch

            def noted(timeout):
                batch = next_batch(timeout)
                if batch is not None:
                    self.batches.append(batch)
                    if len(self.batches) == self._stop_after:
                        self._stop.set()
                return batch

            sink.next_batch = noted
            return sink

        def loss(self, batch):
            x = tf.reshape(batch.env_outputs.observation, [-1, 3])
            values = tf.matmul(x, self.network.weights) + self.network.bias
            loss = tf.reduce_mean(tf.square(values))
            return LossOutputs(loss, {"loss/values": loss}, ())

    return Agent


@pytest.fixture
def run_with_actors(tmp_path):
    """Returns a function that runs a learner of two environments, with an actor in a thread."""

    def run(agent, stop=None, logdir=tmp_path / "log", **settings):
        address = f"unix:{tmp_path}/s"
        learner = Learner(agent, *SPECS, 2, [address], str(logdir), **settings)
        environments = make_environment_batch(Countdown, [0, 1], 0)
        actor_stop = threading.Event()
        actor = threading.Thread(
            target=Actor(environments, 0, address).run, args=(actor_stop.is_set,), daemon=True
        )
        actor.start()
        finished = False
        try:
            learner.run(stop or threading.Event())
            finished = stop is None
        finally:
            if not finished:  # else it must end without being told
                actor_stop.set()
            actor.join(SOON)
            assert not actor.is_alive()
            environments.close()
        return learner

    return run


def scalars(logdir):
    """{tag: [(step, value)]} of the run's event files."""
    found: dict = {}
    for path in sorted(logdir.glob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(tf.make_ndarray(value.tensor))
                    found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_a_run_ends_at_its_frames_with_checkpoint_model_and_curves(
    tmp_path, make_agent, run_with_actors
):
    agent = make_agent()
    learner = run_with_actors(agent, total_frames=400, action_repeat=4)
    # Two environments step together: what runs on at the end is a queue's and a batch's worth.
    assert 400 <= learner.frames < 600
    log = tmp_path / "log"
    saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(log / "checkpoints")))
    value = "/.ATTRIBUTES/VARIABLE_VALUE"
    assert saved.get_tensor(f"frames{value}") == learner.frames
    num_steps = int(saved.get_tensor(f"training_steps{value}"))
    assert num_steps == int(agent.num_updates) > 0
    np.testing.assert_array_equal(
        saved.get_tensor(f"network/weights{value}"), agent.network.weights
    )
    assert (log / "saved_model" / "saved_model.pb").exists()
    assert (log / "operative_config.gin").exists()
    curves = scalars(log)
    assert curves["episode/return"] == [(learner.frames, 6.0)]  # 1 + 2 + 3
    assert curves["episode/length_frames"] == [(learner.frames, 12.0)]
    assert curves["training/steps"][-1] == (learner.frames, num_steps)
    for name in (
        "training/loss",
        "training/gradient_norm",
        "training/learning_rate",
        "loss/values",
        "data/queue_length",
        "data/policy_lag",
        "inference/batch_fill",
        "inference/latency_seconds",
        "speed/frames_per_second",
    ):
        assert name in curves, name


def test_every_transition_is_trained_on_once_and_in_order(make_agent, run_with_actors):
    agent = make_agent()
    run_with_actors(agent, total_frames=200)
    rewards = {0: [], 1: []}
    for batch in agent.batches:
        assert batch.env_outputs.reward.shape == (3, 2)  # unroll_length 2, batch_size 2
        for column, env_id in enumerate(batch.env_id.tolist()):
            rewards[env_id].append(batch.env_outputs.reward[:, column].tolist())
    for unrolls in rewards.values():
        joined = unrolls[0] + [reward for unroll in unrolls[1:] for reward in unroll[1:]]
        # The last step of an unroll is the first of the next, and a run begins with reward 0.
        assert all(a[-1] == b[0] for a, b in itertools.pairwise(unrolls))
        assert joined == [0.0] + [[1.0, 2.0, 3.0][i % 3] for i in range(len(joined) - 1)]
        assert len(joined) > 50


def test_a_stopped_run_is_saved_and_goes_on_where_it_was(tmp_path, make_agent, run_with_actors):
    stop = threading.Event()
    agent = make_agent(stop, stop_after=50)
    first = run_with_actors(agent, stop, total_frames=10**9)
    assert int(agent.num_updates) == 50
    assert not (tmp_path / "log" / "saved_model").exists()

    resumed = make_agent()
    second = run_with_actors(resumed, total_frames=first.frames + 50)
    assert second.frames >= first.frames + 50
    assert int(resumed.num_updates) > 50
    names = sorted(os.listdir(tmp_path / "log" / "checkpoints"))
    assert "ckpt-50.index" in names
    assert f"ckpt-{int(resumed.num_updates)}.index" in names
    # Only what is new was trained on: 50 frames, four a batch, and what ran on at the end.
    assert 8 <= len(resumed.batches) < 30


def test_a_run_that_has_all_its_frames_still_tells_the_actors(
    tmp_path, make_agent, run_with_actors
):
    first = run_with_actors(make_agent(), total_frames=100)
    again = make_agent()
    # run_with_actors waits for the actor to end of itself, which it does only if it is told.
    second = run_with_actors(again, total_frames=100)
    assert second.frames == first.frames
    assert not again.batches


def test_a_run_that_has_all_its_frames_ends_when_it_is_stopped(
    tmp_path, make_agent, run_with_actors, monkeypatch
):
    run_with_actors(make_agent(), total_frames=100)
    monkeypatch.setattr("seed_rl.learner._LATE_FAREWELL_SECONDS", 1e9)
    address, log = f"unix:{tmp_path}/s", str(tmp_path / "log")
    learner = Learner(make_agent(), *SPECS, 2, [address], log, total_frames=100)
    stop = threading.Event()
    next_batch = learner._sink.next_batch

    def stopped(timeout):  # called while it waits for actors, of which there are none
        stop.set()
        return next_batch(timeout)

    learner._sink.next_batch = stopped
    thread = threading.Thread(target=learner.run, args=(stop,), daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()


def test_what_the_loss_raises_ends_the_run_and_the_checkpoint_is_still_written(
    tmp_path, make_agent, run_with_actors
):
    class Failing(make_agent):
        def loss(self, batch):
            raise ArithmeticError("no such loss")

    with pytest.raises(ArithmeticError, match="no such loss"):
        run_with_actors(Failing(), total_frames=1000)
    assert tf.train.latest_checkpoint(str(tmp_path / "log" / "checkpoints")).endswith("ckpt-0")


def test_training_goes_on_without_room_and_only_a_failing_last_checkpoint_is_an_error(
    tmp_path, make_agent, run_with_actors, monkeypatch
):
    def full(self, frames, training_steps):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("seed_rl.checkpoints.Checkpoints.save", full)
    agent = make_agent()
    with pytest.raises(SaveError, match=r"No space left on device.*make room"):
        run_with_actors(agent, total_frames=100, save_checkpoint_secs=0.0)
    assert len(agent.batches) >= 20  # four frames each
    (*_, (frames, failed_saves)) = scalars(tmp_path / "log")["training/failed_saves"]
    assert frames >= 100
    assert failed_saves > int(agent.num_updates)  # one after every training step, and the last


def test_no_room_for_the_exported_model_is_said_and_the_run_is_saved(
    tmp_path, make_agent, run_with_actors, monkeypatch
):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("seed_rl.learner.export_policy", full)
    agent = make_agent()
    with pytest.raises(UserError, match=r"finished and saved.*No space left.*--run_mode=export"):
        run_with_actors(agent, total_frames=100)
    newest = tf.train.latest_checkpoint(str(tmp_path / "log" / "checkpoints"))
    assert newest.endswith(f"ckpt-{int(agent.num_updates)}")


@pytest.mark.parametrize(
    "name", ["total_frames", "action_repeat", "inference_batch_size", "inference_threads"]
)
def test_senseless_settings_are_refused(tmp_path, make_agent, name):
    agent, spec = make_agent(), agent_action_specs(Countdown.action_space)
    with pytest.raises(UserError, match=f"{name}.*at least 1"):
        Learner(agent, spec, spec, 2, [f"unix:{tmp_path}/s"], str(tmp_path), **{name: 0})


@pytest.mark.parametrize(
    ("name", "least"), [("inference_weights_period", 1), ("max_skipped_steps", 0)]
)
def test_counts_below_their_least_are_refused(tmp_path, make_agent, name, least):
    agent, spec = make_agent(), agent_action_specs(Countdown.action_space)
    with pytest.raises(UserError, match=f"Learner.{name} must be at least {least} and finite"):
        Learner(agent, spec, spec, 2, [f"unix:{tmp_path}/s"], str(tmp_path), **{name: least - 1})


def test_more_training_steps_than_can_be_counted_are_refused(tmp_path, make_agent, monkeypatch):
    agent, spec = make_agent(), agent_action_specs(Countdown.action_space)
    monkeypatch.setattr(agent, "train_steps_per_frame", lambda action_repeat: 1e300)
    with pytest.raises(UserError, match=r"training steps of the whole run must be .*1e\+306"):
        Learner(agent, spec, spec, 2, [f"unix:{tmp_path}/s"], str(tmp_path))


@pytest.mark.parametrize("name", ["save_checkpoint_secs", "log_secs"])
def test_intervals_must_not_be_negative(tmp_path, make_agent, name):
    agent, spec = make_agent(), agent_action_specs(Countdown.action_space)
    with pytest.raises(UserError, match=f"{name}.*must not be negative, got"):
        Learner(agent, spec, spec, 2, [f"unix:{tmp_path}/s"], str(tmp_path), **{name: -1.0})


def test_environments_that_no_actor_could_have(tmp_path, make_agent):
    agent, spec = make_agent(), agent_action_specs(Countdown.action_space)
    with pytest.raises(
        UserError, match=r"--num_envs=15 environments are no multiple of .*=8: the last 7 "
    ):
        Learner(agent, spec, spec, 15, [f"unix:{tmp_path}/s"], str(tmp_path), env_batch_size=8)


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_padded_sizes(largest, sizes):
    assert padded_sizes(largest) == sizes


def test_make_logdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_logdir("a/b") == str(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert make_logdir("a/b") == str(tmp_path / "a" / "b")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_logdir("~/c") == str(tmp_path / "c")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--logdir=file/x cannot be written to"):
        make_logdir("file/x")


def test_returns_by_task(tmp_path, make_agent, run_with_actors):
    with gin.unlock_config():
        gin.bind_parameter("TaskStatistics.task_of_env", lambda env_id: ["easy", "hard"][env_id])
    try:
        learner = run_with_actors(make_agent(), total_frames=100)
    finally:
        gin.clear_config()
    curves = scalars(tmp_path / "log")
    for task in ("easy", "hard"):
        assert curves[f"episode/{task}/return"] == [(learner.frames, 6.0)]  # 1 + 2 + 3


def test_what_a_client_sends_for_environments_of_another_is_refused(tmp_path, make_agent):
    address = f"unix:{tmp_path}/s"
    learner = Learner(make_agent(), *SPECS, 2, [address], str(tmp_path / "log"))
    learner._server.start()
    rows = EnvOutput(
        reward=np.zeros(1, np.float32),
        done=np.zeros(1, bool),
        observation=np.zeros((1, 3), np.float32),
        abandoned=np.zeros(1, bool),
        episode_step=np.zeros(1, np.int32),
    )
    with Client(address, environments=range(1)) as client:
        for wrong in (1, 2):
            with pytest.raises(SignatureError, match=f"environments 0 to 0, and not {wrong}"):
                client.inference(
                    np.array([wrong], np.int32), np.ones(1, np.int64), rows, np.zeros(1, np.float32)
                )
    learner._server.shutdown()


def test_a_batch_is_inferred_while_another_one_is(tmp_path, make_agent):
    started, both = threading.Event(), threading.Barrier(2)

    def meet():
        if started.is_set():
            both.wait(SOON)  # raises if the other batch has to wait for this one

    class Meeting(make_agent):
        def policy(self, *inputs):
            with tf.control_dependencies([tf.py_function(meet, [], [])]):
                return tf.nest.map_structure(tf.identity, super().policy(*inputs))

    address = f"unix:{tmp_path}/s"
    learner = Learner(
        Meeting(), *SPECS, 2, [address], str(tmp_path / "log"), inference_batch_size=1
    )
    started.set()
    learner._server.start()

    def act(env_id):
        environments = make_environment_batch(Countdown, [env_id], 0)
        asked = itertools.count()  # once a call: both must make as many calls
        Actor(environments, env_id, address).run(lambda: next(asked) > 4)
        environments.close()

    actors = [threading.Thread(target=act, args=(env_id,), daemon=True) for env_id in range(2)]
    for actor in actors:
        actor.start()
    for actor in actors:
        actor.join(SOON)
    learner._server.shutdown()
    assert not both.broken
    assert learner._inference.num_steps >= 4


@pytest.mark.parametrize("recently", [True, False])
def test_an_actor_that_reconnects_as_training_ends_hears_of_it(
    tmp_path, make_agent, monkeypatch, recently
):
    monkeypatch.setattr(learner_module, "_FAREWELL_SECONDS", 0.1)
    monkeypatch.setattr(learner_module, "_LATE_FAREWELL_SECONDS", SOON if recently else 0.1)
    address = f"unix:{tmp_path}/s"
    learner = Learner(make_agent(), *SPECS, 2, [address], str(tmp_path / "log"))
    environments = make_environment_batch(Countdown, [0, 1], 0)
    learner._server.start()
    Actor(environments, 0, address).run(lambda: learner._inference.num_steps >= 4)
    farewell = threading.Thread(target=learner._say_farewell, args=(False,), daemon=True)
    farewell.start()
    farewell.join(SOON if not recently else 1.0)
    assert farewell.is_alive() == recently
    Actor(environments, 0, address).run()  # ends, for it is told
    farewell.join(SOON)
    assert not farewell.is_alive()
    learner._server.shutdown()
    environments.close()
