"""Layouts for TPUs, and the choice of devices as far as one CPU shows it."""

import numpy as np
import pytest
import tensorflow as tf

from seed_rl.devices import Encoded, make_placement, tpu_decode, tpu_encode
from seed_rl.user_error import UserError

RNG = np.random.default_rng(0)


def full_range(dtype, shape):
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


VALUES = {
    "images": full_range(np.uint8, (2, 3, 8, 16)),  # 768 = 6 * 128 elements
    "odd bytes": np.arange(256, dtype=np.uint8)[1:],
    "packed": full_range(np.uint16, (4, 32)),
    "short": np.arange(-(2**15), 2**15, 7, dtype=np.int16),
    "signed": np.arange(-128, 128, dtype=np.int8),
    "floats": np.array([[0.1, -np.inf], [1e-45, 3.4e38]] * 32, np.float32),
    "others": (np.array(True), [np.int64(2**40)], np.float32(1.5), np.arange(3, dtype=np.int32)),
    "nothing": np.zeros((0, 5), np.uint8),
}


def check_same(got, expected):
    for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(expected), strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_decoding_gives_back_what_was_encoded(jit_compile):
    decode, both = tpu_decode, lambda nest: tpu_decode(tpu_encode(nest))
    if jit_compile is not None:
        decode, both = (
            tf.function(f, jit_compile=jit_compile, autograph=False) for f in (decode, both)
        )
    check_same(decode(tpu_encode(VALUES)), VALUES)
    check_same(both(VALUES), VALUES)


def test_four_bytes_travel_as_one_word():
    encoded = tpu_encode({"x": np.array([[1, 2, 3, 4]] * 32, np.uint8)})["x"].data
    assert (encoded.dtype, encoded.shape) == (tf.uint32, (32,))
    np.testing.assert_array_equal(encoded, [1 + 2 * 2**8 + 3 * 2**16 + 4 * 2**24] * 32)


@pytest.mark.parametrize("name", sorted(VALUES))
def test_nothing_travels_in_a_type_that_a_tpu_does_not_take(name):
    for leaf in tf.nest.flatten(tpu_encode(VALUES[name])):
        dtype = leaf.data.dtype if isinstance(leaf, Encoded) else leaf.dtype
        assert dtype not in (tf.uint8, tf.int8, tf.uint16, tf.int16)


def test_what_a_tpu_takes_as_it_is_stays_as_it_is():
    values = (np.zeros((3, 128), np.float32), np.zeros(5, np.int32), np.zeros(4, np.float32))
    assert not any(isinstance(leaf, Encoded) for leaf in tf.nest.flatten(tpu_encode(values)))


@pytest.mark.parametrize("as_specs", [False, True])
def test_bare_tensors_are_decoded_by_a_structure(as_specs):
    encoded = tpu_encode(VALUES)
    bare = [leaf.data if isinstance(leaf, Encoded) else leaf for leaf in tf.nest.flatten(encoded)]
    specs = tf.nest.map_structure(lambda x: tf.TensorSpec(np.shape(x), np.asarray(x).dtype), VALUES)
    for structure in (specs,) if as_specs else (VALUES, encoded):
        got = tpu_decode(bare, structure)
        assert got.keys() == VALUES.keys()
        check_same(got, VALUES)
    with pytest.raises(ValueError, match="1 tensors for a structure of 11"):
        tpu_decode(bare[:1], VALUES)


def test_a_batch_of_unknown_size_is_cast():
    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.uint8)], autograph=False)
    def there_and_back(x):
        return tpu_encode(x).data, tpu_decode(tpu_encode(x))

    x = full_range(np.uint8, (5, 3))
    encoded, decoded = there_and_back(x)
    assert encoded.dtype == tf.bfloat16
    np.testing.assert_array_equal(decoded, x)


@pytest.mark.parametrize("shape", [None, (None, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_structure_need_not_know_the_shape(shape, dtype):
    x = np.arange(6, dtype=dtype).reshape(2, 3)
    encoded = tpu_encode(x)
    bare = getattr(encoded, "data", encoded)
    check_same(tpu_decode([bare], [tf.TensorSpec(shape, dtype)]), [x])


def test_plain_numbers_say_what_was_encoded():
    got = tpu_decode(tpu_encode({"a": 1.5, "b": 3}), {"a": 0.0, "b": 0})
    assert (float(got["a"]), int(got["b"])) == (1.5, 3)


@pytest.mark.parametrize("number", [0, -2])
def test_a_cpu_is_at_least_one_device(number):
    with pytest.raises(UserError, match=f"num_logical_cpus must be at least 1 .*got {number}"):
        make_placement(accelerator="cpu", num_logical_cpus=number)


@pytest.fixture
def only_a_cpu(monkeypatch):
    """A machine without accelerators."""
    cpu = tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU")
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda kind=None: [cpu] if kind in (None, "CPU") else [],
    )


@pytest.mark.usefixtures("only_a_cpu")
@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_a_number_of_accelerators_asks_for_them(kind):
    expected = rf"num_training_{kind}s=2, but .* no {kind.upper()} here; it sees CPU:0"
    with pytest.raises(UserError, match=expected):
        make_placement(**{f"num_training_{kind}s": 2})
    make_placement(accelerator="cpu", **{f"num_training_{kind}s": 2})


@pytest.mark.usefixtures("only_a_cpu")
@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_an_absent_accelerator_is_an_error_that_lists_what_there_is(kind):
    how = {"gpu": r"seed-rl\[gpu\]", "tpu": r"docs/devices\.md"}[kind]
    expected = rf"accelerator='{kind}'.*no {kind.upper()} here; it sees CPU:0\..*{how}"
    with pytest.raises(UserError, match=expected):
        make_placement(accelerator=kind)


def test_gpus_are_told_to_grow_before_they_are_listed(monkeypatch):
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
    said = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: gpus)
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, on: said.append((gpu.name, on))
    )
    names = [f"/device:GPU:{i}" for i in range(2)]
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind=None: [tf.config.LogicalDevice(name, "GPU") for name in names if said],
    )
    placement = make_placement(accelerator="gpu", num_training_gpus=1)
    assert said == [("/physical_device:GPU:0", True), ("/physical_device:GPU:1", True)]
    assert placement.training_devices == ("/device:GPU:0",)
    assert placement.inference_devices == placement.copies == ("/device:GPU:1",)
    assert placement.strategy is None
    assert placement.on_accelerator


def test_the_default_is_one_cpu_for_everything():
    placement = make_placement(accelerator="cpu")
    assert (placement.num_replicas, placement.strategy, placement.copies) == (1, None, ())
    assert placement.training_devices == placement.inference_devices
    assert not placement.on_accelerator


def test_a_misspelt_accelerator_is_an_error():
    with pytest.raises(UserError, match="one of auto, cpu, gpu, tpu, got 'GPU'"):
        make_placement(accelerator="GPU")
