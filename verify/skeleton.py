"""What a port starts from: a Hugging Face family's config fields, checkpoint keys and the nearest family we have.

Everything is read from the installed transformers: the config class, a tiny model on the meta device for the keys, and
the config sweep of level V3 for what each field does.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bestiary.bridges import registered_bridges
from bestiary.bridges.fields import BASE_INERT
from bestiary.kernels.errors import BestiaryError
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.reference import ReferencePool, build, hf_config, quiet, reference_class
from bestiary.verify.sweep import Kind, classify, variants
from bestiary.verify.tiny import LENGTH, Raw, tiny_config

NOT_RUN = "not run"
VALUES = 2  # of a field that are tried until one of them moves something
TOKENS = 190  # ids of the probe, below every vocabulary that the sweep tries

SETTLED = frozenset({*BASE_INERT, "dtype"})
"""Fields that every bridge reads alike, whatever the family."""

KNOWN: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "attention.num_heads",
    "num_key_value_heads": "attention.num_kv_heads",
    "head_dim": "attention.head_dim",
    "attention_bias": "attention.qkv_bias",
    "attention_dropout": "attention.dropout",
    "attention_multiplier": "attention.scale",
    "query_pre_attn_scalar": "attention.scale",
    "attn_logit_softcapping": "attention.logit_softcap",
    "clip_qkv": "attention.qkv_clip",
    "use_bidirectional_attention": "attention.causal",
    "rms_norm_eps": "norm.eps",
    "layer_norm_eps": "norm.eps",
    "rope_parameters": "rope",
    "no_rope_layers": "nope_layers",
    "layer_types": "layer_types",
    "sliding_window": "sliding_window",
    "hidden_act": "activation",
    "hidden_activation": "activation",
    "mlp_bias": "mlp_bias",
    "tie_word_embeddings": "tie_word_embeddings",
    "pad_token_id": "padding_idx",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "resid_pdrop": "residual_dropout",
    "logits_scaling": "logits_divisor",
    "logit_scale": "logits_divisor",
    "final_logit_softcapping": "final_logit_softcap",
    "num_experts": "moe.num_experts",
    "num_local_experts": "moe.num_experts",
    "n_routed_experts": "moe.num_experts",
    "moe_intermediate_size": "moe.intermediate_size",
    "num_experts_per_tok": "moe.router.top_k",
    "norm_topk_prob": "moe.router.normalize",
    "n_group": "moe.router.num_groups",
    "topk_group": "moe.router.topk_groups",
    "routed_scaling_factor": "moe.router.scale",
    "shared_expert_intermediate_size": "moe.shared.intermediate_size",
    "swiglu_alpha": "moe.clamp.alpha",
    "swiglu_limit": "moe.clamp.limit",
    "mlp_only_layers": "dense_layers",
    "router_aux_loss_coef": "router_aux_loss_coef",
    "output_router_logits": "output_router_logits",
}
"""Field of ours that a Hugging Face field usually means; whether it does here, V3 says."""


class NoReference(BestiaryError):
    """A model_type without a causal language model in the installed transformers.

    Remedy: correct the model_type, or install a transformers that has it.
    """

    exit_code = 4


class NotTiny(BestiaryError):
    """A reference class that cannot be built from the tiny config; the message holds its complaint.

    Remedy: give a small config.json with `--config FILE`.
    """

    exit_code = 4


@dataclass(frozen=True)
class FieldRow:
    """One config field: its default as text, how Hugging Face reacts to another value, our field for it ("": none)."""

    name: str
    default: str
    kind: str
    ours: str


@dataclass(frozen=True)
class KeyRow:
    """One pattern of checkpoint keys, its shape in symbols and how many keys of the tiny model it covers."""

    pattern: str
    shape: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Neighbour:
    """A family we have, how near it is (0 to 1), and the differences."""

    family: str
    similarity: float
    keys_only_here: tuple[str, ...]
    keys_only_there: tuple[str, ...]
    fields_only_here: tuple[str, ...]
    fields_only_there: tuple[str, ...]


@dataclass(frozen=True)
class Analysis:
    """What is known of a family before anybody has ported it."""

    model_type: str
    reference: str
    config_class: str
    fields: tuple[FieldRow, ...]
    keys: tuple[KeyRow, ...]
    nearest: Neighbour | None
    kill_list: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """Class name of the family: that of the reference without its ending."""
        return self.reference.rpartition(":")[2].removesuffix("ForCausalLM")

    @property
    def homeless(self) -> list[FieldRow]:
        """Fields that act in Hugging Face's model and have no usual place in our config."""
        acting = {Kind.LIVE.value, Kind.SHAPE.value, Kind.TRAIN.value, NOT_RUN}
        return [row for row in self.fields if row.kind in acting and not row.ours and row.name not in SETTLED]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def reference_of(model_type: str) -> str:
    """The causal language model of a model_type, as a bridge's `reference`.

    Raises:
        NoReference: names the closest model types.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    name = NAMES.get(model_type)
    if not isinstance(name, str):
        close = difflib.get_close_matches(model_type, list(NAMES), 5)
        raise NoReference(
            f"model_type = {model_type!r} has no causal language model in the installed transformers.",
            remedy=f"did you mean {', '.join(close)}?" if close else "give a model_type of AutoModelForCausalLM",
        )
    return f"transformers:{name}"


def analyse(model_type: str, *, raw: Raw | None = None, sweep: bool = True) -> Analysis:
    """Reads a family from the installed transformers.

    Args:
        raw: a small config.json in place of the tiny one.
        sweep: run the reference to classify fields; False: every kind is "not run".
    Raises:
        NoReference, NotTiny.
    """
    reference = reference_of(model_type)
    small = _tiny(reference, raw)
    keys = key_rows(reference, small)
    fields = field_rows(reference, small, sweep=sweep)
    nearest, kills = _nearest(model_type, keys, fields)
    config_class = reference_class(reference).config_class
    return Analysis(model_type, reference, config_class.__name__, tuple(fields), tuple(keys), nearest, kills)


def _tiny(reference: str, raw: Raw | None) -> Raw:
    try:
        small = tiny_config(reference, "base") if raw is None else dict(raw)
        with torch.device("meta"):
            build(reference, small)
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise NotTiny(
            f"{reference} cannot be built from the tiny config: {type(error).__name__}: {first}",
            remedy="set the field it names in a small config.json and give it by --config",
        ) from error
    return small


# ------------------------------------------------------------------------------------------------ fields


def _defaults(reference: str) -> dict[str, str]:
    """Default of every declared field, as Python text; "required" where there is none."""
    found = {}
    for item in dataclasses.fields(reference_class(reference).config_class):
        if item.name.startswith("_"):
            continue
        value = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        found[item.name] = "required" if value is dataclasses.MISSING else repr(value)
    return found


def _top(name: str) -> str:
    return name.split(".")[0].split("[")[0]


def _kinds(reference: str, raw: Raw) -> dict[str, str]:
    """Kind of every top-level field, by running the reference on a few values of each."""
    sized = raw if "head_dim" in raw else {**raw, "head_dim": raw["hidden_size"] // raw["num_attention_heads"]}
    pool, inputs = ReferencePool(), Inputs(tokens(min(TOKENS, raw["vocab_size"]), 2, LENGTH, 0)).with_labels()
    found: dict[str, list[Kind]] = {}
    for variant in variants(reference, sized):
        seen = found.setdefault(_top(variant.field), [])
        if len(seen) < VALUES and not {Kind.LIVE, Kind.SHAPE} & set(seen):
            seen.append(classify(lambda one: pool.get(reference, one, 0), variant, inputs)[0])
    order = (Kind.SHAPE, Kind.LIVE, Kind.TRAIN, Kind.DEAD, Kind.REJECTED)
    return {name: next(kind.value for kind in order if kind in seen) for name, seen in found.items()}


def field_rows(reference: str, raw: Raw, *, sweep: bool = True) -> list[FieldRow]:
    """One row for each field that the config class declares, in its order."""
    with quiet():
        kinds = _kinds(reference, raw) if sweep else {}
    return [
        FieldRow(name, default, kinds.get(name, NOT_RUN), KNOWN.get(name, ""))
        for name, default in _defaults(reference).items()
    ]


# ------------------------------------------------------------------------------------------------ keys


def _symbols(raw: Mapping[str, Any]) -> dict[int, str]:
    """Name of every dimension of a config; the first name of a size counts."""
    heads, kv = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    dim = raw.get("head_dim") or raw["hidden_size"] // heads
    named: list[tuple[str, int | None]] = [
        ("V", raw["vocab_size"]),
        ("H", raw["hidden_size"]),
        ("I", raw.get("intermediate_size")),
        ("N·D", heads * dim),
        ("K·D", kv * dim),
        ("D", dim),
        ("E", raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts")),
        ("Im", raw.get("moe_intermediate_size")),
        ("N", heads),
    ]
    sizes: dict[int, str] = {}
    for name, size in named:
        if size:
            sizes.setdefault(size, name)
    for name, size in named:
        if size:
            sizes.setdefault(2 * size, f"2·{name}")
    sizes.setdefault((heads + 2 * kv) * dim, "(N+2K)·D")
    return sizes


def _meta_state(reference: str, raw: Raw) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = build(reference, raw)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def key_rows(reference: str, raw: Raw) -> list[KeyRow]:
    """Patterns of the checkpoint's keys (`*`: a number), those of biases that a flag turns on among them."""
    listed = hf_config(reference, raw).to_dict()
    biased = {name: True for name, value in listed.items() if name.endswith("bias") and value is False}
    state = _meta_state(reference, raw) | (_meta_state(reference, {**raw, **biased}) if biased else {})
    symbols = _symbols({**listed, **raw})
    rows: dict[str, KeyRow] = {}
    for name, shape in state.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        shown = tuple(symbols.get(size, str(size)) for size in shape)
        count = rows[pattern].count + 1 if pattern in rows else 1
        rows[pattern] = KeyRow(pattern, shown, count)
    return list(rows.values())


