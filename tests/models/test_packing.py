"""Packed documents never see each other, however they are given."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bestiary.kernels.dispatch import force
from bestiary.models import Decoder
from bestiary.models.errors import InvalidInput

from .tiny import FAMILIES, VOCAB, tiny, tokens

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=5)
MODELS = {family: tiny(family) for family in FAMILIES}


def restarting(lengths: list[int]) -> Tensor:
    """position_ids (1, T)."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def borders(lengths: list[int]) -> Tensor:
    """cu_seq_lens (documents + 1,), int32 as collators give them."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@torch.no_grad()
def separately(model: Decoder, ids: Tensor, lengths: list[int]) -> Tensor:
    """Each document in a call of its own."""
    return torch.cat([model(piece).logits for piece in ids.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("attention", ["documents", "sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(lengths=LENGTHS)
def test_packed_equals_separate(family: str, attention: str, lengths: list[int]) -> None:
    """By restarting positions, by borders, by both; documents longer and shorter than the window."""
    if family == "gpt_oss" and attention == "sdpa":
        attention = "eager"  # sinks
    model, ids = MODELS[family], tokens(1, sum(lengths))
    with force(attention=attention), torch.no_grad():
        expected = separately(model, ids, lengths)
        by_positions = model(ids, position_ids=restarting(lengths)).logits
        by_borders = model(ids, cu_seq_lens_q=borders(lengths), cu_seq_lens_k=borders(lengths), max_length_q=20).logits
        by_both = model(ids, cu_seq_lens_q=borders(lengths), position_ids=restarting(lengths)).logits
    assert (by_positions - expected).abs().max() < 1e-12 * expected.std()
    assert torch.equal(by_borders, by_positions)
    assert torch.equal(by_both, by_positions)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=5), data=st.data())
def test_packed_documents_never_see_each_other(family: str, lengths: list[int], data: st.DataObject) -> None:
    """Perturbing one document leaves the logits of every other bit-equal.

    Experts multiply the tokens of all documents together, in products whose size the routing decides: there the last
    bits move, and `test_gradients_stay_inside_the_document` holds the exact statement.
    """
    model, ids = MODELS[family], tokens(1, sum(lengths))
    changed = data.draw(st.integers(0, len(lengths) - 1))
    first, last = int(borders(lengths)[changed]), int(borders(lengths)[changed + 1])
    other = ids.clone()
    other[:, first:last] = (ids[:, first:last] + 1) % VOCAB
    with torch.no_grad():
        before, after = (model(x, cu_seq_lens_q=borders(lengths)).logits for x in (ids, other))
    outside = torch.ones(sum(lengths), dtype=torch.bool)
    outside[first:last] = False
    difference = (before - after)[:, outside].abs().max()
    assert difference == 0 if model.decoder_config.moe is None else difference < 1e-12 * before.std()
    assert not torch.equal(before[:, ~outside], after[:, ~outside])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_stay_inside_the_document(family: str) -> None:
    """A loss on one document has no gradient in the embeddings of another."""
    model, lengths = MODELS[family], [9, 12, 5]
    embeds = model.model.embed_tokens(tokens(1, 26)).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, cu_seq_lens_q=borders(lengths)).logits
    logits[:, 9:21].square().sum().backward()
    touched = embeds.grad.abs().sum(-1)[0] > 0
    assert touched.tolist() == [False] * 9 + [True] * 12 + [False] * 5


def test_rows_of_a_batch_may_be_packed_differently() -> None:
    """position_ids per row."""
    model, ids = MODELS["gemma3"], tokens(2, 24)
    positions = torch.cat((restarting([10, 14]), restarting([3, 15, 6])))
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits
        first = separately(model, ids[:1], [10, 14])
        second = separately(model, ids[1:], [3, 15, 6])
    torch.testing.assert_close(packed, torch.cat((first, second)), rtol=1e-11, atol=1e-11)


def test_a_document_starts_where_positions_do_not_rise_by_one() -> None:
    """At a restart, at a repetition and at a gap."""
    model, ids = MODELS["qwen3"], tokens(1, 12)
    with torch.no_grad():
        for positions, lengths in (([*range(5), *range(7)], [5, 7]), ([*range(5), *range(4, 11)], [5, 7])):
            packed = model(ids, position_ids=torch.tensor([positions])).logits
            pieces = [
                model(piece, position_ids=at).logits
                for piece, at in zip(ids.split(lengths, 1), torch.tensor([positions]).split(lengths, 1), strict=True)
            ]
            torch.testing.assert_close(packed, torch.cat(pieces, 1), rtol=1e-11, atol=1e-11)


def test_an_offset_is_not_a_border() -> None:
    """One document that starts at 30 000: RoPE is relative, so the logits stay."""
    model, ids = MODELS["qwen3"], tokens(1, 12)
    with torch.no_grad():
        moved = model(ids, position_ids=torch.arange(30_000, 30_012)[None]).logits
        assert (moved - model(ids).logits).abs().max() < 1e-9


def test_positions_are_counted_through_holes_of_the_mask() -> None:
    """As in transformers' forward: a hidden token keeps its place, so what follows does not move closer."""
    model, ids = MODELS["qwen3"], tokens(1, 12)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, 4:7] = 0
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits
        counted = model(ids, attention_mask=mask, position_ids=torch.arange(12)[None]).logits
        closed = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1)).logits
    assert torch.equal(found, counted)
    assert (found - closed)[:, 7:].abs().max() > 1e-3


