"""What a person sees of a training run: a live display in a terminal, plain lines elsewhere."""

import collections
import contextlib
import datetime
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_EPISODES_IN_MEAN = 100
_LIVE_REFRESH_SECONDS = 0.25

# Extras with a name and a unit of their own; any other is shown under its key.
_EXTRA_FORMATS = {
    "policy_lag": "policy lag {:,.1f} training steps",
    "queue_length": "queue {:,.0f} unrolls",
    "unrolls_until_training": "training starts in {:,.0f} unrolls",
    "replay_unrolls": "replay {:,.0f} unrolls",
    "replay_megabytes": "{:,.0f} MB",
    "replay_ratio": "replay ratio {:.2f}",
}


class FrameRate:
    """Environment frames a second over sliding windows.

    A window that reaches back further than the first record covers the time since then, so a
    young run shows its true speed. Time in which nothing was recorded counts: a run that stalls
    goes to 0.
    """

    def __init__(
        self,
        windows: Sequence[float] = (10.0, 60.0, 300.0),
        clock: Callable[[], float] = time.monotonic,
        resolution: float = 0.1,
    ):
        """Args:
        windows: lengths in seconds.
        clock: returns the time in seconds.
        resolution: records closer together than this many seconds are kept as one, which
            bounds the memory.
        """
        if not windows or min(windows) <= 0:
            raise ValueError(f"windows must be positive numbers of seconds, got {list(windows)}")
        self._windows = tuple(windows)
        self._clock = clock
        self._resolution = resolution
        self._samples: collections.deque[tuple[float, int]] = collections.deque()

    def record(self, frames: int) -> None:
        """Notes that `frames` environment frames were done so far, in all."""
        now = self._clock()
        if len(self._samples) > 1 and now - self._samples[-2][0] < self._resolution:
            self._samples.pop()
        self._samples.append((now, frames))
        # One sample from before the longest window stays, to measure the whole window against.
        while len(self._samples) > 1 and self._samples[1][0] <= now - max(self._windows):
            self._samples.popleft()

    def rates(self) -> dict[float, float | None]:
        """Returns {window in seconds: frames a second}; None before there is a second record."""
        return {window: self._rate(window) for window in self._windows}

    def _rate(self, window: float) -> float | None:
        if len(self._samples) < 2:
            return None
        now = self._clock()
        start = self._samples[0]
        for sample in reversed(self._samples):
            if sample[0] <= now - window:
                start = sample
                break
        elapsed = now - start[0]
        return (self._samples[-1][1] - start[1]) / elapsed if elapsed > 0 else None


