"""The lookup of the pad token passes no gradient on, as in transformers; a tied head still trains its row."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bestiary.bridges import get_bridge
from bestiary.models import Qwen3, resize_token_embeddings

PAD = 7


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pad", [PAD, -1])
def test_gradient_of_the_pad_row_equals_transformers(pad: int, tied: bool) -> None:
    """With the pad id as an ordinary, unmasked token: pad == eos, or a separator; −1 counts from the end."""
    hf_config = Qwen3Config(
        hidden_size=80,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=211,
        pad_token_id=pad,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(hf_config)
    ours = Qwen3(get_bridge("qwen3").parse(hf_config.to_dict(), source="config.json").decoder)
    assert ours.decoder_config.padding_idx == pad
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(211, (2, 19))
    ids[:, 5] = pad % 211
    theirs(ids, labels=ids).loss.backward()
    ours(ids, labels=ids).loss.backward()
    expected, found = theirs.get_input_embeddings().weight.grad, ours.model.embed_tokens.weight.grad
    assert bool(expected[pad].any()) == tied
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_a_vocabulary_cut_below_the_pad_token_has_none() -> None:
    model = Qwen3(Qwen3.sizes["0.6b"].with_(**_TINY, padding_idx=PAD))
    resize_token_embeddings(model, PAD)
    assert model(torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, PAD)


_TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "layer_types": (), "vocab_size": 31}
