"""From a model to a checkpoint that transformers loads: hub names, shapes, dtypes and a config.json to match."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bestiary.bridges.errors import (
    ConfigChanged,
    FolderNotEmpty,
    KeyMismatch,
    UnsupportedAdapter,
    UnsupportedConfig,
    UnsupportedLoad,
)
from bestiary.bridges.hub import CONFIG, GENERATION
from bestiary.bridges.loading import read_config
from bestiary.bridges.peft import save_adapter
from bestiary.bridges.plan import Plan, Transfer
from bestiary.bridges.score import head_to_hf, without_labels
from bestiary.bridges.storage import INDEX, SafetensorsSource, read_rows
from bestiary.bridges.together import first_writes
from bestiary.bridges.writing import (
    Entry,
    staged,
    write_checkpoint,
    write_file,
    write_index,
    write_json,
    writing_order,
)
from bestiary.models.config import DecoderConfig, HeadKind
from bestiary.models.lora import sites
from bestiary.models.sharding import is_spread, kept, whole

if TYPE_CHECKING:
    from bestiary.bridges.bridge import Bridge
    from bestiary.models.decoder import Decoder


def save_decoder(
    bridge: Bridge,
    model: Decoder,
    path: str | Path,
    *,
    overwrite: bool = False,
    merge: bool = False,
    max_shard_size: int | str = "5GB",
    into: str | Path | None = None,
) -> Path:
    """Write `model` as a checkpoint folder, with LoRA as a PEFT folder; it appears whole or not at all.

    Of a model that is spread over processes all call this; parameters are gathered one after the other, and the first
    process writes.

    Args:
        overwrite: replace the checkpoint in a folder that has content; other files stay.
        merge: with LoRA, write the full checkpoint with the adapters folded in (the model itself stays as it is).
        max_shard_size: bytes per file, or "5GB".
        into: an original checkpoint that holds this model among other parts (a multimodal one): write a copy of it
            with our weights in place of its own.
    Returns:
        The folder.
    Raises:
        FolderNotEmpty: the folder has content and `overwrite` is False.
        ConfigChanged: somebody changed an architecture field of `model.config`.
        UnsupportedConfig: somebody wrote another field there, which loading the export would refuse.
        UnsupportedLoad: an original that cannot take these weights.
        UnsupportedAdapter: what was trained does not fit into an adapter folder.
    """
    target = Path(path)
    if model.decoder_config.lora is not None and not merge:
        return _save_adapter(bridge, model, target, overwrite=overwrite, into=into)
    if into is not None and is_spread(model.parameters()):
        raise UnsupportedLoad(
            f"into = {into!r} for a model that is spread over processes.",
            remedy="save without it, load the result in one process, and save that with into=",
        )
    if into is not None:
        return _splice(bridge, model, Path(into), target, overwrite=overwrite)
    tensors = _tensors(bridge, model, bridge.plan_export(model.decoder_config))
    return _write(bridge, model, tensors, target, overwrite=overwrite, max_shard_size=max_shard_size)


def save_from(
    bridge: Bridge,
    model: Decoder,
    parameters: Mapping[str, Tensor],
    path: str | Path,
    *,
    max_shard_size: int | str = "5GB",
) -> Path:
    """What `save_decoder` writes, with the values of `parameters`, each looked up when its turn comes.

    Args:
        model: without adapters; its own parameters may lie on meta, they say shape and dtype.
    """
    tensors = _Tensors(bridge.plan_export(model.decoder_config), model, parameters=parameters)
    return _write(bridge, model, tensors, Path(path), overwrite=False, max_shard_size=max_shard_size)


def _write(
    bridge: Bridge, model: Decoder, tensors: _Tensors, target: Path, *, overwrite: bool, max_shard_size: int | str
) -> Path:
    config, generation = _config_to_write(bridge, model), _generation_to_write(model)

    def write(supply: Callable[[str], Tensor]) -> None:
        with staged(target, overwrite=overwrite) as folder:
            write_checkpoint(folder, tensors.entries, supply, max_shard_size=max_shard_size)
            write_json(folder / CONFIG, config)
            if generation is not None:
                write_json(folder / GENERATION, generation)

    if is_spread(tensors.parameters.values()):
        order = writing_order(tensors.entries, max_shard_size=max_shard_size)
        first_writes(target, write, tensors.supply, order, overwrite=overwrite)
    else:
        write(tensors.supply)
    return target


def _save_adapter(bridge: Bridge, model: Decoder, target: Path, *, overwrite: bool, into: str | Path | None) -> Path:
    _config_to_write(bridge, model)  # refuses a live config that describes another model
    changed: list[str] = []
    if model.hf_config_json is not None:
        ours = model.decoder_config  # the head goes into the folder
        base = bridge.parse(model.hf_config_json).decoder.with_(head=ours.head, num_labels=ours.num_labels)
        changed = _differences(base, ours)
    if into is not None or changed:
        what = f"into = {into!r}" if into is not None else f"a model whose {changed[0]} is not its checkpoint's"
        raise UnsupportedAdapter(
            f"{what}: an adapter folder holds adapters and nothing of the base.",
            remedy="pass merge=True to write the full checkpoint",
        )
    return save_adapter(bridge, model, target, overwrite=overwrite)


def named_hf_tensors(bridge: Bridge, model: Decoder, *, merge_lora: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Hub names and tensors, one at a time, in the model's order.

    A tied head is left out. A tensor that needs no rearranging is a view of the parameter. Of a model that is spread
    over processes all of them iterate together, and each is given every tensor, gathered.

    Args:
        merge_lora: add the adapters, out of place; False gives the base weights.
    """
    tensors = _tensors(bridge, model, bridge.plan_export(model.decoder_config), merge=merge_lora)
    for entry in tensors.entries:
        yield entry.name, tensors.supply(entry.name)


