"""`HFFields`: one reader for every `config.json`, legacy or v5, that lets no field pass unread.

A bridge takes each field it implements by name, with the default HF's class has written beside it, and declares inert
what does not change a logit. Whatever is left, `done()` refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from math import inf
from typing import Any, TypeVar

import torch

from bestiary.bridges.errors import UnsupportedConfig
from bestiary.bridges.rope import rope_from_hf
from bestiary.models.config import Activation, DecoderConfig, LayerType, Rope

T = TypeVar("T")


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
ANY = None

# Other names that transformers has for the same function; in narrow dtypes the formulas written out round otherwise.
SAME_ACTIVATION: Mapping[str, str] = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}

# Fields of transformers' base class: why they change no logit, the values at which that holds (ANY: all), their names.
_BASE: tuple[tuple[str, tuple[Any, ...] | None, str], ...] = (
    (
        "bookkeeping, read by no forward pass",
        ANY,
        "model_type architectures transformers_version _name_or_path name_or_path _commit_hash"
        " unsloth_version unsloth_fixed",
    ),
    (
        "token ids and settings of tokenizers and generation",
        ANY,
        "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class use_cache"
        " cache_implementation max_length min_length do_sample early_stopping num_beams num_beam_groups"
        " diversity_penalty"
        " temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size"
        " encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores suppress_tokens"
        " return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values"
        " exponential_decay_length_penalty begin_suppress_tokens",
    ),
    ("a choice of kernel", ANY, "attn_implementation _attn_implementation _attn_implementation_autoset"),
    ("a choice of kernel", ANY, "experts_implementation _experts_implementation"),
    ("of classification heads", ANY, "id2label label2id num_labels problem_type finetuning_task"),
    ("of retired pipelines", ANY, "prefix task_specific_params"),
    ("of retired back ends", (False, None), "torchscript use_bfloat16 tf_legacy_loss"),
    ("extra outputs", (False, None), "output_hidden_states output_attentions"),
    ("tuples in place of named outputs", (True, None), "return_dict"),
    ("of encoder-decoders", (False, None), "is_encoder_decoder is_decoder add_cross_attention tie_encoder_decoder"),
    ("of encoder-decoders", (None,), "cross_attention_hidden_size"),
    ("chunks the MLP of some encoders", (0, None), "chunk_size_feed_forward"),
    ("removes attention heads", ({}, None), "pruned_heads"),
)
BASE_INERT: Mapping[str, tuple[tuple[Any, ...] | None, str]] = {
    name: (allowed, why) for why, allowed, names in _BASE for name in names.split()
}


class HFFields:
    """The fields of one JSON object, each to be taken, declared inert, or refused.

    Args:
        json: the object.
        source: where it was read, for messages ("config.json of my-model").
        reference: the transformers class whose reading of the fields we follow.
        path: dotted name of the object inside the file, "" for the file itself.
    """

    def __init__(
        self, json: Mapping[str, Any], *, source: str, reference: str = "the reference", path: str = ""
    ) -> None:
        self.json, self.source, self.reference, self.path = dict(json), source, reference, path
        self.inert_fields: dict[str, str] = {}
        self._taken: set[str] = set()
        self._foreign: set[str] = set()
        self._children: list[HFFields] = []
        self._parts: list[HFFields] = []

    def __contains__(self, name: str) -> bool:
        return name in self.json

    def take(self, name: str, kind: type[T], default: T | _Absent = ABSENT, *, alias: str | None = None) -> T:
        """The value of `name` (or of its other spelling `alias`), `default` where absent.

        Raises:
            UnsupportedConfig: absent without a default, null, of another type, or two spellings that disagree.
        """
        if alias is not None and alias in self.json and name in self.json and self.json[alias] != self.json[name]:
            raise self.unsupported(alias, f"contradicts {name} = {self.json[name]!r}.", remedy="keep one of the two")
        found = name if name in self.json or alias is None or alias not in self.json else alias
        self._taken |= {name} if alias is None else {name, alias}
        value = self.json.get(found, default)
        if isinstance(value, _Absent):
            raise self.unsupported(name, "where the bridge needs a value.", remedy=f"add {name} to the config")
        return self._typed(found, value, kind)

    def positive(self, name: str, default: int | _Absent = ABSENT, *, alias: str | None = None) -> int:
        """`take` of an integer of at least 1."""
        return self._above_zero(name, self.take(name, int, default, alias=alias))

    def positive_float(self, name: str, default: float | _Absent = ABSENT) -> float:
        """`take` of a finite number above 0."""
        return self._above_zero(name, self.take(name, float, default))

    def positive_optional(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """`take_optional` of a finite number above 0."""
        value = self.take_optional(name, kind, default)
        return None if value is None else self._above_zero(name, value)

    def take_optional(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """As `take`, where null means None and absence `default`."""
        if self.json.get(name, default) is None:
            self._taken.add(name)
            return None
        return self.take(name, kind, ABSENT if default is None else default)

    def activation(self, name: str, default: Activation) -> Activation:
        """`take` of the name of a gate activation.

        Raises:
            UnsupportedConfig: lists what there is.
        """
        value = self.take(name, str, default.value)
        value = SAME_ACTIVATION.get(value, value)
        if value not in list(Activation):
            known = ", ".join([*Activation, *SAME_ACTIVATION])
            raise self.unsupported(name, "is not implemented.", remedy=f"one of {known}")
        return Activation(value)

    def inert(self, name: str, *, allowed: Iterable[Any] | None = ANY, why: str) -> None:
        """Declare that `name`, at one of the `allowed` values (None: at any), changes nothing we compute.

        Raises:
            UnsupportedConfig: it is set to something else.
        """
        if name in self.json and allowed is not ANY and self.json[name] not in tuple(allowed):
            values = " or ".join(repr(value) for value in allowed)
            raise self.unsupported(
                name,
                f"is not implemented by the bridge to {self.reference} ({why}).",
                remedy=f"only {values} loads; or implement `{name}` in the bridge",
            )
        self.inert_fields[name] = why

    def foreign(self, *names: str, why: str) -> None:
        """Declare that `names` describe another model in the same file: not read, not kept."""
        for name in names:
            self.inert(name, why=why)
        self._foreign.update(names)

    def nested(self, name: str, json: Mapping[str, Any] | None = None, *, part: bool = False) -> HFFields:
        """The object under `name` (or `json` in its place) as fields of its own, checked by this one's `done`.

        A `part` describes the model that is read, so that its inert fields are kept like those of this object.
        """
        content = self.take(name, dict) if json is None else json
        self._taken.add(name)
        child = HFFields(content, source=self.source, reference=self.reference, path=f"{self.path}{name}.")
        self._children.append(child)
        self._parts += [child] if part else []
        return child

    def unsupported(self, name: str, why: str, *, remedy: str, value: Any = ABSENT) -> UnsupportedConfig:
        """The error that refuses `name`, to be raised by the caller."""
        shown = self.json.get(name, ABSENT) if isinstance(value, _Absent) else value
        return UnsupportedConfig(f"{self.path}{name}", shown, why, read_from=self.source, remedy=remedy)

    def done(self) -> None:
        """Refuse what nobody took, unless it is null or inert in transformers' base class.

        Raises:
            UnsupportedConfig: names the first such field.
        """
        for name, (allowed, why) in BASE_INERT.items():
            if name not in self._taken and name not in self.inert_fields:
                self.inert(name, allowed=allowed, why=why)
        for name, value in self.json.items():
            if name not in self._taken and name not in self.inert_fields and value is not None:
                raise self.unsupported(
                    name,
                    f"is a field that the bridge to {self.reference} does not know.",
                    remedy=f"add `{name}` to the bridge, or remove it from the config if it changes nothing",
                )
        for child in self._children:
            child.done()

    def kept(self) -> dict[str, Any]:
        """What an export carries on: inert fields that are present, and unknown ones that are null."""
        inside = {name: value for part in self._parts for name, value in part.kept().items()}
        gone = (self._taken - self.inert_fields.keys()) | self._foreign
        return inside | {name: value for name, value in self.json.items() if name not in gone}

    def inert_everywhere(self) -> dict[str, str]:
        """Dotted name and reason of each inert field that is present, nested ones included."""
        own = {f"{self.path}{name}": why for name, why in self.inert_fields.items() if name in self.json}
        return own | {name: why for child in self._children for name, why in child.inert_everywhere().items()}

    # Readings shared by families

    def dtype(self) -> torch.dtype | None:
        """`dtype`, or `torch_dtype` as files before transformers 5 call it; None where absent or "auto"."""
        name = self.take_optional("dtype", str) or self.take_optional("torch_dtype", str)
        self._taken |= {"dtype", "torch_dtype"}
        if name is None or name == "auto":
            return None
        dtype = FLOAT_TYPES.get(name.removeprefix("torch."))
        if dtype is None:
            raise self.unsupported("dtype", "is no float type.", remedy=f"one of {', '.join(FLOAT_TYPES)}", value=name)
        return dtype

    def padding_idx(self, default: int | None = None) -> int | None:
        """`pad_token_id`, whose embedding HF's models look up without a gradient; kept like every token id."""
        found = self.json.get("pad_token_id", default)
        if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
            raise self.unsupported("pad_token_id", "is no token id.", remedy="an integer, or null")
        return found

    def attention_dropout(self) -> float:
        """`attention_dropout`, which acts in training alone."""
        return self.take("attention_dropout", float, 0.0)

    def initializer_range(self) -> float:
        """`initializer_range`, the standard deviation of fresh weights."""
        value = self.take("initializer_range", float, 0.02)
        if not 0 <= value < inf:
            raise self.unsupported("initializer_range", "is no standard deviation.", remedy="correct the config")
        return value

    def layer_indices(self, name: str, layers: int) -> tuple[int, ...]:
        """A list of distinct layers, () where absent or null."""
        found = self.take_optional(name, list) or []
        if len(set(map(str, found))) != len(found) or not all(type(i) is int and 0 <= i < layers for i in found):
            raise self.unsupported(name, f"is no list of distinct layers below {layers}.", remedy="correct the config")
        return tuple(found)

    def quantization(self, supported: Iterable[str]) -> str | None:
        """`quantization_config.quant_method`, refused unless in `supported`; None where absent."""
        config = self.take_optional("quantization_config", dict)
        if config is None:
            return None
        method = str(config.get("quant_method"))
        if method not in supported:
            raise self.unsupported(
                "quantization_config.quant_method",
                f"is not implemented by the bridge to {self.reference}.",
                remedy="load an unquantised checkpoint of this model",
                value=method,
            )
        return method

    def switched_window(self, default: int) -> int | None:
        """`sliding_window` where `use_sliding_window` is on, else None; its type is checked in any case."""
        self.take_optional("sliding_window", int, default)
        if not self.take("use_sliding_window", bool, False):
            return None
        return self.positive_optional("sliding_window", int, default)

    def layer_types(self, layers: int, default: Callable[[int], LayerType]) -> tuple[LayerType, ...]:
        """`layer_types`, or `default(i)` for each layer where absent."""
        names = self.take_optional("layer_types", list)
        if names is None:
            return tuple(default(i) for i in range(layers))
        unknown = [name for name in names if name not in list(LayerType)]
        if unknown or len(names) != layers:
            raise self.unsupported(
                "layer_types",
                f"does not give one of {', '.join(LayerType)} for each of {layers} layers.",
                remedy="correct layer_types or num_hidden_layers",
            )
        return tuple(LayerType(name) for name in names)

    def rope(
        self,
        *,
        theta: float,
        rotary_dim: int,
        max_positions: int,
        default: Mapping[str, Any] | None = None,
        alpha: bool = False,
        share: float | None = None,
    ) -> Rope:
        """One rotary embedding for all layers, from `rope_parameters`, or `rope_theta` with `rope_scaling`.

        `theta` and `default` are the class's own, for files that state nothing; so is `share`, the part of a head's
        `rotary_dim` coordinates that turns, in families that read `partial_rotary_factor`. `alpha`: see `rope_from_hf`.
        """
        scaling = self.take_optional("rope_scaling", dict) or None
        stated = self.take_optional("rope_parameters", dict)
        if scaling is not None and stated is not None and scaling != stated:
            raise self.unsupported("rope_scaling", "contradicts rope_parameters.", remedy="keep one of the two")
        name = "rope_parameters" if scaling is None else "rope_scaling"
        content = scaling or (default or {} if stated is None else stated)
        top = self.positive_float("rope_theta", theta)
        if "rope_theta" in self.json and content.get("rope_theta", top) != top:
            inner = content["rope_theta"]
            raise self.unsupported("rope_theta", f"contradicts {name}.rope_theta = {inner!r}.", remedy="keep one")
        if share is None:
            self.inert("partial_rotary_factor", allowed=(1.0, None), why="the whole head turns in this family")
        else:
            share = self._share(name, content, share)
        return rope_from_hf(
            self.nested(name, content),
            theta=top,
            rotary_dim=rotary_dim,
            max_positions=max_positions,
            alpha=alpha,
            share=share,
        )

    def _share(self, name: str, content: Mapping[str, Any], default: float) -> float:
        """`partial_rotary_factor` at the top, which holds where the dict has none."""
        top = self.take("partial_rotary_factor", float, default)
        inner = content.get("partial_rotary_factor", top)
        if "partial_rotary_factor" in self.json and inner != top:
            raise self.unsupported(
                "partial_rotary_factor",
                f"contradicts {name}.partial_rotary_factor = {inner!r}.",
                remedy="keep one of the two",
            )
        return top

    def rope_by_layer_type(
        self,
        *,
        thetas: tuple[float, float],
        rotary_dim: int,
        max_positions: int,
        sliding_theta: str | None = "rope_local_base_freq",
    ) -> tuple[Rope, Rope]:
        """The embeddings of full and of sliding layers, as Gemma 3 and OLMo 3 state them.

        v5: `rope_parameters` with one dict per layer type. Legacy: `rope_theta`, `rope_scaling` (full layers only) and
        the name in `sliding_theta`, where there is one. `thetas` are the class's own.
        """
        params, scaling = self.take_optional("rope_parameters", dict), self.take_optional("rope_scaling", dict)
        if scaling and params is not None:
            raise self.unsupported("rope_scaling", "stands beside rope_parameters.", remedy="keep one of the two")
        if scaling and "rope_type" not in scaling:
            raise self.unsupported(
                "rope_scaling", "has no rope_type, without which transformers drops it.", remedy="add it"
            )
        by_type = self.nested("rope_scaling" if params is None else "rope_parameters", params or {})
        legacy = {LayerType.FULL: ("rope_theta", scaling or {}), LayerType.SLIDING: (sliding_theta, {})}
        ropes = []
        for (layer_type, (name, content)), theta in zip(legacy.items(), thetas, strict=True):
            stated = by_type.take_optional(layer_type, dict) or content
            top = theta if name is None else self.positive_float(name, theta)
            if name in self.json and stated.get("rope_theta", top) != top:
                inner = stated["rope_theta"]
                raise self.unsupported(name, f"contradicts {layer_type}.rope_theta = {inner!r}.", remedy="keep one")
            one = by_type.nested(layer_type, stated)
            one.inert("truncate", allowed=(True, None), why="transformers does not look for it per layer type")
            ropes.append(rope_from_hf(one, theta=top, rotary_dim=rotary_dim, max_positions=max_positions))
        return ropes[0], ropes[1]

    def _above_zero(self, name: str, value: T) -> T:
        if not (isinstance(value, int | float) and 0 < value < inf):
            raise self.unsupported(name, "is not a positive number.", remedy="correct the config", value=value)
        return value

    def _typed(self, name: str, value: Any, kind: type[T]) -> T:
        if kind is float and type(value) is int:
            value = float(value)
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
        raise self.unsupported(name, f"is not of type {kind.__name__}.", remedy="correct the config", value=value)


FLOAT_TYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def usual_fields(config: DecoderConfig, *, without: Container[str] = ()) -> dict[str, Any]:
    """The fields that every decoder of transformers spells alike; a family's `config_to_hf` adds its own.

    Those in `without` are nothing that the family's class reads, and stay out.
    """
    heads = config.attention
    usual = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "attention_bias": heads.qkv_bias,
        "attention_dropout": heads.dropout,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
    }
    return {name: value for name, value in usual.items() if name not in without}
