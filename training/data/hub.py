"""Data sets of Hugging Face as a source: streamed, shard by shard, from any row on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bestiary.training.data.errors import InvalidPlan, StorageFailed
from bestiary.training.data.formats import Place, RawRow, without_absent
from bestiary.training.data.storage import FileEntry


@dataclass(frozen=True, slots=True)
class HubRows:
    """What `datasets.load_dataset(path, name, split=…, streaming=True, …)` streams.

    Attributes:
        path, name, split: as there; a local script-less folder or a format's name ("json", "parquet") works offline.
        arguments: further ones, `data_files` and `revision` among them.

    A row in the middle is reached by skipping within its shard: exact whatever the data set does, and as slow as
    reading that far. `datasets`' own state is not used: it forgets its shuffle buffer. Needs the `data` extra.
    """

    path: str
    name: str | None = None
    split: str = "train"
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def shards(self) -> tuple[FileEntry, ...]:
        """One entry a shard; the identity is the builder's hash of its configuration and files."""
        datasets = _datasets()
        builder = datasets.load_dataset_builder(self.path, self.name, **self.arguments)
        identity = f"{builder.config_id}-{builder.hash}"
        shards: int = self._stream().num_shards
        return tuple(FileEntry(f"{self.path}[{self.split}] shard {index}", 0, identity) for index in range(shards))

    def open(self, shard: FileEntry, start: Place) -> Iterator[RawRow]:
        """The rows of one shard from a row on.

        Raises:
            StorageFailed: `datasets` does not read it, a format made of pickles for one.
        """
        try:
            yield from self._rows(shard, start)
        except ValueError as error:
            raise StorageFailed(
                f"{shard.path}: {error}", read_from=self.path, remedy="parquet, arrow, JSON or another format of data"
            ) from error

    def _rows(self, shard: FileEntry, start: Place) -> Iterator[RawRow]:
        stream = self._stream()
        index = int(shard.path.rpartition(" ")[2])
        part = stream.shard(num_shards=stream.num_shards, index=index).skip(start.row)
        for row, values in enumerate(part, start.row):
            size = sum(len(str(value)) for value in values.values())
            yield RawRow(Place(row), size, partial(without_absent, values))

    def _stream(self) -> Any:
        return _datasets().load_dataset(self.path, self.name, split=self.split, streaming=True, **self.arguments)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InvalidPlan("HubRows needs datasets.", remedy="pip install 'bestiary[data]'") from error
    return datasets
