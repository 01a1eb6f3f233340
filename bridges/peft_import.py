"""PEFT adapters read into our own LoRA: names and shapes decide first, tensors are read last.

Two layouts are understood, told apart by their names: that of peft 0.19 and later (see `peft.py`), and one pair per
expert and projection (`….experts.7.gate_proj.lora_A.weight`), as adapters from before transformers 5 and of inference
engines have it. The second becomes one adapter of the fused weight: ranks add up, the scaling stays.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bestiary.bridges.errors import (
    CheckpointNotFound,
    KeyMismatch,
    UnsupportedAdapter,
    UnsupportedConfig,
    UnsupportedLoad,
)
from bestiary.bridges.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, resolve
from bestiary.bridges.low_rank import Factors, factors_from_hub, hub_names, is_transposed
from bestiary.bridges.peft import PREFIX, SCORE_KEY, Place, commonest, exceptions, places
from bestiary.bridges.peft_config import PeftConfig, parse_peft_config, shortest_endings
from bestiary.bridges.plan import Naming
from bestiary.bridges.rules import Expression, canonical
from bestiary.bridges.score import SCORE_WEIGHT
from bestiary.bridges.storage import SafetensorsSource, TensorInfo, read_json, read_rows
from bestiary.models.config import DecoderConfig, HeadKind, LoRAConfig
from bestiary.models.lora import adapter, sites
from bestiary.models.sharding import put

if TYPE_CHECKING:
    from bestiary.bridges.bridge import Bridge
    from bestiary.models.decoder import Decoder

_KEY = re.compile(re.escape(PREFIX) + r"(?P<module>.+?)(?P<depth>(?:\.base_layer)*)\.(?P<leaf>lora_[AB])\.weight")
_REMEDY = "use the base model this adapter was trained on; an adapter that PEFT wrote has all of these"


@dataclass(frozen=True, eq=False)
class Part:
    """The adapter of one weight of ours, in a file.

    Attributes:
        expression: how its factors come out of those in the file.
        keys: hub name of a tensor to the names of its lora_A and lora_B.
        rank, alpha: of the adapter as a whole.
    """

    place: Place
    expression: Expression
    keys: Mapping[str, tuple[str, str]]
    rank: int
    alpha: float

    @property
    def fused(self) -> bool:
        """Whether one pair holds all experts."""
        return self.place.experts > 0 and len(self.keys) == 1

    def factors(self, tensors: Mapping[str, Tensor]) -> Factors:
        """The factors of our weight from the file's tensors (on meta: their shapes)."""
        experts = self.place.experts

        def read(name: str) -> Factors | None:
            if name not in self.keys:
                return None
            A, B = (tensors[key] for key in self.keys[name])
            if self.fused:
                A, B = A.unflatten(0, (experts, -1)), B.unflatten(1, (-1, experts)).permute(2, 0, 1)
            return Factors(A, B)

        shape = self.place.site.weight.shape
        found = factors_from_hub(self.expression, self.place.captures, read, experts=shape[0], ndim=len(shape))
        assert found is not None
        return found

    def stored(self) -> list[str]:
        """Names of its tensors."""
        return [key for pair in self.keys.values() for key in pair]


@dataclass(frozen=True, eq=False)
class AdapterFile:
    """A PEFT folder understood: what to build, and what to put there.

    Attributes:
        lora: the adapters as our config states them, in the dtype of the file; without dropout (which changes no
            logit) where some sit on experts or routers, as single experts of an earlier PEFT could have it.
        base: name or path of the model it was trained on, or None.
        num_labels: rows of the score head that the folder holds; None without one.
    """

    folder: Path
    lora: LoRAConfig
    base: str | None
    parts: tuple[Part, ...]
    num_labels: int | None = None

    def lora_for(self, dtype: torch.dtype) -> LoRAConfig:
        """`lora` for a model in `dtype`: adapters keep a wider dtype of their own, and else have the model's."""
        stored = self.lora.dtype
        wider = stored is not None and stored != dtype and torch.promote_types(stored, dtype) == stored
        return self.lora if wider else replace(self.lora, dtype=None)

    @torch.no_grad()
    def fill(self, model: Decoder) -> None:
        """Copy the factors into the adapters of `model`, which was built with `lora`, and the score head if any."""
        targets = {site.name: site.adapter for site in sites(model)}
        with SafetensorsSource(self.folder, single=ADAPTER_WEIGHTS) as source:
            for part in self.parts:
                found = targets[part.place.site.name]
                assert found is not None
                tensors = {key: read_rows(source, key, 0, source.infos[key].num_rows) for key in part.stored()}
                factors = part.factors(tensors)
                put(found.lora_A, factors.A)
                put(found.lora_B, factors.B)
            if self.num_labels is not None:
                put(model.get_parameter(SCORE_WEIGHT), read_rows(source, SCORE_KEY, 0, self.num_labels))


