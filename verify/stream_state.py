"""What a streamed comparison has found so far, in one file, so that a run that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bestiary.verify.run import BadUsage

FIELD = "bestiary.verify"


@dataclass
class Progress:
    """Both sides after `done` layers.

    Attributes:
        theirs, ours: hidden states (1, T, H) by input, each side's own.
        figures: teacher-forced error so far, by "input/part".
    """

    done: int
    theirs: dict[str, Tensor]
    ours: dict[str, Tensor]
    figures: dict[str, float]


class StateFile:
    """The file of one checkpoint in a work folder; replaced as a whole, never written in place.

    Args:
        work: the folder, created; None: `bestiary/verify` in the user's cache folder.
        checkpoint: the folder that is verified.
        fingerprint: of everything that the numbers rest on; a file with another one is not read.
    Raises:
        BadUsage: the work folder cannot be created.
    """

    def __init__(self, work: Path | None, checkpoint: Path, fingerprint: str) -> None:
        folder = default_work() if work is None else work
        name = hashlib.sha256(str(checkpoint.resolve()).encode()).hexdigest()[:16]
        self.path = folder / f"{checkpoint.name}-{name}.safetensors"
        self.fingerprint = fingerprint
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadUsage(
                f"the work folder {folder} cannot be created ({error.strerror}).", remedy="name another with --work"
            ) from error

    def read(self) -> Progress | None:
        """What an earlier run left; None if nothing, if it belongs to something else, or if it is damaged."""
        if not self.path.is_file():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                kept = json.loads((file.metadata() or {}).get(FIELD, "{}"))
                if kept.get("fingerprint") != self.fingerprint:
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except (SafetensorError, ValueError):
            return None
        sides: dict[str, dict[str, Tensor]] = {"theirs": {}, "ours": {}}
        for name, tensor in tensors.items():
            side, _, case = name.partition("/")
            sides[side][case] = tensor
        return Progress(kept["done"], sides["theirs"], sides["ours"], kept["figures"])

    def write(self, progress: Progress) -> None:
        """Replaces the file by `progress`, durably: after a kill there is the old state or this one."""
        kept = {"fingerprint": self.fingerprint, "done": progress.done, "figures": progress.figures}
        sides = {"theirs": progress.theirs, "ours": progress.ours}
        tensors = {f"{side}/{case}": t.contiguous() for side, cases in sides.items() for case, t in cases.items()}
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            save_file(tensors, new, metadata={FIELD: json.dumps(kept)})
            with new.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(new, self.path)
        finally:
            new.unlink(missing_ok=True)

    def remove(self) -> None:
        """Forgets the state, and what killed writers of it left."""
        for path in (self.path, *self.path.parent.glob(f"{escape(self.path.name)}.*")):
            with suppress(FileNotFoundError):
                path.unlink()


def default_work() -> Path:
    """`bestiary/verify` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bestiary" / "verify"


def fingerprint(folder: Path, token_ids: Sequence[int], raw: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """A hash of the checkpoint's files, config and token ids, of both implementations and of the verifier.

    Of the files: name, target of a link (a hub cache names it by content), size and time of change, not the content:
    reading hundreds of gigabytes twice is what a resumed run wants to avoid.
    """
    files = []
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        status = path.stat()
        files.append([path.name, path.resolve().name, status.st_size, status.st_mtime_ns])
    facts = [files, list(token_ids), raw, dict(hashes), torch.__version__]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
