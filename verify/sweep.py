"""Config coverage: every field of a Hugging Face config, given another value, and what that does to Hugging Face.

LIVE moves logits or loss, SHAPE changes the state dict, TRAIN moves the loss in train mode only, DEAD moves nothing,
REJECTED cannot be built or run. Text search cannot tell these apart (fields are read and never used, or used through
derived ones); running the reference can.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from bestiary.verify import gates
from bestiary.verify.inputs import Inputs
from bestiary.verify.measure import max_over_std
from bestiary.verify.reference import Reference, hf_config, reference_class
from bestiary.verify.tiny import FULL, ROPE, SLIDING, WINDOW, Raw, rope_layer_types, scaling, turning_dim


class Kind(StrEnum):
    """How Hugging Face reacts to a field."""

    LIVE = "live"
    SHAPE = "shape"
    TRAIN = "train"
    DEAD = "dead"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Variant:
    """A config that differs from `against` in one field; `field` is dotted inside nested objects."""

    field: str
    value: Any
    raw: Raw
    against: Raw

    @property
    def id(self) -> str:
        """Field and value, for a check's name."""
        text = json.dumps(self.value, sort_keys=True) if not isinstance(self.value, str) else self.value
        return f"{self.field}={text if len(text) <= 40 else text[:37] + '...'}"


_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "swish", "gelu_new", "gelu_python")

# By field name: values that differ from the tiny configs' and from the usual defaults. `None` stands for null.
ALTERNATIVES: Mapping[str, Sequence[Any]] = {
    "vocab_size": (197,),
    "hidden_size": (88,),
    "intermediate_size": (100,),
    "moe_intermediate_size": (44,),
    "num_attention_heads": (8,),
    "num_key_value_heads": (1, 4),
    "head_dim": (20,),
    "hidden_act": (*_ACTIVATIONS, "gelu_python_tanh"),
    "hidden_activation": (*_ACTIVATIONS, "gelu_python_tanh"),
    "max_position_embeddings": (4096,),
    "initializer_range": (0.05,),
    "rms_norm_eps": (1e-4, 1e-5),
    "layer_norm_eps": (1e-4, 1e-6),
    "sliding_window": (None, WINDOW - 7),
    "max_window_layers": (4,),
    "attention_dropout": (0.25,),
    "query_pre_attn_scalar": (29,),
    "final_logit_softcapping": (None, 5.0),
    "attn_logit_softcapping": (None, 2.0),
    "use_bidirectional_attention": (True,),
    "decoder_sparse_step": (2,),
    "num_experts": (10,),
    "num_local_experts": (10,),
    "n_routed_experts": (8,),
    "n_group": (3, 6, 12),
    "topk_group": (2, 7),
    "num_experts_per_tok": (2,),
    "n_shared_experts": (3,),
    "first_k_dense_replace": (0, 3),
    "shared_expert_intermediate_size": (28,),
    "q_lora_rank": (None, 40),
    "qk_rope_head_dim": (10,),
    "router_aux_loss_coef": (0.3,),
    "mlp_only_layers": ([0, 3], []),
    "no_rope_layers": ([0, 1, 1, 0, 1] * 3,),
    "swiglu_alpha": (1.9,),
    "swiglu_limit": (0.3,),
    "pad_token_id": (3,),
    "bos_token_id": (3,),
    "eos_token_id": (3,),
    "transformers_version": ("4.40.0",),
    "architectures": (["SomeModel"],),
    "dtype": ("bfloat16",),
    "chunk_size_feed_forward": (3,),
    "problem_type": ("regression",),
    "id2label": ({"0": "A", "1": "B", "2": "C"},),
    "label2id": ({"A": 0, "B": 1, "C": 2},),
    "_name_or_path": ("somewhere",),
    "_sliding_window_pattern": (3,),
}

# Read by Hugging Face although `to_dict` does not list them: older spellings and per-layer overrides.
UNLISTED: Mapping[str, Sequence[Any]] = {
    "sliding_window_pattern": (3,),
    "torch_dtype": ("float16",),
    "per_layer_config": ({"0": {"rms_norm_eps": 0.5}},),
}

EVERYWHERE = frozenset({"torch_dtype", "per_layer_config"})  # read by the base class

