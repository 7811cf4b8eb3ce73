"""tf.functions: signatures, structured outputs, static shapes."""

import collections
from typing import Any

import numpy as np
import pytest

from seed_rl.grpc_service import Client, Server, SignatureError, TensorSpec, to_spec

tf: Any = pytest.importorskip("tensorflow")

Output = collections.namedtuple("Output", "action extra")


def _recording(static_size=None):
    """(a tf.function that doubles, the sizes it was called with)."""
    sizes = []

    @tf.function(input_signature=(tf.TensorSpec([static_size], tf.float32),))
    def double(x):
        tf.numpy_function(lambda n: sizes.append(int(n)), [tf.shape(x)[0]], [])
        return x * 2

    return double, sizes


def _call_sizes(address, double_and_sizes, calls, **kwargs):
    double, sizes = double_and_sizes
    with Server(address, max_batch_wait=0.0) as server:
        server.bind(double, **kwargs)
        server.start()
        with Client(address, connect_timeout=30) as client:
            for size in calls:
                x = np.arange(size, dtype=np.float32)
                np.testing.assert_array_equal(client.double(x), x * 2)
            return sizes, client.functions["double"]


def test_a_static_size_is_always_full(address):
    sizes, info = _call_sizes(address, _recording(4), [1, 3, 4])
    assert sizes == [4, 4, 4]
    assert info.max_batch_size == 4


def test_an_open_size_is_padded_to_powers_of_two(address):
    sizes, _ = _call_sizes(address, _recording(), [1, 2, 3, 5, 9, 12], max_batch_size=12)
    assert sizes == [1, 2, 4, 8, 12, 12]


def test_an_open_size_is_padded_to_the_sizes_given(address):
    sizes, info = _call_sizes(address, _recording(), [1, 3, 4, 10], batch_sizes=[10, 3])
    assert sizes == [3, 3, 10, 10]
    assert info.max_batch_size == 10


def test_nests_dtypes_and_lists_of_functions(address):
    @tf.function(
        input_signature=(
            tf.TensorSpec([None], tf.int32),
            {"b": tf.TensorSpec([None, 2], tf.bfloat16), "a": [tf.TensorSpec([None], tf.bool)]},
        )
    )
    def step(ids, nest):
        return Output(ids + 1, [nest["b"], {"k": tf.logical_not(nest["a"][0])}])

    with Server(address, max_batch_wait=0.0) as server:
        server.bind([step, step])
        server.start()
        with Client(address, connect_timeout=30) as client:
            b = tf.constant([[1, 2], [3, 4]], tf.bfloat16)
            for _ in range(3):
                result = client.step(
                    np.array([5, 6], np.int32), {"a": [np.array([True, False])], "b": b}
                )
                assert type(result).__name__ == "Output" and result._fields == Output._fields
                np.testing.assert_array_equal(result.action, [6, 7])
                np.testing.assert_array_equal(result.extra[0], b.numpy())
                np.testing.assert_array_equal(result.extra[1]["k"], [False, True])


def test_unbatched_and_methods(address):
    class Module(tf.Module):
        @tf.function(input_signature=())
        def version(self):
            return tf.constant(3), tf.constant([1.0, 2.0])

    with Server(address) as server:
        server.bind(Module().version)
        server.start()
        with Client(address, connect_timeout=30) as client:
            version, values = client.version()
            assert version == 3 and version.dtype == np.int32
            np.testing.assert_array_equal(values, [1, 2])


def test_what_is_refused(address):
    server = Server(address)
    with pytest.raises(SignatureError, match="has no input_signature"):
        server.bind(tf.function(lambda x: x), name="f")
    double, _ = _recording()
    with pytest.raises(SignatureError, match="its own"):
        server.bind(double, input_signature=(TensorSpec((), np.int8),))
    other, _ = _recording(4)
    with pytest.raises(SignatureError, match="same signature"):
        server.bind([double, other])
    with pytest.raises(SignatureError, match="fixes the batch size at 4"):
        server.bind(other, max_batch_size=8)


def test_to_spec_reads_tensorflow():
    spec = to_spec(tf.TensorSpec([None, 3], tf.bfloat16, name="x"))
    assert spec == TensorSpec((None, 3), tf.bfloat16.as_numpy_dtype, "x")
    with pytest.raises(SignatureError, match="rank"):
        to_spec(tf.TensorSpec(None, tf.float32))
    with pytest.raises(SignatureError, match="cannot be sent"):
        Server("unix:/tmp/unused").bind(
            lambda x: x, name="f", input_signature=(tf.TensorSpec([], tf.string),)
        )
