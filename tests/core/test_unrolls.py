"""Batching unrolls for training."""

import numpy as np

from seed_rl.unrolls import Unroll, stack_time_major


def make_unroll(env_id):
    """An unroll of three steps whose numbers say which environment and step they are."""
    time = np.arange(3)
    return Unroll(
        agent_state=(np.full(2, 100 * env_id, np.float32),),
        prev_actions=(10 * env_id + time).astype(np.int32),
        env_outputs={"frame": np.stack([10 * env_id + time] * 4, -1).astype(np.uint8)},
        agent_outputs=(1000 * env_id + time).astype(np.float32),
        env_id=np.int32(env_id),
        policy_version=np.int64(7 * env_id),
    )


def test_time_leads_and_the_batch_follows_except_where_there_is_no_time():
    batch = stack_time_major([make_unroll(1), make_unroll(2)])
    np.testing.assert_array_equal(batch.prev_actions, [[10, 20], [11, 21], [12, 22]])
    assert batch.env_outputs["frame"].shape == (3, 2, 4)
    np.testing.assert_array_equal(batch.env_outputs["frame"][2, 1], [22] * 4)
    np.testing.assert_array_equal(batch.agent_outputs, [[1000, 2000], [1001, 2001], [1002, 2002]])
    np.testing.assert_array_equal(batch.agent_state[0], [[100, 100], [200, 200]])
    np.testing.assert_array_equal(batch.env_id, [1, 2])
    np.testing.assert_array_equal(batch.policy_version, [7, 14])
    assert batch.env_id.dtype == np.int32 and batch.policy_version.dtype == np.int64
    assert batch.env_outputs["frame"].dtype == np.uint8


def test_an_agent_without_state_has_none_in_its_batches():
    unrolls = [make_unroll(i)._replace(agent_state=()) for i in (1, 2)]
    assert stack_time_major(unrolls).agent_state == ()
