"""V5, inputs: padding, packed documents, positions, lengths around the window, caches and batches, in true float64.

The reference for packed documents is Hugging Face on each document alone: its own packing is inferred in some classes
and ignored in others. Padding positions are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bestiary.models import Cache
from bestiary.verify.checks import Check, Outcome, Question, Replay, judged
from bestiary.verify.inputs import Inputs
from bestiary.verify.lab import Lab
from bestiary.verify.measure import max_over_std
from bestiary.verify.reference import Reference
from bestiary.verify.tiny import ORIGINAL_CONTEXT, WINDOW

CASES = ("base", "mha")
OFFSETS = (0, 300, 4096)
TEMPERATURE = 0.7
ITEMS = 17


def window_of(lab: Lab, case: str) -> int:
    """The sliding window of a config, or the tiny configs' where it has none."""
    window = lab.cases[case].get("sliding_window")
    return window if isinstance(window, int) else WINDOW


def lengths(window: int) -> list[int]:
    """Token counts around the window and beyond the original context."""
    return sorted({1, window - 1, window, window + 1, 4 * window, ORIGINAL_CONTEXT + 16})


@torch.no_grad()
def _ours(lab: Lab, case: str, inputs: Inputs, **extra: Any) -> Tensor:
    logits: Tensor = lab.model(case)(**inputs.kwargs(), **extra)["logits"]
    return logits


def _judge(lab: Lab, ours: Tensor, theirs: Tensor, replay: Replay | None = None, detail: str = "") -> Outcome:
    return judged(max_over_std(ours, theirs), lab.gates["V5"], detail=detail, replay=replay)


def _asked(lab: Lab, case: str, inputs: Inputs, ours: Tensor, ask: Callable[[Reference], Tensor]) -> Replay:
    """A failure that is seen again by asking the reference `ask`."""
    return Replay(case, inputs, Question(lab.hf(case), ask, ours))


def _same(lab: Lab, case: str, inputs: Inputs) -> Outcome:
    return _judge(lab, _ours(lab, case, inputs), lab.hf(case).logits(inputs), Replay(case, inputs))


def _length(lab: Lab, case: str, length: int) -> Outcome:
    return _same(lab, case, lab.inputs(lab.cases[case], batch=2, length=length, salt=length))


def _offset(lab: Lab, case: str, offset: int) -> Outcome:
    inputs = lab.inputs(lab.cases[case], batch=2, length=3 * WINDOW, salt=2)
    positions = torch.arange(3 * WINDOW)[None].expand(2, -1) + offset
    return _same(lab, case, Inputs(inputs.input_ids, position_ids=positions.contiguous()))


def _offset_by_row(lab: Lab, case: str) -> Outcome:
    inputs = lab.inputs(lab.cases[case], batch=len(OFFSETS), length=2 * WINDOW, salt=3)
    positions = torch.arange(2 * WINDOW)[None] + torch.tensor(OFFSETS)[:, None]
    return _same(lab, case, Inputs(inputs.input_ids, position_ids=positions))


# ------------------------------------------------------------------------------------------------ padding


def _padded(lab: Lab, case: str, side: str, *, fill_salt: int = 0) -> tuple[Inputs, list[Tensor]]:
    """A batch of rows of different lengths padded on one side, and the rows alone (1, t)."""
    window = window_of(lab, case)
    real = [3 * window + 2, 3 * window - 5, window + 1, 2]
    width = max(real)
    ids = lab.inputs(lab.cases[case], batch=len(real), length=width, salt=4).input_ids
    junk = lab.inputs(lab.cases[case], batch=len(real), length=width, salt=50 + fill_salt).input_ids
    mask = torch.zeros_like(ids)
    for row, count in enumerate(real):
        place = slice(width - count, width) if side == "left" else slice(0, count)
        mask[row, place] = 1
    ids = torch.where(mask == 1, ids, junk)
    rows = [ids[row][mask[row] == 1][None] for row in range(len(real))]
    return Inputs(ids, attention_mask=mask), rows


