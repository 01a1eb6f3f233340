"""The gradient of a tied embedding: the head's dense one, to which the lookup adds its rows; no second is filled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from bestiary.kernels import lookup as module
from bestiary.kernels.lookup import lookup
from bestiary.models import Decoder
from bestiary.tools.bench import process

from .tiny import tiny, tokens

IDS = torch.cat((tokens(2, 6), tokens(2, 6)), dim=1)  # every id at least twice
ROWS = torch.tensor([3, 3, 0, 5])


def weight_of(model: Decoder) -> Tensor:
    return model.model.embed_tokens.weight


@contextmanager
def plain() -> Iterator[None]:
    """torch's own lookup."""
    before = module._plain
    module._plain = lambda *_: True
    try:
        yield
    finally:
        module._plain = before


class Made(TorchDispatchMode):
    """Counts rows added to a tensor of the weight's shape, and new tensors of it."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.added, self.dense = shape, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == self.shape:
            self.added += func is torch.ops.aten.index_add_.default
            new = not any(out is given for given in args)
            self.dense += new and func.namespace == "aten" and "detach" not in str(func)
        return out


def trained(model: Decoder, loss: Callable[[Decoder], Tensor]) -> tuple[Tensor, Made]:
    """The embedding's gradient, which is dense and contiguous, and what the backward pass made."""
    value, weight = loss(model), weight_of(model)
    with Made(weight.shape) as made:
        value.backward()
    assert weight.grad is not None
    assert weight.grad.layout is torch.strided
    assert weight.grad.is_contiguous()
    return weight.grad, made


def labelled(model: Decoder) -> Tensor:
    return model(IDS, labels=IDS).loss


def per_token(model: Decoder) -> Tensor:
    log_probs = model(IDS, shift_labels=IDS.roll(-1, 1)).log_probs
    return (log_probs * torch.linspace(0.1, 1.0, log_probs.numel(), dtype=log_probs.dtype).view_as(log_probs)).sum()


def by_logits(model: Decoder) -> Tensor:
    return model(IDS).logits.square().mean()


def twice_embedded(model: Decoder) -> Tensor:
    embeds = model.model.embed_tokens(IDS) + 0.5 * model.model.embed_tokens(IDS.flip(1))
    return model(inputs_embeds=embeds, labels=IDS).loss


def with_penalty(model: Decoder) -> Tensor:
    return labelled(model) + 0.1 * weight_of(model).square().sum()


def two_passes(model: Decoder) -> Tensor:
    return labelled(model) + model(IDS.flip(0), labels=IDS.flip(1)).loss


