"""Central inference: the function that every actor calls, once a step."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from seed_rl.agent import Agent, UnrollSink
from seed_rl.aggregator import Aggregator
from seed_rl.env_ids import check_env_ids
from seed_rl.episode_statistics import EpisodeStatistics
from seed_rl.grpc_service import TensorSpec
from seed_rl.nests import map_nest
from seed_rl.structures import EnvOutput
from seed_rl.unroll_store import UnrollStore
from seed_rl.unrolls import Timestep, Unroll


class TrainingFinished(Exception):  # noqa: N818, no error: it tells actors to go home
    """The learner has all the frames it was asked to train on."""

    is_answer = True  # so that the server does not log it as a failure


Policy = Callable[..., tuple[Any, Any]]


class _Opening(NamedTuple):
    """How an unroll begins."""

    agent_state: Any  # recurrent state before its first step
    policy_version: Any  # training steps done by then


def inference_input_specs(observation_specs: Any) -> tuple:
    """Signature of the bound function `inference(env_ids, run_ids, env_outputs, raw_rewards)`."""

    def rows(dtype: Any, name: str) -> TensorSpec:
        return TensorSpec((None,), np.dtype(dtype), name)

    env_outputs = EnvOutput(
        reward=rows(np.float32, "reward"),
        done=rows(np.bool_, "done"),
        observation=map_nest(
            lambda s: TensorSpec((None, *s.shape), s.dtype, s.name), observation_specs
        ),
        abandoned=rows(np.bool_, "abandoned"),
        episode_step=rows(np.int32, "episode_step"),
    )
    return (
        rows(np.int32, "env_ids"),
        rows(np.int64, "run_ids"),
        env_outputs,
        rows(np.float32, "raw_rewards"),
    )


def inference_output_specs(action_specs: Any) -> Any:
    """Signature of what `inference` answers: the actions."""
    return map_nest(lambda s: TensorSpec((None, *s.shape), s.dtype, s.name), action_specs)


def timestep_specs(
    agent: Agent, policy: Policy, observation_specs: Any, action_specs: Any, batch_size: int
) -> Timestep:
    """Returns the TensorSpecs of one step of one environment.

    What the policy puts out is found by calling it once, on a batch of zeros.
    """

    def zeros(spec: Any) -> np.ndarray:
        return np.zeros((batch_size, *spec.shape[1:]), spec.dtype)

    env_ids, _, env_outputs, _ = map_nest(zeros, inference_input_specs(observation_specs))
    actions = map_nest(lambda s: np.zeros((batch_size, *s.shape), s.dtype), action_specs)
    states = map_nest(np.asarray, agent.initial_state(batch_size))
    outputs, _ = policy(env_ids, actions, env_outputs, states)

    def of_one(x: Any) -> TensorSpec:
        return TensorSpec(x.shape[1:], x.dtype)

    return Timestep(
        prev_action=action_specs,
        env_output=map_nest(of_one, env_outputs),
        agent_output=map_nest(of_one, map_nest(np.asarray, outputs)),
    )


def unroll_specs(
    agent: Agent, policy: Policy, observation_specs: Any, action_specs: Any, batch_size: int
) -> Unroll:
    """Returns the TensorSpecs of one unroll, as CentralInference hands it to the sink.

    Args:
      agent: the agent.
      policy: its compiled policy.
      observation_specs: nest of TensorSpec of one environment's observation.
      action_specs: nest of TensorSpec of one environment's action.
      batch_size: the policy is called once, on a batch of this size.
    """
    step = timestep_specs(agent, policy, observation_specs, action_specs, batch_size)
    length = agent.num_overlapping_steps + agent.unroll_length + 1
    steps = map_nest(lambda s: TensorSpec((length, *s.shape), s.dtype), step)
    state = map_nest(np.asarray, agent.initial_state(1))
    return Unroll(
        agent_state=map_nest(lambda x: TensorSpec(x.shape[1:], x.dtype), state),
        prev_actions=steps.prev_action,
        env_outputs=steps.env_output,
        agent_outputs=steps.agent_output,
        env_id=TensorSpec((), np.dtype(np.int32)),
        policy_version=TensorSpec((), np.dtype(np.int64)),
    )


class CentralInference:
    """Runs the policy for batches of environments and keeps each environment's state.

    Of each environment it holds the run_id, the recurrent state, the action taken last and the
    unroll so far. A new run_id says that the environment started anew: all of these are dropped, so
    that no unroll mixes data from before and after.

    It may be entered by several threads, one or some an inference device, each with a policy. An
    environment waits for its action before it goes on, so two threads hold the same one only when
    its actor died and the successor called meanwhile: what the policy made of the older call is
    then dropped.
    """

    def __init__(
        self,
        agent: Agent,
        policies: Sequence[Policy],
        observation_specs: Any,
        action_specs: Any,
        num_envs: int,
        sink: UnrollSink,
        statistics: EpisodeStatistics,
        policy_version: Callable[[], int],
        batch_sizes: Sequence[int],
        eval_statistics: EpisodeStatistics | None = None,
    ):
        """Args:
        agent: for its unroll length, overlap, initial state and number of environments that only
          evaluate.
        policies: one a thread that is to enter, (env_ids, prev_actions, env_outputs, agent_state)
          of leaves [B, …] -> (agent_outputs, agent_state).
        observation_specs: nest of TensorSpec of one environment's observation.
        action_specs: nest of TensorSpec of one environment's action.
        num_envs: number of environments.
        sink: takes the finished unrolls.
        statistics: is told every transition of the environments that are trained on.
        policy_version: gives the number of training steps done.
        batch_sizes: sizes that batches are padded to, so that few shapes are ever compiled.
        eval_statistics: is told every transition of the environments that only evaluate.
        """
        self.num_envs = num_envs
        self._batch_sizes = sorted(batch_sizes)
        self._policies = list(policies)
        self._sink = sink
        self._num_training_envs = num_envs - agent.num_eval_envs
        self._statistics = statistics
        self._eval_statistics = eval_statistics
        self._policy_version = policy_version
        self._lock = threading.Lock()
        self._finished = False
        self._has_started = np.zeros(num_envs, bool)
        self._waiting = np.zeros(num_envs, bool)  # environments whose actor is to hear the end
        self.num_steps = 0  # of the environments that are trained on
        self.num_restarts = 0  # environments that came back under another run_id

        self._initial_state = map_nest(np.asarray, agent.initial_state(1))
        state_specs = map_nest(lambda x: TensorSpec(x.shape[1:], x.dtype), self._initial_state)
        self._agent_states = Aggregator(num_envs, state_specs)
        opening_specs = _Opening(state_specs, TensorSpec((), np.int64))
        self._openings = Aggregator(num_envs, opening_specs)
        self._next_openings = Aggregator(num_envs, opening_specs)
        self._actions = Aggregator(num_envs, action_specs)
        self._run_ids = Aggregator(num_envs, TensorSpec((), np.int64))
        if agent.unroll_length <= agent.num_overlapping_steps:
            raise ValueError(
                f"unroll_length ({agent.unroll_length}) must be greater than the number of "
                f"overlapping steps ({agent.num_overlapping_steps}): the state in which an unroll "
                "opens is noted while the unroll before it is collected"
            )
        self._store = UnrollStore(
            num_envs,
            agent.unroll_length,
            timestep_specs(
                agent, self._policies[0], observation_specs, action_specs, self._batch_sizes[0]
            ),
            agent.num_overlapping_steps,
        )
        # The step at this position of an unroll is the first of the next one.
        self._opening_position = agent.unroll_length
        self._reset(np.arange(num_envs))

    def functions(self) -> list[Callable]:
        """Returns the functions to bind, one a policy, all named `inference`."""

        def bound(policy: Policy) -> Callable:
            def inference(env_ids, run_ids, env_outputs, raw_rewards):
                return self.step(policy, env_ids, run_ids, env_outputs, raw_rewards)

            return inference

        return [bound(policy) for policy in self._policies]

    def finish(self, expected: range = range(0)) -> None:
        """Answers every further call with TrainingFinished.

        Args:
          expected: environments that are to call, beside those that were stepped so far.
        """
        self._waiting[list(expected)] = True
        self._finished = True

    @property
    def everybody_knows(self) -> bool:
        """Whether, after `finish`, each environment that is expected to call has been told."""
        return self._finished and not self._waiting.any()

    def step(
        self, policy: Policy, env_ids: Any, run_ids: Any, env_outputs: EnvOutput, raw_rewards: Any
    ) -> Any:
        """Takes one transition of each of n environments and returns their next actions.

        Args:
          policy: the compiled policy to use.
          env_ids: int32 [n]. An id may come twice (an actor died with its call still waiting, and
            its successor called): the rows are then taken in their order.
          run_ids: int64 [n], drawn by the actor when it started.
          env_outputs: EnvOutput of leaves [n, …].
          raw_rewards: float32 [n], rewards as the environment counts them.

        Returns:
          Actions, leaves [n, …].

        Raises:
          TrainingFinished: no more frames are needed.
          ValueError: an env_id is out of range.
        """
        ids = check_env_ids(env_ids, self.num_envs)
        if self._finished:
            self._waiting[ids] = False
            raise TrainingFinished("the learner has trained on all the frames it was asked to")
        groups = _distinct_groups(ids, self.num_envs)
        if len(groups) == 1:
            return self._step_distinct(policy, ids, run_ids, env_outputs, raw_rewards)
        answers = []
        for rows in groups:
            group = map_nest(lambda x, rows=rows: x[rows], (ids, run_ids, env_outputs, raw_rewards))
            answers.append(self._step_distinct(policy, *group))
        order = np.argsort(np.concatenate(groups))
        return map_nest(lambda *parts: np.concatenate(parts)[order], *answers)

    def _step_distinct(self, policy, ids, run_ids, env_outputs, raw_rewards):
        with self._lock:
            env_outputs = self._take_in(ids, run_ids, env_outputs, raw_rewards)
            prev_actions = self._actions.read(ids)
            agent_states = self._agent_states.read(ids)
            self._note_openings(ids, agent_states)
        agent_outputs, next_states = self._run_policy(
            policy, ids, prev_actions, env_outputs, agent_states
        )
        with self._lock:
            timestep = Timestep(prev_actions, env_outputs, agent_outputs)
            current = self._run_ids.read(ids) == run_ids
            if not current.all():
                ids = ids[current]
                next_states, timestep = map_nest(lambda x: x[current], (next_states, timestep))
            self._agent_states.replace(ids, next_states)
            self._actions.replace(ids, timestep.agent_output.action)
            completed = self._append(ids, timestep)
        if completed is not None:
            self._sink.put(completed)
        return agent_outputs.action

    def _take_in(self, ids, run_ids, env_outputs: EnvOutput, raw_rewards) -> EnvOutput:
        """Drops the state of environments that started anew, counts the steps of the others."""
        started = self._run_ids.read(ids) != run_ids
        if not started.any():
            self._record(ids, env_outputs, raw_rewards)
            return env_outputs
        self.num_restarts += int(np.count_nonzero(self._has_started[ids[started]]))
        self._has_started[ids[started]] = True
        self._reset(ids[started])
        self._waiting[ids] = True
        self._run_ids.replace(ids, run_ids)
        on = ~started
        if on.any():
            self._record(ids[on], map_nest(lambda x: x[on], env_outputs), raw_rewards[on])
        # Whatever came before was torn: nothing is to be learnt from the way to this observation.
        return env_outputs._replace(
            reward=np.where(started, np.float32(0), env_outputs.reward),
            done=env_outputs.done | started,
            abandoned=env_outputs.abandoned | started,
        )

    def _record(self, ids, env_outputs: EnvOutput, raw_rewards) -> None:
        training = ids < self._num_training_envs
        for group, statistics in (
            (training, self._statistics),
            (~training, self._eval_statistics),
        ):
            if statistics is not None and group.any():
                rows = slice(None) if group.all() else group
                statistics.record(
                    ids[rows],
                    map_nest(lambda x, rows=rows: x[rows], env_outputs),
                    raw_rewards[rows],
                )
        self.num_steps += int(np.count_nonzero(training & ~env_outputs.abandoned))

    def _note_openings(self, ids, agent_states) -> None:
        opens = self._store.positions(ids) == self._opening_position
        if opens.any():
            version = np.full(np.count_nonzero(opens), self._policy_version(), np.int64)
            states = map_nest(lambda x: x[opens], agent_states)
            self._next_openings.replace(ids[opens], _Opening(states, version))

    def _run_policy(self, policy, ids, *inputs):
        num_rows = ids.size
        size = next((s for s in self._batch_sizes if s >= num_rows), num_rows)
        padded = map_nest(lambda x: _pad(x, size), (ids.astype(np.int32), *inputs))
        outputs = policy(*padded)
        return map_nest(lambda x: np.asarray(x)[:num_rows], outputs)

    def _append(self, ids, timestep: Timestep) -> Unroll | None:
        training = ids < self._num_training_envs
        if not training.all():
            ids, timestep = map_nest(lambda x: x[training], (ids, timestep))
        completed, steps = self._store.append(ids, timestep)
        if not completed.size:
            return None
        opening = self._openings.read(completed)
        self._openings.replace(completed, self._next_openings.read(completed))
        return Unroll(
            agent_state=opening.agent_state,
            prev_actions=steps.prev_action,
            env_outputs=steps.env_output,
            agent_outputs=steps.agent_output,
            env_id=completed.astype(np.int32),
            policy_version=opening.policy_version,
        )

    def _reset(self, ids: np.ndarray) -> None:
        self._store.reset(ids)
        self._actions.reset(ids)
        for statistics in (self._statistics, self._eval_statistics):
            if statistics is not None:
                statistics.restart(ids)
        states = map_nest(lambda x: np.repeat(x, ids.size, axis=0), self._initial_state)
        self._agent_states.replace(ids, states)
        version = np.full(ids.size, self._policy_version(), np.int64)
        self._openings.replace(ids, _Opening(states, version))


def _pad(x: np.ndarray, size: int) -> np.ndarray:
    """Appends rows of zeros up to `size`."""
    if len(x) == size:
        return x
    padded = np.zeros((size, *x.shape[1:]), x.dtype)
    padded[: len(x)] = x
    return padded


def _distinct_groups(ids: np.ndarray, num_envs: int) -> list:
    """Splits the rows of `ids` into groups, in order, in which every id comes once at most."""
    seen = np.zeros(num_envs, bool)
    seen[ids] = True
    if np.count_nonzero(seen) == ids.size:
        return [slice(None)]
    occurrence = np.zeros(ids.size, np.int64)
    counts: dict[int, int] = {}
    for row, env_id in enumerate(ids.tolist()):
        occurrence[row] = counts[env_id] = counts.get(env_id, -1) + 1
    return [np.flatnonzero(occurrence == k) for k in range(occurrence.max() + 1)]
