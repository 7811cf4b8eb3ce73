"""What the R2D2 agent supplies to the learner."""

import gymnasium
import keras
import numpy as np
import pytest
import tensorflow as tf

from seed_rl.agents.r2d2 import losses
from seed_rl.agents.r2d2.agent import R2D2Agent
from seed_rl.agents.r2d2.networks import AgentOutput, DuelingLSTMDQNMLP
from seed_rl.grpc_service import TensorSpec
from seed_rl.replay_sink import ReplayBatch
from seed_rl.structures import EnvOutput
from seed_rl.training import Trainer
from seed_rl.unrolls import Unroll, batch_time_major
from seed_rl.user_error import UserError

B, BURN_IN, LENGTH, ACTIONS = 3, 2, 4, 3
STEPS = BURN_IN + LENGTH + 1
SPACES = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(ACTIONS)


def small_network(**arguments):
    return DuelingLSTMDQNMLP(hidden_sizes=(8,), lstm_units=8, head_units=8, **arguments)


def make_agent(num_envs=B, **settings):
    keras.utils.set_random_seed(0)
    settings = {
        "network": small_network,
        "unroll_length": LENGTH,
        "burn_in": BURN_IN,
        "batch_size": B,
        "n_steps": 2,
        "replay_size": 100,
        "min_replay_size": 10,
        "discount": 0.9,
        **settings,
    }
    return R2D2Agent(*SPACES, num_envs, **settings)


def random_unrolls(agent, seed=0):
    """Leaves [B, STEPS, …]."""
    rng = np.random.default_rng(seed)
    shape = (B, STEPS)
    return Unroll(
        agent_state=tf.nest.map_structure(
            lambda x: rng.normal(size=x.shape).astype(np.float32), agent.initial_state(B)
        ),
        prev_actions=rng.integers(0, ACTIONS, shape).astype(np.int32),
        env_outputs=EnvOutput(
            reward=rng.normal(size=shape).astype(np.float32),
            done=rng.random(shape) < 0.2,
            observation=rng.normal(size=(*shape, 4)).astype(np.float32),
            abandoned=np.zeros(shape, bool),
            episode_step=np.zeros(shape, np.int32),
        ),
        agent_outputs=AgentOutput(
            rng.integers(0, ACTIONS, shape).astype(np.int32),
            rng.normal(size=(*shape, ACTIONS)).astype(np.float32),
        ),
        env_id=np.arange(B, dtype=np.int32),
        policy_version=np.zeros(B, np.int64),
    )


def random_batch(agent, seed=0, weights=(1.0, 0.5, 0.25)):
    return ReplayBatch(
        batch_time_major(random_unrolls(agent, seed)),
        np.array(weights, np.float32),
        np.arange(B),
        np.arange(B),
    )


@pytest.mark.parametrize("settings", [{}, {"eta": 0.3, "max_abs_reward": 0.5}])
def test_the_loss_is_the_weighted_mean_and_the_feedback_the_priorities(settings):
    agent = make_agent(**settings)
    batch = random_batch(agent)
    for variable in agent.checkpoint_items["target_network"].trainable_variables:
        variable.assign_add(tf.ones_like(variable) * 0.1)
    unrolls = batch.unrolls
    expected = losses.compute_loss_and_priorities(
        agent.checkpoint_items["network"],
        agent.checkpoint_items["target_network"],
        unrolls.agent_state,
        unrolls.prev_actions,
        unrolls.env_outputs,
        unrolls.agent_outputs,
        gamma=0.9,
        burn_in=BURN_IN,
        n_steps=2,
        **settings,
    )
    outputs = agent.loss(batch)
    np.testing.assert_allclose(
        outputs.loss, np.sum(expected.loss * [1.0, 0.5, 0.25]) / 3, rtol=1e-5
    )
    np.testing.assert_allclose(outputs.feedback, expected.priorities, rtol=1e-5)


