"""LoRA on a wrapped transformers model: PEFT's layers, our `LoRAConfig`, folders that PEFT reads.

PEFT swaps layers inside the model, so names on its disk are the model's own: `lora_A.default.weight` in memory,
`base_model.model.<module>.lora_A.weight` in a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.bridges.errors import KeyMismatch, UnsupportedAdapter, UnsupportedLoad
from bestiary.bridges.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, resolve
from bestiary.bridges.peft import PREFIX, exceptions
from bestiary.bridges.peft_config import PeftConfig, parse_peft_config, peft_json, shortest_endings
from bestiary.bridges.storage import SafetensorsSource, read_json, read_rows
from bestiary.bridges.writing import Entry, staged, write_file, write_json
from bestiary.models.config import LoRAConfig
from bestiary.models.errors import InvalidConfig
from bestiary.models.lora import matches

ADAPTER = "default"


def peft() -> Any:
    """The package.

    Raises:
        UnsupportedLoad: it is not installed.
    """
    try:
        import peft as package
    except ImportError as error:
        raise UnsupportedLoad(
            "backend = 'hf' with lora: its adapters are PEFT's, and the package `peft` is not installed.",
            remedy="pip install 'bestiary[peft]'",
        ) from error
    return package


def adapter_config(model: Any, lora: LoRAConfig) -> dict[str, Any]:
    """The `adapter_config.json` of `lora` on a transformers model.

    Raises:
        InvalidConfig: a pattern that means nothing here, or something that PEFT's linear adapters do not fit.
    """
    chosen = _targets(model, lora)
    ranks = {name: _first(name, lora.rank_pattern, lora.r) for name in chosen}
    alphas = {name: _first(name, lora.alpha_pattern, lora.alpha) for name in chosen}
    modules = [name for name, _ in model.named_modules() if name]
    json = peft_json(
        base=None,
        r=lora.r,
        alpha=lora.alpha,
        dropout=lora.dropout,
        rslora=lora.rslora,
        target_modules=shortest_endings(chosen, modules),
        target_parameters=(),
        rank_pattern=exceptions(ranks, lora.r),
        alpha_pattern=exceptions(alphas, lora.alpha),
    )
    transposed = {not isinstance(model.get_submodule(name), nn.Linear) for name in chosen}
    return {**json, "fan_in_fan_out": transposed == {True}}


def inject(model: Any, json: Mapping[str, Any], *, dtype: torch.dtype | None) -> None:
    """Put fresh adapters into `model` and freeze everything else.

    Args:
        json: an `adapter_config.json`.
        dtype: of the adapters; None: that of the layers they adapt.
    """
    package = peft()
    known = {name: value for name, value in json.items() if name not in ("peft_type", "peft_version")}
    config = package.LoraConfig(**{**known, "inference_mode": False})
    package.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    factors = set(factor_names(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in factors)
        if name in factors and dtype is not None:
            parameter.data = parameter.data.to(dtype)


def factor_names(model: Any) -> dict[str, str]:
    """Parameter name to the name in a PEFT file, of every factor."""
    end = f".{ADAPTER}.weight"
    names = [f"{name}.{leaf}" for name, _ in adapted(model) for leaf in ("lora_A", "lora_B")]
    return {name + end: f"{PREFIX}{name}.weight" for name in names}


def adapted(model: Any) -> Iterator[tuple[str, Any]]:
    """Name and PEFT layer of each adapted module."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


# ---------------------------------------------------------------------------------------------------- folders


def read_folder(src: str | Path, revision: str | None) -> tuple[Path, dict[str, Any], PeftConfig]:
    """Folder, `adapter_config.json` and its meaning.

    Raises:
        CheckpointNotFound, OfflineError: there is none.
        UnsupportedConfig: a method other than plain LoRA; names the field.
        UnsupportedAdapter: adapters on parameters.
    """
    folder = resolve(src, revision=revision)
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise UnsupportedLoad(f"lora = {str(src)!r} holds no {ADAPTER_CONFIG}.", remedy="give a folder that PEFT wrote")
    json = read_json(path)
    # Layers of GPT-2's kind store their weight transposed, and PEFT says so; here that is the wrapped model's affair.
    meaning = parse_peft_config({k: v for k, v in json.items() if k != "fan_in_fan_out"}, source=str(path))
    if meaning.target_parameters:
        raise UnsupportedAdapter(
            f"target_parameters = {list(meaning.target_parameters)!r}: the fallback backend adapts modules alone.",
            read_from=str(path),
            remedy="use a native bridge for this family, or merge the adapter with PEFT",
        )
    return folder, json, meaning


@torch.no_grad()
def fill(model: Any, folder: Path) -> None:
    """Copy the factors of a PEFT folder into the adapters of `model`; nothing is written unless all of them fit.

    Raises:
        KeyMismatch: names missing, extra or of another shape.
    """
    names = factor_names(model)
    parameters = {stored: model.get_parameter(name) for name, stored in names.items()}
    with SafetensorsSource(folder, single=ADAPTER_WEIGHTS) as source:
        found = {name: tuple(info.shape) for name, info in source.infos.items()}
        expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        differing = sorted(n for n in found.keys() & expected.keys() if found[n] != expected[n])
        if found != expected:
            raise KeyMismatch(
                missing=sorted(expected.keys() - found.keys()),
                extra=sorted(found.keys() - expected.keys()),
                mismatched=[f"{name} {found[name]}, expected {expected[name]}" for name in differing],
                read_from=source.name,
                remedy="use the base model and the adapter_config.json that belong to these weights",
            )
        for name, parameter in parameters.items():
            parameter.copy_(read_rows(source, name, 0, source.infos[name].num_rows))


