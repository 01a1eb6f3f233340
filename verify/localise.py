"""Where two implementations part: the earliest module whose inputs agree and an output does not.

Both sides run the same inputs with hooks on every module; names correspond through the bridge's module map. Then our
layers are run again, each on the reference's own input, so that an error in one layer is not blamed on those behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.verify import gates
from bestiary.verify.inputs import Inputs
from bestiary.verify.measure import max_over_std, relative_rms
from bestiary.verify.tracing import Event, Trace, traced
from bestiary.verify.verdict import Divergence

_LAYER = re.compile(r"\.layers\.(\d+)(?:\.|$)")


def by_position(tensor: Tensor, batch: int, length: int) -> Tensor | None:
    """(B, T, F), whatever the layout was: (B, T, …), (B, heads, T, …) or (B·T, …); None for anything else."""
    if tensor.ndim >= 2 and tensor.shape[:2] == (batch, length):
        return tensor.reshape(batch, length, -1)
    if tensor.ndim == 4 and tensor.shape[0] == batch and tensor.shape[2] == length:
        return tensor.transpose(1, 2).reshape(batch, length, -1)
    if tensor.ndim >= 2 and tensor.shape[0] == batch * length:
        return tensor.reshape(batch, length, -1)
    return None


def layer_of(module: str) -> int | None:
    """Layer number in a module or parameter name."""
    found = _LAYER.search(module)
    return int(found.group(1)) if found else None


class ModuleMap:
    """Names of ours to Hugging Face's: equal except where the bridge says otherwise (`*` stands for a number)."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = [(re.compile(_regex(ours)), theirs) for ours, theirs in patterns.items()]

    def theirs(self, name: str) -> str:
        """Hugging Face's name of our module `name`; a pattern also covers what lies below it."""
        for pattern, target in self._patterns:
            found = pattern.match(name)
            if found:
                prefix = target
                for number in found.groups():
                    prefix = prefix.replace("*", number, 1)
                return prefix + name[found.end() :]
        return name


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"(\d+)") + r"(?=\.|$)"


HEAD = "lm_head"
"""Compared by the logits of the whole model: soft caps and divisors stand in our head and behind Hugging Face's."""


@dataclass(frozen=True)
class Pair:
    """One tensor of one event on both sides as (B, T, F), and their distance."""

    event: Event
    hf_module: str
    number: int
    ours: Tensor
    hf: Tensor
    figure: float


