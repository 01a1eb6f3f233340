"""The data pipeline on one core: rows → records → template → loss mask → tokens, against the tokenizer alone.

Every arm handles the same rows in the same run, with Qwen3's tokenizer and chat template, one thread: of the
heavy-tailed T0 subset, of GSM8K, and of GSM8K cut down to chats of about 64 tokens, where the template costs most
beside the text. `bare` encodes the rendered texts and does nothing else; `control` decodes the JSON lines. Goal: the
pipeline reaches half of the bare tokenizer's tokens per second.

Then a producer process packs ten million tokens of T0 and GSM8K. Goals: what it keeps does not grow behind the first
two million, and is never much more than with the first pack.
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
LEAST = 0.5  # of the bare tokenizer's rate
T0, GSM8K = "t0_subset.jsonl.gz", "gsm8k_train.jsonl"
COLUMNS: dict[str, dict[str, str]] = {T0: {}, GSM8K: {"prompt": "question", "completion": "answer"}}
SHORT = "chats of 64 tokens"
SHORT_CHARACTERS = 110  # of a question and of an answer
PACK = 4096
GROWTH_MB, HELD_MB = 4.0, 32.0  # at most


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns the exit code."""
    parser = Parser("bestiary.tools.bench.tokenizing", __doc__, EXAMPLE)
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the texts; default $BESTIARY_REFERENCE_DATA/text"
    )
    parser.add_argument("--rows", type=at_least(1), default=2000, help="of each file (default 2000)")
    parser.add_argument("--rounds", type=at_least(2), default=4, help="measurements of each arm (default 4)")
    parser.add_argument(
        "--tokens", type=at_least(100_000), default=10_000_000, help="to watch a producer's memory over (default 10 M)"
    )
    args = parser.parse_args(argv)
    folder = args.data or Path(os.environ.get("BESTIARY_REFERENCE_DATA", ".")) / "text"
    try:
        payload = compare(folder, args.rows, args.rounds, args.tokens, show=args.json != "-")
    except (BestiaryError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 7
    write_json(args.json, payload)
    return int(payload["exit_code"])


def compare(folder: Path, rows: int, rounds: int, tokens: int, *, show: bool = True) -> dict[str, Any]:
    """All arms over all files, and the memory of a producer; the result as JSON values.

    Raises:
        AssetMissing: the tokenizer was not fetched. OSError: the texts are not there.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from bestiary.tools.bench import producer_memory
    from bestiary.tools.npm_assets import tokenizer_folder
    from bestiary.training.data.encode import RowEncoder
    from bestiary.training.data.tokenizer import BaseHFModelTokenizer

    tokenizer = BaseHFModelTokenizer.from_pretrained(tokenizer_folder("qwen3"))
    encoders = {
        file: RowEncoder(tokenizer=tokenizer, kind="completion", columns=columns, as_chat=True)
        for file, columns in COLUMNS.items()
    }
    corpora = {file: (encoders[file], _lines(folder / file, rows)) for file in COLUMNS}
    corpora[SHORT] = (RowEncoder(tokenizer=tokenizer, kind="chat"), [_short(line) for line in corpora[GSM8K][1]])
    arms: dict[str, Callable[[], measure.Sample]] = {}
    for name, (encoder, lines) in corpora.items():
        arms |= {f"{arm} {name}": work for arm, work in _arms(encoder, lines).items()}
    for work in arms.values():
        work()
    samples = measure.alternate(arms, rounds)
    summaries = measure.summarise(samples)
    watched = producer_memory.watch(_plan(folder, encoders), tokens)
    goals = [*(_share(samples, name) for name in corpora), *_kept(watched)]
    control = summaries[f"control {T0}"]["seconds"]
    code = measure.exit_code(goals, control)
    if show:
        for name, quantities in summaries.items():
            rate = quantities["tokens_per_s"]
            print(f"  {name:<34}{rate.median:12,.0f} tokens/s   spread {rate.spread:5.1%}")
        print(f"  {'one producer, packing':<34}{watched.tokens / watched.seconds:12,.0f} tokens/s")
        measure.print_goals(goals, control, code)
    return measure.report(
        "tokenizing",
        summaries,
        goals,
        code,
        versions=measure.versions("transformers", "tokenizers", "jinja2", "pydantic"),
        samples=samples,
        producer={
            "tokens": watched.tokens,
            "seconds": watched.seconds,
            "resident_mb": producer_memory.in_megabytes(watched.resident),
        },
    )


def _share(samples: dict[str, list[measure.Sample]], name: str) -> measure.Goal:
    each = zip(samples[f"pipeline {name}"], samples[f"bare {name}"], strict=True)
    share = measure.Summary.of([ours["tokens_per_s"] / bare["tokens_per_s"] for ours, bare in each])
    return measure.Goal(
        name=f"pipeline / bare tokenizer, {name}",
        figure=share.median,
        limit=LEAST,
        at_least=True,
        low=share.low,
        high=share.high,
    )


def _kept(watched: Any) -> list[measure.Goal]:
    """What ten million tokens may leave behind in a producer."""
    million = watched.tokens / 1e6
    figures = {
        f"producer's memory, {million:.1f} M tokens over {million / 5:.1f} M, MB": (watched.growth, GROWTH_MB),
        f"producer's memory, most in {million:.1f} M tokens over the first pack, MB": (watched.held, HELD_MB),
    }
    return [measure.Goal(name=name, figure=kept / 2**20, limit=limit) for name, (kept, limit) in figures.items()]


def _plan(folder: Path, encoders: dict[str, Any]) -> Any:
    """The files without an end, one stream."""
    from bestiary.training.data.plan import Plan
    from bestiary.training.data.source import Source

    sources = tuple(
        Source(name=file, files=str(folder / file), encode=encode, on_corrupt="skip", max_corrupt=1_000_000)
        for file, encode in encoders.items()
    )
    return Plan(sources=sources, pack_length=PACK, pad_id=0, overflow="truncate")


def _short(line: str) -> str:
    """A row of GSM8K as a chat of the beginnings of question and answer, at the ends of words."""
    row = json.loads(line)
    roles = (("user", row["question"]), ("assistant", row["answer"]))
    messages = [{"role": role, "content": text[:SHORT_CHARACTERS].rpartition(" ")[0]} for role, text in roles]
    return json.dumps({"messages": messages})


def _arms(encoder: Any, lines: list[str]) -> dict[str, Callable[[], measure.Sample]]:
    tokenizer = encoder.tokenizer
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
