"""Bugs in rules, loader and export: what V0 and V1 must kill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.bridges import Bridge, Plan
from bestiary.bridges.errors import KeyMismatch
from bestiary.bridges.pieces import Piece
from bestiary.bridges.rules import Deinterleave, Expression, Rows, Rule, Stack, transpose
from bestiary.models.config import DecoderConfig, QKNorm, QKNormSpan
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug, projects_keys
from bestiary.verify.planted.experts import HALVES_THERE
from bestiary.verify.planted.patching import Rules, adapted, patch, ruled, together

_BRIDGE = "bestiary.bridges.bridge"
_NORM = "model.norm.weight"


def _routed(config: DecoderConfig) -> bool:
    return config.moe is not None


def _dense(config: DecoderConfig) -> bool:
    return config.mlp_gated and (config.moe is None or bool(config.dense_layers))


def _uses(op: type[Expression]) -> Callable[[Bridge], bool]:
    """Whether a rule of the bridge is made with `op`."""

    def inside(expression: Expression) -> bool:
        return isinstance(expression, op) or any(inside(part) for part in expression.inner)

    return lambda bridge: any(
        inside(source) for rule in bridge.rules if isinstance(rule, Rule) for source in rule.layouts.values()
    )


def _stores(leaf: str) -> Callable[[Bridge], bool]:
    """Whether the hub has tensors of its own for `leaf`, and not one for it and others."""
    return lambda bridge: any(
        f".{leaf}." in hub.pattern
        for rule in bridge.rule_set.by_native.values()
        for source in rule.layouts.values()
        for hub, _ in source.leaves()
    )


def _normed_by_head(config: DecoderConfig) -> bool:
    norm = config.attention.qk_norm
    return norm is not None and norm.span is QKNormSpan.HEAD and config.attention.num_kv_heads > 1


# ------------------------------------------------------------------ tied heads


def _untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _untied_after_load(model: Any) -> None:
    if model.decoder_config.tie_word_embeddings:
        _untie(model)


# ------------------------------------------------------------------ plans


def _planned(change: Callable[[Plan], Plan]) -> Plant:
    """Imports follow `change(plan)`; exports stay right."""
    return patch(f"{_BRIDGE}:plan_import", lambda plan: lambda *args, **kwargs: change(plan(*args, **kwargs)))


def _exported(change: Callable[[Plan], Plan]) -> Plant:
    """Exports follow `change(plan)`; imports stay right."""
    return patch(f"{_BRIDGE}:plan_export", lambda plan: lambda *args, **kwargs: change(plan(*args, **kwargs)))


def _renamed(rename: Callable[[str], str]) -> Callable[[Plan], Plan]:
    """A plan in which each piece belongs to the hub tensor `rename(name)`."""

    def piece(one: Piece) -> Piece:
        return replace(one, hub=replace(one.hub, name=rename(one.hub.name)))

    return lambda plan: replace(
        plan, items=tuple(replace(item, pieces=tuple(piece(p) for p in item.pieces)) for item in plan.items)
    )


def _between(first: str, second: str) -> Callable[[str], str]:
    """A renaming that exchanges two leaves."""

    def rename(name: str) -> str:
        if f".{first}." in name:
            return name.replace(f".{first}.", f".{second}.")
        return name.replace(f".{second}.", f".{first}.")

    return rename


def _layers_moved(plan: Plan) -> Plan:
    """Layer 0 reads the tensors of layer 2 and the other way round."""
    return _renamed(_between("layers.0", "layers.2"))(plan)


def _norm_left_out(plan: Plan) -> Plan:
    """The final norm counts as freshly initialised."""
    return replace(
        plan,
        items=tuple(item for item in plan.items if item.native != _NORM),
        fresh=(*plan.fresh, _NORM),
    )


def _value_from_key(plan: Plan) -> Plan:
    return _renamed(lambda name: name.replace(".v_proj.weight", ".k_proj.weight"))(plan)


def _lenient(plan: Callable[..., Plan]) -> Callable[..., Plan]:
    """As `load_state_dict(strict=False)`: what is missing keeps its initial values."""

    def plan_import(rules: Any, parameters: Mapping[str, Any], hub: Mapping[str, Any], **options: Any) -> Plan:
        try:
            return plan(rules, parameters, hub, **options)
        except KeyMismatch as error:
            if error.extra or error.ambiguous or error.mismatched:
                raise
            found = {name: shape for name, shape in parameters.items() if name not in error.missing}
            return plan(rules, found, hub, **options)

    return plan_import


# ------------------------------------------------------------------ rules


def _router_transposed(rules: Rules) -> Rules:
    def wrong(rule: Any) -> Any:
        if isinstance(rule, Rule) and "mlp.gate." in rule.native:
            return [
                replace(one, layouts={name: transpose(source) for name, source in one.layouts.items()})
                if one.native.endswith("weight")
                else one
                for one in rule.expanded()
            ]
        return [rule]

    return tuple(one for rule in rules for one in wrong(rule))


def _straightened(expression: Expression) -> Expression:
    """The expression without its deinterleaving."""
    if isinstance(expression, Deinterleave):
        return _straightened(expression.inner[0])
    return replace(expression, inner=tuple(_straightened(part) for part in expression.inner))


def _halves(rules: Rules) -> Rules:
    return tuple(
        replace(rule, layouts={name: _straightened(source) for name, source in rule.layouts.items()})
        if isinstance(rule, Rule)
        else rule
        for rule in rules
    )


def _second_layout_first(rules: Rules) -> Rules:
    """Rules with several layouts write the last one."""
    return tuple(
        replace(rule, layouts=dict(reversed(list(rule.layouts.items()))))
        if isinstance(rule, Rule) and not any(leaf.packed for s in rule.layouts.values() for leaf, _ in s.leaves())
        else rule
        for rule in rules
    )


def _reversed(pieces: Callable[..., Iterator[Piece]]) -> Callable[..., Iterator[Piece]]:
    """Parts stand in the hub tensor in reverse order."""

    def cut(self: Rows, shape: tuple[int, ...], captures: tuple[int, ...]) -> Iterator[Piece]:
        last = len(self.sizes) - 1
        return pieces(replace(self, sizes=self.sizes[::-1], part=last - self.part), shape, captures)

    return cut


def _reversed_there(model: nn.Module) -> AbstractContextManager[nn.Module]:
    config: Any = model.config
    values = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)

    def three(weight: Tensor) -> Tensor:
        return torch.cat((weight[2 * values :], weight[values : 2 * values], weight[:values]))

    return replay.also(
        replay.tensors(replay.ending("gate_up_proj"), lambda weight: torch.cat(weight.chunk(2)[::-1]), "weight"),
        replay.tensors(replay.ending("qkv_proj"), three, "weight"),
    )(model)


def _by_text(pieces: Callable[..., Iterator[Piece]]) -> Callable[..., Iterator[Piece]]:
    """Experts stacked in the order of their numbers as strings: 0, 1, 10, 11, 2 …"""

    def stacked(self: Stack, shape: tuple[int, ...], captures: tuple[int, ...]) -> Iterator[Piece]:
        order = sorted(range(shape[0]), key=str)
        for piece in pieces(self, shape, captures):
            row, *rest = piece.dest
            yield replace(piece, dest=(order.index(int(row)), *rest))  # type: ignore[arg-type]

    return stacked


def _swap_in_names(fill: Callable[[str, tuple[int, ...]], str]) -> Callable[[str, tuple[int, ...]], str]:
    moved = {0: 2, 2: 0}
    return lambda pattern, captures: fill(pattern, (moved.get(captures[0], captures[0]), *captures[1:])
                                          if captures else captures)  # fmt: skip


# ------------------------------------------------------------------ the loader


def _filled(change: Callable[[str, Tensor], Tensor]) -> Plant:
    """After a load each parameter holds `change(name, values)`."""

    def wrap(fill: Callable[..., None]) -> Callable[..., None]:
        def filled(model: Any, *args: Any) -> None:
            fill(model, *args)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(change(name, parameter.clone()))

        return filled

    return together(patch("bestiary.bridges.loading:fill", wrap), patch("bestiary.verify.side:fill", wrap))


def _fp32_whatever(init: Callable[..., None]) -> Callable[..., None]:
    def built(self: Any, config: Any, *, dtype: Any = None, device: Any = None) -> None:
        init(self, config, dtype=torch.float32, device=device)

    return built


def _without_last(stream: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
    return lambda *args, **kwargs: iter(list(stream(*args, **kwargs))[:-1])


def _one_layer_less(config: DecoderConfig) -> DecoderConfig:
    return config.with_(num_hidden_layers=config.num_hidden_layers - 1, layer_types=config.layer_types[:-1])


def _narrow_heads(config: DecoderConfig) -> DecoderConfig:
    heads = config.attention
    size = config.hidden_size // heads.num_heads
    return config.with_(attention=replace(heads, head_dim=size), rope=replace(config.rope, rotary_dim=size))


def _full_norm(config: DecoderConfig) -> DecoderConfig:
    return config.with_(attention=replace(config.attention, qk_norm=QKNorm(span=QKNormSpan.FULL)))


def _unbiased(config: DecoderConfig) -> DecoderConfig:
    return config.with_(attention=replace(config.attention, qkv_bias=False, out_bias=False))


BUGS = (
    PlantedBug(
        id="C13a_tied_head_not_tied",
        cause="the config ties the head and ours has one of its own",
        level="V0",
        applies=lambda config: config.tie_word_embeddings,
        ours=patch("bestiary.models.decoder:Decoder.tie_weights", lambda _: lambda self, *args, **kwargs: None),
        config_fields=("tie_word_embeddings",),
        checks=("/tie",),
    ),
    PlantedBug(
        id="C13b_untied_head_tied",
        cause="the head is tied although the config does not tie it",
        level="V0",
        applies=lambda config: not config.tie_word_embeddings,
        ours=adapted(lambda config: config.with_(tie_word_embeddings=True)),
        config_fields=("tie_word_embeddings",),
        checks=("/tie", "lm_head"),
    ),
    PlantedBug(
        id="C13c_tie_lost_after_load",
        cause="head and embedding are equal after loading and no longer one parameter",
        level="V0",
        applies=lambda config: config.tie_word_embeddings,
        ours=lambda side: side.model(_untied_after_load),
        config_fields=("tie_word_embeddings",),
        checks=("/tie",),
    ),
    PlantedBug(
        id="C03_head_dim_from_hidden_size",
        cause="head_dim is hidden_size / heads whatever the config says",
        level="V0",
        applies=lambda config: (
            projects_keys(config) and config.attention.num_heads * config.attention.head_dim != config.hidden_size
        ),
        ours=adapted(_narrow_heads),
        config_fields=("head_dim",),
        checks=("q_proj.weight",),
    ),
    PlantedBug(
        id="C14e_last_layer_not_built",
        cause="the model has a layer less than the config says",
        level="V0",
        ours=adapted(_one_layer_less),
        config_fields=("num_hidden_layers",),
        checks=("extra",),
    ),
    PlantedBug(
        id="Q20b_qk_norm_full_width",
        cause="the query/key norm has a weight for all heads together (right for OLMo 2)",
        level="V0",
        applies=_normed_by_head,
        ours=adapted(_full_norm),
        checks=("q_norm", "k_norm", "query_layernorm", "key_layernorm"),
    ),
    PlantedBug(
        id="O53b_attention_bias_not_built",
        cause="the attention projections have no biases",
        level="V0",
        applies=lambda config: config.attention.qkv_bias,
        ours=adapted(_unbiased),
        config_fields=("attention_bias",),
        checks=("_proj.bias",),
    ),
    PlantedBug(
        id="M37_dense_layers_ignored",
        cause="every layer routes to experts although the config keeps some dense",
        level="V0",
        applies=lambda config: config.moe is not None and bool(config.dense_layers),
        ours=adapted(lambda config: config.with_(dense_layers=())),
        config_fields=("mlp_only_layers", "decoder_sparse_step"),
        checks=("mlp.gate",),
    ),
    PlantedBug(
        id="M32b_router_transposed",
        cause="the router's weight is read transposed",
        level="V0",
        applies=_routed,
        ours=ruled(_router_transposed),
        checks=("mlp.gate.weight", "mlp.router.weight"),
    ),
    PlantedBug(
        id="B43a_missing_keys_keep_random_values",
        cause="parameters that the checkpoint lacks keep their initial values (strict=False)",
        level="V0",
        ours=patch(f"{_BRIDGE}:plan_import", _lenient),
        checks=("refuses/missing key",),
    ),
    PlantedBug(
        id="B43b_unused_tensors_ignored",
        cause="tensors that no rule knows are ignored without a reason",
        level="V0",
        ours=patch(
            "bestiary.bridges.plan:Naming.reason_to_ignore",
            lambda reason: lambda self, hub, rules: reason(self, hub, rules) or "not needed",
        ),
        checks=("refuses/extra key",),
    ),
    PlantedBug(
        id="B43c_shapes_not_checked",
        cause="tensors of another shape are accepted",
        level="V0",
        ours=patch("bestiary.bridges.plan:_misfit", lambda _: lambda *args, **kwargs: None),
        checks=("refuses/wrong shape",),
    ),
    PlantedBug(
        id="B43d_final_norm_not_loaded",
        cause="the final norm is initialised instead of loaded",
        level="V0",
        ours=_planned(_norm_left_out),
        checks=(_NORM, "written once"),
    ),
    PlantedBug(
        id="B45a_value_reads_the_key_tensor",
        cause="the key tensor is read for keys and for values",
        level="V0",
        applies=lambda config: not config.attention.qkv_bias,
        serves=_stores("v_proj"),
        ours=_planned(_value_from_key),
        checks=("v_proj.weight", "k_proj.weight"),
    ),
    PlantedBug(
        id="B44g_dtype_ignored",
        cause="the model is float32 whatever dtype was asked for",
        level="V0",
        ours=patch("bestiary.models.decoder:Decoder.__init__", _fp32_whatever),
        checks=("/dtype",),
    ),
    PlantedBug(
        id="B14a_layers_swapped_on_import",
        cause="layers 0 and 2 are loaded from each other's tensors",
        level="V1",
        ours=_planned(_layers_moved),
        checks=("model.layers.0", "model.layers.2"),
    ),
    PlantedBug(
        id="B14b_layers_swapped_both_ways",
        cause="the rules exchange layers 0 and 2 on import and on export",
        level="V2",
        ours=patch("bestiary.bridges.rules:fill", _swap_in_names),
        reference=replay.exchanged(lambda model: [(replay.layers(model)[0], replay.layers(model)[2])]),
    ),
    PlantedBug(
        id="B04a_k_v_swapped_on_import",
        cause="the key projection is loaded from the value tensor and the other way round",
        level="V1",
        serves=_stores("v_proj"),
        ours=_planned(_renamed(_between("k_proj", "v_proj"))),
        checks=("k_proj", "v_proj"),
    ),
    PlantedBug(
        id="B01_gate_up_swapped_on_export",
        cause="exports write gate_proj under the name of up_proj and the other way round",
        level="V1",
        applies=_dense,
        serves=_stores("up_proj"),
        ours=_exported(_renamed(_between("gate_proj", "up_proj"))),
        checks=("gate_proj", "up_proj"),
    ),
    PlantedBug(
        id="M31a_experts_rotated_on_load",
        cause="each expert is loaded into the place of its neighbour",
        level="V1",
        applies=_routed,
        ours=_filled(lambda name, values: values.roll(1, 0) if ".experts." in name else values),
        checks=(".experts.",),
    ),
    PlantedBug(
        id="M31b_experts_sorted_as_text",
        cause='experts are stacked in the order of their numbers as text ("10" before "2")',
        level="V1",
        applies=_routed,
        serves=_uses(Stack),
        ours=patch("bestiary.bridges.rules:Stack.pieces", _by_text),
        checks=("two layouts",),
    ),
    PlantedBug(
        id="M45c_exported_in_module_layout",
        cause="exports write fused expert tensors instead of the hub's one tensor per expert",
        level="V1",
        applies=_routed,
        serves=_uses(Stack),
        ours=ruled(_second_layout_first),
        checks=(".experts.", "no more keys"),
    ),
    PlantedBug(
        id="O37_gate_up_read_as_halves",
        cause="interleaved gate and up columns are read as two halves, on import and on export",
        level="V2",
        applies=_routed,
        serves=_uses(Deinterleave),
        ours=ruled(_halves),
        reference=HALVES_THERE,
    ),
    PlantedBug(
        id="P45a_fused_parts_in_reverse",
        cause="the parts of fused projections are taken in reverse order, on import and on export",
        level="V2",
        serves=_uses(Rows),
        ours=patch("bestiary.bridges.rules:Rows.pieces", _reversed),
        reference=_reversed_there,
    ),
    PlantedBug(
        id="G28e_norm_weight_folded_on_load",
        cause="1 is added to the norm weights on load, and not taken away on export",
        level="V1",
        applies=lambda config: config.norm.plus_one,
        ours=_filled(lambda name, values: values + 1 if "norm" in name else values),
        checks=("norm.weight",),
    ),
    PlantedBug(
        id="B45b_negative_zero_lost",
        cause="exports add zero, which turns −0.0 into 0.0",
        level="V1",
        ours=patch(
            "bestiary.bridges.pieces:Piece.view", lambda view: lambda self, parameter: view(self, parameter) + 0
        ),
        checks=("/bfloat16/",),
    ),
    PlantedBug(
        id="B45d_stream_drops_the_last_tensor",
        cause="the stream of hub tensors ends one tensor early",
        level="V1",
        ours=patch("bestiary.bridges.export:named_hf_tensors", _without_last),
        checks=("/stream",),
    ),
)
