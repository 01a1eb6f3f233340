"""File formats as rows with places: every reader starts at a row in the middle and says where the next one lies.

format      suffixes                          a start in the middle
jsonl       .jsonl .json .ndjson (and .gz)    seeks to the byte; compressed: decompresses up to the row
parquet     .parquet                          opens the row group that holds the row
arrow       .arrow .feather .ipc              file format: the batch that holds the row; stream format: reads up to it
tar         .tar (and .tar.gz)                WebDataset's shards: members with one name up to the first dot are a row
"""

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from bestiary.training.data.errors import InvalidPlan, StorageFailed

Row = Mapping[str, Any]
PARQUET_ROWS = 64  # rows decoded at once
_LARGE_ROW = 1 << 14  # bytes
SUFFIXES = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".tar": "tar",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row starts: its number in the file, and a byte offset where the format can use one (else 0)."""

    row: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row that is not decoded yet.

    Attributes:
        place: of this row.   size: its bytes, about.
        decode: gives the row; ValueError where it is corrupt.
    """

    place: Place
    size: int
    decode: Callable[[], Row]


def format_of(path: str) -> str:
    """The format that a file's name tells.

    Raises:
        InvalidPlan: an unknown suffix.
    """
    name = path.removesuffix(".gz").lower()
    for suffix, found in SUFFIXES.items():
        if name.endswith(suffix):
            return found
    raise InvalidPlan(
        f"{path}: its suffix names no format.", remedy=f"give Source.format, one of {', '.join(sorted(READERS))}"
    )


def rows(raw: io.RawIOBase, path: str, format_name: str, start: Place, buffer: int) -> Iterator[RawRow]:
    """The rows of a file from `start` on.

    Args:
        raw: the file, seekable.   path: its name, which tells compression and stands in errors.
        buffer: bytes held of it, and the largest row of jsonl and tar.

    Raises:
        StorageFailed: the file cannot be read on, or a row is larger than the buffer.
    """
    try:
        yield from READERS[format_name](raw, path, start, buffer)
    except (EOFError, OSError, zlib.error, tarfile.TarError, pa.ArrowException) as error:
        raise StorageFailed(
            f"{path}: not readable as {format_name}: {type(error).__name__}: {error}.",
            remedy="a file that was cut off or is of another format; give Source.format where the suffix misleads",
        ) from error


def _opened(raw: io.RawIOBase, path: str, buffer: int) -> tuple[IO[bytes], bool]:
    """The file decompressed, and whether byte offsets are places in it."""
    buffered = io.BufferedReader(raw, min(buffer, 1 << 20))
    if path.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=buffered), False  # type: ignore[return-value]
    return buffered, True


def _jsonl(raw: io.RawIOBase, path: str, start: Place, buffer: int) -> Iterator[RawRow]:
    file, seekable = _opened(raw, path, buffer)
    row, offset = 0, 0
    if seekable and start.row:
        row, offset = start.row, start.offset
        file.seek(offset)
    while True:
        line = file.readline(buffer)
        if not line:
            return
        if len(line) == buffer and not line.endswith(b"\n"):
            raise StorageFailed(
                f"{path} row {row}: longer than {buffer} bytes.",
                remedy="raise Source.buffer_bytes; a file without line breaks is not JSON lines",
            )
        if row >= start.row:
            yield RawRow(Place(row, offset if seekable else 0), len(line), lambda text=line: _object(text))  # type: ignore[misc]
        row, offset = row + 1, offset + len(line)


def _object(text: bytes) -> Row:
    decoded = json.loads(text)
    if not isinstance(decoded, dict):
        raise ValueError(f"a JSON object is wanted, this is {type(decoded).__name__}")
    return decoded


def _parquet(raw: io.RawIOBase, path: str, start: Place, buffer: int) -> Iterator[RawRow]:
    # Without pre_buffer and with a buffer, column chunks are streamed and never held whole.
    # BufferedReader, since Arrow takes a short read for the end.
    file = pq.ParquetFile(io.BufferedReader(raw), buffer_size=min(buffer, 1 << 20), pre_buffer=False)
    row = 0
    for group in range(file.metadata.num_row_groups):
        length = file.metadata.row_group(group).num_rows
        if row + length <= start.row:
            row += length
            continue
        for batch in file.iter_batches(PARQUET_ROWS, row_groups=[group], use_threads=False):
            yield from _batch(batch, row, start)
            row += len(batch)


