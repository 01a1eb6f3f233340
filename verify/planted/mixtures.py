"""Bugs of mixtures that have more than routed experts, and of what stands around them: shared experts, clips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.models.config import DecoderConfig
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import PlantedBug
from bestiary.verify.planted.patching import adapted, built, override

_BLOCK = "bestiary.models.layers.moe:MoEBlock"
_shared_experts = replay.ending("shared_expert", "shared_experts")


def _shares(config: DecoderConfig) -> bool:
    return config.moe is not None and config.moe.shared is not None


def _gates_what_is_shared(config: DecoderConfig) -> bool:
    return config.moe is not None and config.moe.shared is not None and config.moe.shared.gated


def _clips(config: DecoderConfig) -> bool:
    return config.attention.qkv_clip is not None


def _silent(block: Any) -> None:
    if block.shared_expert is not None:
        override(block.shared_expert, torch.zeros_like)


def _open(block: Any) -> None:
    if block.shared_expert_gate is not None:
        override(block.shared_expert_gate, _wide_open)


def _wide_open(x: Tensor) -> Tensor:
    """A logit whose sigmoid is one."""
    return torch.full_like(x[..., :1], 1e3)


def _config(model: nn.Module) -> list[Any]:
    return [model.config]


def _answers(value: Callable[[Tensor], Tensor]) -> Callable[..., Callable[[Tensor], Tensor]]:
    return lambda _module, _forward: value


BUGS = (
    PlantedBug(
        id="E21_qkv_clip_ignored",
        cause="queries, keys and values are not clipped",
        level="V2",
        applies=_clips,
        ours=adapted(lambda config: config.with_(attention=replace(config.attention, qkv_clip=None))),
        reference=replay.attributes(_config, lambda _: None, "clip_qkv"),
        config_fields=("clip_qkv",),
    ),
    PlantedBug(
        id="E35a_shared_expert_missing",
        cause="the shared expert adds nothing to the routed ones",
        level="V2",
        applies=_shares,
        ours=built(_BLOCK, _silent),
        reference=replay.forwards(_shared_experts, _answers(torch.zeros_like)),
    ),
    PlantedBug(
        id="E35b_shared_expert_gate_missing",
        cause="the shared expert is added whole instead of weighed by its sigmoid",
        level="V2",
        applies=_gates_what_is_shared,
        ours=built(_BLOCK, _open),
        reference=replay.forwards(replay.ending("shared_expert_gate"), _answers(_wide_open)),
    ),
)
