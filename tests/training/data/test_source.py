"""Rows come in an order that can be entered anywhere, each of them once an epoch."""

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestiary.training.data.encoded import encoded
from bestiary.training.data.errors import CorruptRow, InvalidPlan, StorageFailed
from bestiary.training.data.plan import Plan
from bestiary.training.data.source import Cursor, Reader, Source
from bestiary.training.data.stream import Stream

from .rows import lengths, rows_of, write


def reader(source: Source, stream: int = 0, streams: int = 1, epochs: int | None = None, seed: int = 0) -> Reader:
    return Reader(source, source.shards(), seed=seed, stream=stream, streams=streams, epochs=epochs)


def ids(found: Reader, count: int | None = None) -> list[int]:
    return [drawn.raw.decode()["id"] for drawn in islice(iter(found.next, None), count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four files, one of them empty, 26 rows."""
    folder, first = tmp_path_factory.mktemp("files"), 0
    written = []
    for index, count in enumerate((9, 0, 4, 13)):
        written.append(write(folder / f"{index}.jsonl", rows_of([2] * count, first)))
        first += count
    return written


@pytest.mark.slow
@given(streams=st.integers(1, 7), block=st.integers(1, 9), shuffle=st.booleans(), seed=st.integers(0, 3))
def test_every_row_comes_once_an_epoch(files: list[str], streams: int, block: int, shuffle: bool, seed: int) -> None:
    """Divided by file (up to four streams) and by row."""
    source = Source(name="a", files=files, encode=encoded, block_rows=block, shuffle=shuffle)
    for epochs in (1, 3):
        found = [ids(reader(source, stream, streams, epochs, seed)) for stream in range(streams)]
        assert sorted(row for part in found for row in part) == sorted(list(range(26)) * epochs)
    if not shuffle and streams == 1:
        assert found[0] == list(range(26)) * 3


@given(streams=st.sampled_from([1, 3, 6]), block=st.integers(1, 9), start=st.integers(0, 60))
def test_a_cursor_leads_back(files: list[str], streams: int, block: int, start: int) -> None:
    """From every row of several epochs, and the numbers go on."""
    source = Source(name="a", files=files, encode=encoded, block_rows=block)
    first = reader(source, streams - 1, streams, epochs=3)
    ids(first, start)
    second = reader(source, streams - 1, streams, epochs=3)
    second.seek(first.cursor, first.ordinal)
    left = list(iter(first.next, None))
    again = list(iter(second.next, None))
    assert [(d.ordinal, d.cursor, d.where) for d in left] == [(d.ordinal, d.cursor, d.where) for d in again]


def test_epochs_and_sources_are_shuffled_differently(files: list[str]) -> None:
    first, second, third = (
        ids(reader(Source(name=name, files=files, encode=encoded), seed=seed, epochs=2))
        for name, seed in (("a", 0), ("b", 0), ("a", 1))
    )
    assert len({tuple(order) for order in (first[:26], first[26:], second[:26], third[:26])}) == 4


def test_a_block_ends_at_its_bytes(files: list[str]) -> None:
    """One row fills it here, so rows stay as they lie within a file."""
    source = Source(name="a", files=files[3:], encode=encoded, buffer_bytes=34)
    assert ids(reader(source, epochs=1)) == list(range(13, 26))


def test_a_stream_without_rows_is_an_error_where_there_is_no_end(files: list[str]) -> None:
    source = Source(name="a", files=files[1:2], encode=encoded)
    assert ids(reader(source, epochs=2)) == []
    with pytest.raises(InvalidPlan, match="source a: epoch 0 has no row for stream 0 of 1"):
        reader(source).next()


def test_a_second_epoch_starts_at_its_start(files: list[str]) -> None:
    """At the end of an epoch the cursor stands at the next, so that a resume there neither repeats nor skips."""
    found = reader(Source(name="a", files=files, encode=encoded))
    ids(found, 26)
    assert found.cursor in {Cursor(epoch=1), found.cursor._replace(epoch=0)}
    again = reader(Source(name="a", files=files, encode=encoded))
    again.seek(found.cursor, found.ordinal)
    assert sorted(ids(again, 26)) == list(range(26))


# ---------------------------------------------------------------------- corrupt rows


def corrupt_plan(folder: Path, bad: str, **changes: object) -> Plan:
    lines = [json.dumps(row) for row in rows_of(lengths(12, 0, 9))]
    path = folder / "rows.jsonl"
    path.write_text("\n".join([*lines[:7], bad, *lines[7:], bad]) + "\n")
    source = Source(name="web", files=str(path), encode=encoded, shuffle=False, **changes)  # type: ignore[arg-type]
    return Plan(sources=(source,), pack_length=16, pad_id=0, epochs=1)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('{"input_ids": [1, 2', "JSONDecodeError"),
        ('{"input_ids": ' + "[" * 5000 + "]" * 5000 + "}", "RecursionError"),
        ("[1, 2]", "a JSON object is wanted, this is list"),
        ('{"text": "no ids"}', "KeyError: 'input_ids'"),
        ('{"input_ids": [5, 6], "labels": [6, -100]}', "labels are not shifted here"),
        ('{"input_ids": [5, 6], "labels": [5]}', "not two equally long rows"),
    ],
)
def test_a_corrupt_row_is_named(tmp_path: Path, bad: str, why: str) -> None:
    with pytest.raises(CorruptRow, match="source web: ") as caught:
        drain(corrupt_plan(tmp_path, bad))
    assert why in caught.value.what
    assert str(caught.value.read_from).endswith("rows.jsonl row 7")


def test_corrupt_rows_are_skipped_and_counted_up_to_a_ceiling(tmp_path: Path) -> None:
    counts = drain(corrupt_plan(tmp_path, "{", on_corrupt="skip"))
    assert (counts["documents"], counts["corrupt"]) == (12, 2)
    with pytest.raises(CorruptRow, match="more than 1 corrupt rows") as caught:
        drain(corrupt_plan(tmp_path, "{", on_corrupt="skip", max_corrupt=1))
    assert str(caught.value.read_from).endswith("rows.jsonl row 13")


def drain(plan: Plan) -> dict[str, int]:
    stream = Stream(plan.listed(), 0)
    while not stream.ended:
        stream.next()
    return stream.state()["sources"]["web"]


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl.gz", rows_of([3] * 500))
    Path(path).write_bytes(Path(path).read_bytes()[:-40])
    with pytest.raises(StorageFailed, match=r"rows\.jsonl\.gz: not readable as jsonl"):
        ids(reader(Source(name="a", files=path, encode=encoded), epochs=1))
