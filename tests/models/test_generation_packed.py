"""`generate` packs weights for its own length: the same tokens, whatever is written meanwhile, and nothing stays."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bestiary.kernels import packed
from bestiary.models import Decoder
from bestiary.models.config import LoRAConfig
from bestiary.models.generation import Sampling
from bestiary.models.layers.linear import Linear
from bestiary.verify.weights import perturb

from .tiny import FAMILIES, tiny, tokens

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}, reason="oneDNN's products need AVX2"
)
NEW = packed.USES + 1
Copies = list["weakref.ref[Tensor]"]


def both_ways(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Decoder], new: int = NEW
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Tokens and their log-probabilities of two equal models, with packing and without."""
    answers = []
    for uses in (packed.USES, 10**9):
        monkeypatch.setattr(packed, "USES", uses)
        answers.append(make().generate(tokens(3, 6), max_new_tokens=new, stop_token_ids=(), return_log_probs=True))
    return answers[0], answers[1]


def expect_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Tokens, and log-probabilities to fp32's rounding."""
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def fp32(family: str, **changes: Any) -> Decoder:
    return tiny(family, torch.float32, **changes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_plain_weights(
    family: str, tied: bool, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear layer and the head are packed, experts and routers are not, and no copy outlives the call."""
    model = fp32(family, tie_word_embeddings=tied)
    expect_equal(*both_ways(monkeypatch, lambda: model))
    assert len(copies) == 1 + sum(isinstance(module, Linear) for module in model.modules())
    assert all(copy() is None for copy in copies)


def test_adapters_are_applied_on_top(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base weights are packed, adapters go as ever."""
    model = fp32("qwen3", lora=LoRAConfig(r=4, alpha=8, targets=("*_proj",)))
    perturb(model, seed=1)
    expect_equal(*both_ways(monkeypatch, lambda: model.eval()))
    assert len(copies) == 1 + sum(isinstance(module, Linear) for module in model.modules())


@pytest.mark.parametrize("changes", [{"compile_blocks": True}, {}], ids=["compiled blocks", "eager"])
def test_float64_and_short_answers_are_as_before(changes: dict[str, Any], copies: Copies) -> None:
    """No copy is made."""
    tiny("gemma3", **changes).generate(tokens(2, 5), max_new_tokens=NEW, stop_token_ids=())
    fp32("gemma3", **changes).generate(tokens(2, 5), max_new_tokens=NEW - 1, stop_token_ids=())
    fp32("gemma3", **changes).generate(tokens(2, 5), max_new_tokens=NEW, stop_token_ids=(), use_cache=False)
    assert not copies


def test_compiled_blocks_generate_the_same(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they are written there, so their weights are packed too."""
    expect_equal(*both_ways(monkeypatch, partial(fp32, "qwen3", compile_blocks=True)))
    assert copies


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_no_copy(
    error: type[BaseException], copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an answer, and the next answer is whole."""
    model, calls = fp32("gemma3"), iter(range(10))

    def fails(self: Sampling, logits: Tensor, *_: Any) -> Tensor:
        if next(calls) == 4:
            raise error
        return logits.argmax(-1)

    with monkeypatch.context() as patched:
        patched.setattr(Sampling, "choose", fails)
        with pytest.raises(error):
            model.generate(tokens(2, 5), max_new_tokens=NEW, stop_token_ids=())
    assert copies
    assert all(copy() is None for copy in copies)
    expect_equal(*both_ways(monkeypatch, lambda: model))


# ------------------------------------------------------------------------------------------------ written meanwhile


def _shrink(parameter: nn.Parameter) -> None:
    parameter.mul_(0.5)


def _shrink_behind_torch(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.5)


WRITTEN = ("model.layers.1.self_attn.v_proj.weight", "model.layers.2.mlp.down_proj.weight", "lm_head.weight")


@pytest.mark.parametrize("write", [_shrink, _shrink_behind_torch])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_hook_that_writes_weights_is_obeyed(
    name: str, write: Callable[[nn.Parameter], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the fifth and at the ninth token, also through `.data`, which torch does not count as a write."""

    def hooked() -> Decoder:
        model, calls = fp32("qwen3", tie_word_embeddings=False), iter(range(10**6))

        def hook(module: nn.Module, args: object, output: object) -> None:
            if next(calls) in (4, 8):
                write(model.get_parameter(name))

        model.model.norm.register_forward_hook(hook)
        return model

    changed = both_ways(monkeypatch, hooked)
    expect_equal(*changed)
    untouched = fp32("qwen3", tie_word_embeddings=False)
    before = untouched.generate(tokens(3, 6), max_new_tokens=NEW, stop_token_ids=(), return_log_probs=True)[1]
    assert not torch.allclose(before, changed[0][1], rtol=1e-3)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_weight_written_between_two_tokens_is_read(
    name: str, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread would, which no hook shows: its copy is not used again, the other copies are."""
    choose = Sampling.choose

    def writing() -> Decoder:
        model, calls = fp32("qwen3", tie_word_embeddings=False), iter(range(10**6))

        def writes(self: Sampling, logits: Tensor, *given: Any) -> Tensor:
            if next(calls) in (4, 8):
                _shrink(model.get_parameter(name))
            return choose(self, logits, *given)

        monkeypatch.setattr(Sampling, "choose", writes)
        return model

    expect_equal(*both_ways(monkeypatch, writing))
    assert copies


class _Foreign(nn.Module):
    """A layer of somebody else's that writes its weight in its own way."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Tensor:
        self.wrapped.weight.data.mul_(0.99)
        return self.wrapped(x)


def _with_hook(model: Decoder) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda module, args: None)


def _with_foreign_module(model: Decoder) -> None:
    model.model.layers[0].mlp.up_proj = _Foreign(model.model.layers[0].mlp.up_proj)


def _with_forward_in_its_place(model: Decoder) -> None:
    model.model.layers[0].forward = model.model.layers[0].forward


@pytest.mark.parametrize("change", [_with_hook, _with_foreign_module, _with_forward_in_its_place])
def test_code_of_others_keeps_weights_where_they_lie(
    change: Callable[[Decoder], None], copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might write them uncounted."""

    def changed() -> Decoder:
        model = fp32("qwen3")
        change(model)
        return model

    expect_equal(*both_ways(monkeypatch, changed))
    assert not copies
