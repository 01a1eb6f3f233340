"""Writing safetensors: shards by size, tensor by tensor, into a folder that appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bestiary.bridges.errors import FolderNotEmpty, UnsupportedLoad
from bestiary.bridges.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, GENERATION
from bestiary.bridges.pieces import Shape
from bestiary.bridges.storage import DTYPES, INDEX, SINGLE

_EXPORTED = (SINGLE, INDEX, CONFIG, GENERATION, ADAPTER_CONFIG, ADAPTER_WEIGHTS)  # what an export may leave behind
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write: its name, shape and dtype, known before its values are."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return prod(self.shape) * self.dtype.itemsize


def write_checkpoint(
    folder: Path, entries: Sequence[Entry], supply: Callable[[str], Tensor], *, max_shard_size: int | str = "5GB"
) -> None:
    """Write `entries` as one file, or as shards of at most `max_shard_size` with an index.

    Args:
        supply: gives a tensor when its turn comes; it is written and let go.
        max_shard_size: bytes, or a string such as "5GB"; a single tensor may exceed it.
    """
    shards = list(_split(entries, parse_size(max_shard_size)))
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0], supply)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard, supply)
        weight_map |= dict.fromkeys((entry.name for entry in shard), name)
    write_index(folder, weight_map, sum(entry.nbytes for entry in entries))


def writing_order(entries: Sequence[Entry], *, max_shard_size: int | str = "5GB") -> list[str]:
    """Names in the order in which `write_checkpoint` asks for them."""
    return [entry.name for shard in _split(entries, parse_size(max_shard_size)) for entry in _aligned(shard)]


def write_index(folder: Path, weight_map: dict[str, str], total_size: int) -> None:
    """Write the index of a sharded checkpoint."""
    write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))})


def write_file(path: Path, entries: Iterable[Entry], supply: Callable[[str], Tensor]) -> None:
    """Write one safetensors file: the header first, then each tensor as `supply` gives it."""
    ordered = _aligned(entries)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        offsets = [offset, offset + entry.nbytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            tensor = supply(entry.name).detach()
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise UnsupportedLoad(
                    f"{entry.name} is {tuple(tensor.shape)} {tensor.dtype}, announced as {entry.shape} {entry.dtype}.",
                    remedy="report this: the export plan and the tensors disagree",
                )
            if tensor.numel():
                file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _aligned(entries: Iterable[Entry]) -> list[Entry]:
    """Wide types first: that keeps every offset aligned."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object as transformers formats it: sorted, two spaces, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def parse_size(size: int | str) -> int:
    """Bytes of 5_000_000_000, "5GB" or "5GiB".

    Raises:
        UnsupportedLoad: it is no size, or not positive.
    """
    found = size if isinstance(size, int) and not isinstance(size, bool) else _from_text(size)
    if found <= 0:
        raise UnsupportedLoad(f"max_shard_size = {size!r} holds no tensor.", remedy='a positive size such as "5GB"')
    return found


def _from_text(size: Any) -> int:
    if not isinstance(size, str):
        raise UnsupportedLoad(f"max_shard_size = {size!r} is no size.", remedy='give bytes, or a string such as "5GB"')
    digits = size.rstrip("KMGIBkmgib ")
    unit = size[len(digits) :].strip().upper()
    if not digits.isdecimal() or unit not in _UNITS:
        raise UnsupportedLoad(f"max_shard_size = {size!r} is no size.", remedy='give bytes, or a string such as "5GB"')
    return int(digits) * _UNITS[unit]


def _split(entries: Sequence[Entry], limit: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.nbytes
    yield shard


def check_free(path: Path, *, overwrite: bool) -> None:
    """Refuse a folder that must not be written to.

    Raises:
        FolderNotEmpty: see `staged`.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not (overwrite and path.is_dir()):
        raise FolderNotEmpty(
            f"{path} {'is not empty' if path.is_dir() else 'is a file'}.",
            remedy="choose another folder, or pass overwrite=True (--overwrite) to replace the checkpoint in it",
        )


@contextmanager
def staged(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `path`; its files move to `path` at the end, and vanish on an error.

    With `overwrite`, files of the same names are replaced, files of an earlier export are removed, the rest stays.

    Raises:
        FolderNotEmpty: `path` has content and `overwrite` is False, or `path` is a file.
        UnsupportedLoad: its parent is a file, or closed to us.
    """
    check_free(path, overwrite=overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    except OSError as error:
        raise UnsupportedLoad(
            f"{path} cannot be written ({error}).", remedy="choose a folder below one that you may write to"
        ) from error
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        _publish(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, path: Path) -> None:
    if not path.exists() or not any(path.iterdir()):
        os.replace(folder, path)
        return
    stale = {old for old in path.iterdir() if old.name in _EXPORTED or old.match("model-*-of-*.safetensors")}
    for new in sorted(folder.iterdir()):
        os.replace(new, path / new.name)
        stale.discard(path / new.name)
    for old in stale:
        old.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
