"""The replay sink: how it keeps training and inference in step, and what goes through it."""

import threading

import numpy as np
import pytest

from seed_rl.grpc_service import TensorSpec
from seed_rl.replay import PrioritizedReplay
from seed_rl.replay_sink import ReplaySink
from seed_rl.unroll_queue import QueueClosedError
from seed_rl.unrolls import Unroll
from seed_rl.user_error import UserError

SOON = 20.0  # seconds; how long a test waits for what happens at once
STEPS = 3


def spec(shape, dtype):
    return TensorSpec(shape, np.dtype(dtype))


SPECS = Unroll(
    agent_state=(spec((2,), np.float32),),
    prev_actions=spec((STEPS,), np.int32),
    env_outputs={"reward": spec((STEPS,), np.float32), "frame": spec((STEPS, 4, 4), np.uint8)},
    agent_outputs=(spec((STEPS, 2), np.float32),),
    env_id=spec((), np.int32),
    policy_version=spec((), np.int64),
)


def unrolls(numbers, policy_version=0):
    """One unroll for each of `numbers`, filled with it; its steps count on in hundreds."""
    numbers = np.asarray(numbers)
    steps = numbers[:, None] + 100 * np.arange(STEPS)
    return Unroll(
        agent_state=(np.repeat(numbers[:, None], 2, 1).astype(np.float32),),
        prev_actions=steps.astype(np.int32),
        env_outputs={
            "reward": steps.astype(np.float32),
            "frame": np.broadcast_to((steps % 251)[..., None, None], (*steps.shape, 4, 4)).astype(
                np.uint8
            ),
        },
        agent_outputs=(np.stack([steps, -steps], -1).astype(np.float32),),
        env_id=numbers.astype(np.int32),
        policy_version=np.full(len(numbers), policy_version, np.int64),
    )


def make_sink(
    size=100,
    batch_size=4,
    min_unrolls=4,
    replay_ratio=1.0,
    priority_exponent=1.0,
    save=False,
    max_backlog=0,
):
    replay = PrioritizedReplay(size, SPECS, importance_sampling_exponent=1.0, seed=1)
    sink = ReplaySink(
        replay,
        batch_size,
        min_unrolls,
        replay_ratio,
        priority_exponent,
        initial_priorities=lambda u: u.env_id.astype(np.float32),
        save=save,
        max_backlog=max_backlog,
    )
    return replay, sink


def take_all(sink):
    """Trains on everything that is due; returns the batches."""
    batches = []
    while (batch := sink.next_batch(0.0)) is not None:
        batches.append(batch)
        sink.training_done(batch, np.ones(len(batch.indices)), len(batches))
    return batches


@pytest.mark.parametrize("replay_ratio", [0.25, 0.75, 1.0, 3.0])
def test_the_ratio_is_kept(replay_ratio):
    _, sink = make_sink(batch_size=4, min_unrolls=10, replay_ratio=replay_ratio)
    trained = 0
    for inserted in range(1, 101):
        sink.put(unrolls([inserted]))
        trained += 4 * len(take_all(sink))
        # As many whole batches as the unrolls beyond the first ten allow.
        assert trained == 4 * int(max(0, inserted - 10) * replay_ratio / 4 + 1e-9)
    assert sink.metrics()["replay_ratio"] == pytest.approx(replay_ratio, abs=4 / 90)


def test_nothing_is_drawn_before_enough_was_collected():
    _, sink = make_sink(batch_size=1, min_unrolls=5, replay_ratio=100.0)
    for number in range(4):
        sink.put(unrolls([number + 1]))
        assert sink.next_batch(0.0) is None
        assert sink.metrics()["unrolls_until_training"] == 4 - number
    assert "replay_ratio" not in sink.metrics()
    sink.put(unrolls([5]))
    assert "unrolls_until_training" not in sink.metrics()


@pytest.mark.parametrize(("max_backlog", "waits"), [(0, True), (4, True), (8, True), (9, False)])
def test_inference_waits_for_training_that_is_far_behind(max_backlog, waits, monkeypatch):
    replay, sink = make_sink(batch_size=4, min_unrolls=1, replay_ratio=1.0, max_backlog=max_backlog)
    sink.put(unrolls(range(1, 11)))  # 9 due; by default two batches of 4 may be
    done, asked = threading.Event(), threading.Event()
    may_go_on = []
    wait_for = sink._condition.wait_for

    def noted(predicate, timeout=None):
        may_go_on.append(predicate())
        asked.set()
        return wait_for(predicate, timeout)

    monkeypatch.setattr(sink._condition, "wait_for", noted)

    def put():
        sink.put(unrolls([11]))
        done.set()

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    assert asked.wait(SOON)
    assert may_go_on == [not waits]
    if waits:
        assert replay.num_inserted == 10
        sink.next_batch(SOON)  # 5 due
        if max_backlog == 4:
            sink.next_batch(SOON)  # 1 due
    assert done.wait(SOON)
    thread.join(SOON)


def test_training_waits_for_data():
    _, sink = make_sink(batch_size=2, min_unrolls=2, replay_ratio=1.0)
    batches = []
    thread = threading.Thread(target=lambda: batches.append(sink.next_batch(SOON)), daemon=True)
    thread.start()
    sink.put(unrolls([1, 2]))
    sink.put(unrolls([3, 4]))
    thread.join(SOON)
    assert batches[0] is not None


