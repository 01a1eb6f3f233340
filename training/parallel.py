"""A model over many processes: FSDP2, hybrid sharding, tensor and expert parallelism, chosen by a mesh and a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from bestiary.models.decoder import Decoder
from bestiary.models.layers.moe import Experts, MoEBlock
from bestiary.training.errors import ParallelRefused
from bestiary.training.parallel_gradients import clip_grad_norm
from bestiary.training.parallel_mesh import (
    CONTEXT,
    EXPERT,
    REPLICATE,
    SHARD,
    TENSOR,
    DataParallel,
    build_mesh,
    check_mesh,
    data_parallel,
    joined,
    size,
)
from bestiary.training.parallel_plan import ParallelPlan, Style, default_plan, plan_of
from bestiary.training.parallel_styles import Ranks, Spread, chosen, spread

__all__ = [
    "DataParallel",
    "ParallelPlan",
    "Precision",
    "Style",
    "build_mesh",
    "clip_grad_norm",
    "data_parallel",
    "default_plan",
    "parallelize",
    "plan_of",
]


@dataclass(frozen=True)
class Precision:
    """Dtypes of a sharded step; None: the parameters' own.

    Attributes:
        compute: parameters are gathered, and forward and backward run, in this; what is kept and stepped stays wide.
        reduce: gradients are summed over ranks in this.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = torch.float32


def parallelize(
    model: Decoder,
    mesh: DeviceMesh,
    plan: ParallelPlan | None = None,
    *,
    precision: Precision | None = None,
    reshard_after_forward: bool = True,
) -> Decoder:
    """Spread `model` over `mesh`, in place; every rank calls it with the same model, or with one on meta.

    Parameters become DTensors of which a rank keeps its part. Each block is gathered when it runs (FSDP2); final norm,
    embedding and head are one group, since a tied head is one Parameter.

    Args:
        model: whole on every rank, or on meta: then nothing is allocated before `to_empty`.
        mesh: from `build_mesh`. Ranks of one tensor group are given the same data, and seeds, others data of their own;
            those of one context group the same rows, and slices of them (`parallel_context.Context`).
        plan: what a module becomes under tensor and expert parallelism; None: `plan_of(model)`.
        precision: None: everything in the parameters' dtype.
        reshard_after_forward: False keeps gathered blocks until their backward pass: more memory, fewer gathers.
    Raises:
        ParallelRefused: a model that is no `Decoder`, or is spread already; a size that does not divide.
    """
    check_mesh(mesh)
    _check(model)
    _spread(model, mesh, plan or plan_of(model))
    _shard(model, mesh, precision or Precision(reduce=None), reshard_after_forward)
    return model


def _check(model: Decoder) -> None:
    if not isinstance(model, Decoder):
        raise ParallelRefused(
            f"parallelize() of a {type(model).__name__}.",
            remedy="it knows the modules of a Decoder: AutoDecoder.from_pretrained gives one; adapters of PEFT "
            "can be built into it with lora=",
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ParallelRefused(
            f"parallelize() of a {type(model).__name__} that is spread already.",
            remedy="call it once, with the mesh that has all dimensions",
        )


def _spread(model: Decoder, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Styles, and parameters in parts; nothing where every product is computed by one rank."""
    tensor, expert = size(mesh, TENSOR), size(mesh, EXPERT)
    if tensor == expert == 1:
        return
    if expert > 1 and model.decoder_config.moe is None:
        raise ParallelRefused(
            f"parallel.expert = {expert} for a model without experts.", remedy="parallel.shard in its place"
        )
    group = mesh.get_group(TENSOR) if tensor > 1 else None
    within = Ranks(mesh[TENSOR], group)
    across = Ranks(joined(mesh, EXPERT, TENSOR), group, mesh.get_group(EXPERT) if expert > 1 else None)
    styled: list[tuple[nn.Module, type[Spread], Ranks]] = []
    for name, module in model.named_modules():
        own = any(parameter is not None for parameter in module._parameters.values())
        style = plan.style(name)
        if style is None and own:
            raise ParallelRefused(
                f"no style is known for {name}, a {type(module).__name__}.",
                remedy=f'say what it is: plan_of(model).first(("{name}", Style.WHOLE))',
            )
        if style is None or (tensor == 1 and style is not Style.EXPERTS):
            continue
        ranks = across if style is Style.EXPERTS else within
        styled.append((module, chosen(module, style, ranks, name), ranks))
    known: dict[nn.Parameter, nn.Parameter] = {}
    for module, kind, ranks in styled:
        spread(module, kind, ranks, known)


def _shard(model: Decoder, mesh: DeviceMesh, precision: Precision, reshard: bool) -> None:
    # Inputs keep their dtypes: a block is given cos and sin, which some families want wider than activations.
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=precision.reduce, cast_forward_inputs=False
    )
    options: dict[str, Any] = {"mp_policy": policy, "ignored_params": _whole(model)}
    everywhere, apart = _storage(mesh, SHARD, CONTEXT, EXPERT), _storage(mesh, SHARD, CONTEXT)
    for block in model.model.layers:
        place_of = _placement(block, size(mesh, SHARD, CONTEXT))
        if isinstance(block.mlp, MoEBlock) and size(mesh, EXPERT) > 1:  # each holds experts of its own
            experts = block.mlp.experts
            fully_shard(experts, mesh=apart, **options, shard_placement_fn=place_of, reshard_after_forward=reshard)
        fully_shard(block, mesh=everywhere, **options, shard_placement_fn=place_of, reshard_after_forward=reshard)
    last = [model.model.norm, model.model.embed_tokens, model.head]
    fully_shard(last, mesh=everywhere, **options, reshard_after_forward=False)
    fully_shard(model, mesh=everywhere, **options, reshard_after_forward=reshard)


def _placement(block: nn.Module, ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Experts on dim 1 where FSDP2's ranks cannot have as many experts each; everything else on dim 0."""
    experts = [module for module in block.modules() if isinstance(module, Experts)]
    theirs = {parameter for module in experts for parameter in module.parameters()}

    def place_of(parameter: nn.Parameter) -> Shard | None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        uneven = parameter in theirs and local.shape[0] % ranks and local.shape[1] % ranks == 0
        return Shard(1) if uneven else None

    return place_of


def _whole(model: nn.Module) -> set[nn.Parameter]:
    """What every rank keeps whole, in its own dtype: the correction bias of sigmoid routers, wide on purpose."""
    return {parameter for name, parameter in model.named_parameters() if name.endswith("e_score_correction_bias")}


def _storage(mesh: DeviceMesh, *dims: str) -> DeviceMesh:
    """What FSDP2 is given: one dimension to shard over, with one to replicate over in front where there is one."""
    spread = joined(mesh, *dims)
    if size(mesh, REPLICATE) == 1:
        return spread
    return DeviceMesh._concatenate([mesh[REPLICATE], spread])
