"""Rotary embeddings between HF's JSON (legacy and v5) and `Rope`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from math import log, nextafter, sqrt
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


def rope_from_hf(
    params: HFFields,
    *,
    theta: float,
    rotary_dim: int,
    max_positions: int,
    alpha: bool = False,
    share: float | None = None,
) -> Rope:
    """One rotary embedding from one dict of HF's.

    Args:
        params: the dict `rope_parameters` (or one layer type's part of it), or `rope_scaling`.
        theta: base to use when the dict has none.
        rotary_dim: coordinates that turn, or of which a share does.
        share: of `rotary_dim` that turns where the dict does not say; None: all, whatever the dict would say.
        max_positions: the config's `max_position_embeddings`, the context where the dict names none.
        alpha: whether the class reads the `alpha` of dynamic scaling.
    Raises:
        UnsupportedConfig: an unknown kind or key, two names of the kind that disagree, a share that turns no pairs.
    """
    kind = params.take("rope_type", str, params.take("type", str, "default"))
    legacy = params.take("type", str, kind)
    if legacy != kind:
        raise params.unsupported("type", f"contradicts rope_type = {kind!r}.", remedy="keep one of the two")
    base = params.positive_float("rope_theta", theta)
    if share is not None:
        share = params.take("partial_rotary_factor", float, share)
    elif kind != "proportional":
        params.inert("partial_rotary_factor", allowed=(1.0, None), why="the whole head turns in this family")
    if share is not None and kind != "proportional":
        rotary_dim = _turning(params, rotary_dim, share)
    scaling = None if kind == "default" else _scaling(params, kind, max_positions, rotary_dim, share)
    if isinstance(scaling, DynamicScaling) and alpha:
        scaling = replace(scaling, alpha=params.take_optional("alpha", float) or None)  # HF reads 0 as absent
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            params.inert(name, why="of YaRN; these files carry it beside dynamic scaling")
    params.done()
    return Rope(theta=base, rotary_dim=rotary_dim, scaling=scaling)


def _turning(params: HFFields, head_dim: int, share: float) -> int:
    """Coordinates of a head that turn."""
    turning = int(head_dim * share) if 0 < share <= 1 else 0
    if turning < 2 or turning % 2:
        raise params.unsupported(
            "partial_rotary_factor",
            f"turns {turning} of a head's {head_dim} coordinates.",
            remedy="a share in (0, 1] that turns whole pairs",
            value=share,
        )
    return turning


def share_of(rotary_dim: int, head_dim: int) -> float:
    """The `partial_rotary_factor` by which transformers finds `rotary_dim` again."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else nextafter(share, 2.0)


def rope_to_hf(rope: Rope, head_dim: int | None = None) -> dict[str, Any]:
    """The v5 dict of `rope`, every known key explicit; with `head_dim`, the share of a head that turns."""
    if head_dim is not None and not isinstance(rope.scaling, ProportionalScaling):
        return {**rope_to_hf(rope), "partial_rotary_factor": share_of(rope.rotary_dim, head_dim)}
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


def _scaling(params: HFFields, kind: str, max_positions: int, rotary_dim: int, share: float | None) -> RopeScaling:
    if kind not in _SCALINGS:
        raise params.unsupported(
            "rope_type", "is not implemented.", remedy=f"one of default, {', '.join(_SCALINGS)}", value=kind
        )
    if kind == "dynamic":
        return DynamicScaling(factor=params.positive_float("factor"), original_max_position_embeddings=max_positions)
    if kind == "longrope":
        return _longrope(params, max_positions, rotary_dim)
    if kind == "proportional":
        return _proportional(params, 1.0 if share is None else share)
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


def _proportional(params: HFFields, share: float) -> ProportionalScaling:
    share = params.take("partial_rotary_factor", float, share)
    if not 0 <= share <= 1:
        raise params.unsupported("partial_rotary_factor", "is no share of a head.", remedy="a number in [0, 1]")
    return ProportionalScaling(partial_rotary_factor=share, factor=params.positive_float("factor", 1.0))


def _or_default(value: Any, default: Any) -> Any:
    return value if value or isinstance(value, bool) else default


def _longrope(params: HFFields, max_positions: int, rotary_dim: int) -> LongRopeScaling:
    short, long = (tuple(params.take(name, list)) for name in ("short_factor", "long_factor"))
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != rotary_dim // 2 or not all(isinstance(one, int | float) and one > 0 for one in factors):
            raise params.unsupported(
                name,
                f"is not one positive number for each of the {rotary_dim // 2} pairs that turn.",
                remedy="correct the config",
            )
    original = params.positive(_CONTEXT, max_positions)
    factor = params.positive_optional("factor", float) or max_positions / original
    attention_factor = params.take_optional("attention_factor", float)
    return LongRopeScaling(
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=original,
        attention_factor=longrope_attention_factor(factor, original) if attention_factor is None else attention_factor,
    )


def longrope_attention_factor(factor: float, original: int) -> float:
    """√(1 + ln factor / ln original) (arXiv:2402.13753), 1 where the context is not stretched."""
    return 1.0 if factor <= 1.0 else sqrt(1 + log(factor) / log(original))
