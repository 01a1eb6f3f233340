"""The activity audit: whether a tiny config exercises what it holds.

A parameter that moves no logit, a soft cap that caps nothing or a clamp that clamps nothing cannot tell a right
implementation from a wrong one. Such a run is inconclusive, never passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bestiary.verify import gates
from bestiary.verify.inputs import Inputs
from bestiary.verify.measure import max_over_std
from bestiary.verify.reference import Reference
from bestiary.verify.verdict import Activity

_CLAMPS = frozenset({torch.clamp, torch.Tensor.clamp})
_TANH = frozenset({torch.tanh, torch.Tensor.tanh})


class ClipMeter(TorchFunctionMode):
    """Counts, per kind of call, the values that a clamp moves or that reach the bend of a tanh (|x| > 1).

    Only activations count: tensors that carry a gradient. Tables computed while a model is built do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, tuple[int, int]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (func in _CLAMPS or func in _TANH) and isinstance(args[0], Tensor) and args[0].requires_grad:
            value = args[0].detach()
            if func in _TANH:
                self._add("tanh", value.abs() > 1)
            else:
                bounds = [*args[1:], *kwargs.values()]
                self._add(f"clamp to {bounds[-1]:g}", result.detach() != value)
        return result

    def _add(self, kind: str, clipped: Tensor) -> None:
        before = self.counts.get(kind, (0, 0))
        self.counts[kind] = (before[0] + int(clipped.sum()), before[1] + clipped.numel())

    def shares(self) -> dict[str, float]:
        """Share of values clipped, by kind of call."""
        return {kind: clipped / total for kind, (clipped, total) in self.counts.items() if total}


@contextmanager
def _changed(tensor: Tensor) -> Iterator[None]:
    """`tensor` moved by a tenth of its size, up and down in turns, and back: a common shift moves no choice."""
    before = tensor.detach().clone()
    signs = 1.0 - 2.0 * (torch.arange(before.numel()) % 2)
    with torch.no_grad():
        tensor.add_((0.1 * before.abs().mean() + 0.1) * signs.to(before).view_as(before))
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(before)


def dead_parameters(reference: Reference, inputs: Inputs) -> list[str]:
    """Parameters, slices of expert tensors and persistent buffers whose change moves no logit of the reference.

    A gradient of the loss that is not zero proves life; what has none is moved and looked at.
    """
    _, gradients = reference.gradients(inputs)
    suspects: list[tuple[str, Tensor]] = []
    for name, parameter in reference.model.named_parameters():
        gradient = gradients[name]
        if gradient is None or not bool(gradient.abs().max() > 0):
            suspects.append((name, parameter.detach()))
        elif parameter.ndim == 3:
            alive = gradient.abs().flatten(1).amax(1) > 0
            suspects += [(f"{name}[{i}]", parameter.detach()[i]) for i in (~alive).nonzero().flatten().tolist()]
    parameters = {name for name, _ in reference.model.named_parameters()}
    suspects += [(name, tensor) for name, tensor in reference.state().items() if name not in parameters]
    tied = {tensor.data_ptr() for _, tensor in reference.model.named_parameters()}
    dead = []
    for name, tensor in suspects:
        if tensor.data_ptr() in tied and name not in parameters and "[" not in name:
            continue  # the second name of a tied matrix
        with _changed(tensor):
            moved = reference.call(inputs, use_cache=False)["logits"]
        if max_over_std(moved, reference.logits(inputs)) <= gates.MOVED:
            dead.append(name)
    return dead


def router_margin(reference: Reference, inputs: Inputs) -> float | None:
    """Smallest gap between the last chosen and the first rejected expert over tokens and layers; None without any."""
    config = reference.config.to_dict()
    top_k = config.get("num_experts_per_tok")
    logits = reference.output(inputs).get("router_logits")
    if not top_k or not logits:
        return None
    margins = []
    for layer in logits:
        best = layer.topk(min(top_k + 1, layer.shape[-1]), dim=-1).values
        margins.append(float((best[..., top_k - 1] - best[..., -1]).min()))
    return min(margins)


def audit(reference: Reference, inputs: Inputs) -> Activity:
    """Dead parameters, clipping and router margin of one reference on `inputs` (with labels), and its determinism."""
    meter = ClipMeter()
    with reference.running() as model, meter:
        first = model(**inputs.kwargs(), use_cache=False)["logits"].detach()
    return Activity(
        dead_params=dead_parameters(reference, inputs),
        clipped=meter.shares(),
        min_router_margin=router_margin(reference, inputs),
        deterministic=torch.equal(first, reference.logits(inputs)),
    )


def weaknesses(audits: Mapping[str, Activity], from_defaults: Collection[str] = ()) -> list[str]:
    """Why runs with this activity, by config, prove too little; empty when they do not.

    A slice of an expert tensor must live in one config, everything else in each. Configs named in `from_defaults` keep
    the family's own limits and need not clip.
    """
    found = []
    slices = [{name for name in audit.dead_params if name.endswith("]")} for audit in audits.values()]
    for name in sorted(set.intersection(*slices)) if slices else []:
        found.append(f"{name} moves no logit in any config")
    for config, audit in audits.items():
        found += [f"{config}: {name} moves no logit" for name in audit.dead_params if not name.endswith("]")]
        if config not in from_defaults:
            found += [
                f"{config}: {kind} clips {share:.1%} of values, {gates.CLIPPED:.0%} needed"
                for kind, share in audit.clipped.items()
                if share < gates.CLIPPED
            ]
        if not audit.deterministic:
            found.append(f"{config}: the reference gives different logits for the same input")
    return found