# RoPE keys by type: values that differ from `tiny.ROPE`.
ROPE_ALTERNATIVES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "default": ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.7}),
    "linear": ({"factor": 3.0},),
    "dynamic": ({"factor": 2.0}, {"alpha": 70.0}),
    "llama3": (
        {"factor": 3.0},
        {"low_freq_factor": 0.7},
        {"high_freq_factor": 6.0},
        {"original_max_position_embeddings": 40},
    ),
    "yarn": (
        {"factor": 3.0},
        {"beta_fast": 7.0},
        {"beta_slow": 0.5},
        {"truncate": True},
        {"attention_factor": 1.7},
        {"mscale": 1.3, "mscale_all_dim": 0.6},
        {"original_max_position_embeddings": 40},
    ),
    "longrope": (
        {"factor": 2.0},
        {"attention_factor": 1.7},
        {"original_max_position_embeddings": 100},
        {"long_factor": None},
        {"short_factor": None},
    ),
    "proportional": ({"partial_rotary_factor": 0.8}, {"factor": 3.0}),
}
BOTH_WAYS = "use_bidirectional_attention"
DYNAMIC_CONTEXT = 48  # below the probe's length, so that NTK scaling acts
TRAIN_SEED = 20  # of both sides in train mode, where they draw the same numbers or differ


def _alternatives(name: str, current: Any, layers: int) -> Sequence[Any]:
    """Values to try for a field that now has `current`; none for a field that identifies the config."""
    if name in ALTERNATIVES:
        return [value for value in ALTERNATIVES[name] if value != current]
    if name == "num_hidden_layers":
        return [layers - 1]
    if name == "layer_types":
        return [[FULL if item == SLIDING else SLIDING for item in current or [FULL] * layers]]
    if isinstance(current, bool):
        return [not current]
    if isinstance(current, int):
        return [current + 1]
    if isinstance(current, float):
        return [current * 1.5 + 0.25]
    if current is None:
        return [2]
    if isinstance(current, str):
        return [current + "x"]
    return [type(current)()]


def _rope_variants(reference: str, raw: Raw) -> Iterator[Variant]:
    """Theta, every type and every key of every type, for each layer type that has parameters of its own."""
    head_dim = turning_dim(reference, raw)
    nested = rope_layer_types(reference)
    for part in nested or [""]:
        own = raw["rope_parameters"][part] if part else raw["rope_parameters"]
        prefix = f"rope_parameters.{part}" if part else "rope_parameters"

        def changed(values: Mapping[str, Any], part: str = part) -> Raw:
            parameters = {**raw["rope_parameters"], part: dict(values)} if part else dict(values)
            context = {"max_position_embeddings": DYNAMIC_CONTEXT} if values.get("rope_type") == "dynamic" else {}
            return {**raw, "rope_parameters": parameters, **context}

        yield Variant(f"{prefix}.rope_theta", 777.0, changed({**own, "rope_theta": 777.0}), raw)
        for rope_type in ROPE:
            base = {**scaling(rope_type, head_dim), "rope_theta": own["rope_theta"]}
            if part:  # transformers 5 looks for it beside the layer types, so inside one it is dead
                base.pop("truncate", None)
            if base != own:
                yield Variant(f"{prefix}.rope_type", rope_type, changed(base), raw)
            for change in ROPE_ALTERNATIVES[rope_type]:
                values = {
                    key: [0.5 + item for item in base[key]] if value is None else value for key, value in change.items()
                }
                name = "+".join(values)
                shown: Any = next(iter(values.values())) if len(values) == 1 else values
                yield Variant(f"{prefix}[{rope_type}].{name}", shown, changed({**base, **values}), changed(base))


