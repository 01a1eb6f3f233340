"""Compiled blocks: no graph break, and one graph a layer type for every number of tokens and documents."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from .tiny import tiny, tokens

LENGTHS = [2, 3, 5, 7, 8, 16, 31, 33, 40, 47, 64, 65, 100, 127, 128, 129, 137, 160, 200, 201]
LAYER_TYPES = {"qwen3": 1, "gemma3": 2}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Graphs and counts of other tests stay out."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def borders(length: int, documents: int) -> Tensor:
    """cu_seq_lens of about equal documents."""
    return torch.tensor(sorted({length * i // documents for i in range(documents + 1)}), dtype=torch.int32)


def padded(length: int, amount: int) -> Tensor:
    """attention_mask (2, T): one row padded on the left."""
    return (torch.arange(length)[None] >= torch.tensor([[0], [min(amount, length - 1)]])).long()


def gradients(model: torch.nn.Module, **inputs: Tensor) -> list[Tensor]:
    """Of every parameter."""
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "padded", "plain"])
@pytest.mark.parametrize("family", LAYER_TYPES)
def test_one_graph_serves_twenty_lengths(family: str, kind: str) -> None:
    """Forward and backward; gradients are those of the uncompiled model."""
    model, plain = tiny(family, compile_blocks=True), tiny(family)
    count = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=count)
    for index, length in enumerate(LENGTHS):
        ids = tokens(1 if kind == "packed" else 2, length)
        inputs = {"input_ids": ids}
        if kind == "packed":
            inputs["cu_seq_lens_q"] = borders(length, 1 + index % 5)
        if kind == "padded":
            inputs["attention_mask"] = padded(length, 1 + 3 * index)
        ours = gradients(model, **inputs)
        if index % 6 == 0:
            for one, other in zip(ours, gradients(plain, **inputs), strict=True):
                assert (one - other).abs().max() < 1e-12 * (1 + other.abs().max())
    assert not torch._dynamo.utils.counters["graph_break"]
    assert count.frame_count == LAYER_TYPES[family]
