#!/usr/bin/env python
"""How fast, and at what price: a model of frames/s from the parts' own costs.

    scripts/scaling_model.py                      # the measured points, beside the model
    scripts/scaling_model.py --paper              # what 2.4 million frames/s would take
    scripts/scaling_model.py --actors=8 --envs_per_actor=32 --actor_cpus=16 --training_devices=6 \\
        --inference_devices=2 --learner_cpus=96 --cost=training=2e-6 --cost=inference=5e-7

docs/scaling.md says what the model is and where its numbers come from.
"""

import argparse
import csv
import dataclasses
import math
import pathlib
import sys

POINTS = pathlib.Path(__file__).parent.parent / "docs" / "results" / "scaling_points.csv"
DEFAULT_WAIT = 0.005  # seconds, Learner.max_batch_wait


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds that one thing keeps one core, or one accelerator, busy."""

    emulation: float = 0.680e-3  # of an actor's core, an agent step
    actor_message: float = 0.518e-3  # of an actor's core, a message
    server_message: float = 0.339e-3  # of the learner's one wire thread, a message
    host_row: float = 0.014e-3  # of the learner's cores, an agent step, beside the messages
    batching: float = 0.128e-3  # of the learner's cores, an agent step: unrolls to batches
    inference: float = 0.776e-3  # of an accelerator, an agent step; of one core where it is a CPU
    training: float = 1.196e-3  # the same
    row_bytes: int = 84 * 84 + 18  # of an observation with what goes with it


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Who does what on how much."""

    actors: int
    envs_per_actor: int
    actor_cpus: int  # cores of all actor machines together
    learner_cpus: int  # cores of all learner hosts together
    training_devices: int = 0  # accelerators; 0: the learner's cores do it
    inference_devices: int = 0
    hosts: int = 1  # of the learner, each with a wire thread of its own
    network_bytes: float = 1.25e9  # a second, into one host
    action_repeat: int = 4
    one_machine: bool = False  # actors and learner share learner_cpus
    max_batch_wait: float = DEFAULT_WAIT


def limits(c: Configuration, costs: Costs) -> dict[str, float]:
    """Returns agent steps/s that each resource allows if nothing else limits: the least counts."""
    message_share = 1.0 / c.envs_per_actor  # messages an agent step
    actor = costs.emulation + costs.actor_message * message_share
    on_host = costs.host_row + costs.batching + costs.server_message * message_share
    found = {"wire thread": c.hosts / (costs.server_message * message_share)}
    for name, devices, seconds in (
        ("training", c.training_devices, costs.training),
        ("inference", c.inference_devices, costs.inference),
    ):
        if devices:
            found[f"{name} devices"] = devices / seconds
        else:
            on_host += seconds
    if c.one_machine:
        found["cores"] = c.learner_cpus / (actor + on_host)
    else:
        found["actor cores"] = c.actor_cpus / actor
        found["learner cores"] = c.learner_cpus / on_host
        found["network"] = c.hosts * c.network_bytes / costs.row_bytes
    # An actor steps its environments one after the other, asks, and waits for the answer.
    inference = costs.inference / (c.inference_devices or c.learner_cpus)
    turn = (
        c.envs_per_actor * (costs.emulation + inference)
        + costs.actor_message
        + costs.server_message
        + c.max_batch_wait
    )
    found["actors' turns"] = c.actors * c.envs_per_actor / turn
    return found


def steps_per_second(c: Configuration, costs: Costs) -> tuple[float, str]:
    """Returns agent steps/s and the resource that allows no more."""
    found = limits(c, costs)
    name = min(found, key=lambda key: found[key])
    return found[name], name


@dataclasses.dataclass(frozen=True)
class Prices:
    """$ an hour. Assumptions to be replaced by one's own: list prices differ and change."""

    cpu: float = 0.05  # a core
    device: float = 1.0  # an accelerator, or a core of one


def dollars_per_million_frames(c: Configuration, costs: Costs, prices: Prices) -> float:
    """Returns the price of a million environment frames."""
    cpus = c.learner_cpus + (0 if c.one_machine else c.actor_cpus)
    devices = c.training_devices + c.inference_devices
    an_hour = prices.cpu * cpus + prices.device * devices
    rate, _ = steps_per_second(c, costs)
    return an_hour / (rate * c.action_repeat * 3600) * 1e6


@dataclasses.dataclass(frozen=True)
class Need:
    """What a rate takes."""

    actor_cpus: int
    training_devices: int
    inference_devices: int
    hosts: int  # so that neither a wire thread nor a network is the limit
    messages_per_second: float
    bytes_per_second: float


def needed(frames_per_second: float, c: Configuration, costs: Costs) -> Need:
    """Returns the least of everything that allows a rate, with the actors of `c`."""
    steps = frames_per_second / c.action_repeat
    messages = steps / c.envs_per_actor
    return Need(
        actor_cpus=_whole(steps * costs.emulation + messages * costs.actor_message),
        training_devices=_whole(steps * costs.training),
        inference_devices=_whole(steps * costs.inference),
        hosts=max(
            _whole(messages * costs.server_message),
            _whole(steps * costs.row_bytes / c.network_bytes),
        ),
        messages_per_second=messages,
        bytes_per_second=steps * costs.row_bytes,
    )