def test_with_a_mask_positions_make_no_documents() -> None:
    """A padded batch restarts its positions too; there the mask says what belongs together."""
    model, ids = MODELS["qwen3"], tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        explicit = model(ids, attention_mask=mask, position_ids=positions).logits
        derived = model(ids, attention_mask=mask).logits
        alone = model(ids[1:, 4:]).logits
    real = mask.bool()
    torch.testing.assert_close(explicit[real], derived[real], rtol=1e-11, atol=1e-11)  # RoPE sees differences alone
    torch.testing.assert_close(derived[1:, 4:], alone, rtol=1e-11, atol=1e-11)
    other, restart = ids.clone(), restarting([5, 7])
    other[:, 0] = (ids[:, 0] + 1) % VOCAB
    with torch.no_grad():
        first, second = (model(x, attention_mask=torch.ones(2, 12), position_ids=restart).logits for x in (ids, other))
    assert (first - second)[:, 5:].abs().min() > 0, "the second run of positions still sees the first"


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_do_not_cross_a_border(family: str) -> None:
    """The loss is that of the documents apart, summed."""
    model, lengths = MODELS[family], [6, 1, 11]
    ids = tokens(1, 18)
    with torch.no_grad():
        packed = model(ids, labels=ids, cu_seq_lens_q=borders(lengths), num_items_in_batch=1)
        by_positions = model(ids, labels=ids, position_ids=restarting(lengths), num_items_in_batch=1)
        apart = [model(piece, labels=piece, num_items_in_batch=1) for piece in ids.split(lengths, 1)]
    expected = sum(out.loss for out in apart)
    torch.testing.assert_close(packed.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(by_positions.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(packed.log_probs, torch.cat([out.log_probs for out in apart], 1))
    assert int((packed.log_probs != 0).sum()) == 5 + 0 + 10


@pytest.mark.parametrize("given_as", ["borders", "positions"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_pack_are_those_of_its_documents(family: str, given_as: str) -> None:
    """Of every parameter: packed as one row, they are the sum of those of each document in a call of its own."""
    model, lengths = tiny(family), [6, 1, 11, 4]
    ids = tokens(1, sum(lengths))
    extra = {"cu_seq_lens_q": borders(lengths)} if given_as == "borders" else {"position_ids": restarting(lengths)}
    found = []
    for calls in ([(ids, extra)], [(piece, {}) for piece in ids.split(lengths, 1)]):
        model.zero_grad()
        for piece, arguments in calls:
            model(piece, labels=piece, num_items_in_batch=1, **arguments).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    packed, apart = found
    assert set(packed) == set(apart)
    for name, gradient in packed.items():
        assert (gradient - apart[name]).abs().max() <= 1e-11 * (1 + apart[name].abs().max()), name


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 5, 11])}, r"cu_seq_lens_q = \[0, 5, 11\] for 12 tokens"),
        ({"cu_seq_lens_q": torch.tensor([1, 5, 12])}, r"cu_seq_lens_q = \[1, 5, 12\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 5, 12])}, r"cu_seq_lens_q = \[0, 9, 5, 12\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 12]), "attention_mask": torch.ones(1, 12)}, "an attention_mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 12]), "use_cache": True}, "a cache"),
        ({"position_ids": torch.arange(11)[None]}, r"position_ids has shape \(1, 11\)"),
        ({"attention_mask": torch.ones(1, 11)}, r"attention_mask has shape \(1, 11\)"),
        ({"attention_mask": torch.ones(1, 1, 12, 12)}, r"attention_mask has shape \(1, 1, 12, 12\)"),
    ],
)
def test_what_does_not_fit_the_row_is_refused(arguments: dict[str, Tensor], named: str) -> None:
    """By name, with what came."""
    with pytest.raises(InvalidInput, match=named):
        MODELS["qwen3"](tokens(1, 12), **arguments)


def test_borders_need_one_row() -> None:
    """Two rows would need two lists."""
    with pytest.raises(InvalidInput, match="batch of 2 rows"):
        MODELS["qwen3"](tokens(2, 12), cu_seq_lens_q=torch.tensor([0, 12]))


def test_an_empty_document_between_two_borders_is_no_document() -> None:
    """Collators pad the list of borders by repeating the last."""
    model, ids = MODELS["qwen3"], tokens(1, 12)
    with torch.no_grad():
        plain = model(ids, cu_seq_lens_q=torch.tensor([0, 5, 12])).logits
        repeated = model(ids, cu_seq_lens_q=torch.tensor([0, 5, 5, 12, 12])).logits
    assert torch.equal(plain, repeated)
