"""Attention: what a mask lets through, and that every implementation computes the softmax over exactly that."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bestiary.kernels.attention import MaskSpec, attention
from bestiary.kernels.dispatch import force, record
from bestiary.kernels.errors import UnsupportedDispatch

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 5, 0.37
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def untraced() -> Iterator[None]:
    """FlexAttention's CPU form is one operator, which dynamo would trace anew for every shape."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


@st.composite
def masks(draw: st.DrawFn, batch: int = 2, both_ways: bool = True) -> MaskSpec:
    """Every kind of mask that a forward pass builds."""
    q_len = draw(st.integers(1, 9))
    window = draw(st.none() | st.integers(1, 12))
    causal = not both_ways or draw(st.booleans())
    if causal and draw(st.booleans()):  # cached: some keys come from before, a sliding layer has forgotten the oldest
        past = draw(st.integers(0, 7))
        kept = past if window is None else min(past, window - 1)
        spec = MaskSpec(q_len, kept + q_len, q_offset=past, kv_offset=past - kept, window=window)
    else:
        spec = MaskSpec(q_len, q_len, window=window, causal=causal)
        if draw(st.booleans()):
            ids = draw(st.lists(st.lists(st.integers(0, 2), min_size=q_len, max_size=q_len), min_size=2, max_size=2))
            return replace(spec, documents=torch.tensor(ids).sort(-1).values)
    if draw(st.booleans()):
        padding = draw(st.lists(st.integers(0, spec.kv_len - 1), min_size=batch, max_size=batch))
        valid = torch.arange(spec.kv_len)[None] >= torch.tensor(padding)[:, None]
        return replace(spec, key_valid=valid)
    return spec


def sees(spec: MaskSpec, row: int, query: int, key: int) -> bool:
    """The rule in words: before or at it (if causal), inside the window, the same document, not padding."""
    at, of = query + spec.q_offset, key + spec.kv_offset
    if (of > at and spec.causal) or (spec.window is not None and abs(at - of) >= spec.window):
        return False
    if spec.documents is not None and spec.documents[row, query] != spec.documents[row, key]:
        return False
    return spec.key_valid is None or bool(spec.key_valid[row, key])


def tensors(spec: MaskSpec, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, HEADS, spec.q_len, DIM), (2, KV_HEADS, spec.kv_len, DIM), (2, KV_HEADS, spec.kv_len, DIM))
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return q, k, v


def oracle(
    q: Tensor, k: Tensor, v: Tensor, spec: MaskSpec, sinks: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """One query at a time, in Python floats; NaN where a query sees nothing."""
    out = torch.full_like(q, math.nan)
    for row in range(q.shape[0]):
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            for query in range(spec.q_len):
                keys = [key for key in range(spec.kv_len) if sees(spec, row, query, key)]
                if not keys:
                    continue
                scores = [SCALE * float(q[row, head, query] @ k[row, group, key]) for key in keys]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                total = sum(map(math.exp, scores)) + (0 if sinks is None else math.exp(float(sinks[head])))
                out[row, head, query] = sum(
                    math.exp(score) / total * v[row, group, key] for score, key in zip(scores, keys, strict=True)
                )
    return out


def worst(ours: Tensor, expected: Tensor) -> float:
    """Largest difference where a query sees something; infinite where ours is not finite anywhere."""
    assert torch.isfinite(ours).all()
    meant = ~expected.isnan()
    return float((ours - expected)[meant].abs().max()) if meant.any() else 0.0


PLAIN = MaskSpec(9, 9)
WINDOWED = MaskSpec(9, 9, window=4)
PACKED = MaskSpec(9, 9, window=4, documents=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]]))
PADDED = MaskSpec(9, 9, key_valid=torch.arange(9)[None] >= torch.tensor([[0], [4]]))
DECODING = MaskSpec(1, 9, q_offset=8)
CHUNK = MaskSpec(3, 6, q_offset=20, kv_offset=17, window=4)
BOTH_WAYS = MaskSpec(9, 9, causal=False)
KINDS = {
    "causal": PLAIN,
    "window": WINDOWED,
    "documents": PACKED,
    "padding": PADDED,
    "decoding": DECODING,
    "chunk": CHUNK,
}


@given(spec=masks())
def test_mask_follows_the_rule(spec: MaskSpec) -> None:
    """Entry by entry."""
    dense = spec.dense(CPU).expand(2, 1, spec.q_len, spec.kv_len)
    expected = [
        [[sees(spec, row, query, key) for key in range(spec.kv_len)] for query in range(spec.q_len)] for row in (0, 1)
    ]
    assert torch.equal(dense[:, 0], torch.tensor(expected))


@given(spec=masks())
def test_shortcuts_are_taken_only_where_they_say_the_same_as_the_mask(spec: MaskSpec) -> None:
    """A causal square is a triangle, a query that sees everything is a row of ones."""
    dense = spec.dense(CPU)
    if spec.is_causal_square:
        assert torch.equal(dense[0, 0], torch.ones(spec.q_len, spec.kv_len, dtype=torch.bool).tril())
    if spec.sees_everything:
        assert dense.all()


