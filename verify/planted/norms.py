"""Bugs in norms and residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bestiary.models.config import DecoderConfig, NormPlacement
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug, ReferencePlant
from bestiary.verify.planted.patching import adapted, built, exchange, override, patch

_BLOCK = "bestiary.models.decoder:Block"
_BACKBONE = "bestiary.models.decoder:Backbone"
_EPS = ("eps", "variance_epsilon")
_HARD = 1e-6


def _centres(config: DecoderConfig) -> bool:
    return config.norm.subtract_mean


def _placed(placement: NormPlacement) -> Callable[[DecoderConfig], bool]:
    return lambda config: config.norm.placement is placement


def _large_eps(config: DecoderConfig) -> bool:
    return config.norm.eps != _HARD


def _hard_eps(norm: Any) -> None:
    norm.config = replace(norm.config, eps=_HARD)


def _hard_eps_in_heads(attention: Any) -> None:
    _hard_eps(attention.q_norm)
    _hard_eps(attention.k_norm)


def _skip(*names: str) -> tuple[Plant, ReferencePlant]:
    """The norms called `names` of each block do nothing."""

    def idle(block: Any) -> None:
        for name in names:
            override(getattr(block, name), lambda x: x)

    there = replay.forwards(replay.ending(*names), lambda _module, _forward: lambda x: x)
    return built(_BLOCK, idle), there


def _swap(first: str, second: str) -> tuple[Plant, ReferencePlant]:
    """Two norms of each block stand in each other's place."""
    there = replay.exchanged(lambda model: [(getattr(m, first), getattr(m, second)) for m in replay.layers(model)])
    return built(_BLOCK, lambda block: exchange(getattr(block, first), getattr(block, second))), there


def _twice(backbone: Any) -> None:
    forward = backbone.norm.forward
    override(backbone.norm, lambda x: forward(forward(x)))


# ------------------------------------------------------------------ the residual taken after the norm


def _residual_after_norm(block: Any) -> None:
    forward, norm = block.forward, block.input_layernorm.forward
    override(block.input_layernorm, lambda x: x)
    override(block, lambda x, *rest: forward(norm(x), *rest))


def _normed_input(model: Any) -> list[tuple[Any, Callable[..., Tensor]]]:
    return [(layer, layer.input_layernorm.forward) for layer in replay.layers(model)]


