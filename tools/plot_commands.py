"""`bestiary plot`: loss and speed of runs, compared. Heavy imports wait until it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  bestiary plot runs/first                                  plot.html, one page that loads nothing
  bestiary plot runs/first runs/second --out compared.png   PNG needs matplotlib: pip install 'bestiary[plot]'
  bestiary plot runs/first --json -                         the summary for a program

exit codes: 0 drawn, 7 usage, or a run without figures"""


def add_plot(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `plot` to the subparsers of `bestiary`.

    Args:
        add: makes a subcommand from (subparsers, name, what, examples).
    """
    plot = add(commands, "plot", "draw loss and speed of runs from their metrics.jsonl", EXAMPLES)
    plot.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or a metrics.jsonl")
    plot.add_argument("--out", metavar="FILE", type=Path, help=".html or .png; default: plot.html, with --json none")
    plot.set_defaults(run=_plot)


def _plot(args: argparse.Namespace) -> dict[str, Any]:
    from bestiary.training.plot import draw, read_runs

    runs = read_runs(args.runs)
    out = Path("plot.html") if args.out is None and args.json is None else args.out
    if out is not None:
        draw(runs, out)
    summaries = [run.summary() for run in runs]
    if args.json != "-":
        for one in summaries:
            loss = "no loss" if one.loss_last is None else f"loss {one.loss_first:.4f} to {one.loss_last:.4f}"
            speed = "" if one.tokens_per_s is None else f" · {one.tokens_per_s:,.0f} tok/s"
            print(f"{one.name}: {one.steps} steps · {loss}{speed}")
        if out is not None:
            print(f"plot: {out}")
    return {"out": None if out is None else str(out), "runs": [one.as_json() for one in summaries]}
