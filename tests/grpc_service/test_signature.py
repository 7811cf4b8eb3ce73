import collections

import ml_dtypes
import numpy as np
import pytest

from seed_rl.grpc_service import SignatureError, TensorSpec, to_spec
from seed_rl.grpc_service.signature import Signature, fits, to_array

Pair = collections.namedtuple("Pair", "left right")
OtherPair = collections.namedtuple("OtherPair", "left right")
Swapped = collections.namedtuple("Swapped", "right left")
INT = TensorSpec((), np.int32)


def test_a_spec_is_normalized_and_comparable():
    spec = TensorSpec([None, np.int64(3)], "float32", name="x")
    assert spec == TensorSpec((None, 3), np.dtype(np.float32), "x")
    assert hash(spec) == hash(TensorSpec((None, 3), np.float32, "x"))
    assert str(spec) == "float32[None, 3]"
    with pytest.raises(SignatureError, match="negative"):
        TensorSpec((-1,), np.int8)


def test_to_spec():
    assert to_spec(np.zeros((2, 3), np.uint8)) == TensorSpec((2, 3), np.uint8)
    assert to_spec(INT) is INT
    with pytest.raises(SignatureError, match="expected something with"):
        to_spec("float32")


def test_leaves_are_in_one_order_whatever_the_order_of_the_keys():
    signature = Signature(({"b": INT, "a": INT}, Pair(INT, [INT])))
    assert signature.paths == ["[0]['a']", "[0]['b']", "[1].left", "[1].right[0]"]
    value = ({"b": 1, "a": 2}, Pair(3, [4]))
    assert signature.flatten(value, "it") == [2, 1, 3, 4]
    assert signature.flatten((collections.OrderedDict(b=1, a=2), Pair(3, [4])), "it") == [
        2,
        1,
        3,
        4,
    ]
    assert signature.unflatten([2, 1, 3, 4]) == value


def test_a_named_tuple_with_the_same_fields_fits():
    signature = Signature((Pair(INT, INT),))
    for _ in range(2):  # checked, then remembered
        assert signature.flatten((OtherPair(1, 2),), "it") == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, Pair(2, 3)), r"it\[0\]: expected \{'a': int32\[\]\}, got the int 1"),
        (({"a": 1}, (2, 3)), r"it\[1\]: expected Pair\(.*\), got \(the int 2, the int 3\)"),
        (
            ({"a": 1}, Swapped(2, 3)),
            r"it\[1\]: expected Pair\(left.*\), got Swapped\(right=the int 2",
        ),
        (({"b": 1}, Pair(2, 3)), r"it\[0\]: expected \{'a'.*\}, got \{'b': the int 1\}"),
        (({"a": [1]}, Pair(2, 3)), r"it\[0\]\['a'\]: expected int32\[\], got \[the int 1\]"),
        (({"a": 1}, Pair(2, None)), r"it\[1\].right: expected int32\[\], got None"),
        (({"a": 1},), "it: expected .*, got"),
        ([{"a": 1}, Pair(2, 3)], r"it: expected \(.*, got \["),
    ],
)
def test_a_wrong_structure_names_the_place(value, text):
    signature = Signature(({"a": INT}, Pair(INT, INT)))
    with pytest.raises(SignatureError, match=text):
        signature.flatten(value, "it")


def test_what_a_signature_cannot_hold():
    with pytest.raises(SignatureError, match=r"signature\[0\]\['a'\]: expected something"):
        Signature(({"a": 3},))
    with pytest.raises(SignatureError, match="keys must be strings"):
        Signature({1: INT})
    with pytest.raises(SignatureError, match="complex"):
        Signature(TensorSpec((), np.complex64))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((True, bool), (7, np.int8), (255, np.uint8), (-3, np.int64), (2, np.float32)),
        *((0.5, np.float16), (1.5, ml_dtypes.bfloat16), (np.float32(2), np.float32)),
        (np.array([1, 2], ">i4"), np.int32),
    ],
)
def test_values_that_lose_nothing_are_taken(value, dtype):
    array = to_array(value, np.dtype(dtype), "it")
    assert array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(array.astype(np.float64), np.asarray(value, np.float64))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((1, bool), (True, np.int32), (256, np.uint8), (-1, np.uint64), (1.0, np.int32)),
        *((np.int64(1), np.int32), (np.zeros(2), np.float32), ("a", np.uint8)),
        (2**70, np.int64),
    ],
)
def test_values_that_could_lose_something_are_not(value, dtype):
    with pytest.raises(SignatureError, match=r"^it: expected dtype"):
        to_array(value, np.dtype(dtype), "it")


def test_fits():
    assert fits((2, 3), (None, 3)) and fits((), ())
    assert not fits((2, 3), (None,)) and not fits((2, 3), (None, 4)) and not fits((), (None,))
