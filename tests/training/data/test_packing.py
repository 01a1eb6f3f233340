"""Packs hold every document once, whole, and within its bounds."""

import weakref
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestiary.training.data.batch import document_values
from bestiary.training.data.encoded import encoded
from bestiary.training.data.errors import InvalidPlan, OverflowRefused, SampleRefused
from bestiary.training.data.formats import Row
from bestiary.training.data.packing import Candidate, Overflow, Packer, assemble, fit
from bestiary.training.data.plan import Plan
from bestiary.training.data.source import Cursor, Source
from bestiary.training.data.stream import Stream
from bestiary.training.data.tokens import IGNORED, TeacherWords, Tokens

from .rows import lengths, rows_of, write

LENGTH = 16


def tokens(length: int, value: int = 1, prompt: int = 0) -> Tokens:
    ids = np.full(length, value, np.int32)
    labels = ids.copy()
    labels[:prompt] = IGNORED
    return Tokens(ids, labels)


def packed(lengths: list[int], look_ahead: int, parts: int = 1) -> list[list[Candidate]]:
    """Documents 1, 2, … of these lengths; with two parts, a pair of each half."""
    candidates = [
        Candidate(row, "a", row, Cursor(), 0, tuple(tokens(length, row + 1) for _ in range(parts)))
        for row, length in enumerate(lengths)
    ]
    waiting = iter(candidates)
    packer = Packer(LENGTH, look_ahead, lambda: next(([one] for one in waiting), None))
    packs = []
    while chosen := packer.next():
        packs.append(chosen)
        assert len(packer.buffer) <= look_ahead
    return packs


@given(lengths=st.lists(st.integers(1, LENGTH), max_size=40), look_ahead=st.integers(1, 8))
def test_every_document_is_in_one_pack(lengths: list[int], look_ahead: int) -> None:
    packs = packed(lengths, look_ahead)
    assert sorted(one.draw for chosen in packs for one in chosen) == list(range(len(lengths)))
    assert all(sum(map(len, chosen)) <= LENGTH for chosen in packs)


@given(lengths=st.lists(st.integers(1, LENGTH), max_size=40), look_ahead=st.integers(1, 8))
def test_the_oldest_document_opens_the_next_pack(lengths: list[int], look_ahead: int) -> None:
    """So none waits forever, as under a rule that takes the largest that fits."""
    gone: set[int] = set()
    for chosen in packed(lengths, look_ahead):
        assert chosen[0].draw == min(set(range(len(lengths))) - gone)
        gone |= {one.draw for one in chosen}


@given(lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=40))
def test_a_gap_is_left_only_where_nothing_in_sight_fits(lengths: list[int]) -> None:
    packs = packed(lengths, look_ahead=5)
    left = list(range(len(lengths)))
    for chosen in packs:
        for one in chosen:
            left.remove(one.draw)
        room = LENGTH - sum(map(len, chosen))
        assert all(lengths[draw] > room for draw in left[:5])


@given(lengths=st.lists(st.integers(1, LENGTH), max_size=8).filter(lambda found: sum(found) <= LENGTH))
def test_a_pack_is_its_documents_and_padding(lengths: list[int]) -> None:
    """Lengths of ids, labels and borders agree; no label at a border; the padding is one document without labels."""
    chosen = [Candidate(i, "a", i, Cursor(), 0, (tokens(n, i + 1),)) for i, n in enumerate(lengths)]
    pack = assemble(chosen, LENGTH, pad_id=7)
    assert pack.input_ids.shape == pack.labels.shape == (LENGTH,)
    assert np.diff(pack.borders).tolist() == lengths + [LENGTH - sum(lengths)] * (sum(lengths) < LENGTH)
    assert pack.documents == len(lengths)
    assert pack.useful_tokens == sum(lengths)
    assert pack.loss_tokens == sum(lengths) - len(lengths)
    assert (pack.labels[pack.borders[:-1]] == IGNORED).all()
    assert (pack.labels[sum(lengths) :] == IGNORED).all()
    assert (pack.input_ids[sum(lengths) :] == 7).all()


