"""Every format can be read from any row on, in bounded blocks, through failures of its storage."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bestiary.training.data.encoded import encoded
from bestiary.training.data.errors import InvalidPlan, StorageFailed
from bestiary.training.data.formats import Place, format_of
from bestiary.training.data.hub import HubRows
from bestiary.training.data.source import Source
from bestiary.training.data.storage import FileEntry, ResumingFile, Retry, expand

COUNT = 150  # more than one batch of decoded rows
ROWS = [{"id": row, "text": "é" * (row % 7), "input_ids": [1 + row] * 3} for row in range(COUNT)]
QUICK = Retry(attempts=3, first_wait_s=0.0)


def jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")


def jsonl_gz(path: Path) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode(), mtime=0))


def parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=70)


def arrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)


def arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)


def tar(path: Path) -> None:
    """As WebDataset writes them: two members a row, one name longer than a plain header holds, a folder between."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as shard:
        for row in ROWS:
            stem = f"{'long/' * 30 if row['id'] == 5 else 'a/'}{row['id']:04d}"
            folder = tarfile.TarInfo("a")
            folder.type = tarfile.DIRTYPE
            shard.addfile(folder)
            for extension, content in (
                ("json", json.dumps(row)),
                ("caption.txt", row["text"]),
                ("cls", str(row["id"])),
            ):
                data = content.encode()
                member = tarfile.TarInfo(f"{stem}.{extension}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))


WRITERS: dict[str, Callable[[Path], None]] = {
    "rows.jsonl": jsonl,
    "rows.jsonl.gz": jsonl_gz,
    "rows.parquet": parquet,
    "rows.arrow": arrow,
    "stream.arrow": arrow_stream,
    "rows.tar": tar,
    "rows.tar.gz": tar,
}


@pytest.mark.parametrize("name", WRITERS)
def test_reading_starts_at_any_row(tmp_path: Path, name: str) -> None:
    """With the place that the reader itself had told, and gives the same rows as from the start."""
    WRITERS[name](tmp_path / name)
    source = Source(name="a", files=str(tmp_path / name), encode=encoded, buffer_bytes=4096)
    (entry,) = source.shards()
    whole = [(raw.place, raw.decode()) for raw in source.open(entry, Place())]
    assert [place.row for place, _ in whole] == list(range(COUNT))
    found = [row.get("json", row) for _, row in whole]
    assert found == ROWS
    for start in (0, 1, 5, 6, 69, 70, 71, 149):
        assert [(raw.place, raw.decode()) for raw in source.open(entry, whole[start][0])] == whole[start:], start


@pytest.mark.parametrize("large", [False, True])
def test_fields_that_only_other_rows_have_are_none_of_a_row(tmp_path: Path, large: bool) -> None:
    """A struct of Arrow has the fields of all rows: arguments of other calls, properties of other tools."""
    calls = [{"city": "Paris"}, {"query": "x" * 20_000 * large, "most": {"rows": 3}}]
    found = [
        {"said": [{"role": "assistant", "calls": [{"arguments": call}]}], "extra": dict.fromkeys(call, 1), "id": None}
        for call in calls
    ]
    pq.write_table(pa.Table.from_pylist(found), tmp_path / "rows.parquet")
    source = Source(name="a", files=str(tmp_path / "rows.parquet"), encode=encoded)
    read = [raw.decode() for raw in source.open(source.shards()[0], Place())]
    assert [row["said"] for row in read] == [row["said"] for row in found]
    assert read[0]["extra"] == {"city": 1, "query": None, "most": None}  # no list: a column as any other
    assert read[0]["id"] is None


def test_members_of_a_shard_are_decoded_by_suffix(tmp_path: Path) -> None:
    tar(tmp_path / "rows.tar")
    source = Source(name="a", files=str(tmp_path / "rows.tar"), encode=encoded)
    row = next(source.open(source.shards()[0], Place())).decode()
    assert row == {"__key__": "a/0000", "json": ROWS[0], "caption.txt": "", "cls": 0}


def test_a_streamed_data_set_of_hugging_face_is_a_source(tmp_path: Path) -> None:
    """Shard by shard, from any row on; identified by its files."""
    for index in range(2):
        pq.write_table(pa.Table.from_pylist(ROWS[index * 75 : (index + 1) * 75]), tmp_path / f"{index}.parquet")
    files = HubRows(
        "parquet", arguments={"data_files": str(tmp_path / "*.parquet"), "cache_dir": str(tmp_path / "cache")}
    )
    source = Source(name="a", files=files, encode=encoded)
    first, second = source.shards()
    assert [raw.decode()["id"] for raw in source.open(first, Place())] == list(range(75))
    assert [(raw.place.row, raw.decode()) for raw in source.open(second, Place(70))] == list(enumerate(ROWS[145:], 70))
    before = first.identity
    pq.write_table(pa.Table.from_pylist(ROWS[:74]), tmp_path / "0.parquet")
    assert source.shards()[0].identity != before


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ("missing*.jsonl", "no file matches"),
        ("rows.bin", "suffix names no format"),
        (["a.jsonl", "*.jsonl"], "named twice"),
    ],
)
def test_files_that_make_no_source_are_refused(tmp_path: Path, files: Any, named: str) -> None:
    for name in ("rows.bin", "a.jsonl"):
        (tmp_path / name).write_text("{}\n")
    patterns = [str(tmp_path / name) for name in ([files] if isinstance(files, str) else files)]
    with pytest.raises(InvalidPlan, match=named):
        Source(name="a", files=patterns, encode=encoded).shards()