def _matching(ours: Event, theirs: tuple[Tensor, ...], batch: int, length: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every tensor of ours with the first unused one of theirs that has its width."""
    left = [flat for tensor in theirs if (flat := by_position(tensor, batch, length)) is not None]
    for number, tensor in enumerate(ours.tensors):
        flat = by_position(tensor, batch, length)
        if flat is None:
            continue
        index = next((i for i, other in enumerate(left) if other.shape == flat.shape), None)
        if index is not None:
            yield number, flat, left.pop(index)


def pairs(ours: Trace, theirs: Trace, names: ModuleMap, batch: int, length: int) -> Iterator[Pair]:
    """Every tensor that both sides have, in the order of our execution."""
    seen: set[tuple[str, str]] = set()
    known = {(event.module, event.side): event.tensors for event in reversed(theirs.events)}
    for event in ours.events:
        key = (event.module, event.side)
        if key in seen:
            continue
        seen.add(key)
        if not event.module:
            continue
        hf_module = "" if event.module == HEAD and event.side == "out" else names.theirs(event.module)
        tensors = known.get((hf_module, event.side))
        if tensors is None:
            continue
        for number, a, b in _matching(event, tensors, batch, length):
            yield Pair(event, hf_module, number, a, b, max_over_std(a, b))


def trace_ours(model: nn.Module, inputs: Inputs) -> Trace:
    """Our modules' inputs and outputs on `inputs`, without labels."""
    return traced(model, lambda: model(**inputs.without_labels().kwargs()))


def teacher_forced(model: nn.Module, reference: Trace, names: ModuleMap, inputs: Inputs) -> dict[int, float]:
    """Distance of each of our layers' outputs from the reference's when fed the reference's own input."""
    layers: Any = model.get_submodule("model.layers")
    handles = []
    outputs: dict[int, Tensor] = {}

    def feed(hidden: Tensor) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (hidden.to(args[0]), *args[1:])

        return hook

    def keep(index: int) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            outputs[index] = (output[0] if isinstance(output, tuple) else output).detach().cpu()

        return hook

    for index, layer in enumerate(layers):
        theirs = reference.first(names.theirs(f"model.layers.{index}"), "in")
        if theirs:
            handles.append(layer.register_forward_pre_hook(feed(theirs[0])))
            handles.append(layer.register_forward_hook(keep(index)))
    try:
        with torch.no_grad():
            model(**inputs.without_labels().kwargs())
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for index, output in outputs.items():
        theirs = reference.first(names.theirs(f"model.layers.{index}"), "out")
        if theirs:
            found[index] = max_over_std(output, theirs[0])
    return found


def _layer_pattern(wrong: set[int], kinds: list[str], dense: set[int]) -> list[str]:
    """What the wrong layers have in common that no right layer has."""
    count = len(kinds)
    right = set(range(count)) - wrong
    if not wrong or not right:
        return []
    found = [
        f"only_layer_type:{kind}"
        for kind in sorted(set(kinds))
        if {kinds[i] for i in wrong} == {kind} and all(kinds[i] != kind for i in right)
    ]
    if dense and dense != set(range(count)):
        found += ["only_dense_layers"] * (wrong == dense) + ["only_moe_layers"] * (right == dense)
    if not found:
        found.append("only_layers:" + ",".join(str(i) for i in sorted(wrong)))
    return found


def _tensor_pattern(ours: Tensor, hf: Tensor, tolerance: float, mask: Tensor | None) -> tuple[list[str], int | None]:
    """Patterns in the difference of two (B, T, F) tensors and its first wrong position."""
    if ours.shape != hf.shape:
        return [], None
    delta = (ours - hf).abs().double()
    scale = float(hf.double().std(correction=0)) or 1.0
    bad = (delta > tolerance * scale).any(-1) | ~torch.isfinite(ours).all(-1)
    positions = bad.any(0).nonzero().flatten().tolist()
    if not positions:
        return [], None
    found = []
    first, length = positions[0], ours.shape[1]
    if first > 0 and positions == list(range(first, length)):
        found.append(f"only_positions>={first}")
    elif len(positions) < length // 2:
        found.append("only_positions:" + ",".join(str(p) for p in positions[:8]) + ("…" if len(positions) > 8 else ""))
    if mask is not None and bool((mask == 0).any()) and not bool((bad & (mask == 1)).any()):
        found.append("only_padding")
    large = hf.abs() > 0.1 * scale
    if int(large.sum()) > 8:
        ratio = (ours[large] / hf[large]).double()
        if float(ratio.std()) < 1e-6 * abs(float(ratio.mean())) and abs(float(ratio.mean()) - 1) > 1e-9:
            found.append(f"constant_ratio:{float(ratio.mean()):.6g}")
    return found, first


def localise(
    model: nn.Module,
    reference: Trace,
    module_map: Mapping[str, str],
    inputs: Inputs,
    *,
    case: str,
    layer_types: list[str],
    dense_layers: set[int],
    tolerance: float = gates.INPUTS_AGREE,
) -> Divergence | None:
    """The first divergence of our `model` from the `reference` trace on `inputs`, or None if there is none.

    Args:
        layer_types: one a layer, to say which kind is wrong.   dense_layers: those without experts.
        tolerance: max|Δ|/std above which tensors disagree.
    """
    batch, length = inputs.input_ids.shape
    names = ModuleMap(module_map)
    ours = trace_ours(model, inputs)
    compared = list(pairs(ours, reference, names, batch, length))
    guilty = next((pair for pair in compared if not pair.figure <= tolerance), None)
    if guilty is None:
        return None
    module, hf_module, tensor = guilty.event.module, guilty.hf_module, f"output {guilty.number}"
    if guilty.event.side == "in":  # what the parent computed between its submodules
        tensor = f"input of {module.rpartition('.')[2]}"
        module, hf_module = module.rpartition(".")[0], hf_module.rpartition(".")[0]
    inputs_equal = all(
        pair.figure <= tolerance for pair in compared if pair.event.module == module and pair.event.side == "in"
    )
    pattern, position = _tensor_pattern(guilty.ours, guilty.hf, tolerance, inputs.attention_mask)
    layer = layer_of(guilty.event.module)
    if layer is not None and inputs_equal:
        forced = teacher_forced(model, reference, names, inputs)
        wrong = {index for index, figure in forced.items() if not figure <= tolerance}
        pattern += _layer_pattern(wrong, layer_types, dense_layers) if layer_types else []
    delta = (guilty.ours - guilty.hf).abs()
    flat = int(torch.nan_to_num(delta, nan=torch.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), delta.shape)]
    values = [float(side.flatten()[flat]) for side in (guilty.ours, guilty.hf)]
    finite = [value if abs(value) < float("inf") else None for value in values]
    rms, worst = relative_rms(guilty.ours, guilty.hf), guilty.figure
    return Divergence(
        module=module,
        hf_module=hf_module,
        tensor=tensor,
        layer=layer,
        layer_type=layer_types[layer] if layer is not None and layer < len(layer_types) else None,
        position=position,
        index=index,
        ours=finite[0],
        hf=finite[1],
        rel_rms=rms if rms < float("inf") else None,
        max_over_std=worst if worst < float("inf") else None,
        inputs_equal=inputs_equal,
        pattern=pattern,
        case=case,
    )
