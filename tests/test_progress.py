"""What the terminal shows of a run."""

import contextlib
import io
import logging
import os
import pty
import select
import subprocess
import sys

import pytest

from seed_rl.progress import FrameRate, ProgressReporter


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_frame_rate_measures_each_window_alone():
    clock = Clock()
    rate = FrameRate(windows=(10.0, 60.0), clock=clock)
    # 100 frames/s for 50 s, then 20 frames/s for 10 s.
    for second in range(51):
        clock.now = 1000.0 + second
        rate.record(100 * second)
    for second in range(1, 11):
        clock.now = 1050.0 + second
        rate.record(5000 + 20 * second)
    # The last 10 s saw 200 frames, the last 60 s 5,200.
    assert rate.rates() == {10.0: pytest.approx(20.0), 60.0: pytest.approx(5200 / 60)}


def test_frame_rate_of_a_young_run_covers_the_time_it_has():
    clock = Clock()
    rate = FrameRate(clock=clock)
    assert rate.rates() == {10.0: None, 60.0: None, 300.0: None}
    rate.record(7_000_000)  # resumed: what was done before the restart is no speed
    assert rate.rates()[10.0] is None
    clock.now += 2.0
    rate.record(7_000_500)
    assert rate.rates() == {10.0: 250.0, 60.0: 250.0, 300.0: 250.0}


def test_frame_rate_of_a_stalled_run_falls_to_zero():
    clock = Clock()
    rate = FrameRate(windows=(10.0,), clock=clock)
    rate.record(0)
    clock.now += 5.0
    rate.record(1000)
    clock.now += 5.0
    assert rate.rates()[10.0] == 100.0
    clock.now += 10.0
    assert rate.rates()[10.0] == 0.0


def test_frame_rate_forgets_what_no_window_needs():
    clock = Clock()
    rate = FrameRate(windows=(1.0,), clock=clock, resolution=0.1)
    for i in range(10_000):
        clock.now = 1000.0 + 0.001 * i
        rate.record(3 * i)
    assert rate.rates()[1.0] == pytest.approx(3000.0, rel=0.02)
    assert len(rate._samples) < 30


@pytest.mark.parametrize("windows", [(), (0.0,), (-1.0, 10.0)])
def test_frame_rate_refuses_windows_that_are_no_lengths(windows):
    with pytest.raises(ValueError, match="windows must be positive"):
        FrameRate(windows=windows)


def test_plain_line_names_every_unit():
    stream = io.StringIO()
    with ProgressReporter(10_000_000, stream=stream, clock=Clock()) as progress:
        progress.update(
            1_234_567,
            frames_per_second=1000.0,
            mean_return=12.5,
            num_episodes=321,
            training_step=4_321,
            extra={"queue_length": 3, "policy_lag": 1.25, "value_loss": 0.5},
        )
    # 8,765,433 frames left at 1,000 a second: 8,765.4 s = 2 h 26 min 5.4 s, rounded up.
    assert stream.getvalue() == (
        "1,234,567 of 10,000,000 frames (12.3 %) | 1,000 frames/s | ETA 2:26:06"
        " | training step 4,321 | mean return 12.50 of the last 100 episodes"
        " | policy lag 1.2 training steps | queue 3 unrolls | value loss 0.5\n"
    )


def test_plain_line_before_anything_is_known():
    stream = io.StringIO()
    with ProgressReporter(100, stream=stream, clock=Clock()) as progress:
        progress.update(0, None, None, 0, 0)
    assert stream.getvalue() == (
        "0 of 100 frames (0.0 %) | frames/s not known yet | ETA not known yet"
        " | training step 0 | no episode ended yet\n"
    )


@pytest.mark.parametrize(
    ("frames", "frames_per_second", "eta"),
    [
        (0, 0.0, "not known yet"),
        (0, float("nan"), "not known yet"),
        (0, 1e-12, "never at this speed"),
        (99_999, 1e6, "0:00:01"),
        (100_000, 0.0, "0:00:00"),
        (100_050, 50.0, "0:00:00"),
    ],
)
def test_eta_at_the_edges(frames, frames_per_second, eta):
    stream = io.StringIO()
    with ProgressReporter(100_000, stream=stream, clock=Clock()) as progress:
        progress.update(frames, frames_per_second, None, 0, 0)
    assert f"| ETA {eta} |" in stream.getvalue()


def test_hundred_percent_is_not_shown_before_the_end():
    stream = io.StringIO()
    with ProgressReporter(100_000, stream=stream, clock=Clock()) as progress:
        progress.update(99_999, 1.0, None, 0, 0)
    assert "(99.9 %)" in stream.getvalue()


@pytest.mark.parametrize(
    ("num_episodes", "words"),
    [(1, "of the first episode"), (40, "of the last 40 episodes"), (101, "of the last 100 ep")],
)
def test_says_how_many_episodes_are_in_the_mean(num_episodes, words):
    stream = io.StringIO()
    with ProgressReporter(10, stream=stream, clock=Clock()) as progress:
        progress.update(1, 1.0, -3.0, num_episodes, 0)
    assert f"mean return -3.00 {words}" in stream.getvalue()


def test_plain_lines_come_every_interval_and_the_last_figures_are_never_lost():
    clock, stream = Clock(), io.StringIO()
    progress = ProgressReporter(1000, stream=stream, interval=10.0, clock=clock)
    for second in range(25):  # at 0, 10 and 20 s; the figures of 24 s come with close
        clock.now = 1000.0 + second
        progress.update(second, 1.0, None, 0, 0)
    progress.close()
    progress.close()
    shown = [line.split()[0] for line in stream.getvalue().splitlines()]
    assert shown == ["0", "10", "20", "24"]


