"""Likely causes: planted bugs that, put into Hugging Face's model, make it give exactly what ours gave.

A cause is named only when the reference with that one bug reproduces our output to the gate of the level that failed.
Most candidates are turned away early: behind the first layer the reference with the bug must have what ours has there.
"""

from __future__ import annotations

import copy
import math
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


@dataclass(frozen=True)
class _Comparison:
    """What a reference is asked, and how far its answer is from ours.

    Attributes:
        ask: puts the question to a reference.
        distance: of an answer from ours, max|Δ| / std or relative.
        question: its name, under which the reference keeps what it answers with each bug; "": asked every time.
    """

    ask: Callable[[Reference], Any]
    distance: Callable[[Any], float]
    inputs: Inputs
    question: str = ""

    def with_bug(self, bug: PlantedBug, reference: Reference) -> float:
        """The distance of the reference with `bug`; inf where the bug does not fit.

        Which bug is planted in ours plays no part in the answer, so a self-test asks once for all of them.
        """

        def answer() -> Any:
            assert bug.reference is not None
            with suppress(*MISFITS), bug.reference(reference.model) as planted:
                return self.ask(_view(reference, planted))
            return None

        asked = f"{self.question} with {bug.id}"
        given = reference.once(asked, self.inputs, answer) if self.question else answer()
        if given is None:
            return math.inf
        with suppress(*MISFITS):
            return self.distance(given)
        return math.inf


def explain(evidence: Evidence, catalogue: Sequence[PlantedBug] = CATALOGUE) -> list[Hypothesis]:
    """The planted bugs that account for a failure, the closest first.

    Args:
        evidence: the bench, where to look again and where the sides part first.
        catalogue: bugs to try; those without a counterpart in the reference cannot be named.
    """
    reference, whole, gate = _question(evidence)
    if whole.distance(whole.ask(reference)) <= gate:
        return []  # nothing to explain: asked again, the reference agrees without any bug
    screen = _screen(evidence)
    found = []
    for bug in _candidates(evidence, catalogue):
        if screen is not None and not screen.with_bug(bug, reference) <= gate:
            continue
        figure = whole.with_bug(bug, reference)
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
    plain = _forward(lab.model(case), lab.probe(case))
    return plain.distance(plain.ask(lab.hf(case))) <= lab.gates["V2"].limit


def _view(reference: Reference, model: nn.Module) -> Reference:
    """The reference around another model, without the answers of the first one."""
    view = copy.copy(reference)
    view.model, view._memo = model, {}
    return view


# ------------------------------------------------------------------ the question that failed


def _question(evidence: Evidence) -> tuple[Reference, _Comparison, float]:
    """Whom to ask what, and below which distance an answer reproduces ours."""
    lab, replay, level = evidence.lab, evidence.replay, evidence.level
    asked = replay.question
    if asked is not None:
        gate = lab.gates["V6.max" if level == "V6" else "V5"].limit
        compared = _Comparison(asked.ask, lambda given: max_over_std(asked.ours, given), replay.inputs)
        return asked.reference, compared, gate
    reference, model = lab.hf(replay.case), lab.model(replay.case)
    if evidence.divergence is None and replay.inputs.labels is not None:
        return reference, _gradients(lab, replay.case, model, replay.inputs), lab.gates["V4"].limit
    return reference, _forward(model, replay.inputs), lab.gates["V2"].limit


def _real(tensor: Tensor, inputs: Inputs) -> Tensor:
    """The values at tokens, without those at padding."""
    return tensor if inputs.attention_mask is None else tensor[inputs.attention_mask == 1]


def _forward(model: Decoder, inputs: Inputs) -> _Comparison:
    """The logits."""
    with torch.no_grad():
        ours = _real(model(**inputs.without_labels().kwargs())["logits"], inputs)
    asked = inputs.without_labels()
    return _Comparison(
        lambda view: view.logits(asked), lambda given: max_over_std(ours, _real(given, inputs)), asked, "logits"
    )


Answered = tuple[dict[str, Any], dict[str, Tensor | None]]


def _gradients(lab: Lab, case: str, model: Decoder, inputs: Inputs) -> _Comparison:
    """The loss and every gradient; None on one side only is infinitely far."""
    output, ours = backward(model, inputs, our_loss)
    state = lab.hf(case).state()

    def ask(view: Reference) -> Answered:
        theirs, gradients = view.gradients(inputs)
        return theirs, {name: gradients[name] for name, _ in view.model.named_parameters()}

    def distance_of(given: Answered) -> float:
        theirs, hub = given
        zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        native = lab.ours.native(lab.raw(case), zeros | {n: g for n, g in hub.items() if g is not None})
        figures = [float((output["loss"] - theirs["loss"]).abs() / theirs["loss"].abs())]
        for name, expected in native.items():
            mine = ours[name]
            figures.append(distance(torch.zeros_like(expected) if mine is None else mine, expected))
        return max(figures)

    return _Comparison(ask, distance_of, inputs, "gradients")


# ------------------------------------------------------------------ turning candidates away early

FIRST = "model.layers.0"


class _Reached(Exception):
    """Ends a forward at the module whose output is asked for."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output: Tensor = (output[0] if isinstance(output, tuple) else output).cpu()


def _screen(evidence: Evidence) -> _Comparison | None:
    """The hidden state behind the first layer, as a condition on every candidate for a divergence of the forward.

    The reference runs no further than that layer.
    """
    lab, replay = evidence.lab, evidence.replay
    if evidence.divergence is None:
        return None
    inputs = replay.inputs.without_labels()
    outputs = trace_ours(lab.model(replay.case), inputs).first(FIRST, "out")
    if not outputs:
        return None
    module, ours = ModuleMap(lab.ours.current.module_map).theirs(FIRST), _real(outputs[0], inputs)

    def stop(_module: Any, _args: Any, output: Any) -> None:
        raise _Reached(output)

    def ask(view: Reference) -> Tensor | None:
        handle = view.model.get_submodule(module).register_forward_hook(stop)
        try:
            view.call(inputs, use_cache=False)
        except _Reached as reached:
            return reached.output
        finally:
            handle.remove()
        return None

    return _Comparison(ask, lambda given: max_over_std(ours, _real(given, inputs)), inputs, module)
