"""From a path or a hub id to a local folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from bestiary.bridges.errors import CheckpointNotFound, OfflineError

CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PATIENCE_S = 10.0  # for a hub to say anything at all
_WANTED = (CONFIG, GENERATION, ADAPTER_CONFIG, "*.safetensors", "*.safetensors.index.json")
_TOKENIZER = (
    *(CONFIG, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt"),
    *("*.model", "*.spm", "*.tiktoken", "tekken.json"),
)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = (".safetensors", ".gguf", ".bin", ".npz")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ONE_WORD = re.compile(r"\w[\w.-]*")

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


def resolve_tokenizer(src: str | Path, *, revision: str | None = None) -> Path:
    """As `resolve`, for a tokenizer and what it is read from; here a hub id may be one word, "gpt2".

    Raises:
        CheckpointNotFound, OfflineError: as there.
    """
    path = Path(src).expanduser()
    if path.is_dir() and str(src).strip():
        return path
    if isinstance(src, Path) or not is_hub_id(src, one_word=True):
        raise CheckpointNotFound(
            f"src = {str(src)!r} is {'no folder' if path.exists() else 'not there'}.",
            remedy="give a folder with tokenizer.json, or a hub id such as Qwen/Qwen3-0.6B",
        )
    return _fetch(src, revision, _TOKENIZER)


def commit_of(folder: Path) -> str | None:
    """The commit that a folder from `resolve` was fetched at; None: a folder that lies outside of the hub's cache."""
    return folder.name if folder.parent.name == "snapshots" and is_commit(folder.name) else None


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit, which stays what it is; branches and tags move."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def is_hub_id(src: str, *, one_word: bool = False) -> bool:
    """Whether `src` is written as a hub id and nothing here has that name.

    Args:
        one_word: those of the hub's first days count, which have no owner; of models they are not read.
    """
    if one_word and _ONE_WORD.fullmatch(src) and not src.endswith(_FILES):
        return not Path(src).exists()
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
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # kept there for others

    name = repo if revision is None else f"{repo}@{revision}"
    try:
        silence = None if _has_commit(repo, revision) else _silence(repo, revision)
        try:
            found = snapshot_download(
                repo, revision=revision, allow_patterns=list(wanted), local_files_only=silence is not None
            )
        except LocalEntryNotFoundError:
            if silence is None:
                raise
            raise silence from None
        return Path(found)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise CheckpointNotFound(
            f"{name} is not on the hub, or not open to you ({type(error).__name__}).",
            remedy="check the id; for a gated or private model log in with `hf auth login`",
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, ConnectionError, TimeoutError) as error:
        asked = name if "/" in repo else f"{repo} is no folder here. As a hub id: {name}"
        raise OfflineError(
            f"{asked} is not in the local cache and the hub cannot be reached ({type(error).__name__}).",
            remedy="go online and leave HF_HUB_OFFLINE unset, fetch it once with `hf download "
            f"{repo}` where there is a network, or give the path of a local folder; HF_HUB_OFFLINE=1 asks no hub and "
            "waits for none",
        ) from error


def _silence(repo: str, revision: str | None) -> Exception | None:
    """Why the hub does not tell of a repository now; None: it does.

    `snapshot_download` itself, and transformers for each file of a tokenizer, ask without a limit and several times:
    minutes where packets are lost. After this the cache alone is read.

    Raises:
        RevisionNotFoundError: there is no such revision.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RevisionNotFoundError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # kept there for others

    try:
        HfApi().repo_info(repo, revision=revision, timeout=PATIENCE_S)
    except RevisionNotFoundError:
        raise
    except (httpx.HTTPError, OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        return error
    return None


def _has_commit(repo: str, revision: str | None) -> bool:
    """Whether the cache has the list of a commit's files: then nobody has to be asked about it."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "trees" / f"{revision}.json"
    return is_commit(revision) and place.is_file()
