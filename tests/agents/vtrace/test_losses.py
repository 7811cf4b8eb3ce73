import numpy as np
import pytest
import tensorflow as tf

from seed_rl.agents.vtrace import losses
from seed_rl.distributions import Categorical
from seed_rl.structures import EnvOutput

T, B, ACTIONS = 6, 3, 4


def env_outputs(reward, done=None, abandoned=None):
    reward = np.asarray(reward, np.float32)
    false = np.zeros(reward.shape, bool)
    return EnvOutput(
        reward=reward,
        done=false if done is None else np.asarray(done),
        observation=np.zeros(reward.shape, np.float32),
        abandoned=false if abandoned is None else np.asarray(abandoned),
        episode_step=np.zeros(reward.shape, np.int32),
    )


def random_case(seed=0):
    """Episodes end and are cut in the middle, at both ends, and next to each other."""
    rng = np.random.default_rng(seed)
    done = np.zeros((T + 1, B), bool)
    abandoned = np.zeros((T + 1, B), bool)
    done[0, 0] = done[3, 0] = done[4, 0] = done[6, 1] = done[2, 1] = done[1, 2] = done[6, 2] = True
    abandoned[4, 0] = abandoned[2, 1] = abandoned[6, 2] = True
    return {
        "behaviour_policy_logits": rng.normal(size=(T + 1, B, ACTIONS)).astype(np.float32),
        "behaviour_actions": rng.integers(0, ACTIONS, (T + 1, B)).astype(np.int32),
        "target_policy_logits": rng.normal(size=(T + 1, B, ACTIONS)).astype(np.float32),
        "baseline": rng.normal(size=(T + 1, B)).astype(np.float32),
        "env_outputs": env_outputs(3 * rng.normal(size=(T + 1, B)), done, abandoned),
    }


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def expected_loss(
    case,
    discount=0.99,
    lambda_=1.0,
    baseline_cost=0.5,
    entropy_cost=0.00025,
    kl_cost=0.0,
    max_abs_reward=0.0,
):
    """Step by step, one environment after the other, with the recursion of the paper's remark 1."""
    log_mu = log_softmax(case["behaviour_policy_logits"])
    log_pi = log_softmax(case["target_policy_logits"])
    value, env = case["baseline"], case["env_outputs"]
    policy, baseline, entropy, kl = [], [], [], []
    for b in range(B):
        target_after = value_after = value[T, b]
        for t in reversed(range(T)):
            v = value[t, b]
            if env.abandoned[t + 1, b]:
                target_after = value_after = v
                continue
            a = case["behaviour_actions"][t, b]
            rho = min(1.0, np.exp(log_pi[t, b, a] - log_mu[t, b, a]))
            gamma = 0.0 if env.done[t + 1, b] else discount
            r = env.reward[t + 1, b]
            if max_abs_reward:
                r = np.clip(r, -max_abs_reward, max_abs_reward)
            advantage = rho * (r + gamma * target_after - v)
            delta = rho * (r + gamma * value_after - v)
            target = v + delta + gamma * lambda_ * rho * (target_after - value_after)
            policy.append(-log_pi[t, b, a] * advantage)
            baseline.append(0.5 * (target - v) ** 2)
            entropy.append(-np.sum(np.exp(log_pi[t, b]) * log_pi[t, b]))
            kl.append(np.sum(np.exp(log_mu[t, b]) * (log_mu[t, b] - log_pi[t, b])))
            target_after, value_after = target, v
    return {
        "policy_loss": np.mean(policy),
        "baseline_loss": baseline_cost * np.mean(baseline),
        "entropy_loss": -entropy_cost * np.mean(entropy),
        "kl_loss": kl_cost * np.mean(kl),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"discount": 0.9, "lambda_": 0.8, "kl_cost": 0.3, "entropy_cost": 0.1},
        {"max_abs_reward": 1.0, "baseline_cost": 2.0},
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_a_computation_step_by_step(settings, seed):
    case = random_case(seed)
    result = losses.compute_loss(Categorical(ACTIONS), **case, **settings)
    expected = expected_loss(case, **settings)
    for name, value in expected.items():
        np.testing.assert_allclose(result.metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(result.loss, sum(expected.values()), rtol=2e-5)


def one_action(reward=0.0, value=0.0, next_value=0.0, done=False, abandoned=False):
    """An unroll of one action, chosen uniformly of two, with its policy and value gradients."""
    logits, baseline = tf.zeros([2, 1, 2]), tf.constant([[value], [next_value]])
    with tf.GradientTape() as tape:
        tape.watch([logits, baseline])
        result = losses.compute_loss(
            Categorical(2),
            behaviour_policy_logits=np.zeros((2, 1, 2), np.float32),
            behaviour_actions=np.array([[1], [0]], np.int32),
            target_policy_logits=logits,
            baseline=baseline,
            env_outputs=env_outputs([[100.0], [reward]], [[False], [done]], [[False], [abandoned]]),
            discount=0.5,
            entropy_cost=0.0,
        )
    policy_gradient, value_gradient = tape.gradient(result.loss, [logits, baseline])
    return policy_gradient.numpy(), value_gradient.numpy()


def test_a_good_action_becomes_more_probable_and_its_value_rises():
    policy, value = one_action(reward=2.0)
    # advantage 2, d log pi / d logits = (-1/2, 1/2); 0.5 * 0.5 * d (2 - V)^2 / dV = -1
    np.testing.assert_allclose(policy[0, 0], [1.0, -1.0])
    np.testing.assert_allclose(value[0, 0], -1.0)


def test_a_bad_action_becomes_less_probable_and_its_value_sinks():
    policy, value = one_action(reward=-2.0)
    np.testing.assert_allclose(policy[0, 0], [-1.0, 1.0])
    np.testing.assert_allclose(value[0, 0], 1.0)


def test_the_last_step_only_bootstraps():
    policy, value = one_action(next_value=4.0)
    np.testing.assert_allclose(policy[0, 0], [1.0, -1.0])  # advantage 0.5 * 4
    np.testing.assert_array_equal(policy[1], 0.0)
    np.testing.assert_array_equal(value[1], 0.0)


def test_nothing_is_bootstrapped_from_after_done():
    policy, value = one_action(next_value=4.0, done=True)
    np.testing.assert_array_equal(policy, 0.0)
    np.testing.assert_array_equal(value, 0.0)


def test_nothing_is_learned_from_an_abandoned_step():
    policy, value = one_action(reward=2.0, value=1.0, next_value=4.0, done=True, abandoned=True)
    np.testing.assert_array_equal(policy, 0.0)
    np.testing.assert_array_equal(value, 0.0)


def test_a_cut_episode_bootstraps_from_its_final_observation():
    """Values 1, 6, 40; reward 2 into the final observation, then the reset."""
    result = losses.compute_loss(
        Categorical(2),
        behaviour_policy_logits=np.zeros((3, 1, 2), np.float32),
        behaviour_actions=np.zeros((3, 1), np.int32),
        target_policy_logits=np.zeros((3, 1, 2), np.float32),
        baseline=np.array([[1.0], [6.0], [40.0]], np.float32),
        env_outputs=env_outputs(
            [[0.0], [2.0], [0.0]], [[False], [False], [True]], [[False], [False], [True]]
        ),
        discount=0.5,
        # Of the mean over the one step that is learned from: 0.5 * 0.5 * (2 + 3 - 1)^2
    )
    np.testing.assert_allclose(result.metrics["baseline_loss"], 4.0)
    np.testing.assert_allclose(result.metrics["advantage"], 4.0)
    np.testing.assert_allclose(result.metrics["value_target"], 5.0)
    np.testing.assert_allclose(result.metrics["steps_used"], 0.5)


def test_an_unroll_of_abandoned_steps_only_has_no_loss():
    case = random_case()
    everywhere = np.ones((T + 1, B), bool)
    case["env_outputs"] = env_outputs(np.zeros((T + 1, B)), everywhere, everywhere)
    result = losses.compute_loss(Categorical(ACTIONS), **case, kl_cost=1.0)
    assert result.loss == 0.0


def test_metrics():
    case = random_case()
    result = losses.compute_loss(Categorical(ACTIONS), **case, entropy_cost=0.2, kl_cost=0.5)
    used = ~case["env_outputs"].abandoned[1:]
    log_mu = log_softmax(case["behaviour_policy_logits"])[:-1]
    log_pi = log_softmax(case["target_policy_logits"])[:-1]
    action = case["behaviour_actions"][:-1, :, None]
    rho = np.exp(np.take_along_axis(log_pi - log_mu, action, axis=-1))[..., 0]
    entropy = -np.sum(np.exp(log_pi) * log_pi, axis=-1)
    kl = np.sum(np.exp(log_mu) * (log_mu - log_pi), axis=-1)
    expected = {
        "entropy": entropy[used].mean(),
        "entropy_loss": -0.2 * entropy[used].mean(),
        "entropy_cost": 0.2,
        "kl": kl[used].mean(),
        "kl_loss": 0.5 * kl[used].mean(),
        "value": case["baseline"][:-1][used].mean(),
        "rho_clip_fraction": (rho > 1)[used].mean(),
        "steps_used": 15 / 18,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(result.metrics[name], value, rtol=1e-5, err_msg=name)
    assert all(np.shape(x) == () for x in result.metrics.values())


def test_explained_variance_is_one_for_perfect_values():
    case = random_case()
    case["target_policy_logits"] = case["behaviour_policy_logits"]
    rewards = case["env_outputs"].reward
    everywhere = np.ones((T + 1, B), bool)  # every action ends its episode: its value is its reward
    case["env_outputs"] = env_outputs(rewards, everywhere)
    case["baseline"][:-1] = rewards[1:]
    result = losses.compute_loss(Categorical(ACTIONS), **case)
    np.testing.assert_allclose(result.metrics["explained_variance"], 1.0)
    np.testing.assert_allclose(result.metrics["baseline_loss"], 0.0)


def test_unclipped_importance_weights():
    case = random_case()
    result = losses.compute_loss(
        Categorical(ACTIONS), **case, clip_rho_threshold=None, clip_pg_rho_threshold=None
    )
    assert result.metrics["rho_clip_fraction"] == 0.0
    clipped = losses.compute_loss(Categorical(ACTIONS), **case)
    assert abs(result.loss - clipped.loss) > 1e-3


def test_gradients_of_entropy_and_divergence_have_the_right_sign():
    logits = tf.Variable([[[2.0, 0.0]], [[2.0, 0.0]]])

    def gradient(**costs):
        with tf.GradientTape() as tape:
            result = losses.compute_loss(
                Categorical(2),
                behaviour_policy_logits=np.zeros((2, 1, 2), np.float32),
                behaviour_actions=np.zeros((2, 1), np.int32),
                target_policy_logits=logits,
                baseline=np.zeros((2, 1), np.float32),
                env_outputs=env_outputs(np.zeros((2, 1))),
                **costs,
            )
        return tape.gradient(result.loss, logits).numpy()[0, 0]

    # Both pull the policy towards the uniform one: descent lowers the larger logit.
    for costs in ({"entropy_cost": 1.0}, {"entropy_cost": 0.0, "kl_cost": 1.0}):
        larger, smaller = gradient(**costs)
        assert larger > 0 > smaller


def test_no_gradient_flows_to_the_entropy_cost_through_the_loss():
    cost = tf.Variable(0.5)
    with tf.GradientTape() as tape:
        result = losses.compute_loss(Categorical(ACTIONS), **random_case(), entropy_cost=cost)
    assert tape.gradient(result.loss, cost) is None


@pytest.mark.parametrize(("entropy", "direction"), [(0.3, 1), (0.7, -1)])
def test_descent_moves_the_entropy_cost_towards_the_target_entropy(entropy, direction):
    log_cost, entropy = tf.Variable(-2.0), tf.Variable(entropy)
    with tf.GradientTape() as tape:
        loss = losses.entropy_adjustment_loss(log_cost, entropy, target_entropy=0.5)
    by_cost, by_entropy = tape.gradient(loss, [log_cost, entropy])
    np.testing.assert_allclose(-by_cost, direction * 0.2, rtol=1e-5)
    assert by_entropy is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("baseline", np.zeros((1, B), np.float32), r"\[T \+ 1, B\]"),
        ("baseline", np.zeros(T + 1, np.float32), r"\[T \+ 1, B\]"),
        ("target_policy_logits", np.zeros((T, B, ACTIONS), np.float32), "target_policy_logits"),
        ("behaviour_policy_logits", np.zeros((T + 1, B, 5), np.float32), "behaviour_policy_logits"),
        ("behaviour_actions", np.zeros((T + 1, B, 1), np.int32), "expected actions of shape"),
        ("env_outputs", env_outputs(np.zeros((T, B))), "env_outputs.reward"),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        losses.compute_loss(Categorical(ACTIONS), **(random_case() | {name: value}))


@pytest.mark.parametrize(
    "settings", [{"discount": 1.5}, {"lambda_": -0.1}, {"max_abs_reward": -1.0}]
)
def test_numbers_out_of_range_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        losses.compute_loss(Categorical(ACTIONS), **random_case(), **settings)


def test_compiles_under_xla():
    case = tf.nest.map_structure(tf.constant, random_case())

    def loss_and_gradients(case):
        with tf.GradientTape() as tape:
            watched = [case["target_policy_logits"], case["baseline"]]
            tape.watch(watched)
            result = losses.compute_loss(Categorical(ACTIONS), **case, kl_cost=0.1)
        return result, tape.gradient(result.loss, watched)

    compiled = tf.function(loss_and_gradients, jit_compile=True)(case)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        compiled,
        loss_and_gradients(case),
    )
