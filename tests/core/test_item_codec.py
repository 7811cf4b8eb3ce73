"""Items come back bit for bit, whatever they hold."""

import ml_dtypes
import numpy as np
import optree
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from seed_rl.envs import atari
from seed_rl.grpc_service import TensorSpec
from seed_rl.item_codec import MIN_COMPRESSED_BYTES, ItemCodec
from seed_rl.structures import EnvOutput

DTYPES = st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.bool_, np.float32])


def codec_for(values):
    """The codec of items like the rows of `values`."""
    return ItemCodec(optree.tree_map(lambda x: TensorSpec(x.shape[1:], x.dtype), values))


def assert_round_trip(values):
    codec = codec_for(values)
    items = codec.encode(values)
    assert all(type(item) is bytes and len(item) <= codec.max_item_bytes for item in items)
    decoded = codec.decode(items)
    assert optree.tree_structure(decoded) == optree.tree_structure(values)
    for got, expected in zip(optree.tree_leaves(decoded), optree.tree_leaves(values), strict=True):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()
    return items


@given(st.data(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_nest_of_any_shapes_comes_back(data, num_items):
    shapes = st.lists(st.sampled_from([0, 1, 3, 70]), max_size=3)
    values = {
        str(k): data.draw(st_numpy.arrays(dtype, (num_items, *shape)))
        for k, (dtype, shape) in enumerate(
            data.draw(st.lists(st.tuples(DTYPES, shapes), min_size=1, max_size=4))
        )
    }
    assert_round_trip(values)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64, np.bool_])
@pytest.mark.parametrize("content", ["constant", "sparse", "noise"])
def test_large_integers_come_back(dtype, content):
    rng = np.random.default_rng(0)
    values = np.frombuffer(rng.bytes(3 * 5000 * np.dtype(dtype).itemsize), dtype)
    if dtype == np.bool_:
        values = rng.random(3 * 5000) < 0.5
    if content != "noise":
        values = values * (rng.random(values.size) < (0.01 if content == "sparse" else 0))
    values = values.astype(dtype).reshape(3, 50, 100)
    for item in assert_round_trip({"x": values}):
        if content != "noise":
            assert len(item) < values[0].nbytes / 10


def test_noise_takes_no_more_than_its_length_beside_it():
    noise = np.random.default_rng(0).integers(0, 256, (2, 10_000)).astype(np.uint8)
    assert [len(item) for item in assert_round_trip((noise,))] == [10_008, 10_008]


def test_floats_and_small_leaves_are_kept_as_they_are():
    values = EnvOutput(
        reward=np.array([[1.5, -2.0]], np.float32),
        done=np.array([[True, False]]),
        observation=np.zeros((1, 5000), np.float32),
        abandoned=np.array([7], ml_dtypes.bfloat16),
        episode_step=np.zeros((1, MIN_COMPRESSED_BYTES // 4 - 1), np.int32),
    )
    codec = codec_for(values)
    assert codec.compressed_leaf_bytes == 0
    # 2 floats, 2 booleans, 5,000 floats, 1 bfloat16, 1,023 int32.
    assert codec.plain_bytes == codec.max_item_bytes == 8 + 2 + 20_000 + 2 + 4092
    (item,) = assert_round_trip(values)
    assert item[:8] == np.array([1.5, -2.0], "<f4").tobytes()
    assert len(item) == codec.plain_bytes


def test_not_a_number_and_negative_zero_keep_their_bits():
    assert_round_trip((np.array([[np.nan, -0.0, np.inf], [-np.nan, 0.0, 1e-45]], np.float32),))


def test_arrays_that_are_not_contiguous_are_read_in_their_order():
    frames = np.arange(2 * 80 * 90, dtype=np.uint8).reshape(90, 80, 2).T
    rewards = np.arange(20, dtype=np.float32).reshape(2, 10)[:, ::2]
    assert_round_trip({"frames": frames, "rewards": rewards})


@pytest.mark.parametrize("game", ["Pong", "Breakout", "MontezumaRevenge"])
def test_frames_of_atari_games_come_back_and_take_a_twentieth_at_most(game):
    env = atari.create_environment(game=game, frame_stack=1)
    rng = np.random.default_rng(0)
    frames = [env.reset(seed=0)[0]]
    while len(frames) < 121:
        frame, _, terminated, truncated, _ = env.step(rng.integers(env.action_space.n))
        frames.append(env.reset()[0] if terminated or truncated else frame)
    (item,) = assert_round_trip({"frames": np.stack(frames)[np.newaxis]})
    assert len(item) < 121 * 84 * 84 / 20


def test_items_are_decoded_in_the_order_asked_for():
    values = {"x": np.arange(4), "y": np.arange(4 * 6000).reshape(4, 6000).astype(np.uint8)}
    codec = codec_for(values)
    items = codec.encode(values)
    decoded = codec.decode([items[2], items[0], items[2]])
    np.testing.assert_array_equal(decoded["x"], [2, 0, 2])
    np.testing.assert_array_equal(decoded["y"], values["y"][[2, 0, 2]])


def test_values_that_do_not_fit_are_refused():
    codec = ItemCodec({"x": TensorSpec((2,), np.float32)})
    for values in ({"x": np.zeros((3, 2))}, {"x": np.zeros((3, 1), np.float32)}, {"x": 1.0}):
        with pytest.raises(ValueError, match=r"values\['x'\] must be float32"):
            codec.encode(values)
    with pytest.raises(ValueError, match="structure"):
        codec.encode({"y": np.zeros((3, 2), np.float32)})
    with pytest.raises(ValueError, match="known in full"):
        ItemCodec(TensorSpec((None, 2), np.float32))


def test_bytes_of_other_items_are_refused():
    values = {"x": np.zeros((1, 8), np.int64), "y": np.zeros((1, 5000), np.uint8)}
    codec = codec_for(values)
    (item,) = codec.encode(values)
    compressed = item[72:]
    for wrong, message in [
        (item[:50], "at least 64"),
        (item[:70], "ends too early"),
        (item[:-1], "ends too early"),
        (item + b"0", "are used"),
        (item[:72] + bytes(len(compressed)), "decompressed"),
    ]:
        with pytest.raises(ValueError, match=message):
            codec.decode([wrong])
    longer = codec_for({**values, "y": np.zeros((1, 6000), np.uint8)})
    with pytest.raises(ValueError, match="decompressed to 5000 bytes, expected 6000"):
        longer.decode([item])
