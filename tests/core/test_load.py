"""The load test itself, small."""

import numpy as np
import pytest

from seed_rl.benchmarks import load


@pytest.fixture
def setting(tmp_path):
    return load.Setting(
        f"unix:{tmp_path}/s",
        streams=5,
        processes=2,
        envs_per_stream=2,
        observation_floats=3,
        calls_per_second=0.0,
    )


def test_every_stream_is_of_one_process(setting):
    streams = [stream for i in range(2) for stream in setting.streams_of(i)]
    assert streams == [0, 1, 2, 3, 4]


def test_actors_of_several_processes_are_served_and_end(setting):
    outcome = load.measure(setting, seconds=1.0)
    assert outcome.failures == []
    assert outcome.num_calls > 5
    assert 0 < outcome.latencies[0] <= outcome.latencies[1] < 100
    assert set(outcome.memory) == {"learner", "actors 0", "actors 1"}
    assert all(early > 1 and late > 1 for early, late in outcome.memory.values())


def test_an_actor_that_fails_is_told(setting, monkeypatch):
    """Here all of one process: their environments are another client's."""
    from seed_rl.grpc_service import Client

    connect = load._await_streams

    def with_a_wrong_client(server, num_streams):
        connect(server, num_streams)
        for held in list(server._transport._claims._held.values())[:1]:
            # Under the same name it takes over, and the first has to fail.
            claim = held.claim
            Client(
                setting.address,
                environments=range(claim.first, claim.last + 1),
                client_id=claim.client_id,
            )
            server._transport._claims._environments = range(1)

    monkeypatch.setattr(load, "_await_streams", with_a_wrong_client)
    outcome = load.measure(setting, seconds=1.0)
    (failure,) = outcome.failures
    assert failure.startswith("SignatureError: environments")


def test_percentiles_are_those_of_the_bins():
    counts = np.zeros(load._LATENCY_EDGES.size + 1, int)
    counts[[10, 20, 30]] = 50, 48, 2
    edges = load._LATENCY_EDGES
    assert load._percentile(counts, 0.5) == edges[10]
    assert load._percentile(counts, 0.98) == edges[20]
    assert load._percentile(counts, 0.99) == edges[30]
