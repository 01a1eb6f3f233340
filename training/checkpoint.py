"""Resume points of a run: exact, atomic, verified by hash, written while the next steps run, read on any world size.

    out/checkpoints/step-00000120/
        *.distcp, .metadata    parameters that train and optimiser states (torch.distributed.checkpoint)
        state.json             where the run, its data and its schedule stand; what it is bound to
        rank-00000.json        random number generators of each process
        manifest.json          size and sha256 of every other file, written last

torch's `.metadata` is a pickle: it is read only after its hash agrees with the manifest, and then by a reader that
knows torch's own classes alone (`checkpoint_reader`). Frozen weights are not stored; a checksum says whether the base
is still the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from bestiary.models import Decoder
from bestiary.models.sharding import kept
from bestiary.training.checkpoint_reader import ResumePointReader
from bestiary.training.config import CheckpointSection
from bestiary.training.contents import NOTHING, Contents, check_contents
from bestiary.training.errors import CheckpointRefused, SaveFailed
from bestiary.training.loop import Progress, Trainer
from bestiary.training.optim import Optimisers

FORMAT = 1
CHECKPOINTS, MANIFEST, STATE = "checkpoints", "manifest.json", "state.json"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@dataclass
class Checkpoints:
    """The resume points of one run; a `Saver` of the loop.

    Args:
        folder: `out/checkpoints`.   section: when, how many.
        bound: what a checkpoint belongs to, as JSON values by name (recipe, architecture, tokenizer, …): a resume under
            anything else is refused by that name.
        place: of this process among those that draw random numbers of their own; tensor ranks share one.
        commits: of the hub, by the key that names the model; as `bound`, for what both sides know one of.
        contents: of checkpoints that the run reads beside the one that it trains; likewise.
        group: of all processes, on gloo and for this alone; None: there is one.
        export: called with the trainer after the last one.
    """

    folder: Path
    section: CheckpointSection
    bound: Mapping[str, Any]
    group: dist.ProcessGroup | None = None
    export: Callable[[Trainer], None] | None = None
    seed: int = 0
    place: int = 0
    commits: Mapping[str, str] = field(default_factory=dict)
    contents: Contents = field(default_factory=lambda: NOTHING)
    _writing: threading.Thread | None = field(default=None, init=False)
    _failure: SaveFailed | None = field(default=None, init=False)

    # ------------------------------------------------------------------ writing

    def due(self, step: int) -> bool:
        """Whether the section asks for one after this step."""
        return self.section.every is not None and step % self.section.every == 0

    def save(self, trainer: Trainer, *, last: bool = False) -> None:
        """Write one for the step that the trainer has just made; unless `last` or told otherwise, in the background.

        Raises:
            SaveFailed: this one or the one before could not be written.
        """
        self.finish()
        step = trainer.progress.step
        if step and not (self.folder / _name(step)).exists():
            tensors = _staged(_tensors(trainer.model, trainer.optimiser))
            state = self._state(trainer)
            work = threading.Thread(target=self._write, args=(step, tensors, state, _generators()), name="checkpoint")
            self._writing = work
            work.start()
        if last or not self.section.background:
            self.finish()
        if last and self.export is not None:
            self.export(trainer)

    def finish(self) -> None:
        """Wait for the one that is being written.

        Raises:
            SaveFailed: it could not be.
        """
        self.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def join(self) -> None:
        """Wait for the one that is being written, whether it can be or not."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "world_size": 1 if self.group is None else dist.get_world_size(self.group),
            "progress": trainer.progress.as_json(),
            "data": trainer.loader.global_state(),
            "bound": dict(self.bound),
            "commits": dict(self.commits),
            "contents": {key: dict(files) for key, files in self.contents.items()},
            "frozen": frozen_checksums(trainer.model),
        }

    def _write(self, step: int, tensors: dict[str, Any], state: dict[str, Any], generators: dict[str, Any]) -> None:
        """Runs in a thread; what fails is kept for `finish`."""
        target = self.folder / _name(step)
        partial = self.folder / f".writing-{_name(step)}"
        rank = 0 if self.group is None else dist.get_rank(self.group)
        try:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._agree(None)
            failure = None
            try:
                writer = FileSystemWriter(partial, sync_files=True)
                save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
                _write_json(partial / f"rank-{rank:05d}.json", generators)
                if rank == 0:
                    _write_json(partial / STATE, state)
            except (OSError, CheckpointException, RuntimeError) as error:
                failure = _told(error)
            self._agree(failure)
            if rank == 0:
                _write_json(partial / MANIFEST, {"format": FORMAT, "files": _files(partial)})
                _rename(partial, target)
                self._forget(step)
            self._agree(None)
        except (OSError, RuntimeError, SaveFailed) as error:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
            self._failure = SaveFailed(
                f"the checkpoint of step {step} could not be written ({_told(error)}).",
                read_from=str(self.folder),
                remedy=f"{free / 2**30:.1f} GiB are free there; earlier checkpoints are untouched",
            )

    def _agree(self, failure: str | None) -> None:
        """Until all processes are here; an error if any has one."""
        found: list[Any] = [failure]
        if self.group is not None:
            found = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(found, failure, group=self.group)
        for rank, text in enumerate(found):
            if text is not None:
                raise SaveFailed(f"process {rank}: {text}")

    def _forget(self, newest: int) -> None:
        """Remove what the section does not keep."""
        steps = [step for step in saved_steps(self.folder) if step <= newest]
        always = self.section.keep_every
        for step in steps[: -self.section.keep]:
            if always is None or step % always:
                shutil.rmtree(self.folder / _name(step))

    # ------------------------------------------------------------------ reading

    def resume(self, trainer: Trainer) -> int | None:
        """Bring a trainer to where the newest checkpoint was taken; its step, or None where there is none.

        On the world size that wrote it the run goes on bit for bit; on another one the random generators start anew.

        Raises:
            CheckpointRefused: damaged, or of another model, base, tokenizer or recipe.   StateMismatch: other data.
        """
        steps = saved_steps(self.folder)
        if not steps:
            return None
        place = self.folder / _name(steps[-1])
        earlier = f"; without it the run goes on from step {steps[-2]}" if len(steps) > 1 else ""
        verify(place, remedy=f"remove {place}{earlier}")
        state = json.loads((place / STATE).read_text(encoding="utf-8"))
        self._check(state, trainer.model, place)
        read_tensors(place, trainer.model, trainer.optimiser)
        trainer.loader.load_state_dict(state["data"])
        trainer.progress = Progress.from_json(state["progress"])
        rank, world = (0, 1) if self.group is None else (dist.get_rank(self.group), dist.get_world_size(self.group))
        if state["world_size"] == world:
            _set_generators(json.loads((place / f"rank-{rank:05d}.json").read_text(encoding="utf-8")))
        else:
            seed_all(self.seed, trainer.progress.step, self.place)
        return trainer.progress.step

    def _check(self, state: Mapping[str, Any], model: Decoder, place: Path) -> None:
        """Refuse a checkpoint that belongs to something else."""
        then, now = state["bound"], json.loads(json.dumps(self.bound))
        read = state.get("commits", {})  # not in checkpoints of before they were written
        moved = [name for name in sorted(read.keys() & self.commits.keys()) if read[name] != self.commits[name]]
        then, now = then | {name: read[name] for name in moved}, now | {name: self.commits[name] for name in moved}
        changed = moved + [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
        if changed:
            name = changed[0]
            raise CheckpointRefused(
                f"{name} was {_short(then.get(name))} and is {_short(now.get(name))}.",
                read_from=str(place),
                remedy="restore it, or another `out` for the changed run",
            )
        check_contents(state.get("contents", NOTHING), self.contents, read_from=str(place))
        check_frozen(state, model, place)


def check_frozen(state: Mapping[str, Any], model: Decoder, place: Path) -> None:
    """Refuse a checkpoint whose adapters were trained on another base than the model's.

    Raises:
        CheckpointRefused.
    """
    then, now = state["frozen"], frozen_checksums(model)
    other = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    if other:
        raise CheckpointRefused(
            f"model.src = {model.name_or_path}: the frozen weights are not those that the adapters were trained on; "
            f"{len(other)} of {len(now)} differ, {other[0]} among them.",
            read_from=str(place),
            remedy="the same model.src and revision, or another `out`",
        )


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a run's folder, ascending; a copy under another name is none of them."""
    names = {found.parent.name for found in folder.glob(f"step-*/{MANIFEST}")}
    numbers = [name.removeprefix("step-") for name in names]
    return sorted(int(number) for number in numbers if number.isdecimal() and _name(int(number)) in names)


def verify(place: Path, *, remedy: str) -> None:
    """Nothing, if every file is as it was written.

    Raises:
        CheckpointRefused: a file is missing, of another size or of another hash.
    """
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointRefused(f"{MANIFEST} cannot be read: {error}.", read_from=str(place), remedy=remedy) from error
    if manifest["format"] != FORMAT:
        raise CheckpointRefused(f"format {manifest['format']}, known is {FORMAT}.", read_from=str(place), remedy=remedy)
    for name, told in files.items():
        file = place / name
        if not file.is_file():
            raise CheckpointRefused(f"{name} is missing.", read_from=str(place), remedy=remedy)
        if file.stat().st_size != told["bytes"] or _digest(file) != told["sha256"]:
            raise CheckpointRefused(
                f"{name} is not what was written (size or sha256 differ).", read_from=str(place), remedy=remedy
            )


def read_tensors(place: Path, model: Decoder, optimiser: Optimisers | None) -> None:
    """Read the tensors of a verified checkpoint into a model and, if given, its optimiser.

    Raises:
        CheckpointRefused: names, shapes or dtypes differ, or the files hold something else than the metadata says.
    """
    wanted = _tensors(model, optimiser)
    reader = ResumePointReader(place)
    known = reader.read_metadata().state_dict_metadata
    for name, tensor in wanted.items():
        stored = known.get(name)
        then = f"{tuple(stored.size)} {stored.properties.dtype}" if isinstance(stored, TensorStorageMetadata) else None
        now = f"{tuple(tensor.shape)} {tensor.dtype}"  # torch would cast, and the run would be another one from here on
        if then != now:
            raise CheckpointRefused(
                f"{name} is {then or 'missing'} in the checkpoint and {now} in the model.",
                read_from=str(place),
                remedy="model, optimiser and precision.parameters of that run",
            )
    try:
        load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise CheckpointRefused(
            f"the tensors cannot be read ({_told(error)}).",
            read_from=str(place),
            remedy="resume from a folder that a run of yours wrote, or from an earlier step",
        ) from error


# ---------------------------------------------------------------------- tensors


def _tensors(model: Decoder, optimiser: Optimisers | None) -> dict[str, Tensor]:
    """Everything that training moves, by name: the memory itself, so that reading writes into it.

    What an optimiser holds beside tensors are settings, which come from the run's file.
    """
    trained = {name: parameter for name, parameter in kept(model).named_parameters() if parameter.requires_grad}
    found: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in trained.items()}
    if optimiser is not None:
        found |= {f"optim.{name}": value for name, value in optimiser.tensors(trained).items()}
    return found


