"""`bestiary models`: what is in the zoo, and what one size looks like inside. Heavy imports wait until it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bestiary.tools.catalogue import ModelRow

Say = Callable[[str], None]

EXAMPLES = """\
examples:
  bestiary models --family qwen3 --json models.json
  bestiary models show gemma3-270m          module tree with shapes and names; a family shows its smallest size

weights and cache are bfloat16; training is weights, gradients and AdamW's two states in bfloat16, without activations
(a run's --dry-run counts them); GFLOP are of one token, the mean over a document of 4096"""

SHOW = """\
examples:
  bestiary models show gemma3-270m
  bestiary models show gpt_oss --json tree.json

Nothing is loaded and nothing is downloaded: the model is built on torch's meta device."""

_HEADS = (
    *("name", "model_type", "parameters", "active", "weights GiB", "training GiB", "cache KiB/token"),
    *("GFLOP forward", "GFLOP training", "verified"),
)
_LEFT = (0, 1, 9)


def add_models(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `models` and `models show` to the subparsers of `bestiary`.

    Args:
        add: makes a subcommand from (subparsers, name, what, examples).
    """
    models = add(commands, "models", "list families and sizes, or show one", EXAMPLES)
    models.add_argument("--family", help="only this family, by class name or model_type")
    models.set_defaults(run=_list)
    show = add(models.add_subparsers(dest="action", metavar="ACTION"), "show", "print a size's module tree", SHOW)
    show.add_argument("name", metavar="NAME", help="a published size such as gemma3-270m, or a family")
    show.set_defaults(run=_show)


def _list(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    from bestiary.tools.catalogue import list_models

    rows = list_models(family=args.family)
    for line in aligned([_HEADS, *map(_cells, rows)]):
        say(line)
    return {"models": [row.as_json() for row in rows]}


def _cells(row: ModelRow) -> tuple[str, ...]:
    gib, giga = 2**30, 1e9
    return (
        *(row.name, row.model_type, f"{row.parameters:,}", f"{row.active:,}"),
        *(f"{row.weights_bytes / gib:.1f}", f"{row.training_bytes / gib:.1f}", f"{row.cache_bytes_per_token / 1024:g}"),
        *(f"{row.forward_flops / giga:.2f}", f"{row.training_flops / giga:.2f}", row.verified or "–"),
    )


def aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        sides = ("<" if index in _LEFT else ">" for index in range(len(cells)))
        yield "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)
        ).rstrip()


def _show(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    from bestiary.tools.catalogue import build, find, list_models
    from bestiary.tools.model_tree import lines, tree

    family, size = find(args.name)
    row = next(row for row in list_models(family=family) if row.size == size)
    shown = tree(build(family, size))
    active = "" if row.active == row.parameters else f", {row.active:,} of them for a token"
    say(f"{row.name}: {family} ({row.model_type}), {row.parameters:,} parameters{active}")
    for line in lines(shown):
        say(line)
    return {"model": row.as_json(), "tree": shown.as_json()}
