"""V4 of a reward model: gradients of a loss of the scores, for every parameter and the input embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bestiary.models import Decoder
from bestiary.verify.checks import Check, Outcome, Replay, failed, judged, passed
from bestiary.verify.inputs import Inputs
from bestiary.verify.lab import Lab
from bestiary.verify.levels.v4_gradients import (
    EMBEDS,
    Gradients,
    backward,
    distance,
    in_our_layout,
    our_names,
    same_parameters,
)
from bestiary.verify.localise import layer_of
from bestiary.verify.scoring import padded, probe, text
from bestiary.verify.verdict import Exit

COUNTS = (40, 23, 1, 37)


def _loss(scores: Tensor) -> Tensor:
    """A sum over documents in which each counts otherwise, curved so that a common factor of the scores shows."""
    weights = torch.arange(1, scores.numel() + 1, device=scores.device).view(scores.shape).to(scores.dtype)
    return (weights * scores).sum() + 0.5 * scores.square().sum()


def _our_loss(model: Decoder, inputs: Inputs, **extra: Tensor) -> dict[str, Any]:
    output = dict(model(**inputs.kwargs(), **extra))
    return {**output, "loss": _loss(output["scores"])}


def _theirs(lab: Lab, case: str, inputs: Inputs) -> Gradients:
    def read() -> Gradients:
        _, gradients = lab.hf(case).gradients(inputs, loss=lambda output: _loss(output["logits"]))
        return in_our_layout(lab, case, gradients)

    return lab.once(("hf gradients", case, inputs.key), read)


def _ours(lab: Lab, case: str) -> Gradients:
    return lab.once(("gradients", case), lambda: backward(lab.model(case), probe(lab, case), _our_loss)[1])


def _gradient(lab: Lab, case: str, name: str) -> Outcome:
    inputs = probe(lab, case)
    ours, theirs = _ours(lab, case), _theirs(lab, case, inputs)
    if name not in theirs or name not in ours:
        return failed(Exit.NUMERIC, f"{name} is a parameter of one side only")
    a, b = ours[name], theirs[name]
    if a is None or b is None:
        detail = f"gradient of {name} is None: ours {a is None}, Hugging Face {b is None}"
        return passed() if a is b else failed(Exit.NUMERIC, detail, replay=Replay(case, inputs))
    return judged(distance(a, b), lab.gates["V4"], replay=Replay(case, inputs))


def _worst(lab: Lab, ours: Gradients, theirs: Gradients) -> Outcome:
    figures = {}
    for name, b in theirs.items():
        a = ours.get(name)
        figures[name] = (0.0 if a is b else float("inf")) if a is None or b is None else distance(a, b)
    worst = max(figures, key=lambda name: figures[name])
    return judged(figures[worst], lab.gates["V4"], detail=worst)


def _padded(lab: Lab, case: str, side: str) -> Outcome:
    inputs = padded(lab, case, side, COUNTS)
    return _worst(lab, backward(lab.model(case), inputs, _our_loss)[1], _theirs(lab, case, inputs))


def _packed(lab: Lab, case: str) -> Outcome:
    """Documents of one length in one packed row: the gradient of the same documents as rows of a batch."""
    ids = text(lab, case, batch=4, length=19, salt=6)
    row, borders = ids.flatten()[None], torch.arange(0, ids.numel() + 1, ids.shape[1], device=lab.device)
    ours = backward(lab.model(case), Inputs(row), partial(_our_loss, cu_seq_lens_q=borders))[1]
    theirs = dict(_theirs(lab, case, Inputs(ids)))
    embeds = theirs[EMBEDS]
    theirs[EMBEDS] = None if embeds is None else embeds.flatten(0, 1)[None]
    return _worst(lab, ours, theirs)


def plan(lab: Lab) -> list[Check]:
    """For each config one check a parameter and the input embeddings; padded and packed documents for the first."""
    checks = []
    for case in lab.cases:
        names = [name for name, _ in lab.hf(case).model.named_parameters()]
        ours = our_names(names, lab.ours.current)
        checks += [
            *(Check(f"{case}/{name}", partial(_gradient, lab, case, name), layer_of(name)) for name in ours),
            Check(f"{case}/{EMBEDS}", partial(_gradient, lab, case, EMBEDS)),
            Check(f"{case}/every parameter", partial(same_parameters, lab, case, ours)),
        ]
    first = lab.main_case
    checks += [Check(f"{first}/{side} padding", partial(_padded, lab, first, side)) for side in ("left", "right")]
    return [*checks, Check(f"{first}/packed", partial(_packed, lab, first))]