def read_peft_config(folder: Path) -> PeftConfig:
    """The `adapter_config.json` of a folder.

    Raises:
        CheckpointNotFound: there is none.
        UnsupportedConfig, CorruptCheckpoint: see `parse_peft_config`.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointNotFound(f"no {ADAPTER_CONFIG} in {folder}.", remedy="give a folder that PEFT wrote")
    return parse_peft_config(read_json(path), source=str(path))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()


def base_of(folder: Path, other: LoRAConfig | str | Path | None) -> tuple[str, str | None]:
    """The model that an adapter folder names as its base, and its revision on the hub, if it names one.

    Raises:
        UnsupportedLoad: it names none, or `other` asks for a second adapter.
    """
    config = read_peft_config(folder)
    base = config.base
    if base is None or other is not None:
        what = "names no base_model_name_or_path" if base is None else f"is an adapter itself, and lora = {other!r}"
        raise UnsupportedLoad(
            f"{folder} {what}.",
            read_from=str(folder / ADAPTER_CONFIG),
            remedy="from_pretrained(base, lora=adapter_folder), with one adapter",
        )
    return base, config.revision


def read_adapter(bridge: Bridge, config: DecoderConfig, src: str | Path, *, revision: str | None = None) -> AdapterFile:
    """Understand a PEFT adapter for the model that `config` describes; no tensor is read yet.

    Args:
        src: a folder or hub id.   config: of the base; its own `lora` does not count.
    Raises:
        UnsupportedConfig: a field of the adapter that is not plain LoRA.
        UnsupportedAdapter: an adapter on the head or the embedding.
        KeyMismatch: tensors that belong to no module here, halves of pairs, missing targets, wrong shapes.
        CheckpointNotFound, CorruptCheckpoint: the files.
    """
    folder = resolve(src, revision=revision)
    peft = read_peft_config(folder)
    skeleton = bridge.decoder(config.with_(lora=None), device="meta")
    with SafetensorsSource(folder, single=ADAPTER_WEIGHTS) as source:
        infos = dict(source.infos)
    num_labels = _score_rows(infos, config.hidden_size, folder) if peft.scores else None
    reading = _Reading(peft, places(bridge, skeleton), infos, folder)
    parts = reading.parts(bridge.namings)
    dtype = reduce(torch.promote_types, (infos[key].dtype for part in parts for key in part.stored()))
    names = [site.name for site in sites(skeleton)]
    ranks = {part.place.site.name: part.rank for part in parts}
    alphas = {part.place.site.name: part.alpha for part in parts}
    lora = _lora_config(peft, ranks, alphas, names, dtype)
    if not all(part.place.site.takes_dropout for part in parts):
        lora = replace(lora, dropout=0.0)
    return AdapterFile(folder, lora, peft.base, tuple(parts), num_labels)


def _score_rows(infos: dict[str, TensorInfo], width: int, folder: Path) -> int:
    """Rows of the score head in an adapter file, which is taken out of `infos`."""
    info = infos.pop(SCORE_KEY, None)
    if info is None or len(info.shape) != 2 or info.shape[1] != width:
        found = [] if info is None else [f"{SCORE_KEY} {list(info.shape)}, expected [labels, {width}]"]
        raise KeyMismatch(
            missing=[SCORE_KEY] if info is None else [],
            mismatched=found,
            read_from=str(folder / ADAPTER_WEIGHTS),
            remedy=_REMEDY,
        )
    return info.shape[0]


def scored_by(adapter: AdapterFile, config: DecoderConfig, *, asked: str | None) -> DecoderConfig:
    """`config` of the base under the score head that an adapter folder brings.

    Raises:
        UnsupportedLoad: a language model was asked for.   UnsupportedAdapter: a base with another number of labels.
    """
    labels = adapter.num_labels
    assert labels is not None
    if asked == HeadKind.LM:
        raise UnsupportedLoad(
            f'head = "lm", and the adapter in {adapter.folder} is that of a reward model.',
            remedy="drop one of the two",
        )
    if config.head is HeadKind.SCORE and config.num_labels != labels and asked is None:
        raise UnsupportedAdapter(
            f"{SCORE_KEY} has {labels} rows, and the base scores {config.num_labels} labels.",
            read_from=str(adapter.folder),
            remedy="use the base model this adapter was trained on",
        )
    return config.with_(head=HeadKind.SCORE, num_labels=labels)


def load_adapter(bridge: Bridge, model: Decoder, src: str | Path, *, revision: str | None = None) -> None:
    """Put the values of a PEFT adapter into the adapters that `model` has.

    Raises:
        UnsupportedAdapter: the model's adapters sit elsewhere, or have another rank or scaling; nothing is changed.
        and what `read_adapter` raises.
    """
    found = read_adapter(bridge, model.decoder_config, src, revision=revision)
    rows = model.decoder_config.num_labels if model.decoder_config.head is HeadKind.SCORE else None
    if rows != found.num_labels:
        raise UnsupportedAdapter(
            f"the adapter holds {found.num_labels or 'no'} rows of a score head, the model {rows or 'none'}.",
            read_from=str(found.folder),
            remedy="load both together: from_pretrained(base, lora=adapter_folder)",
        )
    wanted = model.decoder_config.with_(lora=found.lora)
    theirs = {name: adapter(wanted, name) for name in (part.place.site.name for part in found.parts)}
    ours = {site.name: site.adapter.config for site in sites(model) if site.adapter is not None}
    differing = [n for n in theirs.keys() | ours.keys() if _described(theirs.get(n)) != _described(ours.get(n))]
    if differing:
        name = min(differing)
        raise UnsupportedAdapter(
            f"{name} has {_described(theirs.get(name))} in the adapter and {_described(ours.get(name))} in the model "
            f"({len(differing)} differ in all).",
            read_from=str(found.folder),
            remedy="adapters are built in before construction: from_pretrained(base, lora=adapter_folder)",
        )
    found.fill(model)


def _described(lora: LoRAConfig | None) -> str:
    return "no adapter" if lora is None else f"r = {lora.r}, scaling = {lora.scaling}"


def _lora_config(
    peft: PeftConfig, ranks: Mapping[str, int], alphas: Mapping[str, float], names: list[str], dtype: torch.dtype
) -> LoRAConfig:
    """Our config of adapters on the weights in `ranks`, `names` being all that can carry one."""
    r, alpha = commonest((ranks[name], alphas[name]) for name in ranks)
    return LoRAConfig(
        r=r,
        alpha=alpha,
        targets=tuple(shortest_endings(ranks, [*names, "lm_head", "model.embed_tokens"])),
        dropout=peft.dropout,
        rslora=peft.rslora,
        rank_pattern=tuple(exceptions(ranks, r).items()),
        alpha_pattern=tuple(exceptions(alphas, alpha).items()),
        dtype=dtype,
    )


class _Reading:
    """The tensors of an adapter file brought together with the places that can hold them; what does not fit is kept."""

    def __init__(self, peft: PeftConfig, known: list[Place], infos: Mapping[str, TensorInfo], folder: Path) -> None:
        self.peft, self.known, self.folder = peft, known, folder
        self.meta = {key: torch.empty(info.shape, device="meta") for key, info in infos.items()}
        self.missing: list[str] = []
        self.extra: list[str] = []
        self.mismatched: list[str] = []
        self.pairs: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        for key in infos:
            match = _KEY.fullmatch(key)
            if match is None:
                self.extra.append(key)
            else:
                self.pairs[match["module"]][match["depth"].count(".base_layer")][match["leaf"]] = key
        self.owners: dict[str, list[Place]] = defaultdict(list)
        self.split: dict[str, tuple[Place, Expression, str]] = {}
        for place in known:
            if place.in_module is not None:
                self.owners[place.module].append(place)
            for expression in place.layouts:
                names = hub_names(expression, place.captures, experts=place.experts) if place.experts else []
                self.split |= {n.removesuffix(".weight"): (place, expression, n) for n in names if len(names) > 1}

    def parts(self, namings: Iterable[Naming]) -> list[Part]:
        """What each place gets.

        Raises:
            UnsupportedAdapter, KeyMismatch: see `read_adapter`.
        """
        naming = self._recognise(tuple(namings))
        parts: list[Part] = []
        split: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for module, depths in self.pairs.items():
            ours = naming.ruled(module)
            barrier = self._barrier(module, [] if ours is None else self.owners.get(ours, []))
            if barrier is not None:
                self.extra += [f"{key} (outside {barrier})" for leaves in depths.values() for key in leaves.values()]
            elif ours in self.owners:
                parts += self._fused(module, depths, self.owners[ours])
            elif ours in self.split:
                split[self.known.index(self.split[ours][0])].append((ours, module))
            else:
                self.extra += [key for leaves in depths.values() for key in leaves.values()]
        joined = [self._joined(self.known[index], stems) for index, stems in split.items()]
        parts += [part for part in joined if part is not None]
        self._check_complete(naming, {id(part.place) for part in parts})
        self._refuse()
        return parts

    def _barrier(self, module: str, inside: list[Place]) -> str | None:
        """What in the config keeps PEFT from adapting `module`; parameters named one by one are never kept from it."""
        named = any(self.peft.targets_parameter(f"{module}.{place.parameter}") for place in inside)
        return None if named else self.peft.barrier(module)

    def _recognise(self, namings: tuple[Naming, ...]) -> Naming:
        for naming in namings:
            if any((ours := naming.ruled(m)) in self.owners or ours in self.split for m in self.pairs):
                return naming
        return namings[0]

    def _fused(self, module: str, depths: Mapping[int, dict[str, str]], inside: list[Place]) -> list[Part]:
        """The adapters on one module: a linear layer, or a module that owns adapted parameters."""
        named = [place for place in inside if self.peft.targets_parameter(f"{module}.{place.parameter}")]
        wanted = inside if len(inside) == 1 and not inside[0].experts else named
        if sorted(depths) != list(range(len(wanted))):
            self.mismatched.append(
                f"{module} with {len(depths)} adapters, target_parameters names {len(named)} of its parameters"
            )
            return []
        parts = []
        for depth, place in enumerate(reversed(wanted)):
            pair, expression = self._pair(module, depth, depths[depth]), place.in_module
            assert expression is not None
            name = f"{module}.{place.parameter}" if place in named else module
            if pair is None:
                continue
            rank = self.peft.rank(name)
            hub = hub_names(expression, place.captures, experts=0)[0]
            part = Part(place, expression, {hub: pair}, rank, self.peft.alpha_of(name))
            self._check_version(part)
            if self._fits(pair, rank * max(place.experts, 1)) and self._whole(part) is not None:
                parts.append(part)
        return parts

    def _joined(self, place: Place, stems: list[tuple[str, str]]) -> Part | None:
        """One adapter from those of each expert and projection."""
        expression = self.split[stems[0][0]][1]
        keys: dict[str, tuple[str, str]] = {}
        ranks: dict[str, int] = {}
        for ours, module in stems:
            pair = self._pair(module, 0, self.pairs[module][0])
            ranks[module] = self.peft.rank(module)
            if pair is not None and self._fits(pair, ranks[module]):
                keys[self.split[ours][2]] = pair
        kinds = {_kind(name) for name in keys}
        names = hub_names(expression, place.captures, experts=place.experts)
        self.missing += [f"an adapter on {name}" for name in names if _kind(name) in kinds and name not in keys]
        scalings = {self.peft.alpha_of(module) / self._divisor(rank) for module, rank in ranks.items()}
        if len(scalings) > 1:
            self.mismatched.append(f"{place.full} with scalings {sorted(scalings)} of its experts, expected one")
        if self.missing or self.mismatched:
            return None
        part = Part(place, expression, keys, rank=0, alpha=0.0)
        factors = self._whole(part)
        if factors is None:
            return None
        module, rank = next(iter(ranks.items()))
        growth = self._divisor(factors.rank) / self._divisor(rank)  # the scaling stays what it was
        return replace(part, rank=factors.rank, alpha=self.peft.alpha_of(module) * growth)

    def _pair(self, module: str, depth: int, leaves: Mapping[str, str]) -> tuple[str, str] | None:
        absent = [leaf for leaf in ("lora_A", "lora_B") if leaf not in leaves]
        self.missing += [f"{PREFIX}{module}{'.base_layer' * depth}.{leaf}.weight" for leaf in absent]
        return None if absent else (leaves["lora_A"], leaves["lora_B"])

    def _fits(self, pair: tuple[str, str], rank: int) -> bool:
        """Whether both halves are matrices of the rank that the config states."""
        A, B = (tuple(self.meta[key].shape) for key in pair)
        fits = len(A) == len(B) == 2 and A[0] == B[1] == rank
        if not fits:
            self.mismatched.append(f"{pair[0]} {list(A)} with lora_B {list(B)}, expected {rank} rows and columns")
        return fits

    def _whole(self, part: Part) -> Factors | None:
        """The shapes of the factors, on meta; None if their product has not the shape of the weight."""
        shape = list(part.place.site.weight.shape)
        try:
            factors = part.factors(self.meta)
        except RuntimeError as error:  # halves that cannot be stacked or joined
            self.mismatched.append(f"{part.stored()[0]}: {str(error).splitlines()[0]}")
            return None
        product = [*factors.B.shape[:-1], factors.A.shape[-1]]
        if product != shape:
            self.mismatched.append(f"{part.stored()[0]} of a product {product}, expected {shape}")
            return None
        return factors

    def _divisor(self, rank: int) -> float:
        return rank**0.5 if self.peft.rslora else rank

    def _check_version(self, part: Part) -> None:
        """Refuse expert adapters of the layout that peft had before 0.19, whose A and B lie the other way round."""
        if part.fused and not is_transposed(part.expression) and self.peft.version < (0, 19):
            raise UnsupportedConfig(
                "peft_version",
                ".".join(map(str, self.peft.version)) if self.peft.version else None,
                f"stored the adapter of {part.place.full} with A and B the other way round.",
                read_from=self.peft.source,
                remedy="load it with the peft that wrote it, merge_and_unload, and load the full checkpoint",
            )

    def _check_complete(self, naming: Naming, filled: set[int]) -> None:
        """Every module and parameter that the config names must be there."""
        for place in self.known:
            module = naming.hub(place.module)
            named = self.peft.targets_parameter(f"{module}.{place.parameter}")
            if not place.as_parameter:
                named = named or self.peft.targets_module(module)
            if named and id(place) not in filled and module not in self.pairs:
                self.missing.append(f"{PREFIX}{module}.lora_A.weight")
        if not filled and not (self.missing or self.extra or self.mismatched):
            self.missing.append(f"{PREFIX}….lora_A.weight")

    def _refuse(self) -> None:
        for key in self.extra:
            for leaf in ("lm_head", "embed_tokens"):
                if leaf in key.split("."):
                    raise UnsupportedAdapter(
                        f"{key} adapts {leaf}, which takes no adapter here (a tied head and embedding would part).",
                        read_from=str(self.folder),
                        remedy="merge the adapter with PEFT (merge_and_unload) and load the full checkpoint",
                    )
        if self.missing or self.extra or self.mismatched:
            raise KeyMismatch(
                missing=self.missing,
                extra=self.extra,
                mismatched=self.mismatched,
                read_from=str(self.folder / ADAPTER_WEIGHTS),
                remedy=_REMEDY,
            )


def _kind(hub_name: str) -> str:
    return canonical(hub_name)[0]
