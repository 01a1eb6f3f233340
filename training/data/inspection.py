"""What data look like to a model: samples with what is trained, lengths, coverage, packing, and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from bestiary.kernels.errors import BestiaryError
from bestiary.training.data.chat import Conversation, EncodedChat, encode_chats
from bestiary.training.data.config import DataConfig, SourceConfig
from bestiary.training.data.encode import RowEncoder
from bestiary.training.data.errors import InvalidPlan
from bestiary.training.data.formats import Place
from bestiary.training.data.packing import Candidate, Packer, fit
from bestiary.training.data.samples import Prompt, Sample
from bestiary.training.data.source import Cursor
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tokens import IGNORED, Tokens
from bestiary.training.data.traps import Findings, template_warnings

HISTOGRAM_EDGES = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MAX_REFUSED = 3
_BATCH = 64
_PADDED_BATCH = 8


@dataclass(frozen=True)
class Run:
    """Tokens side by side that are trained, or not, and belong to one role."""

    text: str
    tokens: int
    role: str
    trained: bool


@dataclass(frozen=True)
class Shown:
    """One sample, to look at."""

    where: str
    tokens: int
    trained: int
    runs: tuple[Run, ...]


@dataclass
class SourceReport:
    """One source, its first rows."""

    name: str
    kind: str
    weight: float
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    by_role: dict[str, list[int]] = field(default_factory=dict)
    samples: list[Shown] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass
class Report:
    """All of it.

    Attributes:
        packing: share of token slots that hold a document's token: packed, and padded in batches of 8.
        shares: source → (of documents, of tokens) as the mixture draws them.
        histogram: (from, below, documents), the last without an end.
    """

    tokenizer: dict[str, str]
    sources: list[SourceReport]
    histogram: list[tuple[int, int | None, int]]
    packing: dict[str, float]
    shares: dict[str, tuple[float, float]]
    warnings: list[str]


def inspect(config: DataConfig, *, rows: int = 500, samples: int = 3) -> Report:
    """Reads the first rows of every source and looks.

    Args:
        rows: of each source at most.   samples: of each source to show.

    Raises:
        Errors of the tokenizer, the template and the storage; a wrong row is counted and named, not raised.
    """
    tokenizer = config.tokenizer.load()
    reports, documents = [], []
    for source in config.sources:
        report, made = _source(config, source, tokenizer, rows, samples)
        reports.append(report)
        documents += made
    lengths = [length for report in reports for length in report.lengths]
    facts = {
        "source": config.tokenizer.src,
        "tokens": str(len(tokenizer)),
        "pad": _named(tokenizer, [tokenizer.pad_id]),
        "stops": _named(tokenizer, sorted(tokenizer.stop_ids)),
        "bos": _named(tokenizer, [tokenizer.bos_id]) if tokenizer.adds_bos and tokenizer.bos_id is not None else "none",
        "fingerprint": tokenizer.fingerprint.tokenizer[:16],
        "template": (tokenizer.fingerprint.template or "none")[:16],
    }
    return Report(
        tokenizer=facts,
        sources=reports,
        histogram=histogram(lengths),
        packing=_packing(config, documents, lengths),
        shares=_shares(config, reports),
        warnings=template_warnings(tokenizer),
    )


def histogram(lengths: Sequence[int]) -> list[tuple[int, int | None, int]]:
    """How many documents lie in each range of lengths, up to the last range that holds one."""
    edges = list(HISTOGRAM_EDGES)
    counts = Counter(int(np.searchsorted(edges, length, "right")) - 1 for length in lengths)
    last = max(counts, default=0)
    return [
        (edges[index], edges[index + 1] if index + 1 < len(edges) else None, counts[index]) for index in range(last + 1)
    ]


def _named(tokenizer: BaseHFModelTokenizer, ids: Sequence[int]) -> str:
    return ", ".join(f"{tokenizer.hf.convert_ids_to_tokens(index)} ({index})" for index in ids)


def _source(
    config: DataConfig, source: SourceConfig, tokenizer: BaseHFModelTokenizer, rows: int, samples: int
) -> tuple[SourceReport, list[tuple[Tokens, ...]]]:
    report = SourceReport(source.name, source.kind, source.weight)
    encoder = source.encoder(tokenizer)
    findings = Findings(tokenizer, source, config.pack_length, config.overflow)
    documents: list[tuple[Tokens, ...]] = []
    batch: list[tuple[str, Sample]] = []

    def flush() -> None:
        for (where, sample), made in zip(batch, _encoded(encoder, batch, report), strict=True):
            if made is None:
                continue
            tokens, chats = made
            documents.append(tokens)
            findings.look(sample, tokens, chats)
            _count(report, encoder, tokens, chats)
            if len(report.samples) < samples:
                report.samples += [_shown(encoder, where, one, chat) for one, chat in zip(tokens, chats, strict=True)]
        batch.clear()

    for where, row in _rows(source, tokenizer, rows):
        report.rows += 1
        try:
            batch.append((where, encoder.sample(row, where)))
        except BestiaryError as error:
            _refuse(report, error)
            continue
        if len(batch) == _BATCH:
            flush()
    flush()
    report.warnings = findings.words()
    return report, documents


def _rows(source: SourceConfig, tokenizer: BaseHFModelTokenizer, count: int) -> Iterator[tuple[str, dict[str, object]]]:
    """The first rows and where they are."""
    built, given = source.source(tokenizer), 0
    for shard in built.shards():
        for raw in built.open(shard, Place()):
            if given == count:
                return
            where = f"{shard.path.rpartition('/')[2]} row {raw.place.row}"
            try:
                row = dict(raw.decode())
            except (ValueError, RecursionError) as error:
                raise InvalidPlan(f"{where} cannot be decoded: {error}.", read_from=shard.path) from error
            yield where, row
            given += 1


Made = tuple[tuple[Tokens, ...], tuple[EncodedChat | None, ...]]


def _encoded(encoder: RowEncoder, batch: Sequence[tuple[str, Sample]], report: SourceReport) -> list[Made | None]:
    """Tokens and, of conversations, their turns; None where a sample is refused, which is counted."""
    made: list[Made | None] = []
    for where, sample in batch:
        try:
            (tokens,) = encoder.encode([sample], [where])
            each = tokens if isinstance(tokens, tuple) else (tokens,)
            made.append((each, _turns(encoder, sample, where, len(each))))
        except BestiaryError as error:
            _refuse(report, error)
            made.append(None)
    return made


def _turns(encoder: RowEncoder, sample: Sample, where: str, parts: int) -> tuple[EncodedChat | None, ...]:
    """The encoded conversations, for the spans of their turns; None for plain text and prompts."""
    plain = encoder.kind in {"completion", "text"} and not encoder.as_chat
    if plain or isinstance(sample, Prompt):
        return (None,) * parts
    talks = [Conversation(one.messages, one.tools, where) for one in encoder.conversations(sample, where)]
    return tuple(encode_chats(encoder.tokenizer, talks, neutralise=encoder.neutralise, spans=True))


def _refuse(report: SourceReport, error: BestiaryError) -> None:
    report.refused += 1
    if len(report.refusals) < MAX_REFUSED:
        report.refusals.append(error.what)


def _count(
    report: SourceReport, encoder: RowEncoder, tokens: Sequence[Tokens], chats: Sequence[EncodedChat | None]
) -> None:
    report.documents += 1
    report.lengths.append(sum(len(one) for one in tokens))
    for one, chat in zip(tokens, chats, strict=True):
        mask = one.labels != IGNORED
        report.tokens += len(one)
        report.loss_tokens += int(mask.sum())
        for role, start, end in _roles(one, chat):
            seen = report.by_role.setdefault(role, [0, 0])
            seen[0] += end - start
            seen[1] += int(mask[start:end].sum())


def _roles(tokens: Tokens, chat: EncodedChat | None) -> list[tuple[str, int, int]]:
    if chat is not None:
        return [(turn.role, turn.start, turn.end) for turn in chat.turns]
    first = int(np.argmax(tokens.labels != IGNORED)) if (tokens.labels != IGNORED).any() else len(tokens)
    return [("prompt", 0, first), ("completion", first, len(tokens))]


def _shown(encoder: RowEncoder, where: str, tokens: Tokens, chat: EncodedChat | None) -> Shown:
    mask = tokens.labels != IGNORED
    runs = []
    for role, start, end in _roles(tokens, chat):
        edges = [start, *(start + 1 + np.flatnonzero(np.diff(mask[start:end].astype(int)))).tolist(), end]
        for a, b in pairwise(edges):
            if a < b:
                runs.append(Run(encoder.tokenizer.decode(tokens.input_ids[a:b]), b - a, role, bool(mask[a])))
    return Shown(where, len(tokens), int(mask.sum()), tuple(runs))


def _packing(config: DataConfig, documents: Sequence[tuple[Tokens, ...]], lengths: Sequence[int]) -> dict[str, float]:
    """Packs of the documents in a fixed random order, as a packer with the same look-ahead makes them."""
    order = np.random.default_rng(config.seed).permutation(len(documents))
    overflow = "truncate" if config.overflow == "error" else config.overflow
    pieces = [piece for index in order for piece in fit(documents[index], config.pack_length, overflow, "a sample")]
    waiting = iter([Candidate(number, "", number, Cursor(), 0, piece) for number, piece in enumerate(pieces)])

    def refill() -> list[Candidate] | None:
        following = next(waiting, None)
        return None if following is None else [following]

    packer = Packer(config.pack_length, config.look_ahead, refill)
    packs, useful = 0, 0
    while chosen := packer.next():
        packs += 1
        useful += sum(map(len, chosen))
    shuffled = [lengths[index] for index in order]
    padded = sum(
        max(group) * len(group)
        for start in range(0, len(shuffled), _PADDED_BATCH)
        if (group := shuffled[start : start + _PADDED_BATCH])
    )
    return {
        "packs": float(packs),
        "packed": useful / (packs * config.pack_length) if packs else 0.0,
        "padded": sum(lengths) / padded if padded else 0.0,
    }


def _shares(config: DataConfig, reports: Sequence[SourceReport]) -> dict[str, tuple[float, float]]:
    mean = {one.name: one.tokens / one.documents if one.documents else 0.0 for one in reports}
    weights = {one.name: one.weight for one in reports}
    by_documents = weights if config.mix_by == "document" else {n: w / mean[n] for n, w in weights.items() if mean[n]}
    by_tokens = {name: by_documents.get(name, 0.0) * mean[name] for name in weights}
    documents, tokens = sum(by_documents.values()), sum(by_tokens.values())
    return {
        name: (
            by_documents.get(name, 0.0) / documents if documents else 0.0,
            by_tokens[name] / tokens if tokens else 0.0,
        )
        for name in weights
    }
