from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from seed_rl import tensors


class Pair(NamedTuple):
    first: Any
    second: Any


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_batch_apply_folds_and_unfolds_nests():
    seen = []

    def fn(pair, scale):
        seen.append((pair.first.shape, pair.second.shape, scale.shape))
        return {"scaled": pair.first * scale[:, None], "sum": tf.reduce_sum(pair.second, axis=1)}

    first, second, scale = numbers(2, 3, 4), numbers(2, 3, 5), numbers(2, 3)
    result = tensors.batch_apply(fn, (Pair(first, second), scale))

    assert seen == [((6, 4), (6, 5), (6,))]
    np.testing.assert_array_equal(result["scaled"], first * scale[..., None])
    np.testing.assert_array_equal(result["sum"], second.sum(axis=2))


def test_batch_apply_keeps_static_shapes():
    @tf.function
    def shape_of_result(x):
        return tf.constant(tensors.batch_apply(lambda y: y + 1, (x,)).shape.as_list())

    np.testing.assert_array_equal(shape_of_result(numbers(2, 3, 4)), [2, 3, 4])


def test_batch_apply_with_unknown_time_and_batch():
    @tf.function(input_signature=[tf.TensorSpec([None, None, 4])])
    def double(x):
        return tensors.batch_apply(lambda y: 2 * y, (x,))

    np.testing.assert_array_equal(double(numbers(2, 3, 4)), 2 * numbers(2, 3, 4))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "at least one"),
        ((numbers(3),), r"shape \(3,\)"),
        ((numbers(2, 3), numbers(3, 2)), "agree on"),
    ],
)
def test_batch_apply_says_what_is_wrong(inputs, message):
    with pytest.raises(ValueError, match=message):
        tensors.batch_apply(lambda *xs: xs, inputs)


def test_make_time_major():
    matrix, cube, vector, scalar = numbers(2, 3), numbers(2, 3, 4), numbers(2), np.float32(7)
    result = tensors.make_time_major(Pair(matrix, (cube, vector, scalar)))

    assert isinstance(result, Pair)
    np.testing.assert_array_equal(result.first, matrix.T)
    np.testing.assert_array_equal(result.second[0], np.swapaxes(cube, 0, 1))
    np.testing.assert_array_equal(result.second[1], vector)
    np.testing.assert_array_equal(result.second[2], scalar)


def test_make_time_major_is_its_own_inverse():
    x = numbers(2, 3, 4)
    np.testing.assert_array_equal(tensors.make_time_major(tensors.make_time_major(x)), x)


@pytest.mark.parametrize("prefix_length", [0, 1, 3])
def test_split_structure(prefix_length):
    x = Pair(numbers(3, 2), {"a": numbers(3)})
    prefix, suffix = tensors.split_structure(x, prefix_length)
    np.testing.assert_array_equal(prefix.first, x.first[:prefix_length])
    np.testing.assert_array_equal(suffix.first, x.first[prefix_length:])
    np.testing.assert_array_equal(prefix.second["a"], x.second["a"][:prefix_length])
    np.testing.assert_array_equal(suffix.second["a"], x.second["a"][prefix_length:])


@pytest.mark.parametrize("axis", [1, -1])
def test_split_structure_along_another_axis(axis):
    prefix, suffix = tensors.split_structure(numbers(2, 5), 2, axis=axis)
    np.testing.assert_array_equal(prefix, numbers(2, 5)[:, :2])
    np.testing.assert_array_equal(suffix, numbers(2, 5)[:, 2:])


@pytest.mark.parametrize(
    ("prefix_length", "axis", "message"), [(4, 0, "prefix of 4"), (1, 2, "along axis 2")]
)
def test_split_structure_says_what_is_wrong(prefix_length, axis, message):
    with pytest.raises(ValueError, match=message):
        tensors.split_structure(numbers(3, 2), prefix_length, axis)
