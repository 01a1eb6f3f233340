"""A teacher's likeliest words for every trained token of a run's data, written into a file ahead of the run.

The rows are those of the sources in their order, as records of kind `distillation`: the conversation, teacher_ids and
teacher_log_probs (a row for each trained token), the digest of the tokens that they belong to and the temperature. So
a student trains on them without its teacher in memory, and a run that makes other tokens of a row is refused by it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from bestiary.bridges.hub import split_revision
from bestiary.models import AutoDecoder, Decoder
from bestiary.training.commits import pinned_name
from bestiary.training.config import RunConfig
from bestiary.training.data.config import SourceConfig
from bestiary.training.data.errors import CorruptRow, SampleRefused
from bestiary.training.data.formats import Place
from bestiary.training.data.packing import Candidate, assemble
from bestiary.training.data.samples import Chat, Distillation, parse
from bestiary.training.data.source import BUFFER_BYTES, Cursor
from bestiary.training.data.stream import ROW_ERRORS
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tokens import IGNORED, Tokens, digest_of
from bestiary.training.errors import Diverged, InvalidRun
from bestiary.training.export import load_tokenizer
from bestiary.training.recipes.distill import Distill, likeliest
from bestiary.training.recipes.documents import model_inputs, scoring_pass

WORDS = 64  # kept of each token where loss.options.top_k does not say
_KINDS = ("chat", "distillation")
_BUFFERED = 2**20  # words held before they are written


@dataclass(frozen=True)
class TeacherFile:
    """What was written: rows, trained tokens, words kept of each, and rows left out as corrupt."""

    file: Path
    rows: int
    tokens: int
    words: int
    skipped: int


@dataclass(frozen=True)
class _Row:
    """One row of the file. words, log_probs: of each trained token, those that the teacher gives any probability."""

    sample: Chat | Distillation
    teacher: str
    temperature: float
    digest: str
    words: Sequence[NDArray[np.int32]]
    log_probs: Sequence[NDArray[Any]]

    def plain(self) -> dict[str, Any]:
        """All but the words, as JSON values."""
        messages = [
            {"role": one.role, **one.model_dump(mode="json", exclude_defaults=True)} for one in self.sample.messages
        ]
        tools = {} if self.sample.tools is None else {"tools": list(self.sample.tools)}
        more = {"teacher_digest": self.digest, "teacher_temperature": self.temperature}
        return {"messages": messages, **tools, "teacher": self.teacher, **more}


def store_teacher(config: RunConfig, file: Path) -> TeacherFile:
    """Ask `config.loss.teacher` about all of `config.data` and write what it says.

    Args:
        file: .jsonl or .parquet; it appears when it is whole.
    Raises:
        InvalidRun: no teacher, sources of another kind, a file that exists or of another format.
        SampleRefused, CorruptRow, StorageFailed: of the data, with the row's place.
    """
    teacher_name = pinned_name(_checked(config, file))
    options = config.loss.options
    k, temperature = int(options.get("top_k", WORDS)), options.get("temperature", 1.0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = config.precision.compute or config.precision.parameters
    src, revision = split_revision(teacher_name)
    teacher = AutoDecoder.from_pretrained(src, revision=revision, dtype=dtype, device=device)
    asked = Distill(teacher, temperature=temperature, top_k=k)
    tokenizer = load_tokenizer(config, teacher)
    counts = {"rows": 0, "tokens": 0, "skipped": 0}
    with _written(file) as writer:
        for samples in _groups(config, tokenizer, counts):
            said = _said(asked, [tokens for _, tokens in samples], tokenizer.pad_id)
            for (sample, tokens), (words, log_probs) in zip(samples, said, strict=True):
                digest = digest_of(tokens.input_ids, tokens.labels)
                writer.write(_Row(sample, teacher_name, temperature, digest, words, log_probs))
                counts["rows"] += 1
                counts["tokens"] += len(words)
        if not counts["rows"]:
            raise InvalidRun("the data has no rows.", remedy="other data.sources")
    return TeacherFile(file, words=k, **counts)


def _checked(config: RunConfig, file: Path) -> str:
    """The teacher's name, once all that is asked can be done."""
    if config.loss.teacher is None:
        raise InvalidRun("loss.teacher is missing: there is nobody to ask.", remedy="loss.teacher=CHECKPOINT")
    for source in config.data.sources:
        if source.kind not in _KINDS:
            raise InvalidRun(
                f"data.sources: {source.name} is of kind {source.kind!r}: what is written are conversations.",
                remedy=f"kind: one of {', '.join(_KINDS)}",
            )
    if file.suffix not in _WRITERS:
        raise InvalidRun(f"{file}: its suffix names no format.", remedy=f"one of {', '.join(_WRITERS)}")
    if file.exists():
        raise InvalidRun(f"{file} exists.", remedy="another name, or remove it")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidRun("--store-teacher in several processes.", remedy="run it in one")
    return config.loss.teacher


