"""Compiled blocks and whole models: no graph break, one graph for every number of tokens and documents."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from bestiary.models import Decoder, LoRAConfig
from bestiary.models.config import LayerType

from .tiny import tiny, tiny_config, tokens

LENGTHS = [2, 3, 5, 7, 8, 16, 31, 33, 40, 47, 64, 65, 100, 127, 128, 129, 137, 160, 200, 201]
# Layers that differ: windows, and in tiny Qwen3-MoE a dense layer among routed ones.
LAYER_TYPES = {"qwen3": 1, "gemma3": 2, "qwen3_moe": 2, "gpt_oss": 2}
# Blocks see lengths, positions and masks through the same code in every family: each family meets one kind, and what
# attends in two ways (without and with sinks) all of them. GPT-OSS's documents are below.
KINDS = [("qwen3", "packed"), ("qwen3", "padded"), ("qwen3", "plain"), ("gemma3", "packed"), ("qwen3_moe", "padded")]
KINDS += [("gpt_oss", "padded"), ("gpt_oss", "plain")]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Graphs and counts of other tests stay out."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def few(family: str, layers: int, **changes: Any) -> Decoder:
    """The tiny model with its first layers only, ordered so that each type of layer is there."""
    types = tiny_config(family).layer_types
    if LayerType.FULL in types and LayerType.SLIDING in types:
        types = (LayerType.SLIDING, LayerType.FULL, LayerType.SLIDING)
    return tiny(family, num_hidden_layers=layers, layer_types=types[:layers], **changes)


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
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_one_graph_serves_twenty_lengths(family: str, kind: str) -> None:
    """Forward and backward; gradients are those of the uncompiled model."""
    model, plain = few(family, 3, compile_blocks=True), few(family, 3)
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


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", torch.float32), ("gpt_oss", torch.bfloat16)])
def test_routed_blocks_with_adapters_are_whole_graphs(family: str, dtype: torch.dtype) -> None:
    """Routing is data and stays inside one operator: fullgraph, adapters on experts and router, base frozen."""
    lora = LoRAConfig(r=8, alpha=16, targets=("q_proj", "mlp.gate", "experts.*"))
    alike = {"num_hidden_layers": 2, "layer_types": tiny_config(family).layer_types[:1] * 2, "dense_layers": ()}
    model = tiny(family, dtype, lora=lora, compile_blocks=True, **alike)
    plain = tiny(family, dtype, lora=lora, **alike)
    count = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=count, fullgraph=True)
    for index, length in enumerate(LENGTHS):
        ours = gradients(model, input_ids=tokens(2, length))
        if index % 6 == 0:
            theirs = gradients(plain, input_ids=tokens(2, length))
            assert len(ours) == len(theirs) > 0
            error = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm()
            assert error <= 8 * torch.finfo(dtype).eps * torch.stack([b.norm() for b in theirs]).norm()
    assert not torch._dynamo.utils.counters["graph_break"]
    # The embedding is frozen, so that the input of the first layer has no gradient, and that of the other has one.
    assert count.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYER_TYPES)
def test_a_training_step_is_one_whole_graph(family: str) -> None:
    """Inputs, masks, embedding, blocks, routing, head and loss, forward and backward: no break (fullgraph), and one
    graph for every length."""
    model, plain = few(family, 2), few(family, 2)
    count = CompileCounterWithBackend("aot_eager")
    whole = torch.compile(model, backend=count, fullgraph=True)
    for length in (17, 65, 40):
        ids = tokens(2, length)
        torch._dynamo.mark_dynamic(ids, 1)
        model.zero_grad()
        whole(input_ids=ids, labels=ids).loss.backward()
    ours = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for one, other in zip(ours, gradients(plain, input_ids=tokens(2, length)), strict=True):
        assert (one - other).abs().max() < 1e-12 * (1 + other.abs().max())
    assert count.frame_count == 1


@pytest.mark.slow
def test_a_graph_serves_padding_and_documents_of_any_kind() -> None:
    """Traced without a look at the data: padding on the left, none, inside of rows; positions that restart or not."""
    length, ids = 23, tokens(2, 23)
    model, plain = few("gpt_oss", 2), few("gpt_oss", 2)
    count, places = CompileCounterWithBackend("aot_eager"), torch.arange(length)
    whole = torch.compile(model, backend=count, fullgraph=True)
    masks = [padded(length, 5), torch.ones(2, length).long(), (places % torch.tensor([[4], [5]]) != 3).long()]
    positions = [places[None], torch.cat((places[:9], places[: length - 9]))[None]]
    for name, values in {"attention_mask": masks, "position_ids": positions}.items():
        for value in values:
            model.zero_grad()
            whole(ids, labels=ids, **{name: value}).loss.backward()
            ours = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            for one, other in zip(ours, gradients(plain, input_ids=ids, **{name: value}), strict=True):
                assert (one - other).abs().max() < 1e-12 * (1 + other.abs().max())
    assert count.frame_count == 2


def test_a_compiled_lookup_refuses_ids_outside_the_vocabulary() -> None:
    """Without a look at the data in Python, which would break the graph: the lookup itself says it."""
    embed = tiny("gemma3").model.embed_tokens
    compiled, ids = torch.compile(embed.forward, backend="aot_eager", fullgraph=True), tokens(2, 17)
    assert torch.equal(compiled(ids), embed(ids))
    with pytest.raises(IndexError, match="out of range"):
        compiled(ids + 1000)
