"""V1, round trip: Hugging Face's files → ours → files → both again, bit for bit.

Weights are fingerprints: no two elements of a model are equal, so a swap or a repeated slice cannot cancel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bestiary.bridges import SafetensorsSource
from bestiary.bridges.errors import UnsupportedConfig
from bestiary.bridges.storage import read_json, read_rows
from bestiary.kernels.errors import BestiaryError
from bestiary.models import Decoder
from bestiary.models.config import HeadKind
from bestiary.verify.checks import Check, Outcome, failed, holds, passed
from bestiary.verify.lab import Lab
from bestiary.verify.localise import layer_of
from bestiary.verify.measure import bit_equal
from bestiary.verify.reference import build, quiet
from bestiary.verify.verdict import Exit
from bestiary.verify.weights import fingerprint, random_bits

BOOKKEEPING = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "dtype", "_attn_implementation", "use_cache"}
)


def shard_size(parameters: Iterable[Tensor]) -> int:
    """A size in bytes that cuts a checkpoint into some three files."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters) // 3


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor of a checkpoint folder."""
    with SafetensorsSource(folder) as source:
        return {name: read_rows(source, name, 0, info.num_rows) for name, info in source.infos.items()}


@dataclass(frozen=True)
class Hub:
    """What Hugging Face wrote: the folder, its tensors, and the state dict it was written from."""

    folder: Path
    files: dict[str, Tensor]
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Trip:
    """Ours from Hugging Face's files, what it exported, and ours again from that."""

    ours: Decoder
    exported: Path
    files: dict[str, Tensor]
    again: Decoder


def written(lab: Lab, case: str, dtype: torch.dtype) -> Hub:
    """Hugging Face's checkpoint of a tiny config in the hub's layout, in several shards."""

    def write() -> Hub:
        model: Any = build(lab.reference, lab.theirs.changed(lab.cases[case]), dtype)
        if dtype is torch.float32:
            fingerprint(model)
        else:
            random_bits(model, lab.seed)
        folder = lab.folder("v1", case, str(dtype), "hub")
        with quiet():
            model.save_pretrained(folder, max_shard_size=shard_size(model.parameters()))
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        return Hub(folder, read_all(folder), state)

    return lab.once(("hub", case, dtype), write)


def _trip(lab: Lab, case: str, dtype: torch.dtype) -> Trip:
    def travel() -> Trip:
        hub = written(lab, case, dtype)
        ours = lab.ours.load(hub.folder)
        exported = lab.folder("v1", case, str(dtype), "ours")
        try:
            lab.ours.current.save(ours, exported, max_shard_size=shard_size(ours.parameters()))
        except UnsupportedConfig as error:  # no refusal: what the bridge has read it must be able to write
            told = f"our export cannot be read back: {error.what}"
            raise BestiaryError(told, remedy="correct config_to_hf") from error
        return Trip(ours, exported, read_all(exported), lab.ours.load(exported))

    return lab.once(("trip", case, dtype), travel)


def _file(lab: Lab, case: str, dtype: torch.dtype, key: str) -> Outcome:
    theirs, ours = written(lab, case, dtype).files[key], _trip(lab, case, dtype).files.get(key)
    if ours is None:
        return failed(Exit.KEYS, f"{key} is missing in our export")
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return failed(Exit.KEYS, f"{key} is {tuple(ours.shape)} {ours.dtype}, not {tuple(theirs.shape)} {theirs.dtype}")
    return holds(bit_equal(ours, theirs), Exit.KEYS, f"{key} differs in {int((ours != theirs).sum())} elements")


def _no_more_keys(lab: Lab, case: str) -> Outcome:
    extra = sorted(set(_trip(lab, case, torch.float32).files) - set(written(lab, case, torch.float32).files))
    return holds(not extra, Exit.KEYS, f"our export has {len(extra)} keys of its own, first {extra[:1]}")


def _sharded(lab: Lab, case: str) -> Outcome:
    for folder in (written(lab, case, torch.float32).folder, _trip(lab, case, torch.float32).exported):
        count = len(list(folder.glob("model-*.safetensors")))
        if count < 2:
            return failed(Exit.INCONCLUSIVE, f"{folder.name} has {count} shards, at least 2 needed")
    return passed()


def _different(a: Decoder, b: Decoder) -> list[str]:
    theirs = dict(b.named_parameters())
    return [name for name, parameter in a.named_parameters() if not bit_equal(parameter, theirs[name])]


def _imported_again(lab: Lab, case: str, dtype: torch.dtype) -> Outcome:
    trip = _trip(lab, case, dtype)
    wrong = _different(trip.ours, trip.again)
    return holds(not wrong, Exit.KEYS, f"{len(wrong)} parameters differ after export and import, first {wrong[:1]}")


def _two_layouts(lab: Lab, case: str) -> Outcome:
    """The hub's files and Hugging Face's state dict in memory (fused experts) give the same parameters."""
    memory = lab.ours.build(lab.cases[case], written(lab, case, torch.float32).state, torch.float32)
    wrong = _different(_trip(lab, case, torch.float32).ours, memory)
    return holds(not wrong, Exit.KEYS, f"{len(wrong)} parameters differ between layouts, first {wrong[:1]}")


