"""Training steps as a TPU needs them: every shape known, arithmetic in bfloat16, under XLA."""

import functools

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from seed_rl.agents.r2d2 import networks as q_networks
from seed_rl.agents.r2d2.agent import R2D2Agent
from seed_rl.agents.vtrace import networks
from seed_rl.agents.vtrace.agent import VTraceAgent
from seed_rl.observations import tensor_specs
from seed_rl.optimizers import adam
from seed_rl.precision import LossScale, network_in_precision
from seed_rl.replay_sink import ReplayBatch
from seed_rl.structures import EnvOutput
from seed_rl.training import Trainer
from seed_rl.unrolls import Unroll
from seed_rl.user_error import UserError

T, B = 3, 2  # steps of an unroll but the last; unrolls of a batch
ACTIONS = gymnasium.spaces.Discrete(3)
IMAGE = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
VECTOR = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
NESTED = gymnasium.spaces.Dict({"image": IMAGE, "vector": VECTOR})

# By name: what makes the agent's network, and what it observes.
VTRACE = {
    "ImpalaDeep": (networks.ImpalaDeep, IMAGE),
    "ImpalaDeep stacked": (functools.partial(networks.ImpalaDeep, stack_size=3), IMAGE),
    "ImpalaShallow": (networks.ImpalaShallow, IMAGE),
    "ImpalaShallow LSTM": (functools.partial(networks.ImpalaShallow, lstm_units=8), IMAGE),
    "MLP": (functools.partial(networks.MLP, normalize_observations=True), VECTOR),
    "AutoNetwork": (networks.AutoNetwork, NESTED),
    "GFootball": (networks.GFootball, IMAGE),
}
R2D2 = {
    "DuelingLSTMDQNNet": (
        functools.partial(q_networks.DuelingLSTMDQNNet, stack_size=4, lstm_units=8, head_units=8),
        IMAGE,
    ),
    "DuelingLSTMDQNMLP": (q_networks.DuelingLSTMDQNMLP, VECTOR),
    "DuelingLSTMDQNAuto": (
        functools.partial(q_networks.DuelingLSTMDQNAuto, normalize_observations=True),
        NESTED,
    ),
}
CASES = [("vtrace", name) for name in VTRACE] + [("r2d2", name) for name in R2D2]
# Of each kind of layer one, since XLA takes its time.
COMPILED = [("vtrace", "AutoNetwork"), ("r2d2", "DuelingLSTMDQNMLP")]


def make_agent(kind, name, precision="float32"):
    tf.keras.utils.set_random_seed(1)
    settings = {
        "optimizer": lambda n: adam(n, learning_rate=1e-3),
        "unroll_length": T,
        "batch_size": B,
        "precision": precision,
        "max_gradient_norm": 1.0,
    }
    if kind == "vtrace":
        network, space = VTRACE[name]
        return VTraceAgent(space, ACTIONS, network=network, **settings), space
    network, space = R2D2[name]
    settings |= {"burn_in": 1, "replay_size": 10, "min_replay_size": 5}
    return R2D2Agent(space, ACTIONS, 4, network=network, **settings), space


def make_batch(kind, agent, space):
    rng = np.random.default_rng(3)
    steps = agent.num_overlapping_steps + T + 1
    shape = (steps, B)

    def observation(spec):
        if spec.dtype == tf.uint8:
            return rng.integers(0, 256, (*shape, *spec.shape), np.uint8)
        return rng.normal(size=(*shape, *spec.shape)).astype(np.float32)

    abandoned = np.zeros(shape, bool)
    abandoned[1, 0] = True
    outputs = EnvOutput(
        rng.normal(size=shape).astype(np.float32),
        abandoned,
        tf.nest.map_structure(observation, tensor_specs(space)),
        abandoned,
        np.zeros(shape, np.int32),
    )
    actions = rng.integers(0, ACTIONS.n, shape).astype(np.int32)
    logits = rng.normal(size=(*shape, ACTIONS.n)).astype(np.float32)
    acted = (
        networks.AgentOutput(actions, logits, np.zeros(shape, np.float32))
        if kind == "vtrace"
        else q_networks.AgentOutput(actions, logits)
    )
    state = tf.nest.map_structure(lambda x: x.numpy(), agent.initial_state(B))
    ids = np.arange(B, dtype=np.int32)
    unrolls = Unroll(state, actions, outputs, acted, ids, ids.astype(np.int64))
    if kind == "vtrace":
        return unrolls
    return ReplayBatch(unrolls, np.ones(B, np.float32), ids, ids)