def test_stored_state_can_be_left_out():
    batch = random_batch(make_agent())
    zeroed = batch.unrolls._replace(
        agent_state=tf.nest.map_structure(tf.zeros_like, batch.unrolls.agent_state)
    )
    without = make_agent(use_stored_state=False).loss(batch).loss
    assert without == make_agent().loss(batch._replace(unrolls=zeroed)).loss
    assert without != make_agent().loss(batch).loss


@pytest.mark.parametrize(("eta", "max_abs_reward"), [(0.9, 0.0), (0.6, 0.5)])
def test_initial_priorities_come_from_the_q_values_that_acted(eta, max_abs_reward):
    agent = make_agent(eta=eta, max_abs_reward=max_abs_reward)
    unrolls = random_unrolls(agent)
    outputs, env_outputs = unrolls.agent_outputs, unrolls.env_outputs
    env_outputs.abandoned[0, BURN_IN + 2] = env_outputs.done[0, BURN_IN + 2] = True
    rewards = env_outputs.reward
    if max_abs_reward:
        rewards = np.clip(rewards, -max_abs_reward, max_abs_reward)
    q = outputs.q_values.astype(float)

    def h(x):
        return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x

    grid = np.linspace(-200, 200, 4_000_001)  # h is increasing: its inverse by interpolation
    values = np.interp(q.max(-1), h(grid), grid)
    expected = []
    for b in range(B):
        errors = []
        for t in range(BURN_IN, STEPS - 1):
            if env_outputs.abandoned[b, t + 1]:
                continue
            target, discount = 0.0, 1.0
            for k in range(t + 1, min(t + 2, STEPS - 1) + 1):  # n_steps is 2
                if env_outputs.abandoned[b, k]:
                    target += discount * values[b, k - 1]
                    break
                target += discount * rewards[b, k]
                discount *= 0.9
                if env_outputs.done[b, k]:
                    break
            else:
                target += discount * values[b, k]
            errors.append(abs(h(target) - q[b, t, outputs.action[b, t]]))
        expected.append(eta * max(errors) + (1 - eta) * np.mean(errors))
    np.testing.assert_allclose(agent.initial_priorities(unrolls), expected, rtol=1e-4)


def specs_of(unrolls):
    return tf.nest.map_structure(
        lambda x: TensorSpec(np.shape(x)[1:], np.asarray(x).dtype), unrolls
    )


def make_sink(priorities, **settings):
    """Returns a sink that gives every B unrolls these priorities, and the unrolls."""
    agent = make_agent(min_replay_size=1, replay_ratio=1000.0, **settings)
    agent.initial_priorities = lambda unrolls: np.array(priorities)
    unrolls = random_unrolls(agent)
    return agent.make_unroll_sink(specs_of(unrolls)), unrolls


def test_the_exponents_reach_the_replay():
    priorities = np.array([1.0, 2.0, 4.0])
    sink, unrolls = make_sink(priorities, priority_exponent=1.0, importance_sampling_exponent=1.0)
    sink.put(unrolls)
    for _ in range(10):
        batch = sink.next_batch(0.0)
        drawn = priorities[batch.indices]
        np.testing.assert_allclose(batch.weights, drawn.min() / drawn, rtol=1e-6)
    # Uniform, so that also a priority of 0 is drawn; 0 for the other exponent would not be.
    sink, unrolls = make_sink([0.0, 2.0, 4.0], priority_exponent=0.0)
    sink.put(unrolls)
    drawn = [set(sink.next_batch(0.0).indices.tolist()) for _ in range(30)]
    assert set.union(*drawn) == {0, 1, 2}


