"""What a checkpoint holds, told from a small part of its bytes: enough to see that another one lies at its path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from bestiary.bridges.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, commit_of, resolve
from bestiary.bridges.peft_import import base_of, is_adapter
from bestiary.bridges.storage import INDEX, SINGLE, SafetensorsSource, TensorInfo

WHOLE = 64 * 2**20  # bytes of a file that is read to its end
WINDOW = 4096  # bytes that are read of a larger one at a time
STRIDE = 16 * 2**20  # one window for each so many bytes of a tensor, and one at least


def contents(src: str | Path, revision: str | None = None) -> dict[str, str]:
    """What there is to a checkpoint, by file: "SIZE bytes, sha256 START"; those of an adapter's base as `base/FILE`.

    Of a hub id, and of any folder in the hub's cache, it is the commit alone, and nothing else is read. Of a folder it
    is config, index and those safetensors files that a model is read from; small files in full, of a larger one its
    header (names, shapes, dtypes, places) and 4 KiB of each tensor, of a large tensor 4 KiB in every 16 MiB: about a
    thousandth, seconds for the largest checkpoints. Another training run, another step, a merged adapter or other
    shards are seen. What goes unseen is a change that lies wholly between the windows, such as a few rows of one
    matrix, or one made on purpose.

    Args:
        src: a folder, a hub id or a PEFT adapter of either kind; or a file, of which it is the one entry.
    Raises:
        CheckpointNotFound, OfflineError, MissingShard, CorruptCheckpoint: as reading the model would.
        UnsupportedLoad: an adapter that names no base.
    """
    path = Path(src).expanduser()
    if path.is_file():
        return {path.name: _told(path, ())}
    folder = resolve(src, revision=revision, weights=False)
    commit, adapts = commit_of(folder), is_adapter(folder)
    found = _files(folder, adapts) if commit is None else {"commit": commit}
    if adapts:
        found |= {f"base/{name}": told for name, told in contents(*base_of(folder, None)).items()}
    return found


def _files(folder: Path, adapts: bool) -> dict[str, str]:
    single = ADAPTER_WEIGHTS if adapts else SINGLE
    with SafetensorsSource(folder, single=single) as source:
        plain = [ADAPTER_CONFIG if adapts else CONFIG, *(() if source.weight_map is None else (INDEX,))]
        found = {name: _told(folder / name, ()) for name in plain if (folder / name).is_file()}
        for position, file in enumerate(source.files):
            found[file.name] = _told(file, [info for info in source.infos.values() if info.file == position])
    return found


def _told(file: Path, tensors: Iterable[TensorInfo]) -> str:
    """Size and digest of a file.

    Args:
        tensors: in it, if it is one of safetensors; all else is taken for one tensor, with a window at its end, where
            an .npz has the checksums of what is in it.
    """
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        if size <= WHOLE:
            digest.update(opened.read())
        else:
            places = sorted((info.offset, info.num_rows * info.row_bytes) for info in tensors)
            header = places[0][0] if places else 0
            digest.update(opened.read(header))
            for start, length in places or [(0, size)]:
                for place in _windows(start, length):
                    digest.update(os.pread(opened.fileno(), min(WINDOW, length), place))
            if not places:
                digest.update(os.pread(opened.fileno(), WINDOW, max(0, size - WINDOW)))
    return f"{size} bytes, sha256 {digest.hexdigest()[:16]}"


def _windows(start: int, length: int) -> Iterable[int]:
    """Where windows of a tensor begin: each in the middle of as many equal parts."""
    count = 1 + length // STRIDE
    for part in range(count):
        middle = (2 * part + 1) * length // (2 * count)
        yield start + max(0, min(middle - WINDOW // 2, length - WINDOW))
