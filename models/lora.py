"""LoRA (arXiv:2106.09685): which weights carry an adapter, decided from names before construction; how it merges."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.models.config import DecoderConfig, LoRAConfig
from bestiary.models.errors import InvalidConfig
from bestiary.models.sharding import whole

ADAPTER_LEAVES = ("lora_A", "lora_B")  # endings of the parameters that are adapters

_REFUSED = {
    "lm_head": "it runs inside the log-prob core, and where it is tied an adapter would part it from the embedding",
    "score": "it is trained whole, beside the adapters",
    "embed_tokens": "it is a lookup, and where it is tied an adapter would part it from the head",
}


def matches(name: str, pattern: str) -> bool:
    """Whether a module name is meant by a target pattern: the whole name, or its end after a dot, as a glob."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def adapter(config: DecoderConfig, name: str) -> LoRAConfig | None:
    """The LoRA of module `name` with its own r and alpha, or None if no target pattern means it."""
    lora = config.lora
    if lora is None or not any(matches(name, target) for target in lora.targets):
        return None
    ranks = [rank for pattern, rank in lora.rank_pattern if matches(name, pattern)]
    alphas = [alpha for pattern, alpha in lora.alpha_pattern if matches(name, pattern)]
    return replace(
        lora,
        r=ranks[0] if ranks else lora.r,
        alpha=alphas[0] if alphas else lora.alpha,
        rank_pattern=(),
        alpha_pattern=(),
    )


@dataclass(frozen=True, eq=False)
class LowRank:
    """The adapter of one weight: the Parameters themselves.

    Shapes: lora_A (r, in) and lora_B (out, r), with a leading E for experts.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    config: LoRAConfig


@dataclass(frozen=True, eq=False)
class Site:
    """A weight that can carry an adapter.

    Attributes:
        name: what targets are matched against: the module of a linear layer, or the projection of experts
            ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.gate_up_proj").
        weight_name: the parameter's name in the model.
        weight: (out, in), or (E, out, in) for experts.
        adapter: None where no target means it.
        takes_dropout: False for experts and routers.
    """

    name: str
    weight_name: str
    weight: nn.Parameter
    adapter: LowRank | None
    takes_dropout: bool = True

    def merged(self) -> Tensor:
        """The weight with its adapter added, out of place; without an adapter the weight itself. No gradient.

        One that lies in parts is gathered: all processes call this together.
        """
        if self.adapter is None:
            return whole(self.weight)
        A, B = whole(self.adapter.lora_A), whole(self.adapter.lora_B)
        return merge_delta(whole(self.weight), A, B, self.adapter.config.scaling)


class Adaptable(ABC):
    """Mixin of the layers that have LoRA built in.

    Attributes:
        adapters_on: False inside `adapters_off`.
    """

    adapters_on: bool = True

    def scaling(self, lora: LoRAConfig) -> float:
        """Factor on the low-rank product: 0 while adapters are off."""
        return lora.scaling if self.adapters_on else 0.0

    @abstractmethod
    def sites(self, name: str) -> Iterator[Site]:
        """The weights of this layer that can carry an adapter; `name` is the layer's in the model."""

    @abstractmethod
    def drop_adapters(self) -> None:
        """Forget the adapters, leaving the weights as they are."""

    def wrapping_obstacle(self) -> str | None:
        """Why PEFT must not wrap this layer; None if it may."""
        if any(site.adapter is not None for site in self.sites("")):
            return "it has an adapter of its own (DecoderConfig.lora), and two on one layer would both train"
        return None

    @property
    def base_layer(self) -> Any:
        """Absent, as in any layer that wraps nothing; PEFT asks for it when it is about to wrap this one.

        Raises:
            InvalidConfig: PEFT must not; see `wrapping_obstacle`.
        """
        obstacle = self.wrapping_obstacle()
        if obstacle is not None:
            raise InvalidConfig(
                f"PEFT is about to wrap {type(self).__name__}: {obstacle}.",
                remedy="give all adapters to the model itself (`lora` in its config), or let PEFT target other layers; "
                "merge_lora() folds in what is there",
            )
        raise AttributeError("base_layer")