# ------------------------------------------------------------------------------------------------ neighbours


def _overlap(ours: set[str], theirs: set[str]) -> float:
    return len(ours & theirs) / len(ours | theirs)


def _nearest(model_type: str, keys: list[KeyRow], fields: list[FieldRow]) -> tuple[Neighbour | None, tuple[str, ...]]:
    """The registered family with the most keys and fields in common, and its kill list."""
    patterns = {row.pattern for row in keys}
    names = {row.name for row in fields if row.name not in SETTLED}
    found: list[tuple[Neighbour, tuple[str, ...]]] = []
    for family, bridge in registered_bridges().items():
        if family == model_type:
            continue
        there = {row.pattern for row in key_rows(bridge.reference, tiny_config(bridge.reference, "base"))}
        other = {name for name in _defaults(bridge.reference) if name not in SETTLED}
        neighbour = Neighbour(
            family=family,
            similarity=round((_overlap(patterns, there) + _overlap(names, other)) / 2, 3),
            keys_only_here=tuple(sorted(patterns - there)),
            keys_only_there=tuple(sorted(there - patterns)),
            fields_only_here=tuple(sorted(names - other)),
            fields_only_there=tuple(sorted(other - names)),
        )
        found.append((neighbour, bridge.kill_list))
    return max(found, key=lambda item: item[0].similarity, default=(None, ()))
