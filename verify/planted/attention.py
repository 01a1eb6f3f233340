"""Bugs in attention: grouped heads, projections, scale, query/key norms, sinks, biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.models.config import DecoderConfig, QKNorm, QKNormSpan
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug, declares, projects_keys
from bestiary.verify.planted.patching import adapted, built, exchange, override, patch

_MODULE = "bestiary.models.layers.attention"


def grouped(config: DecoderConfig) -> bool:
    """Whether several key/value heads serve several query heads each."""
    return 1 < config.attention.num_kv_heads < config.attention.num_heads


def _head_norm(config: DecoderConfig) -> bool:
    norm = config.attention.qk_norm
    return norm is not None and norm.span is QKNormSpan.HEAD


def _early_norm(config: DecoderConfig) -> bool:
    norm = config.attention.qk_norm
    return _head_norm(config) and norm is not None and not norm.after_rope


def _own_scale(config: DecoderConfig) -> bool:
    return abs(config.attention.scale - config.attention.head_dim**-0.5) > 1e-9


def _wide_heads(config: DecoderConfig) -> bool:
    heads = config.attention
    return not _own_scale(config) and heads.num_heads * heads.head_dim != config.hidden_size


# ------------------------------------------------------------------ grouped heads, k and v


def tiled(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention whose query head i reads key/value head i mod h_kv."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        return attend(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), mask, **options)

    return attention


# ------------------------------------------------------------------ scale


def _rescaled(scale: Callable[[DecoderConfig], float]) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: config.with_(attention=replace(config.attention, scale=scale(config)))


# ------------------------------------------------------------------ query and key norms


def _late_norm(config: DecoderConfig) -> DecoderConfig:
    heads = config.attention
    return config.with_(attention=replace(heads, qk_norm=replace(heads.qk_norm or QKNorm(), after_rope=True)))


@contextmanager
def _late_norm_in_reference(model: nn.Module) -> Iterator[nn.Module]:
    """The norms stand idle where they are, and act on what attention is given."""
    norms = {id(module): (module.q_norm.forward, module.k_norm.forward) for module in replay.attentions(model)}

    def late(attend: Callable[..., Any]) -> Callable[..., Any]:
        def attention(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            q_norm, k_norm = norms[id(module)]
            return attend(module, q_norm(query), k_norm(key), *args, **kwargs)

        return attention

    idle = replay.forwards(replay.qk_norms, lambda _module, _forward: lambda x: x)
    with idle(model), replay.library("eager_attention_forward", late)(model):
        yield model


def _q_and_k_norms(model: nn.Module) -> list[tuple[Any, Any]]:
    norms = replay.qk_norms(model)
    return list(zip(norms[::2], norms[1::2], strict=True))


def _over_all_heads(heads_axis: Callable[[Tensor], int], x: Tensor, eps: float, normed: Tensor) -> Tensor:
    """`normed`, with the root taken over heads and head_dim together instead of head_dim alone."""
    own = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    joint = torch.rsqrt(x.pow(2).mean((heads_axis(x), -1), keepdim=True) + eps)
    return normed / own * joint


def _joint_norm(attention: Any) -> None:
    for norm in (attention.q_norm, attention.k_norm):
        forward = norm.forward
        override(
            norm,
            lambda x, forward=forward, eps=norm.config.eps: _over_all_heads(lambda _x: 1, x, eps, forward(x)),
        )


def _joint_norm_in_reference(module: Any, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    eps = vars(module).get("variance_epsilon", vars(module).get("eps"))
    # (B, T, heads, d) or (B, heads, T, d): the probe has more tokens than heads
    return lambda x: _over_all_heads(lambda y: 1 if y.shape[1] < y.shape[2] else 2, x, eps, forward(x))


def _idle_norms(attention: Any) -> None:
    override(attention.q_norm, lambda x: x)
    override(attention.k_norm, lambda x: x)


# ------------------------------------------------------------------ sinks and biases


def _without_sinks(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **options: attend(*args, **{**options, "sinks": None})


def _mean_sink(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(*args: Any, sinks: Tensor, **options: Any) -> Tensor:
        return attend(*args, sinks=sinks.mean().expand_as(sinks), **options)

    return attention


def _without_score_cap(config: Any) -> None:
    config.attn_logit_softcapping = None


def _projections(model: nn.Module) -> list[Any]:
    return replay.ending("q_proj", "k_proj", "v_proj", "o_proj")(model)


def _without_bias(attention: Any) -> None:
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        override(linear, lambda x, linear=linear: F.linear(x, linear.weight))


# ------------------------------------------------------------------ dropout


def _dropping_in_eval(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        before, self.training = self.training, True
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.training = before

    return run


def _drops_values(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, *, dropout: float, **options: Any) -> Tensor:
        return F.dropout(attend(q, k, v, mask, **options), dropout)

    return attention


def _keeps_the_size(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, dropout, **options: attend(*args, dropout=dropout, **options) * (1 - dropout)


def _dropout(id: str, cause: str, ours: Plant) -> PlantedBug:
    return PlantedBug(
        id=id,
        cause=cause,
        level="V3",
        serves=declares("attention_dropout"),
        ours=ours,
        config_fields=("attention_dropout",),
        checks=("attention_dropout",),
        quick=("attention_dropout=*",),
    )


def _swap_k_v(attention: Any) -> None:
    exchange(attention.k_proj, attention.v_proj)


def _swap_q_k_norm(attention: Any) -> None:
    exchange(attention.q_norm, attention.k_norm)


BUGS = (
    PlantedBug(
        id="C02_gqa_tiled",
        cause="key/value heads are tiled over the query heads instead of each serving a run of neighbours",
        level="V2",
        applies=grouped,
        ours=patch(f"{_MODULE}:attention", tiled),
        reference=replay.library("repeat_kv", lambda _: lambda x, groups: x.repeat(1, groups, 1, 1)),
        config_fields=("num_key_value_heads",),
    ),
    PlantedBug(
        id="C04_k_v_swapped",
        cause="the key projection is used for values and the value projection for keys",
        level="V2",
        applies=projects_keys,
        ours=built(f"{_MODULE}:SelfAttention", _swap_k_v),
        reference=replay.exchanged(lambda model: [(m.k_proj, m.v_proj) for m in replay.attentions(model)]),
    ),
    PlantedBug(
        id="C52a_scale_from_hidden_size",
        cause="attention is scaled by (hidden_size / heads)^-0.5 instead of head_dim^-0.5",
        level="V2",
        applies=_wide_heads,
        ours=adapted(_rescaled(lambda c: (c.hidden_size / c.attention.num_heads) ** -0.5)),
        reference=replay.attributes(
            replay.attentions,
            lambda m: (m.config.hidden_size / m.config.num_attention_heads) ** -0.5,
            "scaling",
        ),
        config_fields=("head_dim",),
    ),
    PlantedBug(
        id="G24_scale_from_head_dim",
        cause="attention is scaled by head_dim^-0.5 although the config names another scalar",
        level="V2",
        applies=_own_scale,
        ours=adapted(_rescaled(lambda c: c.attention.head_dim**-0.5)),
        reference=replay.attributes(replay.attentions, lambda m: m.head_dim**-0.5, "scaling"),
        config_fields=("query_pre_attn_scalar",),
    ),
    PlantedBug(
        id="Q19_qk_norm_after_rope",
        cause="queries and keys are normalised after RoPE instead of before",
        level="V2",
        applies=_early_norm,
        ours=adapted(_late_norm),
        reference=_late_norm_in_reference,
    ),
    PlantedBug(
        id="Q20_qk_norm_over_all_heads",
        cause="the query/key norm takes its root over all heads together instead of each head alone",
        level="V2",
        applies=_head_norm,
        ours=built(f"{_MODULE}:SelfAttention", _joint_norm),
        reference=replay.forwards(replay.qk_norms, _joint_norm_in_reference),
    ),
    PlantedBug(
        id="Q21a_qk_norm_skipped",
        cause="queries and keys are not normalised",
        level="V2",
        applies=_head_norm,
        ours=built(f"{_MODULE}:SelfAttention", _idle_norms),
        reference=replay.forwards(replay.qk_norms, lambda _module, _forward: lambda x: x),
    ),
    PlantedBug(
        id="Q21b_q_and_k_norm_swapped",
        cause="the query norm is applied to keys and the key norm to queries",
        level="V2",
        applies=_head_norm,
        ours=built(f"{_MODULE}:SelfAttention", _swap_q_k_norm),
        reference=replay.exchanged(_q_and_k_norms),
    ),
    PlantedBug(
        id="O39a_sinks_ignored",
        cause="the attention sinks take no share of the softmax",
        level="V2",
        applies=lambda config: config.attention.sinks,
        ours=patch(f"{_MODULE}:attention", _without_sinks),
        reference=replay.tensors(replay.holding("sinks"), lambda sinks: torch.full_like(sinks, -1e30), "sinks"),
    ),
    PlantedBug(
        id="O39b_one_sink_for_all_heads",
        cause="every head uses the mean of the sinks instead of its own",
        level="V2",
        applies=lambda config: config.attention.sinks,
        ours=patch(f"{_MODULE}:attention", _mean_sink),
        reference=replay.tensors(replay.holding("sinks"), lambda sinks: sinks.mean().expand_as(sinks).clone(), "sinks"),
    ),
    PlantedBug(
        id="P29_score_soft_cap_ignored",
        cause="the soft cap on attention's scores is not applied",
        level="V2",
        applies=lambda config: config.attention.logit_softcap is not None,
        ours=adapted(lambda config: config.with_(attention=replace(config.attention, logit_softcap=None))),
        reference=replay.configured(_without_score_cap),
        config_fields=("attn_logit_softcapping",),
    ),
    PlantedBug(
        id="O53_attention_bias_skipped",
        cause="the attention projections leave out their biases",
        level="V2",
        applies=lambda config: config.attention.qkv_bias,
        ours=built(f"{_MODULE}:SelfAttention", _without_bias),
        reference=replay.tensors(_projections, torch.zeros_like, "bias"),
        config_fields=("attention_bias",),
    ),
    _dropout(
        "C59a_attention_dropout_ignored",
        "attention_dropout is accepted and ignored",
        adapted(lambda config: config.with_(attention=replace(config.attention, dropout=0.0))),
    ),
    _dropout(
        "C59b_attention_dropout_in_eval",
        "attention drops weights in eval mode too",
        patch(f"{_MODULE}:SelfAttention.forward", _dropping_in_eval),
    ),
    _dropout(
        "C59c_attention_dropout_on_the_values",
        "dropout falls on what attention returns instead of the softmax weights",
        patch(f"{_MODULE}:attention", _drops_values),
    ),
    _dropout(
        "C59d_attention_dropout_not_made_up_for",
        "the weights that dropout keeps do not grow by 1 / (1 − p)",
        patch(f"{_MODULE}:attention", _keeps_the_size),
    ),
)
