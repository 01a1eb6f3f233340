"""One canonical stream: sources, mixture and packer, and a state that leads back to any pack of it."""

import math
from dataclasses import replace
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.training.data.errors import CorruptRow, InvalidPlan, StorageFailed
from bestiary.training.data.mixing import Mixer
from bestiary.training.data.packing import Candidate, Pack, Packer, assemble, fit
from bestiary.training.data.plan import ListedPlan
from bestiary.training.data.source import Cursor, Drawn, Reader, Source
from bestiary.training.data.tokens import IGNORED, Tokens

StreamState = dict[str, Any]
# What says that the row, not the program, is wrong; the last one of JSON that is nested too deeply to be read.
ROW_ERRORS = (BestiaryError, ValueError, TypeError, KeyError, RecursionError)
COUNTS = ("documents", "tokens", "loss_tokens", "corrupt", "left_out")


class Stream:
    """The packs of canonical stream `index`, one after the other.

    The state between two packs holds, for each source, the place of its oldest document that was drawn and not packed,
    the number of the next one, and which of those in between wait in the buffer. Loading reads that short stretch
    again and tokenizes what waited: a few bytes a document, no tensors, exact.

    Args:
        listed: plan and files.   index: of the stream.   state: of `state()`, or None for the start.

    Attributes:
        index: as given.   packs: given so far.
        ended: every source is over and every document packed; further packs are padding.
    """

    def __init__(self, listed: ListedPlan, index: int, state: StreamState | None = None) -> None:
        plan = listed.plan
        self._plan, self.index = plan, index
        self._sources = {source.name: source for source in plan.sources}
        self._readers = {
            name: Reader(
                source, listed.shards[name], seed=plan.seed, stream=index, streams=plan.streams, epochs=plan.epochs
            )
            for name, source in self._sources.items()
        }
        self._mixer = Mixer(plan.stages, plan.mix_by, seed=plan.seed, stream=index, streams=plan.streams)
        self._packer = Packer(plan.pack_length, plan.look_ahead, self._refill)
        self._active = set(self._sources)
        self._counts = {name: dict.fromkeys(COUNTS, 0) for name in self._sources}
        self._barren: dict[str, int] = {}  # source to the epoch since which it gave nothing
        self._draw = 0
        self.packs, self.ended = 0, False
        if state is not None:
            self._restore(state)

    def next(self) -> Pack:
        """The next pack; padding alone once the stream has ended.

        Raises:
            CorruptRow, OverflowRefused, StorageFailed; InvalidPlan, for one where a whole epoch gives nothing.
        """
        chosen = [] if self.ended else self._packer.next()
        self.ended = not chosen
        self.packs += 1
        for candidate in chosen:
            counts = self._counts[candidate.source]
            counts["documents"] += candidate.piece == 0
            counts["tokens"] += sum(map(len, candidate.parts))
            counts["loss_tokens"] += sum(int((part.labels[1:] != IGNORED).sum()) for part in candidate.parts)
        pack = assemble(chosen, self._plan.pack_length, self._plan.pad_id)
        return replace(pack, stream=self.index, number=self.packs - 1)

    def _refill(self) -> list[Candidate] | None:
        while self._active:
            name = self._mixer.choose(self._draw, self._active)
            if name is None:
                return None
            drawn = self._readers[name].next()
            if drawn is None:
                self._active.remove(name)
                continue
            found = self._candidates(name, drawn, self._draw, count=True)
            self._check_gives(name, drawn.cursor.epoch, found)
            self._mixer.charge(self._draw, self._active, name, sum(map(len, found)))
            self._draw += 1
            return found
        return None

    def _check_gives(self, name: str, epoch: int, found: list[Candidate]) -> None:
        """Refuse to read for ever where a whole epoch of a source gave nothing to pack."""
        if found:
            self._barren.pop(name, None)
        elif self._plan.epochs is None and epoch > self._barren.setdefault(name, epoch) + 1:
            counts = self._counts[name]
            raise InvalidPlan(
                f"source {name}: a whole epoch gave nothing to train ({counts['left_out']} documents left out: nothing "
                f"trained within pack_length = {self._plan.pack_length}, or equal sides of a pair; {counts['corrupt']} "
                "corrupt rows).",
                remedy="a larger data.pack_length; `bestiary data inspect` shows what of the data is trained",
            )

    def _candidates(self, name: str, drawn: Drawn, draw: int, *, count: bool) -> list[Candidate]:
        source, counts = self._sources[name], self._counts[name]
        parts = documents_of(source, drawn, self._plan.parts)
        if parts is None:
            counts["corrupt"] += count
            if counts["corrupt"] > source.max_corrupt:
                raise CorruptRow(
                    f"source {name}: more than {source.max_corrupt} corrupt rows in one stream.",
                    read_from=drawn.where,
                    remedy="repair the data, or raise Source.max_corrupt",
                )
            return []
        fitting = fit(parts, self._plan.pack_length, self._plan.overflow, drawn.where)
        counts["left_out"] += count and not fitting
        return [
            Candidate(draw, name, drawn.ordinal, drawn.cursor, piece, pieces) for piece, pieces in enumerate(fitting)
        ]

    # ------------------------------------------------------------------ state

    def state(self) -> StreamState:
        """What leads back here, as JSON values; see the class."""
        oldest: dict[str, Candidate] = {}
        for candidate in self._packer.buffer:
            held = oldest.get(candidate.source)
            if held is None or candidate.ordinal < held.ordinal:
                oldest[candidate.source] = candidate
        sources, pending = {}, {}
        for name, reader in self._readers.items():
            first = oldest.get(name)
            base = reader.ordinal if first is None else first.ordinal
            sources[name] = {
                "cursor": list(reader.cursor if first is None else first.cursor),
                "first": base,
                "next": reader.ordinal,
                "epoch": reader.cursor.epoch,
                **self._counts[name],
            }
            # Three small numbers a document: draws back from here, rows after the first, piece.
            pending[name] = [
                [self._draw - candidate.draw, candidate.ordinal - base, candidate.piece]
                for candidate in self._packer.buffer
                if candidate.source == name
            ]
        return {
            "packs": self.packs,
            "draw": self._draw,
            "ended": self.ended,
            "over": sorted(set(self._sources) - self._active),
            "credit": dict(self._mixer.credit),
            "sources": sources,
            "pending": pending,
        }

    def _restore(self, state: StreamState) -> None:
        self.packs, self._draw, self.ended = state["packs"], state["draw"], state["ended"]
        self._mixer.credit = {name: credit for name, credit in state["credit"].items() if name in self._sources}
        for name, held in state["sources"].items():
            if name not in self._sources:
                continue  # removed on purpose, or `check_same` had refused
            self._counts[name] = {count: held[count] for count in COUNTS}
            self._readers[name].seek(Cursor(*held["cursor"]), held["first"])
            self._packer.buffer += self._waiting(name, held["next"], state["pending"][name])
        self._packer.buffer.sort(key=lambda candidate: (candidate.draw, candidate.piece))
        self._active -= set(state["over"])
        if set(self._sources) - set(state["sources"]):
            self.ended = False

    def _waiting(self, name: str, following: int, pending: list[list[int]]) -> list[Candidate]:
        """Read from the oldest waiting row to the next new one; tokenize those that wait."""
        reader, found = self._readers[name], []
        base = reader.ordinal
        pieces: dict[int, dict[int, int]] = {}
        for back, ordinal, piece in pending:
            pieces.setdefault(base + ordinal, {})[piece] = self._draw - back
        while reader.ordinal < following:
            drawn = reader.next()
            if drawn is None:
                break
            wanted = pieces.get(drawn.ordinal)
            if wanted:
                draw = next(iter(wanted.values()))
                found += [c for c in self._candidates(name, drawn, draw, count=False) if c.piece in wanted]
        return found