# ---------------------------------------------------------------------- rows


def _groups(
    config: RunConfig, tokenizer: BaseHFModelTokenizer, counts: dict[str, int]
) -> Iterator[list[tuple[Chat | Distillation, Tokens]]]:
    """Rows in their order, as many together as fill a pack; a longer one comes alone."""
    held: list[tuple[Chat | Distillation, Tokens]] = []
    size = 0
    for source in config.data.sources:
        for found in _samples(source, tokenizer, counts):
            if held and size + len(found[1]) > config.data.pack_length:
                yield held
                held, size = [], 0
            held.append(found)
            size += len(found[1])
    if held:
        yield held


def _samples(
    config: SourceConfig, tokenizer: BaseHFModelTokenizer, counts: dict[str, int]
) -> Iterator[tuple[Chat | Distillation, Tokens]]:
    source, encoder = config.source(tokenizer), config.encoder(tokenizer)
    for shard in source.shards():
        for raw in source.open(shard, Place()):
            where = f"{shard.path} row {raw.place.row}"
            try:
                sample = encoder.sample({**raw.decode(), "teacher_ids": None, "teacher_log_probs": None}, where)
                (tokens,) = encoder.encode([sample], [where])
                if not isinstance(sample, Chat | Distillation) or not isinstance(tokens, Tokens):
                    raise SampleRefused(f"{where}: a sample of kind {config.kind} is no conversation.")
                parse("distillation", {"messages": sample.messages, "tools": sample.tools}, where)
                if tokens.labels[0] != IGNORED:
                    raise SampleRefused(f"{where}: its first token is trained, before which nothing can be said.")
            except ROW_ERRORS as error:
                if config.on_corrupt == "raise":
                    raise
                counts["skipped"] += 1
                if counts["skipped"] > source.max_corrupt:
                    raise CorruptRow(
                        f"{counts['skipped']} rows were left out, the last one because: {error}", read_from=where
                    ) from error
                continue
            yield sample, tokens


def _said(
    asked: Distill, documents: Sequence[Tokens], pad_id: int
) -> Iterator[tuple[list[NDArray[np.int32]], list[NDArray[Any]]]]:
    """For each document, the words of its trained tokens and their log-probabilities."""
    made = [Candidate(place, "", place, Cursor(), 0, (one,)) for place, one in enumerate(documents)]
    pack = assemble(made, sum(map(len, documents)), pad_id)
    teacher, batch = asked.teacher, asked.batch(pack)
    assert isinstance(teacher, Decoder)
    assert asked.top_k is not None
    with scoring_pass(teacher):
        head = teacher(**model_inputs(batch, teacher), return_teacher=True).teacher
        counted = (batch["shift_labels"].flatten() != IGNORED).to(head.hidden.device)
        found = likeliest(head, asked.top_k, asked.temperature, counted)
    words, log_probs = found.words.to(torch.int32).cpu().numpy(), found.log_prob.cpu().numpy()
    if np.isnan(log_probs).any():
        raise Diverged(
            f"the teacher gives NaN where {teacher.dtype} is computed in.",
            remedy="precision.compute=bfloat16, whose range is wider than float16's, or float32",
        )
    for one, start in zip(documents, pack.borders.tolist(), strict=False):
        rows = start + np.flatnonzero(one.labels != IGNORED) - 1  # a word is said one position before its token
        known = [np.isfinite(log_probs[row]) for row in rows]
        yield (
            [words[row][some] for row, some in zip(rows, known, strict=True)],
            [log_probs[row][some] for row, some in zip(rows, known, strict=True)],
        )


