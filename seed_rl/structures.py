"""The records that travel between environments, the learner and the agents."""

from typing import Any, NamedTuple


class EnvOutput(NamedTuple):
    """The result of one transition, of one environment or of a batch of them.

    An episode that ends by itself gives one record: `done`, with the first observation of the next
    episode. An episode that is cut while it could have gone on (a time limit) gives two: an
    ordinary one that shows its final observation, and then one with `done` and `abandoned`, reward
    0 and the first observation of the next episode. Nothing happened in between, so a learner takes
    the value of the final observation for the return from there on and learns nothing from the
    action chosen in it. An episode torn by a failure gives only the second record.
    """

    reward: Any  # float32, of the action before
    done: Any  # bool: `observation` is the first of a new episode
    observation: Any  # a nest of arrays
    abandoned: Any  # bool: the episode before was cut, not finished; only where `done`
    episode_step: Any  # int32: actions taken in this episode before `observation`


class EpisodeInfo(NamedTuple):
    """Finished episodes, one a row."""

    num_frames: Any  # int64, environment frames
    returns: Any  # float32, sum of the rewards the agent trains on
    raw_returns: Any  # float32, sum of the rewards as the environment counts them
    env_ids: Any  # int32
