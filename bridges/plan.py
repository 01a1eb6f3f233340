"""Which hub tensor goes where: decided from names and shapes alone, before any weight is read.

A plan is total or it is an error: every hub tensor is consumed once or ignored for a reason, every element of every
parameter is written once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch

from bestiary.bridges.errors import InvalidRules, KeyMismatch, UnsupportedConfig
from bestiary.bridges.pieces import Box, HubTensor, Piece, Shape, extent
from bestiary.bridges.rules import Ignore, RuleSet, canonical
from bestiary.bridges.score import SCORE_WEIGHT
from bestiary.bridges.storage import TensorInfo
from bestiary.models.lora import ADAPTER_LEAVES

_ANCHOR = "model.embed_tokens.weight"
_HEAD = re.compile(r"lm_head\.")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Naming:
    """How a kind of checkpoint prefixes the names in the rules, and what it holds beside them.

    Attributes:
        prefixes: prefix in the rules to prefix in the checkpoint; a name with none of the latter is not the model's.
        ignores: names of the parts that are not ours (the vision tower beside a text model), in the checkpoint's words.
        inside: the field of a config.json under which the model is described, where transformers' own model of such a
            checkpoint names its modules so; None: it names them otherwise.
    """

    name: str
    prefixes: Mapping[str, str] = field(default_factory=lambda: {"": ""}, hash=False)
    ignores: tuple[Ignore, ...] = ()
    inside: str | None = None

    def hub(self, ruled: str) -> str:
        """The checkpoint's name of what the rules call `ruled`: the same where no prefix means it (a score head)."""
        named = (theirs + ruled[len(ours) :] for ours, theirs in self.prefixes.items() if ruled.startswith(ours))
        return next(named, ruled)

    def ruled(self, hub: str) -> str | None:
        """The rules' name of what the checkpoint calls `hub`; None if that is not part of the model."""
        owned = [(ours, theirs) for ours, theirs in self.prefixes.items() if hub.startswith(theirs)]
        return next((ours + hub[len(theirs) :] for ours, theirs in owned), None)

    def reason_to_ignore(self, hub: str, rules: RuleSet) -> str | None:
        """Why nobody reads `hub`; None if somebody should."""
        ruled = self.ruled(hub)
        from_rules = None if ruled is None else rules.reason_to_ignore(ruled)
        return from_rules or next((ignored.reason for ignored in self.ignores if ignored.matches(hub)), None)


PLAIN = Naming("plain")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One hub tensor and the pieces of parameters it is made of: (parameter, piece)."""

    hub: HubTensor
    pieces: tuple[tuple[str, Piece], ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter, the layout it is found in, and its pieces."""

    native: str
    layout: str
    pieces: tuple[Piece, ...]

    @property
    def stored(self) -> dict[str, Shape]:
        """Name and shape of the hub tensors it needs."""
        return {name: shape for piece in self.pieces for name, shape in piece.hub.stored.items()}


