"""The data pipeline on one core: rows → records → template → loss mask → tokens, against the tokenizer alone.

Every arm handles the same rows of the heavy-tailed T0 subset and of GSM8K in the same run, with Qwen3's tokenizer and
chat template, one thread. `bare` encodes the rendered texts and does nothing else; `control` decodes the JSON lines.
Goal: the pipeline reaches half of the bare tokenizer's tokens per second.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.tools.bench import measure

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.tokenizing --data ../shared/data/text
  python -m bestiary.tools.bench.tokenizing --rows 500 --rounds 3 --json -

exit codes: 0 the goal holds, 1 it is missed, 5 too noisy to tell, 7 usage or environment"""

BATCH = 64
# file, columns of prompt and completion, the least share of the bare tokenizer's rate
CORPORA: tuple[tuple[str, dict[str, str], float], ...] = (
    ("t0_subset.jsonl.gz", {}, 0.5),
    ("gsm8k_train.jsonl", {"prompt": "question", "completion": "answer"}, 0.5),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns the exit code."""
    parser = Parser("bestiary.tools.bench.tokenizing", __doc__, EXAMPLE)
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the texts; default $BESTIARY_REFERENCE_DATA/text"
    )
    parser.add_argument("--rows", type=at_least(1), default=2000, help="of each file (default 2000)")
    parser.add_argument("--rounds", type=at_least(2), default=4, help="measurements of each arm (default 4)")
    args = parser.parse_args(argv)
    folder = args.data or Path(os.environ.get("BESTIARY_REFERENCE_DATA", ".")) / "text"
    try:
        payload = compare(folder, args.rows, args.rounds, show=args.json != "-")
    except (BestiaryError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 7
    write_json(args.json, payload)
    return int(payload["exit_code"])


def compare(folder: Path, rows: int, rounds: int, *, show: bool = True) -> dict[str, Any]:
    """All arms over all files; the result as JSON values.

    Raises:
        AssetMissing: the tokenizer was not fetched. OSError: the texts are not there.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from bestiary.tools.npm_assets import tokenizer_folder
    from bestiary.training.data.tokenizer import BaseHFModelTokenizer

    tokenizer = BaseHFModelTokenizer.from_pretrained(tokenizer_folder("qwen3"))
    arms: dict[str, Callable[[], measure.Sample]] = {}
    for file, columns, _ in CORPORA:
        lines = _lines(folder / file, rows)
        arms |= {f"{name} {file}": arm for name, arm in _arms(tokenizer, lines, columns).items()}
    for arm in arms.values():
        arm()
    samples = measure.alternate(arms, rounds)
    summaries = measure.summarise(samples)
    goals = []
    for file, _, least in CORPORA:
        each = zip(samples[f"pipeline {file}"], samples[f"bare {file}"], strict=True)
        shares = [ours["tokens_per_s"] / bare["tokens_per_s"] for ours, bare in each]
        middle = measure.Summary.of(shares)
        goals.append(
            measure.Goal(
                name=f"pipeline / bare tokenizer, {file}",
                figure=middle.median,
                limit=least,
                at_least=True,
                low=middle.low,
                high=middle.high,
            )
        )
    control = summaries[f"control {CORPORA[0][0]}"]["seconds"]
    code = measure.exit_code(goals, control)
    if show:
        for name, quantities in summaries.items():
            rate = quantities["tokens_per_s"]
            print(f"  {name:<34}{rate.median:12,.0f} tokens/s   spread {rate.spread:5.1%}")
        measure.print_goals(goals, control, code)
    versions = measure.versions("transformers", "tokenizers", "jinja2", "pydantic")
    return measure.report("tokenizing", summaries, goals, code, versions=versions, samples=samples)


def _arms(tokenizer: Any, lines: list[str], columns: dict[str, str]) -> dict[str, Callable[[], measure.Sample]]:
    from bestiary.training.data.encode import RowEncoder

    encoder = RowEncoder(tokenizer=tokenizer, kind="completion", columns=columns, as_chat=True)
    groups = [lines[start : start + BATCH] for start in range(0, len(lines), BATCH)]
    names = [f"row {number}" for number in range(BATCH)]

    def rendered(group: list[str]) -> list[str]:
        samples = [encoder.sample(json.loads(line), "row") for line in group]
        talks = [talk for sample in samples for talk in encoder.conversations(sample, "row")]
        return [tokenizer.chat.render(talk.messages) for talk in talks]

    texts = [rendered(group) for group in groups]
    engine = tokenizer.hf.backend_tokenizer

    def bare() -> int:
        return sum(len(one.ids) for group in texts for one in engine.encode_batch(group, add_special_tokens=False))

    def pipeline() -> int:
        total = 0
        for group in groups:
            where = names[: len(group)]
            samples = [encoder.sample(json.loads(line), place) for line, place in zip(group, where, strict=True)]
            total += sum(len(one) for one in encoder.encode(samples, where) if not isinstance(one, tuple))
        return total

    def control() -> int:
        return sum(len(json.loads(line)) for _ in range(8) for line in lines)

    return {name: _timed(work) for name, work in (("bare", bare), ("pipeline", pipeline), ("control", control))}


def _timed(work: Callable[[], int]) -> Callable[[], measure.Sample]:
    def arm() -> measure.Sample:
        start = time.perf_counter()
        tokens = work()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": float(tokens), "tokens_per_s": tokens / seconds}

    return arm


def _lines(file: Path, count: int) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        return [line for _, line in zip(range(count), lines, strict=False)]


if __name__ == "__main__":
    sys.exit(main())