class ProgressReporter:
    """Shows how far training is.

    In a terminal the display stays in place and log lines scroll above it; anywhere else one line
    is printed every `interval` seconds. A reader that goes away does not stop training. Use it as a
    context manager, or call `close()`:

        with ProgressReporter(total_frames=10_000_000) as progress:
            while training:
                ...
                progress.update(frames, frames_per_second, mean_return, num_episodes, step)
    """

    def __init__(
        self,
        total_frames: int,
        stream: TextIO | None = None,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        live: bool | None = None,
    ):
        """Args:
        total_frames: the target, in environment frames.
        stream: where to print; standard output if None.
        interval: seconds between two plain lines.
        clock: returns the time in seconds.
        live: whether to keep a display in place; None: if `stream` is a terminal.

        Raises:
            ValueError: total_frames is not positive.
        """
        if total_frames <= 0:
            raise ValueError(f"total_frames must be positive, got {total_frames}")
        self._total_frames = total_frames
        self._clock = clock
        console = _Console(file=stream or sys.stdout)
        self._console = console
        if live is None:
            live = console.file.isatty() and not console.is_dumb_terminal
        self._display = _LiveDisplay(console) if live else None
        self._interval = _LIVE_REFRESH_SECONDS if live else interval
        self._shown_at: float | None = None
        self._pending: _Status | None = None
        self._nobody_reads = False
        self._closed = False

    def update(
        self,
        frames: int,
        frames_per_second: float | None,
        mean_return: float | None,
        num_episodes: int,
        training_step: int,
        extra: Mapping[str, float] | None = None,
    ) -> None:
        """Takes the newest figures and shows them if it is time to.

        Args:
            frames: environment frames done so far, those before a restart included.
            frames_per_second: environment frames a second; None if not known yet.
            mean_return: mean return of the last 100 episodes; None before the first has ended.
            num_episodes: episodes ended so far.
            training_step: training steps done so far.
            extra: further figures by name. `policy_lag` (training steps) and `queue_length`
                (unrolls) are shown with their units, any other as it is called.
        """
        self._pending = _Status(
            self._total_frames,
            frames,
            frames_per_second,
            mean_return,
            num_episodes,
            training_step,
            dict(extra or {}),
        )
        if self._shown_at is None or self._clock() - self._shown_at >= self._interval:
            self._show()

    def close(self) -> None:
        """Shows the last figures and gives the terminal back. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._show()
        finally:
            if self._display:
                with contextlib.suppress(OSError):
                    self._display.close()

    def __enter__(self) -> "ProgressReporter":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _show(self) -> None:
        status, self._pending = self._pending, None
        self._shown_at = self._clock()
        if status is None or self._nobody_reads:
            return
        try:
            if self._display:
                self._display.show(status)
            else:
                # Not through rich, which would fold the line to the width of a terminal.
                print(status.line(), file=self._console.file, flush=True)
        except OSError as error:  # a closed pipe, a terminal that is gone
            self._nobody_reads = True
            logging.getLogger(__name__).warning("progress is no longer shown: %s", error)


class _Status:
    """One set of figures, in words."""

    def __init__(
        self,
        total_frames: int,
        frames: int,
        frames_per_second: float | None,
        mean_return: float | None,
        num_episodes: int,
        training_step: int,
        extra: dict[str, float],
    ):
        self._total_frames = total_frames
        self._frames = frames
        self._frames_per_second = frames_per_second
        self._mean_return = mean_return
        self._num_episodes = num_episodes
        self._training_step = training_step
        self._extra = extra

    def line(self) -> str:
        return " | ".join(
            [f"{self._done()} ({self._percent()})", *self._speed(), *self._learning()]
        )

    def renderable(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(self._done(), style="bold"),
            ProgressBar(total=self._total_frames, completed=min(self._frames, self._total_frames)),
            self._percent(),
        )
        speed, learning = (
            Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")
            for parts in (self._speed(), self._learning())
        )
        return Group(bar, speed, learning)

    def _done(self) -> str:
        return f"{self._frames:,} of {self._total_frames:,} frames"

    def _percent(self) -> str:
        # Rounded down: 100 % is not shown before the end.
        return f"{math.floor(1000 * self._frames / self._total_frames) / 10:.1f} %"

    def _speed(self) -> list[str]:
        fps = self._frames_per_second
        speed = "frames/s not known yet" if fps is None else f"{fps:,.0f} frames/s"
        return [speed, f"ETA {self._eta()}", f"training step {self._training_step:,}"]

    def _learning(self) -> list[str]:
        known = [
            _EXTRA_FORMATS[key].format(self._extra[key])
            for key in _EXTRA_FORMATS
            if key in self._extra
        ]
        others = [
            f"{key.replace('_', ' ')} {value:,.4g}"
            for key, value in self._extra.items()
            if key not in _EXTRA_FORMATS
        ]
        return [self._episodes(), *known, *others]

    def _episodes(self) -> str:
        if self._mean_return is None or self._num_episodes == 0:
            return "no episode ended yet"
        count = min(_EPISODES_IN_MEAN, self._num_episodes)
        which = "the first episode" if count == 1 else f"the last {count} episodes"
        return f"mean return {self._mean_return:,.2f} of {which}"

    def _eta(self) -> str:
        left = max(0, self._total_frames - self._frames)
        if not left:
            return "0:00:00"
        fps = self._frames_per_second
        if fps is None or not math.isfinite(fps) or fps <= 0:
            return "not known yet"
        try:
            return str(datetime.timedelta(seconds=math.ceil(left / fps)))
        except OverflowError:
            return "never at this speed"


class _Console(Console):
    """Leaves a closed pipe to who prints, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise


class _LiveDisplay:
    """Keeps the figures in place in a terminal and lets log lines through above them."""

    def __init__(self, console: Console):
        self._console = console
        self._rerouted: list[tuple[logging.StreamHandler, TextIO]] = []
        # Standard error that goes to a file keeps going there.
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._started = False

    def show(self, status: _Status) -> None:
        if not self._started:
            self._start()
        self._live.update(status.renderable(), refresh=True)

    def close(self) -> None:
        try:
            if self._started:
                self._live.stop()
        finally:
            for handler, stream in self._rerouted:
                handler.setStream(stream)
            self._rerouted.clear()

    def _start(self) -> None:
        originals = (sys.stdout, sys.stderr)
        self._live.start()
        self._started = True
        # rich replaces sys.stdout and sys.stderr, but a log handler holds the one it was made with.
        for original, replacement in zip(originals, (sys.stdout, sys.stderr), strict=True):
            for handler in _stream_handlers():
                if replacement is not original and handler.stream is original:
                    self._rerouted.append((handler, original))
                    handler.setStream(replacement)


def _stream_handlers() -> list[logging.StreamHandler]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [h for logger in loggers for h in getattr(logger, "handlers", [])]
    # absl's handler wraps the one that writes.
    handlers = [getattr(handler, "python_handler", handler) for handler in handlers]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
