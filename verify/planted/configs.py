"""Bugs in the config adapter, in both directions: fields that are read wrongly, ignored, or written wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bestiary.bridges import Bridge, HFFields
from bestiary.bridges.errors import UnsupportedConfig
from bestiary.models.config import Activation, DecoderConfig, LayerType
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug, declares, writes
from bestiary.verify.planted.patching import adapted, bridged, patch, written
from bestiary.verify.tiny import tiny_config


def _reading(change: Callable[[HFFields], None], then: Callable[[DecoderConfig], DecoderConfig] | None = None) -> Plant:
    """The adapter sees a config that `change` has altered."""

    def wrong(bridge: Bridge) -> Bridge:
        def read(hf: HFFields) -> DecoderConfig:
            change(hf)
            config = bridge.config_from_hf(hf)
            return config if then is None else then(config)

        return replace(bridge, config_from_hf=read)

    return bridged(wrong)


def _hidden(*names: str) -> Plant:
    """The adapter does not see the fields `names`, so that its defaults hold."""

    def hide(hf: HFFields) -> None:
        for name in names:
            hf.json.pop(name, None)

    return _reading(hide)


def _omitted(*names: str) -> Plant:
    """config.json is written without the fields `names`."""
    return written(lambda json: {name: value for name, value in json.items() if name not in names})


def _inverted(name: str) -> Plant:
    return written(lambda json: {**json, name: not json[name]})


# ------------------------------------------------------------------ fields that the reference never applies


def _score_cap(bridge: Bridge) -> Bridge:
    def read(hf: HFFields) -> DecoderConfig:
        cap = hf.json.pop("attn_logit_softcapping", None)
        config = bridge.config_from_hf(hf)
        return config.with_(attention=replace(config.attention, logit_softcap=cap))

    return replace(bridge, config_from_hf=read)


def _default_pattern(config: Any) -> None:
    raw = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    config.layer_types = type(config).from_dict(raw).layer_types


def _irregular(config: DecoderConfig) -> bool:
    """Layer types that no pattern of period two or more and no threshold gives."""
    types = config.layer_types
    return types[:5] == (
        LayerType.FULL,
        LayerType.SLIDING,
        LayerType.SLIDING,
        LayerType.FULL,
        LayerType.SLIDING,
    )


def _both_ways(change: Callable[[int], int]) -> Plant:
    """A model that looks both ways has another window."""

    def wrong(config: DecoderConfig) -> DecoderConfig:
        window = config.sliding_window
        return config if config.attention.causal or window is None else config.with_(sliding_window=change(window))

    return adapted(wrong)


def _windows_look_back(spec: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **fields: spec(**{**fields, "causal": fields["causal"] or fields["window"] is not None})


def _looks_both_ways(bridge: Bridge) -> bool:
    """Whether the family has a mask that looks both ways; some declare the flag and keep their masks."""
    if not declares("use_bidirectional_attention")(bridge):
        return False
    raw = {**tiny_config(bridge.reference, "base"), "use_bidirectional_attention": True}
    try:
        return not bridge.parse(raw).decoder.attention.causal
    except UnsupportedConfig:
        return False


def _bidirectional(id: str, cause: str, ours: Plant) -> PlantedBug:
    return PlantedBug(
        id=id,
        cause=cause,
        level="V3",
        serves=_looks_both_ways,
        ours=ours,
        config_fields=("use_bidirectional_attention", "sliding_window"),
        checks=("use_bidirectional_attention",),
        quick=("use_bidirectional_attention*",),
    )


def _default_activation(config: DecoderConfig) -> DecoderConfig:
    sandwich = config.embedding_multiplier != 1.0
    return config.with_(activation=Activation.GELU_TANH if sandwich else Activation.SILU)


def _wrong_dtype(complete: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda *args: {**complete(*args), "dtype": "bfloat16"}


BUGS = (
    PlantedBug(
        id="G23b_layer_types_ignored",
        cause="layer_types is ignored and the default pattern used",
        level="V2",
        applies=_irregular,
        ours=_hidden("layer_types"),
        reference=replay.configured(_default_pattern),
        config_fields=("layer_types",),
    ),
    PlantedBug(
        id="C53_attention_bias_ignored",
        cause="attention_bias is ignored",
        level="V3",
        applies=lambda config: not config.attention.qkv_bias,
        serves=declares("attention_bias"),
        ours=adapted(lambda config: config.with_(attention=replace(config.attention, qkv_bias=False, out_bias=False))),
        config_fields=("attention_bias",),
        checks=("attention_bias",),
        quick=("attention_bias=*",),
    ),
    PlantedBug(
        id="E59_router_jitter_ignored",
        cause="router_jitter_noise is accepted and ignored",
        level="V3",
        serves=declares("router_jitter_noise"),
        ours=adapted(
            lambda config: config.with_(moe=None if config.moe is None else replace(config.moe, input_jitter=0.0))
        ),
        config_fields=("router_jitter_noise",),
        checks=("router_jitter_noise",),
        quick=("router_jitter_noise=*",),
    ),
    PlantedBug(
        id="C11c_activation_ignored",
        cause="the activation is the family's own whatever the config says",
        level="V3",
        applies=lambda config: config.moe is None or config.moe.clamp is None,
        ours=adapted(_default_activation),
        config_fields=("hidden_act", "hidden_activation"),
        checks=("hidden_act",),
        quick=("hidden_act*",),
    ),
    PlantedBug(
        id="C12_unknown_fields_accepted",
        cause="fields that the adapter does not know are dropped in silence",
        level="V3",
        ours=patch("bestiary.bridges.fields:HFFields.done", lambda _: lambda self: None),
        checks=("frobnicate",),
        quick=("must refuse/*",),
    ),
    PlantedBug(
        id="C06b_legacy_rope_theta_ignored",
        cause="rope_theta at the top level (the spelling before transformers 5) is ignored",
        level="V3",
        ours=_hidden("rope_theta"),
        config_fields=("rope_theta",),
        checks=("rope_theta",),
        quick=("rope_theta=*",),
    ),
    PlantedBug(
        id="C07f_legacy_rope_scaling_ignored",
        cause="rope_scaling (the spelling before transformers 5) is ignored",
        level="V3",
        ours=_hidden("rope_scaling"),
        config_fields=("rope_scaling",),
        checks=("rope_scaling",),
        quick=("rope_scaling=*",),
    ),
    PlantedBug(
        id="G30a_score_soft_cap_applied",
        cause="attn_logit_softcapping is applied although the reference never does",
        level="V3",
        applies=lambda config: config.attention.logit_softcap is None,
        serves=declares("attn_logit_softcapping"),
        ours=bridged(_score_cap),
        config_fields=("attn_logit_softcapping",),
        checks=("attn_logit_softcapping",),
        quick=("attn_logit_softcapping=*",),
    ),
    _bidirectional(
        "G30b_bidirectional_attention_ignored",
        "use_bidirectional_attention is accepted and ignored",
        _hidden("use_bidirectional_attention"),
    ),
    _bidirectional(
        "G30c_bidirectional_window_not_halved",
        "the window of a model that looks both ways reaches as far to each side as the file says for both",
        _both_ways(lambda window: 2 * (window - 1)),
    ),
    _bidirectional(
        "G30d_bidirectional_window_minus_one",
        "the window of a model that looks both ways ends one token early on each side",
        _both_ways(lambda window: window - 1),
    ),
    _bidirectional(
        "G30e_bidirectional_windows_look_back",
        "sliding layers of a model that looks both ways look back only",
        patch("bestiary.models.inputs:MaskSpec", _windows_look_back),
    ),
    PlantedBug(
        id="C11d_relu_not_squared",
        cause="relu2 is computed as relu",
        level="V3",
        applies=lambda config: config.moe is None or config.moe.clamp is None,
        ours=patch(
            "bestiary.kernels.lean:activate",
            lambda act: lambda gate, name: act(gate, "relu" if name == "relu2" else name),
        ),
        config_fields=("hidden_act", "hidden_activation"),
        checks=("=relu2",),
        quick=("hidden_act*=relu2",),
    ),
    PlantedBug(
        id="B44a_attention_bias_written_wrong",
        cause="config.json is written with the opposite of attention_bias",
        level="V1",
        serves=writes("attention_bias"),
        ours=_inverted("attention_bias"),
        config_fields=("attention_bias",),
        checks=("config.json", "transformers loads", "imported again"),
    ),
    PlantedBug(
        id="B44b_dtype_written_wrong",
        cause="config.json says bfloat16 whatever the weights are",
        level="V1",
        ours=patch("bestiary.bridges.export:_complete", _wrong_dtype),
        config_fields=("dtype",),
        checks=("imported again", "dtype"),
    ),
    PlantedBug(
        id="B44c_rope_parameters_not_written",
        cause="config.json is written without rope_parameters",
        level="V1",
        ours=_omitted("rope_parameters"),
        config_fields=("rope_parameters",),
        checks=("config.json", "architecture"),
    ),
    PlantedBug(
        id="B44d_head_dim_not_written",
        cause="config.json is written without head_dim",
        level="V1",
        serves=writes("head_dim"),
        applies=lambda config: config.attention.num_heads * config.attention.head_dim != config.hidden_size,
        ours=_omitted("head_dim"),
        config_fields=("head_dim",),
        checks=("config.json", "transformers loads", "q_proj"),
    ),
    PlantedBug(
        id="B44e_tie_written_wrong",
        cause="config.json is written with the opposite of tie_word_embeddings",
        level="V1",
        ours=_inverted("tie_word_embeddings"),
        config_fields=("tie_word_embeddings",),
        checks=("config.json", "transformers loads", "lm_head"),
    ),
    PlantedBug(
        id="B44f_eps_not_written",
        cause="config.json is written without rms_norm_eps",
        level="V1",
        serves=writes("rms_norm_eps", "layer_norm_eps"),
        ours=_omitted("rms_norm_eps", "layer_norm_eps"),
        config_fields=("rms_norm_eps", "layer_norm_eps"),
        checks=("config.json", "architecture"),
    ),
)
