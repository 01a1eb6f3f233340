"""LoRA adapters as PEFT folders: `adapter_config.json` and `adapter_model.safetensors`. Reading: `peft_import.py`.

Names and layouts are those of peft 0.19.1 to 0.21.2 on transformers' modules (tried with both ends):

    module      base_model.model.<module>.lora_A.weight (r, in), .lora_B.weight (out, r)
    parameter   the same on the module that owns it; of experts lora_A (E·r, in), experts slowest, and
                lora_B (out, r·E), experts fastest. Of two adapted parameters of a module the one registered last is
                outermost, and the other's adapter lies one `.base_layer` deeper.

Where a weight lies on the other side follows from the bridge's `module_map` and rules (`bestiary.bridges.low_rank`).
An adapter is for the base that its config names: of a multimodal one modules are named as in the multimodal model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from bestiary.bridges.errors import UnsupportedAdapter
from bestiary.bridges.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from bestiary.bridges.low_rank import Factors, factors_to_hub, tensor_in_module
from bestiary.bridges.peft_config import peft_json, shortest_endings
from bestiary.bridges.rules import Captures, Expression, canonical, fill
from bestiary.bridges.score import SCORE_WEIGHT
from bestiary.bridges.together import first_writes
from bestiary.bridges.writing import Entry, staged, write_file, write_json
from bestiary.models.config import HeadKind
from bestiary.models.lora import ADAPTER_LEAVES, Site, sites
from bestiary.models.sharding import is_spread, kept, whole

if TYPE_CHECKING:
    from bestiary.bridges.bridge import Bridge
    from bestiary.models.decoder import Decoder

V = TypeVar("V", int, float)
PREFIX = "base_model.model."
SCORE_KEY = f"{PREFIX}{SCORE_WEIGHT}"  # where PEFT keeps a whole module among `modules_to_save`


@dataclass(frozen=True, eq=False)
class Place:
    """Where a weight of ours lies in transformers' modules.

    Attributes:
        module, parameter: its owner and its name there ("model.layers.0.mlp.experts", "gate_up_proj").
        layouts: the rule's expressions; captures: the numbers in the parameter's name.
        in_module: the expression whose one tensor is that parameter; None if the rule states none.
        as_parameter: whether PEFT is to be given the parameter, not the module.
    """

    site: Site
    module: str
    parameter: str
    layouts: tuple[Expression, ...]
    captures: Captures
    in_module: Expression | None
    as_parameter: bool

    @property
    def full(self) -> str:
        """Name of the parameter."""
        return f"{self.module}.{self.parameter}"

    @property
    def target(self) -> str:
        """The name that PEFT matches targets and patterns with."""
        return self.full if self.as_parameter else self.module

    @property
    def experts(self) -> int:
        """Number of experts; 0 for a matrix."""
        return self.site.weight.shape[0] if self.site.weight.dim() == 3 else 0


def hf_module(bridge: Bridge, name: str) -> str:
    """transformers' name of our module `name`: by the longest entry of `module_map` that means it or a module above."""
    pattern, captures = canonical(name)
    parts = pattern.split(".")
    for length in range(len(parts), 0, -1):
        above = ".".join(parts[:length])
        if above in bridge.module_map:
            return fill(".".join([bridge.module_map[above], *parts[length:]]), captures)
    return name


def places(bridge: Bridge, model: Decoder) -> list[Place]:
    """Every weight of `model` that can carry an adapter, in the order in which transformers registers them."""
    found = []
    for site in sites(model):
        rule, captures = bridge.rule_set.rule(site.weight_name)
        if rule is None:
            continue  # a module that was swapped in by hand; exporting its adapter is refused below
        expressions = tuple(rule.layouts.values())
        in_module = next((e for e in expressions if tensor_in_module(e) is not None), None)
        owner, _, leaf = site.weight_name.rpartition(".")
        tensor = None if in_module is None else tensor_in_module(in_module)
        parameter = leaf if tensor is None else tensor.pattern.rpartition(".")[2]
        # In a model with experts PEFT reads the names of MLP projections among `target_modules` as the experts', and
        # routers are no linear modules there: whatever is below `mlp` is named as a parameter.
        below_mlp = model.decoder_config.moe is not None and ".mlp." in site.name
        found.append(
            Place(site, hf_module(bridge, owner), parameter, expressions, captures, in_module, as_parameter=below_mlp)
        )
    return found


# ---------------------------------------------------------------------------------------------------- export


