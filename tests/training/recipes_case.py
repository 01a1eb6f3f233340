"""Packs of pairs and of labelled answers, and steps over them, at toy size."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bestiary.models import Decoder
from bestiary.training.control import Control
from bestiary.training.data.packing import Candidate, Pack, assemble
from bestiary.training.data.source import Cursor
from bestiary.training.data.tokens import IGNORED, Tokens
from bestiary.training.recipes.base import Prepares

from ..models.tiny import VOCAB

Group = tuple[Tokens, ...]
LENGTHS = ((7, 5), (4, 9), (11, 3), (6, 6), (3, 8), (10, 4), (5, 5), (8, 7))  # prompt and answer of both of a pair


def document(prompt: int, answer: int, seed: int, **more: Any) -> Tokens:
    """Random tokens, the answer trained."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, prompt + answer).astype(np.int32)
    labels = ids.copy()
    labels[:prompt] = IGNORED
    return Tokens(ids, labels, **more)


def pairs(count: int = 8) -> list[Group]:
    """Preference pairs of unequal lengths."""
    return [
        (document(4, chosen, 2 * place), document(4, rejected, 2 * place + 1))
        for place, (chosen, rejected) in enumerate(LENGTHS[:count])
    ]


def singles(count: int = 8) -> list[Group]:
    """Documents with a number beside: 1 and 0 by turns."""
    return [
        (document(prompt, answer, place, value=float(place % 2)),)
        for place, (prompt, answer) in enumerate(LENGTHS[:count])
    ]


def masked(group: Group) -> Group:
    """The same tokens, none of them trained."""
    return tuple(Tokens(one.input_ids, np.full_like(one.labels, IGNORED), value=one.value) for one in group)


def pack(groups: Sequence[Group], spare: int = 3) -> Pack:
    """All of them in one row, with padding behind."""
    made = [Candidate(place, "a", place, Cursor(), 0, group) for place, group in enumerate(groups)]
    return assemble(made, sum(len(one) for group in groups for one in group) + spare, pad_id=5)


def step(recipe: Any, model: Decoder, packs: Sequence[Pack]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of an optimiser step, as the loop makes them."""
    model.zero_grad()
    batches = [recipe.batch(one) for one in packs]
    if isinstance(recipe, Prepares):
        recipe.prepare(model, batches, Control(), 0, 1)
    units = sum(recipe.count(one) for one in batches)
    loss = torch.zeros((), dtype=torch.float64)
    for one in batches:
        part = recipe.loss(model, one).total / units
        part.backward()
        loss += part.detach()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-9) -> None:
    """Equal names, and values within `bound` of the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=bound * max(1.0, largest), msg=name)
