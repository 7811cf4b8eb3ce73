"""Actors are killed at any moment, and their environments misbehave: the others go on."""

import collections
import itertools
import random
import signal
from typing import Any, NamedTuple

import numpy as np
import pytest
from real_processes import PATIENCE, wait_until
from recording_env import EPISODE_STEPS, LIVES, Recording, encode, life_of_return

from seed_rl.environment import observation_specs
from seed_rl.episode_statistics import EpisodeStatistics
from seed_rl.grpc_service import Server, TensorSpec
from seed_rl.inference import CentralInference, inference_input_specs, inference_output_specs

ENVS_PER_ACTOR = 2
UNROLL_LENGTH = 4


class Output(NamedTuple):
    action: Any


class IdleAgent:
    """Always takes action 0, and counts its steps in its state."""

    num_eval_envs = 0
    unroll_length = UNROLL_LENGTH
    num_overlapping_steps = 0

    def initial_state(self, batch_size):
        return (np.zeros(batch_size, np.int32),)

    def policy(self, env_ids, prev_actions, env_outputs, agent_state):
        return Output(np.zeros(len(env_ids), np.int32)), (agent_state[0] + 1,)


class UnrollList:
    """Keeps (agent_state, env_outputs) of every unroll by environment."""

    def __init__(self):
        self.by_env = collections.defaultdict(list)

    def put(self, unrolls):
        outputs = unrolls.env_outputs
        for row, env_id in enumerate(unrolls.env_id.tolist()):
            observation = outputs.observation
            if isinstance(observation, dict):
                # The picture says no more than a few of its pixels, and would fill the memory.
                observation = {
                    "where": observation["where"][row],
                    "pixels": observation["picture"][row][:, ::50_000].copy(),
                }
            self.by_env[env_id].append(
                (
                    int(unrolls.agent_state[0][row]),
                    outputs.reward[row],
                    outputs.done[row],
                    outputs.abandoned[row],
                    observation,
                )
            )


class Learner:
    """Central inference behind a server, whose unrolls nobody trains on."""

    def __init__(self, address, observation_space, num_envs, max_batch_wait=0.005):
        self.sink = UnrollList()
        self.statistics = EpisodeStatistics(num_envs, action_repeat=1)
        specs = observation_specs(observation_space), TensorSpec((), np.int32)
        agent = IdleAgent()
        self.inference = CentralInference(
            agent,
            [agent.policy],
            *specs,
            num_envs,
            self.sink,
            self.statistics,
            lambda: 0,
            [num_envs],
        )
        self.server = Server([address], num_environments=num_envs, max_batch_wait=max_batch_wait)
        self.server.bind(
            self.inference.functions(),
            name="inference",
            input_signature=inference_input_specs(specs[0]),
            output_signature=inference_output_specs(specs[1]),
            max_batch_size=num_envs,
        )
        self.server.start()

    def num_unrolls(self, task):
        """How many the environments of an actor have finished, the slowest of them."""
        first = task * ENVS_PER_ACTOR
        return min(len(self.sink.by_env[first + i]) for i in range(ENVS_PER_ACTOR))


def actor_flags(task, environment, num_envs):
    return [
        "--run_mode=actor",
        f"--task={task}",
        f"--num_envs={num_envs}",
        f"--env_batch_size={ENVS_PER_ACTOR}",
        f"--gin_bindings=experiment.environment = '{environment}:make'",
        "--gin_bindings=experiment.agent = 'seed_rl.agents.vtrace.agent:VTraceAgent'",
    ]


def check_unrolls(env_id, unrolls):
    """Every unroll is of one life, without a gap; and so are those of one life, one after another.

    Returns the lives, in their order.
    """
    lives = []
    before = None
    for count, reward, done, abandoned, observation in unrolls:
        where = observation["where"]
        assert (where[:, 0] == env_id).all()
        assert len(set(where[:, 1].tolist())) == 1
        life = int(where[0, 1])
        assert (observation["pixels"] == life % 256).all()
        opens = not lives or lives[-1] != life
        if opens:
            lives.append(life)
            assert count == 0  # a fresh recurrent state
            assert where[0, 2:].tolist() == [0, 0]
            assert (reward[0], done[0], abandoned[0]) == (0.0, True, True)
        else:
            assert where[0].tolist() == before
        total = where[:, 2] * EPISODE_STEPS + where[:, 3]
        assert (np.diff(total) == 1).all()
        first = 1 if opens else 0
        for k in range(first, UNROLL_LENGTH + 1):
            ended = where[k, 3] == 0
            step = EPISODE_STEPS if ended else where[k, 3]
            assert reward[k] == encode(life, step)
            assert (bool(done[k]), bool(abandoned[k])) == (bool(ended), False)
        before = where[-1].tolist()
    return lives