def unknown_shapes(function, *args):
    """Names of operations, in all of the functions called, of whose results a size is unknown."""
    graph = function.get_concrete_function(*args).graph.as_graph_def(add_shapes=True)
    nodes = list(graph.node)
    for inner in graph.library.function:
        nodes.extend(inner.node_def)
    return [
        f"{node.op} {node.name}"
        for node in nodes
        for shape in node.attr["_output_shapes"].list.shape
        if shape.unknown_rank or any(d.size < 0 for d in shape.dim)
    ]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_shape_of_a_training_step_is_known(kind, name):
    agent, space = make_agent(kind, name, "bfloat16")
    trainer = Trainer(agent, agent.make_optimizer(10))
    assert unknown_shapes(trainer._step, make_batch(kind, agent, space)) == []


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_shape_of_an_inference_step_is_known(kind, name):
    agent, space = make_agent(kind, name)
    batch = make_batch(kind, agent, space)
    unrolls = batch if kind == "vtrace" else batch.unrolls
    first = tf.nest.map_structure(lambda x: x[0], unrolls.env_outputs)
    policy = tf.function(agent.policy, autograph=False)
    inputs = (unrolls.env_id, unrolls.prev_actions[0], first, unrolls.agent_state)
    assert unknown_shapes(policy, *inputs) == []


def test_an_unknown_shape_would_be_found():
    """Also inside of a loop."""

    def body(i, x):
        chosen = tf.boolean_mask(x, x > 0)
        return i + 1, x + tf.reduce_sum(chosen)

    @tf.function(autograph=False)
    def step(x):
        return tf.while_loop(lambda i, _: i < 3, body, (0, x))

    assert any("boolean_mask" in name for name in unknown_shapes(step, tf.ones(4)))


@pytest.mark.parametrize(("kind", "name"), COMPILED)
def test_bfloat16_under_xla_is_near_float32_and_keeps_parameters_in_it(kind, name):
    results = []
    for precision, jit_compile in (("float32", False), ("bfloat16", True)):
        agent, space = make_agent(kind, name, precision)
        trainer = Trainer(agent, agent.make_optimizer(10), jit_compile)
        metrics, _ = trainer.step(make_batch(kind, agent, space))
        assert {v.dtype for v in agent.trainable_variables} == {tf.float32}
        assert {value.dtype for value in metrics.values()} == {tf.float32}
        results.append({key: float(value) for key, value in metrics.items()})
    full, half = results
    assert half["training/loss"] == pytest.approx(full["training/loss"], rel=0.05, abs=0.02)
    norm = "training/gradient_norm"
    assert half[norm] == pytest.approx(full[norm], rel=0.1)
    # Had the option gone nowhere, the last digits would be the same.
    assert abs(half[norm] / full[norm] - 1) > 1e-5


def test_float16_finds_its_scale_and_learns():
    """A loss of 1e6 overflows float16 at first: the scale is halved until it does not."""
    agent, space = make_agent("vtrace", "ImpalaShallow", "float16")
    batch = make_batch("vtrace", agent, space)
    batch = batch._replace(
        env_outputs=batch.env_outputs._replace(reward=1e5 * batch.env_outputs.reward)
    )
    trainer = Trainer(agent, agent.make_optimizer(10), max_skipped_steps=0)
    sink = ListSink([batch] * 60)
    scales = []
    while trainer.num_steps < 2 and sink.batches:
        metrics = trainer.train_from(sink, 1.0)
        scales.append(float(trainer._loss_scale.value))
        skipped = metrics == {}
        assert scales[-1] == (scales[-2] if len(scales) > 1 else 2.0**15) / (2 if skipped else 1)
    assert trainer.num_steps == 2
    assert trainer.num_skipped == len(scales) - 2 > 0


def test_gradients_in_float16_are_those_of_the_loss_without_its_scale():
    norms = []
    for precision in ("float32", "float16"):
        agent, space = make_agent("vtrace", "MLP", precision)
        trainer = Trainer(agent, agent.make_optimizer(10))
        metrics, _ = trainer.step(make_batch("vtrace", agent, space))
        norms.append(float(metrics["training/gradient_norm"]))
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


class ListSink:
    """Gives these batches."""

    def __init__(self, batches):
        self.batches = batches

    def next_batch(self, timeout):
        return self.batches.pop()

    def training_done(self, batch, feedback, training_step):
        pass


def test_the_scale_grows_after_its_period_and_never_falls_below_one():
    scale, seen = LossScale(initial=2.0, period=2), []
    for finite in (True, True, True, False, False, False, True, True):
        scale.update(tf.constant(finite))
        seen.append(float(scale.value))
    assert seen == [2, 4, 4, 2, 1, 1, 1, 2]


def test_a_precision_that_does_not_exist_and_a_network_without_one_are_errors():
    with pytest.raises(UserError, match="one of float32, bfloat16, float16, got 'bf16'"):
        make_agent("vtrace", "MLP", "bf16")
    with pytest.raises(UserError, match="parameter `dtype`"):
        network_in_precision(lambda distribution: None, "bfloat16")
