"""Stands for seed_rl.main where scripts are tested: notes what happens to it in $STUB_DIR."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

DIRECTORY = pathlib.Path(os.environ["STUB_DIR"])


def note(file: str, line: str) -> None:
    with open(DIRECTORY / file, "a") as f:
        f.write(line + "\n")


def wait_for_sigterm(name: str, then) -> None:
    def on_sigterm(*_):
        note("events", f"{name} is told to stop")
        then()

    signal.signal(signal.SIGTERM, on_sigterm)
    note("events", f"{name} is up")
    while True:
        time.sleep(60)


def learner(behaviour: str, flags: dict[str, str]) -> None:
    socket = pathlib.Path(flags["--server_address"].removeprefix("unix:"))
    mode = socket.parent.stat().st_mode & 0o777
    note("sockets", f"{mode:o} {socket}")
    socket.touch()
    if behaviour == "crash":
        print("some words of no use\nValueError: the model is upside down", file=sys.stderr)
        sys.exit(3)
    if behaviour == "finish":
        wait_until_up("actor 0")
        print("all frames are done", flush=True)
        note("finished", "yes")
        sys.exit(0)

    def save_and_exit():
        time.sleep(0.5)
        if behaviour == "hang":
            time.sleep(1000)
        note("events", "learner has saved")
        sys.exit(0)

    wait_for_sigterm("learner", save_and_exit)


def actor(behaviour: str, name: str) -> None:
    if behaviour == "crash" and not (DIRECTORY / "crashed").exists():
        note("crashed", "yes")
        print("RuntimeError: the emulator is on fire", file=sys.stderr)
        sys.exit(1)
    child = subprocess.Popen(["sleep", "1000"])
    note("pids", f"child of {name} {child.pid}")
    wait_for_sigterm(name, lambda: os._exit(0))


def wait_until_up(name: str) -> None:
    events = DIRECTORY / "events"
    while not events.exists() or f"{name} is up" not in events.read_text():
        time.sleep(0.02)


def main() -> None:
    flags = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    mode = flags["--run_mode"]
    name = mode if mode == "learner" else f"{mode} {flags['--task']}"
    note("pids", f"{name} {os.getpid()}")
    note("arguments", json.dumps([name, sys.argv[1:]]))
    if mode == "learner":
        learner(os.environ.get("STUB_LEARNER", "run"), flags)
    else:
        actor(os.environ.get("STUB_ACTOR", "run"), name)


main()
