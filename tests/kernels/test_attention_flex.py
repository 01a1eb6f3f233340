"""FlexAttention at lengths that do not fill its blocks: the forward pass on the CPU, against explicit scores."""

import pytest
import torch

from bestiary.kernels.attention import MaskSpec, attention
from bestiary.kernels.dispatch import force

from .operations import normal

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 127, 128, 129])
@pytest.mark.parametrize("tokens", [1, 127, 129, 137])
@torch.no_grad()
def test_any_length_around_a_block(tokens: int, window: int | None) -> None:
    """With and without a window as long as a block, one shorter and one longer; sinks, documents, grouped heads."""
    q, k, v = normal(2, 4, tokens, 8), normal(2, 2, tokens, 8, seed=1), normal(2, 2, tokens, 8, seed=2)
    documents = torch.stack([torch.arange(tokens) // 60, torch.arange(tokens) // 128])
    for spec in (MaskSpec(tokens, tokens, window=window), MaskSpec(tokens, tokens, window=window, documents=documents)):
        for sinks in (None, normal(4, seed=3)):
            results = []
            for implementation in ("flex", "eager"):
                with force(attention=implementation):
                    results.append(attention(q, k, v, spec, scale=0.3, sinks=sinks))
            torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


@torch.no_grad()
def test_more_keys_than_queries() -> None:
    """A chunk behind a cache, or the last tokens of a packed row; neither length fills a block."""
    for new, total in ((1, 129), (5, 137), (128, 300)):
        q, k, v = normal(1, 2, new, 8), normal(1, 2, total, 8, seed=1), normal(1, 2, total, 8, seed=2)
        for documents in (None, torch.arange(total)[None] // 90):
            spec = MaskSpec(new, total, q_offset=total - new, window=130, documents=documents)
            results = []
            for implementation in ("flex", "eager"):
                with force(attention=implementation):
                    results.append(attention(q, k, v, spec, scale=0.3))
            torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)
