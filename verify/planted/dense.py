"""Bugs in the dense MLP, the embedding, the head and the order of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bestiary.models.config import Activation, DecoderConfig
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug, ReferencePlant, everywhere
from bestiary.verify.planted.patching import adapted, built, exchange, override, patch, together

_HEAD = "bestiary.models.layers.head:Head"
_BACKBONE = "bestiary.models.decoder:Backbone"


def _dense(config: DecoderConfig) -> bool:
    return config.mlp_gated and any(not config.is_moe_layer(index) for index in range(config.num_hidden_layers))


def _activated(activation: Activation) -> Callable[[DecoderConfig], bool]:
    return lambda config: config.activation is activation and (config.moe is None or config.moe.clamp is None)


def _swapped_gate(gated: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda gate, up, *rest: gated(up, gate, *rest)


def _swapped_gate_there(mlp: Any, _forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))


def _swapped_fused_gate_there(mlp: Any, _forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor) -> Tensor:
        gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
        down: Tensor = mlp.down_proj(mlp.activation_fn(up) * gate)
        return down

    return forward


def _act(activation: Activation) -> tuple[Plant, ReferencePlant]:
    """Another activation than the config's."""

    def there(_module: Any) -> Any:
        from transformers.activations import ACT2FN

        return ACT2FN[str(activation)]

    def functions(model: Any) -> list[Any]:
        named = [m.act_fn for m in replay.holding("act_fn")(model)]
        named += [m.activation_fn for m in replay.holding("activation_fn")(model)]
        return list({id(one): one for one in named}.values())

    @torch.no_grad()
    def plant(model: Any) -> Any:
        chosen = there(model)
        return replay.forwards(functions, lambda _module, _forward: chosen.forward)(model)

    return adapted(lambda config: config.with_(activation=activation)), plant


# ------------------------------------------------------------------ embedding and head


def _scaled(config: DecoderConfig) -> bool:
    return config.embedding_multiplier != 1.0


