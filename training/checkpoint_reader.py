"""torch's reader of distributed checkpoints without its door to code: the metadata of a resume point is a pickle.

A folder's manifest is as easily forged as its files, and people pass resume points on. So only the classes that torch
itself writes there are looked up, and only tensors are read: what torch stores as bytes it would unpickle too.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from bestiary.training.errors import CheckpointRefused

METADATA = ".metadata"
_FORMAT = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    _FORMAT: (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}


class _Unpickler(pickle.Unpickler):
    """Looks up what torch's metadata is made of and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name.

        Raises:
            UnpicklingError: it is none of those.
        """
        dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


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
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
            raise _refused(file, f"it is no description of tensors: {error}") from error
        if not isinstance(found, Metadata):
            raise _refused(file, f"it holds a {type(found).__name__}")
        others = [name for name, kind in found.state_dict_metadata.items() if type(kind) is not TensorStorageMetadata]
        if others:
            raise _refused(file, f"{others[0]} is stored as bytes and not as a tensor")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _refused(file: Path, why: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"{METADATA} of the resume point is not read: {why}.",
        read_from=str(file),
        remedy="resume from a folder that a run of yours wrote; what comes from elsewhere travels as safetensors",
    )
