"""A recommender that learns from what users do: MovieLens-100k, semantic ids, SFT, then GRPO.

Films are semantic ids, tokens of a small Qwen3 without any text. The histories of a fifth of the users are known: SFT
imitates them, the next film behind every film, until that makes the next film of other users no likelier. All other
users meet the policy: at moments of theirs it shows a film (sampling is constrained by the trie of the catalogue: films
and nothing else), and what it hears is what that film alone is worth, which is 2^rating − 1 if the user watched it
within ten events and nothing otherwise. Judged are users whom neither training has seen: NDCG@10 of the next ten
events with the same worth, over the whole catalogue by the policy's probabilities, without films that the user had
seen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from bestiary.kernels.errors import BestiaryError
from bestiary.tools import assets
from bestiary.tools.arguments import USAGE_ERROR, Parser, write_json
from bestiary.tools.movielens import interactions
from bestiary.tools.recommender_study import Judged, RecommenderConfig, Study
from bestiary.training.errors import InvalidRun
from bestiary.training.sections import read_mapping, validated

EXAMPLES = """\
examples:
  python -m bestiary.tools.recommender
  python -m bestiary.tools.recommender --seeds 7 --config small.yaml --json -

the file holds keys of bestiary.tools.recommender_study.RecommenderConfig, e.g. `rounds: 30`

exit codes: 0 GRPO improved on imitation in every seed, 1 it did not, 7 usage or environment"""


class Watcher:
    """A log that shows a line every so many steps.

    Args:
        every: steps.
    """

    def __init__(self, console: Console, every: int = 10) -> None:
        self._console, self._every = console, every

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the figures of a step."""
        if step % self._every == 0:
            names = ("loss", "eval/loss", "rl/reward", "rl/equal_groups", "rl/entropy", "rl/mismatch_max")
            shown = ", ".join(f"{name} {values[name]:.4g}" for name in names if name in values)
            self._console.print(f"  step {step}: {shown}", highlight=False, soft_wrap=True)


def study(config: RecommenderConfig, seed: int, out: Path, log: Watcher) -> dict[str, Any]:
    """One seed: what its lists are worth by popularity, after SFT, after GRPO; and seconds."""
    made = Study(config, interactions(), out / f"seed-{seed}", seed=seed, log=log)
    found: dict[str, Judged] = {"popularity": made.judge_popularity()}
    seconds = {}
    for name, train in (("SFT", made.imitate), ("GRPO", made.reinforce)):
        start = time.perf_counter()
        train()
        seconds[name] = time.perf_counter() - start
        found[name] = made.judge()
    moved = [after - before for before, after in zip(found["SFT"].values, found["GRPO"].values, strict=True)]
    return {
        "seed": seed,
        "users": {part: len(getattr(made, part)) for part in ("logged", "online", "validation", "held_out")},
        "judged": len(moved),
        "ndcg": {name: one.ndcg for name, one in found.items()},
        "next_item": {name: one.next_item for name, one in found.items()},
        "improvement": fmean(moved),
        "standard_error": stdev(moved) / len(moved) ** 0.5,
        "seconds": seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and judges every seed; returns the exit code."""
    parser = Parser("bestiary.tools.recommender", __doc__, EXAMPLES)
    parser.add_argument("--config", type=Path, help="YAML or JSON with other numbers than the defaults")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--out", type=Path, help="folder of what is trained on (default: out/recommender)")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    out: Path = args.out or assets.output_folder() / "recommender"
    try:
        given = {} if args.config is None else read_mapping(args.config, InvalidRun)
        config = validated(RecommenderConfig, given, place="", read_from=str(args.config), error=InvalidRun)
        rows = []
        for seed in args.seeds:
            console.print(f"seed {seed}")
            rows.append(study(config, seed, out, Watcher(console)))
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return USAGE_ERROR
    if args.json != "-":
        Console().print(table(rows))
    improved = all(row["improvement"] > 0 for row in rows)
    write_json(args.json, {"schema": "bestiary.recommender/1", "config": config.model_dump(), "seeds": rows})
    return 0 if improved else 1


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """NDCG@10 of every seed, and mean and standard deviation over them."""
    made = Table(title="MovieLens-100k, users whom no training saw: NDCG@10 of rated films", title_justify="left")
    names = ("popularity", "SFT", "GRPO")
    for column in ("seed", *names, "improvement", "the next film alone", "seconds"):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(
            str(row["seed"]),
            *(f"{row['ndcg'][name]:.4f}" for name in names),
            f"{row['improvement']:+.4f} ± {row['standard_error']:.4f}",
            f"{row['next_item']['SFT']:.4f} → {row['next_item']['GRPO']:.4f}",
            f"{row['seconds']['SFT']:.0f} + {row['seconds']['GRPO']:.0f}",
        )
    if len(rows) > 1:
        columns = [[row["ndcg"][name] for row in rows] for name in names] + [[row["improvement"] for row in rows]]
        moved = " → ".join(f"{fmean(row['next_item'][name] for row in rows):.4f}" for name in names[1:])
        made.add_section()
        made.add_row("mean", *(f"{fmean(one):.4f} ({stdev(one):.4f})" for one in columns), moved, "")
    return made


if __name__ == "__main__":
    sys.exit(main())
