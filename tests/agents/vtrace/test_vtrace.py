import numpy as np
import pytest
import tensorflow as tf

from seed_rl.agents.vtrace import vtrace


def by_definition(
    target_action_log_probs,
    behaviour_action_log_probs,
    discounts,
    rewards,
    values,
    bootstrap_value,
    clip_rho=1.0,
    clip_pg_rho=1.0,
    lambda_=1.0,
):
    """V-trace as the IMPALA paper defines it (section 4.1): a double sum, not a recursion.

    v_s = V(x_s) + sum_{t >= s} gamma_s ... gamma_{t-1} c_s ... c_{t-1} delta_t
    """
    length = len(rewards)
    rhos = np.exp(np.asarray(target_action_log_probs, np.float64) - behaviour_action_log_probs)
    clipped_rhos = rhos if clip_rho is None else np.minimum(clip_rho, rhos)
    pg_rhos = rhos if clip_pg_rho is None else np.minimum(clip_pg_rho, rhos)
    cs = lambda_ * np.minimum(1.0, rhos)
    all_values = np.concatenate([values, bootstrap_value[None]])
    deltas = clipped_rhos * (rewards + discounts * all_values[1:] - all_values[:-1])
    vs = []
    for s in range(length):
        v = np.array(values[s], np.float64)
        for t in range(s, length):
            v += np.prod(discounts[s:t], axis=0) * np.prod(cs[s:t], axis=0) * deltas[t]
        vs.append(v)
    next_vs = np.stack([*vs[1:], bootstrap_value])
    return np.stack(vs), pg_rhos * (rewards + discounts * next_vs - values)


def random_case(seed, length=7, shape=(3,)):
    rng = np.random.default_rng(seed)

    def normal(*dimensions):
        return rng.normal(size=dimensions).astype(np.float32)

    return {
        "target_action_log_probs": normal(length, *shape),
        "behaviour_action_log_probs": normal(length, *shape),
        "discounts": (0.9 * (rng.random((length, *shape)) > 0.2)).astype(np.float32),
        "rewards": normal(length, *shape),
        "values": normal(length, *shape),
        "bootstrap_value": normal(*shape),
    }


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("clip_rho", "clip_pg_rho"), [(1.0, 1.0), (3.7, 2.2), (None, None)])
@pytest.mark.parametrize("shape", [(3,), (2, 4), (1, 2, 3)])
def test_equals_the_papers_definition(lambda_, clip_rho, clip_pg_rho, shape):
    case = random_case(seed=1, shape=shape)

    returns = vtrace.from_importance_weights(
        **case, clip_rho_threshold=clip_rho, clip_pg_rho_threshold=clip_pg_rho, lambda_=lambda_
    )

    vs, advantages = by_definition(
        **case, clip_rho=clip_rho, clip_pg_rho=clip_pg_rho, lambda_=lambda_
    )
    np.testing.assert_allclose(returns.vs, vs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns.pg_advantages, advantages, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_defaults_are_the_papers(seed):
    case = random_case(seed)
    returns = vtrace.from_importance_weights(**case)
    vs, advantages = by_definition(**case)
    np.testing.assert_allclose(returns.vs, vs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns.pg_advantages, advantages, rtol=1e-4, atol=1e-5)


def test_on_policy_targets_are_discounted_returns():
    """Remark 1 of the paper: with pi = mu, v_s is the n-step Bellman target."""
    returns = vtrace.from_importance_weights(
        target_action_log_probs=tf.zeros([3, 1]),
        behaviour_action_log_probs=tf.zeros([3, 1]),
        discounts=tf.constant([[0.5], [0.5], [0.5]]),
        rewards=tf.constant([[1.0], [2.0], [4.0]]),
        values=tf.constant([[10.0], [20.0], [30.0]]),
        bootstrap_value=tf.constant([8.0]),
    )
    # 4 + 8/2 = 8;  2 + 8/2 = 6;  1 + 6/2 = 4
    np.testing.assert_allclose(returns.vs, [[4.0], [6.0], [8.0]])
    np.testing.assert_allclose(returns.pg_advantages, [[-6.0], [-14.0], [-22.0]])


def test_one_step():
    returns = vtrace.from_importance_weights(
        np.log([[1.0]]), np.log([[4.0]]), [[0.5]], [[3.0]], [[1.0]], [2.0]
    )
    # rho = 1/4; delta = (3 + 1 - 1) / 4
    np.testing.assert_allclose(returns.vs, [[1.75]])
    np.testing.assert_allclose(returns.pg_advantages, [[0.75]])


def test_rewards_of_several_kinds_share_the_policy():
    case = random_case(seed=2, shape=(3, 4))
    for name in ("target_action_log_probs", "behaviour_action_log_probs", "discounts"):
        case[name] = case[name][..., :1]
    returns = vtrace.from_importance_weights(**case)
    for kind in range(4):
        one = {name: x if x.shape[-1] == 1 else x[..., kind : kind + 1] for name, x in case.items()}
        vs, _ = by_definition(**one)
        np.testing.assert_allclose(returns.vs[..., kind : kind + 1], vs, rtol=1e-4, atol=1e-5)


def test_huge_importance_weights_stay_finite():
    case = random_case(seed=3)
    case["target_action_log_probs"] = case["target_action_log_probs"] + 1000.0
    returns = vtrace.from_importance_weights(**case)
    assert np.isfinite(returns.vs).all()
    assert np.isfinite(returns.pg_advantages).all()


def test_no_gradient_flows_through_the_targets():
    case = {name: tf.constant(x) for name, x in random_case(seed=4).items()}
    with tf.GradientTape() as tape:
        tape.watch(list(case.values()))
        returns = vtrace.from_importance_weights(**case)
        total = tf.reduce_sum(returns.vs) + tf.reduce_sum(returns.pg_advantages)
    assert tape.gradient(total, list(case.values())) == [None] * len(case)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("rewards", (7, 2)),
        ("rewards", (6, 3)),
        ("discounts", (7, 1)),
        ("target_action_log_probs", (7, 3, 1)),
        ("behaviour_action_log_probs", (3,)),
        ("bootstrap_value", (7, 3)),
        ("bootstrap_value", ()),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, shape):
    case = random_case(seed=5) | {name: np.zeros(shape, np.float32)}
    with pytest.raises(ValueError, match=name):
        vtrace.from_importance_weights(**case)


def test_values_need_time_and_batch():
    case = random_case(seed=5) | {"values": np.zeros(7, np.float32)}
    with pytest.raises(ValueError, match=r"values \[T, B, \.\.\.\]"):
        vtrace.from_importance_weights(**case)


def test_compiles_under_xla():
    case = {name: tf.constant(x) for name, x in random_case(seed=6).items()}
    compiled = tf.function(vtrace.from_importance_weights, jit_compile=True)(**case)
    plain = vtrace.from_importance_weights(**case)
    np.testing.assert_allclose(compiled.vs, plain.vs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(compiled.pg_advantages, plain.pg_advantages, rtol=1e-5, atol=1e-5)