# ---------------------------------------------------------------------- files


class _Writer(Protocol):
    def write(self, row: _Row) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """JSON lines."""

    def __init__(self, file: Path) -> None:
        self._opened = file.open("w", encoding="utf-8")

    def write(self, row: _Row) -> None:
        words = {"teacher_ids": [one.tolist() for one in row.words]}
        words |= {"teacher_log_probs": [one.tolist() for one in row.log_probs]}
        line = json.dumps(row.plain() | words, ensure_ascii=False) + "\n"
        if len(line.encode()) > BUFFER_BYTES:
            raise InvalidRun(
                f"a row of {sum(map(len, row.words))} words would be {len(line) / 2**20:.0f} MiB of JSON, and lines "
                f"are read up to {BUFFER_BYTES / 2**20:.0f} MiB.",
                remedy="--store-teacher FILE.parquet, or fewer words (loss.options.top_k)",
            )
        self._opened.write(line)

    def close(self) -> None:
        self._opened.close()


class _Parquet:
    """Parquet, a row group for about `_BUFFERED` words; calls of tools and their arguments are JSON text in it."""

    def __init__(self, file: Path) -> None:
        self._file, self._rows, self._held = file, list[_Row](), 0
        self._writer: pq.ParquetWriter | None = None

    def write(self, row: _Row) -> None:
        self._rows.append(row)
        self._held += sum(map(len, row.words))
        if self._held >= _BUFFERED:
            self._flush()

    def close(self) -> None:
        if self._rows:
            self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        plain = [row.plain() for row in self._rows]
        tools = [json.dumps(row["tools"]) if "tools" in row else None for row in plain]
        columns: dict[str, Any] = {
            "messages": pa.array([[_flat(one) for one in row["messages"]] for row in plain], _MESSAGES),
            "tools": pa.array(tools, pa.string()),
            "teacher": pa.array([row["teacher"] for row in plain], pa.string()),
            "teacher_digest": pa.array([row["teacher_digest"] for row in plain], pa.string()),
            "teacher_temperature": pa.array([row["teacher_temperature"] for row in plain], pa.float64()),
            "teacher_ids": _nested([row.words for row in self._rows]),
            "teacher_log_probs": _nested([row.log_probs for row in self._rows]),
        }
        table = pa.table(columns)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, table.schema)
        self._writer.write_table(table)
        self._rows, self._held = [], 0


_CALL = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_TEXTS = [(name, pa.string()) for name in ("role", "content", "reasoning", "name", "tool_call_id")]
_SPANS = pa.list_(pa.list_(pa.int64()))
_MESSAGES = pa.list_(
    pa.struct([*_TEXTS, ("tool_calls", pa.list_(_CALL)), ("train", pa.bool_()), ("train_spans", _SPANS)])
)
_WRITERS: dict[str, Callable[[Path], _Writer]] = {".jsonl": _Lines, ".parquet": _Parquet}


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as text, whatever these are."""
    if "tool_calls" not in message:
        return message
    calls = [{"name": call["name"], "arguments": _text(call.get("arguments", {}))} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _nested(rows: Sequence[Sequence[NDArray[Any]]]) -> pa.Array:
    """Rows of arrays as a column of lists of lists, without a Python object for each number."""
    every = [one for row in rows for one in row]
    outer = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
    inner = np.cumsum([0, *map(len, every)]).astype(np.int32)
    return pa.ListArray.from_arrays(outer, pa.ListArray.from_arrays(inner, pa.array(np.concatenate(every))))


@contextmanager
def _written(file: Path) -> Iterator[_Writer]:
    """A writer of `file`, which has another name until it is whole and on disk, and is gone if it never is."""
    partial = file.with_name(f".writing-{file.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = _WRITERS[file.suffix](partial)
    try:
        try:
            yield writer
        finally:
            writer.close()
        with partial.open("rb") as opened:
            os.fsync(opened.fileno())
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)
