"""What a person watches: one aligned line a step, under a progress bar where there is a terminal.

    step 120/500 · loss 1.842 · grad 0.71 · lr 2.0e-05 · 4.1k tok/s (useful 4.0k) · mfu 41.2% · data wait 0.3% · …

Where the output is no terminal, or rich is not installed, lines stand alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from bestiary.training.tracking import RunInfo, Tee, Tracker

_DOT = " · "
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def reporter(stream: TextIO, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> Tracker:
    """A tracker that prints.

    Args:
        stream: to print to; a terminal gets a progress bar.
        quiet: print nothing at all (`--json -`).
        clock: seconds.
    """
    if quiet:
        return Tee(())
    if stream.isatty():
        try:
            import rich  # noqa: F401
        except ImportError:
            return Lines(stream, clock)
        return Bar(stream, clock)
    return Lines(stream, clock)


class Lines:
    """One line a call."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._steps = 0
        self._first: tuple[int, float] | None = None

    def start(self, run: RunInfo) -> None:
        """Learn how many steps there are."""
        self._steps, self._first = run.steps, None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line of a step, or of an evaluation."""
        self._stream.write(self._line(step, values) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left."""

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        return step_line(step, self._steps, values, self._left(step, values))

    def _left(self, step: int, values: Mapping[str, float]) -> float | None:
        """Seconds until the end, evaluations and checkpoints included; None: unknown."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first, then = self._first
        if not self._steps:
            return None
        pace = (now - then) / (step - first) if step > first else values.get("step_s")
        return None if pace is None else pace * (self._steps - step)


class Bar(Lines):
    """Lines that scroll above a progress bar."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock)
        self._bar: Any = None
        self._task: Any = None

    def start(self, run: RunInfo) -> None:
        """Show the bar."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().start(run)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
        console = Console(file=self._stream, highlight=False)
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(run.name.replace("[", r"\["), total=run.steps or None, completed=run.step)
        self._bar.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line and move the bar."""
        self._bar.console.print(self._line(step, values), markup=False, soft_wrap=True)
        self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def step_line(step: int, steps: int, values: Mapping[str, float], left: float | None = None) -> str:
    """The line of a step; figures that are not in `values` are left out.

    Args:
        steps: of the run; 0: unknown.
        values: in the keys of metrics.jsonl. With `eval/…` alone, the line of an evaluation.
        left: seconds until the end of the run.
    """
    count = f"{step:>{len(str(steps))}}/{steps}" if steps else str(step)
    parts = [f"step {count}"]
    evaluated = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in values.items() if "eval/" in name]
    if evaluated:
        parts.append("eval " + _DOT.join(evaluated))
    if "rl/reward" in values:
        parts.append(f"reward {values['rl/reward']:6.3f}")
    if "loss" in values:
        parts.append(f"loss {values['loss']:5.3f}")
    if "grad_norm" in values:
        parts.append(f"grad {values['grad_norm']:4.2f}")
    if "lr" in values:
        parts.append(f"lr {values['lr']:.1e}")
    if "tokens_per_s" in values:
        useful = values.get("useful_tokens_per_s")
        beside = "" if useful is None else f" (useful {short(useful):>4})"
        parts.append(f"{short(values['tokens_per_s']):>4} tok/s{beside}")
    if "mfu" in values:
        parts.append(f"mfu {values['mfu']:5.1%}")
    if "data_wait_s" in values and values.get("step_s"):
        parts.append(f"data wait {values['data_wait_s'] / values['step_s']:4.1%}")
    if "mem_gib" in values:
        parts.append(f"{values['mem_gib']:4.1f} GiB")
    if values.get("skipped"):
        parts.append(f"skipped {values['skipped']:.0f}")
    if left is not None:
        parts.append(f"eta {clock_time(left)}")
    return _DOT.join(parts)


def short(count: float) -> str:
    """A count in about four characters: 312, 4.1k, 41k, 1.2M."""
    for size, prefix in _PREFIXES:
        if count >= 0.9995 * size:
            scaled = count / size
            return f"{scaled:.1f}{prefix}" if scaled < 9.95 else f"{scaled:.0f}{prefix}"
    return f"{count:.0f}"


def clock_time(seconds: float) -> str:
    """mm:ss, or h:mm:ss, or days before that."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
