"""Weights for tiny models, drawn by name, so that a parameter keeps its values whatever else a config changes.

Hugging Face's initial weights hide bugs: norms are one, biases zero, the residual stream is the embedding alone.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 2**14
"""Elements of a tensor up to which its values are kept, a thousand of them: models of one seed are built again."""


def _draw(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Standard normal values in float64, a function of name and seed alone."""
    count = shape.numel()
    values = _drawn_once(name, count, seed).clone() if count <= SMALL else _drawn(name, count, seed)
    return values.reshape(shape)


def _drawn(name: str, count: int, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(count, generator=generator, dtype=torch.float64, device="cpu")


_drawn_once = lru_cache(maxsize=1000)(_drawn)


def _is_scale(name: str, owner: nn.Module) -> bool:
    """Whether a parameter is the weight of a norm, which lies around one or around zero."""
    return "norm" in type(owner).__name__.lower() and not name.endswith("bias")


def centred(model: nn.Module) -> bool:
    """Whether every norm's weight is all ones or all zeros, as the constructor of a norm leaves it."""
    for name, parameter in model.named_parameters():
        if _is_scale(name, model.get_submodule(name.rpartition(".")[0])):
            low, high = (float(bound) for bound in parameter.detach().aminmax())
            if low != high or low not in (0.0, 1.0):
                return False
    return True


def _value(name: str, current: Tensor, owner: nn.Module, seed: int) -> Tensor:
    noise = _draw(name, current.shape, seed)
    leaf = name.rpartition(".")[2]
    if _is_scale(name, owner):
        centre = float(current.detach().float().mean().round())  # 1, or 0 where the norm computes 1 + weight
        return centre + 0.3 * noise
    if leaf.endswith("correction_bias"):
        return 0.1 * noise  # it alone chooses: more of it, and some experts are never chosen
    if leaf.endswith("bias"):
        return 0.3 * noise
    if current.ndim < 2:
        return noise  # sinks and other per-head scalars
    if isinstance(owner, nn.Embedding):  # large beside the branches: tokens keep apart, every expert gets some
        return noise
    fan_in = current.shape[1] if current.ndim == 2 else min(current.shape[-2:])
    return noise * fan_in**-0.5


Store = dict[tuple[Any, ...], Tensor]


def _stored(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter once and every persistent buffer."""
    persistent = set(model.state_dict())
    return [*model.named_parameters(), *(item for item in model.named_buffers() if item[0] in persistent)]


@torch.no_grad()
def perturb(model: nn.Module, seed: int, store: Store | None = None) -> None:
    """Gives every parameter and persistent buffer of a Hugging Face model new values.

    Matrices N(0, 1 / fan_in), embeddings N(0, 1), norms 1 + 0.3 N (0.3 N where the model adds the one), biases 0.3 N,
    sinks N(0, 1).

    Args:
        store: values made before, by name and shape; models built with the same one share memory, and nobody may
            write into their weights.
    """
    for name, tensor in _stored(model):
        owner = model.get_submodule(name.rpartition(".")[0])
        key = (seed, name, tensor.shape, tensor.dtype, type(owner).__name__)
        made = None if store is None else store.get(key)
        if made is None:
            made = _value(name, tensor, owner, seed).to(tensor.dtype)
            if store is not None:
                store[key] = made
        tensor.data = made


@torch.no_grad()
def fingerprint(model: nn.Module) -> None:
    """Overwrites what a model stores with a running count, so that no two elements of it are equal.

    Exact in float32 up to 2**24 elements: a swap, a transposition or a repeated slice cannot cancel.
    """
    start = 0
    for _, parameter in _stored(model):
        count = parameter.numel()
        values = torch.arange(start, start + count, dtype=torch.float64)
        parameter.copy_(values.reshape(parameter.shape))
        start += count
    if start >= 2**24:
        raise ValueError(f"{start} elements do not have distinct fp32 fingerprints (limit 2**24)")


@torch.no_grad()
def random_bits(model: nn.Module, seed: int) -> None:
    """Overwrites every bfloat16 parameter with random finite bit patterns, subnormals and −0.0 among them."""
    for name, parameter in model.named_parameters():
        digest = hashlib.sha256(f"{seed}:bits:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bits = torch.randint(-(2**15), 2**15, parameter.shape, generator=generator, dtype=torch.int16)
        infinite = (bits & 0x7F80) == 0x7F80  # exponent all ones: inf or NaN
        bits = torch.where(infinite, bits & 0x3FFF, bits)
        parameter.copy_(bits.view(torch.bfloat16))
