"""Reading configurations, on the learner's and on the actor's side."""

import importlib.resources
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys

import gin
import pytest

import seed_rl.agents
from seed_rl import config
from seed_rl.config import ConfigError

BASE = [
    "experiment.agent = 'seed_rl.agents.vtrace.agent:VTraceAgent'",
    "experiment.environment = 'seed_rl.envs.memory:memory_environment'",
]


@pytest.fixture(autouse=True)
def _clear_gin():
    yield
    gin.clear_config()


def load(*bindings, configs=(), for_actor=False):
    return config.load(list(configs), [*BASE, *bindings], for_actor=for_actor)


def message_of(*bindings, configs=(), for_actor=False):
    with pytest.raises(ConfigError) as error:
        load(*bindings, configs=configs, for_actor=for_actor)
    message = str(error.value)
    assert "\n" not in message
    return message


def value(name):
    return gin.query_parameter(name)


# Files


def test_a_file_is_found_by_name_with_or_without_its_ending_or_by_path(tmp_path):
    by_name = config.find_config("gym_vtrace")
    assert by_name.endswith("gym_vtrace.gin")
    assert config.find_config("gym_vtrace.gin") == by_name
    own = tmp_path / "own.gin"
    own.write_text("")
    assert config.find_config(str(own)) == str(own)


@pytest.mark.parametrize("name", ["nonsense", "/nowhere/gym_vtrace.gin", "../setup.py"])
def test_an_unknown_file_lists_what_there_is(name):
    with pytest.raises(ConfigError) as error:
        config.find_config(name)
    assert f"--gin_config={name}" in str(error.value)
    assert "atari_vtrace.gin" in str(error.value) and "gym_vtrace.gin" in str(error.value)


def test_a_directory_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"--gin_config=/.*: a directory, not a file, and"):
        config.find_config(str(tmp_path))


def test_bindings_win_over_files_and_later_files_over_earlier_ones(tmp_path):
    for number in (1, 2):
        (tmp_path / f"{number}.gin").write_text(
            f"Learner.total_frames = {number}000\nMLP.lstm_units = {number}\n"
        )
    files = [str(tmp_path / "1.gin"), str(tmp_path / "2.gin")]
    load("Learner.total_frames = 77", configs=files)
    assert value("Learner.total_frames") == 77
    assert value("MLP.lstm_units") == 2


def test_a_file_anywhere_may_include_one_of_the_package(tmp_path):
    own = tmp_path / "own.gin"
    own.write_text("include 'gym_vtrace.gin'\ngym_env.env_id = 'Acrobot-v1'\n")
    experiment = config.load([str(own)], [], for_actor=False)
    assert experiment.environment == "seed_rl.envs.gym_env:gym_env"
    assert value("gym_env.env_id") == "Acrobot-v1"
    assert value("AutoNetwork.hidden_sizes") == (64, 64)  # as gym_vtrace.gin has it


def test_a_configuration_leaves_nothing_of_the_one_before():
    load("Learner.total_frames = 77")
    load()
    with pytest.raises(ValueError, match="no bound parameters"):
        value("Learner.total_frames")


# Mistakes


@pytest.mark.parametrize(
    ("binding", "named"),
    [
        ("Lerner.total_frames = 1", "Lerner"),
        ("Learner.totl_frames = 1", "totl_frames"),
        ("Actor.reconect_secs = 1", "reconect_secs"),
        ("VTraceAgent.discuont = 0.9", "discuont"),
        ("VTraceAgent.network = @Impala", "Impala"),
        ("adam.learning_rates = 0.1", "learning_rates"),
        ("memory_environment.delai = 3", "delai"),
        ("evaluate.agent = 3", "agent"),
        ("Learner.total_frames = ", "Learner.total_frames ="),
        ("Learner.total_frames 3", "Learner.total_frames 3"),
        ("Learner.total_frames = (1,", "EOF"),
        ("Learner.total_frames = '''1", "EOF"),
        ("Learner.total_frames = %FRAMES", "FRAMES"),
        ("include 'nowhere.gin'", "nowhere.gin"),
        ("import no_such_module", "no_such_module"),
    ],
)
def test_a_mistake_is_named(binding, named):
    message = message_of(binding)
    assert named in message
    assert "configuration" in message


def test_bad_syntax_in_a_file_names_file_and_line(tmp_path):
    own = tmp_path / "own.gin"
    own.write_text("# fine\nMLP.lstm_units = 3\nMLP.lstm_units = = 4\n")
    message = message_of(configs=[str(own)])
    assert "own.gin" in message and "line 3" in message.lower()


