"""Bugs that only a run in float32 shows: narrow arithmetic behind a dtype test, and the grouped expert kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bestiary.models.config import DecoderConfig
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import PlantedBug
from bestiary.verify.planted.patching import patch


def _rounded(tensor: Tensor) -> Tensor:
    """Through bfloat16 and back where the run is in float32."""
    return tensor.to(torch.bfloat16).to(tensor.dtype) if tensor.dtype is torch.float32 else tensor


def _narrow_tables(tables: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rounded(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = tables(*args, **kwargs)
        return _rounded(cos), _rounded(sin)

    return rounded


def _narrow_norm(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, *args, **kwargs: norm(x, _rounded(weight), *args, **kwargs)


def _unsorted_weights(grouped: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Tokens are sorted by expert, their routing weights are not."""

    def run(x: Tensor, indices: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        return grouped(x, indices, _misplaced(indices, weights), *rest)

    return run


def _misplaced(indices: Tensor, weights: Tensor) -> Tensor:
    """Weights whose sorted order is the unsorted one."""
    order = indices.flatten().argsort(stable=True)
    return torch.empty_like(weights).flatten().index_put((order,), weights.flatten()).view_as(weights)


def _unsorted_weights_there(_module: Any, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return forward(x, indices, _misplaced(indices, weights) if x.dtype is torch.float32 else weights)

    return run


def _routed(config: DecoderConfig) -> bool:
    return config.moe is not None


BUGS = (
    PlantedBug(
        id="H48a_rope_table_in_bf16",
        cause="cos and sin pass through bfloat16 unless the model runs in float64",
        level="V6",
        ours=patch("bestiary.models.layers.rotary:RotaryTable.__call__", _narrow_tables),
        reference=replay.forwards(replay.rotaries, lambda _module, forward: _narrow_tables(forward)),
    ),
    PlantedBug(
        id="H48b_norm_weight_in_bf16",
        cause="the weights of norms pass through bfloat16 unless the model runs in float64",
        level="V6",
        ours=patch("bestiary.models.layers.norm:rms_norm", _narrow_norm),
        reference=replay.tensors(replay.norms, _rounded, "weight"),
    ),
    PlantedBug(
        id="M48c_grouped_weights_unsorted",
        cause="the grouped expert kernel pairs sorted tokens with unsorted routing weights",
        level="V6",
        applies=_routed,
        ours=patch("bestiary.kernels.experts:_grouped", _unsorted_weights),
        reference=replay.forwards(replay.experts, _unsorted_weights_there),
    ),
)
