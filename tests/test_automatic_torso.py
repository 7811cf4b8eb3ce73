"""Torsos made for an observation space."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from seed_rl.automatic_torso import AutomaticTorso, _encoding
from seed_rl.observations import tensor_specs
from seed_rl.user_error import UserError

IMAGE = spaces.Box(0, 255, (7, 7, 3), np.uint8)


def make(space, hidden_sizes=(6,), joint_size=5, image_scale=None, dtype="float32"):
    keras.utils.set_random_seed(0)
    return AutomaticTorso(
        space, hidden_sizes, "tanh", lambda: "glorot_uniform", joint_size, image_scale, dtype
    )


def build(torso, space):
    specs = tensor_specs(space)
    single = isinstance(specs, tf.TensorSpec)
    return torso.build(*((tuple(specs.shape), specs.dtype) if single else (specs,)))


def batch(space, size=3):
    space.seed(0)
    samples = [space.sample() for _ in range(size)]
    return tf.nest.map_structure(lambda *x: tf.constant(np.stack(x)), *samples)


def encoded(space, value, image_scale=None):
    return _encoding(space, image_scale).encode(tf.constant(value)[None]).numpy()[0]


# Ordered, since gymnasium sorts the keys of other dicts, as TensorFlow does all.
NESTED = spaces.Dict(
    collections.OrderedDict(
        pair=spaces.Tuple(
            [spaces.Box(-1, 1, (2,)), spaces.Dict({"far": spaces.MultiBinary((2, 2))})]
        ),
        image=IMAGE,
        direction=spaces.Discrete(4, start=-1),
        big=spaces.Box(0, 255, (40, 48, 1), np.uint8),
    )
)
SPACES = {
    "small image": (IMAGE, 256),
    "large image": (spaces.Box(0, 255, (36, 40, 4), np.uint8), 512),
    "one pixel": (spaces.Box(0, 255, (1, 1, 1), np.uint8), 256),
    "grey image": (spaces.Box(0, 255, (20, 20), np.uint8), 256),
    "image of floats": (spaces.Box(0, 1, (8, 9, 2), np.float32), 256),
    "stacked images": (spaces.Box(0, 255, (4, 40, 40, 3), np.uint8), 512),
    "channels first": (spaces.Box(0, 255, (4, 84, 84), np.uint8), 512),
    "vector": (spaces.Box(-np.inf, np.inf, (3,), np.float64), 6),
    "scalar": (spaces.Box(0, 1, (), np.float32), 6),
    "stacked vectors": (spaces.Box(-1, 1, (4, 3), np.float32), 6),
    "half precision": (spaces.Box(-1, 1, (3,), np.float16), 6),
    "discrete": (spaces.Discrete(5), 6),
    "choices": (spaces.MultiDiscrete([[2, 3], [4, 5]]), 6),
    "bits": (spaces.MultiBinary(4), 6),
    "nested": (NESTED, 5),
    "one image in a dict": (spaces.Dict(image=IMAGE), 256),
    "two images": (spaces.Tuple([IMAGE, IMAGE]), 5),
    **{
        f"vector of {np.dtype(t)}": (spaces.Box(0, 100, (3,), t), 6)
        for t in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64)
    },
}


@pytest.mark.parametrize("name", SPACES)
def test_any_space_becomes_features(name):
    space, size = SPACES[name]
    torso = make(space)
    assert build(torso, space) == size
    features = torso(batch(space))
    assert features.shape == (3, size) and features.dtype == tf.float32
    assert np.isfinite(features).all()
    assert np.ptp(features.numpy(), axis=0).max() > 0  # the observations differ
    compiled = tf.function(torso.__call__, jit_compile=True)(batch(space))
    np.testing.assert_allclose(compiled, features, rtol=1e-4, atol=1e-5)


def test_every_part_counts():
    torso = make(NESTED)
    build(torso, NESTED)
    observation = batch(NESTED, 1)
    features = torso(observation)
    leaves = tf.nest.flatten(observation)
    for i, leaf in enumerate(leaves):
        other = [*leaves[:i], leaf + tf.ones([], leaf.dtype), *leaves[i + 1 :]]
        changed = torso(tf.nest.pack_sequence_as(observation, other))
        assert np.abs(changed - features).max() > 1e-6, tf.nest.flatten(tensor_specs(NESTED))[i]


def test_parts_are_only_concatenated_without_a_joint_layer():
    torso = make(NESTED, joint_size=0)
    assert build(torso, NESTED) == 512 + 256 + 6


def test_discrete_values_are_one_hot_counted_from_their_start():
    np.testing.assert_array_equal(encoded(spaces.Discrete(3, start=-1), 1), [0, 0, 1])
    np.testing.assert_array_equal(encoded(spaces.Discrete(3, start=5), np.int64(5)), [1, 0, 0])
    choices = spaces.MultiDiscrete([2, 3], start=[0, 10])
    np.testing.assert_array_equal(encoded(choices, [1, 11]), [0, 1, 0, 1, 0])


def test_integers_and_images_are_divided_by_the_largest_number():
    pixels = np.full((2, 2, 3), 51, np.uint8)
    np.testing.assert_allclose(encoded(spaces.Box(0, 255, (2, 2, 3), np.uint8), pixels), 0.2)
    codes = spaces.Box(0, 255, (2, 2, 3), np.uint8)
    np.testing.assert_allclose(encoded(codes, pixels, image_scale=10.0), 5.1, rtol=1e-6)
    memory = spaces.Box(-100, 50, (2,), np.int16)
    np.testing.assert_allclose(encoded(memory, np.array([25, -100], np.int16)), [0.25, -1])
    unbounded = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    np.testing.assert_array_equal(encoded(unbounded, np.float32([300, -2])), [300, -2])
    wide = spaces.Box(0, 255, (2,), np.float32)  # floats that are no image stay as they are
    np.testing.assert_array_equal(encoded(wide, np.float32([200, 2])), [200, 2])


def test_layouts_of_images():
    front = np.arange(2 * 5 * 6, dtype=np.uint8).reshape(2, 5, 6)
    last = encoded(spaces.Box(0, 1, (2, 5, 6), np.uint8), front)
    np.testing.assert_array_equal(last, np.moveaxis(front, 0, -1))
    # An image of two rows and no more than four columns is no stack of channels.
    same = encoded(spaces.Box(0, 1, (2, 4, 4), np.uint8), front[:, :4, :4])
    np.testing.assert_array_equal(same, front[:, :4, :4])
    stack = np.arange(2 * 3 * 3 * 2, dtype=np.uint8).reshape(2, 3, 3, 2)
    merged = encoded(spaces.Box(0, 1, stack.shape, np.uint8), stack)
    np.testing.assert_array_equal(merged, np.concatenate([stack[0], stack[1]], axis=-1))


def test_frames_that_the_network_stacks():
    torso = make(IMAGE)
    torso.build((7, 7, 9), "uint8")
    assert torso(tf.zeros([2, 7, 7, 9], tf.uint8)).shape == (2, 256)
    for shape in ((4, 84, 84), (5,)):
        space = spaces.Box(0, 255, shape, np.uint8)
        with pytest.raises(ValueError, match=r"can stack images .* only.*@frame_stack"):
            make(space).build((*shape[:-1], 3 * shape[-1]), "uint8")


def test_what_cannot_be_taken_is_named():
    with pytest.raises(ValueError, match="discrete observation of 100,001 values"):
        make(spaces.Discrete(100_001))
    with pytest.raises(ValueError, match=r"observation/mission space Text.*drop_text"):
        make(spaces.Dict(mission=spaces.Text(10), image=IMAGE))
    torso = make(NESTED)
    with pytest.raises(ValueError, match="was made for observations"):
        torso.build({"image": tf.TensorSpec((7, 7, 3), tf.uint8)})


@pytest.mark.parametrize("image_scale", [0.0, -2.0, float("inf"), float("nan")])
def test_images_cannot_be_divided_by_that(image_scale):
    with pytest.raises(UserError, match="image_scale must be greater than 0 and finite, got"):
        make(IMAGE, image_scale=image_scale)


def test_a_joint_layer_has_a_size():
    with pytest.raises(UserError, match="joint_size must be a whole number of at least 0, got -1"):
        make(NESTED, joint_size=-1)


def test_low_precision_is_inside_only():
    torso = make(NESTED, dtype="mixed_bfloat16")
    build(torso, NESTED)
    assert torso(batch(NESTED)).dtype == tf.float32
    assert all(v.dtype == tf.float32 for v in torso.variables)