def test_shortcuts_are_taken_at_all() -> None:
    """The training and the decoding case need no mask."""
    assert PLAIN.is_causal_square
    assert replace(PLAIN, window=9).is_causal_square
    assert not WINDOWED.is_causal_square
    assert DECODING.sees_everything
    assert BOTH_WAYS.sees_everything
    assert BOTH_WAYS.is_shape_alone
    assert not replace(BOTH_WAYS, window=8).is_shape_alone
    assert not CHUNK.sees_everything


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "documents", "flex"])
@given(data=st.data())
def test_attention_equals_one_query_at_a_time(implementation: str, data: st.DataObject) -> None:
    """Every implementation in float64, against Python floats."""
    spec = data.draw(masks(both_ways=implementation != "documents"))
    q, k, v = tensors(spec)
    with force(attention=implementation):
        ours = attention(q, k, v, spec, scale=SCALE)
    assert worst(ours, oracle(q, k, v, spec)) < 1e-13


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("implementation", ["eager", "documents", "flex"])
@given(data=st.data(), softcap=st.sampled_from([None, 0.3, 5.0]), size=st.sampled_from([None, 0.0, 3.0, -30.0, 30.0]))
def test_sinks_and_soft_caps_equal_one_query_at_a_time(
    implementation: str, data: st.DataObject, softcap: float | None, size: float | None
) -> None:
    """The sink takes its share of each softmax and gives no value; the cap comes before the mask."""
    spec = data.draw(masks(both_ways=implementation != "documents"))
    q, k, v = tensors(spec)
    sinks = None if size is None else size + torch.linspace(-1, 1, HEADS, dtype=q.dtype)
    softcap = None if implementation == "documents" else softcap
    with force(attention=implementation):
        ours = attention(q, k, v, spec, scale=SCALE, sinks=sinks, softcap=softcap)
    assert worst(ours, oracle(q, k, v, spec, sinks, softcap)) < 1e-13


