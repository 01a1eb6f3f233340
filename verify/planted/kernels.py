"""Bugs of optimised implementations alone, and of the dispatch between them: what level K is for.

Hugging Face's model has no such place, so the check that fails names the cause: its id holds the implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bestiary.kernels.dispatch import OPERATIONS
from bestiary.models.config import DecoderConfig, LayerType
from bestiary.verify.planted.bug import PlantedBug
from bestiary.verify.planted.patching import patch, together

_ATTENTION = "bestiary.kernels.attention"
_LEAN = "bestiary.kernels.lean"


def _windowed(config: DecoderConfig) -> bool:
    return LayerType.SLIDING in config.layer_types


def _fused_scores(config: DecoderConfig) -> bool:
    """Whether attention has a form on CPUs beside the plain one: a soft cap on scores leaves none."""
    return config.attention.logit_softcap is None


def _gated_plainly(config: DecoderConfig) -> bool:
    return config.mlp_gated and (config.moe is None or config.moe.clamp is None)


def _dense(config: DecoderConfig) -> bool:
    return config.mlp_gated and any(not config.is_moe_layer(index) for index in range(config.num_hidden_layers))


def _wider_window(attend: Callable[..., Any]) -> Callable[..., Any]:
    def attention(*tensors: Tensor, window: int | None, **options: Any) -> Any:
        return attend(*tensors, window=None if window is None else window + 1, **options)

    return attention


def _unbent(_bend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The derivative of the soft cap is taken to be that of a straight line."""
    return lambda logits, outer, out: out.fill_(outer)


def _last_expert_lost(grouped: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Any, *rest: Any) -> Tensor:
        lost = indices == gate_up.weight.shape[0] - 1
        return grouped(x, indices, weights.masked_fill(lost, 0.0), gate_up, *rest)

    return run


def _without_projection(backward: Callable[..., Any]) -> Any:
    """The mean of squares is taken for a constant."""

    def gradients(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        for_x, *rest = backward(ctx, *upstream)
        x, weight, root = ctx.saved_tensors
        scale = 1.0 + weight if ctx.plus_one else weight
        return None if for_x is None else (upstream[0] * scale * root).to(x.dtype), *rest

    return staticmethod(gradients)


def _gate_for_up(backward: Callable[..., Any]) -> Any:
    """The gradients of gate and up change places."""

    def gradients(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        for_gate, for_up, *rest = backward(ctx, *upstream)
        return for_up, for_gate, *rest

    return staticmethod(gradients)


def _unscaled_adapter(gradients: Callable[..., Any]) -> Callable[..., Any]:
    def unscaled(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *others, for_B = gradients(ctx, upstream)
        return *others, None if for_B is None else for_B / ctx.scaling

    return unscaled


def _always_reference(_choice: Callable[..., str]) -> Callable[..., str]:
    def reference(operation: str, obstacles: Mapping[str, str | None]) -> str:
        return OPERATIONS[operation].reference

    return reference


smaller_chunks = together(
    patch("bestiary.kernels.attention_documents:BLOCK", lambda _: 24),
    patch("bestiary.kernels.vocab_tiles:COLUMNS", lambda _: 448),
    patch("bestiary.kernels.vocab_tiles:ROWS", lambda _: 96),
    patch("bestiary.kernels.vocab_tiles:HELD_ROWS", lambda _: (64, 96, 128)),
)
"""No bug: blocks of queries, tiles of the vocabulary and chunks of tokens of other sizes."""


BUGS = (
    PlantedBug(
        id="K01_document_window_plus_one",
        cause="attention by documents sees one token more than the window, other implementations do not",
        level="K",
        applies=lambda config: _windowed(config) and _fused_scores(config),
        ours=patch(f"{_ATTENTION}:document_attention", _wider_window),
        checks=("attention=documents/",),
        quick=("vocab+0/attention=documents/loss/*",),
    ),
    PlantedBug(
        id="K02_soft_cap_missing_in_chunked_backward",
        cause="the chunked log-prob core forgets the soft cap in its backward pass",
        level="K",
        applies=lambda config: config.final_logit_softcap is not None,
        ours=patch("bestiary.kernels.log_prob_gradients:bend", _unbent),
        checks=("log_prob=chunked/",),
        quick=("vocab+0/log_prob=chunked/loss/*",),
    ),
    PlantedBug(
        id="K03_last_expert_lost_in_grouped",
        cause="the grouped expert kernel drops the rows of the last expert",
        level="K",
        applies=lambda config: config.moe is not None,
        ours=patch("bestiary.kernels.experts:_grouped", _last_expert_lost),
        checks=("experts=grouped/",),
        quick=("vocab+0/experts=grouped/loss/*",),
    ),
    PlantedBug(
        id="K04_lean_norm_without_projection",
        cause="the recomputing norm leaves the mean of squares out of its gradient",
        level="K",
        applies=lambda config: not config.norm.subtract_mean,
        ours=patch(f"{_LEAN}:LeanRMSNorm.backward", _without_projection),
        checks=("norm=lean/",),
        quick=("vocab+0/norm=lean/*",),
    ),
    PlantedBug(
        id="K05_lean_gate_and_up_gradients_swapped",
        cause="the recomputing activation swaps the gradients of gate and up",
        level="K",
        applies=_gated_plainly,
        ours=patch(f"{_LEAN}:LeanGated.backward", _gate_for_up),
        checks=("activation=lean/",),
        quick=("vocab+0/activation=lean/*",),
    ),
    PlantedBug(
        id="K05b_lean_gated_linear_gradients_swapped",
        cause="activation and product as one function swap the gradients of gate and up",
        level="K",
        applies=_dense,
        ours=patch("bestiary.kernels.gated_linear:_GatedLinear.backward", _gate_for_up),
        checks=("gated_linear=lean/",),
        quick=("vocab+1/gated_linear=lean/*",),  # where families with experts have a dense layer too
    ),
    PlantedBug(
        id="K06_fused_adapter_gradient_unscaled",
        cause="the fused linear layer leaves the scaling out of the gradient of lora_B",
        level="K",
        ours=patch("bestiary.kernels.lora_linear:_gradients", _unscaled_adapter),
        checks=("lora_linear=fused/",),
        quick=("vocab+0/lora_linear=fused/*",),
    ),
    PlantedBug(
        id="K07a_dispatch_always_picks_the_reference",
        cause="dispatch runs the reference whatever is asked for",
        level="K",
        ours=patch("bestiary.kernels.dispatch:_choice", _always_reference),
        checks=("never ran",),
        quick=("dispatch/norm=lean",),
    ),
    PlantedBug(
        id="K07b_documents_always_refused",
        cause="attention by documents says that it cannot run wherever it is asked for",
        level="K",
        applies=_fused_scores,
        ours=patch(f"{_ATTENTION}:_documents_obstacle", lambda _obstacle: lambda *_args: "it is not ready"),
        checks=("attention = 'documents' cannot run",),
        quick=("vocab+0/attention=documents/loss/*",),
    ),
    PlantedBug(
        id="K07c_eager_attention_preferred",
        cause="dispatch prefers eager attention to the implementations that are faster",
        level="K",
        applies=_fused_scores,
        ours=patch(
            f"{_ATTENTION}:_fastest_first", lambda _order: lambda *_args: ("eager", "sdpa", "documents", "flex")
        ),
        checks=("attention runs eager",),
        quick=("dispatch/preferred",),
    ),
)