def _staged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, which the next steps do not change."""
    return {name: tensor.clone() if tensor.device.type == "cpu" else tensor.cpu() for name, tensor in tensors.items()}


def frozen_checksums(model: Decoder) -> dict[str, int]:
    """For each frozen parameter the sum of its bits as integers: exact in any order, so alike on every world size."""
    found = {}
    for name, parameter in kept(model).named_parameters():
        if not parameter.requires_grad:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            bits = local.detach().contiguous().view(_INTEGERS[parameter.element_size()]).sum(dtype=torch.int64)
            found[name] = (parameter, bits)
    return {name: _over_shards(parameter, bits) for name, (parameter, bits) in found.items()}


def _over_shards(parameter: Tensor, bits: Tensor) -> int:
    """The sum over the processes that hold different parts of a parameter; it wraps as int64 does."""
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                dist.all_reduce(bits, group=parameter.device_mesh.get_group(dim))
    return int(bits)


# ---------------------------------------------------------------------- random numbers


def seed_all(seed: int, step: int, rank: int) -> None:
    """Seed every generator by run, step and process."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()[:4], "big")
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _generators() -> dict[str, Any]:
    """The state of every random generator of this process, as JSON values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, spare = random.getstate()
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(words), spare],
    }


def _set_generators(stored: Mapping[str, Any]) -> None:
    torch.set_rng_state(_bytes(stored["torch"]))
    if stored["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_bytes(state) for state in stored["cuda"]])
    kind, keys, position, has_gauss, gauss = stored["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))
    version, words, spare = stored["python"]
    random.setstate((version, tuple(words), spare))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())


# ---------------------------------------------------------------------- files


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _files(folder: Path) -> dict[str, Any]:
    found = sorted(file for file in folder.iterdir() if file.name != MANIFEST)
    return {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in found}


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write_json(file: Path, content: Any) -> None:
    with file.open("w", encoding="utf-8") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())


def _rename(partial: Path, target: Path) -> None:
    """The moment from which the checkpoint exists, on disk too."""
    partial.rename(target)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _told(error: BaseException) -> str:
    """What a failed write says, without the traces that torch puts around it."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"process {rank}: {told[0]!r}" for rank, told in error.failures.items())
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
