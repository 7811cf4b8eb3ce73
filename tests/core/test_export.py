"""SavedModels do what the agent does, without its code."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from seed_rl.export import export_policy
from seed_rl.grpc_service import TensorSpec
from seed_rl.structures import EnvOutput

SPECS = TensorSpec((3,), np.float32), TensorSpec((), np.int32)


def inputs(size, state):
    rng = np.random.default_rng(size)
    env_outputs = EnvOutput(
        reward=np.zeros(size, np.float32),
        done=np.arange(size) % 2 == 0,
        observation=rng.normal(size=(size, 3)).astype(np.float32),
        abandoned=np.zeros(size, bool),
        episode_step=np.zeros(size, np.int32),
    )
    return np.arange(size, dtype=np.int32), np.zeros(size, np.int32), env_outputs, state


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("name", ["policy", "greedy_policy"])
def test_the_saved_model_acts_as_the_agent(tmp_path, tiny_agent, name, size):
    agent = tiny_agent()
    path = export_policy(agent, *SPECS, str(tmp_path))
    assert path == str(tmp_path / "saved_model")
    arguments = inputs(size, (np.arange(size, dtype=np.int32),))
    outputs, state = getattr(agent, name)(*arguments)
    arguments = tf.nest.map_structure(tf.constant, arguments)
    model = tf.saved_model.load(path)
    saved_outputs, saved_state = getattr(model, name)(*arguments)
    np.testing.assert_array_equal(saved_outputs.action, outputs.action)
    np.testing.assert_allclose(saved_outputs.scores, outputs.scores, rtol=1e-6)
    np.testing.assert_array_equal(saved_state[0], state[0])


@pytest.mark.parametrize("initial", [(), "one tensor", {"h": "one", "c": "one"}])
def test_the_initial_state_may_be_any_nest(tmp_path, tiny_agent, initial):
    def make(batch_size):
        return tf.nest.map_structure(lambda _: tf.fill([batch_size, 2], 3.0), initial)

    class Agent(tiny_agent):
        def initial_state(self, batch_size):
            return make(batch_size)

        def policy(self, env_ids, prev_actions, env_outputs, agent_state):
            outputs, _ = super().policy(env_ids, prev_actions, env_outputs, ([0],))
            return outputs, agent_state

        greedy_policy = policy

    model = tf.saved_model.load(export_policy(Agent(), *SPECS, str(tmp_path)))
    state = model.initial_state()
    tf.nest.map_structure(np.testing.assert_array_equal, state, make(1))
    _, next_state = model.policy(*tf.nest.map_structure(tf.constant, inputs(1, ())[:3]), state)
    tf.nest.map_structure(np.testing.assert_array_equal, next_state, make(1))


def test_exporting_again_replaces_the_model(tmp_path, tiny_agent):
    agent = tiny_agent()
    export_policy(agent, *SPECS, str(tmp_path))
    agent.network.bias.assign([100.0, 0.0])
    model = tf.saved_model.load(export_policy(agent, *SPECS, str(tmp_path)))
    arguments = tf.nest.map_structure(tf.constant, inputs(3, (np.zeros(3, np.int32),)))
    assert model.greedy_policy(*arguments)[0].action.numpy().tolist() == [0, 0, 0]


def test_a_namedtuple_of_ones_own_will_do(tmp_path, tiny_agent):
    """Who loads the model has no EnvOutput of this package."""
    agent = tiny_agent()
    arguments = inputs(3, (np.arange(3, dtype=np.int32),))
    expected = agent.greedy_policy(*arguments)[0].action
    own = collections.namedtuple(
        "EnvOutput", ["reward", "done", "observation", "abandoned", "episode_step"]
    )
    env_ids, prev_actions, env_outputs, state = tf.nest.map_structure(tf.constant, arguments)
    model = tf.saved_model.load(export_policy(agent, *SPECS, str(tmp_path)))
    outputs, _ = model.greedy_policy(env_ids, prev_actions, own(*env_outputs), state)
    np.testing.assert_array_equal(outputs.action, expected)