def _rows(logits: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([logits[row][mask[row] == 1] for row in range(mask.shape[0])])


def _alone(lab: Lab, case: str, rows: Sequence[Tensor], width: int | None = None) -> Tensor:
    """Hugging Face's logits of each row on its own, one after the other.

    Args:
        width: rows end at this position, as behind padding on the left. Where queries and keys are normed after RoPE
            the place matters, elsewhere differences of places alone do.
    """

    def one(row: Tensor) -> Inputs:
        if width is None:
            return Inputs(row)
        return Inputs(row, position_ids=torch.arange(width - row.shape[1], width)[None])

    return torch.cat([lab.hf(case).logits(one(row))[0] for row in rows])


def _padding(lab: Lab, case: str, side: str) -> Outcome:
    inputs, rows = _padded(lab, case, side)
    mask = inputs.kwargs()["attention_mask"]
    ours = _rows(_ours(lab, case, inputs), mask)
    width = inputs.input_ids.shape[1] if side == "left" else None
    return _judge(lab, ours, _alone(lab, case, rows, width), Replay(case, inputs))


def _padding_like_hf(lab: Lab, case: str, side: str) -> Outcome:
    """The same mask and explicit positions on both sides."""
    padded, _ = _padded(lab, case, side)
    mask = padded.kwargs()["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = Inputs(padded.input_ids, attention_mask=mask, position_ids=positions)
    ours, theirs = _ours(lab, case, inputs), lab.hf(case).logits(inputs)
    return _judge(lab, _rows(ours, mask), _rows(theirs, mask), Replay(case, inputs))


def _padding_content(lab: Lab, case: str, side: str) -> Outcome:
    """What stands in the padding changes nothing."""
    (one, _), (other, _) = (_padded(lab, case, side, fill_salt=salt) for salt in (0, 1))
    mask = one.kwargs()["attention_mask"]
    return _judge(lab, _rows(_ours(lab, case, other), mask), _rows(_ours(lab, case, one), mask), Replay(case, other))


def _holes(lab: Lab, case: str) -> Outcome:
    """Zeros inside a row: they hide tokens, and positions count through them as Hugging Face's do."""
    inputs = lab.inputs(lab.cases[case], batch=3, length=3 * WINDOW, salt=10)
    mask = torch.ones_like(inputs.input_ids)
    mask[0, 5:9] = 0
    mask[1, 2::5] = 0
    mask[2, -4:-1] = 0
    masked = Inputs(inputs.input_ids, attention_mask=mask)
    ours, theirs = _ours(lab, case, masked), lab.hf(case).logits(masked)
    return _judge(lab, _rows(ours, mask), _rows(theirs, mask), Replay(case, masked))


def _full_mask(lab: Lab, case: str) -> Outcome:
    plain = lab.inputs(lab.cases[case], batch=2, length=3 * WINDOW, salt=5)
    masked = Inputs(plain.input_ids, attention_mask=torch.ones_like(plain.input_ids))
    return _judge(lab, _ours(lab, case, masked), lab.hf(case).logits(plain), Replay(case, masked))


# ------------------------------------------------------------------------------------------------ packing


def _documents(window: int) -> list[int]:
    return [window + 5, 1, 2 * window, 7]


def _packed(lab: Lab, case: str, batch: int = 1) -> tuple[Inputs, list[Tensor]]:
    """Rows of documents with positions that restart, the second row in reverse order; and each document alone."""
    counts = _documents(window_of(lab, case))
    ids = lab.inputs(lab.cases[case], batch=batch, length=sum(counts), salt=6).input_ids
    orders = [counts if row % 2 == 0 else counts[::-1] for row in range(batch)]
    positions = torch.stack([torch.cat([torch.arange(count) for count in order]) for order in orders])
    documents = [part[None] for row, order in enumerate(orders) for part in ids[row].split(order)]
    return Inputs(ids, position_ids=positions), documents


def _packed_positions(lab: Lab, case: str, batch: int) -> Outcome:
    inputs, documents = _packed(lab, case, batch)
    ours = _ours(lab, case, inputs).flatten(0, 1)
    replay = _asked(lab, case, inputs, ours, lambda reference: reference.logits(inputs).flatten(0, 1))
    return _judge(lab, ours, _alone(lab, case, documents), replay)


def _packed_borders(lab: Lab, case: str) -> Outcome:
    inputs, documents = _packed(lab, case)
    counts = torch.tensor([document.shape[1] for document in documents])
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    longest = int(counts.max())
    ours = _ours(
        lab,
        case,
        Inputs(inputs.input_ids),
        cu_seq_lens_q=borders,
        cu_seq_lens_k=borders,
        max_length_q=longest,
        max_length_k=longest,
    )
    return _judge(lab, ours[0], _alone(lab, case, documents))


def _packed_loss(lab: Lab, case: str) -> Outcome:
    """The loss of packed documents is the sum over documents: no target crosses a border."""
    inputs, documents = _packed(lab, case)
    with torch.no_grad():
        output = lab.model(case)(**inputs.kwargs(), labels=inputs.input_ids, num_items_in_batch=1)
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        log_probs = lab.hf(case).logits(Inputs(document))[0, :-1].log_softmax(-1)
        total -= log_probs.gather(1, document[0, 1:, None]).sum()
    ours = -output["log_probs"].sum()
    return judged(float((ours - total).abs() / total.abs()), lab.gates["V5"])


# ------------------------------------------------------------------------------------------------ caches


@torch.no_grad()
def _decoded(lab: Lab, case: str, ids: Tensor, chunks: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """Our logits of `ids` fed in `chunks` through one cache."""
    model = lab.model(case)
    cache = Cache(lab.decoder_config(case))
    found, start = [], 0
    for count in chunks:
        end = start + count
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        found.append(model(ids[:, start:end], past_key_values=cache, use_cache=True, **seen)["logits"])
        start = end
    return torch.cat(found, dim=1)


def _hf_decoded(reference: Reference, ids: Tensor, chunks: Sequence[int]) -> Tensor:
    """Hugging Face's logits of `ids` fed in `chunks` through its own cache."""
    cache, found, start = reference.new_cache(), [], 0
    for count in chunks:
        output = reference.call(Inputs(ids[:, start : start + count]), use_cache=True, **cache)
        found.append(output["logits"])
        start += count
    return torch.cat(found, dim=1)


def _chunks(window: int, kind: str) -> list[int]:
    prefill = window // 2 + 1
    if kind == "steps":
        return [prefill] + [1] * (2 * window)
    if kind == "long prefill":
        return [3 * window] + [1] * window
    return [prefill, 5, 1, window + 2, 1, 3]


def _cached(lab: Lab, case: str, kind: str) -> Outcome:
    """Prefill and decoding past the window against Hugging Face's one forward over everything."""
    chunks = _chunks(window_of(lab, case), kind)
    inputs = lab.inputs(lab.cases[case], batch=2, length=sum(chunks), salt=7)
    ours = _decoded(lab, case, inputs.input_ids, chunks)
    replay = _asked(lab, case, inputs, ours, lambda reference: _hf_decoded(reference, inputs.input_ids, chunks))
    return _judge(lab, ours, lab.hf(case).logits(inputs), replay)


def _cached_against_ours(lab: Lab, case: str) -> Outcome:
    chunks = _chunks(window_of(lab, case), "steps")
    inputs = lab.inputs(lab.cases[case], batch=2, length=sum(chunks), salt=7)
    return _judge(lab, _decoded(lab, case, inputs.input_ids, chunks), _ours(lab, case, inputs))


def _cached_on_both(lab: Lab, case: str) -> Outcome:
    chunks = _chunks(window_of(lab, case), "steps")
    ids = lab.inputs(lab.cases[case], batch=1, length=sum(chunks), salt=8).input_ids
    return _judge(lab, _decoded(lab, case, ids, chunks), _hf_decoded(lab.hf(case), ids, chunks))


def _cached_padded(lab: Lab, case: str) -> Outcome:
    inputs, rows = _padded(lab, case, "left")
    mask = inputs.kwargs()["attention_mask"]
    width, prefill = inputs.input_ids.shape[1], window_of(lab, case)
    ours = _decoded(lab, case, inputs.input_ids, [prefill] + [1] * (width - prefill), mask)
    return _judge(lab, _rows(ours, mask), _alone(lab, case, rows, width))


def _cache_reordered(lab: Lab, case: str) -> Outcome:
    """Rows of a cache taken in another order continue as those rows."""
    model, window = lab.model(case), window_of(lab, case)
    ids = lab.inputs(lab.cases[case], batch=3, length=window + 6, salt=9).input_ids
    order = torch.tensor([2, 0, 2])
    cache = Cache(lab.decoder_config(case))
    with torch.no_grad():
        model(ids[:, : window + 2], past_key_values=cache, use_cache=True)
        cache.reorder(order.to(lab.device))
        ours = model(ids[order][:, window + 2 :], past_key_values=cache, use_cache=True)["logits"]
    return _judge(lab, ours, lab.hf(case).logits(Inputs(ids[order]))[:, window + 2 :])


# ------------------------------------------------------------------------------------------------ the rest


def _permuted(lab: Lab, case: str) -> Outcome:
    inputs = lab.probe(case)
    order = torch.tensor([2, 0, 1])
    permuted = Inputs(inputs.input_ids[order])
    return _judge(lab, _ours(lab, case, permuted), lab.hf(case).logits(inputs)[order], Replay(case, permuted))


def _one_row(lab: Lab, case: str) -> Outcome:
    inputs = lab.probe(case)
    row = Inputs(inputs.input_ids[1:2])
    return _judge(lab, _ours(lab, case, row), lab.hf(case).logits(inputs)[1:2], Replay(case, row))


def _embeddings(lab: Lab, case: str) -> Outcome:
    inputs = lab.probe(case)
    with torch.no_grad():
        embedded = lab.model(case).get_submodule("model.embed_tokens")(inputs.input_ids)
        ours = lab.model(case)(inputs_embeds=embedded)["logits"]
    return _judge(lab, ours, lab.hf(case).logits(inputs))


def _kept(lab: Lab, case: str) -> Outcome:
    inputs = Inputs(lab.probe(case).input_ids)
    theirs = lab.hf(case).call(inputs, use_cache=False, logits_to_keep=3)["logits"]
    return _judge(lab, _ours(lab, case, inputs, logits_to_keep=3), theirs)


def _log_probs(lab: Lab, case: str) -> Outcome:
    """Log-probabilities of the targets at a temperature, from Hugging Face's logits."""
    inputs = lab.probe(case)
    labels = inputs.kwargs()["labels"]
    with torch.no_grad():
        ours = lab.model(case)(**inputs.kwargs(), temperature=TEMPERATURE)["log_probs"][:, :-1]
    targets = labels[:, 1:]
    table = (lab.hf(case).logits(inputs)[:, :-1] / TEMPERATURE).log_softmax(-1)
    theirs = table.gather(2, targets.clamp(min=0)[..., None])[..., 0].masked_fill(targets == -100, 0.0)
    return _judge(lab, ours, theirs)


def _items(lab: Lab, case: str) -> Outcome:
    """The loss over a given number of items, as trainers ask for it."""
    inputs = lab.probe(case)
    theirs = lab.hf(case).call(inputs, use_cache=False, num_items_in_batch=ITEMS)["loss"]
    with torch.no_grad():
        ours = lab.model(case)(**inputs.kwargs(), num_items_in_batch=ITEMS)["loss"]
    return judged(float((ours - theirs).abs() / theirs.abs()), lab.gates["V5"])


MASK, POSITIONS = ("attention_mask",), ("position_ids",)
DOCUMENTS = (*POSITIONS, "cu_seq_lens_q")
"""A module that takes the borders of documents also tells them apart by positions that restart."""
BORDERS = ("cu_seq_lens_q", "max_length_q")
CACHE = ("past_key_values", "use_cache")


def plan(lab: Lab) -> list[Check]:
    """Every kind of input, on two configs with different windows and layer patterns."""
    checks = []
    for case in [name for name in CASES if name in lab.cases] or [lab.main_case]:
        window = window_of(lab, case)
        checks += [Check(f"{case}/length {n}", partial(_length, lab, case, n)) for n in lengths(window)]
        checks += [Check(f"{case}/offset {n}", partial(_offset, lab, case, n), needs=POSITIONS) for n in OFFSETS]
        checks.append(Check(f"{case}/offset by row", partial(_offset_by_row, lab, case), needs=POSITIONS))
        for side in ("left", "right"):
            checks += [
                Check(f"{case}/{side} padding", partial(_padding, lab, case, side), needs=MASK),
                Check(
                    f"{case}/{side} padding, same mask",
                    partial(_padding_like_hf, lab, case, side),
                    needs=(*MASK, *POSITIONS),
                ),
                Check(f"{case}/{side} padding content", partial(_padding_content, lab, case, side), needs=MASK),
            ]
        checks += [
            Check(f"{case}/mask with holes", partial(_holes, lab, case), needs=MASK),
            Check(f"{case}/full mask", partial(_full_mask, lab, case), needs=MASK),
            Check(f"{case}/packed", partial(_packed_positions, lab, case, 1), needs=DOCUMENTS),
            Check(f"{case}/packed, two rows", partial(_packed_positions, lab, case, 2), needs=DOCUMENTS),
            Check(
                f"{case}/packed by borders",
                partial(_packed_borders, lab, case),
                needs=BORDERS,
            ),
            Check(f"{case}/packed loss", partial(_packed_loss, lab, case), needs=(*DOCUMENTS, "num_items_in_batch")),
            *(
                Check(f"{case}/cached, {kind}", partial(_cached, lab, case, kind), needs=CACHE)
                for kind in ("steps", "long prefill", "chunks")
            ),
            Check(f"{case}/cached, ours in one piece", partial(_cached_against_ours, lab, case), needs=CACHE),
            Check(f"{case}/cached on both sides", partial(_cached_on_both, lab, case), needs=CACHE),
            Check(f"{case}/cached, left padding", partial(_cached_padded, lab, case), needs=(*CACHE, *MASK)),
            Check(f"{case}/cache reordered", partial(_cache_reordered, lab, case), needs=CACHE),
            Check(f"{case}/permuted batch", partial(_permuted, lab, case)),
            Check(f"{case}/one row", partial(_one_row, lab, case)),
            Check(f"{case}/inputs_embeds", partial(_embeddings, lab, case), needs=("inputs_embeds",)),
            Check(f"{case}/logits_to_keep", partial(_kept, lab, case), needs=("logits_to_keep",)),
            Check(f"{case}/log_probs", partial(_log_probs, lab, case), needs=("temperature",)),
            Check(f"{case}/num_items_in_batch", partial(_items, lab, case), needs=("num_items_in_batch",)),
        ]
    return checks
