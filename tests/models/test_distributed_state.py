"""torch's distributed checkpoint helpers on a tied head: one tensor, whatever wraps the model."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bestiary.models import Decoder

from .tiny import tiny, tiny_config, tokens


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: Decoder) -> nn.Module:
    """FSDP2: each block, then norm, embedding and head in one group, since one Parameter may not be in two."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[str, Callable[[Decoder], nn.Module]] = {
    "plain": lambda model: model,
    "DDP": DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "FSDP2": sharded,
}
FULL = StateDictOptions(full_state_dict=True)


SMALL: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": tiny_config("qwen3").layer_types[:2]}


def config(tied: bool) -> Any:
    return tiny_config("qwen3", tie_word_embeddings=tied, **SMALL)


@pytest.mark.parametrize("options", [None, FULL], ids=["sharded", "full"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_model_state_travels(wrapper: str, tied: bool, options: StateDictOptions | None) -> None:
    """Out of one model and into another of the same kind, strictly; the tie and the values hold."""
    source, target = tiny("qwen3", tie_word_embeddings=tied, **SMALL), Decoder(config(tied), dtype=torch.float64)
    ids, expected = tokens(2, 9), None
    with torch.no_grad():
        expected = source(ids).logits
    names = sorted(name for name, _ in source.named_parameters())
    wrapped = WRAPPERS[wrapper](source)
    state = get_model_state_dict(wrapped, options=options)
    assert sorted(state) == names
    assert ("lm_head.weight" in state) is not tied
    into = WRAPPERS[wrapper](target)
    set_model_state_dict(into, state, options=options or StateDictOptions(strict=True))
    assert (target.lm_head.weight is target.model.embed_tokens.weight) is tied
    with torch.no_grad():
        assert torch.equal(into(ids).logits, expected)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_state_travels(wrapper: str) -> None:
    """Model and AdamW of a tied model, after a step; the next step is the same on both sides."""
    wrapped = WRAPPERS[wrapper](tiny("qwen3", **SMALL))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    ids = tokens(2, 9)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = module(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step(wrapped, optimizer)
    model_state, optimizer_state = deepcopy(get_state_dict(wrapped, optimizer, options=FULL))
    losses = [step(wrapped, optimizer) for _ in range(2)]

    other = WRAPPERS[wrapper](Decoder(config(True), dtype=torch.float64))
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    set_state_dict(other, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state, options=FULL)
    assert [step(other, resumed) for _ in range(2)] == pytest.approx(losses, rel=1e-10)
    assert losses[1] < losses[0]


def test_rank_zero_may_broadcast() -> None:
    """Into a model that is still on meta: the way of a sharded load."""
    source = tiny("qwen3", **SMALL)
    with torch.device("meta"):
        target = Decoder(config(True), dtype=torch.float64)
    target.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target, dict(source.state_dict()), options=options)
    assert target.lm_head.weight is target.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(target(tokens(1, 5)).logits, source(tokens(1, 5)).logits)


def test_fsdp_trains_the_shared_parameter_once() -> None:
    """The gradient of a tied embedding under FSDP2 is the plain one: both of its uses, added."""
    ids = tokens(2, 9)
    plain = tiny("qwen3", **SMALL)
    plain(ids, labels=ids).loss.backward()
    expected = plain.model.embed_tokens.weight.grad
    wrapped = sharded(tiny("qwen3", **SMALL))
    wrapped(ids, labels=ids).loss.backward()
    gradient = wrapped.model.embed_tokens.weight.grad.full_tensor()
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
