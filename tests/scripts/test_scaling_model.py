"""The model of docs/scaling.md: its arithmetic, and that it is near what was measured."""

import importlib.util
import pathlib
import sys

import pytest

PATH = pathlib.Path(__file__).parents[2] / "scripts" / "scaling_model.py"


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("scaling_model", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def costs(model):
    """Round numbers of milliseconds."""
    return model.Costs(
        emulation=1e-3,
        actor_message=2e-3,
        server_message=4e-3,
        host_row=0.1e-3,
        batching=0.4e-3,
        inference=0.5e-3,
        training=2e-3,
        row_bytes=1000,
    )


def test_each_resource_limits_by_its_own_cost(model, costs):
    configuration = model.Configuration(
        actors=5,
        envs_per_actor=4,
        actor_cpus=6,
        learner_cpus=3,
        training_devices=2,
        inference_devices=1,
        network_bytes=5e6,
        max_batch_wait=0.002,
    )
    assert model.limits(configuration, costs) == pytest.approx(
        {
            "wire thread": 4 / 4e-3,  # a message carries 4 agent steps
            "training devices": 2 / 2e-3,
            "inference devices": 1 / 0.5e-3,
            "actor cores": 6 / (1e-3 + 2e-3 / 4),
            "learner cores": 3 / (0.1e-3 + 0.4e-3 + 4e-3 / 4),
            "network": 5000,
            # 4 ms of emulation, 2 of inference, 2 + 4 of messages, 2 of waiting.
            "actors' turns": 5 * 4 / 14e-3,
        }
    )
    rate, limit = model.steps_per_second(configuration, costs)
    assert (rate, limit) == (pytest.approx(1000), "wire thread")


def test_one_machine_without_accelerators_shares_its_cores(model, costs):
    configuration = model.Configuration(
        actors=100, envs_per_actor=4, actor_cpus=0, learner_cpus=2, one_machine=True
    )
    cpu_seconds = 1e-3 + (2e-3 + 4e-3) / 4 + 0.5e-3 + 0.5e-3 + 2e-3
    assert model.limits(configuration, costs)["cores"] == pytest.approx(2 / cpu_seconds)


def test_price(model, costs):
    configuration = model.Configuration(
        actors=100, envs_per_actor=4, actor_cpus=10, learner_cpus=90, training_devices=1,
        inference_devices=4, action_repeat=2,
    )  # fmt: skip
    rate, limit = model.steps_per_second(configuration, costs)
    assert (rate, limit) == (pytest.approx(500), "training devices")
    dollars_an_hour = 100 * 0.1 + 5 * 2.0
    price = model.dollars_per_million_frames(configuration, costs, model.Prices(0.1, 2.0))
    assert price == pytest.approx(dollars_an_hour / (500 * 2 * 3600 / 1e6))


def test_what_a_rate_needs(model, costs):
    configuration = model.Configuration(1, 8, 0, 0, network_bytes=1e6, action_repeat=2)
    need = model.needed(8000, configuration, costs)  # 4,000 agent steps/s, 500 messages/s
    assert need == model.Need(
        actor_cpus=5, training_devices=8, inference_devices=2, hosts=4,
        messages_per_second=500, bytes_per_second=4e6,
    )  # fmt: skip


def test_the_model_is_within_15_percent_of_every_measured_point(model):
    points = model.measured_points()
    assert len(points) >= 5
    for point in points:
        rate, _ = model.steps_per_second(point.configuration, point.costs)
        assert rate == pytest.approx(point.measured, rel=0.15), point


def test_a_cost_of_ones_own_replaces_that_of_the_points(model, capsys):
    model.print_points({"training": 1.0})  # a second, beside which the rest is nothing
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(model.measured_points())
    assert all("model     2 agent steps/s" in line for line in lines)  # two cores