@given(lengths=st.lists(st.integers(1, LENGTH // 2), max_size=20))
def test_pairs_stay_together(lengths: list[int]) -> None:
    for chosen in packed(lengths, look_ahead=4, parts=2):
        pack = assemble(chosen, LENGTH, pad_id=0)
        firsts = pack.input_ids[pack.borders[: pack.documents]]
        assert (firsts[0::2] == firsts[1::2]).all()


@given(length=st.integers(1, 80), overflow=st.sampled_from(get_args(Overflow)), prompt=st.integers(0, 80))
def test_overflow_does_what_its_name_says(length: int, overflow: Overflow, prompt: int) -> None:
    """No piece is too long or trains nothing; `split` loses untrained tokens only, the others what they say."""
    whole = tokens(length, prompt=min(prompt, length))
    if length > LENGTH and overflow == "error":
        with pytest.raises(OverflowRefused, match=f"row 3: {length} tokens, a pack holds {LENGTH}"):
            fit((whole,), LENGTH, overflow, "row 3")
        return
    pieces = [piece for (piece,) in fit((whole,), LENGTH, overflow, "row 3")]
    assert all(len(piece) <= LENGTH for piece in pieces)
    if length <= LENGTH:
        assert pieces == [whole]
        return
    assert all((piece.labels[1:] != IGNORED).any() for piece in pieces)
    if overflow == "drop":
        assert pieces == []
    elif overflow == "truncate":
        assert [len(piece) for piece in pieces] == [LENGTH] * (prompt < LENGTH)
    else:
        # A last piece of a single token has nothing before it that could predict it.
        trained = sum(int((piece.labels != IGNORED).sum()) for piece in pieces)
        assert length - min(prompt, length) - trained <= (length % LENGTH == 1) + (prompt % LENGTH == LENGTH - 1)


def test_a_truncated_pair_keeps_both_sides() -> None:
    """The longer side is cut first; without a trained token left the pair is dropped."""
    ((chosen, rejected),) = fit((tokens(20), tokens(5)), LENGTH, "truncate", "row 3")
    assert (len(chosen), len(rejected)) == (11, 5)
    assert fit((tokens(20, prompt=12), tokens(5)), LENGTH, "truncate", "row 3") == []
    with pytest.raises(InvalidPlan, match="documents that belong together"):
        fit((tokens(20), tokens(5)), LENGTH, "split", "row 3")


def test_a_stream_holds_no_more_documents_than_it_looks_through(tmp_path: Path) -> None:
    """However many have passed: those that wait and the rows of one block."""
    live: set[int] = set()
    most = []

    def watched(row: Row) -> Tokens:
        made = encoded(row)
        live.add(id(made.input_ids))
        weakref.finalize(made.input_ids, live.discard, id(made.input_ids))
        most.append(len(live))
        return made

    file = write(tmp_path / "rows.jsonl", rows_of(lengths(400, 1, 16)))
    plan = Plan(
        sources=(Source(name="a", files=file, encode=watched),), pack_length=16, pad_id=0, look_ahead=8, epochs=None
    )
    stream = Stream(plan.listed(), 0)
    for _ in range(600):
        stream.next()
    assert len(most) > 1000
    assert max(most) <= 8 + 16  # waiting, and at least one token each in the pack that is being filled


@given(
    sizes=st.lists(st.integers(2, 3 * LENGTH), min_size=1, max_size=8),
    overflow=st.sampled_from(["truncate", "split", "drop"]),
    seed=st.integers(0, 99),
)
def test_a_teacher_s_words_stay_beside_their_tokens(sizes: list[int], overflow: Overflow, seed: int) -> None:
    """Whole, cut or in pieces, with as many words a token as each document has: the first is the token itself."""
    random = np.random.default_rng(seed)
    chosen = []
    for size in sizes:
        ids = random.integers(0, 1000, size).astype(np.int32)
        labels = np.where(random.random(size) < 0.7, ids, np.int32(IGNORED)).astype(np.int32)
        words = np.full((size, 1 + size % 3), -1, np.int32)
        words[:, 0] = labels.clip(-1)
        one = Tokens(ids, labels, teacher=TeacherWords(words, -np.ones(words.shape, np.float32)))
        chosen += [Candidate(0, "a", 0, Cursor(), 0, piece) for piece in fit((one,), LENGTH, overflow, "row")]
    pack = assemble(chosen, sum(map(len, chosen)) + 3, 0)
    if not chosen:
        assert pack.teacher is None
        return
    assert pack.teacher is not None
    assert (pack.teacher.words[:, 0] == pack.labels.clip(-1)).all()


@pytest.mark.parametrize("overflow", ["truncate", "split"])
def test_a_document_keeps_its_number_in_the_pack(overflow: Overflow) -> None:
    """Whole, cut or in pieces; a document without one shows that it has none."""
    ids = np.arange(1, 41, dtype=np.int32)
    made = [Tokens(ids[:5], ids[:5], 0.25), Tokens(ids[:3], ids[:3]), Tokens(ids, ids, -3.0)]
    pieces = [piece for one in made for piece in fit((one,), LENGTH, overflow, "row")]
    chosen = [Candidate(place, "a", place, Cursor(), 0, piece) for place, piece in enumerate(pieces)]
    pack = assemble(chosen, 64, 0)
    assert pack.values is not None
    assert np.array_equal(pack.values, [0.25, np.nan] + [-3.0] * (pack.documents - 2), equal_nan=True)
    with pytest.raises(SampleRefused, match="document 1 of"):
        document_values(pack)
    assert document_values(assemble(chosen[2:], 64, 0)).tolist() == [-3.0] * (pack.documents - 2)
    assert assemble(chosen[1:2], 64, 0).values is None