def test_killed_actors_leave_no_trace_in_what_is_learnt(processes):
    """Three actors; one is killed again and again, the others go on while it is dead."""
    num_envs, victim = 3 * ENVS_PER_ACTOR, 1
    learner = Learner(processes.address, Recording.observation_space, num_envs)
    rng = random.Random(1)

    def start(task, **suicide):
        return processes.start(
            f"actor{task}", *actor_flags(task, "recording_env", num_envs), **suicide
        )

    def await_unrolls(task, more):
        goal = learner.num_unrolls(task) + more
        wait_until(lambda: learner.num_unrolls(task) >= goal, f"{more} unrolls of actor {task}")

    with learner.server:
        others = [start(0), start(2)]
        kills = [
            {"SUICIDE_IN": "reset", "SUICIDE_AT": "1"},  # before it has said anything
            {"SUICIDE_IN": "step", "SUICIDE_AT": "17"},
            {"SUICIDE_IN": "reset", "SUICIDE_AT": "3"},  # after an episode's end
            *[{}] * 2,  # whenever it comes, messages of 400 kB included
        ]
        for suicide in kills:
            process = start(victim, **suicide)
            if not suicide:
                await_unrolls(victim, more=rng.randint(5, 15))
                process.kill()
            assert process.wait(PATIENCE) == -signal.SIGKILL
            for task in (0, 2):
                await_unrolls(task, more=10)
        last = start(victim)
        await_unrolls(victim, more=10)
        assert all(other.poll() is None for other in others)
        for process in (*others, last):
            process.kill()
            process.wait()

    for env_id in range(num_envs):
        lives = check_unrolls(env_id, learner.sink.by_env[env_id])
        killed = env_id // ENVS_PER_ACTOR == victim
        # Two of the lives may, by chance, have the same number; the first ends without an unroll.
        assert (len(kills) - 2 <= len(lives) <= len(kills)) if killed else len(lives) == 1
    assert "no learner at" not in processes.log("actor0")  # never had to reconnect
    finished = learner.statistics.take_finished()
    frames = np.concatenate([info.num_frames for info in finished])
    returns = np.concatenate([info.raw_returns for info in finished])
    assert len(frames) > 30
    assert (frames == EPISODE_STEPS).all()  # and no torn one
    lives = life_of_return(returns.astype(np.float64))
    assert (lives == np.round(lives)).all() and (lives >= 0).all() and (lives < LIVES).all()
    # Each start after the first that said anything brought back every environment of the actor.
    assert learner.inference.num_restarts == (len(kills) - 1) * ENVS_PER_ACTOR


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("raise", "RuntimeError: the simulator crashed"),
        ("huge", "magnitude of 1e+38"),
        ("shape", "(3,)"),
    ],
)
def test_an_actor_whose_environment_never_works_ends_with_the_reason(processes, failure, words):
    import failing_env

    num_envs = 8
    learner = Learner(processes.address, failing_env.Failing.observation_space, num_envs)
    with learner.server:
        other = processes.start("other", *actor_flags(0, "failing_env", num_envs), FAILURE="none")
        process = processes.start(
            "actor", *actor_flags(2, "failing_env", num_envs), FAILURE=failure
        )
        assert process.wait(PATIENCE) == 2
        restarts = learner.inference.num_restarts
        wait_until(lambda: learner.num_unrolls(0) > 3, "unrolls of the other")
        assert other.poll() is None
        other.kill()
        other.wait()
    log = processes.log("actor")
    lines = log.splitlines()
    assert lines[-1].startswith("error: Environment 5 failed 10 times in a row")
    assert words in lines[-1]
    assert log.count("Environment 5 failed and is made anew") == 9
    assert log.count("Traceback (most recent call last)") == 1
    assert restarts == 9
    assert [len(list(g)) for _, g in itertools.groupby(lines) if _.startswith("error:")] == [1]
