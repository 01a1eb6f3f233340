"""Planted bugs of the score head: the wrong token, the wrong number on it, a gradient that stops.

They are a catalogue of their own (`self-test --head score`): no language model has the places they break.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bestiary.models.config import DecoderConfig, HeadKind
from bestiary.models.inputs import Inputs
from bestiary.verify.planted.bug import PlantedBug
from bestiary.verify.planted.patching import patch
from bestiary.verify.scoring import PAD

_LAST = "bestiary.models.decoder:last_tokens"
_HEAD = "bestiary.models.layers.score:ScoreHead.forward"
_CAP = 8.0

Last = Callable[[Inputs, int, Tensor | None], Tensor]
Forward = Callable[[Any, Tensor, Tensor], Tensor]


def _end_of_row(last: Last) -> Last:
    def wrong(inputs: Inputs, rows: int, borders: Tensor | None) -> Tensor:
        padded = inputs.key_valid is not None
        return torch.arange(1, rows + 1) * inputs.length - 1 if padded else last(inputs, rows, borders)

    return wrong


def _counted(last: Last) -> Last:
    """The number of tokens minus one: right behind padding on the right alone."""

    def wrong(inputs: Inputs, rows: int, borders: Tensor | None) -> Tensor:
        if inputs.key_valid is None:
            return last(inputs, rows, borders)
        return torch.arange(rows) * inputs.length + inputs.key_valid.sum(-1) - 1

    return wrong


def _before_pad_token(last: Last) -> Last:
    """transformers' habit: back over everything that is the pad token, text or not."""

    def wrong(inputs: Inputs, rows: int, borders: Tensor | None) -> Tensor:
        found, ids = last(inputs, rows, borders), inputs.input_ids
        if ids is None:
            return found
        flat = ids.flatten()
        return torch.where((flat[found] == PAD) & (found % inputs.length > 0), found - 1, found)

    return wrong


def _one_early(last: Last) -> Last:
    return lambda inputs, rows, borders: (last(inputs, rows, borders) - 1).clamp(min=0)


def _next_document(last: Last) -> Last:
    def wrong(inputs: Inputs, rows: int, borders: Tensor | None) -> Tensor:
        found = last(inputs, rows, borders)
        return found if borders is None else (found + 1).clamp(max=inputs.length - 1)

    return wrong


def _one_a_row(last: Last) -> Last:
    """Packed documents taken for one."""

    def wrong(inputs: Inputs, rows: int, borders: Tensor | None) -> Tensor:
        packed = inputs.documents is not None
        return torch.arange(1, rows + 1) * inputs.length - 1 if packed else last(inputs, rows, borders)

    return wrong


def _scaled(forward: Forward) -> Forward:
    return lambda self, hidden, last: forward(self, hidden, last) * self.in_features**-0.5


def _capped(forward: Forward) -> Forward:
    return lambda self, hidden, last: _CAP * (forward(self, hidden, last) / _CAP).tanh()


def _detached(forward: Forward) -> Forward:
    return lambda self, hidden, last: forward(self, hidden.detach() + 0 * hidden, last)


def _several(config: DecoderConfig) -> bool:
    return config.num_labels > 1


def _turned(forward: Forward) -> Forward:
    return lambda self, hidden, last: forward(self, hidden, last).flip(-1)


_bug = partial(PlantedBug, head=HeadKind.SCORE)
_SCORES = ("base/scores", "mha/scores", "/scores")

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        id="S01_last_column",
        cause="the score is read at the end of the row, padding or not",
        level="V5",
        ours=patch(_LAST, _end_of_row),
        checks=("right padding",),
    ),
    _bug(
        id="S02_tokens_counted",
        cause="the last token is counted from the row's start, which padding on the left moves",
        level="V5",
        ours=patch(_LAST, _counted),
        checks=("left padding",),
    ),
    _bug(
        id="S03_pad_token_is_padding",
        cause="a document that ends with the pad token is read before it, whatever the mask says",
        level="V5",
        ours=patch(_LAST, _before_pad_token),
        checks=("ends in the pad token",),
    ),
    _bug(
        id="S04_one_token_early",
        cause="the score is read one token before the last",
        level="V2",
        ours=patch(_LAST, _one_early),
        checks=_SCORES,
    ),
    _bug(
        id="S05_border_of_the_next",
        cause="a border is taken for the last token before it",
        level="V5",
        ours=patch(_LAST, _next_document),
        checks=("packed by borders",),
    ),
    _bug(
        id="S06_packed_as_one",
        cause="packed documents are scored as one",
        level="V5",
        ours=patch(_LAST, _one_a_row),
        checks=("packed",),
    ),
    _bug(
        id="S07_scaled",
        cause="scores are divided by the root of the width",
        level="V2",
        ours=patch(_HEAD, _scaled),
        checks=_SCORES,
    ),
    _bug(
        id="S08_soft_capped",
        cause="scores run through a soft cap of logits",
        level="V2",
        ours=patch(_HEAD, _capped),
        checks=_SCORES,
    ),
    _bug(
        id="S09_backbone_detached",
        cause="no gradient of the scores reaches the backbone",
        level="V4",
        ours=patch(_HEAD, _detached),
        checks=("model.layers.",),
    ),
    _bug(
        id="S10_labels_turned",
        cause="labels are in the opposite order",
        level="V2",
        applies=_several,
        ours=patch(_HEAD, _turned),
        checks=_SCORES,
    ),
)
