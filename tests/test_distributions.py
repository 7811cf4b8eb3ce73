import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from seed_rl.distributions import get_parametric_distribution_for_action_space as make

UNIT_BOX = spaces.Box(-1.0, 1.0, (2,))
NESTED = spaces.Tuple(
    [spaces.Discrete(3), spaces.Tuple([spaces.MultiDiscrete([2, 4]), spaces.Box(-1.0, 1.0, (1,))])]
)
ALL_SPACES = [
    spaces.Discrete(3),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 4], start=[5, 0]),
    UNIT_BOX,
    spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    spaces.Box(-1.0, 1.0, ()),
    NESTED,
]


@pytest.fixture(autouse=True)
def _seed():
    tf.random.set_seed(1)


def random_params(distribution, *leading, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(*leading, distribution.param_size)).astype(np.float32)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def row(actions, *index):
    """One action as the space has it; spaces want their own integer type."""
    return tf.nest.map_structure(
        lambda x: x.numpy()[index].astype(np.int64) if x.dtype.is_integer else x.numpy()[index],
        actions,
    )


@pytest.mark.parametrize(
    ("space", "param_size", "encoded_size"),
    list(zip(ALL_SPACES, [3, 3, 6, 4, 12, 2, 11], [3, 3, 6, 2, 6, 1, 10], strict=True)),
)
def test_sizes(space, param_size, encoded_size):
    assert make(space).param_size == param_size
    assert make(space).encoded_size == encoded_size


@pytest.mark.parametrize("space", ALL_SPACES)
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_actions_lie_in_the_space_and_results_have_leading_dimensions(space, leading):
    distribution = make(space)
    params = random_params(distribution, *leading)
    for actions in (distribution.sample(params), distribution.mode(params)):
        for index in np.ndindex(leading):
            assert space.contains(row(actions, *index))
        assert distribution.log_prob(params, actions).shape == leading
        assert distribution.encode(actions).shape == (*leading, distribution.encoded_size)
    assert distribution.entropy(params).shape == leading
    assert distribution.kl_divergence(params, params).shape == leading


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=-1), NESTED])
def test_compiles_under_xla(space):
    distribution = make(space)
    params, others = random_params(distribution, 2, 3), random_params(distribution, 2, 3, seed=1)
    actions = distribution.sample(params)

    def everything(params, others, actions):
        return (
            distribution.mode(params),
            distribution.log_prob(params, actions),
            distribution.entropy(params),
            distribution.kl_divergence(params, others),
            distribution.encode(actions),
        )

    compiled = tf.function(everything, jit_compile=True)(params, others, actions)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        compiled,
        everything(params, others, actions),
    )
    sampled = tf.function(distribution.sample, jit_compile=True)(params)
    for index in np.ndindex(2, 3):
        assert space.contains(row(sampled, *index))


def test_dtypes():
    assert make(spaces.Discrete(3)).sample(np.zeros(3, np.float32)).dtype == tf.int32
    assert make(spaces.MultiDiscrete([3])).sample(np.zeros(3, np.float32)).dtype == tf.int32
    for dtype in (np.float32, np.float64):
        distribution = make(spaces.Box(-1, 1, (1,), dtype))
        assert distribution.sample(np.zeros(2, np.float32)).dtype == dtype
        assert (
            distribution.log_prob(np.zeros(2, np.float32), np.zeros(1, dtype)).dtype == tf.float32
        )


def test_categorical_against_its_formulas():
    distribution = make(spaces.Discrete(4))
    a, b = random_params(distribution, 5), random_params(distribution, 5, seed=1)
    log_a, log_b = log_softmax(a), log_softmax(b)
    actions = np.array([0, 3, 1, 2, 2])

    np.testing.assert_allclose(
        distribution.log_prob(a, actions), log_a[np.arange(5), actions], rtol=1e-5
    )
    np.testing.assert_allclose(
        distribution.entropy(a), -(np.exp(log_a) * log_a).sum(axis=-1), rtol=1e-5
    )
    np.testing.assert_allclose(
        distribution.kl_divergence(a, b), (np.exp(log_a) * (log_a - log_b)).sum(axis=-1), rtol=1e-4
    )
    np.testing.assert_array_equal(distribution.mode(a), a.argmax(axis=-1))


def test_categorical_samples_by_probability():
    probabilities = np.array([0.1, 0.2, 0.7])
    params = np.tile(np.log(probabilities).astype(np.float32), (20_000, 1))
    counts = np.bincount(make(spaces.Discrete(3)).sample(params), minlength=3)
    # Five standard deviations of a proportion at most 0.5 / sqrt(20,000) wide.
    np.testing.assert_allclose(counts / 20_000, probabilities, atol=0.018)