@dataclass(frozen=True)
class Plan:
    """The correspondence of one model and one checkpoint.

    Attributes:
        items: one per parameter, in the model's order.
        naming: the prefixes of the checkpoint.
        ignored: hub names that are not read, with the reason.
        duplicate_head: (hub name, parameter) of a head stored although the config ties it; to be compared.
        fresh: parameters that the checkpoint does not hold (adapters, a new head); the loader initialises them.
    """

    items: tuple[Item, ...]
    naming: Naming = PLAIN
    ignored: Mapping[str, str] = field(default_factory=dict)
    duplicate_head: tuple[str, str] | None = None
    fresh: tuple[str, ...] = ()

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The same pieces, by hub tensor."""
        grouped: dict[HubTensor, list[tuple[str, Piece]]] = {}
        for item in self.items:
            for piece in item.pieces:
                grouped.setdefault(piece.hub, []).append((item.native, piece))
        return tuple(Transfer(hub, tuple(pieces)) for hub, pieces in grouped.items())

    def within(self, boxes: Mapping[str, Box]) -> Plan:
        """What of it fills these parts of the parameters, one box for each."""
        cut = [
            replace(item, pieces=tuple(part for piece in item.pieces if (part := piece.within(boxes[item.native]))))
            for item in self.items
        ]
        return replace(self, items=tuple(cut))

    @property
    def layouts(self) -> dict[str, str]:
        """Parameter name to layout name."""
        return {item.native: item.layout for item in self.items}


def plan_import(
    rules: RuleSet,
    parameters: Mapping[str, Shape],
    hub: Mapping[str, TensorInfo],
    *,
    namings: Iterable[Naming] = (PLAIN,),
    tied: bool = False,
    new_head: bool = False,
    quantization: str | None = None,
    read_from: str | None = None,
) -> Plan:
    """The plan that fills `parameters` from the tensors of `hub`.

    Args:
        parameters: name and shape of each parameter; adapters (`…lora_A`) become `fresh`.
        hub: name, shape and dtype of each stored tensor.
        namings: prefix schemes to recognise, by the name of the embedding.
        tied: whether the config ties head and embedding; a stored head is then a duplicate to compare.
        new_head: `score.weight` becomes `fresh`, and a language-model head is not read.
        quantization: `quantization_config.quant_method` of the config.
    Raises:
        KeyMismatch: lists what is missing, extra, ambiguous (two layouts at once) or of the wrong shape or dtype.
        UnsupportedConfig: MXFP4 tensors without the config that announces them, or the other way round.
    """
    naming = _recognise(rules, tuple(namings), hub, read_from)
    absent = (*ADAPTER_LEAVES, SCORE_WEIGHT) if new_head else ADAPTER_LEAVES
    fresh = tuple(name for name in parameters if name.endswith(absent))
    missing: list[str] = []
    ambiguous: list[str] = []
    items: list[Item] = []
    for native in parameters:
        if native in fresh:
            continue
        candidates = list(_candidates(rules, native, parameters, naming))
        found = [item for item in candidates if any(name in hub for name in item.stored)]
        if len(found) > 1:
            ambiguous += [f"{native} as {item.layout}" for item in found]
        items += found[:1]
        if not found:
            missing += list(candidates[0].stored) if candidates else [f"a rule for {native}"]
    head = _duplicate_head(rules, naming, parameters, hub, tied)
    plan = Plan(tuple(items), naming, duplicate_head=head, fresh=fresh)
    wanted = {name: transfer.hub for transfer in plan.transfers for name in transfer.hub.stored}
    left = [name for name in hub if name not in wanted and (head is None or name != head[0])]
    ignored = {name: reason for name in left if (reason := naming.reason_to_ignore(name, rules)) is not None}
    ignored |= _ignored_layers(rules, naming, parameters, left)
    ignored |= _replaced_head(rules, naming, left) if new_head else {}
    missing = list(dict.fromkeys([*missing, *(name for name in wanted if name not in hub)]))
    extra = [name for name in left if name not in ignored]
    expected = {name: tensor.stored[name] for name, tensor in wanted.items()}
    expected |= {} if head is None else {head[0]: parameters[head[1]]}
    packed = {name for name, tensor in wanted.items() if tensor.packed}
    mismatched = [
        text
        for name, shape in expected.items()
        if name in hub and (text := _misfit(name, hub[name], shape, packed=name in packed))
    ]
    if missing or extra or ambiguous or mismatched:
        raise KeyMismatch(missing=missing, extra=extra, ambiguous=ambiguous, mismatched=mismatched, read_from=read_from)
    _check_quantization(bool(packed), quantization, read_from)
    return replace(plan, ignored=ignored)


def plan_export(rules: RuleSet, parameters: Mapping[str, Shape]) -> Plan:
    """The plan that writes `parameters` under hub names, each in the first layout of its rule; adapters stay out.

    Raises:
        KeyMismatch: parameters that no rule covers.
    """
    base = {name: shape for name, shape in parameters.items() if not name.endswith(ADAPTER_LEAVES)}
    items = {name: next(_candidates(rules, name, base, PLAIN), None) for name in base}
    uncovered = [name for name, item in items.items() if item is None]
    if uncovered:
        raise KeyMismatch(missing=uncovered, remedy="add a rule for each of these parameters to the bridge")
    return Plan(tuple(item for item in items.values() if item is not None))


def _candidates(rules: RuleSet, native: str, parameters: Mapping[str, Shape], naming: Naming) -> Iterator[Item]:
    """One of `parameters` in each layout of its rule, under the checkpoint's names."""
    rule, captures = rules.rule(native)
    shape = parameters[native]
    for layout, source in () if rule is None else rule.layouts.items():
        pieces = tuple(
            replace(piece, hub=replace(piece.hub, name=naming.hub(piece.hub.name)))
            for piece in source.sized(parameters, captures).pieces(shape, captures)
        )
        if extent(pieces) != prod(shape):
            raise InvalidRules(
                f"layout {layout} of {native} carries {extent(pieces)} of {prod(shape)} elements.",
                remedy="correct the op",
            )
        yield Item(native, layout, pieces)