def _whole(number: float) -> int:
    return math.ceil(number - 1e-6)  # 48.000000001 is 48


@dataclasses.dataclass(frozen=True)
class Point:
    """A run, and what its parts cost by themselves on that machine at that time."""

    name: str
    configuration: Configuration
    costs: Costs
    measured: float  # agent steps/s


def measured_points() -> list[Point]:
    """Returns the runs of docs/results/scaling_points.csv."""
    with POINTS.open(newline="") as file:
        return [
            Point(
                row["name"],
                Configuration(
                    actors=int(row["actors"]),
                    envs_per_actor=int(row["envs_per_actor"]),
                    actor_cpus=0,
                    learner_cpus=int(row["cpus"]),
                    one_machine=True,
                ),
                Costs(
                    **{
                        column.removesuffix("_us"): 1e-6 * float(value)
                        for column, value in row.items()
                        if column.endswith("_us")
                    }
                ),
                float(row["agent_steps_per_second"]),
            )
            for row in csv.DictReader(file)
        ]


def print_points(overrides: dict[str, float]) -> None:
    """Prints measurement and model side by side; `overrides` replace costs of every point."""
    for point in measured_points():
        costs = dataclasses.replace(point.costs, **overrides)
        model, limit = steps_per_second(point.configuration, costs)
        configuration = f"{point.configuration.actors} × {point.configuration.envs_per_actor}"
        print(
            f"{point.name:45} {configuration:6} measured {point.measured:5.0f}, model {model:5.0f} "
            f"agent steps/s ({model / point.measured - 1:+.0%}; limit: {limit})"
        )


# The paper's largest run (table 1, quoted from memory): DeepMind Lab, frames of 72 × 96 × 3 bytes,
# 12,480 environments on 4,160 actor cores, 64 TPU cores. What the devices take is found from its
# own rate; how its 64 cores were divided is an assumption.
PAPER_FRAMES = 2.4e6
PAPER_TRAINING, PAPER_INFERENCE, PAPER_ACTOR_CPUS = 48, 16, 4160


def paper_costs(costs: Costs) -> Costs:
    """The paper's costs of emulation, training and inference, if all of it was busy."""
    steps = PAPER_FRAMES / 4
    return dataclasses.replace(
        costs,
        emulation=PAPER_ACTOR_CPUS / steps,
        training=PAPER_TRAINING / steps,
        inference=PAPER_INFERENCE / steps,
        row_bytes=72 * 96 * 3 + 18,
    )


def print_paper(costs: Costs) -> None:
    """Prints what the paper's rate needs here, by environments an actor."""
    costs = paper_costs(costs)
    saturation = 1 / costs.server_message
    print(f"one wire thread takes {saturation:,.0f} messages/s")
    print("envs/actor  messages/s   GB/s  actor cores  training  inference  hosts  frames/s a host")
    for envs in (3, 8, 16, 32, 64, 128):
        c = Configuration(actors=1, envs_per_actor=envs, actor_cpus=0, learner_cpus=0)
        need = needed(PAPER_FRAMES, c, costs)
        print(
            f"{envs:10} {need.messages_per_second:11,.0f} {need.bytes_per_second / 1e9:6.1f} "
            f"{need.actor_cpus:12,} {need.training_devices:9} {need.inference_devices:10} "
            f"{need.hosts:6} {PAPER_FRAMES / need.hosts:16,.0f}"
        )


def _overrides(given: list[str]) -> dict[str, float]:
    names = {field.name for field in dataclasses.fields(Costs)}
    values = {}
    for override in given:
        name, _, value = override.partition("=")
        if name not in names:
            sys.exit(f"--cost={override}: one of {', '.join(sorted(names))}, as NAME=SECONDS")
        values[name] = float(value)
    return values


def main() -> None:
    """Prints what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cost", action="append", default=[], help="NAME=SECONDS, see Costs")
    parser.add_argument("--paper", action="store_true", help="what 2.4 million frames/s takes")
    for field in dataclasses.fields(Configuration):
        if field.name == "one_machine":
            parser.add_argument("--one_machine", action="store_true")
        else:
            default = None if field.default is dataclasses.MISSING else field.default
            parser.add_argument(f"--{field.name}", type=type(default or 0), default=default)
    for field in dataclasses.fields(Prices):
        parser.add_argument(f"--{field.name}_price", type=float, default=field.default)
    args = vars(parser.parse_args())
    overrides = _overrides(args["cost"])
    costs = dataclasses.replace(Costs(), **overrides)
    if args["paper"]:
        print_paper(costs)
        return
    if args["actors"] is None:
        print_points(overrides)
        return
    values = {f.name: args[f.name] for f in dataclasses.fields(Configuration)}
    if missing := [name for name, value in values.items() if value is None]:
        sys.exit(f"also give {', '.join(f'--{name}' for name in missing)}")
    configuration = Configuration(**values)
    for name, rate in sorted(limits(configuration, costs).items(), key=lambda item: item[1]):
        print(
            f"{name:18} {rate:12,.0f} agent steps/s {rate * args['action_repeat']:12,.0f} frames/s"
        )
    prices = Prices(args["cpu_price"], args["device_price"])
    price = dollars_per_million_frames(configuration, costs, prices)
    print(f"${price:.4f} a million frames")


if __name__ == "__main__":
    main()