def test_categorical_start():
    distribution = make(spaces.Discrete(2, start=7))
    params = np.array([[9.0, 0.0], [0.0, 9.0]], np.float32)
    np.testing.assert_array_equal(distribution.mode(params), [7, 8])
    np.testing.assert_allclose(
        distribution.log_prob(params, np.array([7, 7])),
        [-np.log1p(np.exp(-9)), -9 - np.log1p(np.exp(-9))],
        rtol=1e-3,
    )
    np.testing.assert_array_equal(
        distribution.encode(np.array([7, 8, 0])), [[1, 0], [0, 1], [0, 0]]
    )


def test_categorical_stays_finite_with_extreme_logits():
    distribution = make(spaces.Discrete(3))
    params = np.array([1e6, 0.0, -1e6], np.float32)
    assert distribution.entropy(params) == 0.0
    assert distribution.kl_divergence(params, params) == 0.0
    assert distribution.log_prob(params, 2) == -2e6


def test_multi_discrete_adds_up_over_its_choices():
    distribution = make(spaces.MultiDiscrete([2, 3]))
    one, other = make(spaces.Discrete(2)), make(spaces.Discrete(3))
    a, b = random_params(distribution, 4), random_params(distribution, 4, seed=1)
    actions = np.array([[0, 2], [1, 0], [1, 1], [0, 0]])

    np.testing.assert_allclose(
        distribution.log_prob(a, actions),
        one.log_prob(a[:, :2], actions[:, 0]) + other.log_prob(a[:, 2:], actions[:, 1]),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        distribution.entropy(a), one.entropy(a[:, :2]) + other.entropy(a[:, 2:]), rtol=1e-6
    )
    np.testing.assert_allclose(
        distribution.kl_divergence(a, b),
        one.kl_divergence(a[:, :2], b[:, :2]) + other.kl_divergence(a[:, 2:], b[:, 2:]),
        rtol=1e-6,
    )
    np.testing.assert_array_equal(
        distribution.encode(actions)[:2], [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]
    )


def normal_density(params, x):
    """Of the normal before squashing, in float64."""
    loc, raw_scale = np.asarray(params, np.float64)
    scale = np.log1p(np.exp(raw_scale)) + 0.001
    return np.exp(-0.5 * ((x - loc) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))


def squashed_density(params, x):
    """Of tanh(x) by change of variables; 1 / cosh(x)**2 is the derivative of tanh."""
    return normal_density(params, x) * np.cosh(x) ** 2


GRID = np.linspace(-60, 60, 1_200_001)
STEP = 1e-4
# The last three: wide, far from 0, narrow.
SQUASHED_PARAMS = [(0.0, 0.0), (0.7, -1.0), (0.3, 2.9), (-2.0, 1.5), (1.5, -3.0)]


