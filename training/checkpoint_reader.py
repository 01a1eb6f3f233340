"""torch's reader of distributed checkpoints without its door to code: the metadata of a resume point is a pickle.

A folder's manifest is as easily forged as its files, and people pass resume points on. So only what torch itself writes
there is looked up, and only tensors are read: what torch stores as bytes it would unpickle too. A pickle may also set
attributes of whatever it names; it is given stand-ins for torch's classes, so that none changes for this process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from bestiary.training.errors import CheckpointRefused

METADATA = ".metadata"
_FORMAT = metadata.__name__
_RECORDS: dict[tuple[str, str], type] = {
    **{(_FORMAT, kind.__name__): kind for kind in (Metadata, MetadataIndex, StorageMeta, TensorProperties)},
    **{(_FORMAT, kind.__name__): kind for kind in (TensorStorageMetadata, ChunkStorageMetadata)},
    (_FORMAT, "BytesStorageMetadata"): metadata.BytesStorageMetadata,
    (filesystem.__name__, "_StorageInfo"): _StorageInfo,
    (filesystem.__name__, "_StoragePrefix"): filesystem._StoragePrefix,
}
_DAMAGE = (
    *(pickle.UnpicklingError, OSError, EOFError, ArithmeticError, MemoryError, RuntimeError),
    *(AttributeError, TypeError, ValueError, LookupError),
)
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


class _MemoryFormat:
    """Equal to one of torch's constants, which pickles could change if they were given it."""

    def __init__(self, value: int) -> None:
        self._known = (metadata._MEM_FORMAT_ENCODING(value),)

    def __eq__(self, other: object) -> bool:
        return other in self._known

    __hash__ = None  # type: ignore[assignment]


def _member(_: object, name: str) -> _MemoryFormat:
    """What Python up to 3.11.3 writes of a member of an Enum: the attribute `name` of its class."""
    found = metadata._MEM_FORMAT_ENCODING.__members__.get(name)
    if found is None:
        raise pickle.UnpicklingError(f"it asks for the attribute {name}")
    return _MemoryFormat(found.value)


_CALLED: dict[tuple[str, str], Callable[..., Any]] = {
    (_FORMAT, "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("builtins", "getattr"): _member,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    **{(module, name): PurePosixPath for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


class _Unpickler(pickle.Unpickler):
    """Looks up what torch's metadata is made of and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """A dtype, or a class that makes what the one of that name makes.

        Raises:
            UnpicklingError: it is none of those.
        """
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if (record := _RECORDS.get((module, name))) is not None:
            return _stand_in(partial(object.__new__, record))  # torch fills them, and calls none with arguments
        if (called := _CALLED.get((module, name))) is not None:
            return _stand_in(called)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _stand_in(make: Callable[..., Any]) -> type:
    return type("StandIn", (), {"__new__": lambda _, *arguments: make(*arguments)})


class ResumePointReader(FileSystemReader):
    """Reads the tensors of a resume point; `load` of torch.distributed.checkpoint takes it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes and places of the tensors.

        Raises:
            CheckpointRefused: the file holds anything but torch's own description of tensors.
        """
        file = Path(self.path) / METADATA
        try:
            with file.open("rb") as opened:
                found = _Unpickler(opened).load()
            wrong = next(_contradictions(found), None)
        except _DAMAGE as error:
            raise _refused(file, f"it is no description of tensors: {error}") from error
        if wrong is not None:
            raise _refused(file, wrong)
        described: Metadata = found
        described.storage_meta = StorageMeta(load_id=self.load_id)  # what else it says is for other readers
        return described


def _contradictions(found: Any) -> Iterator[str]:
    """What is not as torch writes it of tensors in files of the folder, and would be found in the middle of a load."""
    if type(found) is not Metadata:
        yield f"it holds a {type(found).__name__}"
        return
    for name, kind in found.state_dict_metadata.items():
        if type(kind) is not TensorStorageMetadata:
            yield f"{name} is stored as bytes and not as a tensor"
        elif type(kind.size) is not torch.Size or not all(type(one) is ChunkStorageMetadata for one in kind.chunks):
            yield f"{name} has no size, or parts of another kind"
    for index, place in found.storage_data.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo:
            yield f"{index} lies in {place}"
        elif place.transform_descriptors or not isinstance(place.relative_path, str):
            yield f"{index.fqn} is stored in another form"
        elif Path(place.relative_path).name != place.relative_path:
            yield f"{index.fqn} lies outside of the folder, in {place.relative_path}"


def _refused(file: Path, why: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"{METADATA} of the resume point is not read: {why}.",
        read_from=str(file),
        remedy="resume from a folder that a run of yours wrote; what comes from elsewhere travels as safetensors",
    )