def save_adapter(bridge: Bridge, model: Decoder, path: Path, *, overwrite: bool = False) -> Path:
    """Write the adapters of `model`, and its score head, as a PEFT folder; it appears whole or not at all.

    Dropout is written as 0 where an adapter sits on a parameter, for PEFT has none there.

    Raises:
        UnsupportedAdapter: an adapter that has no place in transformers' modules, or a base weight that is trained too.
        FolderNotEmpty: the folder has content and `overwrite` is False.
    """
    kept(model)
    lora = model.decoder_config.lora
    naming = bridge.naming_of_modules(model.hf_config_json)
    named = [replace(place, module=naming.hub(place.module)) for place in places(bridge, model)]
    adapted = [place for place in named if place.site.adapter is not None]
    _check_exportable(model, adapted)
    assert lora is not None
    tensors = dict(_tensors(adapted))
    scores = model.decoder_config.head is HeadKind.SCORE
    if scores:
        tensors[SCORE_KEY] = whole(model.get_parameter(SCORE_WEIGHT))
    values = {place.target: place.site.adapter.config for place in adapted if place.site.adapter is not None}
    on_parameters = [name for place in adapted if (name := place.target) and place.as_parameter]
    r, alpha = commonest((values[name].r, values[name].alpha) for name in on_parameters or values)
    plain = {hf_module(bridge, name) for name, _ in model.named_modules() if name}
    modules = {naming.hub(name) for name in plain}
    if naming.inside is not None:  # what stands beside the model has layers of the same names
        modules |= {f"beside.{name.partition('.')[2]}" for name in plain}
    split = [name.rpartition(".") for name, _ in model.named_parameters()]
    parameters = {f"{naming.hub(hf_module(bridge, owner))}.{leaf}" for owner, _, leaf in split}
    config = peft_json(
        base=model.name_or_path or None,
        revision=model.revision,
        r=r,
        alpha=alpha,
        dropout=0.0 if on_parameters else lora.dropout,
        rslora=lora.rslora,
        target_modules=shortest_endings([p.module for p in adapted if not p.as_parameter], modules),
        target_parameters=shortest_endings(on_parameters, parameters, parts=2),
        rank_pattern=exceptions({name: value.r for name, value in values.items()}, r),
        alpha_pattern=exceptions({name: value.alpha for name, value in values.items()}, alpha),
        scores=scores,
    )
    entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]

    def write(supply: Callable[[str], Tensor]) -> None:
        with staged(path, overwrite=overwrite) as folder:
            write_file(folder / ADAPTER_WEIGHTS, entries, supply)
            write_json(folder / ADAPTER_CONFIG, config)

    if is_spread(model.parameters()):
        first_writes(path, write, tensors.__getitem__, list(tensors), overwrite=overwrite)
    else:
        write(tensors.__getitem__)
    return path


def _check_exportable(model: Decoder, adapted: list[Place]) -> None:
    for place in adapted:
        if place.in_module is None:
            raise UnsupportedAdapter(
                f"{place.site.name} is not one tensor in transformers' modules, so PEFT has no place for its adapter.",
                remedy="save with merge=True, or leave it out of lora.targets",
            )
    known = {place.site.name for place in adapted}
    lost = [site.name for site in sites(model) if site.adapter is not None and site.name not in known]
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained = [name for name in trainable if not name.endswith(ADAPTER_LEAVES) and name != SCORE_WEIGHT]
    for names, what in ((lost, "has an adapter and no rule in the bridge"), (trained, "trains beside the adapters")):
        if names:
            raise UnsupportedAdapter(
                f"{names[0]} {what}; an adapter folder would lose it ({len(names)} such in all).",
                remedy="save with merge=True",
            )


@torch.no_grad()
def _tensors(adapted: Iterable[Place]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each factor, as PEFT stores them."""
    owners: dict[str, list[Place]] = defaultdict(list)
    for place in adapted:
        owners[place.module].append(place)
    for module, inside in owners.items():
        for position, place in enumerate(inside):
            adapter, expression = place.site.adapter, place.in_module
            assert adapter is not None
            assert expression is not None
            factors = factors_to_hub(expression, Factors(whole(adapter.lora_A), whole(adapter.lora_B)))
            stem = f"{PREFIX}{module}" + ".base_layer" * (len(inside) - 1 - position)
            yield f"{stem}.lora_A.weight", factors.A.flatten(0, -2)
            B = factors.B if not place.experts else factors.B.permute(1, 2, 0).flatten(1)
            yield f"{stem}.lora_B.weight", B


def exceptions(values: Mapping[str, V], usual: V) -> dict[str, V]:
    """Endings of names whose value is not the usual one."""
    groups: dict[V, list[str]] = defaultdict(list)
    for name, value in values.items():
        groups[value].append(name)
    return {
        ending: value for value, names in groups.items() if value != usual for ending in shortest_endings(names, values)
    }


def commonest(values: Iterable[tuple[int, float]]) -> tuple[int, float]:
    """The pair that occurs most often, the first of several."""
    return Counter(values).most_common(1)[0][0]
