"""Draws a curve of a run, or of several: a PNG, and a CSV with the same points.

    python scripts/plot_run.py --output=docs/results/pong logs/atari_vtrace_…

Needs matplotlib, which the [dev] extra has.
"""

import argparse
import csv
import pathlib

import matplotlib
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

matplotlib.use("Agg")
from matplotlib import pyplot


def read_curve(logdir: str, tag: str) -> list[tuple[int, float, float]]:
    """Returns (environment frames, seconds since the first point, value), in order of frames."""
    accumulator = EventAccumulator(logdir, size_guidance={"tensors": 0})
    accumulator.Reload()
    known = accumulator.Tags()["tensors"]
    if tag not in known:
        raise SystemExit(f"error: {logdir} has no {tag!r}; it has: {', '.join(sorted(known))}")
    events = sorted(accumulator.Tensors(tag), key=lambda event: event.step)
    start = events[0].wall_time
    return [(e.step, e.wall_time - start, float(make_ndarray(e.tensor_proto))) for e in events]


def write_csv(path: str, curves: dict[str, list[tuple[int, float, float]]], tag: str) -> None:
    """Writes a row a point."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "environment_frames", "seconds", tag])
        for name, points in curves.items():
            writer.writerows((name, frames, f"{s:.0f}", f"{v:.4g}") for frames, s, v in points)


def draw(path: str, curves: dict[str, list[tuple[int, float, float]]], tag: str) -> None:
    """Draws a line a run against environment frames."""
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for name, points in curves.items():
        axes.plot([p[0] for p in points], [p[2] for p in points], label=name)
    axes.set_xlabel("environment frames")
    axes.set_ylabel(tag)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Parses the arguments and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logdirs", nargs="+", help="runs' directories")
    parser.add_argument("--output", required=True, help="path without ending")
    parser.add_argument("--tag", default="episode/return")
    args = parser.parse_args()
    curves = {pathlib.Path(d).name: read_curve(d, args.tag) for d in args.logdirs}
    write_csv(f"{args.output}.csv", curves, args.tag)
    draw(f"{args.output}.png", curves, args.tag)
    print(f"wrote {args.output}.csv and {args.output}.png")


if __name__ == "__main__":
    main()
