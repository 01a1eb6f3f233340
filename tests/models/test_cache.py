"""The cache holds what some later query may still see, and no more."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bestiary.models import Cache
from bestiary.models.config import LayerType

from .tiny import FAMILIES, WINDOW, tiny, tiny_config, tokens


@given(steps=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_a_layer_keeps_the_tokens_that_can_be_seen(steps: list[int]) -> None:
    """All of them in a full layer, the last window − 1 in a sliding one; what comes back ends with the new tokens."""
    config = tiny_config("gpt_oss")
    cache, past = Cache(config), torch.zeros(1, 1, 0, 1)
    for count in steps:
        new = torch.arange(past.shape[2], past.shape[2] + count, dtype=torch.float64).reshape(1, 1, count, 1)
        for index, layer_type in enumerate(config.layer_types):
            seen = past.shape[2] if layer_type is LayerType.FULL else min(past.shape[2], WINDOW - 1)
            assert cache.kept(index) == seen
            k, v = cache.append(index, new, -new)
            expected = torch.cat((past[:, :, past.shape[2] - seen :], new), dim=2)
            assert torch.equal(k, expected)
            assert torch.equal(v, -expected)
        cache.advance(count)
        past = torch.cat((past, new), dim=2)
    assert len(cache) == sum(steps)


def test_a_sliding_layer_does_not_grow() -> None:
    """200 tokens, storage of a window and a quarter, filled anew each time; full layers double: few reallocations."""
    config = tiny_config("gpt_oss")
    cache = Cache(config)
    token = torch.zeros(1, 2, 1, 4)
    buffers = {index: set() for index in range(config.num_hidden_layers)}
    for _ in range(200):
        for index in range(config.num_hidden_layers):
            k, _ = cache.append(index, token, token)
            buffers[index].add(k.untyped_storage().data_ptr())
        cache.advance(1)
    for index, layer_type in enumerate(config.layer_types):
        stored = cache._keys[index].untyped_storage().nbytes() // (2 * 4 * 4)
        if layer_type is LayerType.SLIDING:
            assert stored <= WINDOW + WINDOW // 4
        else:
            assert 200 <= stored <= 512
            assert len(buffers[index]) <= 12


def test_rows_can_be_reordered() -> None:
    """As beam search or a filtered batch needs it."""
    model, ids = tiny("gemma3"), tokens(3, 20)
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        cache = model(ids[:, :15], use_cache=True).past_key_values
        cache.reorder(order)
        out = model(ids[order, 15:], past_key_values=cache).logits
        torch.testing.assert_close(out, model(ids[order]).logits[:, 15:])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_flow_through_the_cache(family: str) -> None:
    """A loss on every piece reaches the embeddings of all before, as without a cache; nothing saved is overwritten."""
    model, ids = tiny(family), tokens(2, 17)
    gradients = []
    for cached in (True, False):
        embeds = model.model.embed_tokens(ids).detach().requires_grad_()
        if cached:
            cache = Cache(model.decoder_config)
            pieces = [
                model(inputs_embeds=piece, past_key_values=cache).logits for piece in embeds.split([5, 1, 1, 3, 7], 1)
            ]
            logits = torch.cat(pieces, dim=1)
        else:
            logits = model(inputs_embeds=embeds).logits
        logits.square().sum().backward()
        gradients.append(embeds.grad)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    assert gradients[0].abs().max() > 0