def _arrow(raw: io.RawIOBase, path: str, start: Place, buffer: int) -> Iterator[RawRow]:
    file = io.BufferedReader(raw, min(buffer, 1 << 20))
    row = 0
    if file.peek(6)[:6] == b"ARROW1":
        opened = pa.ipc.open_file(file)
        batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
    else:
        batches = iter(pa.ipc.open_stream(file))
    for batch in batches:
        if row + len(batch) > start.row:
            for first in range(0, len(batch), PARQUET_ROWS):
                yield from _batch(batch.slice(first, PARQUET_ROWS), row + first, start)
        row += len(batch)


def _batch(batch: pa.RecordBatch, first: int, start: Place) -> Iterator[RawRow]:
    if first + len(batch) <= start.row:
        return
    size = batch.nbytes // max(len(batch), 1)
    if size > _LARGE_ROW:  # Python's numbers take several times as much: a row at a time
        for index in range(max(start.row - first, 0), len(batch)):
            yield RawRow(Place(first + index), size, partial(_only, batch.slice(index, 1)))
        return
    for index, row in enumerate(map(without_absent, batch.to_pylist()), first):
        if index >= start.row:
            yield RawRow(Place(index), size, lambda values=row: values)  # type: ignore[misc]


def _only(batch: pa.RecordBatch) -> Row:
    return without_absent(batch.to_pylist()[0])


def without_absent(row: Row) -> Row:
    """The row of a table with types; in lists of records (messages, tools) without fields that are null.

    Such a record has the fields of all rows together: a tool that one row describes would be a null in all the others,
    and an argument of one call a null in every other call, rendered and trained.
    """
    return {name: _without_nulls(value) if _lists_records(value) else value for name, value in row.items()}


def _lists_records(value: Any) -> bool:
    found = isinstance(value, list)
    while isinstance(value, list) and value:
        value = value[0]
    return found and isinstance(value, dict)


def _without_nulls(value: Any) -> Any:
    """A value without the fields of its structs, however deep, that are null."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _tar(raw: io.RawIOBase, path: str, start: Place, buffer: int) -> Iterator[RawRow]:
    file, seekable = _opened(raw, path, buffer)
    row, base = 0, 0
    if seekable and start.row:
        row, base = start.row, start.offset
        file.seek(base)
    key, place = "", Place()
    members: dict[str, bytes] = {}
    with tarfile.open(fileobj=file, mode="r|") as shard:
        for member in shard:
            if not member.isfile():
                continue
            folder, slash, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            if f"{folder}{slash}{stem}" != key or not members:
                if members and row >= start.row:
                    yield _sample(key, place, members)
                row += bool(members)
                key, members = f"{folder}{slash}{stem}", {}
                place = Place(row, base + member.offset if seekable else 0)
            if member.size + sum(len(content) for content in members.values()) > buffer:
                raise StorageFailed(
                    f"{path} row {row}: member {member.name} takes the row over {buffer} bytes.",
                    remedy="raise Source.buffer_bytes",
                )
            content = shard.extractfile(member)
            members[extension] = b"" if content is None else content.read()
            shard.members = []  # type: ignore[attr-defined]  # tarfile keeps every member it has seen
    if members and row >= start.row:
        yield _sample(key, place, members)


def _sample(key: str, place: Place, members: dict[str, bytes]) -> RawRow:
    return RawRow(place, sum(len(content) for content in members.values()), lambda: _decoded(key, members))


def _decoded(key: str, members: Mapping[str, bytes]) -> Row:
    row: dict[str, Any] = {"__key__": key}
    for extension, content in members.items():
        kind = extension.rpartition(".")[2]
        if kind == "json":
            row[extension] = json.loads(content)
        elif kind in {"txt", "text"}:
            row[extension] = content.decode()
        elif kind in {"cls", "index"}:
            row[extension] = int(content)
        else:
            row[extension] = content
    return row


READERS: dict[str, Callable[[io.RawIOBase, str, Place, int], Iterator[RawRow]]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "arrow": _arrow,
    "tar": _tar,
}