def _residual_after_norm_there(model: Any) -> Any:
    norms = {id(layer): norm for layer, norm in _normed_input(model)}

    def wrap(layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *args, **kwargs: forward(norms[id(layer)](x), *args, **kwargs)

    idle = replay.forwards(replay.ending("input_layernorm"), lambda _module, _forward: lambda x: x)
    return replay.also(idle, replay.forwards(replay.layers, wrap))(model)


# ------------------------------------------------------------------ the norm itself


def _centred(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: norm(x - x.mean(-1, keepdim=True), *args, **kwargs)


def _uncentred_there(norm: Any, _forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    eps = vars(norm).get("variance_epsilon", vars(norm).get("eps"))
    return lambda x: norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


# ------------------------------------------------------------------ attention and MLP side by side


def _one_after_the_other(block: Any) -> None:
    """The MLP takes what attention left behind, as in other blocks."""
    norm = block.input_layernorm

    def forward(x: Tensor, rope: Any, mask: Any, cache: Any = None) -> tuple[Tensor, None]:
        x = x + block.self_attn(norm(x), rope, mask, cache)
        return x + block.mlp(norm(x)), None

    override(block, forward)


def _one_after_the_other_there(layer: Any, _forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Tensor, **options: Any) -> Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **options)
        x = x + attended
        return x + layer.mlp(layer.input_layernorm(x))

    return forward


# ------------------------------------------------------------------ norms on what a branch gives


def _norm_of_the_sum(block: Any) -> None:
    def forward(x: Tensor, rope: Any, mask: Any, cache: Any = None) -> tuple[Tensor, None]:
        x = block.post_attention_layernorm(x + block.self_attn(x, rope, mask, cache))
        return x + block.post_feedforward_layernorm(block.mlp(x)), None

    override(block, forward)


def _norm_of_the_sum_there(layer: Any, _forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Tensor, **options: Any) -> Tensor:
        attended, _ = layer.self_attn(hidden_states=x, **options)
        x = layer.post_attention_layernorm(x + attended)
        return x + layer.post_feedforward_layernorm(layer.mlp(x))

    return forward


_FEED_FORWARD_SWAP = _swap("pre_feedforward_layernorm", "post_feedforward_layernorm")
_PRE_SWAP = _swap("input_layernorm", "post_attention_layernorm")
_POST_SWAP = _swap("post_attention_layernorm", "post_feedforward_layernorm")
_POST_ATTENTION_SKIP = _skip("post_attention_layernorm")
_POST_FEED_FORWARD_SKIP = _skip("post_feedforward_layernorm")

BUGS = (
    PlantedBug(
        id="C08a_eps_hard_coded",
        cause="every norm uses eps 1e-6 whatever the config says",
        level="V2",
        applies=_large_eps,
        ours=adapted(lambda config: config.with_(norm=replace(config.norm, eps=_HARD))),
        reference=replay.attributes(replay.norms, lambda _: _HARD, *_EPS),
        config_fields=("rms_norm_eps",),
    ),
    PlantedBug(
        id="C08b_qk_norm_eps_hard_coded",
        cause="query and key norms use eps 1e-6 whatever the config says",
        level="V2",
        applies=lambda config: _large_eps(config) and config.attention.qk_norm is not None,
        ours=built("bestiary.models.layers.attention:SelfAttention", _hard_eps_in_heads),
        reference=replay.attributes(replay.qk_norms, lambda _: _HARD, *_EPS),
        config_fields=("rms_norm_eps",),
    ),
    PlantedBug(
        id="C08c_final_norm_eps_hard_coded",
        cause="the final norm uses eps 1e-6 whatever the config says",
        level="V2",
        applies=_large_eps,
        ours=built(_BACKBONE, lambda backbone: _hard_eps(backbone.norm)),
        reference=replay.attributes(replay.final_norm, lambda _: _HARD, *_EPS),
        config_fields=("rms_norm_eps",),
    ),
    PlantedBug(
        id="C10a_final_norm_skipped",
        cause="there is no norm before the head",
        level="V2",
        ours=built(_BACKBONE, lambda backbone: override(backbone.norm, lambda x: x)),
        reference=replay.forwards(replay.final_norm, lambda _module, _forward: lambda x: x),
    ),
    PlantedBug(
        id="C10b_final_norm_twice",
        cause="the norm before the head is applied twice",
        level="V2",
        ours=built(_BACKBONE, _twice),
        reference=replay.forwards(replay.final_norm, lambda _module, forward: lambda x: forward(forward(x))),
    ),
    PlantedBug(
        id="C28_attention_and_mlp_norm_swapped",
        cause="the norm before attention and the norm before the MLP are exchanged",
        level="V2",
        applies=_placed(NormPlacement.PRE),
        ours=_PRE_SWAP[0],
        reference=_PRE_SWAP[1],
    ),
    PlantedBug(
        id="G28a_feed_forward_norms_swapped",
        cause="the norms before and after the MLP are exchanged",
        level="V2",
        applies=_placed(NormPlacement.SANDWICH),
        ours=_FEED_FORWARD_SWAP[0],
        reference=_FEED_FORWARD_SWAP[1],
    ),
    PlantedBug(
        id="G28b_post_attention_norm_skipped",
        cause="there is no norm on the output of attention",
        level="V2",
        applies=_placed(NormPlacement.SANDWICH),
        ours=_POST_ATTENTION_SKIP[0],
        reference=_POST_ATTENTION_SKIP[1],
    ),
    PlantedBug(
        id="G28c_post_feed_forward_norm_skipped",
        cause="there is no norm on the output of the MLP",
        level="V2",
        applies=_placed(NormPlacement.SANDWICH),
        ours=_POST_FEED_FORWARD_SKIP[0],
        reference=_POST_FEED_FORWARD_SKIP[1],
    ),
    PlantedBug(
        id="P18a_branch_norms_swapped",
        cause="the norm on attention's output and the norm on the MLP's are exchanged",
        level="V2",
        applies=_placed(NormPlacement.POST),
        ours=_POST_SWAP[0],
        reference=_POST_SWAP[1],
    ),
    PlantedBug(
        id="P18b_branch_norm_outside_the_residual",
        cause="the norm after attention is taken of the sum with the residual instead of the branch",
        level="V2",
        applies=_placed(NormPlacement.POST),
        ours=built(_BLOCK, _norm_of_the_sum),
        reference=replay.forwards(replay.layers, _norm_of_the_sum_there),
    ),
    PlantedBug(
        id="G28d_norm_weight_without_one",
        cause="norms multiply by w instead of 1 + w",
        level="V2",
        applies=lambda config: config.norm.plus_one,
        ours=adapted(lambda config: config.with_(norm=replace(config.norm, plus_one=False))),
        reference=replay.tensors(replay.norms, lambda weight: weight - 1.0, "weight"),
    ),
    PlantedBug(
        id="C58_layer_norm_for_rms_norm",
        cause="norms subtract the mean (LayerNorm instead of RMSNorm)",
        level="V2",
        applies=lambda config: not _centres(config),
        ours=patch("bestiary.models.layers.norm:rms_norm", _centred),
        reference=replay.forwards(replay.norms, lambda _module, forward: _centred(forward)),
    ),
    PlantedBug(
        id="P58_rms_norm_for_layer_norm",
        cause="norms do not subtract the mean (RMSNorm instead of LayerNorm)",
        level="V2",
        applies=_centres,
        ours=adapted(lambda config: config.with_(norm=replace(config.norm, subtract_mean=False))),
        reference=replay.forwards(replay.norms, _uncentred_there),
    ),
    PlantedBug(
        id="P54_parallel_block_in_sequence",
        cause="the MLP takes what attention left in the residual instead of standing beside it",
        level="V2",
        applies=_placed(NormPlacement.PARALLEL),
        ours=built(_BLOCK, _one_after_the_other),
        reference=replay.forwards(replay.layers, _one_after_the_other_there),
    ),
    PlantedBug(
        id="C54_residual_after_norm",
        cause="the residual of the attention branch is taken after the norm",
        level="V2",
        applies=lambda config: config.norm.placement is not NormPlacement.POST,
        ours=built(_BLOCK, _residual_after_norm),
        reference=_residual_after_norm_there,
    ),
)
