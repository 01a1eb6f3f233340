"""Dropout on the softmax weights: the numbers that transformers' eager attention draws, in the place where it does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward as qwen3_eager

from bestiary.kernels.attention import MaskSpec, attention
from bestiary.kernels.dispatch import force

HEADS, KV_HEADS, TOKENS, DIM, SCALE, SHARE = 4, 2, 33, 6, 0.37, 0.3
MASKS = {
    "causal": MaskSpec(TOKENS, TOKENS),
    "window": MaskSpec(TOKENS, TOKENS, window=7),
    "padding": MaskSpec(TOKENS, TOKENS, key_valid=torch.arange(TOKENS)[None] >= torch.tensor([[0], [5]])),
    "both ways": MaskSpec(TOKENS, TOKENS, causal=False),
}


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, HEADS, TOKENS, DIM), (2, KV_HEADS, TOKENS, DIM), (2, KV_HEADS, TOKENS, DIM))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def ours(implementation: str, mask: MaskSpec, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention with dropout from a fixed seed."""
    torch.manual_seed(11)
    with force(attention=implementation):
        return attention(q, k, v, mask, scale=SCALE, dropout=SHARE, **options)


def theirs(mask: MaskSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """transformers' eager attention of Qwen3, or of GPT-OSS where there are sinks, in train mode from that seed."""
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=True, sinks=sinks)
    additive = torch.zeros((), dtype=q.dtype).masked_fill(~mask.dense(q.device), torch.finfo(q.dtype).min)
    torch.manual_seed(11)
    eager = qwen3_eager if sinks is None else gpt_oss_eager
    out: Tensor = eager(module, q, k, v, additive, scaling=SCALE, dropout=SHARE)[0]
    return out.transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MASKS)
def test_the_reference_path_is_bit_equal_with_transformers(kind: str, dtype: torch.dtype) -> None:
    """Behind the cast of the weights, before the values."""
    q, k, v = tensors(dtype)
    assert torch.equal(ours("eager", MASKS[kind], q, k, v), theirs(MASKS[kind], q, k, v))


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_sinks_are_never_dropped(kind: str) -> None:
    """GPT-OSS drops what is left of the softmax when the sink has gone."""
    q, k, v = tensors(torch.float32)
    sinks = torch.linspace(-1, 1, HEADS)
    torch.testing.assert_close(
        ours("eager", MASKS[kind], q, k, v, sinks=sinks), theirs(MASKS[kind], q, k, v, sinks), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", MASKS)
def test_torchs_kernel_draws_the_same_on_the_cpu(kind: str) -> None:
    """Output and gradients in float64."""
    found = []
    for implementation in ("eager", "sdpa"):
        q, k, v = (tensor.requires_grad_() for tensor in tensors())
        out = ours(implementation, MASKS[kind], q, k, v)
        seen = MASKS[kind].dense(q.device).any(-1, keepdim=True)
        (out * seen).square().sum().backward()
        found.append(((out * seen).detach(), q.grad, k.grad, v.grad))
    for eager, sdpa in zip(*found, strict=True):
        torch.testing.assert_close(eager, sdpa, rtol=1e-11, atol=1e-11)


def test_on_average_nothing_is_dropped() -> None:
    """The weights that stay grow by as much as falls away."""
    q, k, v = tensors()
    mask = MASKS["causal"]
    mean = torch.zeros_like(q)
    with force(attention="eager"):
        whole = attention(q, k, v, mask, scale=SCALE)
        torch.manual_seed(5)
        for _ in range(400):
            mean += attention(q, k, v, mask, scale=SCALE, dropout=SHARE) / 400
    assert (mean - whole).abs().max() < 0.25
    assert (mean - whole).abs().mean() < 0.03