def test_no_agent_or_no_environment_says_what_to_bind():
    for bindings in ([], BASE[:1], BASE[1:]):
        with pytest.raises(ConfigError, match=r"experiment\.agent.*experiment\.environment"):
            config.load([], bindings, for_actor=False)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("no_such_package.agent:Agent", "no_such_package"),
        ("seed_rl.agents.vtrace.agent:NoAgent", "has no 'NoAgent'"),
        ("seed_rl.agents.vtrace.agent", "package.module:name"),
    ],
)
def test_a_missing_agent_is_named(path, named):
    message = message_of(f"experiment.agent = '{path}'")
    assert "experiment.agent" in message and named in message


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("no_such_package.envs:make", "no_such_package"),
        ("seed_rl.envs.memory:nothing", "nothing"),
        ("seed_rl.envs.memory", "package.module:function"),
    ],
)
@pytest.mark.parametrize("for_actor", [False, True])
def test_a_missing_environment_is_named(path, named, for_actor):
    message = message_of(f"experiment.environment = '{path}'", for_actor=for_actor)
    assert "experiment.environment" in message and named in message


# Actors


SIDE = """
import json, sys
from seed_rl import config
answers = []
for configs, bindings in json.load(sys.stdin):
    try:
        config.load(configs, bindings, for_actor=True)
        answers.append("")
    except config.ConfigError as error:
        answers.append(str(error))
import seed_rl.actor
heavy = sorted({"tensorflow", "keras", "tensorboard"} & set(sys.modules))
print(json.dumps([answers, heavy]))
"""


def load_as_actor(cases, path=""):
    """Loads configurations, (files, bindings) each, as an actor: (messages, heavy modules)."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([path, *inherited]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", SIDE],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def shipped_configs():
    folder = importlib.resources.files("seed_rl.configs")
    names = sorted(p.name for p in folder.iterdir() if p.name.endswith(".gin"))
    if importlib.util.find_spec("ale_py") is None:
        names = [name for name in names if "atari" not in name]
    return names


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_file_is_valid_for_a_learner(name):
    experiment = config.load([name], [], for_actor=False)
    assert callable(config.load_agent_factory(experiment.agent))


def test_actors_read_every_shipped_file_without_tensorflow():
    names = shipped_configs()
    answers, heavy = load_as_actor([([name], []) for name in names])
    assert dict(zip(names, answers, strict=True)) == dict.fromkeys(names, "")
    assert heavy == []


def test_actors_pass_over_the_learners_names_and_find_misspelt_ones():
    fine = [
        "Learner.total_frames = 5",
        "adam.learning_rate = 0.1",
        "VTraceAgent.network = @MLP",
        "MLP.lstm_units = 3",
        "evaluate.greedy = False",
        "memory_environment.delay = 3",
        "Actor.reconnect_secs = 5.0",
    ]
    wrong = {
        "Lerner.total_frames = 5": "Lerner",
        "VTraceAgnet.discount = 0.9": "VTraceAgnet",
        "memory_environment.delai = 3": "delai",
        "memory_environmnt.delay = 3": "memory_environmnt",
        "Actor.reconect_secs = 5.0": "reconect_secs",
        "memory_environment.delay = = 3": "delay = = 3",
    }
    cases = [([], BASE + fine), *(([], [*BASE, binding]) for binding in wrong)]
    (first, *others), heavy = load_as_actor(cases)
    assert first == ""
    for message, named in zip(others, wrong.values(), strict=True):
        assert named in message
    assert heavy == []


def test_actors_need_not_be_told_the_names_of_an_agent_that_declares_none(tmp_path):
    """Neither one that is a module of its own, which would be imported with its TensorFlow."""
    (tmp_path / "lone_agent.py").write_text("import tensorflow\n")
    package = tmp_path / "silent_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "agent.py").write_text("import tensorflow\n")
    agents = ["lone_agent:MyAgent", "silent_package.agent:MyAgent", "not_here.agent:MyAgent"]
    cases = [
        ([], [BASE[1], f"experiment.agent = '{agent}'", "MyAgent.x = @MyNetwork"])
        for agent in agents
    ]
    misspelt = ([], [*cases[0][1], "memory_environment.delai = 3"])
    (*answers, last), heavy = load_as_actor([*cases, misspelt], path=str(tmp_path))
    assert answers == ["", "", ""]
    assert "delai" in last
    assert heavy == []


def test_the_declared_names_are_those_that_gin_knows():
    """Of every agent, and of what only learners import."""
    packages = {"seed_rl": config.LEARNER_CONFIGURABLES}
    for found in pkgutil.walk_packages(seed_rl.agents.__path__, "seed_rl.agents."):
        module = importlib.import_module(found.name)
        if found.ispkg:
            packages[found.name] = module.CONFIGURABLES
    for name in ("learner", "evaluation", "optimizers", "actor"):
        importlib.import_module(f"seed_rl.{name}")
    registered = [name for name, _ in gin.config._REGISTRY.items()]
    for package, declared in packages.items():
        others = ("seed_rl.agents.", "seed_rl.envs.") if package == "seed_rl" else ()
        actual = {
            name.rpartition(".")[2]
            for name in registered
            if name.startswith(f"{package}.") and not name.startswith(others)
        }
        assert sorted(declared) == sorted(actual - {"Actor", "experiment"}), package
    assert len(packages) > 1


# Environments in place of others


REPLACED = "gym_env.env_id = 'CartPole-v1'\nexperiment.environment = 'seed_rl.envs.gym_env:gym_env'"
OWN = "experiment.environment = 'seed_rl.envs.memory:memory_environment'"


@pytest.mark.parametrize("for_actor", [False, True])
@pytest.mark.parametrize("is_included", [False, True])
def test_another_environment_may_take_the_place_of_a_files(is_included, for_actor, tmp_path):
    """As in --gin_config=gym_vtrace with one's own VectorEnv."""
    (tmp_path / "a.gin").write_text(f"{REPLACED}\n")
    (tmp_path / "b.gin").write_text(f"include '{tmp_path}/a.gin'\n{OWN}\n")
    name = "b" if is_included else "a"
    # In a process that has not imported the replaced environment before.
    script = (
        "from seed_rl import config; print(config.load("
        f"['{tmp_path}/{name}.gin'], [{BASE[0]!r}, {OWN!r}], for_actor={for_actor}).environment)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["seed_rl.envs.memory:memory_environment"], done.stderr[-2000:]


def test_what_no_environment_of_the_run_has_is_an_unknown_name():
    script = f"from seed_rl import config; config.load([], {[*BASE, 'gym_env.env_id = 1']!r}, True)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "No configurable matching 'gym_env'" in done.stderr


# Types


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("Actor.reconnect_secs = 'soon'", "Actor.reconnect_secs must be a number, got 'soon'"),
        ("Actor.insecure = 1", "Actor.insecure must be True or False, got 1"),
        ("TEN = 'ten'\nActor.reconnect_secs = %TEN", "Actor.reconnect_secs must be a number"),
        ("memory_environment.delay = 2.5", "memory_environment.delay must be a whole number"),
        ("memory_environment.delay = True", "memory_environment.delay must be a whole number"),
    ],
)
@pytest.mark.parametrize("for_actor", [False, True])
def test_a_value_of_another_type_is_named(binding, expected, for_actor):
    assert expected in message_of(binding, for_actor=for_actor)