@pytest.mark.parametrize("params", SQUASHED_PARAMS)
def test_squashed_normal_log_prob(params):
    distribution = make(spaces.Box(-1.0, 1.0, ()))
    x = 0.9 * params[0] + np.linspace(-0.5, 0.5, 9)
    np.testing.assert_allclose(
        distribution.log_prob(
            np.tile(np.array(params, np.float32), (9, 1)), np.tanh(x).astype(np.float32)
        ),
        np.log(squashed_density(params, x)),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("params", SQUASHED_PARAMS)
def test_squashed_normal_entropy_against_an_integral(params):
    density = squashed_density(params, GRID)
    mass = normal_density(params, GRID) * STEP  # p(a) da = n(x) dx
    assert abs(mass.sum() - 1) < 1e-6  # the grid is fine and wide enough
    expected = -np.sum(mass * np.log(np.maximum(density, 1e-300)))
    entropy = make(spaces.Box(-1.0, 1.0, ())).entropy(np.array(params, np.float32))
    np.testing.assert_allclose(entropy, expected, atol=0.003)


def test_squashed_normal_divergence_against_an_integral():
    a, b = (0.3, 0.0), (-0.5, 0.8)
    density_a, density_b = squashed_density(a, GRID), squashed_density(b, GRID)
    log_ratio = np.log(np.maximum(density_a, 1e-300) / np.maximum(density_b, 1e-300))
    distribution = make(spaces.Box(-1.0, 1.0, ()))
    np.testing.assert_allclose(
        distribution.kl_divergence(np.array(a, np.float32), np.array(b, np.float32)),
        np.sum(normal_density(a, GRID) * log_ratio) * STEP,
        rtol=1e-4,
    )


def test_squashed_normal_samples_have_the_densitys_moments():
    params = (0.7, -0.5)
    mass = normal_density(params, GRID) * STEP
    mean = np.sum(mass * np.tanh(GRID))
    variance = np.sum(mass * (np.tanh(GRID) - mean) ** 2)
    samples = make(spaces.Box(-1.0, 1.0, ())).sample(
        np.tile(np.array(params, np.float32), (20_000, 1))
    )
    np.testing.assert_allclose(np.mean(samples), mean, atol=5 * np.sqrt(variance / 20_000))
    np.testing.assert_allclose(np.var(samples), variance, rtol=0.1)


def test_squashed_normal_adds_up_over_its_dimensions():
    distribution, one = make(UNIT_BOX), make(spaces.Box(-1.0, 1.0, ()))
    params = np.array([0.1, 0.2, -0.3, 0.4], np.float32)  # two means, then two scales
    parts = params[[0, 2]], params[[1, 3]]
    action = np.array([0.5, -0.6], np.float32)
    np.testing.assert_allclose(
        distribution.log_prob(params, action),
        sum(one.log_prob(p, a) for p, a in zip(parts, action, strict=True)),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        distribution.entropy(params), sum(one.entropy(p) for p in parts), rtol=1e-5
    )
    np.testing.assert_allclose(distribution.mode(params), np.tanh([0.1, 0.2]), rtol=1e-5)


def test_squashed_normal_stays_inside_its_bounds_and_finite():
    distribution = make(UNIT_BOX)
    params = tf.constant([[60.0, -60.0, 0.0, 0.0], [0.0, 0.0, 30.0, -60.0]] * 50)
    actions = distribution.sample(params).numpy()
    assert (np.abs(actions) < 1).all()
    assert (np.abs(distribution.mode(params)) < 1).all()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(params)
        log_prob = distribution.log_prob(params, actions)
        at_bounds = distribution.log_prob(params, np.ones((100, 2), np.float32))
        entropy = distribution.entropy(params)
    for result in (log_prob, at_bounds, entropy):
        assert np.isfinite(result).all()
        assert np.isfinite(tape.gradient(result, params)).all()


def test_tuple_adds_up_over_its_spaces():
    distribution = make(NESTED)
    a, b = random_params(distribution, 2, 3), random_params(distribution, 2, 3, seed=1)
    actions = distribution.sample(a)
    discrete, (choices, continuous) = actions
    parts = [
        (make(spaces.Discrete(3)), slice(0, 3), discrete),
        (make(spaces.MultiDiscrete([2, 4])), slice(3, 9), choices),
        (make(spaces.Box(-1.0, 1.0, (1,))), slice(9, 11), continuous),
    ]
    np.testing.assert_allclose(
        distribution.log_prob(a, actions),
        sum(d.log_prob(a[..., s], x) for d, s, x in parts),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        distribution.entropy(a), sum(d.entropy(a[..., s]) for d, s, _ in parts), rtol=1e-5
    )
    np.testing.assert_allclose(
        distribution.kl_divergence(a, b),
        sum(d.kl_divergence(a[..., s], b[..., s]) for d, s, _ in parts),
        rtol=1e-5,
    )
    np.testing.assert_array_equal(
        distribution.encode(actions), np.concatenate([d.encode(x) for d, _, x in parts], axis=-1)
    )


@pytest.mark.parametrize("space", [spaces.Discrete(3), UNIT_BOX, NESTED])
def test_an_action_becomes_more_probable_along_its_gradient(space):
    distribution = make(space)
    params = tf.constant(random_params(distribution, 4))
    actions = distribution.sample(params)
    with tf.GradientTape() as tape:
        tape.watch(params)
        before = distribution.log_prob(params, actions)
    after = distribution.log_prob(params + 1e-3 * tape.gradient(before, params), actions)
    assert (after > before).numpy().all()


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-2.0, 2.0, (1,)), r"Box\(-2.0, 2.0, \(1,\).*RescaleAction"),
        (spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 1.0]), dtype=np.float32), "bounds"),
        (spaces.Box(-1, 1, (1,), np.int8), "Box.*float32"),
        (spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])), "MultiDiscrete.*one-dimensional"),
        (spaces.MultiBinary(3), r"MultiBinary\(3\)"),
        (spaces.Dict(a=spaces.Discrete(2)), r"Dict\('a'"),
        (spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(3)]), r"MultiBinary\(3\)"),
        (spaces.Tuple([]), "Tuple"),
    ],
)
def test_other_spaces_are_named(space: gymnasium.Space, message):
    with pytest.raises(ValueError, match=f"(?s)Unsupported action space.*{message}"):
        make(space)


@pytest.mark.parametrize(
    ("space", "params", "actions", "message"),
    [
        (spaces.Discrete(3), np.zeros((2, 4)), np.zeros(2), r"\[\.\.\., 3\]"),
        (spaces.Discrete(3), np.zeros((2, 3)), np.zeros((2, 1)), "actions of shape"),
        (spaces.MultiDiscrete([2, 2]), np.zeros((2, 4)), np.zeros((2, 3)), r"\[\.\.\., 2\]"),
        (UNIT_BOX, np.zeros((2, 4)), np.zeros((2, 1)), "actions of shape"),
        (NESTED, np.zeros((2, 11)), np.zeros((2, 4)), "a tuple of 2 actions"),
    ],
)
def test_wrong_shapes_are_named(space, params, actions, message):
    with pytest.raises(ValueError, match=message):
        make(space).log_prob(params.astype(np.float32), actions.astype(np.float32))
