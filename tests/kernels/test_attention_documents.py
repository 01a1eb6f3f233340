"""Attention over ranges of tokens: as exact as explicit scores at every length, linear in memory, one graph."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bestiary.kernels.attention import MaskSpec, attention
from bestiary.kernels.attention_documents import BLOCK, _attend, _attend_backward, document_attention, ranges_of
from bestiary.kernels.dispatch import force, record

SCALE = 0.31
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 137, 300)
EXACT = 1e-12


def made(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def heads(
    spec: MaskSpec, batch: int, query_heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v as layers make them: views of (B, T, heads · size), and the sinks; all want gradients."""
    shapes = ((query_heads, spec.q_len, 1), (kv_heads, spec.kv_len, 2), (kv_heads, spec.kv_len, 3))
    made_heads = [made(batch, t, n, size, dtype=dtype, seed=seed).transpose(1, 2) for n, t, seed in shapes]
    return [x.requires_grad_() for x in (*made_heads, made(query_heads, dtype=dtype, seed=4))]


@st.composite
def specs(draw: st.DrawFn) -> MaskSpec:
    """Lengths at the borders of blocks, windows around them, documents, padding on either side, a padded cache.

    Documents come in one piece or in several; padding lies at an end or anywhere.
    """
    length = draw(st.sampled_from(LENGTHS))
    window = draw(st.none() | st.integers(1, length + 2) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1]))
    kind = draw(st.sampled_from(["plain", "documents", "mixed", "left", "right", "holes", "cache"]))
    new = draw(st.integers(1, length)) if kind == "cache" else length
    spec = MaskSpec(new, length, q_offset=length - new, window=window)
    if kind == "documents":
        cuts = draw(st.lists(st.lists(st.integers(0, length), max_size=5), min_size=2, max_size=2))
        spec.documents = torch.stack(
            [torch.searchsorted(torch.tensor(sorted(row)), torch.arange(length), right=True) for row in cuts]
        )
    elif kind in {"mixed", "holes"}:
        seed = draw(st.integers(0, 99))
        names = torch.randint(0, 4, (2, length), generator=torch.Generator().manual_seed(seed))
        spec.documents = names if kind == "mixed" else None
        spec.key_valid = names > 0 if kind == "holes" or draw(st.booleans()) else None
    elif kind in {"left", "right", "cache"} and draw(st.booleans()):
        amount = torch.tensor(draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2)))[:, None]
        places = torch.arange(length)[None]
        spec.key_valid = places < length - amount if kind == "right" else places >= amount
    return spec


def real(spec: MaskSpec, batch: int) -> Tensor:
    """(B, 1, T, 1), False for queries that are padding."""
    if spec.key_valid is None:
        return torch.ones(batch, 1, spec.q_len, 1, dtype=torch.bool)
    return spec.key_valid[:, None, -spec.q_len :, None]


def results(
    implementation: str, spec: MaskSpec, inputs: list[Tensor], grad: Tensor, sinks: bool, scale: float = SCALE
) -> list[Tensor]:
    """Output and the gradients of all inputs, those of real tokens only."""
    q, k, v, sink = inputs
    with force(attention=implementation):
        out = attention(q, k, v, spec, scale=scale, sinks=sink if sinks else None)
    return [out * real(spec, q.shape[0]), *torch.autograd.grad(out, inputs[: 4 if sinks else 3], grad)]


