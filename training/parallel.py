"""A model over many processes: FSDP2, hybrid sharding, tensor and expert parallelism, chosen by a mesh and a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bestiary.models.decoder import Decoder
from bestiary.training.errors import ParallelRefused
from bestiary.training.parallel_gradients import clip_grad_norm
from bestiary.training.parallel_mesh import (
    EXPERT,
    REPLICATE,
    SHARD,
    DataParallel,
    build_mesh,
    check_mesh,
    data_parallel,
    joined,
    size,
)

__all__ = ["DataParallel", "Precision", "build_mesh", "clip_grad_norm", "data_parallel", "parallelize"]


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
    *,
    precision: Precision | None = None,
    reshard_after_forward: bool = True,
) -> Decoder:
    """Spread `model` over `mesh`, in place; every rank calls it with the same model, or with one on meta.

    Parameters become DTensors of which a rank keeps its part. Each block is gathered when it runs (FSDP2); final norm,
    embedding and head are one group, since a tied head is one Parameter.

    Args:
        model: whole on every rank, or on meta: then nothing is allocated before `to_empty`.
        mesh: from `build_mesh`.
        precision: None: everything in the parameters' dtype.
        reshard_after_forward: False keeps gathered blocks until their backward pass: more memory, fewer gathers.
    Raises:
        ParallelRefused: a model that is no `Decoder`, or is spread already; a size that does not divide.
    """
    check_mesh(mesh)
    _check(model)
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


def _shard(model: Decoder, mesh: DeviceMesh, precision: Precision, reshard: bool) -> None:
    storage = _storage(mesh, SHARD, EXPERT)
    # Inputs keep their dtypes: a block is given cos and sin, which some families want wider than activations.
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=precision.reduce, cast_forward_inputs=False
    )
    whole = _whole(model)
    options: dict[str, Any] = {"mesh": storage, "mp_policy": policy, "ignored_params": whole}
    for block in model.model.layers:
        fully_shard(block, **options, reshard_after_forward=reshard)
    fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], **options, reshard_after_forward=False)
    fully_shard(model, **options, reshard_after_forward=reshard)


def _whole(model: nn.Module) -> set[nn.Parameter]:
    """What every rank keeps whole, in its own dtype: the correction bias of sigmoid routers, wide on purpose."""
    return {parameter for name, parameter in model.named_parameters() if name.endswith("e_score_correction_bias")}


def _storage(mesh: DeviceMesh, *dims: str) -> DeviceMesh:
    """What FSDP2 is given: one dimension to shard over, with one to replicate over in front where there is one."""
    spread = joined(mesh, *dims)
    if size(mesh, REPLICATE) == 1:
        return spread
    return DeviceMesh._concatenate([mesh[REPLICATE], spread])