@pytest.mark.parametrize("save_replay", [False, True])
def test_the_replay_is_saved_only_if_asked(save_replay, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    sink, unrolls = make_sink([1.0, 2.0, 4.0], save_replay=save_replay)
    sink.put(unrolls)
    sink.save(str(tmp_path))
    again, _ = make_sink([1.0, 2.0, 4.0])
    expected = "restored a replay of 3 unrolls" if save_replay else "there is no saved replay"
    assert again.restore(str(tmp_path)).startswith(expected)


def test_gradients_are_clipped_to_the_norm():
    agent = make_agent(max_gradient_norm=1e-3)
    before = [v.numpy() for v in agent.trainable_variables]
    trainer = Trainer(agent, keras.optimizers.SGD(1.0))
    metrics, _ = trainer.step(random_batch(agent))
    moved = [v.numpy() - old for v, old in zip(agent.trainable_variables, before, strict=True)]
    assert metrics["training/gradient_norm"] > 0.01  # else nothing is clipped
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=float)) for x in moved))
    assert norm == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_target_network_is_copied_every_period(jit_compile):
    agent = make_agent(target_update_period=3)
    trainer = Trainer(agent, agent.make_optimizer(100), jit_compile)
    network, target = (
        agent.checkpoint_items[name].trainable_variables for name in ("network", "target_network")
    )
    copied = [v.numpy() for v in network]
    for step in range(1, 8):
        trainer.step(random_batch(agent, seed=step))
        if step % 3 == 0:
            copied = [v.numpy() for v in network]
        for variable, copy in zip(target, copied, strict=True):
            np.testing.assert_array_equal(variable, copy)
        assert any(np.any(v.numpy() != c) for v, c in zip(network, copied, strict=True)) == (
            step % 3 != 0
        )
    assert agent.checkpoint_items["num_updates"].numpy() == 7


def test_a_restored_agent_has_its_target_network_and_period(tmp_path):
    def trained(agent, steps):
        trainer = Trainer(agent, agent.make_optimizer(100))
        checkpoint = tf.train.Checkpoint(optimizer=trainer._optimizer, **agent.checkpoint_items)
        return trainer, checkpoint, [trainer.step(random_batch(agent, s)) for s in steps]

    whole = make_agent(target_update_period=3)
    trained(whole, range(8))
    first = make_agent(target_update_period=3)
    path = trained(first, range(5))[1].save(str(tmp_path / "c"))
    second = make_agent(target_update_period=3)
    trainer, checkpoint, _ = trained(second, [])
    checkpoint.restore(path).assert_consumed()
    for step in range(5, 8):
        trainer.step(random_batch(second, step))
    for name in ("network", "target_network"):
        for one, other in zip(
            whole.checkpoint_items[name].variables,
            second.checkpoint_items[name].variables,
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_exploration_and_its_absence():
    agent = make_agent(num_envs=200, num_eval_envs=100, eval_epsilon=0.0)
    rng = np.random.default_rng(0)
    env_outputs = EnvOutput(
        np.zeros(200, np.float32),
        np.zeros(200, bool),
        rng.normal(size=(200, 4)).astype(np.float32),
        np.zeros(200, bool),
        np.zeros(200, np.int32),
    )
    inputs = (np.arange(200), np.zeros(200, np.int32), env_outputs, agent.initial_state(200))
    greedy, _ = agent.greedy_policy(*inputs)
    chosen, _ = agent.policy(*inputs)
    np.testing.assert_array_equal(greedy.action, np.argmax(greedy.q_values, -1))
    np.testing.assert_array_equal(chosen.q_values, greedy.q_values)
    np.testing.assert_array_equal(chosen.action[100:], greedy.action[100:])
    assert np.any(chosen.action[:20].numpy() != greedy.action[:20].numpy())


def test_training_environments_share_the_ladder_and_the_others_act_at_eval_epsilon():
    agent = make_agent(num_envs=4, num_eval_envs=2, eval_epsilon=1.0)
    rows = 2000
    env_outputs = EnvOutput(
        np.zeros(rows, np.float32),
        np.zeros(rows, bool),
        np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32),
        np.zeros(rows, bool),
        np.zeros(rows, np.int32),
    )
    # Of random actions two in three are not the greedy one. ε of two environments: 0.4 and 0.4⁸.
    for env_id, epsilon in enumerate([0.4, 0.4**8, 1.0, 1.0]):
        inputs = (np.full(rows, env_id), np.zeros(rows, np.int32), env_outputs)
        state = agent.initial_state(rows)
        chosen, _ = agent.policy(*inputs, state)
        greedy, _ = agent.greedy_policy(*inputs, state)
        share = np.mean(chosen.action.numpy() != greedy.action.numpy())
        assert share == pytest.approx(epsilon * 2 / 3, abs=0.05)  # four standard deviations or more


