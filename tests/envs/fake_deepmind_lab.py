"""A fake of the engine's module `deepmind_lab`: it behaves as the real one was measured to.

There are no mazes in it: an image and a reward tell what the engine was asked. Where the real
engine ends the process, the fake raises `Crash`. What it counts and notes is the test's to read.
The first image of an episode shows in its first number how often the instance had been reset with
that seed before, as the real engine's first frames differ a little then.
"""

import hashlib
import os
import pathlib
import tempfile
import zipfile

import numpy as np

WITHOUT_MAP = "tests/missing_map"  # its script is there, its map is not
DMLAB30_TEST_ONLY = ("rooms_collect_good_objects_test", "rooms_exploit_deferred_effects_test")
LEVELS = {
    "contributed/dmlab30/" + name
    for name in (
        "rooms_collect_good_objects_train",
        "rooms_exploit_deferred_effects_train",
        "rooms_select_nonmatching_object",
        "rooms_watermaze",
        "rooms_keys_doors_puzzle",
        "language_select_described_object",
        "language_select_located_object",
        "language_execute_random_task",
        "language_answer_quantitative_question",
        "lasertag_one_opponent_small",
        "lasertag_three_opponents_small",
        "lasertag_one_opponent_large",
        "lasertag_three_opponents_large",
        "natlab_fixed_large_map",
        "natlab_varying_map_regrowth",
        "natlab_varying_map_randomized",
        "skymaze_irreversible_path_hard",
        "skymaze_irreversible_path_varied",
        "psychlab_arbitrary_visuomotor_mapping",
        "psychlab_continuous_recognition",
        "psychlab_sequential_comparison",
        "psychlab_visual_search",
        "explore_object_locations_small",
        "explore_object_locations_large",
        "explore_obstructed_goals_small",
        "explore_obstructed_goals_large",
        "explore_goal_locations_small",
        "explore_goal_locations_large",
        "explore_object_rewards_few",
        "explore_object_rewards_many",
        *DMLAB30_TEST_ONLY,
    )
} | {"lt_chasm", "tests/empty_room_test", WITHOUT_MAP}
PREBUILT = ("lt_chasm", "tests/empty_room_test", "psychlab")  # these never reach the cache
WITH_PICTURES = ("psychlab_arbitrary_visuomotor_mapping", "psychlab_continuous_recognition")
SETTINGS = {
    "width",
    "height",
    "fps",
    "datasetPath",
    "allowHoldOutLevels",
    "mixerSeed",
    "appendCommand",
}
OBSERVATIONS = {"RGB_INTERLEAVED", "RGBD_INTERLEAVED", "INSTR", "DEBUG.POS.TRANS"}

episode_frames = 5400
instances = []  # every Lab, the oldest first


class Crash(BaseException):
    """The real engine would have ended the process here; no `except Exception` may hide it."""


