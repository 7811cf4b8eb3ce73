"""Actors over slow and broken networks: real sockets, with a proxy between."""

import threading
import time

import gymnasium
import numpy as np
import pytest
from tcp_proxy import TcpProxy

from seed_rl import actor as actor_module
from seed_rl.actor import Actor
from seed_rl.environment import make_environment_batch
from seed_rl.grpc_service import (
    Client,
    EnvironmentsInUseError,
    Server,
    TensorSpec,
    UnavailableError,
)
from seed_rl.inference import TrainingFinished, inference_input_specs, inference_output_specs

SOON = 30.0  # seconds; how long a test waits for what happens much sooner
KEEPALIVE = 1.5  # seconds; a busy machine answers within it
NEVER = 1000.0  # seconds


def wait_until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class Counting(gymnasium.Env):
    """Observes how many steps it has taken; an episode never ends."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.array([self.steps], np.float32), 0.0, False, False, {}


class Learner:
    """Serves `inference`, and writes down (env_id, run_id, observation) of every row."""

    def __init__(self, keepalive_seconds=KEEPALIVE):
        self.rows, self.finished = [], False
        self.entered, self.left = threading.Event(), threading.Event()  # the function `wait`
        self.server = Server(
            "127.0.0.1:0",
            num_environments=8,
            max_batch_wait=0.0,
            keepalive_seconds=keepalive_seconds,
        )
        self.server.bind(self.wait, input_signature=())
        self.server.bind(
            self.inference,
            input_signature=inference_input_specs(TensorSpec((1,), np.float32)),
            output_signature=inference_output_specs(TensorSpec((), np.int32)),
        )

    def wait(self):
        self.entered.set()
        self.left.wait(SOON)

    def inference(self, env_ids, run_ids, env_outputs, raw_rewards):
        if self.finished:
            raise TrainingFinished("enough")
        observed = env_outputs.observation[:, 0]
        self.rows += list(zip(env_ids.tolist(), run_ids.tolist(), observed.tolist(), strict=True))
        return np.zeros(len(env_ids), np.int32)

    def runs(self, env_id):
        """The observations of each run of an environment, in order."""
        found = {}
        for env, run, observed in self.rows:
            if env == env_id:
                found.setdefault(run, []).append(observed)
        return list(found.values())

    @property
    def holders(self):
        return self.server._transport._claims._held


@pytest.fixture
def learner():
    made = Learner()
    with made.server:
        made.server.start()
        yield made


@pytest.fixture
def patient_learner():
    """One that does not look whether actors live."""
    made = Learner(keepalive_seconds=NEVER)
    with made.server:
        made.server.start()
        yield made


@pytest.fixture
def run_actor():
    """Starts an actor of two environments in a thread, which must end by itself."""
    started = []

    def start(address, first_env_id=0, **kwargs):
        batch = make_environment_batch(Counting, range(first_env_id, first_env_id + 2), 0)
        actor = Actor(batch, first_env_id, address, **{"keepalive_secs": KEEPALIVE, **kwargs})
        failures = []

        def run():
            try:
                actor.run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        started.append((thread, batch, failures))
        return thread

    yield start
    for thread, batch, failures in started:
        thread.join(SOON)
        assert not thread.is_alive() and not failures, failures
        batch.close()


def finish(learner, *threads):
    learner.finished = True
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()


@pytest.mark.parametrize(("delay", "piece_bytes"), [(0.02, 65536), (0.0, 7)])
def test_slow_and_in_small_pieces(patient_learner, run_actor, delay, piece_bytes):
    learner = patient_learner
    with TcpProxy(learner.server.addresses[0], delay, piece_bytes) as proxy:
        thread = run_actor(proxy.address, keepalive_secs=NEVER)
        wait_until(lambda: len(learner.rows) >= 20)
        finish(learner, thread)
    (run,) = learner.runs(0)
    assert run == list(range(len(run)))


def test_after_a_reset_the_actor_comes_back_under_a_new_run(patient_learner, run_actor):
    learner = patient_learner
    with TcpProxy(learner.server.addresses[0]) as proxy:
        thread = run_actor(proxy.address, keepalive_secs=NEVER)
        for num_runs in range(1, 5):
            wait_until(
                lambda n=num_runs: len(learner.runs(0)) >= n and len(learner.runs(0)[-1]) > 3
            )
            if num_runs < 4:
                assert proxy.reset() >= 1
        finish(learner, thread)
    assert len(learner.runs(0)) >= 4
    for run in learner.runs(0):  # each from its beginning, and without a gap
        assert run == list(range(len(run)))


def test_a_stalled_network_is_noticed_by_both_sides_and_harms_nobody_else(learner, run_actor):
    """And the same actor takes its environments over when the network is back."""
    direct = run_actor(learner.server.addresses[0], first_env_id=4)
    with TcpProxy(learner.server.addresses[0]) as proxy:
        thread = run_actor(proxy.address)
        wait_until(lambda: len(learner.runs(0)) == 1 and len(learner.holders) == 2)
        proxy.stall()
        wait_until(lambda: len(learner.holders) == 1)  # the learner has noticed
        num_rows = sum(map(len, learner.runs(4)))
        wait_until(lambda: sum(map(len, learner.runs(4))) > num_rows + 10)
        assert len(learner.runs(4)) == 1
        proxy.reset()  # what still stands would come through late
        proxy.flow()
        wait_until(lambda: len(learner.runs(0)) >= 2)  # the actor has noticed
        finish(learner, thread, direct)


def test_a_client_notices_a_server_that_falls_silent(learner):
    with TcpProxy(learner.server.addresses[0]) as proxy:
        client = Client(proxy.address, keepalive_seconds=KEEPALIVE)
        failures = []

        def call():
            try:
                client.wait()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        assert learner.entered.wait(SOON)
        proxy.stall()
        learner.left.set()
        thread.join(SOON)
        assert not thread.is_alive()
        client.close()
    (failure,) = failures
    assert isinstance(failure, UnavailableError)


def test_a_successor_has_the_environments_when_keepalive_has_noticed_the_dead(learner):
    """A machine that loses its power closes no connection: here, one behind a stalled network."""
    with TcpProxy(learner.server.addresses[0]) as proxy:
        # The client itself is patient, so that only the server can notice.
        dead = Client(proxy.address, environments=range(2), keepalive_seconds=NEVER)
        proxy.stall()
        refused = 0
        end = time.monotonic() + SOON
        while True:
            try:
                successor = Client(learner.server.addresses[0], environments=range(2))
                break
            except EnvironmentsInUseError:
                refused += 1
                assert time.monotonic() < end
                time.sleep(0.02)
        assert refused > 0
        successor.close()
        dead.close()


def test_a_restarted_actor_waits_for_its_dead_predecessor(learner, run_actor):
    with TcpProxy(learner.server.addresses[0]) as proxy:
        dead = Client(proxy.address, environments=range(2), keepalive_seconds=NEVER)
        proxy.stall()
        thread = run_actor(learner.server.addresses[0])
        wait_until(lambda: learner.runs(0))
        finish(learner, thread)
        dead.close()


def test_an_idle_connection_is_kept(learner):
    """Keep-alive asks several times, and neither side takes that amiss."""
    client = Client(learner.server.addresses[0], environments=range(2), keepalive_seconds=0.1)
    time.sleep(2.0)
    learner.left.set()
    client.wait()
    client.close()


def test_pauses_double_and_are_spread_until_the_learner_answers(monkeypatch):
    """A learner that takes connections but never answers is not one to come back to at once."""
    pauses = []
    monkeypatch.setattr(actor_module, "_pause", lambda seconds, _: pauses.append(seconds))
    batch = make_environment_batch(Counting, range(2), 0)

    class Gone:
        """Connects; then the learner is gone."""

        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            raise UnavailableError("gone")

        def __exit__(self, *exc_info):
            pass

    monkeypatch.setattr(actor_module, "Client", Gone)
    for _ in range(20):
        Actor(batch, 0, "127.0.0.1:1").run(lambda: len(pauses) % 10 == 9 and not pauses.append(0))
    batch.close()
    rounds = np.array(pauses).reshape(20, 10)[:, :9]
    expected = np.minimum(0.1 * 2.0 ** np.arange(9), 10.0)
    factors = rounds / expected
    assert (factors >= 0.5).all() and (factors <= 1.5).all()
    assert (factors.std(axis=0) > 0.05).all()  # of 20 actors, in each of their attempts
