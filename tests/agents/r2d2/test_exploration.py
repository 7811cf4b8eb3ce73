import numpy as np
import pytest
import tensorflow as tf

from seed_rl.agents.r2d2 import exploration


def test_the_ladder():
    # 0.4 ** (1, 1 + 7/2, 8), and two that evaluate
    epsilons = exploration.get_envs_epsilon(np.array([4, 0, 1, 2, 3]), 3, 2, 1e-3)
    np.testing.assert_allclose(
        epsilons, [1e-3, 0.4, 0.01619086, 0.00065536, 1e-3], rtol=1e-5
    )  # 0.4 ** 4.5 = 0.0161908…, 0.4 ** 8 = 0.00065536
    assert exploration.get_envs_epsilon([0], 1, 0, 0.0).numpy() == pytest.approx([0.4])


def test_more_environments_than_the_agent_was_made_for_evaluate():
    """As where --num_envs=1 and check_env tries two, or eval plays eight."""
    for env_ids in (np.array([0, 1, 7]), tf.constant([0, 1, 7])):
        epsilons = exploration.get_envs_epsilon(env_ids, 1, 0, 0.25)
        np.testing.assert_allclose(epsilons, [0.4, 0.25, 0.25])


def test_actions_are_replaced_as_often_as_epsilon_says():
    tf.random.set_seed(1)
    num_calls, num_actions = 20_000, 4
    env_ids = np.tile([0, 1, 2], num_calls)
    actions = np.full(3 * num_calls, 2, np.int32)
    chosen = exploration.apply_epsilon_greedy(actions, env_ids, 2, 1, 0.1, num_actions)
    assert chosen.dtype == tf.int32
    for env_id, epsilon in ((0, 0.4), (1, 0.00065536), (2, 0.1)):
        counts = np.bincount(chosen.numpy()[env_ids == env_id], minlength=num_actions)
        expected = num_calls * (epsilon / num_actions + (1 - epsilon) * np.eye(num_actions)[2])
        assert len(counts) == num_actions
        # χ² with 3 degrees of freedom is above 16.3 once in a thousand times.
        assert np.sum((counts - expected) ** 2 / expected) < 16.3, (env_id, counts, expected)


def test_senseless_settings():
    with pytest.raises(ValueError, match="num_training_envs=0"):
        exploration.get_envs_epsilon([0], 0, 1, 0.1)
    with pytest.raises(ValueError, match=r"eval_epsilon is a probability; got 1\.5"):
        exploration.get_envs_epsilon([0], 1, 1, 1.5)
