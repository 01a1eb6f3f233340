"""Bugs in rotary embeddings: layout, base, scaling of every kind, which layer type gets which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bestiary.bridges import Bridge
from bestiary.models.config import (
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeLayout,
    YarnScaling,
)
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug, ReferencePlant, everywhere
from bestiary.verify.planted.patching import adapted, patch
from bestiary.verify.tiny import builds, rope_layer_types, scaling, tiny_configs, turning_dim

_ATTENTION = "bestiary.models.layers.attention"
_ROTARY = "bestiary.models.layers.rotary"
_NAMES = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
    "proportional": ProportionalScaling,
}


# ------------------------------------------------------------------ changing the parameters, on both sides


def _ropes(config: DecoderConfig) -> list[Rope]:
    return [rope for rope in (config.rope, config.sliding_rope) if rope is not None]


def _reroped(change: Callable[[Rope, DecoderConfig], Rope]) -> Plant:
    """The adapter gets every Rope wrong in the same way."""

    def wrong(config: DecoderConfig) -> DecoderConfig:
        sliding = None if config.sliding_rope is None else change(config.sliding_rope, config)
        return config.with_(rope=change(config.rope, config), sliding_rope=sliding)

    return adapted(wrong)


def _parameters(config: Any) -> list[dict[str, Any]]:
    """Each dict of RoPE parameters in a Hugging Face config."""
    values = config.rope_parameters
    nested = [part for part in values.values() if isinstance(part, dict)]
    return nested or [values]


def _in_reference(change: Callable[[dict[str, Any], Any], None]) -> ReferencePlant:
    """Rotary modules whose parameters `change(parameters, config)` has altered."""

    def altered(config: Any) -> None:
        for parameters in _parameters(config):
            change(parameters, config)

    return replay.turned(altered)


def _dropped(kind: str) -> tuple[Plant, ReferencePlant]:
    """Scaling of one kind is read and never used."""
    scaling = _NAMES[kind]

    def plain(frequencies: Callable[..., Any]) -> Callable[..., Any]:
        return lambda rope, *args, **kwargs: frequencies(
            replace(rope, scaling=None) if isinstance(rope.scaling, scaling) else rope, *args, **kwargs
        )

    def forget(parameters: dict[str, Any], _config: Any) -> None:
        if parameters["rope_type"] == kind:
            parameters["rope_type"] = "default"

    return patch(f"{_ROTARY}:rope_frequencies", plain), _in_reference(forget)


@cache
def _known(reference: str, kind: str) -> bool:
    raw = next(iter(tiny_configs(reference).values()))
    values = {**scaling(kind, turning_dim(reference, raw)), "rope_theta": 10_000.0}
    nested = dict.fromkeys(rope_layer_types(reference), values)
    return builds(reference, {**raw, "rope_parameters": nested or values})


def _knows(kind: str) -> Callable[[Bridge], bool]:
    """Whether the reference's config class takes scaling of a kind; Phi-3's takes LongRoPE alone."""
    return lambda bridge: _known(bridge.reference, kind)


def _ignored(kind: str, applies: Callable[[DecoderConfig], bool], level: str, letter: str) -> PlantedBug:
    ours, reference = _dropped(kind)
    return PlantedBug(
        id=f"C07{letter}_{kind}_scaling_ignored",
        cause=f"RoPE scaling of type {kind} is read and not applied",
        level=level,
        applies=applies,
        serves=_knows(kind),
        ours=ours,
        reference=reference,
        config_fields=("rope_parameters", "rope_scaling"),
        checks=(f"rope_type={kind}", f"[{kind}]"),
        quick=(f"*rope_type={kind}", f"*{kind}?.factor=*"),  # the second where the tiny config is of that kind
    )


def _scaled(kind: str) -> Callable[[DecoderConfig], bool]:
    return lambda config: any(isinstance(rope.scaling, _NAMES[kind]) for rope in _ropes(config))


# ------------------------------------------------------------------ YaRN


_yarned = _scaled("yarn")


def _truncatable(config: DecoderConfig) -> bool:
    return any(isinstance(rope.scaling, YarnScaling) and not rope.scaling.truncate for rope in _ropes(config))


def _yarn(
    id: str,
    cause: str,
    field: str,
    ours: Callable[[YarnScaling, DecoderConfig], YarnScaling],
    reference: Callable[[dict[str, Any], Any], None],
    applies: Callable[[DecoderConfig], bool] = _yarned,
) -> PlantedBug:
    def wrong(rope: Rope, config: DecoderConfig) -> Rope:
        return replace(rope, scaling=ours(rope.scaling, config)) if isinstance(rope.scaling, YarnScaling) else rope

    def wrong_there(parameters: dict[str, Any], config: Any) -> None:
        if parameters["rope_type"] == "yarn":
            reference(parameters, config)

    return PlantedBug(
        id=id,
        cause=cause,
        level="V2",
        applies=applies,
        ours=_reroped(wrong),
        reference=_in_reference(wrong_there),
        config_fields=(f"rope_parameters.{field}",),
    )


def _swap_betas(parameters: dict[str, Any], _config: Any) -> None:
    fast, slow = parameters.get("beta_fast") or 32.0, parameters.get("beta_slow") or 1.0
    parameters.update(beta_fast=slow, beta_slow=fast)


def _context_as_original(parameters: dict[str, Any], config: Any) -> None:
    parameters.update(original_max_position_embeddings=config.max_position_embeddings)


def _context_as_factor(parameters: dict[str, Any], config: Any) -> None:
    parameters.update(factor=config.max_position_embeddings / parameters["original_max_position_embeddings"])


# ------------------------------------------------------------------ proportional


def _squeezed(frequencies: Callable[..., Any]) -> Callable[..., Any]:
    """The frequencies of a head as small as the part that turns."""

    def of(rope: Rope, *args: Any, **kwargs: Any) -> Any:
        found, factor = frequencies(rope, *args, **kwargs)
        turning = int((found != 0).sum())
        if not isinstance(rope.scaling, ProportionalScaling) or not turning:
            return found, factor
        small, _ = frequencies(replace(rope, rotary_dim=2 * turning, scaling=None), *args, **kwargs)
        return torch.cat((small, found[turning:])), factor

    return of


# ------------------------------------------------------------------ layer types


def _two_ropes(config: DecoderConfig) -> bool:
    return config.sliding_rope is not None


def _local_scaling(config: DecoderConfig) -> DecoderConfig:
    local = config.sliding_rope
    return config if local is None else config.with_(sliding_rope=replace(local, scaling=config.rope.scaling))


def _local_scaling_there(config: Any) -> None:
    full, local = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
    config.rope_parameters["sliding_attention"] = {**full, "rope_theta": local["rope_theta"]}


def _one_rope_there(config: Any) -> None:
    config.rope_parameters["sliding_attention"] = dict(config.rope_parameters["full_attention"])


def _exchanged_theta(config: DecoderConfig) -> DecoderConfig:
    full, local = config.rope, config.sliding_rope
    if local is None:
        return config
    return config.with_(rope=replace(full, theta=local.theta), sliding_rope=replace(local, theta=full.theta))


def _exchanged_theta_there(config: Any) -> None:
    full, local = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
    full["rope_theta"], local["rope_theta"] = local["rope_theta"], full["rope_theta"]


# ------------------------------------------------------------------ layout, direction, precision


def _woven(rope: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, cos, sin, interleaved=False: rope(x, cos, sin, interleaved=not interleaved)


def _turn_woven(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def _woven_there(_rope: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        half = q.shape[-1] // 2  # tables hold the angles once or twice
        cos, sin = (table[..., :half].unsqueeze(unsqueeze_dim) for table in (cos, sin))
        return _turn_woven(q, cos, sin), _turn_woven(k, cos, sin)

    return apply


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning = 2 * cos.shape[-1]
    a, b = x[..., :turning].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., turning:]), dim=-1)


def _halved_there(_rope: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        # tables hold each angle twice, the two side by side or half a table apart
        beside = torch.equal(cos[..., 0::2], cos[..., 1::2])
        cos, sin = (
            (table[..., 0::2] if beside else table[..., : table.shape[-1] // 2]).unsqueeze(unsqueeze_dim)
            for table in (cos, sin)
        )
        return _turn_halves(q, cos, sin), _turn_halves(k, cos, sin)

    return apply


def _laid(layout: RopeLayout) -> Callable[[DecoderConfig], bool]:
    return lambda config: config.rope.layout is layout


def _backwards(tables: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def turned(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = tables(*args, **kwargs)
        return cos, -sin

    return turned


def _stored_narrow(tables: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rounded(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = tables(*args, **kwargs)
        # `.type` by name: a request that the reference's promotion to float64 leaves alone
        return cos.type("torch.FloatTensor").type_as(cos), sin.type("torch.FloatTensor").type_as(sin)

    return rounded


BUGS = (
    PlantedBug(
        id="C05a_rope_interleaved",
        cause="RoPE turns neighbouring coordinates (2i, 2i+1) instead of the halves (i, i+d/2)",
        level="V2",
        applies=_laid(RopeLayout.HALF),
        ours=patch(f"{_ATTENTION}:apply_rope", _woven),
        reference=replay.library("apply_rotary_pos_emb", _woven_there),
    ),
    PlantedBug(
        id="P05_rope_in_halves",
        cause="RoPE turns the halves (i, i+d/2) instead of neighbouring coordinates (2i, 2i+1)",
        level="V2",
        applies=_laid(RopeLayout.INTERLEAVED),
        ours=patch(f"{_ATTENTION}:apply_rope", _woven),
        reference=replay.library("apply_rotary_pos_emb", _halved_there),
    ),
    PlantedBug(
        id="C05b_rope_backwards",
        cause="RoPE turns in the wrong direction",
        level="V2",
        ours=patch(f"{_ROTARY}:RotaryTable.__call__", _backwards),
        reference=replay.forwards(replay.rotaries, lambda _module, forward: _backwards(forward)),
    ),
    PlantedBug(
        id="C06_rope_theta_default",
        cause="rope_theta is 10000 whatever the config says",
        level="V2",
        ours=_reroped(lambda rope, _config: replace(rope, theta=10_000.0)),
        reference=_in_reference(lambda parameters, _config: parameters.update(rope_theta=10_000.0)),
        config_fields=("rope_parameters.rope_theta", "rope_theta"),
    ),
    PlantedBug(
        id="C51_rope_table_in_fp32",
        cause="cos and sin are kept in float32 whatever the model's dtype",
        level="V2",
        ours=patch(f"{_ROTARY}:RotaryTable.__call__", _stored_narrow),
        reference=replay.forwards(replay.rotaries, lambda _module, forward: _stored_narrow(forward)),
    ),
    _ignored("linear", everywhere, "V3", "a"),
    _ignored("llama3", everywhere, "V3", "b"),
    _ignored("yarn", everywhere, "V3", "c"),
    _ignored("dynamic", everywhere, "V3", "d"),
    _ignored("longrope", everywhere, "V3", "e"),
    _ignored("proportional", everywhere, "V3", "g"),
    PlantedBug(
        id="C07h_proportional_frequencies_squeezed",
        cause="proportional RoPE spaces its frequencies over the part that turns instead of the whole head",
        level="V3",
        serves=_knows("proportional"),
        ours=patch(f"{_ROTARY}:rope_frequencies", _squeezed),
        config_fields=("rope_parameters.partial_rotary_factor",),
        checks=("proportional",),
        quick=("*proportional*",),
    ),
    _yarn(
        "O40a_yarn_truncated",
        "the bounds of YaRN's ramp are rounded to whole dimensions although truncate is false",
        "truncate",
        lambda scaling, _config: replace(scaling, truncate=True),
        lambda parameters, _config: parameters.update(truncate=True),
        _truncatable,
    ),
    _yarn(
        "O40b_yarn_attention_factor_missing",
        "YaRN's attention factor does not multiply cos and sin",
        "attention_factor",
        lambda scaling, _config: replace(scaling, attention_factor=1.0),
        lambda parameters, _config: parameters.update(attention_factor=1.0),
    ),
    _yarn(
        "O40c_yarn_betas_swapped",
        "beta_fast and beta_slow of YaRN are exchanged",
        "beta_fast",
        lambda scaling, _config: replace(scaling, beta_fast=scaling.beta_slow, beta_slow=scaling.beta_fast),
        _swap_betas,
    ),
    _yarn(
        "O40d_yarn_factor_from_context",
        "YaRN's factor is max_position_embeddings / original context instead of the config's",
        "factor",
        lambda scaling, config: replace(
            scaling, factor=config.max_position_embeddings / scaling.original_max_position_embeddings
        ),
        _context_as_factor,
    ),
    _yarn(
        "O40e_yarn_original_context_wrong",
        "YaRN takes max_position_embeddings for the original context",
        "original_max_position_embeddings",
        lambda scaling, config: replace(scaling, original_max_position_embeddings=config.max_position_embeddings),
        _context_as_original,
    ),
    PlantedBug(
        id="G25a_scaling_on_local_layers",
        cause="the RoPE scaling of full-attention layers is applied to sliding layers too",
        level="V2",
        applies=lambda config: _two_ropes(config) and config.rope.scaling is not None,
        ours=adapted(_local_scaling),
        reference=replay.turned(_local_scaling_there),
        config_fields=("rope_parameters",),
    ),
    PlantedBug(
        id="G25b_one_rope_for_all_layers",
        cause="sliding layers turn with the RoPE of full-attention layers",
        level="V2",
        applies=_two_ropes,
        ours=adapted(lambda config: config.with_(sliding_rope=None)),
        reference=replay.turned(_one_rope_there),
        config_fields=("rope_parameters", "rope_local_base_freq"),
    ),
    PlantedBug(
        id="G25c_thetas_exchanged",
        cause="local and global rope_theta are exchanged",
        level="V2",
        applies=_two_ropes,
        ours=adapted(_exchanged_theta),
        reference=replay.turned(_exchanged_theta_there),
        config_fields=("rope_parameters.rope_theta", "rope_local_base_freq"),
    ),
)
