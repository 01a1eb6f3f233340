"""First-fit packing with a look-ahead: the oldest document opens a pack, the first that fit fill it.

A document therefore waits for at most as many packs as there are documents before it in the buffer, and a pack is left
with a gap only if none of `look_ahead` documents fits in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bestiary.training.data.errors import InvalidPlan, OverflowRefused
from bestiary.training.data.source import Cursor
from bestiary.training.data.tokens import IGNORED, TeacherWords, Tokens

Overflow = Literal["error", "truncate", "split", "drop"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A document, a piece of one, or the documents of a pair, that go into one pack together.

    Attributes:
        draw: of the mixture.   source: its name.   ordinal, cursor: where its row is.
        piece: number of the piece of a split document.
        parts: one document, or two for a pair.
    """

    draw: int
    source: str
    ordinal: int
    cursor: Cursor
    piece: int
    parts: tuple[Tokens, ...]

    def __len__(self) -> int:
        return sum(part.places for part in self.parts)


@dataclass(frozen=True, slots=True)
class Pack:
    """A row of fixed length.

    Attributes:
        input_ids, labels: (T,) int32. Labels are not shifted; the first of every document is `IGNORED`, so that no loss
            crosses a border in a trainer that shifts without looking.
        borders: (documents + 1,) int32, with the padding as one more document where there is any.
        documents: without the padding.
        values: (documents,) float32, the number each document carries, NaN for one without; None where all are without.
        teacher: (T, k), a teacher's words for the tokens with a label, not shifted; None where no document has any.
        stream, number: its canonical stream, and its place in that: no two packs of a run have both.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    borders: NDArray[np.int32]
    documents: int
    values: NDArray[np.float32] | None = None
    teacher: TeacherWords | None = None
    stream: int = 0
    number: int = 0

    @property
    def slots(self) -> int:
        """Tokens that are computed, padding included."""
        return len(self.input_ids)

    @property
    def repeated(self) -> tuple[int, ...]:
        """Lengths of beginnings that documents share, each as often as it is not computed again."""
        return ()

    @property
    def useful_tokens(self) -> int:
        """All but padding."""
        return int(self.borders[self.documents])

    @property
    def loss_tokens(self) -> int:
        """Those with a label."""
        return int((self.labels != IGNORED).sum())


def assemble(chosen: Sequence[Candidate], pack_length: int, pad_id: int) -> Pack:
    """The pack of some documents, in order; of none, a pack of padding alone."""
    parts = [part for candidate in chosen for part in candidate.parts]
    ids = np.full(pack_length, pad_id, np.int32)
    labels = np.full(pack_length, IGNORED, np.int32)
    borders = [0]
    for part in parts:
        start, end = borders[-1], borders[-1] + len(part)
        ids[start:end] = part.input_ids
        labels[start + 1 : end] = part.labels[1:]
        borders.append(end)
    if borders[-1] < pack_length:
        borders.append(pack_length)
    values = None
    if any(part.value is not None for part in parts):
        values = np.array([np.nan if part.value is None else part.value for part in parts], np.float32)
    return Pack(ids, labels, np.array(borders, np.int32), len(parts), values, _taught(parts, borders, pack_length))


def _taught(parts: Sequence[Tokens], borders: Sequence[int], pack_length: int) -> TeacherWords | None:
    """The teacher's words of all documents; as for labels, none for the first token of each."""
    known = [part.teacher for part in parts if part.teacher is not None]
    if not known:
        return None
    width = max(one.words.shape[1] for one in known)
    made = TeacherWords.none(pack_length, width, np.result_type(*(one.log_probs for one in known)))
    for part, start in zip(parts, borders, strict=False):
        if part.teacher is not None:
            place = slice(start + 1, start + len(part)), slice(part.teacher.words.shape[1])
            made.words[place], made.log_probs[place] = part.teacher.words[1:], part.teacher.log_probs[1:]
    return made


class Packer:
    """The buffer of one stream and its packs.

    Args:
        refill: gives the candidates of one more draw, none of them longer than a pack, or None at the end.

    Attributes:
        buffer: what was drawn and not packed, oldest first.
    """

    def __init__(self, pack_length: int, look_ahead: int, refill: Callable[[], list[Candidate] | None]) -> None:
        self._length, self._look_ahead, self._refill = pack_length, look_ahead, refill
        self.buffer: list[Candidate] = []

    def next(self) -> list[Candidate]:
        """The documents of the next pack, oldest first; none when the stream is over."""
        room, looked_at = self._length, 0
        chosen: list[Candidate] = []
        while room:
            if looked_at == len(self.buffer):
                if looked_at >= self._look_ahead:
                    break
                drawn = self._refill()
                if drawn is None:
                    break
                self.buffer += drawn
                continue
            if len(self.buffer[looked_at]) <= room:
                room -= len(self.buffer[looked_at])
                chosen.append(self.buffer.pop(looked_at))
            else:
                looked_at += 1
        return chosen


def fit(parts: tuple[Tokens, ...], length: int, overflow: Overflow, where: str) -> list[tuple[Tokens, ...]]:
    """What becomes of a document: itself, its pieces, or nothing.

    Args:
        parts: one document, or those of a pair.   length: of a pack.   where: for the error.

    Returns:
        Pieces that fit. Without a trained token a piece is left out, since it would only cost time: under `truncate`
        that is a prompt which leaves no room for its answer; so is a pair whose sides are equal after the cut.

    Raises:
        OverflowRefused: under `error`.   InvalidPlan: a pair under `split`.
    """
    total, least = sum(part.places for part in parts), max(part.least for part in parts)
    if total <= length:
        return [parts] if total else []
    if overflow == "error":
        answered = " with the answer that is to be sampled" if total == least else ""
        raise OverflowRefused(
            f"{where}: {total} tokens{answered}, a pack holds {length}.",
            remedy="a larger pack_length, or overflow = 'truncate', 'split' or 'drop'",
        )
    if overflow == "drop" or least > length:  # a prompt that is cut asks something else
        return []
    if overflow == "truncate":
        # Each part of a pair keeps what it can: an even share, and what shorter parts leave of theirs.
        room, cut = length, [parts[0]] * len(parts)
        for done, index in enumerate(sorted(range(len(parts)), key=lambda place: len(parts[place]))):
            cut[index] = _slice(parts[index], 0, room // (len(parts) - done))
            room -= len(cut[index])
        if len(cut) > 1 and all(np.array_equal(cut[0].input_ids, part.input_ids) for part in cut[1:]):
            return []  # what sets the answers apart was cut off
        return [tuple(cut)] if all(_trains(part) for part in cut) else []
    if len(parts) > 1:
        raise InvalidPlan(
            f"{where}: overflow = 'split' and {len(parts)} documents that belong together.",
            remedy="overflow = 'truncate' or 'drop'",
        )
    pieces = [_slice(parts[0], start, start + length) for start in range(0, total, length)]
    return [(piece,) for piece in pieces if _trains(piece)]


def _slice(tokens: Tokens, start: int, end: int) -> Tokens:
    teacher = None if tokens.teacher is None else tokens.teacher.part(start, end)
    return replace(tokens, input_ids=tokens.input_ids[start:end], labels=tokens.labels[start:end], teacher=teacher)


def _trains(tokens: Tokens) -> bool:
    return bool((tokens.labels[1:] != IGNORED).any())
