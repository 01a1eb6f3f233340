"""Rotary embeddings between HF's JSON (legacy and v5) and `Rope`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from math import log, sqrt
from typing import TYPE_CHECKING, Any, get_type_hints

from bestiary.models.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

if TYPE_CHECKING:
    from bestiary.bridges.fields import HFFields

# A scaling's fields carry the names of HF's keys, so each dataclass is its own table of known keys.
_SCALINGS: Mapping[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
    "proportional": ProportionalScaling,
}
_CONTEXT = "original_max_position_embeddings"


def rope_from_hf(params: HFFields, *, theta: float, rotary_dim: int, max_positions: int, alpha: bool = False) -> Rope:
    """One rotary embedding from one dict of HF's.

    Args:
        params: the dict `rope_parameters` (or one layer type's part of it), or `rope_scaling`.
        theta: base to use when the dict has none.
        rotary_dim: coordinates that turn.
        max_positions: the config's `max_position_embeddings`, the context where the dict names none.
        alpha: whether the class reads the `alpha` of dynamic scaling.
    Raises:
        UnsupportedConfig: an unknown kind or key, or two names of the kind that disagree.
    """
    kind = params.take("rope_type", str, params.take("type", str, "default"))
    legacy = params.take("type", str, kind)
    if legacy != kind:
        raise params.unsupported("type", f"contradicts rope_type = {kind!r}.", remedy="keep one of the two")
    base = params.positive_float("rope_theta", theta)
    if kind != "proportional":
        params.inert("partial_rotary_factor", allowed=(1.0, None), why="the whole head turns in this family")
    scaling = None if kind == "default" else _scaling(params, kind, max_positions)
    if isinstance(scaling, DynamicScaling) and alpha:
        scaling = replace(scaling, alpha=params.take_optional("alpha", float) or None)  # HF reads 0 as absent
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            params.inert(name, why="of YaRN; these files carry it beside dynamic scaling")
    params.done()
    return Rope(theta=base, rotary_dim=rotary_dim, scaling=scaling)


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """The v5 dict of `rope`, every known key explicit."""
    if rope.scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    kind = next(name for name, cls in _SCALINGS.items() if isinstance(rope.scaling, cls))
    values = {f.name: getattr(rope.scaling, f.name) for f in fields(rope.scaling)}
    if kind == "dynamic":  # HF reads the config's own max_position_embeddings here
        del values[_CONTEXT]
    if values.get("factor") == 1.0 and kind == "proportional":
        del values["factor"]  # HF warns of it, and computes with it
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": kind, "rope_theta": rope.theta} | {k: v for k, v in listed.items() if v is not None}


def _scaling(params: HFFields, kind: str, max_positions: int) -> RopeScaling:
    if kind not in _SCALINGS:
        raise params.unsupported(
            "rope_type", "is not implemented.", remedy=f"one of default, {', '.join(_SCALINGS)}", value=kind
        )
    if kind == "dynamic":
        return DynamicScaling(factor=params.positive_float("factor"), original_max_position_embeddings=max_positions)
    if kind == "longrope":
        return _longrope(params, max_positions)
    if kind == "proportional":
        return _proportional(params)
    cls = _SCALINGS[kind]
    types = get_type_hints(cls)
    values: dict[str, Any] = {}
    for f in fields(cls):
        if types[f.name] == float | None:
            values[f.name] = params.take_optional(f.name, float)
        elif f.name == _CONTEXT:
            values[f.name] = params.positive(f.name, max_positions)
        elif f.default is MISSING:
            values[f.name] = params.positive_float(f.name)
        else:  # HF reads an explicit null (and 0) as the default
            values[f.name] = _or_default(params.take_optional(f.name, types[f.name], f.default), f.default)
    return cls(**values)


def _proportional(params: HFFields) -> ProportionalScaling:
    share = params.take("partial_rotary_factor", float, 1.0)
    if not 0 <= share <= 1:
        raise params.unsupported("partial_rotary_factor", "is no share of a head.", remedy="a number in [0, 1]")
    return ProportionalScaling(partial_rotary_factor=share, factor=params.positive_float("factor", 1.0))


def _or_default(value: Any, default: Any) -> Any:
    return value if value or isinstance(value, bool) else default


def _longrope(params: HFFields, max_positions: int) -> LongRopeScaling:
    original = params.positive(_CONTEXT, max_positions)
    factor = params.positive_optional("factor", float) or max_positions / original
    attention_factor = params.take_optional("attention_factor", float)
    return LongRopeScaling(
        short_factor=tuple(params.take("short_factor", list)),
        long_factor=tuple(params.take("long_factor", list)),
        original_max_position_embeddings=original,
        attention_factor=longrope_attention_factor(factor, original) if attention_factor is None else attention_factor,
    )


def longrope_attention_factor(factor: float, original: int) -> float:
    """√(1 + ln factor / ln original) (arXiv:2402.13753), 1 where the context is not stretched."""
    return 1.0 if factor <= 1.0 else sqrt(1 + log(factor) / log(original))
