"""Parts are found and exchanged by name; the vocabulary grows and shrinks; the model trains, saves and reloads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.kernels.attention import MaskSpec
from bestiary.kernels.log_prob import LogProb, linear_log_prob
from bestiary.models import Cache, Decoder, replace_modules, resize_token_embeddings
from bestiary.models.errors import InvalidInput, NoSuchModule

from .tiny import FAMILIES, VOCAB, tiny, tiny_config, tokens


class AverageAttention(nn.Module):
    """Each token reads the mean of what it may see: attention without scores."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Linear(size, size, dtype=torch.float64)

    def forward(self, x: Tensor, rope: Any, mask: MaskSpec, cache: Cache | None = None) -> Tensor:
        visible = mask.dense(x.device)[:, 0].to(x.dtype)
        averaged: Tensor = visible @ self.values(x) / visible.sum(-1, keepdim=True)
        return averaged


class ReluMLP(nn.Module):
    """Two matrices and no gate; in place of experts too."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(size, size, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)))
        return out


class BiasedHead(nn.Module):
    """A head with a matrix of its own between the hidden states and the vocabulary."""

    def __init__(self, size: int, vocab: int) -> None:
        super().__init__()
        self.mix = nn.Linear(size, size, dtype=torch.float64)
        self.out = nn.Parameter(torch.randn(vocab, size, dtype=torch.float64) * 0.1)

    def forward(self, hidden: Tensor, targets: Tensor | None = None, *, temperature: float = 1.0) -> Tensor | LogProb:
        mixed = self.mix(hidden)
        if targets is None:
            return F.linear(mixed, self.out)
        return linear_log_prob(mixed.flatten(0, 1), self.out, targets.flatten(), temperature=temperature)


PARTS: dict[str, tuple[str, Any]] = {
    "attention": ("model.layers.*.self_attn", lambda name, old: AverageAttention(80)),
    "mlp": ("model.layers.*.mlp", lambda name, old: ReluMLP(80)),
    "head": ("lm_head", lambda name, old: BiasedHead(80, VOCAB)),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exchanged_part_trains_saves_and_reloads(family: str, part: str, tmp_path: Path) -> None:
    """The new module computes, learns in a step, and its weights come back from disk."""
    pattern, factory = PARTS[part]
    model, ids = tiny(family), tokens(2, 11)
    before = model(ids).logits
    torch.manual_seed(0)
    names = replace_modules(model, pattern, factory)
    layers = model.decoder_config.num_hidden_layers
    assert len(names) == (1 if part == "head" else layers)
    assert all(isinstance(model.get_submodule(name), AverageAttention | ReluMLP | BiasedHead) for name in names)
    assert not torch.allclose(model(ids).logits, before)

    new = {name for name, _ in model.named_parameters() if name.startswith(tuple(names))}
    assert new
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model(ids, labels=ids).loss
    first.backward()
    optimizer.step()
    assert model(ids, labels=ids).loss < first
    assert all(not torch.equal(parameter, start[name]) for name, parameter in model.named_parameters() if name in new)

    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = Decoder(tiny_config(family), dtype=torch.float64)
    replace_modules(other, pattern, factory)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other(ids).logits, model(ids).logits)


def test_a_head_in_place_of_a_tied_one_is_not_tied() -> None:
    """Moving the model must not press the embedding into a stranger."""
    model = tiny("qwen3")
    head = BiasedHead(80, VOCAB)
    replace_modules(model, "lm_head", lambda name, old: head)
    model.to(torch.float32).to(torch.float64)
    assert not hasattr(head, "weight")
    assert "lm_head.out" in model.state_dict()


def test_only_what_the_pattern_means_is_exchanged() -> None:
    """One layer's part, a whole block of the list, and nothing inside what is already exchanged."""
    model = tiny("qwen3")
    seen: list[tuple[str, type]] = []

    def note(name: str, old: nn.Module) -> nn.Module:
        seen.append((name, type(old)))
        return old

    assert replace_modules(model, "model.layers.1.mlp", note) == ["model.layers.1.mlp"]
    assert replace_modules(model, "model.layers.?", note) == [f"model.layers.{i}" for i in range(3)]
    assert replace_modules(model, "model.layers.0*", note) == ["model.layers.0"]
    assert replace_modules(model, "*_proj", note)[:2] == [f"model.layers.0.self_attn.{p}_proj" for p in "qk"]
    assert [name for name, _ in seen[:2]] == ["model.layers.1.mlp", "model.layers.0"]
    assert isinstance(model.model.layers, nn.ModuleList)
    assert len(model.model.layers) == 3
    assert torch.equal(model(tokens(1, 5)).logits, tiny("qwen3")(tokens(1, 5)).logits)


