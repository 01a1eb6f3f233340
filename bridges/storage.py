"""Reading safetensors: headers checked in full, tensors read by position straight into the memory that wants them.

Reads are positional (`preadv`) and copy from the page cache into anonymous memory, so a loaded model does not depend on
the file any more: it may be deleted or rewritten. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from bestiary.bridges.errors import CheckpointNotFound, CorruptCheckpoint, MissingShard
from bestiary.bridges.pieces import Shape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER = 100_000_000
_FETCH_AGAIN = "fetch the checkpoint again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a stored tensor, the file it lies in (counted in the checkpoint) and its byte offset there."""

    shape: Shape
    dtype: torch.dtype
    file: int = 0
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of axis 0 (of the whole tensor, if it has no axis)."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Length of axis 0."""
        return self.shape[0] if self.shape else 1


class TensorSource(Protocol):
    """Tensors by name, read in rows of axis 0."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Shape, dtype and place of each tensor."""

    @property
    def name(self) -> str:
        """What to call the source in messages."""

    def place(self, name: str) -> str:
        """Where the tensor `name` lies, for messages: its file, or the source's own name."""

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (contiguous, CPU, of the stored dtype) with the rows from `start` on."""


def read_rows(source: TensorSource, name: str, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a tensor, in a new tensor of the stored dtype."""
    info = source.infos[name]
    out = torch.empty((stop - start, *info.shape[1:]), dtype=info.dtype)
    source.read_into(name, start, out)
    return out


class MemorySource:
    """Tensors of a dict (a state dict) as a source."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str = "a state dict") -> None:
        self.tensors, self.name = tensors, name
        self.infos = {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in tensors.items()}

    def place(self, name: str) -> str:
        """See `TensorSource`."""
        return self.name

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """See `TensorSource`."""
        out.copy_(self.tensors[name][start : start + out.shape[0]])


class SafetensorsSource:
    """A checkpoint of one file, or of shards with an index. A context manager: files are open inside it.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and what it names.
        single: the name of the one file, where it is another.
    Raises:
        CheckpointNotFound: the folder has neither.
        MissingShard: the index names a file that is not there.
        CorruptCheckpoint: truncated, damaged, or index and shards disagree.
    """

    def __init__(self, folder: Path, *, single: str = SINGLE) -> None:
        self.name = str(folder)
        self.files, self.weight_map = _files(folder, single)
        self._descriptors: list[int] = []
        try:
            self.infos = self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def place(self, name: str) -> str:
        """See `TensorSource`."""
        return str(self.files[self.infos[name].file])

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """See `TensorSource`."""
        info = self.infos[name]
        if not out.numel():
            return
        memory = out.reshape(-1).view(torch.uint8).numpy().data
        offset = info.offset + start * info.row_bytes
        while memory:
            count = os.preadv(self._descriptors[info.file], [memory], offset)
            if count <= 0:
                raise _corrupt(self.files[info.file], f"ends inside tensor {name}")
            memory, offset = memory[count:], offset + count

    def _open(self) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for position, path in enumerate(self.files):
            self._descriptors.append(os.open(path, os.O_RDONLY))
            found = _read_header(self._descriptors[-1], path, position)
            if self.weight_map is not None:
                _check_against_index(self.weight_map, path, found)
            infos |= found
        return infos


def _files(folder: Path, single: str) -> tuple[list[Path], dict[str, str] | None]:
    if (folder / single).is_file():
        return [folder / single], None
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        raise CheckpointNotFound(
            f"no {single} and no {INDEX} in {folder}"
            + (f" (only {pickles[0]}: pickles are never read)." if pickles else "."),
            remedy="give a folder written by save_pretrained, with safe_serialization on",
        )
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise _corrupt(folder / INDEX, "has no weight_map from tensor names to files")
    shards = sorted(set(weight_map.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise _corrupt(folder / INDEX, f"names a file outside the folder: {outside[0]!r}")
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise MissingShard(
            f"{len(absent)} of {len(shards)} shards are missing: {', '.join(absent[:4])}.",
            read_from=str(folder / INDEX),
            remedy=_FETCH_AGAIN,
        )
    return [folder / shard for shard in shards], weight_map


def _check_against_index(weight_map: Mapping[str, str], path: Path, found: Iterable[str]) -> None:
    listed = {name for name, shard in weight_map.items() if shard == path.name}
    absent, unlisted = sorted(listed - set(found)), sorted(set(found) - listed)
    if absent or unlisted:
        kind = (
            f"lacks {absent[0]}, which the index places there" if absent else f"holds {unlisted[0]}, not in the index"
        )
        raise _corrupt(path, f"{kind} ({len(absent)} absent, {len(unlisted)} unlisted)")


def _read_header(descriptor: int, path: Path, position: int) -> dict[str, TensorInfo]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise _corrupt(path, f"is truncated or no safetensors file ({size} bytes, a header of {length})")
    text = os.pread(descriptor, length, 8)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _corrupt(path, f"has a damaged header ({error})") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "has a damaged header (no object)")
    header.pop("__metadata__", None)
    base = 8 + length
    spans = sorted((_entry(path, name, entry), name) for name, entry in header.items())
    end = 0
    for (begin, stop, _, _), name in spans:
        if begin != end or stop < begin:
            raise _corrupt(path, f"has a gap or an overlap before tensor {name}")
        end = stop
    if base + end != size:
        kind = "is truncated" if base + end > size else "has bytes that no tensor owns"
        raise _corrupt(path, f"{kind}: {size} bytes, the header describes {base + end}")
    return {name: TensorInfo(shape, DTYPES[dtype], position, base + begin) for (begin, _, dtype, shape), name in spans}


def _entry(path: Path, name: str, entry: Any) -> tuple[int, int, str, Shape]:
    """(begin, end, dtype, shape) of one header entry, checked against each other."""
    try:
        begin, end = (int(offset) for offset in entry["data_offsets"])
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"describes tensor {name} wrongly ({entry!r})") from error
    if dtype not in DTYPES:
        raise _corrupt(path, f"holds tensor {name} in dtype {dtype}, which cannot be read")
    if end - begin != prod(shape) * DTYPES[dtype].itemsize:
        raise _corrupt(path, f"gives tensor {name} of shape {list(shape)} in {dtype} {end - begin} bytes")
    return begin, end, dtype, shape


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CorruptCheckpoint: not JSON, no object, or nested too deeply.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise _corrupt(path, "is nested too deeply to be read") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise _corrupt(path, f"is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise _corrupt(path, "holds no JSON object")
    return content


def _corrupt(path: Path, what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path.name} {what}.", read_from=str(path), remedy=_FETCH_AGAIN)
