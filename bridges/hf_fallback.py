"""The fallback backend: `AutoDecoder.from_pretrained(src, backend="hf")` wraps transformers' own model.

For architectures without a bridge. It has the forward contract, the log-prob loss, LoRA (by PEFT) and the export of a
native model; nothing of it is verified and few of our optimisations apply, which a `FallbackWarning` says at load.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from bestiary.bridges import hf_fallback_adapters as adapters
from bestiary.bridges.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    KeyMismatch,
    RemoteCodeRefused,
    UnsupportedLoad,
    UnsupportedModelType,
)
from bestiary.bridges.hf_fallback_head import find_head
from bestiary.bridges.hf_fallback_model import HFDecoder
from bestiary.bridges.hub import ADAPTER_CONFIG, CONFIG, commit_of, resolve
from bestiary.bridges.loading import float_type, read_config, usable_device
from bestiary.bridges.storage import read_json
from bestiary.models.config import LoRAConfig

_SHOWN = 6


class FallbackWarning(UserWarning):
    """A model runs on the fallback backend."""


def knows_model_type(model_type: str) -> bool:
    """Whether the installed transformers has a causal language model of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def load_fallback(
    src: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    lora: LoRAConfig | str | Path | None = None,
    mesh: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    native: frozenset[str] = frozenset(),
) -> HFDecoder:
    """Wrap the transformers model of a checkpoint, or of the base that a PEFT adapter names.

    Args:
        dtype, device, lora, revision: as `bestiary.bridges.loading.load_checkpoint`; the adapters are PEFT's.
        trust_remote_code: run the modelling code that comes with the checkpoint. Never the default.
        native: model types that have a bridge, to say so.
    Raises:
        UnsupportedLoad: an option that nothing can be built from, or PEFT is wanted and not installed.
        UnsupportedModelType: transformers has no causal language model of this type.
        RemoteCodeRefused: the checkpoint brings code and `trust_remote_code` is False.
        KeyMismatch: weights missing or of another shape.   CorruptCheckpoint, CheckpointNotFound, OfflineError.
    """
    if mesh is not None:
        raise UnsupportedLoad(f"mesh = {mesh!r} with the fallback backend.", remedy="leave it out: one device")
    if not (lora is None or isinstance(lora, LoRAConfig | str | Path)):
        raise UnsupportedLoad(
            f"lora = {lora!r} is a {type(lora).__name__}.", remedy="a LoRAConfig, or a PEFT folder or hub id"
        )
    if lora is not None:
        adapters.peft()  # before the weights are read
    asked, device = float_type(dtype), usable_device(device)
    local = Path(src).expanduser()
    if trust_remote_code and not local.is_dir():
        # transformers fetches the code too, which `resolve` leaves on the hub: code and weights of one commit
        folder, location = None, str(src)
        revision = commit_of(resolve(str(src), revision=revision, weights=False)) or revision
    else:
        folder = resolve(src, revision=revision)
        location = str(folder)
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
            options: dict[str, Any] = {"dtype": dtype, "device": device, "native": native}
            base, base_revision = _base(folder, lora)
            options |= {"revision": base_revision, "trust_remote_code": trust_remote_code}
            return load_fallback(base, lora=folder, **options)
        check_source(read_config(folder), str(folder / CONFIG), trust_remote_code=trust_remote_code)
    commit = revision if folder is None else None if local.is_dir() else commit_of(folder)
    json: dict[str, Any] | None = None
    model, unexpected = _load(location, asked, revision if folder is None else None, trust_remote_code)
    model = model.to(device).eval()
    if isinstance(lora, LoRAConfig):
        json = {**adapters.adapter_config(model, lora), "revision": commit}
        adapters.inject(model, json, dtype=lora.dtype or model.dtype)
    elif lora is not None:
        adapter_folder, json, _ = adapters.read_folder(lora, None)
        stored = adapters.stored_dtype(adapter_folder)
        wider = torch.promote_types(stored, model.dtype) == stored
        adapters.inject(model, json, dtype=stored if wider else model.dtype)
        adapters.fill(model, adapter_folder)
    wrapped = HFDecoder(model.eval(), head=find_head(model), adapter=json, name_or_path=str(src))
    wrapped.revision = commit
    wrapped.notes = tuple(_notes(model.config.model_type, native, unexpected))
    warnings.warn(f"{src} runs on the fallback backend:\n{wrapped.fallback_report()}", FallbackWarning, stacklevel=4)
    return wrapped


