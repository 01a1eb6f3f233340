"""A slice of a row sees what its tokens see in the whole row; what cannot be sliced is refused by name."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bestiary.kernels.attention import MaskSpec, PieceMasks, attention
from bestiary.kernels.dispatch import force
from bestiary.models.config import (
    Attention,
    DecoderConfig,
    DynamicScaling,
    HeadKind,
    LongRopeScaling,
    Norm,
    Rope,
    RopeScaling,
)
from bestiary.models.context import ContextSlice
from bestiary.models.errors import InvalidInput
from bestiary.models.inputs import read_inputs

from .tiny import tiny, tokens

HEADS, KV_HEADS, DIM = 4, 2, 5
ROWS = 2


def config(window: int | None, causal: bool) -> DecoderConfig:
    """One layer."""
    return DecoderConfig(
        model_type="one",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        attention=Attention(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=0.37, causal=causal),
        norm=Norm(eps=1e-6),
        rope=Rope(theta=1e4, rotary_dim=4),
        layer_types=("full_attention" if window is None else "sliding_attention",),
        sliding_window=window,
    )


def nothing(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """No other slices."""
    raise AssertionError("masks and refusals gather nothing")


@st.composite
def slices(draw: st.DrawFn) -> ContextSlice:
    """One to three pieces of a row that is shorter or longer than a block of queries."""
    length = draw(st.integers(6, 20) | st.integers(130, 150))
    count = draw(st.integers(1, 3))
    ends = st.lists(st.integers(0, length), min_size=2 * count, max_size=2 * count, unique=True)
    borders = sorted(draw(ends))
    return ContextSlice(length, tuple(zip(borders[::2], borders[1::2], strict=True)), nothing)


@settings(max_examples=40)
@given(
    context=slices(),
    window=st.none() | st.integers(1, 160),
    kind=st.sampled_from(["plain", "packed", "mixed", "padded", "both ways"]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_slice_sees_what_its_tokens_see_in_the_row(
    context: ContextSlice, window: int | None, kind: str, sinks: bool, seed: int
) -> None:
    """Outputs and gradients of every implementation: documents in one piece and in several, padding, windows, sinks."""
    generator, length = torch.Generator().manual_seed(seed), context.length
    ids = torch.zeros(ROWS, length, dtype=torch.int64)
    mask = (torch.rand(ROWS, length, generator=generator) > 0.2).long() if kind == "padded" else None
    inputs = read_inputs(ids, None, mask, None, None, None)
    names = torch.randint(0, 3, (ROWS, length), generator=generator)
    if kind in ("packed", "mixed"):
        inputs.documents = names if kind == "mixed" else names.sort(-1).values
    one = config(window, causal=kind != "both ways")
    (row,), (part,) = inputs.masks(one, None).values(), inputs.sliced(context).masks(one, None).values()
    assert isinstance(row, MaskSpec)
    assert isinstance(part, PieceMasks)
    shapes = ((ROWS, HEADS, length, DIM), (ROWS, KV_HEADS, length, DIM), (ROWS, KV_HEADS, length, DIM), (HEADS,))
    q, k, v, sink = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    given = (q, k, v, sink) if sinks else (q, k, v)
    real = torch.ones(ROWS, context.own) if mask is None else context.cut(mask)
    weights = torch.randn(ROWS, HEADS, context.own, DIM, generator=generator) * real[:, None, :, None]
    for implementation in ("eager", "documents", "sdpa"):
        if (implementation == "sdpa" and sinks) or (implementation == "documents" and kind == "both ways"):
            continue
        with force(attention=implementation):
            whole = context.cut(attention(q, k, v, row, scale=0.37, sinks=sink if sinks else None), 2) * weights
            own = attention(context.cut(q, 2), k, v, part, scale=0.37, sinks=sink if sinks else None) * weights
        torch.testing.assert_close(own, whole, rtol=1e-10, atol=1e-10, msg=implementation)
        ours, expected = (torch.autograd.grad(found.sum(), given) for found in (own, whole))
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10, msg=implementation)


@given(context=slices())
def test_a_slice_is_cut_and_placed_where_it_was(context: ContextSlice) -> None:
    """Other tokens are 0."""
    row = torch.arange(1, context.length + 1)[None]
    placed = context.placed(context.cut(row))
    assert torch.equal(placed[placed > 0][None], context.cut(row))
    assert torch.equal(placed[placed > 0], row[placed > 0])


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicScaling(factor=4.0, original_max_position_embeddings=9),
        LongRopeScaling(
            short_factor=(1.0, 2.0), long_factor=(3.0, 5.0), original_max_position_embeddings=9, attention_factor=1.5
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_frequencies_that_follow_the_longest_position_are_those_of_the_row(scaling: RopeScaling) -> None:
    """Also of a slice that ends before it; one piece from the front needs no key of the others."""
    model = tiny("qwen3", rope=Rope(theta=1e4, rotary_dim=4, scaling=scaling))
    ids, front = tokens(1, 12), ContextSlice(12, ((0, 5),), lambda k, v: tuple(F.pad(x, (0, 0, 0, 7)) for x in (k, v)))
    with torch.no_grad():
        torch.testing.assert_close(model(ids, context_slice=front).logits, model(ids).logits[:, :5])


def test_what_needs_whole_rows_is_refused() -> None:
    """The argument, and what to do."""
    ids, context = tokens(1, 6), ContextSlice(6, ((0, 3),), nothing)
    model = tiny("qwen3_moe")
    for options, name in (
        ({"use_cache": True}, "past_key_values"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"output_router_logits": True}, "output_router_logits"),
    ):
        with pytest.raises(InvalidInput, match=f"{name}=.*whole rows"):
            model(ids, context_slice=context, **options)
    with pytest.raises(InvalidInput, match="context_slice is of 6 tokens, and the rows have 4"):
        model(ids[:, :4], context_slice=context)
    scores = tiny("qwen3", head=HeadKind.SCORE, tie_word_embeddings=False)
    with pytest.raises(InvalidInput, match=r"context_slice=.*score head"):
        scores(ids, context_slice=context)
    for pieces in ((), ((2, 2),), ((3, 5), (0, 2)), ((4, 7),)):
        with pytest.raises(InvalidInput, match=r"ContextSlice\.pieces"):
            ContextSlice(6, pieces, nothing)