def test_a_pattern_that_means_nothing_is_refused() -> None:
    """With an example of a name."""
    with pytest.raises(NoSuchModule, match=r"no module matches 'model.layers.\*.attention'") as caught:
        replace_modules(tiny("qwen3"), "model.layers.*.attention", lambda name, old: old)
    assert "model.layers.0.self_attn" in str(caught.value.remedy)


# ---------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("size", [VOCAB + 61, VOCAB + 1, VOCAB, 64, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_resizing_keeps_old_rows_and_logits_bit_equal(tied: bool, size: int) -> None:
    """Up, down and not at all; new rows small and random; both configs say the new size."""
    model = tiny("gemma3", tie_word_embeddings=tied)
    model._config = SimpleNamespace(vocab_size=VOCAB)
    kept = min(size, VOCAB)
    ids = tokens(2, 7) % kept
    rows, head = model.model.embed_tokens.weight.detach().clone(), model.lm_head.weight.detach().clone()
    before = model(ids).logits
    assert resize_token_embeddings(model, size) is model.get_input_embeddings()
    assert model.decoder_config.vocab_size == model.model.decoder_config.vocab_size == model._config.vocab_size == size
    assert model.model.embed_tokens.weight.shape == model.lm_head.weight.shape == (size, 80)
    assert torch.equal(model.model.embed_tokens.weight[:kept], rows[:kept])
    assert torch.equal(model.lm_head.weight[:kept], head[:kept])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    torch.testing.assert_close(model(ids).logits[..., :kept], before[..., :kept], rtol=1e-13, atol=1e-13)
    if size > VOCAB + 1:
        new = model.model.embed_tokens.weight[VOCAB:].detach()
        assert 0.01 < float(new.std()) < 0.03
        assert tied or not torch.equal(new, model.lm_head.weight[VOCAB:].detach())
    last = torch.full((1, 3), size - 1)
    model(last, labels=last).loss.backward()
    assert model.model.embed_tokens.weight.grad.shape == (size, 80)
    assert model.generate(last, max_new_tokens=2).max() < size
    copied = Decoder(model.decoder_config, dtype=torch.float64)
    copied.load_state_dict(model.state_dict())


def test_a_resized_model_knows_its_new_range() -> None:
    """Ids that were in range are refused after shrinking."""
    model = tiny("qwen3")
    resize_token_embeddings(model, 64)
    with pytest.raises(Exception, match=r"outside \[0, 64\)"):
        model(torch.tensor([[64]]))


def test_growing_twice_gives_no_token_twice() -> None:
    """New rows depend on where they stand; the same call on the same model gives the same rows."""
    model, again = tiny("qwen3"), tiny("qwen3")
    for size in (VOCAB + 5, VOCAB + 10):
        resize_token_embeddings(model, size)
        resize_token_embeddings(again, size)
    new = model.model.embed_tokens.weight[VOCAB:]
    assert torch.unique(new, dim=0).shape[0] == 10
    assert torch.equal(again.model.embed_tokens.weight[VOCAB:], new)


def test_frozen_embeddings_stay_frozen() -> None:
    """New Parameters take over requires_grad."""
    model = tiny("qwen3", tie_word_embeddings=False)
    model.model.embed_tokens.weight.requires_grad_(False)
    resize_token_embeddings(model, 300)
    assert not model.model.embed_tokens.weight.requires_grad
    assert model.lm_head.weight.requires_grad


def test_resizing_what_cannot_be_resized_is_refused() -> None:
    """No tokens, or parts that are not the model's own any more."""
    with pytest.raises(InvalidInput, match="size 0"):
        resize_token_embeddings(tiny("qwen3"), 0)
    model = tiny("qwen3")
    replace_modules(model, "lm_head", PARTS["head"][1])
    with pytest.raises(InvalidInput, match="lm_head a BiasedHead"):
        resize_token_embeddings(model, 300)
    assert model.decoder_config.vocab_size == VOCAB