def check_source(config: Mapping[str, Any], read_from: str, *, trust_remote_code: bool) -> None:
    """Refuse a config that nothing here, or only code of strangers, can build.

    Raises:
        UnsupportedModelType, RemoteCodeRefused.
    """
    model_type = config.get("model_type")
    known = isinstance(model_type, str) and knows_model_type(model_type)
    if known or trust_remote_code:
        return
    if "auto_map" in config:
        raise RemoteCodeRefused(
            f"model_type = {model_type!r} is not in transformers {version('transformers')}; the checkpoint brings its "
            f"own modelling code (auto_map = {config['auto_map']!r}), which would run with your rights.",
            read_from=read_from,
            remedy="read that code, then pass trust_remote_code=True; or use a transformers that has this family",
        )
    raise UnsupportedModelType(
        f"model_type = {model_type!r} has no causal language model in transformers {version('transformers')}.",
        read_from=read_from,
        remedy="correct model_type, or install a transformers that has this family",
    )


def _load(
    location: str, dtype: torch.dtype | None, revision: str | None, trust_remote_code: bool
) -> tuple[Any, list[str]]:
    """The transformers model, and the names in the checkpoint that it does not use."""
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            location,
            dtype="auto" if dtype is None else dtype,
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # what comes from outside is never unpickled
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise CorruptCheckpoint(
            f"the weights cannot be read ({error}).", read_from=location, remedy="fetch the checkpoint again"
        ) from error
    except OSError as error:
        raise CheckpointNotFound(
            f"transformers finds no weights ({str(error).splitlines()[0]}).",
            read_from=location,
            remedy="give a folder or hub id with config.json and safetensors",
        ) from error
    missing, mismatched = sorted(info["missing_keys"]), sorted(str(entry) for entry in info["mismatched_keys"])
    if missing or mismatched:
        raise KeyMismatch(
            missing=missing,
            mismatched=mismatched,
            read_from=location,
            remedy="use the config.json that belongs to these weights",
        )
    return model, sorted(info["unexpected_keys"])


def _base(folder: Path, lora: Any) -> tuple[str, str | None]:
    """The base model that an adapter folder names, and its revision on the hub, if it names one."""
    if lora is not None:
        raise UnsupportedLoad(
            f"lora = {lora!r} beside a source that is an adapter itself.", remedy="give the base model, or no lora"
        )
    json = read_json(folder / ADAPTER_CONFIG)
    base, revision = json.get("base_model_name_or_path"), json.get("revision")
    if not isinstance(base, str) or not base:
        raise UnsupportedLoad(
            f"base_model_name_or_path = {base!r} names no base.",
            read_from=str(folder / ADAPTER_CONFIG),
            remedy="load the base with lora=FOLDER",
        )
    return base, revision if isinstance(revision, str) and revision else None


def _notes(model_type: str, native: frozenset[str], unexpected: list[str]) -> list[str]:
    notes = []
    if model_type in native:
        notes.append(f"{model_type} has a native bridge, which is verified and faster: leave backend out.")
    if unexpected:
        shown = ", ".join(unexpected[:_SHOWN]) + (" …" if len(unexpected) > _SHOWN else "")
        notes.append(f"{len(unexpected)} tensors of the checkpoint are not used by transformers' model: {shown}")
    return notes