def stored_dtype(folder: Path) -> torch.dtype:
    """Dtype of the factors in a folder."""
    with SafetensorsSource(folder, single=ADAPTER_WEIGHTS) as source:
        return next(iter(source.infos.values())).dtype


def check_same_adapters(live: Mapping[str, Any], other: Mapping[str, Any], *, read_from: str) -> None:
    """Refuse another rank or scaling than the model was built with.

    Raises:
        UnsupportedAdapter: names the field.
    """
    for name in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        if (live[name] or None) != (other.get(name) or None):
            raise UnsupportedAdapter(
                f"{name} = {other.get(name)!r}, and the model was built with {live[name]!r}.",
                read_from=read_from,
                remedy="load the base with lora=FOLDER: then what the folder describes is built",
            )


def save_folder(model: Any, json: Mapping[str, Any], path: Path, *, base: str | None, overwrite: bool) -> Path:
    """Write the adapters as a PEFT folder; it appears whole or not at all.

    Raises:
        UnsupportedAdapter: a base weight trains too, and the folder would lose it.
        FolderNotEmpty: the folder has content and `overwrite` is False.
    """
    names = factor_names(model)
    trained = [n for n, parameter in model.named_parameters() if parameter.requires_grad and n not in names]
    if trained:
        raise UnsupportedAdapter(
            f"{trained[0]} trains beside the adapters; an adapter folder would lose it ({len(trained)} such in all).",
            remedy="save with merge=True",
        )
    tensors = {stored: model.get_parameter(name).detach() for name, stored in names.items()}
    entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    with staged(path, overwrite=overwrite) as folder:
        write_file(folder / ADAPTER_WEIGHTS, entries, tensors.__getitem__)
        write_json(folder / ADAPTER_CONFIG, {**json, "base_model_name_or_path": base, "inference_mode": True})
    return path


# ---------------------------------------------------------------------------------------------------- merging


@torch.no_grad()
def plain_state(model: Any, *, merge: bool) -> dict[str, Tensor]:
    """The state dict of `model` as if it had no adapters, with `merge` their products added out of place.

    Tied tensors appear under every name they have. A tensor without an adapter is the parameter's own memory.
    """
    layers = dict(adapted(model)) if _has_adapters(model) else {}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        module = owner.removesuffix(".base_layer")
        if name.partition(".lora_")[0] in layers:
            continue
        if module in layers and merge and leaf == "weight":
            tensor = merged_weight(layers[module])
        state[f"{module}.{leaf}" if module in layers else name] = tensor
    return state


def merged_weight(layer: Any) -> Tensor:
    """The weight of a PEFT layer with its adapter added, in the weight's dtype; PEFT's own merge to the bit."""
    weight: Tensor = layer.get_base_layer().weight.detach()
    return (weight + layer.get_delta_weight(ADAPTER)).to(weight.dtype)


@torch.no_grad()
def fold(model: Any) -> None:
    """Fold every adapter into its weight and put the plain layers back; one-way."""
    for name, layer in list(adapted(model)):
        base = layer.get_base_layer()
        base.weight.copy_(merged_weight(layer))
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, base)
    del model.peft_config


def _has_adapters(model: Any) -> bool:
    return "peft_config" in vars(model)


def _targets(model: Any, lora: LoRAConfig) -> list[str]:
    """Names of the linear modules that the patterns mean."""
    from transformers.pytorch_utils import Conv1D

    ends = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    modules = [(name, module) for name, module in model.named_modules() if name]
    linear = [n for n, module in modules if isinstance(module, nn.Linear | Conv1D) and id(module) not in ends]
    experts = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    others = [name for name, module in modules if id(module) in ends]
    for pattern in (*lora.targets, *(p for p, _ in (*lora.rank_pattern, *lora.alpha_pattern))):
        for names, what in (
            (experts, "is a parameter of experts, and PEFT's linear adapters do not fit it"),
            (others, "is the embedding or the head, and where both are tied an adapter would part them"),
        ):
            meant = [name for name in names if matches(name, pattern)]
            if meant:
                raise InvalidConfig(
                    f"lora: {pattern!r} means {meant[0]}, which {what}.",
                    remedy="narrow the pattern; linear layers here: " + _examples(linear),
                )
        if not any(matches(name, pattern) for name in linear):
            raise InvalidConfig(
                f"lora: {pattern!r} matches no linear layer.", remedy="linear layers here: " + _examples(linear)
            )
    return [name for name in linear if any(matches(name, pattern) for pattern in lora.targets)]


def _examples(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _first(name: str, patterns: tuple[tuple[str, Any], ...], usual: Any) -> Any:
    return next((value for pattern, value in patterns if matches(name, pattern)), usual)