def test_close_does_not_repeat_what_was_shown():
    stream = io.StringIO()
    with ProgressReporter(1000, stream=stream, clock=Clock()) as progress:
        progress.update(5, 1.0, None, 0, 0)
    assert len(stream.getvalue().splitlines()) == 1


def test_plain_output_has_no_control_codes_even_if_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with ProgressReporter(1000, stream=stream, clock=Clock()) as progress:
        progress.update(5, 1.0, None, 0, 0, {"[bold]x": 1.0})
    assert "\x1b" not in stream.getvalue()
    assert "[bold]x 1" in stream.getvalue()


@pytest.mark.parametrize("total_frames", [0, -1])
def test_refuses_a_target_that_is_none(total_frames):
    with pytest.raises(ValueError, match="total_frames must be positive"):
        ProgressReporter(total_frames)


def test_a_reader_that_goes_away_is_no_error(caplog):
    read_end, write_end = os.pipe()
    clock, stream = Clock(), os.fdopen(write_end, "w")
    with ProgressReporter(1000, stream=stream, clock=clock) as progress:
        progress.update(0, 1.0, None, 0, 0)
        os.close(read_end)
        for frames in (1, 2):
            clock.now += 100.0
            progress.update(frames, 1.0, None, 0, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "progress is no longer shown: [Errno 32] Broken pipe"
    ]
    with contextlib.suppress(OSError):
        stream.close()


def test_a_terminal_whose_pipe_closes_is_no_error(caplog, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

        def flush(self):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setenv("TERM", "xterm")
    with ProgressReporter(1000, stream=Terminal(), clock=Clock()) as progress:
        progress.update(0, 1.0, None, 0, 0)
    assert "progress is no longer shown" in caplog.text


# A run in a real terminal: it logs through standard logging, through absl and by print.
_TERMINAL_PROGRAM = """
import logging, sys
from absl import app, logging as absl_logging
from seed_rl.progress import ProgressReporter

now = [0.0]

def main(_):
    handlers = logging.getLogger().handlers
    streams = [h.python_handler.stream for h in handlers if hasattr(h, "python_handler")]
    with ProgressReporter(1000, clock=lambda: now[0]) as progress:
        for i in range(4):
            now[0] += 1.0
            progress.update(i, 5.0, 1.5, 7, 2, {"policy_lag": 1.0})
            logging.getLogger("some.module").warning("standard %d", i)
            absl_logging.warning("absl %d", i)
            print("printed", i)
    assert [h.python_handler.stream for h in handlers if hasattr(h, "python_handler")] == streams
    absl_logging.warning("after")

app.run(main)
"""


def _run_in_terminal(code: str) -> str:
    """Returns the raw bytes that a program writes to a terminal of 80 by 24, as text."""
    terminal, program_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=program_end,
        stderr=program_end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(program_end)
    chunks = []
    try:
        while select.select([terminal], [], [], 60)[0]:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # the program has closed its end
                break
            if not chunk:
                break
            chunks.append(chunk)
        assert process.wait(timeout=60) == 0, b"".join(chunks).decode()
    finally:
        process.kill()
        os.close(terminal)
    return b"".join(chunks).decode()


def _screen(raw: str) -> list[str]:
    """Plays what a terminal was sent: text, CR, LF, cursor up (CSI A) and erase line (CSI 2K)."""
    lines, row, column = [""], 0, 0
    i = 0
    while i < len(raw):
        if raw[i] == "\x1b":
            end = i + 2
            while not raw[end].isalpha():
                end += 1
            argument, kind = raw[i + 2 : end], raw[end]
            if kind == "A":
                row -= int(argument or 1)
            elif kind == "K":
                assert argument == "2"
                lines[row] = ""
            else:
                assert kind in "mhl", raw[i : end + 1]  # colours, and the cursor shown or not
            i = end
        elif raw[i] == "\r":
            column = 0
        elif raw[i] == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        else:
            lines[row] = lines[row].ljust(column)[:column] + raw[i] + lines[row][column + 1 :]
            column += 1
        i += 1
    return [line.rstrip() for line in lines]


def test_log_lines_do_not_garble_the_live_display():
    screen = _screen(_run_in_terminal(_TERMINAL_PROGRAM))
    # Every log line once, whole, in order; then the display once, with the last figures.
    logged = [line.split("] ")[-1] for line in screen]
    expected = [f"{kind} {i}" for i in range(4) for kind in ("standard", "absl", "printed")]
    assert logged[:12] == expected
    assert screen[12].startswith("3 of 1,000 frames ━") and screen[12].endswith("0.3 %")
    assert screen[13] == "5 frames/s · ETA 0:03:20 · training step 2"  # 997 frames at 5/s
    assert screen[14] == "mean return 1.50 of the last 7 episodes · policy lag 1.0 training steps"
    assert logged[15] == "after"


def test_live_display_leaves_log_files_alone():
    stream, log_file = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log_file)
    logging.getLogger().addHandler(handler)
    try:
        with ProgressReporter(1000, stream=stream, clock=Clock(), live=True) as progress:
            progress.update(5, 1.0, None, 0, 0)
            logging.getLogger().warning("to the file")
            assert handler.stream is log_file
    finally:
        logging.getLogger().removeHandler(handler)
    assert log_file.getvalue() == "to the file\n"
    assert "5 of 1,000 frames" in stream.getvalue()
    assert "to the file" not in stream.getvalue()
