"""Gemma 3 with attention both ways (EmbeddingGemma): gradients, padding, packed rows, and what cannot work."""

from dataclasses import replace

import pytest
import torch

from bestiary.bridges import get_bridge
from bestiary.models import Decoder
from bestiary.models.cache import Cache
from bestiary.models.errors import InvalidInput
from bestiary.verify.inputs import Inputs
from bestiary.verify.measure import max_over_std
from bestiary.verify.reference import Reference
from bestiary.verify.side import OurSide
from bestiary.verify.tiny import tiny_config
from tests.models.tiny import tiny, tokens

LENGTH = 40


def both_ways() -> Decoder:
    return tiny("gemma3", attention=replace(tiny("gemma3").decoder_config.attention, causal=False))


def test_gradients_equal_those_of_transformers() -> None:
    """Every parameter in float64, with padding on either side."""
    bridge = get_bridge("gemma3_text")
    raw = {**tiny_config(bridge.reference, "base"), "use_bidirectional_attention": True}
    reference, side = Reference(bridge.reference, raw, 0), OurSide(bridge)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :5], mask[1, -5:] = 0, 0
    inputs = Inputs(tokens(2, LENGTH), attention_mask=mask).with_labels()
    _, theirs = reference.gradients(inputs)
    model = side.build(raw, reference.state(), torch.float64)
    model(**inputs.kwargs()).loss.backward()
    expected = side.native(raw, {name: theirs[name] for name, _ in reference.model.named_parameters()})
    for name, parameter in model.named_parameters():
        assert max_over_std(parameter.grad, expected[name]) <= 1e-9, name


def test_the_first_token_sees_the_last() -> None:
    """Through the full layers; a causal model's first logit stands."""
    ids = tokens(1, LENGTH)
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % 7
    with torch.no_grad():
        for model, moves in ((both_ways(), True), (tiny("gemma3"), False)):
            assert (max_over_std(model(other).logits[:, 0], model(ids).logits[:, 0]) > 1e-6) is moves


def test_packed_documents_equal_each_alone() -> None:
    """Borders by `cu_seq_lens_q`."""
    model, ids = both_ways(), tokens(1, LENGTH)
    with torch.no_grad():
        packed = model(ids, cu_seq_lens_q=torch.tensor([0, 13, LENGTH])).logits
        alone = torch.cat([model(part).logits for part in (ids[:, :13], ids[:, 13:])], dim=1)
    assert max_over_std(packed, alone) <= 1e-12


def test_a_cache_is_refused() -> None:
    """Whoever asks for it; without one a continuation is what the whole text gives."""
    model, ids = both_ways(), tokens(1, 9)
    for arguments in ({"use_cache": True}, {"past_key_values": Cache(model.decoder_config)}):
        with pytest.raises(InvalidInput, match=r"attention\.causal = False") as caught:
            model(ids, **arguments)
        assert "use_cache=False" in str(caught.value.remedy)
    with pytest.raises(InvalidInput, match="later tokens change"):
        model.generate(ids, max_new_tokens=2)
    continued = model.generate(ids, max_new_tokens=2, use_cache=False)
    with torch.no_grad():
        assert continued[0, -1] == model(continued[:, :-1]).logits[0, -1].argmax()
