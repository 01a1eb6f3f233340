"""Modules that run on their part of the parameters: a style is a subclass put over the module's own class.

The module keeps its name, its place and its parameters, which become DTensors on the tensor mesh; while its forward
pass runs they are the local parts, plain tensors, so that layers and kernels know nothing of all this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from bestiary.kernels.divergence import Distillation
from bestiary.kernels.lookup import lookup
from bestiary.models.config import Attention
from bestiary.models.layers import moe
from bestiary.models.layers.attention import SelfAttention
from bestiary.models.layers.embedding import Embedding
from bestiary.models.layers.head import Head
from bestiary.training.errors import ParallelRefused
from bestiary.training.parallel_collectives import (
    enter,
    gather_last,
    gather_rows,
    scaled_gradient,
    scatter_rows,
    total,
)
from bestiary.training.parallel_plan import Style

WHOLE: Placement = Replicate()
OUT, IN = Shard(0), Shard(1)


@dataclass(frozen=True)
class Ranks:
    """Where a module's parameters lie, and the groups its activations travel in.

    Attributes:
        mesh: of the parameters, one dimension.
        tensor: ranks with the same data.   expert: ranks with other data that hold other experts. None: there is one.
    """

    mesh: DeviceMesh
    tensor: dist.ProcessGroup | None
    expert: dist.ProcessGroup | None = None


class Spread:
    """The base of all styles: local parameters while the forward pass runs.

    Attributes:
        ranks: see `Ranks`.   placed: parameter name to placement; others are replicated.
        inner: the forward pass of the module's own class.
        shares: replicated parameters of which a rank finds one share of the gradient.
    """

    ranks: Ranks
    inner: Callable[..., Any]
    _parameters: dict[str, Any]
    placed: ClassVar[Mapping[str, Placement]] = {}
    shares: frozenset[str] = frozenset()
    gradient_scale: float = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the module itself."""
        with self.local():
            return self.inner(*args, **kwargs)

    @contextmanager
    def local(self) -> Iterator[None]:
        """This module's own parameters as this rank's plain tensors."""
        held = dict(self._parameters)
        slots = self._parameters
        try:
            for name, parameter in held.items():
                if isinstance(parameter, DTensor):
                    share = [Partial()] if name in self.shares else None
                    mine = parameter.to_local(grad_placements=share)
                    slots[name] = mine if self.gradient_scale == 1.0 else scaled_gradient(mine, self.gradient_scale)
            yield
        finally:
            self._parameters.update(held)

    @classmethod
    def placement(cls, leaf: str) -> Placement:
        """Of the parameter `leaf`."""
        return cls.placed.get(leaf, WHOLE)

    @classmethod
    def check(cls, module: nn.Module, ranks: int, name: str) -> None:
        """Refuse parameters that `ranks` cannot share evenly.

        Raises:
            ParallelRefused: names parameter and size.
        """
        for leaf, parameter in module._parameters.items():
            placement = cls.placement(leaf)
            if parameter is None or not isinstance(placement, Shard) or parameter.shape[placement.dim] % ranks == 0:
                continue
            count = parameter.shape[placement.dim]
            vocabulary = isinstance(module, Embedding | Head)
            raise ParallelRefused(
                f"{'vocab_size = ' if vocabulary else f'{name}.{leaf} has a dimension of '}{count}, which "
                f"parallel.tensor = {ranks} ranks cannot share evenly.",
                read_from=f"{name}.{leaf}",
                remedy="resize_token_embeddings to a multiple, or keep the vocabulary whole: "
                'plan_of(model).first(("embed_tokens", Style.WHOLE), ("lm_head", Style.WHOLE))'
                if vocabulary
                else f"a tensor size that divides {count}",
            )

    @property
    def group(self) -> dist.ProcessGroup:
        """The tensor group."""
        return cast(dist.ProcessGroup, self.ranks.tensor)


class Whole(Spread):
    """Replicated; each rank finds the whole gradient."""


class Inside(Spread):
    """Replicated inside a region: each rank finds a share of the gradient."""

    def prepare(self) -> None:
        """A share of every parameter's."""
        self.shares = frozenset(self._parameters)


class Region(Spread):
    """Where an input that is the same on all ranks enters what they compute in parts."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of the module itself."""
        return super().forward(enter(x, self.group), *args, **kwargs)


