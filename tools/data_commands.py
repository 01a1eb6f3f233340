"""`bestiary data inspect`: what enters the loss, before a run is started. Heavy imports wait until it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import at_least

if TYPE_CHECKING:
    from rich.console import Console

    from bestiary.training.data.inspection import Report, Shown

Say = Callable[[str], None]
_LONGEST = 600  # characters of one run of tokens on a terminal; the page shows all

ABOUT = "Look at training data as a model will see it."

EXAMPLES = """\
examples:
  bestiary data inspect run.yaml
  bestiary data inspect run.yaml --html data.html --rows 2000"""

INSPECT = """\
example:
  bestiary data inspect run.yaml --html data.html --json data.json

run.yaml:
  data:
    tokenizer: {src: ./Qwen3-0.6B, arguments: {enable_thinking: false}}
    pack_length: 4096
    overflow: truncate
    sources:
      - {name: math, files: m.jsonl, kind: completion, as_chat: true, columns: {prompt: question, completion: answer}}
      - {name: talks, files: "talks/*.jsonl.gz", kind: chat, train_on: {turns: last}, weight: 0.5}

Trained tokens stand in green. exit codes: 0 looked, 1 a row was refused, 7 usage or environment"""


class RichMissing(BestiaryError):
    """The package that colours the terminal is not installed.

    Remedy: `pip install 'bestiary[demo]'`, or `--json -`.
    """


def add_data(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `data` and its command to the subparsers of `bestiary`.

    Args:
        add: makes a subcommand from (subparsers, name, what, examples).
    """
    data = commands.add_parser(
        "data",
        help="look at training data",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = data.add_subparsers(dest="action", metavar="ACTION", required=True)
    inspect = add(
        actions, "inspect", "show samples with what is trained, lengths, coverage, packing, warnings", INSPECT
    )
    inspect.add_argument("config", metavar="CONFIG", type=Path, help="a run's file (YAML or JSON) with a section data")
    inspect.add_argument("--rows", type=at_least(1), default=500, help="of each source (default 500)")
    inspect.add_argument("--samples", type=at_least(0), default=2, help="of each source to show (default 2)")
    inspect.add_argument("--html", type=Path, metavar="FILE", help="write one page that loads nothing")
    inspect.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    from bestiary.tools.data_page import data_page
    from bestiary.training.data.config import load_data_config
    from bestiary.training.data.inspection import inspect

    report = inspect(load_data_config(args.config), rows=args.rows, samples=args.samples)
    if args.json != "-":
        _show(report, _console())
    if args.html is not None:
        args.html.write_text(data_page(report, args.config.name), encoding="utf-8")
        say(f"page: {args.html}")
    refused = sum(one.refused for one in report.sources)
    return {"exit_code": 1 if refused else 0, "config": str(args.config), **_as_json(report)}


def _as_json(report: Report) -> dict[str, Any]:
    made = asdict(report)
    for source in made["sources"]:
        source["lengths"] = {"count": len(source["lengths"]), "most": max(source["lengths"], default=0)}
    return made


def _console() -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise RichMissing(
            "the package rich is not installed.", remedy="pip install 'bestiary[demo]', or use --json -"
        ) from error
    return Console(file=sys.stdout, highlight=False)


def _show(report: Report, console: Console) -> None:
    """The report on a terminal."""
    from rich.table import Table
    from rich.text import Text

    from bestiary.tools.data_page import percent, range_words, ratio

    for name, value in report.tokenizer.items():
        console.print(f"{name:<12} {value}", markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("source", "kind", "rows", "refused", "tokens", "trained", "of documents", "of tokens"):
        table.add_column(column, justify="left" if column in {"source", "kind"} else "right")
    for one in report.sources:
        documents, tokens = map(percent, report.shares[one.name])
        trained = percent(ratio(one.loss_tokens, one.tokens))
        table.add_row(  # as it is called: [words] are markup elsewhere
            Text(one.name), one.kind, str(one.rows), str(one.refused), f"{one.tokens:,}", trained, documents, tokens
        )
    console.print()
    console.print(table)
    console.print("\nlengths in tokens")
    most = max([count for _, _, count in report.histogram], default=0) or 1
    for low, high, count in report.histogram:
        console.print(f"  {range_words(low, high):>16} {'█' * round(40 * count / most)} {count}", markup=False)
    packing = report.packing
    console.print(
        f"\n{packing['packs']:.0f} packs, {percent(packing['packed'])} of their slots hold a token; "
        f"padded in batches of 8: {percent(packing['padded'])}",
        markup=False,
    )
    for one in report.sources:
        roles = [f"{role} {percent(ratio(trained, tokens))}" for role, (tokens, trained) in one.by_role.items()]
        console.print(_printable(f"\n{one.name}: trained of {', '.join(roles)}"), markup=False)
        for shown in one.samples:
            _show_sample(shown, console)
    warned = [*report.warnings, *(f"{one.name}: {text}" for one in report.sources for text in one.warnings)]
    warned += [f"{one.name}: refused: {text}" for one in report.sources for text in one.refusals]
    for text in warned:
        console.print(_printable(f"warning  {text}"), style="yellow", markup=False)


def _show_sample(shown: Shown, console: Console) -> None:
    from rich.text import Text

    console.print(f"  {shown.where}: {shown.trained} of {shown.tokens} tokens trained", markup=False, style="dim")
    text = Text()
    for run in shown.runs:
        text.append(_printable(_shortened(run.text)), style="bold green" if run.trained else "dim")
    console.print(text)


def _shortened(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} […] {text[-_LONGEST // 2 :]}"


def _printable(text: str) -> str:
    """Text that cannot steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