@settings(max_examples=60)
@given(
    spec=specs(),
    groups=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    size=st.sampled_from([1, 5, 16]),
    sinks=st.booleans(),
)
def test_values_and_gradients_are_those_of_explicit_scores(
    spec: MaskSpec, groups: tuple[int, int], size: int, sinks: bool
) -> None:
    """float64, gradients of the sinks included."""
    inputs = heads(spec, 2, *groups, size)
    grad = made(2, groups[0], spec.q_len, size, seed=9) * real(spec, 2)
    ours = results("documents", spec, inputs, grad, sinks)
    expected = results("eager", spec, inputs, grad, sinks)
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < EXACT * (1 + other.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("sinks", [False, True])
def test_narrow_dtypes_are_as_exact_as_explicit_scores(dtype: torch.dtype, window: int | None, sinks: bool) -> None:
    """Against float64: at most 2 × the error of the eager path forward and 3 × backward (the FlashAttention rule)."""
    spec = MaskSpec(300, 300, window=window, documents=torch.arange(300)[None].expand(2, -1) // 170)
    inputs = heads(spec, 2, 4, 2, 64, dtype)
    grad = made(2, 4, 300, 64, dtype=dtype, seed=9)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = results("eager", spec, wide, grad.double(), sinks, 64**-0.5)
    ours, eager = (results(name, spec, inputs, grad, sinks, 64**-0.5) for name in ("documents", "eager"))
    for index, (one, other, truth) in enumerate(zip(ours, eager, exact, strict=True)):
        assert one.dtype == dtype
        error, allowed = ((x.double() - truth).abs().max() for x in (one, other))
        assert error <= (2 if index == 0 else 3) * allowed + torch.finfo(dtype).eps


def test_the_error_in_bf16_does_not_grow_with_the_blocks_that_see_a_key() -> None:
    """The value gradient of a key that every query sees alone: as many equal parts as blocks, rounded once."""
    for tokens in (2 * BLOCK, 32 * BLOCK):
        q, k, v = (torch.zeros(1, 1, tokens, 8, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        everything_sees_the_first = torch.tensor([[0, 0, tokens, 0, 1]])
        out, _ = document_attention(q, k, v, everything_sees_the_first, window=None, scale=SCALE)
        (gradient,) = torch.autograd.grad(out, v, torch.full_like(out, 1.0234375))
        assert (gradient[0, 0, 0] == torch.tensor(1.0234375 * tokens).bfloat16()).all()


@pytest.mark.parametrize("window", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 100])
def test_the_window_ends_where_it_says(window: int) -> None:
    """A key W − 1 before the query moves it, one W before does not, wherever the query is in its block."""
    spec = MaskSpec(200, 200, window=window)
    q, k, v, _ = heads(spec, 1, 1, 1, 4)
    (gradient,) = torch.autograd.grad(attention(q, k, v, spec, scale=SCALE).sum((0, 1, 3)), v, torch.eye(200)[150])
    reached = gradient[0, 0, :, 0].nonzero().view(-1)
    assert (int(reached[0]), int(reached[-1])) == (150 - window + 1, 150)
    for query in (0, 63, 64, 127, 128, 199):
        v_far = v.detach().clone()
        v_far[:, :, : max(query - window + 1, 0)] = 1e6
        v_far[:, :, query + 1 :] = 1e6
        near, far = (attention(q, k, x, spec, scale=SCALE)[:, :, query] for x in (v, v_far))
        assert torch.equal(near, far)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "features first": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every other feature": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout: str) -> None:
    """Inputs and gradients of any layout."""
    spec = MaskSpec(130, 130, window=70)
    inputs, grad = heads(spec, 2, 4, 2, 6), made(2, 4, 130, 6, seed=9)
    change = LAYOUTS[layout]
    strided = [change(x.detach()).requires_grad_() for x in inputs[:3]] + inputs[3:]
    expected = results("eager", spec, inputs, grad, True)
    for one, other in zip(results("documents", spec, strided, change(grad), True), expected, strict=True):
        assert (one - other).abs().max() < EXACT


def test_expanded_tensors_are_read_right() -> None:
    """The gradient of a sum is one number seen everywhere, and keys may be one head seen by all."""
    spec = MaskSpec(130, 130)
    q, k, v, _ = heads(spec, 2, 4, 1, 6)
    gradients = []
    for implementation in ("documents", "eager"):
        with force(attention=implementation):
            out = attention(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1), spec, scale=SCALE)
        gradients.append(torch.autograd.grad(out.sum(), (q, k, v)))
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() < EXACT


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_a_frozen_input_changes_no_other_gradient(frozen: int) -> None:
    """Each of q, k, v and sinks may not want one."""
    spec = MaskSpec(70, 70)
    inputs, grad = heads(spec, 1, 2, 2, 6), made(1, 2, 70, 6, seed=9)
    everything = results("documents", spec, inputs, grad, True)[1:]
    inputs[frozen].requires_grad_(False)
    out = attention(*inputs[:3], spec, scale=SCALE, sinks=inputs[3])
    out.backward(grad)
    for index, (x, expected) in enumerate(zip(inputs, everything, strict=True)):
        if index == frozen:
            assert x.grad is None
        else:
            assert torch.equal(x.grad, expected)


def test_padding_gets_zeros_and_an_empty_row_is_no_trap() -> None:
    """A row of padding only, and an empty batch of tokens."""
    valid = torch.arange(70)[None] < torch.tensor([[0], [70], [30]])
    spec = MaskSpec(70, 70, key_valid=valid)
    q, k, v, sinks = heads(spec, 3, 2, 2, 6)
    out = attention(q, k, v, spec, scale=SCALE, sinks=sinks)
    assert (out[0] == 0).all()
    assert (out[2, :, 30:] == 0).all()
    for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.isfinite(gradient).all()
        assert (gradient[0] == 0).all(), x.shape
        assert (gradient[2, :, 30:] == 0).all()
    empty = MaskSpec(0, 0)
    assert attention(*heads(empty, 2, 2, 2, 6)[:3], empty, scale=SCALE).shape == (2, 2, 0, 6)


def test_rows_alike_are_computed_together() -> None:
    """Positions that restart in every row at once are one list of ranges, not one a row."""
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    for given_documents in (documents, documents.expand(8, -1)):
        ranges, _ = ranges_of(given_documents, None, 5, 5)
        assert ranges is not None
        assert ranges.tolist() == [[-1, 0, 2, 0, 2], [-1, 2, 5, 2, 5]]
    ranges, _ = ranges_of(documents.repeat(8, 1), None, 5, 5)
    assert ranges is not None
    assert len(ranges) == 16


@settings(max_examples=30)
@given(
    lengths=st.lists(st.sampled_from([1, 3, 70, 130]), min_size=2, max_size=6),
    padding=st.integers(0, 5),
    window=st.sampled_from([None, 50]),
    sinks=st.booleans(),
)
def test_neighbours_of_one_length_are_rows_of_a_batch(
    lengths: list[int], padding: int, window: int | None, sinks: bool
) -> None:
    """One row of documents, some of them of one length: the same values and gradients, in fewer calls."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    valid = torch.arange(documents.shape[1])[None] >= padding if padding else None
    spec = MaskSpec(documents.shape[1], documents.shape[1], window=window, documents=documents, key_valid=valid)
    inputs = heads(spec, 1, 4, 2, 8)
    grad = made(1, 4, spec.q_len, 8, seed=9) * real(spec, 1)
    ours = results("documents", spec, inputs, grad, sinks)
    expected = results("eager", spec, inputs, grad, sinks)
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).abs().max() < EXACT * (1 + other.abs().max())


def test_equal_documents_take_as_many_calls_as_one() -> None:
    """16 documents of 64 tokens: one fused call, where an odd one in the middle takes two more."""
    for lengths, calls in (([64] * 16, 1), ([64] * 8 + [30] + [64] * 8, 3)):
        documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        spec = MaskSpec(documents.shape[1], documents.shape[1], documents=documents)
        q, k, v, _ = heads(spec, 1, 4, 2, 8)
        with profile(activities=[ProfilerActivity.CPU]) as found, force(attention="documents"), torch.no_grad():
            attention(q, k, v, spec, scale=SCALE)
        names = [event.name for event in found.events()]
        assert sum("flash_attention_for_cpu" in name for name in names) == calls


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("window", [None, 128])
def test_nothing_of_tokens_times_tokens_is_allocated(window: int | None) -> None:
    """The largest tensor, forward and backward, is an input or one band of a mask; the probe does see a dense mask."""
    tokens, size = 2048, 4
    spec = MaskSpec(tokens, tokens, window=window, documents=torch.arange(tokens)[None] // 1500)
    q, k, v, sinks = (x.detach() for x in heads(spec, 1, 2, 1, size, torch.float32))
    ranges, _ = spec.ranges()
    assert ranges is not None
    with Largest() as seen:  # the bodies: a mode sees an operator from outside only
        out, lse = _attend._init_fn(q, k, v, sinks, ranges, None, None, window, SCALE)
        _attend_backward._init_fn(torch.ones_like(out), q, k, v, out, lse, ranges, None, None, window, SCALE)
    longest = (1500 if window is None else window) + BLOCK
    assert seen.elements <= max(q.numel(), BLOCK * longest)
    with Largest() as dense, force(attention="sdpa"):
        attention(q, k, v, spec, scale=SCALE)
    assert dense.elements >= tokens * tokens


def test_what_is_saved_is_what_came_in_and_out() -> None:
    """q, k, v, sinks, ranges, output and one number a query and head."""
    spec = MaskSpec(256, 256, window=64)
    q, k, v, sinks = heads(spec, 1, 4, 2, 16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attention(q, k, v, spec, scale=SCALE, sinks=sinks)
    assert sum(x.numel() for x in saved if x.is_floating_point()) == 2 * q.numel() + 2 * k.numel() + 4 + 4 * 256


@pytest.mark.slow
def test_the_operators_keep_their_promises() -> None:
    """Fake tensors, strides, autograd registration and dynamic shapes agree with what runs (torch's own checks)."""
    documents, padded = torch.arange(70)[None].expand(2, -1) // 30, torch.arange(70)[None].repeat(2, 1) % 9 > 0
    for spec, listed, sunk in (
        (MaskSpec(70, 70, documents=documents, window=33), True, False),
        (MaskSpec(70, 70, documents=documents, key_valid=padded), False, True),
    ):
        q, k, v, sinks = heads(spec, 2, 4, 2, 6)
        ranges = spec.ranges()[0] if listed else None
        rest = (ranges, *((None, None) if listed else (spec.documents, spec.key_valid)), spec.window, SCALE)
        torch.library.opcheck(_attend, (q, k, v, sinks if sunk else None, *rest))
        out, lse = (x.detach() for x in _attend(q, k, v, None, *rest))
        torch.library.opcheck(_attend_backward, (out, q.detach(), k.detach(), v.detach(), out, lse, *rest))


@pytest.mark.parametrize("kind", ["documents", "padding", "interleaved"])
def test_ranges_that_the_operator_reads_itself_are_those_it_is_given(kind: str) -> None:
    """What a graph does that cannot look at documents: the same bits."""
    names = torch.arange(140)[None].repeat(2, 1)
    spec = MaskSpec(140, 140, window=50)
    if kind == "padding":
        spec.key_valid = names >= torch.tensor([[0], [70]])
    else:
        spec.documents = names // 60 if kind == "documents" else names // 20 % 2
    q, k, v, sinks = heads(spec, 2, 4, 2, 6)
    given, obstacle = spec.ranges()
    assert obstacle is None
    results = []
    for ranges in (given, None):
        out, lse = _attend(q, k, v, sinks, ranges, spec.documents, spec.key_valid, spec.window, SCALE)
        results.append([out, lse, *torch.autograd.grad(out.sin().sum(), (q, k, v, sinks))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mixed_precision_narrows_as_torch_does() -> None:
    """Under autocast the heads come in different dtypes, and the output is narrow."""
    spec = MaskSpec(70, 70, window=30)
    q, k, v, sinks = heads(spec, 2, 4, 2, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), record() as log:
        ours = attention(q, k, v.bfloat16(), spec, scale=SCALE, sinks=sinks)
    assert log == [("attention", "documents")]
    assert ours.dtype == torch.bfloat16
    narrow = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), spec, scale=SCALE, sinks=sinks)
    assert torch.equal(ours, narrow)
