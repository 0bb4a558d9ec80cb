import io
import re

import pytest

from dsreason.monitor.progress import (
    PART,
    BarProgress,
    CommandPart,
    LineProgress,
    Progress,
    Rate,
    format_duration,
    open_progress,
    read_part,
)


class Clock:
    """A clock that advances only when the test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines_after(clock: Clock, seconds: list[float], total: int, interval: float = 10.0) -> list[str]:
    stream = io.StringIO()
    progress = LineProgress(Rate(total, 0, clock), stream, interval)
    for step, duration_s in enumerate(seconds, start=1):
        clock.now += duration_s
        progress.step(step, {"loss": 1.5}, samples=8, tokens=1000)
    return stream.getvalue().splitlines()


def test_line_shows_step_loss_rates_and_eta(clock: Clock) -> None:
    assert lines_after(clock, [2.0], total=101) == [
        "step 1/101  loss 1.5000  4.0 samples/s  500 tokens/s  0:03:20 left"
    ]


def test_lines_come_first_last_and_every_interval(clock: Clock) -> None:
    displayed = lines_after(clock, [1.0] * 25, total=25)
    assert [line.split()[1] for line in displayed] == ["1/25", "11/25", "21/25", "25/25"]


def test_slow_first_step_does_not_distort_eta(clock: Clock) -> None:
    displayed = lines_after(clock, [60.0, 1.0], total=11, interval=0)
    assert displayed[1].endswith("0:00:09 left")


def test_phase_time_does_not_count_as_step_time(clock: Clock) -> None:
    stream = io.StringIO()
    progress = LineProgress(Rate(10, 0, clock), stream, 10.0)
    clock.now += 1
    progress.step(1, {"loss": 1}, samples=1, tokens=1)
    with progress.track_phase("validating", 4, "samples") as advance:
        clock.now += 100
        advance(4)
    clock.now += 1
    progress.step(2, {"loss": 1}, samples=1, tokens=1)
    assert stream.getvalue().splitlines()[1:] == [
        "validating: 4 samples",
        "validating: 4/4 samples",
        "validating: done in 0:01:40",
        "step 2/10  loss 1.0000  1.0 samples/s  1 tokens/s  0:00:08 left",
    ]


def test_part_line_shows_number_and_total_eta(clock: Clock) -> None:
    stream = io.StringIO()
    progress = LineProgress(Rate(11, 0, clock, part=CommandPart(2, 4, after=1.5)), stream, 10.0)
    clock.now += 2
    progress.step(1, {"loss": 1}, samples=1, tokens=1)
    with progress.track_phase("validating", 4, "samples"):
        clock.now += 100
    lines = stream.getvalue().splitlines()
    # 10 steps of 2 s remain, followed by 1.5 times the 22 s of all steps.
    assert lines[0].startswith("2/4 step 1/11 ")
    assert lines[0].endswith("0:00:20 left, 0:00:53 in total")
    assert lines[1:] == ["2/4 validating: 4 samples", "2/4 validating: done in 0:01:40"]


def test_run_reads_its_part_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_part() is None
    monkeypatch.setenv(PART, str(CommandPart(2, 4, after=1.5)))
    assert read_part() == CommandPart(2, 4, after=1.5)


def test_terminal_gets_bar_with_same_facts() -> None:
    stream = Terminal()
    with open_progress(rank=0, total_steps=4, stream=stream) as progress:
        assert isinstance(progress, BarProgress)
        progress.step(4, {"loss": 0.25}, samples=8, tokens=100)
        with progress.track_phase("exporting", 2) as advance:
            advance(2)
    assert "4/4" in stream.getvalue()
    assert "loss 0.2500" in stream.getvalue()


def test_progress_bar_fits_narrow_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with BarProgress(Rate(640, 0, clock, part=CommandPart(1, 4, after=2.0)), stream) as progress:
        clock.now += 1
        progress.step(1, {"loss": 0.25}, samples=32, tokens=1000)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).strip().splitlines()[-1]
    assert lines.startswith("1/4 step ")
    assert "1/640 0:10:39 left, 0:31:59 in total " in lines
    assert len(lines.rstrip()) <= 80


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress(rank=1, total_steps=4) as progress:
        assert type(progress) is Progress
        progress.step(1, {"loss": 1}, samples=1, tokens=1)
        with progress.track_phase("loading") as advance:
            advance(1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (90061, "25:01:01")]
)
def test_duration_has_hours_minutes_and_seconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