def _embedding(factor: Callable[[float], float]) -> tuple[Plant, ReferencePlant]:
    """The embedding is multiplied by `factor(scale)` instead of scale."""

    def there(module: Any, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        scale = module.scalar_embed_scale
        return lambda ids: forward(ids) / scale * factor(scale)

    ours = adapted(lambda config: config.with_(embedding_multiplier=factor(config.embedding_multiplier)))
    inside = replay.forwards(replay.holding("scalar_embed_scale"), there)
    behind = replay.attributes(replay.backbone, lambda m: factor(m.embedding_multiplier), "embedding_multiplier")
    return ours, replay.also(inside, behind)


def _scaled_head(config_holder: Any) -> None:
    multiplier, head = config_holder.decoder_config.embedding_multiplier, config_holder.lm_head
    forward = head.forward
    override(head, lambda hidden, *args, **kwargs: forward(hidden * multiplier, *args, **kwargs))


def _scaled_head_there(model: Any) -> Any:
    owner = replay.embedding(model)[0]
    scale = vars(owner).get("scalar_embed_scale") or replay.backbone(model)[0].embedding_multiplier
    return replay.forwards(replay.head, lambda _module, forward: lambda x: forward(x * scale))(model)


def _capped(config: DecoderConfig) -> bool:
    return config.final_logit_softcap is not None


def _clamped_logits(logits: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def head_logits(hidden: Tensor, weight: Tensor, *, divisor: float = 1.0, softcap: float | None = None) -> Tensor:
        values = logits(hidden, weight, divisor=divisor)
        return values if softcap is None else values.clamp(-softcap, softcap)

    return head_logits


def without_cap(config: Any) -> None:
    """A Hugging Face config without its soft cap on the logits."""
    if "final_logit_softcapping" in config.to_dict():
        config.final_logit_softcapping = None


def _clamped_there(model: Any) -> Any:
    cap = model.config.final_logit_softcapping
    uncapped = replay.configured(without_cap)
    clamp = replay.forwards(replay.head, lambda _module, forward: lambda x: forward(x).clamp(-cap, cap))
    return replay.also(uncapped, clamp)(model)


# ------------------------------------------------------------------ layers


def _last_layer_idle(backbone: Any) -> None:
    override(backbone.layers[-1], lambda x, *_rest: (x, None))


def _first_two(backbone: Any) -> None:
    exchange(backbone.layers[0], backbone.layers[1])


_ACT_GELU, _ACT_TANH = _act(Activation.GELU), _act(Activation.GELU_TANH)
_UNSCALED, _SQUARED = _embedding(lambda _: 1.0), _embedding(lambda scale: scale * scale)

BUGS = (
    PlantedBug(
        id="C01_gate_up_swapped",
        cause="the activation acts on up instead of gate",
        level="V2",
        applies=_dense,
        ours=together(
            patch("bestiary.models.layers.mlp:gated", _swapped_gate),
            patch("bestiary.models.layers.mlp:gated_linear", _swapped_gate),
        ),
        reference=replay.also(
            replay.forwards(replay.dense_mlps, _swapped_gate_there),
            replay.forwards(replay.fused_mlps, _swapped_fused_gate_there),
        ),
    ),
    PlantedBug(
        id="C11a_gelu_exact_for_tanh",
        cause="gelu is computed exactly instead of by its tanh approximation",
        level="V2",
        applies=_activated(Activation.GELU_TANH),
        ours=_ACT_GELU[0],
        reference=_ACT_GELU[1],
        config_fields=("hidden_activation", "hidden_act"),
    ),
    PlantedBug(
        id="C11b_gelu_for_silu",
        cause="the activation is gelu instead of silu",
        level="V2",
        applies=_activated(Activation.SILU),
        ours=_ACT_TANH[0],
        reference=_ACT_TANH[1],
        config_fields=("hidden_act",),
    ),
    PlantedBug(
        id="G26a_embedding_scale_missing",
        cause="embeddings are not multiplied by their scale",
        level="V2",
        applies=_scaled,
        ours=_UNSCALED[0],
        reference=_UNSCALED[1],
    ),
    PlantedBug(
        id="G26b_embedding_scale_twice",
        cause="embeddings are multiplied by their scale twice",
        level="V2",
        applies=_scaled,
        ours=_SQUARED[0],
        reference=_SQUARED[1],
    ),
    PlantedBug(
        id="G26c_embedding_scale_in_the_head",
        cause="the head multiplies by the scale of the embeddings too",
        level="V2",
        applies=_scaled,
        ours=built("bestiary.models.decoder:Decoder", _scaled_head),
        reference=_scaled_head_there,
    ),
    PlantedBug(
        id="G29a_final_soft_cap_ignored",
        cause="the soft cap on the logits is not applied",
        level="V2",
        applies=_capped,
        ours=adapted(lambda config: config.with_(final_logit_softcap=None)),
        reference=replay.configured(without_cap),
        config_fields=("final_logit_softcapping",),
    ),
    PlantedBug(
        id="G29b_final_soft_cap_clamps",
        cause="logits are clamped at the soft cap instead of bent by tanh",
        level="V2",
        applies=_capped,
        ours=patch("bestiary.models.layers.head:head_logits", _clamped_logits),
        reference=_clamped_there,
        config_fields=("final_logit_softcapping",),
    ),
    PlantedBug(
        id="C14b_last_layer_dropped",
        cause="the last layer does not run",
        level="V2",
        applies=everywhere,
        ours=built(_BACKBONE, _last_layer_idle),
        reference=replay.forwards(
            lambda model: replay.layers(model)[-1:], lambda _module, _forward: lambda x, *_args, **_kwargs: x
        ),
    ),
    PlantedBug(
        id="C14c_two_layers_swapped",
        cause="the first two layers have each other's weights",
        level="V2",
        ours=built(_BACKBONE, _first_two),
        reference=replay.exchanged(lambda model: [(replay.layers(model)[0], replay.layers(model)[1])]),
    ),
)
