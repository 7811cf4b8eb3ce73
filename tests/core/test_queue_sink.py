"""The unroll sink in front of agents that train on every unroll once."""

import threading

import numpy as np
import pytest

from seed_rl.queue_sink import QueueSink
from seed_rl.unroll_queue import QueueClosedError
from seed_rl.unrolls import Unroll


def make_unrolls(env_ids, policy_versions):
    """Unrolls of two steps, batch-major; reward 10 · env_id + step."""
    env_ids = np.asarray(env_ids, np.int32)
    return Unroll(
        agent_state=env_ids[:, None].astype(np.float32),
        prev_actions=np.zeros((len(env_ids), 2), np.int32),
        env_outputs=10.0 * env_ids[:, None] + np.arange(2),
        agent_outputs=(),
        env_id=env_ids,
        policy_version=np.asarray(policy_versions, np.int64),
    )


def test_a_batch_is_time_major_and_takes_the_oldest():
    sink = QueueSink(batch_size=2, capacity=4)
    sink.put(make_unrolls([3, 1, 2], [0, 0, 0]))
    batch = sink.next_batch(1.0)
    np.testing.assert_array_equal(batch.env_outputs, [[30, 10], [31, 11]])
    np.testing.assert_array_equal(batch.agent_state, [[3], [1]])
    np.testing.assert_array_equal(batch.env_id, [3, 1])
    assert sink.metrics()["queue_length"] == 1


def test_too_few_unrolls_are_no_batch_yet():
    sink = QueueSink(batch_size=2, capacity=2)
    sink.put(make_unrolls([3], [0]))
    assert sink.next_batch(0.01) is None
    assert sink.metrics()["queue_length"] == 1


def test_policy_lag_counts_training_steps_between_first_action_and_training():
    sink = QueueSink(batch_size=2, capacity=2)
    # The 11th training step starts from the parameters after 10: unrolls begun after 10 and 4 steps
    # lag 0 and 6 behind.
    sink.put(make_unrolls([0, 1], [10, 4]))
    sink.training_done(sink.next_batch(1.0), (), training_step=11)
    assert sink.metrics()["policy_lag"] == 3.0


def test_put_beyond_the_capacity_waits_for_training():
    sink = QueueSink(batch_size=2, capacity=2)
    done = threading.Event()

    def put():
        sink.put(make_unrolls([0, 1, 2], [0, 0, 0]))
        done.set()

    threading.Thread(target=put, daemon=True).start()
    assert sink.next_batch(20.0).env_id.tolist() == [0, 1]
    assert done.wait(20.0)
    sink.close()
    with pytest.raises(QueueClosedError):
        sink.put(make_unrolls([0], [0]))
    with pytest.raises(QueueClosedError):
        sink.next_batch(0.01)
