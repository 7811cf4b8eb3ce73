"""Two hosts train together, each with actors of its own; one of them dies or is stopped."""

import re
import signal

import pytest
import tensorflow as tf
from real_processes import PATIENCE, wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

NUM_ENVS = 8
FLAGS = [
    f"--num_envs={NUM_ENVS}",
    "--env_batch_size=2",
    "--gin_config=gym_vtrace.gin",
    "--gin_bindings=AutoNetwork.hidden_sizes=(8,)",
    "--gin_bindings=Learner.log_secs=0.5",
]


class Hosts:
    """Two learners and two actors for each, by what a user would type."""

    def __init__(self, processes, ports, total_frames=1_000_000_000):
        self._processes = processes
        self.logdir = processes.directory / "log"
        self._hosts = ",".join(f"localhost:{port}" for port in ports)
        self._addresses = [f"unix:{processes.directory}/s{host}/learner" for host in range(2)]
        self._flags = [*FLAGS, f"--gin_bindings=Learner.total_frames={total_frames}"]

    def start_learner(self, host, *more):
        return self._processes.start(
            f"learner{host}",
            "--run_mode=learner",
            *self._flags,
            f"--logdir={self.logdir}",
            f"--hosts={self._hosts}",
            "--insecure_hosts",
            f"--host_index={host}",
            f"--server_address={self._addresses[host]}",
            *more,
        )

    def start_actor(self, task, addresses=None):
        return self._processes.start(
            f"actor{task}",
            "--run_mode=actor",
            *self._flags,
            f"--task={task}",
            f"--server_address={','.join(addresses or self._addresses)}",
        )

    def start_actors(self):
        return [self.start_actor(task) for task in range(4)]

    def log(self, host):
        return self._processes.log(f"learner{host}")

    def trained(self, host):
        """The highest training step that this host's log tells of."""
        steps = re.findall(r"training step ([\d,]+)", self.log(host))
        return max((int(step.replace(",", "")) for step in steps), default=0)

    def wait_until_trained(self, step):
        for host in range(2):
            wait_until(lambda host=host: self.trained(host) >= step, f"{host} trains to {step}")

    def saved(self):
        """Frames and training steps of the newest checkpoint."""
        path = tf.train.latest_checkpoint(str(self.logdir / "checkpoints"))
        return tuple(
            int(tf.train.load_variable(path, f"{name}/.ATTRIBUTES/VARIABLE_VALUE"))
            for name in ("frames", "training_steps")
        )


@pytest.fixture
def hosts(processes, free_ports):
    return Hosts(processes, free_ports(2))


def test_one_of_two_dies_and_the_run_goes_on_from_the_checkpoint(hosts):
    learners = [hosts.start_learner(host) for host in range(2)]
    actors = hosts.start_actors()
    hosts.wait_until_trained(3)
    learners[1].kill()
    assert learners[0].wait(PATIENCE) == 2
    assert "error: host 0 has lost another host" in hosts.log(0)
    frames, steps = hosts.saved()
    assert steps >= 3 and frames > 0

    learners = [hosts.start_learner(host) for host in range(2)]
    resumed = f"resumed at {frames} frames, {steps} training steps"
    for host in range(2):
        wait_until(lambda host=host: resumed in hosts.log(host), f"{host} says: {resumed}")
    hosts.wait_until_trained(steps + 3)
    assert all(actor.poll() is None for actor in actors)

    learners[1].send_signal(signal.SIGTERM)  # that one alone
    assert [learner.wait(PATIENCE) for learner in learners] == [0, 0]
    later_frames, later_steps = hosts.saved()
    assert later_frames > frames and later_steps >= steps + 3
    # Only the first host saves.
    assert not list((hosts.logdir / "host_1").glob("checkpoints/ckpt-*"))


def test_frames_are_those_of_both_hosts(processes, free_ports):
    hosts = Hosts(processes, free_ports(2), total_frames=4_000)
    learners = [hosts.start_learner(host) for host in range(2)]
    actors = hosts.start_actors()
    assert [process.wait(PATIENCE) for process in [*learners, *actors]] == [0] * 6
    frames, steps = hosts.saved()
    # A step takes 4 unrolls of 32 agent steps of each host; what is trained on was stepped before.
    batch = 2 * 4 * 32
    assert frames >= 4_000 and steps <= frames // batch
    assert (hosts.logdir / "saved_model").is_dir()
    # The episodes of a host's own environments, at one number of frames of both.
    for directory in (hosts.logdir, hosts.logdir / "host_1"):
        events = EventAccumulator(str(directory)).Reload()
        points = events.Tensors("training/steps")
        assert points[-1].step == frames
        assert int(tf.make_ndarray(points[-1].tensor_proto)) == steps


def test_an_actor_of_another_host_is_refused(hosts):
    learners = [hosts.start_learner(host) for host in range(2)]
    wrong = hosts.start_actor(0, hosts._addresses[1:])
    assert wrong.wait(PATIENCE) == 2
    said = hosts._processes.log("actor0")
    assert "environments 0 to 1 were asked for, but the server has 4, 4 to 7" in said
    # Without any actor, both still hear that one is to end.
    learners[0].send_signal(signal.SIGINT)
    assert [learner.wait(PATIENCE) for learner in learners] == [0, 0]


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (["VTraceAgent.batch_size=4", "VTraceAgent.batch_size=5"], "host {} has batch_size="),
        # Nothing that has a shape: without a word, the hosts' parameters would drift apart.
        (["adam.learning_rate=1e-3", "adam.learning_rate=1e-2"], "host {} has a gin config"),
    ],
)
def test_hosts_with_different_settings_end_with_the_reason(hosts, bindings, message):
    learners = [
        hosts.start_learner(host, f"--gin_bindings={binding}")
        for host, binding in enumerate(bindings)
    ]
    assert [learner.wait(PATIENCE) for learner in learners] == [2, 2]
    for host in range(2):
        assert message.format(host) in hosts.log(host)