def _reload(lab: Lab, case: str) -> tuple[Any, dict[str, Any]]:
    """Hugging Face's model of our export, and its loading report."""

    def load() -> tuple[Any, dict[str, Any]]:
        with quiet():
            loaded: tuple[Any, dict[str, Any]] = lab.hf_class.from_pretrained(
                _trip(lab, case, torch.float32).exported, dtype=torch.float32, output_loading_info=True
            )
        return loaded

    return lab.once(("reload", case), load)


def _hugging_face_loads(lab: Lab, case: str) -> Outcome:
    model, info = _reload(lab, case)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            return failed(Exit.KEYS, f"transformers reports {kind}: {sorted(map(str, info[kind]))[:2]}")
    state = model.state_dict()
    wrong = [
        name for name, tensor in written(lab, case, torch.float32).state.items() if not bit_equal(state[name], tensor)
    ]
    return holds(not wrong, Exit.KEYS, f"{len(wrong)} tensors differ in transformers, first {wrong[:1]}")


def config_differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Fields in which two config dumps of transformers differ, bookkeeping aside."""
    names = sorted((theirs.keys() | ours.keys()) - BOOKKEEPING)
    return [
        f"{name}: {theirs.get(name)!r} became {ours.get(name)!r}"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def _config(lab: Lab, case: str) -> Outcome:
    config_class = lab.hf_class.config_class
    with quiet():
        theirs = config_class.from_pretrained(written(lab, case, torch.float32).folder).to_dict()
        ours = config_class.from_pretrained(_trip(lab, case, torch.float32).exported).to_dict()
    wrong = _semantic(lab, theirs, ours)
    return holds(not wrong, Exit.KEYS, f"config.json differs: {'; '.join(wrong[:3])}")


def _semantic(lab: Lab, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The differences that remain when each of ours is one that our bridge reads back to the same architecture."""
    differences = config_differences(theirs, ours)
    if not differences or lab.ours.decoder_config(theirs) != lab.ours.decoder_config(ours):
        return differences
    return [text for text in differences if text.partition(":")[0] not in DERIVED]


DERIVED = frozenset({"max_window_layers", "decoder_sparse_step", "mlp_only_layers", "_sliding_window_pattern"})
"""Shorthands for a list of layers, which an export may spell otherwise; the layers themselves must be equal."""


def _architecture(lab: Lab, case: str) -> Outcome:
    config = lab.decoder_config(case)
    trip = _trip(lab, case, torch.float32)
    exported = lab.ours.decoder_config(read_json(trip.exported / "config.json"))
    for name, other in (("the hub's config.json", trip.ours.decoder_config), ("our export", exported)):
        if other != config:
            return failed(Exit.KEYS, f"the architecture read from {name} differs from the one of the tiny config")
    return passed()


def _architectures(lab: Lab, case: str) -> Outcome:
    """The class that transformers' auto classes and other readers build."""
    files = (written(lab, case, torch.float32).folder, _trip(lab, case, torch.float32).exported)
    theirs, ours = (read_json(folder / "config.json").get("architectures") for folder in files)
    return holds(theirs == ours, Exit.KEYS, f"our export names {ours}, Hugging Face's {theirs}")


def _stream(lab: Lab, case: str) -> Outcome:
    trip = _trip(lab, case, torch.float32)
    streamed = dict(lab.ours.current.named_hf_tensors(trip.ours))
    wrong = [
        name for name, tensor in trip.files.items() if name not in streamed or not bit_equal(streamed[name], tensor)
    ]
    extra = sorted(set(streamed) - set(trip.files))
    return holds(not wrong and not extra, Exit.KEYS, f"named_hf_tensors differs from the export: {(wrong + extra)[:2]}")


def plan(lab: Lab) -> list[Check]:
    """One check for each tensor in Hugging Face's files, then each config as a whole; bfloat16 bits for the first."""
    checks = []
    for case in lab.cases:
        checks += [
            Check(f"{case}/{key}", partial(_file, lab, case, torch.float32, key), layer_of(key))
            for key in written(lab, case, torch.float32).files
        ]
        checks += [
            Check(f"{case}/no more keys", partial(_no_more_keys, lab, case)),
            Check(f"{case}/shards", partial(_sharded, lab, case)),
            Check(f"{case}/imported again", partial(_imported_again, lab, case, torch.float32)),
            Check(f"{case}/two layouts", partial(_two_layouts, lab, case)),
            Check(f"{case}/transformers loads", partial(_hugging_face_loads, lab, case)),
            Check(f"{case}/config.json", partial(_config, lab, case)),
            Check(f"{case}/architecture", partial(_architecture, lab, case)),
            Check(f"{case}/stream", partial(_stream, lab, case)),
        ]
    first = next(iter(lab.cases))
    if lab.head is not HeadKind.LM:
        checks.append(Check(f"{first}/architectures", partial(_architectures, lab, first)))
    checks += [
        Check(f"{first}/bfloat16/{key}", partial(_file, lab, first, torch.bfloat16, key), layer_of(key))
        for key in written(lab, first, torch.bfloat16).files
    ]
    checks.append(Check(f"{first}/bfloat16/imported again", partial(_imported_again, lab, first, torch.bfloat16)))
    return checks
