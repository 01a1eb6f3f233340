"""V4, gradients: of the loss, for every parameter and the input embeddings, through the bridge, in true float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.bridges import Bridge
from bestiary.bridges.rules import canonical, fill
from bestiary.models import Decoder
from bestiary.verify.checks import Check, Outcome, Replay, failed, holds, judged, passed
from bestiary.verify.foreign import OWN
from bestiary.verify.inputs import Inputs
from bestiary.verify.lab import Lab
from bestiary.verify.localise import layer_of
from bestiary.verify.placing import CPU, moved
from bestiary.verify.reference import Reference
from bestiary.verify.verdict import Exit

Gradients = dict[str, Tensor | None]
EMBEDS = "inputs_embeds"


def our_loss(model: Decoder, inputs: Inputs) -> dict[str, Any]:
    """The model's own loss, router loss included where the config asks for it."""
    return dict(model(**inputs.kwargs()))


def _loss_through_logits(coefficient: float, model: Decoder, inputs: Inputs) -> dict[str, Any]:
    """Cross entropy outside the model: the path of a trainer that wants logits.

    Args:
        coefficient: of the router's loss.
    """
    output = dict(model(**inputs.kwargs(), return_logits=True))
    labels = inputs.kwargs()["labels"]
    logits = output["logits"][:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
    if "aux_loss" in output:
        loss = loss + coefficient * output["aux_loss"]
    return {**output, "loss": loss}


def backward(
    model: Decoder, inputs: Inputs, loss: Callable[[Decoder, Inputs], dict[str, Any]]
) -> tuple[dict[str, Any], Gradients]:
    """Output and gradients of ours, `inputs_embeds` tapped behind the embedding; `loss` gives the output."""
    taps: list[Tensor] = []

    def tap(_module: Any, _args: Any, output: Tensor) -> None:
        output.retain_grad()
        taps.append(output)

    handle = model.get_submodule("model.embed_tokens").register_forward_hook(tap)
    try:
        model.zero_grad(set_to_none=True)
        output = loss(model, inputs)
        output["loss"].backward()
    finally:
        handle.remove()
    gradients: Gradients = {name: moved(parameter.grad, CPU) for name, parameter in model.named_parameters()}
    gradients[EMBEDS] = moved(taps[0].grad, CPU) if taps else None
    model.zero_grad(set_to_none=True)
    return {key: value.detach() for key, value in output.items() if isinstance(value, Tensor)}, gradients


def _ours(lab: Lab, case: str) -> tuple[dict[str, Any], Gradients]:
    return lab.once(("gradients", case), lambda: backward(lab.model(case), lab.probe(case), our_loss))


def _theirs(lab: Lab, case: str, inputs: Inputs) -> tuple[dict[str, Any], Gradients]:
    """Hugging Face's output and gradients, under our names and in our layout; None where it has none."""

    def read() -> tuple[dict[str, Any], Gradients]:
        output, gradients = lab.hf(case).gradients(inputs)
        return output, in_our_layout(lab, case, gradients)

    return lab.once(("hf gradients", case, inputs.key), read)


def in_our_layout(lab: Lab, case: str, gradients: Gradients) -> Gradients:
    """Gradients of Hugging Face's parameters as those of ours that they belong to; None where it has none."""
    reference: Reference = lab.hf(case)
    hub = {name: gradients[name] for name, _ in reference.model.named_parameters()}
    state = reference.state()
    zeros = {name: torch.zeros_like(state[name]) if grad is None else grad for name, grad in hub.items()}
    marks = {name: torch.full_like(state[name], float(grad is None)) for name, grad in hub.items()}
    # persistent buffers are parameters of ours that nothing trains
    buffers = {name: t for name, t in state.items() if name not in zeros and not _is_tied_head(reference, name)}
    absent = lab.ours.native(lab.cases[case], marks | {name: torch.ones_like(t) for name, t in buffers.items()})
    native = lab.ours.native(lab.cases[case], zeros | {name: torch.zeros_like(t) for name, t in buffers.items()})
    found: Gradients = {name: None if bool(absent[name].all()) else value for name, value in native.items()}
    found[EMBEDS] = gradients[EMBEDS]
    return found


def _is_tied_head(reference: Reference, name: str) -> bool:
    pointers = {parameter.data_ptr() for parameter in reference.model.parameters()}
    return reference.state()[name].data_ptr() in pointers


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2, over the whole tensor and for a 3-D one over each expert (relative to the largest expert)."""
    if ours.shape != theirs.shape:
        return float("inf")
    total = float(theirs.norm())
    if total == 0:
        return float(ours.norm())
    whole = float((ours - theirs).norm()) / total
    if ours.ndim != 3:
        return whole
    experts = (ours - theirs).flatten(1).norm(dim=1).amax() / theirs.flatten(1).norm(dim=1).amax()
    return max(whole, float(experts))


def _gradient(lab: Lab, case: str, name: str) -> Outcome:
    inputs = lab.probe(case)
    ours, theirs = _ours(lab, case)[1], _theirs(lab, case, inputs)[1]
    if name not in theirs or name not in ours:
        return failed(Exit.NUMERIC, f"{name} is a parameter of one side only")
    a, b = ours[name], theirs[name]
    if a is None or b is None:
        detail = f"gradient of {name} is None: ours {a is None}, Hugging Face {b is None}"
        return passed() if a is b else failed(Exit.NUMERIC, detail, replay=Replay(case, inputs))
    return judged(distance(a, b), lab.gates["V4"], replay=Replay(case, inputs))


def _value(lab: Lab, case: str, field: str) -> Outcome:
    inputs = lab.probe(case)
    ours, theirs = _ours(lab, case)[0].get(field), _theirs(lab, case, inputs)[0].get(field)
    if ours is None or theirs is None:
        return holds(ours is theirs, Exit.NUMERIC, f"{field}: ours {ours}, Hugging Face {theirs}")
    return judged(float((ours - theirs).abs() / theirs.abs()), lab.gates["V4"], replay=Replay(case, inputs))


def _all(lab: Lab, case: str, inputs: Inputs, loss: Callable[[Decoder, Inputs], dict[str, Any]]) -> Outcome:
    """The worst gradient of all parameters, of a path or input beside the main one."""
    output, ours = backward(lab.model(case), inputs, loss)
    reference, theirs = _theirs(lab, case, inputs)
    figures = {"loss": float((output["loss"] - reference["loss"]).abs() / reference["loss"].abs())}
    for name, a in ours.items():
        b = theirs[name]
        if a is None or b is None:
            figures[name] = 0.0 if a is b else float("inf")
        else:
            figures[name] = distance(a, b)
    worst = max(figures, key=lambda name: figures[name])
    return judged(figures[worst], lab.gates["V4"], detail=worst, replay=Replay(case, inputs))


def _through_logits(lab: Lab, case: str) -> Outcome:
    coefficient = lab.decoder_config(case).router_aux_loss_coef
    return _all(lab, case, lab.probe(case), partial(_loss_through_logits, coefficient))


def _checkpointed(lab: Lab, case: str) -> Outcome:
    model = lab.model(case)
    before = model.is_gradient_checkpointing
    model.activation_checkpointing_enable()
    try:
        return _all(lab, case, lab.probe(case), our_loss)
    finally:
        if not before:
            model.gradient_checkpointing_disable()


def _padded(lab: Lab, case: str) -> Outcome:
    inputs = lab.probe(case)
    mask = torch.ones_like(inputs.input_ids)
    for row in range(mask.shape[0]):
        mask[row, mask.shape[1] - 7 * row :] = 0
    return _all(lab, case, Inputs(inputs.input_ids, attention_mask=mask).with_labels(), our_loss)


def plan(lab: Lab) -> list[Check]:
    """For each config: loss, router loss, one check a parameter, the input embeddings; other paths for the first."""
    checks = []
    for case in lab.cases:
        names = [name for name, _ in lab.hf(case).model.named_parameters()]
        ours = our_names(names, lab.ours.current)
        checks += [
            Check(f"{case}/loss", partial(_value, lab, case, "loss")),
            Check(f"{case}/aux_loss", partial(_value, lab, case, "aux_loss")),
            *(Check(f"{case}/{name}", partial(_gradient, lab, case, name), layer_of(name)) for name in ours),
            Check(f"{case}/{EMBEDS}", partial(_gradient, lab, case, EMBEDS)),
            Check(f"{case}/every parameter", partial(same_parameters, lab, case, ours)),
        ]
    first = next(iter(lab.cases))
    checks += [
        Check(f"{first}/through logits", partial(_through_logits, lab, first), needs=("return_logits",)),
        Check(f"{first}/checkpointed", partial(_checkpointed, lab, first), needs=(OWN,)),
        Check(f"{first}/padded", partial(_padded, lab, first), needs=("attention_mask",)),
    ]
    return checks


def our_names(names: list[str], bridge: Bridge) -> list[str]:
    """Our names of Hugging Face's parameters: a fused one's parts, of others by the module map read backwards."""
    from bestiary.verify.localise import ModuleMap

    backwards = ModuleMap({theirs: ours for ours, theirs in bridge.module_map.items()})
    found = []
    for name in names:
        pattern, captures = canonical(name)
        parts = bridge.rule_set.fused.get(pattern)
        found += [backwards.theirs(name)] if parts is None else [fill(part, captures) for part in parts]
    return found


def same_parameters(lab: Lab, case: str, planned: list[str]) -> Outcome:
    """Every parameter of ours has a check of its gradient, and no other has."""
    own = {name for name, parameter in lab.model(case).named_parameters() if parameter.requires_grad}
    odd = sorted(own ^ set(planned))
    return holds(not odd, Exit.KEYS, f"parameters without a gradient check: {odd[:3]}")
