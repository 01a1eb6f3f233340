"""Bugs that only a run in bfloat16 shows: a step that must be wider, or in another order, where the model is narrow.

In float32 and float64 each of them computes what it should. A replay in the reference would agree up to rounding only,
so a check of the module that is concerned names the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bestiary.models.config import DecoderConfig, NormCast
from bestiary.verify.planted.bug import PlantedBug
from bestiary.verify.planted.patching import adapted, patch

_TABLE = "bestiary.models.layers.rotary:RotaryTable.__call__"
_NORM = "bestiary.models.layers.norm:rms_norm"
Tables = Callable[..., tuple[Tensor, Tensor]]
Norm = Callable[..., Tensor]


def _rotates(config: DecoderConfig) -> bool:
    return any(config.rope_of(index) is not None for index in range(config.num_hidden_layers))


def _scaled_before_the_cast(config: DecoderConfig) -> bool:
    return config.norm.cast is NormCast.SCALE_THEN_CAST


def _adds_one(config: DecoderConfig) -> bool:
    return config.norm.plus_one


def _rounds_its_multiplier(config: DecoderConfig) -> bool:
    return config.embedding_multiplier_in_weight_dtype


def _where_narrow(angles: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tables], Tables]:
    """Tables of `angles(positions, frequencies)` where the model runs in bfloat16."""

    def wrap(tables: Tables) -> Tables:
        def call(self: Any, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            if dtype is not torch.bfloat16:
                return tables(self, position_ids, dtype)
            frequencies, factor = self.frequencies(position_ids, torch.float32)
            turned = angles(position_ids[..., None], frequencies)
            return (turned.cos() * factor).to(dtype), (turned.sin() * factor).to(dtype)

        return call

    return wrap


def _narrow_angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    return (positions * frequencies).to(torch.bfloat16)


def _narrow_frequencies(positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions * frequencies.to(torch.bfloat16).float()


def _narrow_norm(norm: Norm) -> Norm:
    def run(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, **cast: bool) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return norm(x, weight, eps, plus_one=plus_one, **cast)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight if plus_one else weight)

    return run


def _cast_too_early(norm: Norm) -> Norm:
    def run(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, **_cast: bool) -> Tensor:
        return norm(x, weight, eps, plus_one=plus_one, scale_then_cast=False)

    return run


def _narrow_sum(norm: Norm) -> Norm:
    def run(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, **cast: bool) -> Tensor:
        return norm(x, 1 + weight, eps, **cast) if plus_one else norm(x, weight, eps, **cast)

    return run


BUGS = (
    PlantedBug(
        id="N01_rope_angles_in_bf16",
        cause="RoPE angles are bfloat16 numbers where the model is",
        level="V7",
        applies=_rotates,
        ours=patch(_TABLE, _where_narrow(_narrow_angles)),
        checks=("rope tables",),
    ),
    PlantedBug(
        id="N02_rope_frequencies_in_bf16",
        cause="RoPE frequencies are cast with the model",
        level="V7",
        applies=_rotates,
        ours=patch(_TABLE, _where_narrow(_narrow_frequencies)),
        checks=("rope tables",),
    ),
    PlantedBug(
        id="N03_norm_in_bf16",
        cause="norms run in bfloat16 throughout where the model does",
        level="V7",
        ours=patch(_NORM, _narrow_norm),
        checks=("/norms",),
    ),
    PlantedBug(
        id="N04_norm_cast_before_scale",
        cause="norms round before they multiply by the weight, the reference after it",
        level="V7",
        applies=_scaled_before_the_cast,
        ours=patch(_NORM, _cast_too_early),
        checks=("/norms",),
    ),
    PlantedBug(
        id="N05_one_plus_weight_in_bf16",
        cause="1 + weight of a norm is summed in the weight's dtype",
        level="V7",
        applies=_adds_one,
        ours=patch(_NORM, _narrow_sum),
        checks=("/norms",),
    ),
    PlantedBug(
        id="N06_embedding_multiplier_not_rounded",
        cause="the embedding's multiplier is not rounded to the weight's dtype first",
        level="V7",
        applies=_rounds_its_multiplier,
        ours=adapted(lambda config: config.with_(embedding_multiplier_in_weight_dtype=False)),
        checks=("/embedding",),
    ),
)