def _legacy_variants(reference: str, raw: Raw) -> Iterator[Variant]:
    """RoPE in the spelling of transformers 4: `rope_theta`, `rope_scaling`, `rope_local_base_freq` at the top."""
    plain = {key: value for key, value in raw.items() if key != "rope_parameters"}
    yield Variant("rope_theta", 777.0, {**plain, "rope_theta": 777.0}, plain)
    theta = {**plain, "rope_theta": 777.0}
    for scaled in ({"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0}):
        yield Variant("rope_scaling", scaled, {**theta, "rope_scaling": scaled}, theta)
    if rope_layer_types(reference):
        yield Variant("rope_local_base_freq", 99.0, {**plain, "rope_local_base_freq": 99.0}, plain)
    attributes = hf_config(reference, raw).attribute_map
    for alias, target in attributes.items():
        for there, other in ((alias, target), (target, alias)):
            if there in raw:
                renamed = {key: value for key, value in raw.items() if key != there} | {other: raw[there] - 2}
                yield Variant(other, raw[there] - 2, renamed, raw)


def _both_ways_variants(reference: str, raw: Raw) -> Iterator[Variant]:
    """Windows of a model that looks both ways: the file's count is halved, an odd one rounded; none elsewhere."""
    against = {**raw, BOTH_WAYS: True}
    windows = [vars(hf_config(reference, one)).get("sliding_window") for one in (raw, against)]
    if windows[0] == windows[1]:  # the flag leaves the masks as they are
        return
    for window in (WINDOW - 3, WINDOW + 2):
        yield Variant(f"{BOTH_WAYS}+sliding_window", window, {**against, "sliding_window": window}, against)


def variants(reference: str, raw: Raw) -> list[Variant]:
    """Every variant of `raw`: one for each field and alternative value, nested RoPE parameters and old spellings."""
    listed = hf_config(reference, raw).to_dict()
    found = []
    attributes = hf_config(reference, raw).attribute_map
    for name, current in listed.items():
        if name in ("model_type", "rope_parameters"):
            continue
        spelled = next((alias for alias, target in attributes.items() if target == name and alias in raw), name)
        for value in _alternatives(name, current, raw["num_hidden_layers"]):
            changed = {**raw, spelled: value}
            if spelled == "vocab_size" and (raw.get("pad_token_id") or 0) >= value:
                changed["pad_token_id"] = value - 1
            found.append(Variant(spelled, value, changed, raw))
    source = inspect.getsource(reference_class(reference).config_class)
    for name, values in UNLISTED.items():
        if name in EVERYWHERE or f'"{name}"' in source:
            found += [Variant(name, value, {**raw, name: value}, raw) for value in values]
    found += _both_ways_variants(reference, raw) if BOTH_WAYS in listed else []
    return [*found, *_rope_variants(reference, raw), *_legacy_variants(reference, raw)]


def must_refuse(reference: str, raw: Raw) -> list[Variant]:
    """Configs that no bridge may accept: fields, keys and names that nobody implements."""
    nested = rope_layer_types(reference)
    part = nested[0] if nested else ""
    rope = raw["rope_parameters"]
    own = rope[part] if part else rope

    def with_rope(**changes: Any) -> Raw:
        values = {**own, **changes}
        return {**raw, "rope_parameters": {**rope, part: values} if part else values}

    activation = "hidden_activation" if "hidden_activation" in hf_config(reference, raw).to_dict() else "hidden_act"
    layers = raw["num_hidden_layers"]
    return [
        Variant("frobnicate", 3, {**raw, "frobnicate": 3}, raw),
        Variant("use_frobnication", True, {**raw, "use_frobnication": True}, raw),
        Variant("rope_parameters.frobnicate", 2.0, with_rope(frobnicate=2.0), raw),
        Variant("rope_parameters.rope_type", "spiral", with_rope(rope_type="spiral"), raw),
        Variant(activation, "frobnicate", {**raw, activation: "frobnicate"}, raw),
        Variant(
            "layer_types",
            "chunked_attention",
            {**raw, "layer_types": [FULL] * (layers - 1) + ["chunked_attention"]},
            raw,
        ),
    ]


def change(ours: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """How far two outputs of the same inputs are apart: logits relative to their spread, loss relative to itself."""
    figures = [max_over_std(ours["logits"], base["logits"])]
    if ours.get("loss") is not None and base.get("loss") is not None:
        figures.append(float((ours["loss"] - base["loss"]).abs() / base["loss"].abs()))
    return max(figures)


_REJECTIONS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    IndexError,
    AssertionError,
    ArithmeticError,
)
"""What configs and models of transformers raise at values they cannot take, beside their validators' own error."""


def classify(built: Callable[[Raw], Reference], variant: Variant, inputs: Inputs) -> tuple[Kind, str]:
    """The kind of a variant's field and a remark, by running Hugging Face on both configs with the same weights.

    Args:
        built: the reference of a config.
    """
    try:
        base: Reference | None = built(variant.against)
    except (*_REJECTIONS, StrictDataclassError):  # a key that some RoPE needs: with the variant's value for it the
        base = None  # config may run
    try:
        model = built(variant.raw)
        output = model.output(inputs)
    except (*_REJECTIONS, StrictDataclassError) as error:
        return Kind.REJECTED, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if base is None:
        return Kind.LIVE, "Hugging Face cannot run the config without it"
    shapes = {name: tensor.shape for name, tensor in model.state().items()}
    if shapes != {name: tensor.shape for name, tensor in base.state().items()}:
        return Kind.SHAPE, ""
    moved = change(output, base.output(inputs))
    if moved > gates.MOVED:
        return Kind.LIVE, f"moves Hugging Face by {moved:.1e}"
    if change(model.train_output(inputs, TRAIN_SEED), base.train_output(inputs, TRAIN_SEED)) > gates.MOVED:
        return Kind.TRAIN, ""
    return Kind.DEAD, ""
