"""Stacks of frames against a loop in numpy that keeps a list of what each environment showed."""

import numpy as np
import pytest
import tensorflow as tf

from seed_rl.frame_stacking import FrameStack

T, B, HEIGHT, WIDTH = 7, 3, 2, 3


def expected_stacks(frames, done, size, seen):
    """seen: for each environment a list of the frames of its episode so far; changed in place."""
    stacks = np.zeros((*frames.shape[:-1], size * frames.shape[-1]), frames.dtype)
    for t in range(len(frames)):
        for b in range(B):
            if done[t, b]:
                seen[b].clear()
            seen[b].append(frames[t, b])
            shown = seen[b][-size:]
            shown = [np.zeros_like(shown[0])] * (size - len(shown)) + shown
            stacks[t, b] = np.concatenate(shown, axis=-1)
    return stacks


def random_frames(rng, channels, dtype):
    return rng.integers(1, 255, (T, B, HEIGHT, WIDTH, channels)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_unrolls_and_steps(size, channels, dtype):
    rng = np.random.default_rng(0)
    stack = FrameStack(size)
    seen = [[] for _ in range(B)]
    unrolled = stepped = stack.initial_state(B, (HEIGHT, WIDTH, channels), dtype)
    for number in range(3):  # unrolls in a row
        frames = random_frames(rng, channels, dtype)
        done = rng.random((T, B)) < 0.3
        done[0, 0] = number == 1  # an episode that starts with the unroll
        expected = expected_stacks(frames, done, size, seen)
        stacks, unrolled = stack.unroll(tf.constant(frames), tf.constant(done), unrolled)
        np.testing.assert_array_equal(stacks, expected)
        assert stacks.dtype == dtype
        for t in range(T):
            one, stepped = stack.step(tf.constant(frames[t]), tf.constant(done[t]), stepped)
            np.testing.assert_array_equal(one, expected[t])
    tf.nest.map_structure(np.testing.assert_array_equal, stepped, unrolled)


def test_it_compiles_with_static_shapes():
    rng = np.random.default_rng(1)
    stack = FrameStack(4)
    frames, done = random_frames(rng, 1, np.uint8), rng.random((T, B)) < 0.3
    state = stack.initial_state(B, (HEIGHT, WIDTH, 1), np.uint8)
    stacks, _ = tf.function(stack.unroll, jit_compile=True)(
        tf.constant(frames), tf.constant(done), state
    )
    np.testing.assert_array_equal(stacks, expected_stacks(frames, done, 4, [[], [], []]))


def test_shapes():
    assert FrameStack(4).stacked_shape((84, 84, 3)) == (84, 84, 12)
    assert FrameStack(1).stacked_shape((5,)) == (5,)
    assert FrameStack(1).initial_state(2, (5,), np.float32) == ()
    with pytest.raises(ValueError, match=r"\[height, width, channels\]; got \(5,\)"):
        FrameStack(2).stacked_shape((5,))
    with pytest.raises(ValueError, match="stack_size=0"):
        FrameStack(0)
