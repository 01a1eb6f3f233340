"""GGUF files into Hugging Face folders, so that everything downstream reads one format.

    model.gguf ── metadata ──> config.json, generation_config.json
               ── tokens ────> tokenizer.json, tokenizer_config.json   (`bestiary.bridges.gguf_tokenizer`)
               ── tensors ───> model.safetensors                       (dequantised)

What a GGUF file does differently from the hub's checkpoint of the same model (after llama.cpp's converter):
names (`blk.3.attn_q.weight`); Gemma's norms hold 1 + w; Llama's q and k rows are interleaved for the other RoPE layout;
Gemma's local RoPE base and layer pattern are constants of the architecture, not stored. The `gguf` package reads and
dequantises; names, shapes and operations are declared here, and coverage is total on both sides.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bestiary.bridges.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    FolderNotEmpty,
    KeyMismatch,
    UnsupportedConfig,
    UnsupportedLoad,
    UnsupportedModelType,
)
from bestiary.bridges.gguf_tokenizer import GGUFTokens, write_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_PATTERN = 6  # every sixth layer sees everything
_GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not head_dim^-0.5

_SPECIAL_IDS = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot", "eom"), "pad_token_id": ("padding",)}

_SPELLING = "5.0.0"  # of transformers: the release whose config keys are written

_REQUIRED: Any = object()


class GGUFFields:
    """Metadata of one architecture, read by name; what is left over at the end is refused.

    Args:
        values: metadata key to value, the architecture's prefix included.
        architecture: `general.architecture`.
        source: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], architecture: str, source: str) -> None:
        self.architecture, self.source = architecture, source
        prefix = f"{architecture}."
        self._left = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of `<architecture>.<name>`.

        Raises:
            CorruptCheckpoint: it is not there and no default was given.
        """
        if name in self._left:
            return self._left.pop(name)
        if default is _REQUIRED:
            raise CorruptCheckpoint(
                f"metadata key {self.architecture}.{name} is missing.",
                read_from=self.source,
                remedy="convert the model to GGUF again with a current converter",
            )
        return default

    def refuse(self, name: str, value: Any, why: str) -> UnsupportedConfig:
        """The error for a value that would change the computation and is not carried over."""
        return UnsupportedConfig(
            f"{self.architecture}.{name}",
            value,
            why,
            read_from=self.source,
            remedy="use the model's Hugging Face checkpoint instead of the GGUF file",
        )

    def done(self) -> None:
        """Refuses what nobody took."""
        for name, value in self._left.items():
            raise self.refuse(name, value, "is not understood by the GGUF reader.")


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the HF model: its name, its shape in the words of `_dims`, and what undoes the GGUF form."""

    hub: str
    shape: tuple[str, ...]
    undo: str | None = None  # a key of _UNDO


@dataclass(frozen=True)
class _Family:
    """One GGUF architecture: how its metadata becomes a config, and its tensors."""

    hf_class: str
    config: Callable[[GGUFFields, int], dict[str, Any]]
    model: Mapping[str, _Tensor]
    layer: Mapping[str, _Tensor]


def _minus_one(weight: np.ndarray, _config: Mapping[str, Any]) -> np.ndarray:
    """Gemma: GGUF holds 1 + w."""
    return weight - np.float32(1)


