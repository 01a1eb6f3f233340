"""A source: files in an order that is a function of (seed, name, epoch), read from any place of that order.

The rows of an epoch are divided among the canonical streams, by whole files where there are enough and by row numbers
otherwise. A stream's files are permuted every epoch, and their rows within blocks; a block is what is held in memory.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bestiary.training.data.errors import InvalidPlan
from bestiary.training.data.formats import Place, RawRow, Row, format_of, rows
from bestiary.training.data.hub import HubRows
from bestiary.training.data.randomness import permutation
from bestiary.training.data.storage import DEFAULT_RETRY, FileEntry, ResumingFile, Retry, expand
from bestiary.training.data.tokens import Tokens

Encode = Callable[[Row], Tokens | tuple[Tokens, ...]]

BUFFER_BYTES = 8 << 20  # of a block, and the largest row


@dataclass(frozen=True, kw_only=True)
class Source:
    """One named set of rows and how they become tokens.

    Attributes:
        name: stands in states, counts and errors; what is drawn depends on it and not on the order of sources.
        files: paths and globs of any protocol that fsspec knows, or a streamed data set of Hugging Face.
        encode: a row to its tokens, or to a tuple of them that must share a pack (a preference pair). It travels to the
            producer processes, so it is a function or an object at the top of a module. ValueError, TypeError,
            KeyError, RecursionError and BestiaryError say that the row is corrupt.
        weight: share in the mixture, where the plan has no schedule.
        format: `jsonl`, `parquet`, `arrow` or `tar`; None: by the suffix.
        storage_options: for fsspec.
        shuffle: files and rows every epoch anew; False: as they lie.
        block_rows: rows that are shuffled among each other.
        buffer_bytes: the size of a block, and of the largest row; about what a stream holds of this source.
        on_corrupt: `raise`, or `skip` and count.
        max_corrupt: rows that a stream may skip over the whole run.
        retry: against flaky storage.
    """

    name: str
    files: str | Sequence[str] | HubRows
    encode: Encode
    weight: float = 1.0
    format: str | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    shuffle: bool = True
    block_rows: int = 1024
    buffer_bytes: int = BUFFER_BYTES
    on_corrupt: Literal["raise", "skip"] = "raise"
    max_corrupt: int = 100
    retry: Retry = DEFAULT_RETRY

    def __post_init__(self) -> None:
        for value, name in ((self.block_rows, "block_rows"), (self.buffer_bytes, "buffer_bytes")):
            if value < 1:
                raise InvalidPlan(f"source {self.name}: {name} = {value}.", remedy="at least 1")
        if not self.weight >= 0:
            raise InvalidPlan(f"source {self.name}: weight = {self.weight}.", remedy="a number of at least 0")

    def shards(self) -> tuple[FileEntry, ...]:
        """The files as they are now; asks the storage."""
        if isinstance(self.files, HubRows):
            return self.files.shards()
        patterns = [self.files] if isinstance(self.files, str) else self.files
        entries = expand(patterns, self.storage_options, self.retry)
        for entry in entries:
            if self.format is None:
                format_of(entry.path)
        return entries

    def open(self, shard: FileEntry, start: Place) -> Generator[RawRow, None, None]:
        """The rows of one file from a place on."""
        if isinstance(self.files, HubRows):
            yield from self.files.open(shard, start)
            return
        with ResumingFile(shard, self.storage_options, self.retry, min(self.buffer_bytes, 1 << 20)) as raw:
            yield from rows(raw, shard.path, self.format or format_of(shard.path), start, self.buffer_bytes)


class Cursor(NamedTuple):
    """A place in the order of one stream: of a row, by the block it is in.

    Attributes:
        epoch: from 0.   shard: place among the stream's files of that epoch.
        row, offset: where the block starts in the file.   place: in the shuffled block.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0
    offset: int = 0
    place: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row in its order: the `ordinal`-th of this source in this stream, at `cursor`, found at `where`."""

    ordinal: int
    cursor: Cursor
    where: str
    raw: RawRow


class Reader:
    """The endless (or `epochs` long) sequence of one source's rows in one canonical stream.

    Attributes:
        cursor: of the next row.   ordinal: its number.
    """

    def __init__(
        self,
        source: Source,
        shards: Sequence[FileEntry],
        *,
        seed: int,
        stream: int,
        streams: int,
        epochs: int | None,
    ) -> None:
        self.source, self._shards, self._seed, self._epochs = source, shards, seed, epochs
        self._stream, self._streams = stream, streams
        self._by_file = len(shards) >= streams
        self.cursor, self.ordinal = Cursor(), 0
        self._rows: Generator[RawRow, None, None] | None = None
        self._following: RawRow | None = None  # the first row of the next block
        self._block: list[RawRow] = []
        self._order: list[int] = []  # the stream's files of this epoch
        self._seen = False  # a row in this epoch, or a start in the middle of it

    def seek(self, cursor: Cursor, ordinal: int) -> None:
        """Go to a place reported earlier."""
        self._leave_file()
        self.cursor, self.ordinal, self._order = cursor, ordinal, []
        self._seen = cursor != Cursor(epoch=cursor.epoch)

    def next(self) -> Drawn | None:
        """The next row; None when all epochs are over.

        Raises:
            StorageFailed; InvalidPlan where this stream gets no row of an epoch.
        """
        while not self._epochs or self.cursor.epoch < self._epochs:
            if self.cursor.place < len(self._block) or self._load_block():
                shard, raw = self._order[self.cursor.shard], self._block[self.cursor.place]
                drawn = Drawn(self.ordinal, self.cursor, f"{self._shards[shard].path} row {raw.place.row}", raw)
                self.ordinal, self._seen = self.ordinal + 1, True
                self.cursor = self.cursor._replace(place=self.cursor.place + 1)
                if self.cursor.place == len(self._block):
                    self._next_block()
                return drawn
            self._next_file()
        return None

    def _load_block(self) -> bool:
        """Read the block at the cursor; False at the end of the file."""
        epoch, shard, row, offset, _ = self.cursor
        self._order = self._order or self._files(epoch)
        if shard >= len(self._order):
            return False
        if self._rows is None:
            self._rows = self._own(self.source.open(self._shards[self._order[shard]], Place(row, offset)))
            self._following = next(self._rows, None)
        if self._following is None:
            return False
        block, size, limit = [self._following], self._following.size, self.source.block_rows
        limit = limit if self.source.shuffle else 1
        self._following = next(self._rows, None)
        while self._following is not None and len(block) < limit and size < self.source.buffer_bytes:
            block.append(self._following)
            size += self._following.size
            self._following = next(self._rows, None)
        first = block[0].place.row
        order = permutation(len(block), self._seed, "rows", self.source.name, epoch, self._order[shard], first)
        self._block = [block[index] for index in order]
        return True

    def _own(self, found: Generator[RawRow, None, None]) -> Generator[RawRow, None, None]:
        if self._by_file:
            return found
        return (raw for raw in found if raw.place.row % self._streams == self._stream)

    def _files(self, epoch: int) -> list[int]:
        order = list(range(len(self._shards)))
        if self.source.shuffle:
            order = permutation(len(order), self._seed, "files", self.source.name, epoch)
        return order[self._stream :: self._streams] if self._by_file else order

    def _next_block(self) -> None:
        if self._following is None:
            self._next_file()
        else:
            place = self._following.place
            self._block = []
            self.cursor = self.cursor._replace(row=place.row, offset=place.offset, place=0)

    def _next_file(self) -> None:
        self._leave_file()
        epoch, shard = self.cursor.epoch, self.cursor.shard + 1
        if shard < len(self._order):
            self.cursor = Cursor(epoch, shard)
            return
        if not self._seen and self._epochs is None:
            raise InvalidPlan(
                f"source {self.source.name}: epoch {epoch} has no row for stream {self._stream} of {self._streams}.",
                remedy="fewer streams, or more rows",
            )
        self.cursor, self._order, self._seen = Cursor(epoch + 1), [], False

    def _leave_file(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self._rows, self._following, self._block = None, None, []