@pytest.mark.parametrize(
    ("num_envs", "expected"), [(640, 30), (1, 0), (10, 0), (11, 1), (16, 1), (64, 3)]
)
def test_as_many_evaluate_as_in_the_paper(num_envs, expected):
    # 30 / 640 of 10, 11, 16 and 64: 0.47, 0.52, 0.75 and 3
    assert make_agent(num_envs=num_envs, num_eval_envs=None).num_eval_envs == expected


def test_training_steps_follow_from_the_replay_ratio():
    agent = make_agent(unroll_length=80, burn_in=40, batch_size=64, replay_ratio=0.75)
    # 64 · 80 · 4 frames of new data make one batch at ratio 1.
    assert agent.train_steps_per_frame(4) == pytest.approx(0.75 / (64 * 80 * 4))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"discount": 2.0}, r"discount must be in \[0, 1\], got 2"),
        ({"eta": -1.0}, r"eta must be in \[0, 1\], got -1"),
        ({"unroll_length": 0}, "unroll_length must be at least 1 and finite, got 0"),
        ({"burn_in": -1}, "burn_in must be at least 0 and finite, got -1"),
        ({"burn_in": LENGTH}, r"unroll_length \(4\) must be greater than its burn_in \(4\)"),
        ({"n_steps": 0}, "n_steps must be at least 1 and finite, got 0"),
        ({"replay_ratio": 0.0}, "replay_ratio must be greater than 0 and finite, got 0"),
        ({"replay_ratio": -1}, "replay_ratio must be greater than 0 and finite, got -1"),
        ({"replay_ratio": float("inf")}, "replay_ratio must be greater than 0 .*, got inf"),
        ({"priority_exponent": float("inf")}, "priority_exponent must be .* finite, got inf"),
        ({"min_replay_size": 101}, r"replay_size \(100\) must be at least its min_replay_size"),
        ({"target_update_period": 0}, r"target_update_period must be in \[1, .*, got 0"),
        ({"target_update_period": 2**63}, r"target_update_period must be in \[1, .*, got 9"),
        ({"replay_size": float("inf")}, "replay_size must be at least 1 and finite, got inf"),
        ({"replay_max_bytes": float("inf")}, "replay_max_bytes must be .* finite, got inf"),
        ({"replay_max_bytes": -1.0}, "replay_max_bytes must be at least 1 and finite, got -1.0"),
        ({"eval_epsilon": 2.0}, r"eval_epsilon must be in \[0, 1\], got 2"),
        ({"eval_epsilon": float("nan")}, r"eval_epsilon must be in \[0, 1\], got nan"),
        ({"burn_in": 100}, r"unroll_length \(4\) must be greater than its burn_in \(100\)"),
    ],
)
def test_senseless_settings_are_refused(settings, expected):
    with pytest.raises(UserError, match=expected):
        make_agent(**settings)


def test_a_replay_that_does_not_fit_is_refused_with_figures():
    agent = make_agent(replay_size=10**12)
    specs = specs_of(random_unrolls(agent))
    with pytest.raises(UserError, match=r"does not fit in memory: 1,000,000,000,000 items of .*Gi"):
        agent.make_unroll_sink(specs)
    make_agent().make_unroll_sink(specs).close()


def test_spaces_that_it_cannot_take():
    box = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    with pytest.raises(UserError, match=r"Q-values of discrete actions, but .* Box"):
        R2D2Agent(box, box, 1, network=small_network)
    with pytest.raises(UserError, match=r"observations that are one array, but .* Dict"):
        R2D2Agent(
            gymnasium.spaces.Dict(a=box), gymnasium.spaces.Discrete(2), 1, network=small_network
        )
