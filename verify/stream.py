"""A checkpoint layer by layer: one layer of Hugging Face's model, then the same one of ours, never two at once.

Teacher-forced: both get Hugging Face's hidden states, so that each layer answers for itself. Free-running: each side
gets its own, as in use; the logits at the end answer for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bestiary.verify.inputs import Inputs
from bestiary.verify.measure import relative_rms
from bestiary.verify.stream_state import Progress, StateFile
from bestiary.verify.streamed_models import StreamedDecoder, StreamedReference

ROWS = 32
EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True)
class Streamed:
    """What the comparison found.

    Attributes:
        figures: relative rms of the teacher-forced difference by "input/part"; parts: embedding, layer0…, head (final
            norm and logits).
        logits: ours and Hugging Face's, free-running, (T, V) in float32, by input.
    """

    figures: dict[str, float]
    logits: dict[str, tuple[Tensor, Tensor]]


def stream(
    theirs: StreamedReference,
    ours: StreamedDecoder,
    inputs: Mapping[str, Inputs],
    state: StateFile,
    progress: Callable[[str], None],
) -> Streamed:
    """Runs both models on every input; goes on from `state` where that holds earlier layers, and keeps it up to date.

    Args:
        progress: called with a line before each layer.
    """
    with theirs.outside():
        embedded = {name: theirs.embed(name, one) for name, one in inputs.items()}
    with ours.outside():
        mine = {name: ours.embed(name, one) for name, one in inputs.items()}
    at = state.read()
    if at is None:
        figures = {f"{name}/{EMBEDDING}": relative_rms(mine[name], embedded[name]) for name in inputs}
        at = Progress(0, embedded, mine, figures)
    resumed = f" (resumed after {at.done})" if at.done else ""
    for index in range(at.done, len(theirs.layers)):
        progress(f"layer {index + 1} of {len(theirs.layers)}{resumed}")
        at = _after(index, at, theirs, ours)
        state.write(at)
    progress("logits")
    with theirs.outside():
        reference = {name: theirs.logits(one, at.theirs[name]) for name, one in inputs.items()}
    with ours.outside():
        for name, one in inputs.items():
            at.figures[f"{name}/{HEAD}"] = _rms_by_rows(ours.logits(one, at.theirs[name]), reference[name])
        logits = {name: (ours.logits(one, at.ours[name]), reference[name]) for name, one in inputs.items()}
    state.remove()
    return Streamed(at.figures, logits)


def _rms_by_rows(ours: Tensor, reference: Tensor) -> float:
    """`relative_rms` of logits (T, V), some rows at a time: in float64 a vocabulary is wide."""
    if ours.shape != reference.shape:
        return math.inf
    wrong = size = 0.0
    for a, b in zip(ours.split(ROWS), reference.split(ROWS), strict=True):
        wrong += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    if not math.isfinite(wrong) or not size:
        return math.inf
    return math.sqrt(wrong / size)


def _after(index: int, at: Progress, theirs: StreamedReference, ours: StreamedDecoder) -> Progress:
    """Both sides one layer further."""
    with theirs.layer(index):
        made = {name: theirs.step(name, index, x) for name, x in at.theirs.items()}
    with ours.layer(index):
        forced = {name: ours.step(name, index, x) for name, x in at.theirs.items()}
        same = {name: torch.equal(at.ours[name], x) for name, x in at.theirs.items()}
        free = {name: forced[name] if same[name] else ours.step(name, index, x) for name, x in at.ours.items()}
    errors = {f"{name}/layer{index}": relative_rms(forced[name], made[name]) for name in made}
    return Progress(index + 1, made, free, {**at.figures, **errors})
