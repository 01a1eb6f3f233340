"""Activation checkpointing by part and by layer: the same bits, fewer tensors kept, no more repeated than asked."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bestiary.models import Decoder, LoRAConfig
from bestiary.models.errors import InvalidConfig
from bestiary.models.recomputation import Checkpointing, Part

from .tiny import FAMILIES, tiny, tokens

ATTENTION = torch.ops.bestiary.document_attention.default
LORA = LoRAConfig(r=4, alpha=8.0, targets=("*_proj*",))


class Attended(TorchDispatchMode):
    """Counts calls of the attention operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is ATTENTION
        return func(*args, **(kwargs or {}))


def step(model: Decoder, ids: Tensor) -> tuple[list[Tensor], int]:
    """Loss, the router's loss in it, and gradients; elements that were kept for them."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(ids, labels=ids, output_router_logits=model.decoder_config.moe is not None)
    out.loss.backward()
    found = [out.loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found, kept


def same(ours: list[Tensor], expected: list[Tensor]) -> bool:
    return len(ours) == len(expected) and all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_gives_the_same_bits_and_keeps_less(family: str, lora: LoRAConfig | None) -> None:
    """The router's loss too, which would not be the same if a repeated pass counted its tokens again."""
    ids = tokens(2, 13)
    expected, everything = step(tiny(family, lora=lora), ids)
    kept = {}
    for part in Part:
        found, kept[part] = step(tiny(family, lora=lora, activation_checkpointing=Checkpointing(part=part)), ids)
        assert same(found, expected), part
    assert kept[Part.FULL] < kept[Part.SELECTIVE] < min(kept[Part.ATTENTION], kept[Part.MLP])
    assert max(kept[Part.ATTENTION], kept[Part.MLP]) < everything


@pytest.mark.parametrize(("part", "calls"), [("full", 2), ("attention", 2), ("selective", 1), ("mlp", 1)])
def test_attention_runs_again_only_where_it_was_not_kept(part: str, calls: int) -> None:
    model = tiny("gpt_oss", activation_checkpointing=Checkpointing(part=Part(part)))
    with Attended() as seen:
        step(model, tokens(1, 20))
    assert seen.calls == calls * model.decoder_config.num_hidden_layers


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({"every_n_layers": 2}, {0, 2, 4, 6}),
        ({"first_layers": 3}, {0, 1, 2}),
        ({"every_n_layers": 2, "first_layers": 3, "part": "mlp"}, {0, 2}),
    ],
    ids=["every second", "the first three", "both, of the MLP"],
)
def test_blocks_are_chosen_by_their_number(options: dict[str, Any], again: set[int]) -> None:
    """By the switch that trainers know, with transformers' name for the step between layers."""
    model, ran = tiny("gemma3"), []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.up_proj.register_forward_hook(lambda *_, index=index: ran.append(index))
    model.gradient_checkpointing_enable(None, **options)
    found, _ = step(model, tokens(1, 9))
    assert {index for index in ran if ran.count(index) == 2} == again
    assert same(found, step(tiny("gemma3"), tokens(1, 9))[0])


@pytest.mark.slow
def test_parts_are_repeated_inside_compiled_blocks() -> None:
    """The compiler is told what to keep; gradients are those of compiled blocks without checkpointing."""
    torch._dynamo.reset()
    found = []
    for checkpointing in (False, Checkpointing(part=Part.SELECTIVE), Checkpointing(part=Part.MLP)):
        model = tiny("qwen3", compile_blocks=True, activation_checkpointing=checkpointing)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        found.append(step(model, tokens(1, 9))[0])
    torch._dynamo.reset()
    for plain, *repeated in zip(*found, strict=True):
        for ours in repeated:
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


def test_what_cannot_be_is_refused() -> None:
    """An unknown part, no layer at all, and activations moved to the CPU."""
    with pytest.raises(InvalidConfig, match="part = 'some'"):
        Checkpointing(part="some")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="every_n_layers = 0"):
        tiny("qwen3").activation_checkpointing_enable(every_n_layers=0)
    with pytest.raises(InvalidConfig, match="offload = True"):
        tiny("qwen3").activation_checkpointing_enable(offload=True)