def test_formats_are_told_by_suffix() -> None:
    assert format_of("s3://bucket/a.JSONL.gz") == "jsonl"


def test_a_row_larger_than_the_buffer_is_an_error(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl")
    source = Source(name="a", files=str(tmp_path / "rows.jsonl"), encode=encoded, buffer_bytes=20)
    with pytest.raises(StorageFailed, match="row 0: longer than 20 bytes"):
        next(source.open(source.shards()[0], Place()))


# ---------------------------------------------------------------------- flaky storage


class Flaky(MemoryFileSystem):
    """Every read fails as often as told, then works; some end early."""

    protocol = "flaky"
    cachable = False
    failures = 0
    early = 0
    opened = 0
    largest = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("flaky://").strip("/")

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            return super().open(path, mode, **kwargs)
        type(self).opened += 1
        data, outer = super().open(path, mode).read(), type(self)

        class File(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                outer.largest = max(outer.largest, size or 0)
                if outer.failures:
                    outer.failures -= 1
                    raise ConnectionError("reset by peer")
                if outer.early:
                    outer.early -= 1
                    return b""
                return super().read(size)

        return File(data)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture
def entry() -> FileEntry:
    Flaky.failures = Flaky.early = Flaky.opened = Flaky.largest = 0
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    with MemoryFileSystem().open("/rows.jsonl", "wb") as file:
        file.write(data)
    return FileEntry("flaky:///rows.jsonl", len(data), "")


def test_reading_goes_on_where_it_failed(entry: FileEntry) -> None:
    """Also in the middle of a file, and where the store ends a stream early without an error."""
    with ResumingFile(entry, {}, QUICK, block=512) as file:
        got = b""
        while True:
            Flaky.failures, Flaky.early = len(got) % 2, len(got) % 3 == 1
            block = file.read(100)
            if not block:
                break
            got += block
            assert block
    assert got == MemoryFileSystem().cat("/rows.jsonl")
    assert Flaky.opened > 2
    assert Flaky.largest <= 512


def test_a_storage_that_stays_down_is_an_error_with_the_place(entry: FileEntry) -> None:
    with ResumingFile(entry, {}, QUICK, block=512) as file:
        file.read(300)
        Flaky.failures = 99
        with pytest.raises(StorageFailed, match=r"rows\.jsonl at byte 300: ConnectionError: reset by peer, 3 times"):
            file.read(10)


def test_a_file_that_is_not_there_is_not_tried_again(tmp_path: Path) -> None:
    waits: list[float] = []
    with pytest.raises(StorageFailed, match="FileNotFoundError"):
        expand([str(tmp_path / "gone.jsonl")], {}, Retry(attempts=9, first_wait_s=60.0))
    assert waits == []


def test_waits_double_up_to_a_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("bestiary.training.data.storage.time.sleep", waits.append)

    def fail() -> None:
        raise TimeoutError("slow")

    with pytest.raises(StorageFailed, match="5 times"):
        Retry(attempts=5, first_wait_s=1.0, longest_wait_s=3.0)(fail, "x")
    assert waits == [1.0, 2.0, 3.0, 3.0]


def test_a_local_file_is_identified_by_its_content(tmp_path: Path) -> None:
    """Not by its time: a copy is the same data, an edit of equal size is not."""
    found = []
    for name, text in (("a", "1234"), ("b", "1234"), ("c", "1235")):
        (tmp_path / name).write_text(text)
        found.append(expand([str(tmp_path / name)], {}, QUICK)[0].identity)
    assert found[0] == found[1] != found[2]


def test_one_row_is_read_at_a_time(entry: FileEntry) -> None:
    """Ten rows of a long file do not fetch it."""
    source = Source(name="a", files="flaky:///rows.jsonl", encode=encoded, buffer_bytes=256)
    list(islice(source.open(entry, Place()), 10))
    assert Flaky.largest <= 256