def test_a_window_of_one_token_returns_the_value() -> None:
    """The window counts the query itself."""
    q, k, v = tensors(PLAIN)
    for implementation in ("eager", "sdpa", "documents"):
        with force(attention=implementation):
            out = attention(q, k, v, replace(PLAIN, window=1), scale=SCALE)
        assert torch.equal(out, v.repeat_interleave(HEADS // KV_HEADS, dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_function(kind: str) -> None:
    """gradcheck in float64, queries, keys, values and sinks."""
    spec = KINDS[kind]
    q, k, v = (tensor.requires_grad_() for tensor in tensors(spec))
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64, requires_grad=True)

    def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attention(q, k, v, spec, scale=SCALE, sinks=sinks)

    def capped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attention(q, k, v, spec, scale=SCALE, sinks=sinks, softcap=2.0)

    assert torch.autograd.gradcheck(capped, (q, k, v, sinks), fast_mode=True)
    with force(attention="documents"):
        assert torch.autograd.gradcheck(with_sinks, (q, k, v, sinks))
    for implementation in ("eager", "sdpa", "documents"):
        with force(attention=implementation):
            plain = torch.autograd.gradcheck(
                lambda q, k, v: attention(q, k, v, spec, scale=SCALE), (q, k, v), fast_mode=True
            )
        assert plain


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_leaves_no_trace_in_real_tokens(implementation: str, dtype: torch.dtype) -> None:
    """What stands in padded positions, however large, moves no output and no gradient of a real token."""
    gradients = []
    for garbage in (0.0, 1e4):
        q, k, v = tensors(PADDED, dtype)
        for tensor in (q, k, v):
            tensor[1, :, :4] = garbage
            tensor.requires_grad_()
        with force(attention=implementation):
            out = attention(q, k, v, PADDED, scale=SCALE)
        assert torch.isfinite(out).all()
        (out[0].sum() + out[1, :, 4:].square().sum()).backward()
        assert all(torch.isfinite(tensor.grad).all() for tensor in (q, k, v))
        assert k.grad[1, :, :4].abs().max() == 0
        gradients.append((out[1, :, 4:].detach(), q.grad[1, :, 4:], k.grad[1, :, 4:], v.grad[1, :, 4:]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_stay_within_their_rounding(kind: str, dtype: torch.dtype) -> None:
    """Output in the dtype of the input, its error a few units in the last place of values of size one."""
    spec, bound = KINDS[kind], 16 * torch.finfo(dtype).eps
    q, k, v = tensors(spec, dtype)
    expected = attention(q.double(), k.double(), v.double(), spec, scale=SCALE)
    meant = spec.dense(CPU).any(-1, keepdim=True).expand(2, HEADS, spec.q_len, DIM)
    for implementation in ("eager", "sdpa", "documents"):
        with force(attention=implementation):
            ours = attention(q, k, v, spec, scale=SCALE)
        assert ours.dtype == dtype
        assert (ours.double() - expected)[meant].abs().max() < bound


CANNOT: dict[str, tuple[str, str, MaskSpec, dict[str, object]]] = {
    "sdpa with a soft cap": ("sdpa", "neither sinks nor soft caps", PLAIN, {"softcap": 1.0}),
    "sdpa with sinks": ("sdpa", "neither sinks nor soft caps", PLAIN, {"sinks": torch.zeros(HEADS)}),
    "documents with a soft cap": ("documents", "no soft cap", PLAIN, {"softcap": 1.0}),
    "blocks both ways": ("documents", "look back only", BOTH_WAYS, {}),
    "documents with dropout": ("documents", "no dropout", PLAIN, {"dropout": 0.1}),
    "flex with dropout": ("flex", "no dropout", PLAIN, {"dropout": 0.1}),
    "queries that are not last": ("documents", "not the last", MaskSpec(9, 9, q_offset=3), {}),
    "no such name": ("flesh", "one of documents, sdpa, eager, flex", PLAIN, {}),
}


@pytest.mark.parametrize("case", CANNOT)
def test_forcing_an_implementation_that_cannot_run_says_why(case: str) -> None:
    """Each implementation names what it does not know; left alone, the choice finds one that runs."""
    implementation, reason, spec, options = CANNOT[case]
    q, k, v = tensors(spec)
    with force(attention=implementation), pytest.raises(UnsupportedDispatch, match=reason):
        attention(q, k, v, spec, scale=SCALE, **options)  # type: ignore[arg-type]
    free = attention(q, k, v, spec, scale=SCALE, **options)  # type: ignore[arg-type]
    assert torch.isfinite(free).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_trains_on_cuda_only() -> None:
    """A backward pass on the CPU is refused before it starts; without one it runs, on leaves that could want it too."""
    q, k, v = (tensor.requires_grad_() for tensor in tensors(PLAIN))
    with force(attention="flex"):
        with pytest.raises(UnsupportedDispatch, match="no backward on the CPU"):
            attention(q, k, v, PLAIN, scale=SCALE)
        with torch.no_grad():
            assert torch.isfinite(attention(q, k, v, PLAIN, scale=SCALE)).all()


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        (PLAIN, {}, "documents"),
        (WINDOWED, {}, "documents"),
        (PACKED, {"sinks": torch.zeros(HEADS)}, "documents"),
        (PADDED, {}, "documents"),
        (CHUNK, {}, "documents"),
        (PLAIN, {"softcap": 1.0}, "eager"),
        (PLAIN, {"dropout": 0.1}, "sdpa"),
        (PLAIN, {"dropout": 0.1, "sinks": torch.zeros(HEADS)}, "eager"),
        (BOTH_WAYS, {}, "sdpa"),
        (DECODING, {}, "sdpa"),
        (DECODING, {"sinks": torch.zeros(HEADS)}, "documents"),
        (MaskSpec(9, 9, documents=torch.tensor([[0, 1] * 4 + [0]])), {}, "documents"),
    ],
)
def test_the_log_tells_what_ran(spec: MaskSpec, options: dict[str, Tensor], expected: str) -> None:
    """On the CPU training runs in blocks wherever they can run, one query in torch's kernel, caps explicitly."""
    with record() as log:
        attention(*tensors(spec), spec, scale=SCALE, **options)  # type: ignore[arg-type]
        with record() as inner:
            attention(*tensors(spec), spec, scale=SCALE, softcap=1.0)
    assert log == [("attention", expected), ("attention", "eager")]
    assert inner == [("attention", "eager")]
    attention(*tensors(spec), spec, scale=SCALE)
    assert len(log) == 2


@pytest.mark.parametrize(("tokens", "expected"), [(64, "sdpa"), (65, "documents")])
def test_a_short_prompt_is_not_cut_into_blocks(tokens: int, expected: str) -> None:
    """Without gradients, where the mask is small and calls are what costs."""
    spec = MaskSpec(tokens, tokens, key_valid=torch.arange(tokens)[None] >= torch.tensor([[0], [4]]))
    with torch.no_grad(), record() as log:
        attention(*tensors(spec), spec, scale=SCALE)
    assert log == [("attention", expected)]


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("implementation", ["documents", "sdpa"])
@pytest.mark.parametrize("spec", [PLAIN, WINDOWED, PACKED], ids=["plain", "windowed", "packed"])
def test_values_may_be_narrower_or_wider_than_queries(spec: MaskSpec, implementation: str, size: int) -> None:
    """As in latent attention: output and every gradient are those of the reference."""
    q, k, v = tensors(spec)
    v = torch.randn(*v.shape[:3], size, dtype=v.dtype, generator=torch.Generator().manual_seed(3))
    found = []
    for name in ("eager", implementation):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with force(attention=name):
            out = attention(*leaves, spec, scale=SCALE)
        assert out.shape == (*q.shape[:3], size)
        (out * out.detach().cos()).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
