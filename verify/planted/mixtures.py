"""Bugs of GLM-4.5, DeepSeek-V3 and others: shared experts, sigmoid routers with groups, latent attention, clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.models.config import DecoderConfig, Router, RouterKind
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug
from bestiary.verify.planted.patching import adapted, built, override, patch

_BLOCK = "bestiary.models.layers.moe:MoEBlock"
_shared_experts = replay.ending("shared_expert", "shared_experts")


def _shares(config: DecoderConfig) -> bool:
    return config.moe is not None and config.moe.shared is not None


def _gates_what_is_shared(config: DecoderConfig) -> bool:
    return config.moe is not None and config.moe.shared is not None and config.moe.shared.gated


def _sigmoid(config: DecoderConfig) -> bool:
    return config.moe is not None and config.moe.router.kind is RouterKind.SIGMOID


def _grouped(config: DecoderConfig) -> bool:
    return _sigmoid(config) and config.moe is not None and config.moe.router.num_groups > 1


def _latent(config: DecoderConfig) -> bool:
    return config.attention.mla is not None


def _routed_by(change: Callable[[Router], Router]) -> Plant:
    """The adapter gets the router wrong."""

    def wrong(config: DecoderConfig) -> DecoderConfig:
        moe = config.moe
        return config if moe is None else config.with_(moe=replace(moe, router=change(moe.router)))

    return adapted(wrong)


def _without_groups(router: Router) -> Router:
    return replace(router, num_groups=1, topk_groups=1)


def _without_correction(route: Callable[..., Any]) -> Callable[..., Any]:
    def routed(self: Any, x: Tensor) -> Any:
        with _correction(self, torch.zeros_like):
            return route(self, x)

    return routed


@contextmanager
def _correction(router: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The correction bias of a router, ours or theirs, holds `change(values)`."""
    before = router.e_score_correction_bias.data
    router.e_score_correction_bias.data = change(before)
    try:
        yield
    finally:
        router.e_score_correction_bias.data = before


def _biased(router: Any, route: Callable[[Tensor], Any], normalize: bool, scale: float) -> Callable[[Tensor], Any]:
    """A router, ours or theirs, that weighs by the scores it chooses by."""

    def routed(x: Tensor) -> Any:
        logits, _, indices = route(x)
        chosen = (logits.sigmoid() + router.e_score_correction_bias).gather(1, indices)
        return logits, chosen / chosen.sum(-1, keepdim=True) * scale if normalize else chosen * scale, indices

    return routed


def _weigh_by_choice(router: Any) -> None:
    override(router, _biased(router, router.forward, router.config.normalize, router.config.scale))


def _weigh_by_choice_there(router: Any, route: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return _biased(router, route, router.norm_topk_prob, router.routed_scaling_factor)


def _keys_stand(turned: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, q, k, rope: (turned(self, q, k, rope)[0], k)


def _keys_stand_there(turned: Callable[..., Any]) -> Callable[..., Any]:
    """The pairs of the keys come apart as those of the queries do, and are not turned."""
    return lambda q, k, *args, **kwargs: (
        turned(q, k, *args, **kwargs)[0],
        torch.cat((k[..., 0::2], k[..., 1::2]), dim=-1),
    )


def _plain_scale(config: DecoderConfig) -> DecoderConfig:
    heads = config.attention
    return config.with_(attention=replace(heads, scale=heads.head_dim**-0.5))


def _idle_latent_norm(attention: Any) -> None:
    override(attention.kv_a_layernorm, lambda x: x)


def _latent_eps(config: DecoderConfig) -> DecoderConfig:
    heads = config.attention
    if heads.mla is None:
        return config
    return config.with_(attention=replace(heads, mla=replace(heads.mla, norm_eps=config.norm.eps)))


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
        id="D34a_correction_bias_ignored",
        cause="the correction bias takes no part in the choice of experts",
        level="V2",
        applies=_sigmoid,
        ours=patch("bestiary.models.layers.moe:Router._sigmoid", _without_correction),
        reference=replay.tensors(replay.routers, torch.zeros_like, "e_score_correction_bias"),
    ),
    PlantedBug(
        id="D34b_correction_bias_in_the_weights",
        cause="the correction bias counts in the weights of the chosen experts and not only in their choice",
        level="V2",
        applies=_sigmoid,
        ours=built("bestiary.models.layers.moe:Router", _weigh_by_choice),
        reference=replay.forwards(replay.routers, _weigh_by_choice_there),
    ),
    PlantedBug(
        id="D34c_routed_scale_ignored",
        cause="the routed experts are not multiplied by routed_scaling_factor",
        level="V2",
        applies=lambda config: _sigmoid(config) and config.moe is not None and config.moe.router.scale != 1.0,
        ours=_routed_by(lambda router: replace(router, scale=1.0)),
        reference=replay.attributes(replay.routers, lambda _: 1.0, "routed_scaling_factor"),
        config_fields=("routed_scaling_factor",),
    ),
    PlantedBug(
        id="D34d_groups_ignored",
        cause="experts are chosen among all instead of inside the chosen groups",
        level="V2",
        applies=_grouped,
        ours=_routed_by(_without_groups),
        reference=replay.attributes(replay.routers, lambda module: module.num_group, "topk_group"),
        config_fields=("n_group", "topk_group"),
    ),
    PlantedBug(
        id="L19_rope_on_queries_alone",
        cause="the part of the keys that all heads share is not turned",
        level="V2",
        applies=_latent,
        ours=patch("bestiary.models.layers.attention:SelfAttention._turned", _keys_stand),
        reference=replay.library("apply_rotary_pos_emb_interleave", _keys_stand_there),
    ),
    PlantedBug(
        id="L21_latent_norm_skipped",
        cause="the latent of keys and values is not normalised",
        level="V2",
        applies=_latent,
        ours=built("bestiary.models.layers.attention:SelfAttention", _idle_latent_norm),
        reference=replay.forwards(replay.ending("kv_a_layernorm"), _answers(lambda x: x)),
    ),
    PlantedBug(
        id="L08_latent_norms_use_the_config_eps",
        cause="the norms of the latents use the config's eps instead of their own",
        level="V2",
        applies=lambda config: _latent(config) and config.norm.eps > 1e-4,
        ours=adapted(_latent_eps),
        reference=replay.attributes(
            replay.ending("q_a_layernorm", "kv_a_layernorm"), lambda _: 1e-3, "variance_epsilon"
        ),
    ),
    PlantedBug(
        id="L40_mscale_missing_in_the_scale",
        cause="YaRN's mscale_all_dim does not enter the softmax scale",
        level="V3",
        applies=_latent,
        ours=adapted(_plain_scale),
        config_fields=("rope_parameters.mscale_all_dim",),
        checks=("mscale",),
        quick=("*mscale*",),
    ),
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