def _recognise(
    rules: RuleSet, namings: tuple[Naming, ...], hub: Mapping[str, TensorInfo], read_from: str | None
) -> Naming:
    """The naming whose name for the embedding is there; the first one if none is, so that its names are reported."""
    anchor = next(leaf.pattern for leaf, _ in rules.by_native[_ANCHOR].written.leaves())
    found = [naming for naming in namings if naming.hub(anchor) in hub]
    if len(found) > 1:
        raise KeyMismatch(ambiguous=[naming.hub(anchor) for naming in found], read_from=read_from)
    return found[0] if found else namings[0]


def _ignored_layers(
    rules: RuleSet, naming: Naming, parameters: Mapping[str, Shape], left: Iterable[str]
) -> dict[str, str]:
    """Names in `left` of layers that the model does not have and that the rules know, with the reason."""
    layers = 1 + max((captures[0] for name in parameters if (captures := canonical(name)[1])), default=-1)
    ruled = {name: hub for hub in left if (name := naming.ruled(hub)) is not None}
    found = [layer.inside(ruled, layers) for layer in rules.ignored_layers]
    return {ruled[name]: reason for one in found for name, reason in one.items()}


def _replaced_head(rules: RuleSet, naming: Naming, left: Iterable[str]) -> dict[str, str]:
    """Names in `left` of a language-model head, with the reason."""
    sources = (
        source for rule in rules.by_native.values() if _HEAD.match(rule.native) for source in rule.layouts.values()
    )
    heads = {naming.hub(leaf.pattern) for source in sources for leaf, _ in source.leaves()}
    return {name: "the language-model head, in whose place a score head stands" for name in left if name in heads}


def _duplicate_head(
    rules: RuleSet, naming: Naming, parameters: Mapping[str, Shape], hub: Mapping[str, TensorInfo], tied: bool
) -> tuple[str, str] | None:
    for rule in rules.by_native.values() if tied else ():
        if rule.tied_to is not None and rule.native not in parameters:
            name = naming.hub(next(leaf.pattern for leaf, _ in rule.written.leaves()))
            if name in hub:
                return name, rule.tied_to
    return None


def _misfit(name: str, info: TensorInfo, shape: Shape, *, packed: bool) -> str | None:
    if info.shape == shape and (info.dtype is torch.uint8 if packed else info.dtype in _FLOATS):
        return None
    return f"{name} {list(info.shape)} {info.dtype}, expected {list(shape)} {'uint8' if packed else 'float'}"


def _check_quantization(packed: bool, quantization: str | None, read_from: str | None) -> None:
    if packed == (quantization == "mxfp4"):
        return
    raise UnsupportedConfig(
        "quantization_config.quant_method",
        quantization,
        "contradicts the checkpoint, which holds " + ("MXFP4 *_blocks." if packed else "no *_blocks."),
        read_from=read_from or "config.json",
        remedy="use the config.json that belongs to these weights",
    )
