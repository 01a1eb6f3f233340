"""Likely causes: planted bugs that, put into Hugging Face's model, make it give exactly what ours gave.

A cause is named only when the reference with that one bug reproduces our output to the gate of the level that failed.
Most candidates are turned away early: behind the first layer the reference with the bug must have what ours has there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bestiary.models import Decoder
from bestiary.verify.inputs import Inputs
from bestiary.verify.levels.v4_gradients import backward, distance, our_loss
from bestiary.verify.localise import ModuleMap, trace_ours
from bestiary.verify.measure import max_over_std
from bestiary.verify.planted import CATALOGUE, PlantedBug
from bestiary.verify.reference import Reference
from bestiary.verify.verdict import Hypothesis

if TYPE_CHECKING:
    from bestiary.verify.lab import Lab
    from bestiary.verify.run import Evidence

MISFITS = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError)
"""What a bug raises that is planted in a model without the place it breaks."""

Distance = Callable[[Reference], float]
"""How far the answer of a reference is from ours, max|Δ| / std or relative."""


def explain(evidence: Evidence, catalogue: Sequence[PlantedBug] = CATALOGUE) -> list[Hypothesis]:
    """The planted bugs that account for a failure, the closest first.

    Args:
        evidence: the bench, where to look again and where the sides part first.
        catalogue: bugs to try; those without a counterpart in the reference cannot be named.
    """
    reference, distance_of, gate = _question(evidence)
    if distance_of(_view(reference, reference.model)) <= gate:
        return []  # nothing to explain: asked again, the reference agrees without any bug
    screen = _screen(evidence)
    found = []
    for bug in _candidates(evidence, catalogue):
        figure = _replayed(bug, reference, screen, distance_of, gate)
        if figure <= gate:
            found.append(
                Hypothesis(
                    mutation_id=bug.id, reproduces_to=figure, hint=bug.cause, config_fields=list(bug.config_fields)
                )
            )
    return sorted(found, key=lambda hypothesis: hypothesis.reproduces_to)


def _candidates(evidence: Evidence, catalogue: Sequence[PlantedBug]) -> list[PlantedBug]:
    """Bugs with a counterpart in the reference; where a plain forward agrees, those that leave it alone."""
    known = [bug for bug in catalogue if bug.reference is not None]
    if evidence.replay.question is None:
        silent = evidence.divergence is None
        return [bug for bug in known if (bug.level == "V4") is silent]
    if not _plain_forward_agrees(evidence):
        return known
    return [bug for bug in known if bug.level == evidence.level]


def _plain_forward_agrees(evidence: Evidence) -> bool:
    lab, case = evidence.lab, evidence.replay.case
    return _forward(lab.model(case), lab.probe(case))(lab.hf(case)) <= lab.gates["V2"].limit


def _replayed(
    bug: PlantedBug, reference: Reference, screen: Distance | None, distance_of: Distance, gate: float
) -> float:
    """Distance of the reference with `bug` from ours; inf where the bug does not fit or is turned away early."""
    assert bug.reference is not None
    with suppress(*MISFITS), bug.reference(reference.model) as planted:
        view = _view(reference, planted)
        if screen is None or screen(view) <= gate:
            return distance_of(view)
    return float("inf")


def _view(reference: Reference, model: nn.Module) -> Reference:
    """The reference around another model, without the answers of the first one."""
    view = copy.copy(reference)
    view.model, view._memo = model, {}
    return view


# ------------------------------------------------------------------ the question that failed


def _question(evidence: Evidence) -> tuple[Reference, Distance, float]:
    """Whom to ask, how far an answer is from ours, and below which distance it reproduces ours."""
    lab, replay, level = evidence.lab, evidence.replay, evidence.level
    asked = replay.question
    if asked is not None:
        gate = lab.gates["V6.max" if level == "V6" else "V5"].limit
        return asked.reference, lambda view: max_over_std(asked.ours, asked.ask(view)), gate
    reference, model = lab.hf(replay.case), lab.model(replay.case)
    if evidence.divergence is None and replay.inputs.labels is not None:
        return reference, _gradients(lab, replay.case, model, replay.inputs), lab.gates["V4"].limit
    return reference, _forward(model, replay.inputs), lab.gates["V2"].limit


def _real(tensor: Tensor, inputs: Inputs) -> Tensor:
    """The values at tokens, without those at padding."""
    return tensor if inputs.attention_mask is None else tensor[inputs.attention_mask == 1]


def _forward(model: Decoder, inputs: Inputs) -> Distance:
    """Distance of the logits."""
    with torch.no_grad():
        ours = _real(model(**inputs.without_labels().kwargs())["logits"], inputs)
    asked = inputs.without_labels()
    return lambda view: max_over_std(ours, _real(view.logits(asked), inputs))


def _gradients(lab: Lab, case: str, model: Decoder, inputs: Inputs) -> Distance:
    """Distance of the loss and of every gradient; None on one side only is infinitely far."""
    output, ours = backward(model, inputs, our_loss)
    state = lab.hf(case).state()

    def distance_of(view: Reference) -> float:
        theirs, gradients = view.gradients(inputs)
        hub = {name: gradients[name] for name, _ in view.model.named_parameters()}
        zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        native = lab.ours.native(lab.raw(case), zeros | {n: g for n, g in hub.items() if g is not None})
        figures = [float((output["loss"] - theirs["loss"]).abs() / theirs["loss"].abs())]
        for name, expected in native.items():
            mine = ours[name]
            figures.append(distance(torch.zeros_like(expected) if mine is None else mine, expected))
        return max(figures)

    return distance_of


# ------------------------------------------------------------------ turning candidates away early

FIRST = "model.layers.0"


class _Reached(Exception):
    """Ends a forward at the module whose output is asked for."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class _Screen:
    """Distance of the hidden state behind the first layer; the reference runs no further."""

    module: str
    ours: Tensor
    inputs: Inputs

    def __call__(self, view: Reference) -> float:
        def stop(_module: Any, _args: Any, output: Any) -> None:
            raise _Reached(output)

        handle = view.model.get_submodule(self.module).register_forward_hook(stop)
        try:
            view.call(self.inputs, use_cache=False)
        except _Reached as reached:
            return max_over_std(self.ours, _real(reached.output, self.inputs))
        finally:
            handle.remove()
        return float("inf")


def _screen(evidence: Evidence) -> Distance | None:
    """The output of our first layer as a condition on every candidate for a divergence of the forward."""
    lab, replay = evidence.lab, evidence.replay
    if evidence.divergence is None:
        return None
    inputs = replay.inputs.without_labels()
    outputs = trace_ours(lab.model(replay.case), inputs).first(FIRST, "out")
    if not outputs:
        return None
    return _Screen(ModuleMap(lab.ours.current.module_map).theirs(FIRST), _real(outputs[0], inputs), inputs)