class Heads(Region):
    """Attention on this rank's heads; one sink belongs to each."""

    config: Attention
    placed: ClassVar[Mapping[str, Placement]] = {"sinks": OUT}

    def prepare(self) -> None:
        """Count the heads of this rank."""
        ranks, heads = self.ranks.mesh.size(), self.config
        self.config = replace(heads, num_heads=heads.num_heads // ranks, num_kv_heads=heads.num_kv_heads // ranks)

    @classmethod
    def check(cls, module: nn.Module, ranks: int, name: str) -> None:
        """Whole heads for every rank, of keys too."""
        heads = cast(Attention, module.config)
        for field, count in (("num_heads", heads.num_heads), ("num_kv_heads", heads.num_kv_heads)):
            if count % ranks:
                raise ParallelRefused(
                    f"attention.{field} = {count} cannot be given out evenly to parallel.tensor = {ranks} ranks.",
                    read_from=name,
                    remedy=f"a tensor size that divides {count}; more ranks can go to parallel.shard",
                )


class Column(Spread):
    """A linear layer of which each rank computes some outputs."""

    placed: ClassVar[Mapping[str, Placement]] = {"weight": OUT, "bias": OUT, "lora_B": OUT}
    shares = frozenset({"lora_A"})


class Row(Spread):
    """A linear layer of which each rank has some inputs; the outputs are summed over the group."""

    placed: ClassVar[Mapping[str, Placement]] = {"weight": IN, "lora_A": IN}
    shares = frozenset({"lora_B"})

    def forward(self, x: Tensor) -> Tensor:
        """(…, in / ranks) → (…, out)."""
        with self.local():
            slots = self._parameters
            bias, slots["bias"] = slots["bias"], None  # added once, behind the sum
            y = total(self.inner(x), self.group)
            return y if bias is None else y + bias


class GatheredNorm(Inside):
    """A norm over all heads together."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, size / ranks) → the same, normalised over what all ranks have."""
        size = x.shape[-1]
        normed = super().forward(enter(gather_last(x, self.group), self.group))
        return cast(Tensor, normed.narrow(-1, self.ranks.mesh.get_local_rank() * size, size))


class Experts(Spread):
    """Each rank computes its own experts on all tokens it is shown and adds what the others computed.

    Cost: for the forward pass of N tokens on each of `e` expert ranks an all-gather of e·N rows and a reduce-scatter of
    as many, whatever they route to (an all-to-all would move min(1, K / e) of it); the tensor group adds one all-reduce
    of e·N rows. Products are only those of the tokens that chose an expert of this rank.
    """

    gate_up_proj: nn.Parameter

    def prepare(self) -> None:
        """Gradients are sums over the expert group's data, and FSDP2 expects means."""
        self.count = self.gate_up_proj.shape[0]
        if self.ranks.expert is not None:
            self.gradient_scale = 1.0 / dist.get_world_size(self.ranks.expert)

    @classmethod
    def placement(cls, leaf: str) -> Placement:
        """By expert."""
        return OUT

    @classmethod
    def check(cls, module: nn.Module, ranks: int, name: str) -> None:
        """Whole experts for every rank."""
        count = cast(Tensor, module.gate_up_proj).shape[0]
        if count % ranks:
            raise ParallelRefused(
                f"moe.num_experts = {count} cannot be given out evenly to parallel.tensor · parallel.expert = "
                f"{ranks} ranks.",
                read_from=name,
                remedy=f"sizes whose product divides {count}",
            )

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """(N, H), experts (N, K), weights (N, K) → (N, H); N may differ between expert ranks."""
        own, expert, tensor = x.shape[0], self.ranks.expert, self.ranks.tensor
        if expert is not None:
            rows = _most(own, x.device, expert)
            x, weights = gather_rows(x, expert, rows), gather_rows(weights, expert, rows)
            indices = gather_rows(indices + 1, expert, rows) - 1  # padding: −1, an expert that is nowhere
        if tensor is not None:
            x, weights = enter(x, tensor), enter(weights, tensor)
        mine = self.count // self.ranks.mesh.size()
        here = indices - self.ranks.mesh.get_local_rank() * mine
        here = torch.where((here >= 0) & (here < mine), here, mine)
        out = cast(Tensor, super().forward(x, here, weights))
        if tensor is not None:
            out = total(out, tensor)
        return out if expert is None else scatter_rows(out, expert, own)


@torch.compiler.disable(reason="a number of rows is read, so compiled blocks end before their experts")
def _most(own: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """The largest `own` of the group."""
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([own], device=device), group=group)
    return max(int(count) for count in counts)


class VocabularyRows(Spread):
    """An embedding of which each rank has some rows."""

    placed: ClassVar[Mapping[str, Placement]] = {"weight": OUT}
    padding_idx: int | None

    def _rows(self, input: Tensor) -> Tensor:
        weight = cast(Tensor, self._parameters["weight"])
        first = self.ranks.mesh.get_local_rank() * weight.shape[0]
        here = input - first
        inside = (here >= 0) & (here < weight.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < weight.shape[0] else None
        rows = lookup(here.where(inside, 0), weight, padding)
        return total(rows.where(inside[..., None], 0.0), self.group)


class VocabularyHead(Spread):
    """A head of which each rank has some rows: the log-prob core joins their sums, logits are gathered."""

    placed: ClassVar[Mapping[str, Placement]] = {"weight": OUT}

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        distillation: Distillation | None = None,
        as_teacher: bool = False,
        **options: Any,
    ) -> Any:
        """As of `Head`; a teacher's hidden states and weight stay on the mesh, for a student that is split alike."""
        if targets is None and distillation is None and not as_teacher:
            return gather_last(super().forward(enter(hidden, self.group)), self.group)
        whole = DTensor.from_local(hidden, self.ranks.mesh, [WHOLE], run_check=False)
        return self.inner(whole, targets, distillation=distillation, as_teacher=as_teacher, **options)


_CLASSES: dict[Style, type[Spread]] = {
    Style.WHOLE: Whole,
    Style.INSIDE: Inside,
    Style.REGION: Region,
    Style.HEADS: Heads,
    Style.COLUMN: Column,
    Style.ROW: Row,
    Style.GATHERED_NORM: GatheredNorm,
    Style.EXPERTS: Experts,
}


def chosen(module: nn.Module, style: Style, ranks: Ranks, name: str) -> type[Spread]:
    """The class of a style for `module`, which fits it; nothing is changed yet.

    Raises:
        ParallelRefused: a style that this kind of module cannot have, or sizes that do not divide.
    """
    found = _CLASSES.get(style)
    if style is Style.VOCABULARY:
        found = (
            VocabularyRows if isinstance(module, Embedding) else VocabularyHead if isinstance(module, Head) else None
        )
    wants = {Style.HEADS: SelfAttention, Style.EXPERTS: moe.Experts, Style.ROW: nn.Linear}.get(style, nn.Module)
    if found is None or not isinstance(module, wants):
        raise ParallelRefused(
            f"{name} is a {type(module).__name__}, which has no style {style.value!r}.",
            remedy=f'pass a plan with .first(("{name}", Style.WHOLE))',
        )
    found.check(module, ranks.mesh.size(), name)
    return found


def spread(module: nn.Module, style: type[Spread], ranks: Ranks, known: dict[nn.Parameter, nn.Parameter]) -> None:
    """Give `module` its style, and DTensors with this rank's part in place of its parameters; tied ones stay one.

    Args:
        known: what replaced what so far.
    """
    # Behind the module's class, not before it: an instance can only change to a class laid out like its own.
    own = type(module)
    changed: dict[str, Any] = {"forward": style.forward, "inner": own.forward}
    changed |= {"_rows": style._rows} if issubclass(style, VocabularyRows) else {}
    module.__class__ = type(f"{style.__name__}{own.__name__}", (own, style), changed)
    made = cast(Spread, module)
    made.ranks = ranks
    if isinstance(made, Inside | Heads | Experts):
        made.prepare()
    for leaf, parameter in list(made._parameters.items()):
        if parameter is not None:
            if parameter not in known:
                known[parameter] = _placed(parameter, made.placement(leaf), ranks.mesh)
            made._parameters[leaf] = known[parameter]


def _placed(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    local = parameter.detach()
    if isinstance(placement, Shard):
        local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
        local = local.clone(memory_format=torch.contiguous_format)  # the whole one can go
    made = DTensor.from_local(local, mesh, [placement], run_check=False)
    return nn.Parameter(made, requires_grad=parameter.requires_grad)
