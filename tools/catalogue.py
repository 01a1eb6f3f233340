"""The families and sizes of `bestiary.models`, with parameter counts taken from the modules themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bestiary.models
from bestiary.kernels.errors import BestiaryError
from bestiary.models import Decoder, DecoderConfig
from bestiary.training.flops import StepFlops

CONTEXT = 4096  # tokens of the document over which FLOPs are averaged
BYTES = 2  # bfloat16
VERDICTS = Path(__file__).with_name("verdicts.json")
"""What accepted each family, in short; `make readme` writes it from the records in ports/."""

# What stands before a size in its published name, where that is not the class's name and a dash.
_PREFIXES = {
    "Cohere2": "command-",
    "DeepseekV3": "deepseek-v3-",
    "Ernie45": "ernie-4.5-",
    "Glm4": "glm-4-",
    "Glm4MoE": "glm-",
    "GptOss": "gpt-oss-",
    "HunYuanDenseV1": "hunyuan-",
    "Qwen2": "qwen",
    "Qwen2MoE": "qwen2-",
    "Qwen3MoE": "qwen3-",
    "SeedOss": "seed-oss-",
}
_OWN_NAMES = {"afm-4.5b", "phi-4", "qwen1.5-a2.7b", "smollm2-135m"}


class NoSuchFamily(BestiaryError):
    """A name of a family or size that `bestiary.models` does not export, or that several answer to.

    Remedy: `bestiary models` lists families and sizes.
    """


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One size of one family.

    Attributes:
        name: by which `bestiary models show` and people ask for it, e.g. gemma3-270m.
        parameters: distinct ones (a tied head once).   active: without the experts that a token is not routed to.
        weights_bytes: in bfloat16.   training_bytes: weights, gradients and AdamW's two states in bfloat16.
        cache_bytes_per_token: keys and values of all layers in bfloat16; a layer with a window stops at the window.
        forward_flops, training_flops: of a token, the mean over a document of `CONTEXT` tokens.
        verified: date of the verdict that accepted the family; None: it has no record.
    """

    name: str
    family: str
    model_type: str
    size: str
    parameters: int
    active: int
    layers: int
    hidden_size: int
    vocab_size: int
    weights_bytes: int
    training_bytes: int
    cache_bytes_per_token: int
    forward_flops: float
    training_flops: float
    verified: str | None

    def as_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return asdict(self)


def families() -> dict[str, type[Decoder]]:
    """The family classes that `bestiary.models` exports, by class name, in the order of its `__all__`."""
    exported = {name: getattr(bestiary.models, name) for name in bestiary.models.__all__}
    return {
        name: item
        for name, item in exported.items()
        if isinstance(item, type) and issubclass(item, Decoder) and item is not Decoder and item.sizes
    }


def list_models(*, family: str | None = None) -> list[ModelRow]:
    """One row per size, built on the meta device (no memory, no download).

    Args:
        family: class name ("Qwen3") or model_type ("qwen3") to keep; None keeps all.

    Raises:
        NoSuchFamily: `family` names none of them.
    """
    verdicts = accepted()
    rows = [
        _row(name, size, cls, verdicts)
        for name, cls in families().items()
        for size, config in cls.sizes.items()
        if family is None or family in (name, config.model_type)
    ]
    if not rows:
        raise NoSuchFamily(f"family = {family!r} is not in the zoo.", remedy=f"choose one of {', '.join(families())}")
    return rows


def accepted() -> Mapping[str, Mapping[str, Any]]:
    """`VERDICTS`: of each model_type the verdict's date, versions, and counts of checks and planted bugs."""
    found: dict[str, dict[str, Any]] = json.loads(VERDICTS.read_text(encoding="utf-8"))["families"]
    return found


def published_name(family: str, size: str) -> str:
    """The name of a size as its makers write it, in small letters: gemma3-270m, qwen2.5-0.5b, gpt-oss-20b, phi-4."""
    return size if size in _OWN_NAMES else _PREFIXES.get(family, f"{family.lower()}-") + size


def find(name: str) -> tuple[str, str]:
    """Class name and size of a published size such as gemma3-270m, or of a family: its smallest size.

    Case, dashes, dots and underscores make no difference; a family goes by class name or model_type.

    Raises:
        NoSuchFamily: nothing has that name, or several sizes have it.
    """
    wanted = _plain(name)
    hits: list[tuple[str, str]] = []
    for family, cls in families().items():
        model_types = {config.model_type for config in cls.sizes.values()}
        stems = {_plain(family), *map(_plain, model_types), *(_plain(one.removesuffix("_text")) for one in model_types)}
        if wanted in stems:
            return family, min(cls.sizes, key=lambda size: _active(cls.sizes[size], CONTEXT))
        for size in cls.sizes:
            names = {_plain(published_name(family, size)), *(stem + _plain(size) for stem in stems)}
            if wanted in names:
                hits.append((family, size))
    if len(hits) == 1:
        return hits[0]
    near = [f"{published_name(*hit)} ({hit[0]})" for hit in hits] or _near(wanted)
    what = "several sizes answer to" if hits else "no family or size is called"
    raise NoSuchFamily(
        f"{what} {name!r}.",
        remedy=(f"choose one of {', '.join(near)}; " if near else "") + "`bestiary models` lists all",
    )


def _near(wanted: str) -> list[str]:
    names = [published_name(family, size) for family, cls in families().items() for size in cls.sizes]
    letters = re.match(r"[a-z]*", wanted)
    return [name for name in names if letters and letters[0] and name.startswith(letters[0])][:8]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _row(family: str, size: str, cls: type[Decoder], verdicts: Mapping[str, Mapping[str, Any]]) -> ModelRow:
    config = cls.sizes[size]
    model = cls(config, device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    forward = StepFlops(config, backward=False).totals([CONTEXT], CONTEXT).model / CONTEXT
    training = StepFlops(config).totals([CONTEXT], CONTEXT).model / CONTEXT
    return ModelRow(
        name=published_name(family, size),
        family=family,
        model_type=config.model_type,
        size=size,
        parameters=parameters,
        active=parameters - _idle(model),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        weights_bytes=BYTES * parameters,
        training_bytes=4 * BYTES * parameters,
        cache_bytes_per_token=BYTES * _cached(config),
        forward_flops=forward,
        training_flops=training,
        verified=verdicts.get(config.model_type, {}).get("date"),
    )


def _idle(model: Decoder) -> int:
    """Parameters of the experts that a token is not routed to."""
    moe = model.decoder_config.moe
    if moe is None:
        return 0
    experts = sum(p.numel() for name, p in model.named_parameters() if ".mlp.experts." in name)
    return experts - experts * moe.router.top_k // moe.num_experts


def _cached(config: DecoderConfig) -> int:
    """Numbers that the cache takes for a token, in all layers."""
    heads = config.attention
    return config.num_hidden_layers * heads.num_kv_heads * (heads.head_dim + heads.v_head_dim)


def _active(config: DecoderConfig, tokens: int) -> int:
    """FLOPs of a forward pass: what the smallest of a family's sizes is told by."""
    return StepFlops(config, backward=False).totals([tokens], tokens).model


def build(family: str, size: str) -> Decoder:
    """A size on the meta device: shapes and names, no memory."""
    cls = families()[family]
    return cls(cls.sizes[size], device="meta")