def _tensors(bridge: Bridge, model: Decoder, plan: Plan, *, merge: bool = True) -> _Tensors:
    """The tensors of `model` under `plan`, refused where the model is not what its config describes."""
    kept(model)
    expected = bridge.parameters(model.decoder_config)
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shared = expected.keys() & found.keys()
    differing = [f"{n} {found[n]}, expected {expected[n]}" for n in found if n in shared and found[n] != expected[n]]
    if differing or expected.keys() != found.keys():
        raise KeyMismatch(
            missing=[name for name in expected if name not in found],
            extra=[name for name in found if name not in expected],
            mismatched=differing,
            read_from="the model, against its decoder_config",
            remedy="a replaced or untied module has no hub name: save model.state_dict(), or restore the module",
        )
    return _Tensors(plan, model, merge=merge)


class _Tensors:
    """The tensors of a plan, made on demand from a model's parameters."""

    def __init__(
        self, plan: Plan, model: Decoder, *, merge: bool = True, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.parameters = own if parameters is None else parameters
        self._dtypes = {name: parameter.dtype for name, parameter in own.items()}
        adapted = [site for site in sites(model) if merge and site.adapter is not None]
        self._adapted = {site.weight_name: site for site in adapted}
        self._transfers = {transfer.hub.name: transfer for transfer in plan.transfers}
        self._made: tuple[str, Tensor] | None = None
        self.entries = [Entry(name, t.hub.shape, self._dtype(t)) for name, t in self._transfers.items()]

    @torch.no_grad()
    def supply(self, name: str) -> Tensor:
        """The hub tensor `name`."""
        transfer = self._transfers[name]
        native, piece = transfer.pieces[0]
        if len(transfer.pieces) == 1 and piece.covers_hub:
            return piece.view(self._parameter(native))
        first = self._parameter(native)
        hub = torch.empty(transfer.hub.shape, dtype=first.dtype, device=first.device)
        for native, piece in transfer.pieces:
            piece.write(hub, self._parameter(native))
        return hub

    def _dtype(self, transfer: Transfer) -> torch.dtype:
        return self._dtypes[transfer.pieces[0][0]]

    def _parameter(self, native: str) -> Tensor:
        """The parameter, gathered, its adapter added if it has one; the last one made is kept for the next expert."""
        if native not in self._adapted and not is_spread((self.parameters[native],)):
            return self.parameters[native]
        if self._made is None or self._made[0] != native:
            self._made = None  # let go first
            site = self._adapted.get(native)
            self._made = native, whole(self.parameters[native]) if site is None else site.merged()
        return self._made[1]


# ------------------------------------------------------------------------------------------------------ configs


def config_json(bridge: Bridge, model: Decoder) -> dict[str, Any]:
    """The `config.json` of `model`: its architecture in v5 spelling, and what else its checkpoint said."""
    origin = {} if model.hf_config_json is None else bridge.parse(model.hf_config_json).kept
    return _complete(bridge, model, origin)


def hf_config(bridge: Bridge, model: Decoder) -> Any:
    """A transformers config object that describes `model`."""
    from transformers import AutoConfig

    json = config_json(bridge, model)
    config = AutoConfig.for_model(json.pop("model_type"), **json)
    config.name_or_path = model.name_or_path
    return config


def hf_generation_config(model: Decoder) -> Any:
    """A transformers GenerationConfig: the checkpoint's own, or one made from the token ids of `model.config`."""
    from transformers import GenerationConfig

    if model.hf_generation_config_json is not None:
        return GenerationConfig.from_dict(dict(model.hf_generation_config_json))
    return GenerationConfig.from_model_config(model.config)


def _complete(bridge: Bridge, model: Decoder, kept: Mapping[str, Any]) -> dict[str, Any]:
    config = model.decoder_config
    return {
        **(kept if config.head is HeadKind.LM else without_labels(kept)),
        **bridge.config_to_hf(config),
        **head_to_hf(bridge, config, kept),
        "dtype": str(model.dtype).removeprefix("torch."),
        "transformers_version": version("transformers"),
    }


def _config_to_write(bridge: Bridge, model: Decoder) -> dict[str, Any]:
    """`config_json` with what trainers wrote on a live `model.config`.

    Raises:
        ConfigChanged: an architecture field that differs from the model's.
        UnsupportedConfig: any other field that loading the export would refuse, or read as another model.
    """
    live = model.__dict__.get("_config")
    json = config_json(bridge, model) if live is None else _live_json(bridge, model, live)
    again = _explicit(bridge.parse(json, source="the config.json to be written").decoder)
    ours = _explicit(model.decoder_config)
    lost = _differences(again, ours)
    if lost:
        raise UnsupportedConfig(
            lost[0],
            attrgetter(lost[0])(ours),
            f"has no place in a config of transformers' {bridge.architecture}: an export would say "
            f"{_values(again, lost[:1])}.",
            read_from="model.decoder_config",
            remedy="save model.state_dict(), or build the model from a config that this family has",
        )
    return json


def _explicit(config: DecoderConfig) -> DecoderConfig:
    return config.with_(sliding_rope=config.rope) if config.sliding_rope is None else config


def _live_json(bridge: Bridge, model: Decoder, live: Any) -> dict[str, Any]:
    _check_switches(bridge, model, live.to_dict() | {"model_type": live.model_type})  # to_dict gives the class's type
    named_so = head_to_hf(bridge, model.decoder_config, {})["architectures"]  # trainers write our class's name there
    parsed = bridge.parse(live.to_diff_dict() | {"architectures": named_so}, source="model.config")
    changed = _differences(parsed.decoder, model.decoder_config)
    if changed:
        raise ConfigChanged(
            changed,
            what=f"model.config says {_values(parsed.decoder, changed)}, the model has "
            f"{_values(model.decoder_config, changed)}.",
        )
    named = {} if live.name_or_path == model.name_or_path else {"_name_or_path": live.name_or_path}
    return _complete(bridge, model, {**parsed.kept, **named})


def _check_switches(bridge: Bridge, model: Decoder, live: Mapping[str, Any]) -> None:
    """Refuse a changed type or switch by HF's own name: one that an export would reset may change no field of ours."""
    if "text_config" in live:  # a multimodal config; its text part is compared field by field
        return
    exported = bridge.config_to_hf(model.decoder_config)
    for name, value in exported.items():
        if (name == "model_type" or isinstance(value, bool)) and live.get(name, value) != value:
            raise ConfigChanged([name], what=f"model.config says {name} = {live[name]!r}, the model has {value!r}.")


def _generation_to_write(model: Decoder) -> dict[str, Any] | None:
    live = model.__dict__.get("_generation_config")
    json: dict[str, Any] | None = model.hf_generation_config_json if live is None else live.to_diff_dict()
    return json


def _differences(ours: DecoderConfig, theirs: DecoderConfig) -> list[str]:
    """Dotted names of the fields that differ, down to the leaf where both sides have the same kind of thing."""
    names = [f.name for f in fields(DecoderConfig) if f.compare and f.name != "lora"]
    return [leaf for name in names for leaf in _leaves(name, getattr(ours, name), getattr(theirs, name))]


def _leaves(path: str, ours: Any, theirs: Any) -> list[str]:
    if ours == theirs:
        return []
    if not is_dataclass(ours) or type(ours) is not type(theirs):
        return [path]
    names = [f.name for f in fields(ours)]
    return [leaf for name in names for leaf in _leaves(f"{path}.{name}", getattr(ours, name), getattr(theirs, name))]


def _values(config: DecoderConfig, names: list[str]) -> str:
    return ", ".join(f"{name} = {attrgetter(name)(config)!r}" for name in names)


# ------------------------------------------------------------------------------------------------------ splicing


def _splice(bridge: Bridge, model: Decoder, original: Path, target: Path, *, overwrite: bool) -> Path:
    """A copy of `original`, file by file, with the tensors of `model` in place of those it held for it."""
    if target.resolve() == original.resolve():
        raise FolderNotEmpty(f"{target} is the original itself.", remedy="write the copy to another folder")
    parsed = bridge.parse(read_config(original), source=str(original / CONFIG))
    changed = _differences(parsed.decoder, model.decoder_config)
    if changed:
        asked, has = _values(parsed.decoder, changed), _values(model.decoder_config, changed)
        raise UnsupportedLoad(
            f"{original} says {asked}, the model has {has}.",
            remedy="splice into the checkpoint the model was loaded from",
        )
    with SafetensorsSource(original) as source, staged(target, overwrite=overwrite) as folder:
        plan = bridge.plan_import(
            model.decoder_config, source.infos, quantization=parsed.quantization, read_from=str(original)
        )
        ours = _tensors(bridge, model, plan)
        _check_dtypes(ours.entries, source, original)
        supply = _spliced(ours, source, plan)
        for position, file in enumerate(source.files):
            inside = [Entry(n, i.shape, i.dtype) for n, i in source.infos.items() if i.file == position]
            write_file(folder / file.name, inside, supply)
        if source.weight_map is not None:
            write_index(folder, source.weight_map, sum(i.num_rows * i.row_bytes for i in source.infos.values()))
        written = {file.name for file in source.files} | {INDEX}
        for entry in original.iterdir():
            if entry.is_file() and entry.name not in written:
                shutil.copy2(entry, folder / entry.name)
    return target


def _spliced(ours: _Tensors, source: SafetensorsSource, plan: Plan) -> Callable[[str], Tensor]:
    own = {entry.name for entry in ours.entries}
    head = {} if plan.duplicate_head is None else {plan.duplicate_head[0]: plan.duplicate_head[1]}

    def supply(name: str) -> Tensor:
        if name in head:
            return ours.parameters[head[name]]
        if name in own:
            return ours.supply(name)
        return read_rows(source, name, 0, source.infos[name].num_rows)

    return supply


def _check_dtypes(entries: list[Entry], source: SafetensorsSource, original: Path) -> None:
    for entry in entries:
        if entry.name not in source.infos or source.infos[entry.name].dtype is not entry.dtype:
            found = source.infos[entry.name].dtype if entry.name in source.infos else "MXFP4"
            raise UnsupportedLoad(
                f"{entry.name} is {found} in {original}, and {entry.dtype} in the model.",
                remedy="load the model with the original's dtype; a quantised original cannot take weights back",
            )