def _deinterleave_heads(weight: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Llama: rows (2i, 2i + 1) of a head turn together in GGUF, (i, i + head_dim / 2) on the hub."""
    heads = weight.shape[0] // config["head_dim"]
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


_UNDO = {"minus_one": _minus_one, "deinterleave_heads": _deinterleave_heads}

_PROJECTIONS = {
    "attn_q.weight": _Tensor("self_attn.q_proj.weight", ("q", "hidden")),
    "attn_k.weight": _Tensor("self_attn.k_proj.weight", ("kv", "hidden")),
    "attn_v.weight": _Tensor("self_attn.v_proj.weight", ("kv", "hidden")),
    "attn_output.weight": _Tensor("self_attn.o_proj.weight", ("hidden", "q")),
    "ffn_gate.weight": _Tensor("mlp.gate_proj.weight", ("mlp", "hidden")),
    "ffn_up.weight": _Tensor("mlp.up_proj.weight", ("mlp", "hidden")),
    "ffn_down.weight": _Tensor("mlp.down_proj.weight", ("hidden", "mlp")),
}

_EMBEDDING = _Tensor("model.embed_tokens.weight", ("vocab", "hidden"))
_HEAD = _Tensor("lm_head.weight", ("vocab", "hidden"))


def _common_config(fields: GGUFFields, vocab_size: int) -> dict[str, Any]:
    """What Llama and Gemma 3 name alike."""
    if fields.take("vocab_size", vocab_size) != vocab_size:
        raise fields.refuse("vocab_size", vocab_size, "is the number of tokens, and the metadata says otherwise.")
    heads = fields.take("attention.head_count")
    hidden = fields.take("embedding_length")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": fields.take("feed_forward_length"),
        "num_hidden_layers": fields.take("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.take("attention.head_count_kv", heads),
        "max_position_embeddings": fields.take("context_length"),
        "rms_norm_eps": _shortest(fields.take("attention.layer_norm_rms_epsilon")),
        "attention_bias": False,
    }


def _rope(fields: GGUFFields, default_theta: Any = _REQUIRED) -> dict[str, Any]:
    """The RoPE base and scaling of full-attention layers, as `rope_parameters`."""
    theta = fields.take("rope.freq_base", default_theta)
    kind = fields.take("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.take("rope.scaling.factor"), "rope_theta": theta}
    if kind != "none":
        raise fields.refuse("rope.scaling.type", kind, "is not implemented by the GGUF reader.")
    return {"rope_type": "default", "rope_theta": theta}


def _llama_config(fields: GGUFFields, vocab_size: int) -> dict[str, Any]:
    config = _common_config(fields, vocab_size)
    head_dim = fields.take("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := fields.take(name, head_dim)) != head_dim:
            raise fields.refuse(name, value, f"differs from the head size {head_dim}.")
    return config | {
        "model_type": "llama",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": _rope(fields, 10_000.0),
    }


def _gemma3_config(fields: GGUFFields, vocab_size: int) -> dict[str, Any]:
    config = _common_config(fields, vocab_size)
    head_dim = fields.take("attention.key_length")
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := fields.take(name, head_dim)) != head_dim:
            raise fields.refuse(name, value, f"differs from the head size {head_dim}.")
    pattern = fields.take("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if not isinstance(pattern, int):
        raise fields.refuse("attention.sliding_window_pattern", pattern, "is not an integer.")
    layers, heads, hidden = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    return config | {
        "model_type": "gemma3_text",
        "head_dim": head_dim,
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA3_27B_LAYERS else head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields.take("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": _rope(fields),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": fields.take("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
            },
        },
        "final_logit_softcapping": fields.take("final_logit_softcapping", None),
        "attn_logit_softcapping": None,
    }


def _norm(hub: str, size: str = "hidden") -> _Tensor:
    return _Tensor(hub, (size,), "minus_one")


_FAMILIES = {
    "gemma3": _Family(
        hf_class="Gemma3ForCausalLM",
        config=_gemma3_config,
        model={
            "token_embd.weight": _EMBEDDING,
            "output_norm.weight": _norm("model.norm.weight"),
            "output.weight": _HEAD,
        },
        layer=_PROJECTIONS
        | {
            "attn_norm.weight": _norm("input_layernorm.weight"),
            "post_attention_norm.weight": _norm("post_attention_layernorm.weight"),
            "ffn_norm.weight": _norm("pre_feedforward_layernorm.weight"),
            "post_ffw_norm.weight": _norm("post_feedforward_layernorm.weight"),
            "attn_q_norm.weight": _norm("self_attn.q_norm.weight", "head"),
            "attn_k_norm.weight": _norm("self_attn.k_norm.weight", "head"),
        },
    ),
    "llama": _Family(
        hf_class="LlamaForCausalLM",
        config=_llama_config,
        model={
            "token_embd.weight": _EMBEDDING,
            "output_norm.weight": _Tensor("model.norm.weight", ("hidden",)),
            "output.weight": _HEAD,
        },
        layer=_PROJECTIONS
        | {
            "attn_q.weight": _Tensor("self_attn.q_proj.weight", ("q", "hidden"), "deinterleave_heads"),
            "attn_k.weight": _Tensor("self_attn.k_proj.weight", ("kv", "hidden"), "deinterleave_heads"),
            "attn_norm.weight": _Tensor("input_layernorm.weight", ("hidden",)),
            "ffn_norm.weight": _Tensor("post_attention_layernorm.weight", ("hidden",)),
        },
    ),
}


class GGUFFile:
    """One GGUF file: metadata read at once, tensors on demand.

    Args:
        path: the file.

    Attributes:
        architecture: `general.architecture`.
        metadata: every key and value, arrays of tokens left out (see `tokens`).

    Raises:
        CheckpointNotFound: no such file.
        CorruptCheckpoint: not a GGUF file, or shorter than its own header says.
        UnsupportedModelType: an architecture this module has no rules for.
        UnsupportedLoad: the `gguf` package is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointNotFound(f"no GGUF file at {self.path}.", remedy="give the path of a .gguf file")
        try:
            import gguf
        except ModuleNotFoundError as error:
            raise UnsupportedLoad(
                "the package `gguf` is not installed.", remedy="pip install 'bestiary[gguf]'"
            ) from error
        try:
            self._reader = gguf.GGUFReader(self.path)
        except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise self._corrupt(f"the GGUF header cannot be read ({type(error).__name__}: {error}).") from error
        self._dequantize = gguf.dequantize
        size = self.path.stat().st_size
        for tensor in self._reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size:
                raise self._corrupt(f"tensor {tensor.name} ends beyond the file's {size} bytes.")
        self.metadata = {
            name: field.contents()
            for name, field in self._reader.fields.items()
            if not name.startswith(("GGUF.", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
        }
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in _FAMILIES:
            raise UnsupportedModelType(
                f"GGUF architecture {self.architecture!r} has no rules here (known: {', '.join(sorted(_FAMILIES))}).",
                read_from=str(self.path),
                remedy="use the model's Hugging Face checkpoint, or add the architecture to bridges/gguf.py",
            )

    def _corrupt(self, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(what, read_from=str(self.path), remedy="fetch or assemble the file again")

    def _strings(self, key: str) -> list[str]:
        """An array of strings; `ReaderField.contents` is several times slower on a long one."""
        field = self._reader.fields.get(key)
        return [] if field is None else [bytes(field.parts[index]).decode("utf-8") for index in field.data]

    def tokens(self) -> GGUFTokens:
        """The tokenizer as the file stores it."""
        return GGUFTokens(
            architecture=self.architecture,
            metadata=self.metadata,
            tokens=self._strings("tokenizer.ggml.tokens"),
            merges=self._strings("tokenizer.ggml.merges"),
            source=str(self.path),
        )

    def hf_config(self) -> dict[str, Any]:
        """The config of the Hugging Face class, in the v5 JSON spelling.

        Raises:
            UnsupportedConfig: a metadata key whose meaning would be lost.
        """
        family = _FAMILIES[self.architecture]
        fields = GGUFFields(self.metadata, self.architecture, str(self.path))
        pieces = self._reader.fields.get("tokenizer.ggml.tokens")
        if pieces is None:
            raise self._corrupt("metadata key tokenizer.ggml.tokens is missing.")
        config = family.config(fields, len(pieces.data))
        fields.done()
        names = {tensor.name for tensor in self._reader.tensors}
        return (
            {"architectures": [family.hf_class]}
            | config
            | {"tie_word_embeddings": "output.weight" not in names, "use_cache": True}
            | {"transformers_version": _SPELLING}
            | self.special_ids()
        )

    def special_ids(self) -> dict[str, int | list[int]]:
        """`bos_token_id`, `eos_token_id` and `pad_token_id`, those that the file names.

        Ends of a turn or a message (`eot`, `eom`) are stop ids too, behind the end of the text.
        """
        named = {name: self._special_ids(*names) for name, names in _SPECIAL_IDS.items()}
        return {name: ids[0] if len(ids) == 1 else ids for name, ids in named.items() if ids}

    def _special_ids(self, *names: str) -> list[int]:
        stored = (self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
        return list(dict.fromkeys(int(value) for value in stored if value is not None))

    def hf_tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (hub name, float32 array in the hub's layout), one tensor at a time.

        Args:
            config: `hf_config()` of this file.

        Raises:
            KeyMismatch: before the first tensor, if names or shapes are not exactly those of the architecture.
        """
        plan = _plan(_FAMILIES[self.architecture], config)
        stored = {tensor.name: tensor for tensor in self._reader.tensors}
        dims = _dims(config)
        mismatched = [
            f"{name} {tuple(int(n) for n in reversed(stored[name].shape))} instead of {wanted}"
            for name, entry in plan.items()
            if name in stored
            and (wanted := tuple(dims[word] for word in entry.shape)) != tuple(reversed(stored[name].shape.tolist()))
        ]
        missing, extra = sorted(set(plan) - set(stored)), sorted(set(stored) - set(plan))
        if missing or extra or mismatched:
            raise KeyMismatch(missing=missing, extra=extra, mismatched=mismatched, read_from=str(self.path))
        for name, entry in plan.items():
            weight = self._dequantized(stored[name])
            yield entry.hub, _UNDO[entry.undo](weight, config) if entry.undo else weight

    def _dequantized(self, tensor: Any) -> np.ndarray:
        try:
            weight: np.ndarray = self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedLoad(
                f"tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which the gguf package cannot undo.",
                read_from=str(self.path),
                remedy="use a file in another quantisation",
            ) from error
        if not weight.flags.writeable:  # unquantised: a view of the file
            weight = weight.copy()
        return weight.reshape(tuple(reversed(tensor.shape.tolist())))


def gguf_to_hf_folder(
    gguf_path: str | Path, out_folder: str | Path, dtype: str = "float32", *, overwrite: bool = False
) -> Path:
    """Writes a Hugging Face folder (config, tokenizer, safetensors) from a GGUF file; all of it or nothing.

    Args:
        gguf_path: the GGUF file.
        out_folder: the folder to create; written beside it under a temporary name and moved when complete.
        dtype: "float32" keeps the dequantised values exactly; "bfloat16" and "float16" round them to nearest.
        overwrite: replace a folder that is not empty.

    Returns:
        `out_folder`.

    Raises:
        CheckpointNotFound, CorruptCheckpoint, UnsupportedModelType, UnsupportedConfig, KeyMismatch: see `GGUFFile`.
        FolderNotEmpty: `out_folder` holds something and `overwrite` is False.
        UnsupportedLoad: a dtype that is none of the three.
    """
    if dtype not in DTYPES:
        raise UnsupportedLoad(f"dtype = {dtype!r} is not one of {', '.join(DTYPES)}.", remedy="choose one of them")
    out = Path(out_folder)
    if out.exists() and not overwrite and (out.is_file() or any(out.iterdir())):
        raise FolderNotEmpty(f"{out} is not empty.", remedy="choose another folder, or pass overwrite=True")
    file = GGUFFile(gguf_path)
    config = file.hf_config()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(weight)).to(DTYPES[dtype])
            for name, weight in file.hf_tensors(config)
        }
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise CorruptCheckpoint(
                    f"tensor {name} holds values that are not finite as {dtype}.",
                    read_from=str(file.path),
                    remedy="fetch the file again, or choose another dtype",
                )
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        _write_json(partial / "config.json", config | {"dtype": dtype})
        _write_json(partial / "generation_config.json", file.special_ids())
        write_tokenizer(file.tokens(), partial)
        partial.chmod(0o755)  # a temporary folder and a safetensors file start out private
        (partial / "model.safetensors").chmod(0o644)
        if out.exists():
            shutil.rmtree(out)
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def _plan(family: _Family, config: Mapping[str, Any]) -> dict[str, _Tensor]:
    """GGUF name to hub tensor, for exactly this config."""
    plan = {
        name: entry for name, entry in family.model.items() if entry is not _HEAD or not config["tie_word_embeddings"]
    }
    for layer in range(config["num_hidden_layers"]):
        for name, entry in family.layer.items():
            plan[f"blk.{layer}.{name}"] = _Tensor(f"model.layers.{layer}.{entry.hub}", entry.shape, entry.undo)
    return plan


def _dims(config: Mapping[str, Any]) -> dict[str, int]:
    """The words that `_Tensor.shape` is written in."""
    head_dim = config["head_dim"]
    return {
        "vocab": config["vocab_size"],
        "hidden": config["hidden_size"],
        "mlp": config["intermediate_size"],
        "q": config["num_attention_heads"] * head_dim,
        "kv": config["num_key_value_heads"] * head_dim,
        "head": head_dim,
    }


def _shortest(value: float) -> float:
    """The decimal number somebody wrote before it was stored in 32 bits: 9.99999997e-07 is 1e-06 again."""
    if not math.isfinite(value):
        return value
    return float(str(np.float32(value)))


def _write_json(path: Path, payload: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(payload, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