class Lab:
    """The engine; see the module."""

    def __init_subclass__(cls, **kwargs):
        raise TypeError("type 'deepmind_lab.Lab' is not an acceptable base type")

    def __init__(self, level, observations, config=None, renderer="software", level_cache=None):
        config = dict(config or {})
        for name, value in config.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"config values must be str, got {name!r}: {value!r}")
        if not isinstance(observations, list):
            raise TypeError("observations must be a list")
        if level not in LEVELS:
            raise RuntimeError(f"Level not found: {level!r}")
        if set(config) - SETTINGS:
            raise RuntimeError(f"Invalid setting {sorted(set(config) - SETTINGS)}")
        if level.endswith(DMLAB30_TEST_ONLY) and config.get("allowHoldOutLevels") != "true":
            raise RuntimeError("hold-out levels are not allowed")
        if set(observations) - OBSERVATIONS:
            raise ValueError(f"Unknown observation {sorted(set(observations) - OBSERVATIONS)}")
        self.level, self.observation_names, self.config = level, observations, config
        self.renderer, self.level_cache = renderer, level_cache
        self.shape = (int(config.get("height", "240")), int(config.get("width", "320")))
        self.is_closed = False
        self.seed, self.frames, self.asked = None, 0, 0
        self._running = False
        # For tests to read.
        self.seeds, self.steps, self.num_drawn = [], [], 0
        self.num_compiled, self.num_closed = 0, 0
        instances.append(self)

    def reset(self, episode=-1, seed=None):
        if self.is_closed:
            raise Crash("segmentation fault: reset() after close()")
        if seed is not None and type(seed) is not int:
            raise ValueError(f"'seed' must be int or None, was {type(seed)}")
        if self.level.endswith(WITH_PICTURES) and not self.config.get("datasetPath"):
            raise RuntimeError("Follow instructions to download datasets")
        if self.level == WITHOUT_MAP:
            raise Crash("exit code 1: the map is missing")
        self._load_map(seed)
        self.num_same = self.seeds.count(seed)
        self.seed, self.frames, self.asked = seed, 0, 0
        self.seeds.append(seed)
        self._running = True
        return True

    def _load_map(self, seed):
        """Asks the cache, and compiles what it has not; its exceptions surface."""
        if any(name in self.level for name in PREBUILT):
            return
        name = f"{self.level} {seed} {self.config.get('mixerSeed')}"
        key = "explore_maze_noaas_" + hashlib.md5(name.encode()).hexdigest()
        with tempfile.TemporaryDirectory(prefix="dmlab_temp_folder_") as folder:
            path = os.path.join(folder, key + ".pk3")
            if self.level_cache is not None and self.level_cache.fetch(key, path):
                assert pathlib.Path(path).read_bytes() == compiled_map(key)
                return
            self.num_compiled += 1
            pathlib.Path(path).write_bytes(compiled_map(key))
            if self.level_cache is not None:
                self.level_cache.write(key, path)

    def is_running(self):
        return self._running

    def _check_running(self):
        if not self._running:
            raise RuntimeError("Environment in wrong status for this call")

    def num_steps(self):
        """What was asked for, frames after the end included."""
        return self.asked

    def events(self):
        return []

    def step(self, action, num_steps=1):
        """The reward is 1 for every frame in which the agent moves forward, and so on."""
        self._check_running()
        if not isinstance(action, np.ndarray):
            raise TypeError("action must be an array")
        if action.dtype != np.intc or action.shape != (7,):
            raise ValueError("action must be np.intc [7]")
        action = _as_the_engine_reads_it(action)
        num_frames = min(max(0, num_steps), episode_frames - self.frames)
        self.steps.append((tuple(action.tolist()), num_steps))
        self.asked += num_steps
        self.frames += num_frames
        if self.frames >= episode_frames:
            self._running = False
        return float(num_frames * action[3])

    def observations(self):
        """Draws, and that is what costs time."""
        self._check_running()
        self.num_drawn += 1
        image = np.full((*self.shape, 3), self.frames % 256, np.uint8)
        if self.frames == 0:
            image[0, 0, 0] = self.num_same % 256
        all_of_them = {
            "RGB_INTERLEAVED": image,
            "RGBD_INTERLEAVED": np.concatenate([image, image[..., :1]], -1),
            "INSTR": f"Find the red object {self.frames}" if "language" in self.level else "",
            "DEBUG.POS.TRANS": np.zeros(3, np.float64),
        }
        return {name: all_of_them[name] for name in self.observation_names}

    def close(self):
        self.num_closed += 1
        was_open, self.is_closed = not self.is_closed, True
        self._running = False
        return was_open


def _as_the_engine_reads_it(action):
    """Seven successive numbers from where the array begins, whatever its strides are."""
    if action.flags.c_contiguous:
        return action
    base = action.base
    begin = (action.ctypes.data - base.ctypes.data) // action.itemsize
    return base.ravel(order="K")[begin : begin + 7]


def compiled_map(key):
    """The bytes of the map for a key: a zip file, as the engine's are."""
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo(f"maps/{key}.bsp"), key * 100)
        file.seek(0)
        return file.read()
