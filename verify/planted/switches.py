"""Bugs in what few families have: multipliers, layers without RoPE, dropout on branches, biases switched apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from bestiary.bridges import Bridge
from bestiary.bridges.errors import UnsupportedConfig
from bestiary.models.config import DecoderConfig, DynamicScaling
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import PlantedBug, declares
from bestiary.verify.planted.patching import adapted
from bestiary.verify.tiny import ROPE, tiny_configs

_LATE_NORMS = {"q_proj": "query_layernorm", "k_proj": "key_layernorm"}


def _forgets_alpha(config: DecoderConfig) -> DecoderConfig:
    scaling = config.rope.scaling
    if not isinstance(scaling, DynamicScaling):
        return config
    return config.with_(rope=replace(config.rope, scaling=replace(scaling, alpha=None)))


def _reads_alpha(bridge: Bridge) -> bool:
    raw = next(iter(tiny_configs(bridge.reference).values()))
    scaled = {"rope_type": "dynamic", **ROPE["dynamic"], "alpha": 70.0}
    try:
        rope = bridge.parse({**raw, "rope_parameters": scaled}).decoder.rope
    except UnsupportedConfig:
        return False
    return isinstance(rope.scaling, DynamicScaling) and rope.scaling.alpha is not None


def _late_norm(config: DecoderConfig) -> bool:
    norm = config.attention.qk_norm
    return norm is not None and norm.after_rope


def _early(config: DecoderConfig) -> DecoderConfig:
    norm = config.attention.qk_norm
    return (
        config
        if norm is None
        else config.with_(attention=replace(config.attention, qk_norm=replace(norm, after_rope=False)))
    )


@contextmanager
def _early_there(model: nn.Module) -> Iterator[nn.Module]:
    """The norms stand idle, and act on what the projections return."""
    norms: dict[int, tuple[Callable[[Tensor], Tensor], int]] = {}
    for module in replay.holding(*_LATE_NORMS, *_LATE_NORMS.values())(model):
        for projection, norm in _LATE_NORMS.items():
            norms[id(module.get_submodule(projection))] = (module.get_submodule(norm).forward, module.head_dim)

    def normed(projection: Any, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        norm, size = norms[id(projection)]
        return lambda x: norm(forward(x).unflatten(-1, (-1, size))).flatten(-2)

    idle = replay.forwards(replay.ending(*_LATE_NORMS.values()), lambda _module, _forward: lambda x: x)
    early = replay.forwards(lambda m: [one for one in m.modules() if id(one) in norms], normed)
    with early(model), idle(model):
        yield model


def _shifted(config: DecoderConfig) -> DecoderConfig:
    layers = config.num_hidden_layers
    return config.with_(nope_layers=tuple(sorted((i + 1) % layers for i in config.nope_layers)))


def _shifted_there(config: Any) -> None:
    switches = config.to_dict().get("no_rope_layers")
    if switches:
        config.no_rope_layers = switches[-1:] + switches[:-1]


def _undivided_there(config: Any) -> None:
    if "logits_scaling" in config.to_dict():
        config.logits_scaling = 1.0


BUGS = (
    PlantedBug(
        id="L01_residual_dropout_ignored",
        cause="the dropout of residual branches is accepted and ignored",
        level="V3",
        applies=lambda config: config.residual_dropout > 0,
        ours=adapted(lambda config: config.with_(residual_dropout=0.0)),
        config_fields=("residual_dropout", "resid_pdrop"),
        checks=("residual_dropout", "resid_pdrop"),
        quick=("resid*=*",),
    ),
    PlantedBug(
        id="L02_out_bias_ignored",
        cause="attention_out_bias is ignored",
        level="V3",
        serves=declares("attention_out_bias"),
        ours=adapted(lambda config: config.with_(attention=replace(config.attention, out_bias=False))),
        config_fields=("attention_out_bias",),
        checks=("attention_out_bias",),
        quick=("attention_out_bias=*",),
    ),
    PlantedBug(
        id="L03a_layers_without_rope_turn",
        cause="layers without RoPE turn like the others",
        level="V2",
        applies=lambda config: bool(config.nope_layers),
        ours=adapted(lambda config: config.with_(nope_layers=())),
        reference=replay.attributes(replay.holding("use_rope"), lambda _module: 1, "use_rope"),
        config_fields=("no_rope_layers", "no_rope_layer_interval"),
    ),
    PlantedBug(
        id="L03b_layers_without_rope_shifted",
        cause="the layer after the one that has no RoPE goes without",
        level="V2",
        applies=lambda config: bool(config.nope_layers),
        ours=adapted(_shifted),
        reference=replay.configured(_shifted_there),
        config_fields=("no_rope_layers", "no_rope_layer_interval"),
    ),
    PlantedBug(
        id="L04a_residual_multiplier_ignored",
        cause="branches are added without their multiplier",
        level="V2",
        applies=lambda config: config.residual_multiplier != 1.0,
        ours=adapted(lambda config: config.with_(residual_multiplier=1.0)),
        reference=replay.attributes(replay.layers, lambda _module: 1.0, "residual_multiplier"),
        config_fields=("residual_multiplier",),
    ),
    PlantedBug(
        id="L04b_logits_not_divided",
        cause="logits are not divided by the config's scaling",
        level="V2",
        applies=lambda config: config.logits_divisor != 1.0,
        ours=adapted(lambda config: config.with_(logits_divisor=1.0)),
        reference=replay.configured(_undivided_there),
        config_fields=("logits_scaling",),
    ),
    PlantedBug(
        id="L05_use_bias_leaves_out_the_mlp",
        cause="use_bias gives biases to attention alone",
        level="V3",
        serves=declares("use_bias"),
        applies=lambda config: not config.mlp_bias,
        ours=adapted(lambda config: config.with_(mlp_bias=False)),
        config_fields=("use_bias",),
        checks=("use_bias",),
        quick=("use_bias=*",),
    ),
    PlantedBug(
        id="L06_rope_alpha_ignored",
        cause="alpha of dynamic RoPE scaling is read and not applied",
        level="V3",
        serves=_reads_alpha,
        ours=adapted(_forgets_alpha),
        config_fields=("rope_parameters.alpha",),
        checks=("[dynamic].alpha",),
        quick=("*alpha=*",),
    ),
    PlantedBug(
        id="L07_qk_norm_before_rope",
        cause="queries and keys are normalised before RoPE instead of after",
        level="V2",
        applies=_late_norm,
        ours=adapted(_early),
        reference=_early_there,
    ),
)
