"""Google Research Football without its engine: packing, settings, errors."""

import importlib.util
import subprocess
import sys

import gin
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from seed_rl import config
from seed_rl.environment import make_environment_batch
from seed_rl.envs import football
from seed_rl.user_error import UserError

HAS_ENGINE = importlib.util.find_spec("gfootball") is not None


@pytest.fixture(autouse=True)
def _no_bindings():
    yield
    gin.clear_config()


# Packing


class Planes(gymnasium.Env):
    """Observes what it is given."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation):
        self.seen = np.asarray(observation)
        self.observation_space = spaces.Box(0, 255, self.seen.shape, self.seen.dtype.type)

    def reset(self, *, seed=None, options=None):
        return self.seen, {}

    def step(self, action):
        return self.seen, 0.0, False, False, {}


def pack(planes):
    env = football.PackedBitsObservation(Planes(planes))
    packed, _ = env.reset()
    assert env.observation_space.contains(packed)
    np.testing.assert_array_equal(env.step(0)[0], packed)
    return packed


def unpack(packed):
    return football.unpackbits(packed).numpy()


def random_planes(*shape):
    return np.random.default_rng(0).integers(0, 2, shape).astype(np.uint8) * 255


# By hand: within a byte the first channel is the highest bit, and the first byte is the lower one.
WORDS = {0: 128, 1: 64, 6: 2, 7: 1, 8: 32768, 9: 16384, 14: 512, 15: 256}


@pytest.mark.parametrize(("channel", "word"), WORDS.items())
def test_where_a_channel_goes(channel, word):
    planes = np.zeros((1, 2, 16), np.uint8)
    planes[0, 1, channel] = 255
    packed = pack(planes)
    assert packed.dtype == np.uint16
    assert packed.tolist() == [[[0], [word]]]
    unpacked = unpack(packed)
    assert unpacked.dtype == np.uint8
    np.testing.assert_array_equal(unpacked, planes)


def test_several_channels_of_a_word():
    # 128 + 1 in the lower byte, 16 + 4 in the upper one: channels 0, 7, and 8 + 3, 8 + 5.
    planes = np.zeros((1, 1, 16), np.uint8)
    planes[..., [0, 7, 11, 13]] = 255
    assert pack(planes).tolist() == [[[129 + 256 * 20]]]


@pytest.mark.parametrize("shape", [(72, 96, 16), (90, 120, 16), (108, 144, 16), (3, 5, 48), (16,)])
def test_unpacking_undoes_packing(shape):
    planes = random_planes(*shape)
    packed = pack(planes)
    assert packed.shape == (*shape[:-1], shape[-1] // 16)
    assert packed.nbytes * 8 == planes.nbytes
    np.testing.assert_array_equal(unpack(packed), planes)


def test_a_frame_of_the_paper_has_13824_bytes():
    planes = random_planes(72, 96, 16)
    assert (planes.nbytes, pack(planes).nbytes) == (110_592, 13_824)


@pytest.mark.parametrize("channels", [1, 4, 8, 9, 15, 17, 20, 31, 33])
def test_channels_that_fill_no_word_are_followed_by_zeros(channels):
    planes = random_planes(4, 3, channels)
    packed = pack(planes)
    assert packed.shape == (4, 3, -(-channels // 16))
    unpacked = unpack(packed)
    np.testing.assert_array_equal(unpacked[..., :channels], planes)
    assert not unpacked[..., channels:].any()


def test_unpacks_stacks_and_batches_under_xla():
    import tensorflow as tf

    planes = random_planes(2, 3, 8, 6, 32)
    packed = np.stack([[pack(frame) for frame in row] for row in planes])
    compiled = tf.function(football.unpackbits, jit_compile=True)
    unpacked = compiled(tf.constant(packed))
    assert unpacked.shape == (2, 3, 8, 6, 32)
    np.testing.assert_array_equal(unpacked, planes)


def test_the_batch_may_have_any_size():
    import tensorflow as tf

    function = tf.function(
        football.unpackbits, input_signature=[tf.TensorSpec((None, 4, 3, 1), tf.uint16)]
    )
    assert function.get_concrete_function().output_shapes.as_list() == [None, 4, 3, 16]
    planes = random_planes(4, 3, 16)
    np.testing.assert_array_equal(function(pack(planes)[None])[0], planes)


def test_only_words_are_unpacked():
    with pytest.raises(UserError, match=r"uint16; got uint8.*football_environment.pack_bits"):
        football.unpackbits(np.zeros((2, 2, 16), np.uint8))


@pytest.mark.parametrize("planes", [np.zeros((2, 2, 16), np.float32), np.zeros((), np.uint8)])
def test_only_planes_of_bytes_are_packed(planes):
    with pytest.raises(UserError, match="packs observations that are uint8 planes"):
        football.PackedBitsObservation(Planes(planes))


def test_the_module_imports_no_tensorflow():
    code = "import sys, seed_rl.envs.football; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Networks on packed observations


@pytest.mark.parametrize("network", ["GFootball", "ImpalaDeep", "ImpalaShallow"])
def test_networks_see_the_planes(network):
    import tensorflow as tf

    from seed_rl.agents.vtrace import networks
    from seed_rl.structures import EnvOutput

    planes = random_planes(72, 96, 16)

    def logits(observation):
        tf.keras.utils.set_random_seed(1)
        net = getattr(networks, network)(19)
        zeros = tf.zeros([1])
        no = tf.zeros([1], tf.bool)
        output = EnvOutput(zeros, no, tf.constant(observation[None]), no, tf.zeros([1], tf.int32))
        net.build(observation.shape, observation.dtype)
        return net(tf.zeros([1], tf.int32), output, net.initial_state(1))[0].policy_logits.numpy()

    expected = logits(planes)
    gin.parse_config("ConvolutionalTorso.preprocess = @unpackbits")
    np.testing.assert_allclose(logits(pack(planes)), expected, rtol=1e-5, atol=1e-6)


def test_r2d2_sees_the_planes():
    import tensorflow as tf

    from seed_rl.agents.r2d2.networks import DuelingLSTMDQNNet
    from seed_rl.structures import EnvOutput

    frames = random_planes(2, 72, 96, 16)  # two frames of an unroll, stacked in the network

    def q_values(observation):
        tf.keras.utils.set_random_seed(1)
        net = DuelingLSTMDQNNet(
            19, observation.shape[1:], stack_size=2, observation_dtype=observation.dtype
        )
        zeros, no = tf.zeros([2, 1]), tf.zeros([2, 1], tf.bool)
        steps = tf.zeros([2, 1], tf.int32)
        outputs = EnvOutput(zeros, no, tf.constant(observation[:, None]), no, steps)
        return net((steps, outputs), net.initial_state(1), unroll=True)[0].q_values.numpy()

    expected = q_values(frames)
    gin.parse_config("ConvolutionalTorso.preprocess = @unpackbits")
    np.testing.assert_allclose(q_values(pack(frames)), expected, rtol=1e-5, atol=1e-6)


# Settings


# Copied by hand from the paper's table: learning rate, entropy cost, λ.
TUNED = {"scoring": (5.534e-5, 3.195e-5, 0.9), "checkpoints": (1.254e-4, 7.331e-4, 1.0)}
SIZES = {"default": (72, 96), "medium": (90, 120), "large": (108, 144)}
PUBLISHED = [(rewards, size) for rewards in TUNED for size in SIZES]


@pytest.mark.parametrize(("rewards", "size"), PUBLISHED)
def test_the_papers_settings(rewards, size):
    config.load([f"football_{rewards}_{size}"], [], for_actor=False)
    value = gin.query_parameter
    assert TUNED[rewards] == (
        value("adam.learning_rate"),
        value("VTraceAgent.entropy_cost"),
        value("VTraceAgent.lambda_"),
    )
    assert value("football_environment.smm_size") == size
    assert value("football_environment.scenario") == "11_vs_11_hard_stochastic"
    expected = "scoring" if rewards == "scoring" else "scoring,checkpoints"
    assert value("football_environment.rewards") == expected
    assert value("football_environment.stacked") and value("football_environment.pack_bits")
    assert (value("VTraceAgent.unroll_length"), value("VTraceAgent.batch_size")) == (32, 32)
    assert (value("VTraceAgent.discount"), value("VTraceAgent.max_abs_reward")) == (0.997, 0.0)
    assert (value("Learner.total_frames"), value("Learner.inference_batch_size")) == (500e6, 64)
    assert value("adam.decay") == "constant"
    assert str(value("VTraceAgent.network")) == "@GFootball"


FILES = [*(f"football_{rewards}_{size}" for rewards, size in PUBLISHED)]
FILES += ["football_vtrace", "football_simple115_vtrace", "football_r2d2"]


@pytest.mark.parametrize("name", FILES)
def test_actors_read_every_file(name):
    experiment = config.load([name], [], for_actor=True)
    assert experiment.environment == "seed_rl.envs.football:create_environment"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"number_of_left_players_agent_controls": 3}, "must be 1, got 3"),
        ({"representation": "extract"}, "'extract' is no representation.*mean extracted?"),
        ({"rewards": "scoring,chekpoints"}, "'chekpoints' is no reward.*mean checkpoints?"),
        ({"rewards": "checkpoints"}, "must include 'scoring'"),
        ({"smm_size": "larg"}, "'larg' is no smm_size.*mean large?"),
        ({"smm_size": (96,)}, r"\(width, height\), got \(96,\)"),
        ({"engine_options": {"players": ["agent:left_players=3"]}}, "'players'.*plays one player"),
        ({"engine_options": {"level": "5_vs_5"}}, "'level'.*football_environment.scenario"),
        ({"engine_options": {"game_engine_random_seed": 1}}, "_seed'.*by the seed of the run"),
        ({"smm_size": (96, 0)}, r"\(width, height\), got \(96, 0\)"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(UserError, match=words):
        football.create_environment(**arguments)


@pytest.mark.skipif(HAS_ENGINE, reason="football's engine is installed")
def test_without_the_engine_it_says_what_to_do():
    with pytest.raises(ModuleNotFoundError, match=r"run scripts/install_football\.sh"):
        make_environment_batch(football.create_environment, range(1), seed=1)


def test_an_engine_that_does_not_load(monkeypatch):
    def import_module(name):
        raise ImportError("libboost_python311.so.1.74.0: cannot open shared object file")

    monkeypatch.setattr(football.importlib, "import_module", import_module)
    with pytest.raises(UserError, match=r"libboost_python311.*install_football.sh again"):
        football.create_environment()
