"""One checkpoint under test, and what the checks of its levels share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bestiary.bridges import Bridge, Plan, SafetensorsSource
from bestiary.bridges.errors import KeyMismatch
from bestiary.bridges.streaming import export_checkpoint
from bestiary.models import DecoderConfig
from bestiary.verify.gates import GATE_VERSION, Gates
from bestiary.verify.hashes import PACKAGE, digest, own_hashes
from bestiary.verify.inputs import Inputs
from bestiary.verify.placing import CPU
from bestiary.verify.profiles import position_errors, record, rounded
from bestiary.verify.reference import quiet, reference_class
from bestiary.verify.stream import EMBEDDING, HEAD, Streamed, stream
from bestiary.verify.stream_state import StateFile, fingerprint
from bestiary.verify.streamed_models import StreamedDecoder, StreamedReference
from bestiary.verify.verdict import MAX_POINTS, Keys, LayerError, Profile

OFFSET = 4096
OFFSET_LENGTH = 48


@dataclass
class Bench:
    """A checkpoint, its bridge and the tokens it is compared on.

    Attributes:
        scratch: a folder for files of this run.
        work: where the state of a streamed comparison is kept; None: the user's cache folder.
        progress: called with a line before each layer.
        device: where the layers of V8 compute.
    """

    folder: Path
    raw: dict[str, Any]
    bridge: Bridge
    scratch: Path
    token_ids: Sequence[int]
    gates: Gates
    work: Path | None = None
    progress: Callable[[str], None] = lambda _: None
    device: torch.device = CPU
    keys: Keys = field(default_factory=Keys)
    profiles: list[Profile] = field(default_factory=list)
    _plan: Plan | KeyMismatch | None = None
    _streamed: Streamed | Exception | None = None

    @property
    def config(self) -> DecoderConfig:
        """The architecture our bridge reads."""
        return self.bridge.parse(self.raw, source=str(self.folder / "config.json")).decoder

    def plan(self) -> Plan:
        """Which stored tensor goes where; a mismatch of keys is raised at every call."""
        if isinstance(self._plan, KeyMismatch):
            raise self._plan
        if self._plan is None:
            parsed = self.bridge.parse(self.raw, source=str(self.folder / "config.json"))
            with SafetensorsSource(self.folder) as source:
                try:
                    self._plan = self.bridge.plan_import(
                        parsed.decoder, source.infos, quantization=parsed.quantization, read_from=str(self.folder)
                    )
                except KeyMismatch as error:
                    self.keys.missing += error.missing
                    self.keys.unexpected += error.extra
                    self.keys.shape_mismatch += error.mismatched
                    self._plan = error
                    raise
            self.keys.ignored_with_reason.update(self._plan.ignored)
        return self._plan

    def stored(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every stored tensor."""
        with SafetensorsSource(self.folder) as source:
            return {name: info.shape for name, info in source.infos.items()}

    def exported(self) -> Path:
        """Our export of the checkpoint, written at first use."""
        target = self.scratch / "export"
        if not target.exists():
            export_checkpoint(self.bridge, self.folder, target)
        return target

    # ------------------------------------------------------------ the streamed comparison

    @property
    def input_names(self) -> list[str]:
        """The inputs that the model has positions for."""
        return ["text"] + ["offset"] * (self.config.max_position_embeddings > OFFSET + OFFSET_LENGTH)

    @property
    def parts(self) -> list[str]:
        """What is compared teacher-forced, in the order of execution."""
        return [EMBEDDING, *(f"layer{index}" for index in range(self.config.num_hidden_layers)), HEAD]

    def inputs(self, name: str) -> Inputs:
        """The text from position 0, or its beginning at a far position."""
        ids = torch.tensor([list(self.token_ids)])
        if name == "text":
            return Inputs(ids)
        ids = ids[:, :OFFSET_LENGTH]
        return Inputs(ids, position_ids=torch.arange(ids.shape[1])[None] + OFFSET)

    def streamed(self) -> Streamed:
        """Both models layer by layer, at first use; an error is raised again at every later one."""
        if self._streamed is None:
            try:
                self._streamed = self._stream()
            except (MemoryError, OSError):
                raise
            except Exception as error:  # noqa: BLE001 - every check meets it and reports it
                self._streamed = error
        if isinstance(self._streamed, Exception):
            raise self._streamed
        return self._streamed

    def logits(self, name: str) -> tuple[Tensor, Tensor]:
        """Ours and Hugging Face's float32 logits (T, V) of one input, free-running."""
        return self.streamed().logits[name]

    def _stream(self) -> Streamed:
        hashes = {
            **own_hashes(self.bridge.config_from_hf.__module__, ""),
            "reference": _reference_hash(self.bridge.reference),
            "gate_version": str(GATE_VERSION),
            "device": str(self.device),
        }
        state = StateFile(self.work, self.folder, fingerprint(self.folder, self.token_ids, self.raw, hashes))
        with quiet():
            theirs = StreamedReference(self.bridge.reference, self.folder, self.device)
            ours = StreamedDecoder(self.bridge, self.config, self.plan(), self.folder, self.device)
            inputs = {name: self.inputs(name) for name in self.input_names}
            result = stream(theirs, ours, inputs, state, self.progress)
        for name, (mine, reference) in result.logits.items():
            errors = position_errors(mine, reference, scale=spread(reference))
            record(self.profiles, "V8", name, self.gates["V8.max"].limit, positions=errors)
            layers = self._layer_errors(name, result.figures)
            record(self.profiles, "V8", f"{name}, teacher-forced", self.gates["V8.layer"].limit, layers=layers)
        return result

    def _layer_errors(self, name: str, figures: dict[str, float]) -> list[LayerError]:
        kinds = self.config.layer_types
        found = []
        for index, part in enumerate(self.parts[:MAX_POINTS]):
            layer = index - 1 if part not in (EMBEDDING, HEAD) else None
            kind = None if layer is None else str(kinds[layer].value)
            figure = rounded(figures[f"{name}/{part}"])
            module = part if layer is None else f"model.layers.{layer}"
            found.append(LayerError(layer=layer, layer_type=kind, module=module, figure=figure))
        return found


def _reference_hash(reference: str) -> str:
    """Version of transformers and a hash of the class's own files: the same in every process, whatever is loaded."""
    cls = reference_class(reference)
    files = [Path(inspect.getfile(sys.modules[one.__module__])) for one in (cls, cls.config_class)]
    return f"{version(PACKAGE)} {digest(files)}"


def spread(logits: Tensor) -> float:
    """Standard deviation of logits (T, V), from some positions."""
    return float(logits[:: max(1, len(logits) // 16)].double().std())