LIST, DICT = "a list such as [1, 2]", "a dict such as {'name': 1}"


@pytest.mark.parametrize(
    ("environment", "binding", "expected"),
    [
        ("gym_env:gym_env", "gym_env.kwargs = 'x'", f"{DICT} or None, got 'x'"),
        ("gym_env:gym_env", "gym_env.wrappers = 5", f"{LIST}, got 5"),
        ("gym_env:gym_env", "gym_env.wrappers = 'time_limit'", f"{LIST}, got 'time_limit'"),
        ("dmlab:create_environment", "DmLab.action_set = 5", f"{LIST}, got 5"),
        ("dmlab:create_environment", "DmLab.config = [1]", f"{DICT} or None, got [1]"),
        ("dmlab:create_environment", "dmlab_environment.levels = 7", f"quotes or {LIST}, got 7"),
        (
            "football:create_environment",
            "football_environment.smm_size = 7",
            f"quotes or {LIST}, got 7",
        ),
        (
            "football:create_environment",
            "football_environment.engine_options = 'x'",
            f"{DICT} or None, got 'x'",
        ),
    ],
)
def test_a_value_that_is_no_list_or_dict_is_named(environment, binding, expected):
    message = message_of(f"experiment.environment = 'seed_rl.envs.{environment}'", binding)
    assert f"{binding.partition(' ')[0]} must be {expected}" in message.replace("a text in ", "")


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("adam.learning_rate = 'x'", "adam.learning_rate must be a number, got 'x'"),
        ("VTraceAgent.network = 'MLP'", "VTraceAgent.network must be a reference such as @name"),
        (
            "VTraceAgent.target_entropy = 'x'",
            "VTraceAgent.target_entropy must be a number or None",
        ),
        ("Learner.total_frames = (1,)", "Learner.total_frames must be a whole number"),
    ],
)
def test_a_learners_value_of_another_type_is_named(binding, expected):
    assert expected in message_of(binding)


@pytest.mark.parametrize(
    "binding",
    [
        "Learner.total_frames = 1e6",
        "adam.learning_rate = 1",
        "VTraceAgent.target_entropy = None",
        "VTraceAgent.network = @MLP",
        "TEN = 10\nmemory_environment.delay = %TEN",
        "MLP.hidden_sizes = (8, 8)",
    ],
)
def test_values_of_the_right_type_are_taken(binding):
    load(binding)


@pytest.mark.parametrize(
    "binding", ["Learner.total_frames = 1e6", "MILLION = 1e6\nLearner.total_frames = %MILLION"]
)
def test_a_whole_number_in_floating_point_becomes_an_int(binding):
    load(binding)
    assert type(value("Learner.total_frames")) is int
    assert value("Learner.total_frames") == 1_000_000


def test_a_number_that_need_not_be_whole_stays_what_it_is():
    load("Learner.log_secs = 20.0")
    assert type(value("Learner.log_secs")) is float


def test_an_actor_passes_over_the_learners_names_with_a_module_before_them():
    load("optimizers.adam.learning_rate = 1e-3", for_actor=True)
    assert "optimizers.adan" in message_of("optimizers.adan.beta_1 = 0.5", for_actor=True)
