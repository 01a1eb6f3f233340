"""Reward models on the bench: their tiny configs and inputs, and Hugging Face's scores of documents.

Hugging Face finds a document's end by `pad_token_id`. Inputs that both sides get whole therefore hold that token only
inside the text and on padding; where ends are told otherwise, Hugging Face is asked about each document alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bestiary.bridges import Bridge
from bestiary.models.config import HeadKind
from bestiary.verify.inputs import Inputs
from bestiary.verify.lab import BATCH, PAD_AT, Lab
from bestiary.verify.tiny import LENGTH, Raw, tiny_configs

PAD = 7
LABELS: Mapping[str, int | None] = {"base": 1, "mha": 3, "mqa": None, "square": 1}
"""Scores a document, by tiny config; None: the file states no labels, which means 2."""


def score_configs(bridge: Bridge, cases: Mapping[str, Raw] | None = None) -> dict[str, Raw]:
    """The tiny configs of a family, or `cases`, as those of a reward model.

    Raises:
        NoScoreClass: transformers has no reward model of this family.
    """
    architecture = bridge.reference_for(HeadKind.SCORE).partition(":")[2]
    configs = tiny_configs(bridge.reference) if cases is None else cases
    return {name: _scored(raw, architecture, LABELS.get(name, 1)) for name, raw in configs.items()}


def _scored(raw: Raw, architecture: str, labels: int | None) -> Raw:
    scored = {**raw, "architectures": [architecture]}
    if scored.get("pad_token_id") is None:
        scored["pad_token_id"] = PAD
    if labels is not None and not {"id2label", "num_labels"} & raw.keys():
        scored["id2label"] = {str(index): f"LABEL_{index}" for index in range(labels)}
        scored["label2id"] = {f"LABEL_{index}": index for index in range(labels)}
    return scored


def text(lab: Lab, case: str, *, batch: int = BATCH, length: int = LENGTH, salt: int = 0) -> Tensor:
    """Random ids (batch, length) without the pad token."""
    raw = lab.raw(case)
    ids = lab.inputs(raw, batch=batch, length=length, salt=salt).input_ids
    return torch.where(ids == raw["pad_token_id"], (ids + 1) % raw["vocab_size"], ids)


def probe(lab: Lab, case: str) -> Inputs:
    """The main input: three rows beyond four windows, the pad token inside the text."""

    def draw() -> Inputs:
        ids = text(lab, case)
        ids[:, PAD_AT] = lab.raw(case)["pad_token_id"]
        return Inputs(ids)

    return lab.once(("score probe", case), draw)


def padded(lab: Lab, case: str, side: str, counts: Sequence[int], *, junk: int | None = None) -> Inputs:
    """Rows of `counts` tokens padded on one side, with the pad token, or with tokens drawn with the salt `junk`."""
    width = max(counts)
    ids = text(lab, case, batch=len(counts), length=width, salt=4)
    mask = torch.zeros_like(ids)
    for row, count in enumerate(counts):
        mask[row, slice(width - count, width) if side == "left" else slice(0, count)] = 1
    filling = torch.full_like(ids, lab.raw(case)["pad_token_id"])
    if junk is not None:
        filling = text(lab, case, batch=len(counts), length=width, salt=junk)
    return Inputs(torch.where(mask == 1, ids, filling), attention_mask=mask)


def scores(lab: Lab, case: str, inputs: Inputs, **extra: Any) -> Tensor:
    """Our scores (documents, num_labels)."""
    with torch.no_grad():
        found: Tensor = lab.model(case)(**inputs.kwargs(), **extra)["scores"]
    return found


def alone(lab: Lab, case: str, documents: Sequence[Tensor], *, end: int | None = None) -> Tensor:
    """Hugging Face's scores of each document (1, t) on its own, at its last token whatever that is.

    Args:
        end: documents end at this position, as behind padding on the left.
    """
    reference, found = lab.hf(case), []
    with reference.running() as model, torch.no_grad():
        for document in documents:
            start = 0 if end is None else end - document.shape[1]
            positions = torch.arange(start, start + document.shape[1], device=lab.device)[None]
            # With embeddings in place of ids Hugging Face looks for no pad token.
            embedded = model.get_input_embeddings()(document.to(lab.device))  # type: ignore[operator]
            output = model(inputs_embeds=embedded, position_ids=positions, use_cache=False)
            found.append(output["logits"].cpu())
    return torch.cat(found)
