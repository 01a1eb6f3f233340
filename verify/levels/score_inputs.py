"""V5 of a reward model: which token is a document's last, under padding, packing, caches and any order of rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bestiary.models import Cache
from bestiary.verify.checks import Check, Outcome, judged
from bestiary.verify.inputs import Inputs
from bestiary.verify.lab import Lab
from bestiary.verify.levels.v5_inputs import CASES, lengths, window_of
from bestiary.verify.measure import max_over_std
from bestiary.verify.scoring import alone, padded, probe, scores, text

BY_MASK, BY_CONTENT = "padding", "padding content"


def _judge(lab: Lab, ours: Tensor, theirs: Tensor) -> Outcome:
    return judged(max_over_std(ours, theirs), lab.gates["V5"])


def _counts(lab: Lab, case: str) -> list[int]:
    window = window_of(lab, case)
    return [3 * window + 2, 3 * window - 5, window + 1, 2]


def _rows(inputs: Inputs) -> list[Tensor]:
    mask = inputs.kwargs()["attention_mask"]
    return [inputs.input_ids[row][mask[row] == 1][None] for row in range(len(mask))]


def _length(lab: Lab, case: str, length: int) -> Outcome:
    ids = text(lab, case, batch=2, length=length, salt=length)
    return _judge(lab, scores(lab, case, Inputs(ids)), lab.hf(case).logits(Inputs(ids)))


def _padding(lab: Lab, case: str, side: str, junk: int | None) -> Outcome:
    """Padded rows against Hugging Face on each alone; `junk` in the padding changes nothing."""
    inputs = padded(lab, case, side, _counts(lab, case), junk=junk)
    end = inputs.input_ids.shape[1] if side == "left" else None
    return _judge(lab, scores(lab, case, inputs), alone(lab, case, _rows(inputs), end=end))


def _padding_like_hf(lab: Lab, case: str, side: str) -> Outcome:
    """The same batch on both sides, the pad token on the padding."""
    inputs = padded(lab, case, side, _counts(lab, case))
    return _judge(lab, scores(lab, case, inputs), lab.hf(case).logits(inputs))


def _ends_in_pad(lab: Lab, case: str) -> Outcome:
    """Documents that end with the pad token, which is text where the mask says so."""
    inputs = padded(lab, case, "right", _counts(lab, case))
    mask = inputs.kwargs()["attention_mask"]
    last = mask.sum(-1) - 1
    inputs.input_ids[torch.arange(len(last)), last] = lab.raw(case)["pad_token_id"]
    return _judge(lab, scores(lab, case, inputs), alone(lab, case, _rows(inputs)))


def _full_mask(lab: Lab, case: str) -> Outcome:
    inputs = probe(lab, case)
    masked = Inputs(inputs.input_ids, attention_mask=torch.ones_like(inputs.input_ids))
    return _judge(lab, scores(lab, case, masked), lab.hf(case).logits(inputs))


def _packed(lab: Lab, case: str, batch: int, by: str) -> Outcome:
    """Packed documents, the second row in reverse order, against Hugging Face on each alone."""
    counts = [window_of(lab, case) + 5, 1, 2 * window_of(lab, case), 7]
    ids = text(lab, case, batch=batch, length=sum(counts), salt=6)
    orders = [counts if row % 2 == 0 else counts[::-1] for row in range(batch)]
    documents = [part[None] for row, order in enumerate(orders) for part in ids[row].split(order)]
    if by == "borders":
        borders = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=lab.device)
        ours = scores(lab, case, Inputs(ids), cu_seq_lens_q=borders, max_length_q=max(counts))
    else:
        positions = torch.stack([torch.cat([torch.arange(count) for count in order]) for order in orders])
        ours = scores(lab, case, Inputs(ids, position_ids=positions))
    return _judge(lab, ours, alone(lab, case, documents))


def _permuted(lab: Lab, case: str) -> Outcome:
    inputs = probe(lab, case)
    order = torch.arange(len(inputs.input_ids)).roll(1)
    return _judge(lab, scores(lab, case, Inputs(inputs.input_ids[order])), lab.hf(case).logits(inputs)[order])


def _embeddings(lab: Lab, case: str) -> Outcome:
    inputs = probe(lab, case)
    with torch.no_grad():
        embedded = lab.model(case).get_submodule("model.embed_tokens")(inputs.input_ids)
        ours = lab.model(case)(inputs_embeds=embedded)["scores"]
    return _judge(lab, ours, lab.hf(case).logits(inputs))


def _cached(lab: Lab, case: str) -> Outcome:
    """A document in two pieces through one cache scores as in one."""
    inputs = probe(lab, case)
    cache, cut = Cache(lab.decoder_config(case)), window_of(lab, case) + 3
    scores(lab, case, Inputs(inputs.input_ids[:, :cut]), past_key_values=cache)
    ours = scores(lab, case, Inputs(inputs.input_ids[:, cut:]), past_key_values=cache)
    return _judge(lab, ours, lab.hf(case).logits(inputs))


def plan(lab: Lab) -> list[Check]:
    """Every way to say where documents end, on two configs with different windows and layer patterns."""
    checks = []
    for case in [name for name in CASES if name in lab.cases] or [lab.main_case]:
        checks += [Check(f"{case}/length {n}", partial(_length, lab, case, n)) for n in lengths(window_of(lab, case))]
        for side in ("left", "right"):
            checks += [
                Check(f"{case}/{side} {BY_MASK}", partial(_padding, lab, case, side, None)),
                Check(f"{case}/{side} {BY_CONTENT}", partial(_padding, lab, case, side, 50)),
                Check(f"{case}/{side} padding, same batch", partial(_padding_like_hf, lab, case, side)),
            ]
        checks += [
            Check(f"{case}/ends in the pad token", partial(_ends_in_pad, lab, case)),
            Check(f"{case}/full mask", partial(_full_mask, lab, case)),
            Check(f"{case}/packed", partial(_packed, lab, case, 1, "positions")),
            Check(f"{case}/packed, two rows", partial(_packed, lab, case, 2, "positions")),
            Check(f"{case}/packed by borders", partial(_packed, lab, case, 1, "borders")),
            Check(f"{case}/permuted batch", partial(_permuted, lab, case)),
            Check(f"{case}/inputs_embeds", partial(_embeddings, lab, case)),
            Check(f"{case}/cached", partial(_cached, lab, case)),
        ]
    return checks