def sites(model: nn.Module) -> Iterator[Site]:
    """Every weight of a model that can carry an adapter, in the order of its modules."""
    for name, module in model.named_modules():
        if isinstance(module, Adaptable):
            yield from module.sites(name)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as its base does: each adapter is weighed by 0.

    The operations stay those of the adapted model, so a model whose adapters are fresh (B = 0) answers inside and
    outside with the same bits. For passes without gradients, as a reference policy or to look at the base; what is
    merged, saved or exported is not touched.

    Raises:
        InvalidConfig: the model has no adapter, and would be its own reference.
    """
    layers = [module for module in model.modules() if isinstance(module, Adaptable)]
    if not any(site.adapter is not None for layer in layers for site in layer.sites("")):
        raise InvalidConfig(
            "adapters_off() on a model without LoRA: nothing would change.",
            remedy="`lora` in the model's config, or a frozen copy of the model as the reference",
        )
    before = [layer.adapters_on for layer in layers]
    try:
        for layer in layers:
            layer.adapters_on = False
        yield
    finally:
        for layer, on in zip(layers, before, strict=True):
            layer.adapters_on = on


def check_targets(lora: LoRAConfig, names: Iterable[str]) -> None:
    """Refuse patterns that mean none of the `names` that can carry an adapter.

    Raises:
        InvalidConfig: names the field and the pattern, and what there is; embedding and head with their reason.
    """
    known = list(names)
    leaves = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in known}))
    patterns = [("targets", target) for target in lora.targets]
    patterns += [("rank_pattern", pattern) for pattern, _ in lora.rank_pattern]
    patterns += [("alpha_pattern", pattern) for pattern, _ in lora.alpha_pattern]
    for field, pattern in patterns:
        if any(matches(name, pattern) for name in known):
            continue
        for leaf, why in _REFUSED.items():
            if matches(f"model.{leaf}", pattern) or matches(leaf, pattern):
                raise InvalidConfig(
                    f"lora.{field} = {pattern!r} means {leaf}, which takes no adapter: {why}.",
                    remedy=f"train {leaf} in full: set requires_grad_(True) on its weight after construction, and save "
                    f"with merge=True; or target among {leaves}",
                )
        raise InvalidConfig(
            f"lora.{field} = {pattern!r} matches no linear layer and no expert projection.",
            remedy=f"patterns over names such as {known[0]!r}; the last parts here are {leaves}",
        )


def merge_delta(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """W + B A · scaling, out of place, in at least fp32, cast to W's dtype once. Batched over leading dimensions."""
    dtype = torch.promote_types(torch.promote_types(weight.dtype, lora_A.dtype), torch.float32)
    with torch.no_grad():
        delta = (lora_B.to(dtype) @ lora_A.to(dtype)).mul_(scaling)
        return delta.add_(weight).to(weight.dtype)


def new_adapter(weight: Tensor, lora: LoRAConfig) -> tuple[nn.Parameter, nn.Parameter]:
    """Fresh A and B for a weight (…, out, in): (…, r, in) and (…, out, r), in the adapter's dtype."""
    *leading, out_features, in_features = weight.shape
    lora_A = torch.empty(*leading, lora.r, in_features, dtype=lora.dtype)
    lora_B = torch.empty(*leading, out_features, lora.r, dtype=lora.dtype)
    for name, tensor in zip(ADAPTER_LEAVES, (lora_A, lora_B), strict=True):
        reset_adapter(name, tensor)
    return nn.Parameter(lora_A), nn.Parameter(lora_B)


def reset_adapter(name: str, parameter: Tensor, generator: torch.Generator | None = None) -> None:
    """Start values of the adapter `…lora_A` or `…lora_B`: the adapted layer starts as the base layer.

    A is uniform in ±√(1 / in) (Kaiming with a = √5, as PEFT), B zero.
    """
    with torch.no_grad():
        if name.endswith("lora_A"):
            bound = math.sqrt(1 / parameter.shape[-1])
            parameter.uniform_(-bound, bound, generator=generator)
        else:
            parameter.zero_()