def test_a_batch_holds_what_was_put_time_major():
    _, sink = make_sink(batch_size=64, min_unrolls=1, replay_ratio=100.0)
    sink.put(unrolls(range(5), policy_version=7))  # number 0 has priority 0
    batch = sink.next_batch(0.0)
    numbers = batch.unrolls.env_id
    assert set(numbers.tolist()) == {1, 2, 3, 4}
    expected = unrolls(numbers, policy_version=7)
    np.testing.assert_array_equal(batch.unrolls.agent_state[0], expected.agent_state[0])
    np.testing.assert_array_equal(batch.unrolls.prev_actions, expected.prev_actions.T)
    np.testing.assert_array_equal(
        batch.unrolls.env_outputs["frame"], np.swapaxes(expected.env_outputs["frame"], 0, 1)
    )
    np.testing.assert_array_equal(
        batch.unrolls.agent_outputs[0], np.swapaxes(expected.agent_outputs[0], 0, 1)
    )
    # P(i) = i / 10 with N = 5 stored: weights (1 / (5 i / 10)) over the largest, that of 1.
    np.testing.assert_allclose(batch.weights, 1.0 / numbers, rtol=1e-6)
    sink.training_done(batch, np.ones(64), training_step=10)
    assert sink.metrics()["policy_lag"] == 10 - 1 - 7


def test_priorities_of_trained_unrolls_are_updated_and_of_no_others():
    replay, sink = make_sink(batch_size=32, min_unrolls=1, replay_ratio=1000.0, size=4)
    sink.put(unrolls([1, 1, 1, 1]))
    old = sink.next_batch(0.0)
    assert set(old.indices.tolist()) == {0, 1, 2, 3}
    replay.insert(unrolls([5, 6]), [5.0, 6.0])  # in the place of the first two
    # All that were drawn are to be drawn no more; what stands where two of them were stays.
    sink.training_done(old, np.zeros(32), 1)
    later = sink.next_batch(0.0)
    assert set(later.unrolls.env_id.tolist()) == {5, 6}


def test_uniform_sampling_with_exponent_zero():
    _, sink = make_sink(batch_size=4, min_unrolls=1, replay_ratio=100.0, priority_exponent=0.0)
    sink.put(unrolls([1, 1000]))
    np.testing.assert_array_equal(sink.next_batch(0.0).weights, np.ones(4))


def test_closing_wakes_both_sides():
    _, sink = make_sink(batch_size=4, min_unrolls=1)
    sink.put(unrolls(range(1, 11)))
    raised = []

    def expect_closed(call):
        try:
            call()
        except QueueClosedError:
            raised.append(call)

    blocked = threading.Thread(
        target=expect_closed, args=(lambda: sink.put(unrolls([1])),), daemon=True
    )
    blocked.start()
    sink.close()
    blocked.join(SOON)
    expect_closed(lambda: sink.next_batch(SOON))
    assert len(raised) == 2


@pytest.mark.parametrize(
    "settings", [{"batch_size": 0}, {"min_unrolls": 0}, {"replay_ratio": 0.0}, {"replay_ratio": -1}]
)
def test_senseless_settings(settings):
    with pytest.raises(ValueError, match="must be at least 1 and replay_ratio positive"):
        make_sink(**settings)


def test_a_backlog_of_less_than_a_batch_is_refused():
    with pytest.raises(UserError, match=r"max_backlog \(3\) must be at least the batch_size \(4\)"):
        make_sink(batch_size=4, max_backlog=3)


@pytest.mark.parametrize("replay_ratio", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("max_backlog", [4, 5, 8])
def test_neither_side_waits_for_the_other_for_ever(replay_ratio, max_backlog):
    _, sink = make_sink(
        batch_size=4, min_unrolls=1, replay_ratio=replay_ratio, max_backlog=max_backlog
    )

    def put():
        for number in range(41):
            sink.put(unrolls([number + 1]))

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    for _ in range(int(40 * replay_ratio / 4 + 1e-9)):  # all that the ratio allows
        assert sink.next_batch(SOON) is not None
    thread.join(SOON)
    assert not thread.is_alive()


def test_a_saved_replay_is_restored_and_the_ratio_goes_on(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    _, first = make_sink(batch_size=4, min_unrolls=4, save=True)
    first.put(unrolls(range(1, 7)))
    first.save(str(tmp_path))
    replay, second = make_sink(batch_size=4, min_unrolls=4, save=True)
    assert second.restore(str(tmp_path)) == "restored a replay of 6 unrolls"
    assert len(replay) == 6
    assert second.next_batch(0.0) is None  # what was there has had its turn
    second.put(unrolls([7, 8, 9]))
    assert second.next_batch(0.0) is None
    second.put(unrolls([10]))
    assert set(second.next_batch(0.0).unrolls.env_id.tolist()) <= set(range(1, 11))


def test_a_small_replay_that_is_restored_is_filled_first(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    _, first = make_sink(batch_size=1, min_unrolls=5, save=True)
    first.put(unrolls([1, 2, 3]))
    first.save(str(tmp_path))
    _, second = make_sink(batch_size=1, min_unrolls=5, save=True)
    second.restore(str(tmp_path))
    second.put(unrolls([4, 5]))
    assert second.next_batch(0.0) is None
    second.put(unrolls([6]))
    assert second.next_batch(0.0) is not None


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_that_is_resumed_without_its_replay_says_so(tmp_path, damaged):
    (tmp_path / "checkpoints").mkdir()
    _, first = make_sink(save=damaged)
    first.put(unrolls([1, 2, 3, 4, 5]))
    first.save(str(tmp_path))
    if damaged:
        file = tmp_path / "checkpoints" / "replay"
        file.write_bytes(file.read_bytes()[:-5])
    _, second = make_sink(min_unrolls=1000, save=damaged)
    said = second.restore(str(tmp_path))
    assert ("cannot be used" if damaged else "there is no saved replay") in said
    assert "training goes on after 1,000 unrolls were collected" in said
