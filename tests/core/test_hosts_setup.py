"""Which hosts train together, as flags say it, and what one of them does in step with others."""

import socket
import threading

import numpy as np
import pytest

from seed_rl import rendezvous
from seed_rl.grpc_service import AddressError, Client
from seed_rl.hosts import ALONE, HostGroup, Meeting, connect_hosts
from seed_rl.lockstep import LockstepSink
from seed_rl.normalization import Moments, merge_moments
from seed_rl.rendezvous import wait_for_all
from seed_rl.user_error import UserError


@pytest.mark.parametrize(
    ("hosts", "index", "message"),
    [
        ([], 1, r"--host_index=1, but --hosts does not name so many"),
        (["localhost:1", "localhost:2"], 2, r"--host_index=2 must be from 0 to 1"),
        (["localhost:1", "localhost:2"], -1, r"--host_index=-1 must be from 0 to 1"),
        (["localhost:1", "localhost:1"], 0, r"--hosts=localhost:1,localhost:1 has an address twic"),
        (["localhost:1", "unix:/tmp/a"], 0, r"'unix:/tmp/a': expected host:port"),
        (["localhost:0", "localhost:1"], 0, r"'localhost:0': expected host:port"),
        (["localhost:1", "localhost:2"], 0, r"can run code here. Allow it with --insecure_hosts"),
    ],
)
def test_wrong_hosts_are_told(hosts, index, message):
    with pytest.raises(UserError, match=message):
        connect_hosts(hosts, index)


def test_an_address_that_is_none_is_told():
    with pytest.raises(AddressError, match="'nothing' is not an address"):
        connect_hosts(["nothing", "localhost:1"], 0)


def test_a_port_that_is_taken_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be listened on here: .*in use"):
            connect_hosts(["localhost:1", f"localhost:{port}"], 1, insecure=True)


@pytest.mark.parametrize("hosts", [[], [""], ["localhost:1"]])
def test_one_host_is_alone(hosts):
    group = connect_hosts(hosts, 0)
    assert group is ALONE and group.size == 1 and group.is_chief
    assert group.environments(8) == range(8)
    assert group.meet(True, False, 5) == (1, 0, 5)


def test_each_host_has_its_part_of_the_environments():
    group = HostGroup()
    group.size, group.index = 3, 1
    assert group.environments(12) == range(4, 8)
    assert not group.is_chief


def test_moments_of_parts_of_different_size_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    parts = [100 + rng.normal(size=(n, 3)).astype(np.float32) for n in (2, 5, 1)]
    stacked = Moments(
        *(np.array(leaf, np.float32) for leaf in zip(*map(_moments, parts), strict=True))
    )
    whole = np.concatenate(parts).astype(np.float64)
    number, mean, variance = merge_moments(stacked)
    assert number == 8
    np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, whole.var(0), rtol=1e-3)


def _moments(x):
    return Moments(len(x), x.mean(0), x.var(0))


class FakeSink:
    """Gives the batches of a list, None where there is none."""

    def __init__(self, *batches):
        self.batches = list(batches)

    def next_batch(self, timeout):
        del timeout
        return self.batches.pop(0) if self.batches else None


class FakeHosts(HostGroup):
    """Two hosts; `other` says what the other one says in each round."""

    size = 2

    def __init__(self, *other):
        self.other = list(other)
        self.said = []

    def meet(self, ready, stopping, num_steps):
        self.said.append((ready, stopping, num_steps))
        other = self.other.pop(0)
        return Meeting(ready + other[0], stopping + other[1], num_steps + other[2])


def test_a_batch_waits_until_both_have_one():
    hosts = FakeHosts((0, 0, 10), (1, 0, 20), (1, 0, 30))
    sink = LockstepSink(FakeSink("batch"), hosts, lambda: (False, 3))
    assert sink.next_batch(0.0) is None  # the other has none
    assert sink.meeting.num_steps == 13
    assert sink.next_batch(0.0) == "batch"
    assert sink.next_batch(0.0) is None  # this one has none any more
    assert hosts.said == [(True, False, 3), (True, False, 3), (False, False, 3)]


@pytest.mark.parametrize("own", [True, False])
def test_neither_trains_once_one_is_to_end(own):
    hosts = FakeHosts((1, int(not own), 0))
    sink = LockstepSink(FakeSink("batch"), hosts, lambda: (own, 0))
    assert sink.next_batch(0.0) is None
    assert sink.meeting.num_stopping == 1


def _in_thread(errors, *arguments):
    def run():
        try:
            wait_for_all(*arguments)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_all_wait_for_all(free_ports):
    hosts = [f"localhost:{port}" for port in free_ports(3)]
    errors = []
    early = [_in_thread(errors, hosts, index) for index in (2, 0)]
    # As a third one that asks and does not wait: not all are there, and it is told so.
    with Client(hosts[0]) as client:
        assert not client.arrive(np.int32(2), rendezvous._digest(hosts))
    assert all(thread.is_alive() for thread in early)
    for thread in [*early, _in_thread(errors, hosts, 1)]:
        thread.join(60.0)
        assert not thread.is_alive()
    assert not errors


def test_a_host_that_died_while_it_waited_is_not_there(free_ports, monkeypatch):
    monkeypatch.setattr(rendezvous, "_HEARD_SECONDS", 0.0)  # none is heard of long enough
    hosts = [f"localhost:{port}" for port in free_ports(3)]
    first = _in_thread([], hosts, 0)
    digest = rendezvous._digest(hosts)
    with Client(hosts[0]) as client:
        client.arrive(np.int32(1), digest)
        assert not client.arrive(np.int32(2), digest)  # host 1 was, and is no more
        monkeypatch.setattr(rendezvous, "_HEARD_SECONDS", 1e6)
        assert client.arrive(np.int32(1), digest)
        client.confirm(np.int32(1))
        assert first.is_alive()
        client.confirm(np.int32(2))
    first.join(60.0)
    assert not first.is_alive()


def test_hosts_that_are_given_or_numbered_differently_are_told(free_ports):
    hosts = [f"localhost:{port}" for port in free_ports(3)]
    _in_thread([], hosts, 0)
    for other in ([*hosts, "localhost:1"], [hosts[0], hosts[2], hosts[1]]):
        with pytest.raises(UserError, match=rf"differs from .* which is {','.join(hosts)}"):
            wait_for_all(other, 1)
    with (
        Client(hosts[0], environments=range(1, 2)),  # as a host 1 that is waiting
        pytest.raises(UserError, match="another process says that it is --host_index=1"),
    ):
        wait_for_all(hosts, 1)
    # The other two end it.
    threads = [_in_thread([], hosts, index) for index in (1, 2)]
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
