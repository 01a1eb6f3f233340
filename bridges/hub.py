"""From a path or a hub id to a local folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from bestiary.bridges.errors import CheckpointNotFound, OfflineError

CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WANTED = (CONFIG, GENERATION, ADAPTER_CONFIG, "*.safetensors", "*.safetensors.index.json")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = (".safetensors", ".gguf", ".bin", ".npz")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

_REMEDY = "give a folder with config.json and safetensors, or a hub id such as Qwen/Qwen3-0.6B"
_REMEDY_GGUF = "turn the file into a folder with bestiary.bridges.gguf.gguf_to_hf_folder, and give that"


def resolve(src: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder that `src` names, fetched through `huggingface_hub` (and its cache) if it is a hub id.

    Args:
        weights: False: of a hub id its config alone, or that of an adapter.
    Raises:
        CheckpointNotFound: no such folder, no such repository or revision, or no access to it.
        OfflineError: a hub id that is not cached while the hub cannot be reached.
    """
    if not str(src).strip():
        raise CheckpointNotFound(f"src = {src!r} names no checkpoint.", remedy=_REMEDY)
    path = Path(src).expanduser()
    if path.is_dir():
        return path
    if isinstance(src, Path) or _looks_like_path(src):
        raise CheckpointNotFound(
            f"{path} is {'a file' if path.exists() else 'not there'}.",
            remedy=_REMEDY_GGUF if path.suffix == ".gguf" else _REMEDY,
        )
    return _fetch(src, revision, _WANTED if weights else (CONFIG, ADAPTER_CONFIG))


def commit_of(folder: Path) -> str | None:
    """The commit that a folder from `resolve` was fetched at; None: a folder that lies outside of the hub's cache."""
    return folder.name if folder.parent.name == "snapshots" and is_commit(folder.name) else None


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit, which stays what it is; branches and tags move."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def is_hub_id(src: str) -> bool:
    """Whether `src` is written as a hub id and nothing here has that name."""
    return _HUB_ID.fullmatch(src) is not None and not _looks_like_path(src) and not Path(src).exists()


def at_revision(src: str, revision: str | None) -> str:
    """A hub id and its revision in one word, "owner/name@revision"; anything else as it is."""
    return f"{src}@{revision}" if revision is not None and is_hub_id(src) else src


def split_revision(src: str) -> tuple[str, str | None]:
    """The inverse of `at_revision`: a name without a revision in it has None."""
    name, at, revision = src.partition("@")
    return (name, revision) if at and revision and is_hub_id(name) else (src, None)


def _looks_like_path(src: str) -> bool:
    return src.startswith((".", "~", os.sep)) or src.count("/") != 1 or src.endswith(_FILES)


def _fetch(repo: str, revision: str | None, wanted: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = repo if revision is None else f"{repo}@{revision}"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(wanted)))
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise CheckpointNotFound(
            f"{name} is not on the hub, or not open to you ({type(error).__name__}).",
            remedy="check the id; for a gated or private model log in with `hf auth login`",
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, ConnectionError, TimeoutError) as error:
        raise OfflineError(
            f"{name} is not in the local cache and the hub cannot be reached ({type(error).__name__}).",
            remedy="go online and leave HF_HUB_OFFLINE unset, fetch it once with `hf download "
            f"{repo}` where there is a network, or give the path of a local folder",
        ) from error
