"""The line of a step, and where it goes."""

import io
import sys

import pytest

from bestiary.training.progress import Bar, Lines, clock_time, reporter, short, step_line
from bestiary.training.tracking import RunInfo

VALUES = {
    "loss": 1.8421,
    "grad_norm": 0.712,
    "lr": 2e-5,
    "tokens": 8200,
    "tokens_per_s": 4100.0,
    "useful_tokens_per_s": 4012.0,
    "mfu": 0.412,
    "step_s": 2.0,
    "data_wait_s": 0.006,
    "mem_gib": 11.8,
    "time": 240.0,
    "skipped": 0,
}
LINE = (
    "step 120/500 · loss 1.842 · grad 0.71 · lr 2.0e-05 · 4.1k tok/s (useful 4.0k) · mfu 41.2% · data wait 0.3% · "
    "11.8 GiB · eta 06:12"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_of_a_step() -> None:
    assert step_line(120, 500, VALUES, 372.0) == LINE


def test_lines_of_ordinary_steps_stand_below_each_other() -> None:
    other = {**VALUES, "loss": 0.9, "mfu": 0.031, "mem_gib": 3.2, "tokens_per_s": 312.0, "useful_tokens_per_s": 41000}
    line = step_line(7, 500, other, 12.0)
    assert [i for i, c in enumerate(line) if c == "·"] == [i for i, c in enumerate(LINE) if c == "·"]


def test_an_evaluation_has_a_line_of_its_own_and_skipped_steps_are_told() -> None:
    assert step_line(20, 0, {"eval/loss": 1.5, "eval/accuracy": 0.25}) == "step 20 · eval loss 1.500 · accuracy 0.250"
    assert "skipped 3" in step_line(20, 100, {**VALUES, "skipped": 3})


@pytest.mark.parametrize(
    ("count", "text"),
    [(312, "312"), (999.7, "1.0k"), (4100, "4.1k"), (41000, "41k"), (1.24e6, "1.2M"), (9.96e3, "10k")],
)
def test_counts_are_short(count: float, text: str) -> None:
    assert short(count) == text


def test_times_read_as_clocks() -> None:
    assert [clock_time(s) for s in (372, 3723, 90061, -3)] == ["06:12", "1:02:03", "1d 01:01:01", "00:00"]


def test_the_time_left_counts_what_happens_between_steps() -> None:
    """Ten seconds from step to step, whatever part of it the step itself takes."""
    now = iter((0.0, 10.0, 20.0))
    out = io.StringIO()
    lines = Lines(out, lambda: next(now))
    lines.start(RunInfo("first", steps=10))
    for step in (1, 2, 3):
        lines.log(step, {"step_s": 2.0})
    etas = [line.rsplit(" ", 1)[1] for line in out.getvalue().splitlines()]
    assert etas == ["00:18", "01:20", "01:10"]


def test_a_file_gets_plain_lines_and_a_terminal_a_bar_below_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream, kind in ((io.StringIO(), Lines), (Terminal(), Bar)):
        tracker = reporter(stream)
        assert type(tracker) is kind
        tracker.start(RunInfo("run [a]", steps=500))
        tracker.log(120, VALUES)
        tracker.close()
        assert LINE.rsplit(" · ", 1)[0] in stream.getvalue()
    assert "120/500" in stream.getvalue().replace(LINE[:12], "")  # the bar counts as well
    assert "run [a]" in stream.getvalue()


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert type(reporter(Terminal())) is Lines


def test_quiet_prints_nothing() -> None:
    stream = io.StringIO()
    tracker = reporter(stream, quiet=True)
    tracker.start(RunInfo("first"))
    tracker.log(1, VALUES)
    tracker.close()
    assert stream.getvalue() == ""