def documents_of(source: Source, drawn: Drawn, parts: int) -> tuple[Tokens, ...] | None:
    """The documents of a row; None where it is corrupt and may be skipped.

    Args:
        parts: documents that a row becomes.
    Raises:
        CorruptRow: it may not.   InvalidPlan: another number of them.
    """
    try:
        encoded = source.encode(drawn.raw.decode())
        found = (encoded,) if isinstance(encoded, Tokens) else tuple(encoded)
        for one in found:
            _check(one)
    except (StorageFailed, InvalidPlan):
        raise
    except ROW_ERRORS as error:
        if source.on_corrupt == "skip":
            return None
        why = error.what if isinstance(error, BestiaryError) else f"{type(error).__name__}: {error}"
        raise CorruptRow(
            f"source {source.name}: {why}",
            read_from=drawn.where,
            remedy="repair the row, or Source(on_corrupt='skip')",
        ) from error
    if len(found) != parts:
        raise InvalidPlan(
            f"source {source.name}: encode gave {len(found)} documents, plan.parts = {parts}.",
            read_from=drawn.where,
            remedy="2 for preference pairs, 1 for everything else",
        )
    return found


def _check(part: Tokens) -> None:
    ids, labels = part.input_ids, part.labels
    if ids.ndim != 1 or ids.shape != labels.shape:
        raise ValueError(f"input_ids {ids.shape} and labels {labels.shape} are not two equally long rows")
    if not ((labels == ids) | (labels == IGNORED)).all():
        raise ValueError("a label is neither its own token nor -100; labels are not shifted here")
    if part.teacher is not None and (len(part.teacher) != len(ids) or part.teacher.words.ndim != 2):
        raise ValueError(f"teacher has rows {part.teacher.words.shape} for {len(ids)} tokens")
    if part.value is not None and not math.isfinite(part.value):
        raise ValueError(f"value = {part.value}, expected a finite number or none")