CASES: dict[str, tuple[Callable[[Decoder], Tensor], dict[str, Any], int]] = {
    "loss": (labelled, {}, 1),
    "per token": (per_token, {}, 1),
    "pad row": (labelled, {"padding_idx": int(IDS[0, 1])}, 1),
    "checkpointing": (labelled, {"activation_checkpointing": True}, 1),
    "two lookups": (twice_embedded, {}, 2),
    "a penalty": (with_penalty, {}, 0),  # what waits is the penalty's gradient, with the head's inside
    "two forward passes": (two_passes, {}, 1),  # autograd sums the heads' into a new one, which the other cannot see
    "untied": (labelled, {"tie_word_embeddings": False}, 0),
    "logits": (by_logits, {}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_torch_s_lookup(name: str) -> None:
    """In float64; rows are added exactly where the head's dense gradient came before."""
    loss, changes, added = CASES[name]
    ours, made = trained(tiny("gemma3", **changes), loss)
    with plain():
        expected, theirs = trained(tiny("gemma3", **changes), loss)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    assert made.added == added
    assert theirs.added == 0


@pytest.mark.parametrize("loss", [labelled, per_token])
def test_no_second_tensor_of_the_weight_s_size_is_made(loss: Callable[[Decoder], Tensor]) -> None:
    """Two less than with torch's lookup, and with gradients taken in the forward pass none at all."""
    _, ours = trained(tiny("qwen3"), loss)
    with plain():
        _, theirs = trained(tiny("qwen3"), loss)
    assert ours.added == 1
    assert ours.dense == theirs.dense - 2, "the lookup's own, and the sum that autograd makes out of place"
    if loss is labelled:
        assert ours.dense == 0


def test_the_bits_are_the_same_every_time() -> None:
    """Rows of one token are added in one order."""
    first, second = (trained(tiny("qwen3", torch.float32), labelled)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_gradients_accumulate_over_passes() -> None:
    """Two calls on a kept graph, then another batch: the sum, still dense."""
    model = tiny("qwen3")
    once, _ = trained(tiny("qwen3"), labelled)
    loss = labelled(model)
    loss.backward(retain_graph=True)
    loss.backward()
    trained(model, labelled)
    torch.testing.assert_close(weight_of(model).grad, 3 * once, rtol=1e-12, atol=1e-14)


def test_a_mark_holds_for_its_own_pass_alone() -> None:
    """A later pass through the lookup alone has a dense gradient, into .grad and from autograd.grad."""
    model = tiny("qwen3")
    loss, weight = labelled(model), weight_of(model)
    embedded = model.model.embed_tokens(IDS).sum()
    loss.backward(retain_graph=True)
    weight.grad = None
    embedded.backward(retain_graph=True)
    assert weight.grad.layout is torch.strided
    (alone,) = torch.autograd.grad(embedded, weight)
    assert torch.equal(alone, weight.grad)
    (both,) = torch.autograd.grad(loss, weight)
    assert both.layout is torch.strided
    torch.testing.assert_close(both, trained(tiny("qwen3"), labelled)[0], rtol=1e-12, atol=1e-14)


def test_hooks_see_the_dense_sum() -> None:
    """On the Parameter, before and after it is accumulated."""
    model, seen = tiny("qwen3"), []
    weight = weight_of(model)
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    expected, _ = trained(model, labelled)
    assert len(seen) == 2
    assert all(torch.equal(gradient, expected) for gradient in seen)


def test_a_gradient_that_somebody_keeps_is_left_alone() -> None:
    """A hook behind the head's backward pass holds it: it must see the head's share and nothing else, ever."""
    model, kept = tiny("qwen3"), []
    loss = labelled(model)
    loss.grad_fn.register_hook(lambda of_inputs, _: kept.extend(of_inputs[:2]))
    loss.backward()
    expected, _ = trained(tiny("qwen3"), labelled)
    torch.testing.assert_close(weight_of(model).grad, expected, rtol=1e-12, atol=1e-14)
    copies = [gradient for gradient in kept if gradient is not None and gradient.shape == expected.shape]
    assert copies
    assert not torch.allclose(copies[0], expected)


@pytest.mark.slow
def test_peak_memory_holds_one_gradient_of_the_weight_s_size() -> None:
    """Measured: what the dispatcher does not show, such as a sum that autograd makes out of place."""
    model = tiny("qwen3", torch.float32, vocab_size=400_000)
    loss = labelled(model)
    size = weight_of(model).numel() * 4
    process.settle()
    process.reset_peak()
    before = process.resident()
    loss.backward()
    assert process.peak() - before < size / 2, "the head's gradient is there since the forward pass"


def test_a_frozen_embedding_has_no_gradient() -> None:
    """Nor has the head that it is."""
    model = tiny("qwen3")
    weight_of(model).requires_grad_(False)
    labelled(model).backward()
    assert weight_of(model).grad is None


def test_second_derivatives_are_torch_s() -> None:
    """Of the lookup alone, under torch.func too."""
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: lookup(ROWS, w), weight)
    assert torch.autograd.gradgradcheck(lambda w: lookup(ROWS, w).square(), weight)
    expected = torch.func.grad(lambda w: torch.nn.functional.embedding(ROWS, w).square().sum())(weight.detach())
    assert torch.equal(torch.func.grad(lambda w: lookup(ROWS, w).square().sum())(weight.detach()), expected)


def sharded(model: Decoder) -> torch.nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    "wrap",
    [DistributedDataParallel, sharded, lambda model: torch.compile(model, backend="eager")],
    ids=["DDP", "FSDP2", "compiled"],
)
def test_wrappers_get_the_plain_gradient(wrap: Callable[[Decoder], Any]) -> None:
    """One process; the collectives take a dense tensor."""
    expected, _ = trained(tiny("qwen3"), labelled)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny("qwen3")
        wrap(model)(IDS, labels=IDS).loss.backward()
        gradient = weight_of(model).grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    finally:
        dist.destroy_process_group()
