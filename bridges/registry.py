"""Which bridge serves which `model_type`: the entry-point group `bestiary.bridges`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bestiary.bridges.bridge import Bridge
from bestiary.bridges.errors import UnsupportedLoad, UnsupportedModelType
from bestiary.bridges.hub import CONFIG, resolve
from bestiary.bridges.loading import read_config
from bestiary.bridges.peft_import import base_of, is_adapter

if TYPE_CHECKING:
    from bestiary.bridges.hf_fallback_model import HFDecoder
    from bestiary.models.decoder import Decoder

_GROUP, _AUTO = "bestiary.bridges", "auto"
FALLBACK = "hf"  # the backend that wraps transformers' own model


@cache
def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP) if point.name != _AUTO}


def get_bridge(model_type: str, *, read_from: str | None = None) -> Bridge:
    """The bridge of an HF `model_type`.

    Raises:
        UnsupportedModelType: lists the known ones.
    """
    if model_type not in _points():
        raise UnsupportedModelType(
            f"model_type = {model_type!r} has no bridge.",
            read_from=read_from,
            remedy=f"{_offer(model_type)}; known: {', '.join(sorted(_points()))}; "
            f"another package adds one by the entry-point group {_GROUP}",
        )
    bridge = _points()[model_type].load()
    assert isinstance(bridge, Bridge)
    return bridge


def _offer(model_type: str) -> str:
    """What there is for a type without a bridge."""
    from bestiary.bridges.hf_fallback import knows_model_type

    try:
        known = knows_model_type(model_type)
    except ImportError:  # a process that runs our models alone, transformers out of reach
        known = True
    if known:
        return f'AutoDecoder.from_pretrained(…, backend="{FALLBACK}") wraps transformers\' own model, unverified'
    return (
        f"transformers {version('transformers')} has no causal language model of this type, so "
        f'backend="{FALLBACK}" would need trust_remote_code=True'
    )


def registered_bridges() -> dict[str, Bridge]:
    """Every registered bridge by its own `model_type` (aliases such as "gemma3" appear once, as "gemma3_text")."""
    bridges = (get_bridge(name) for name in sorted(_points()))
    return {bridge.model_type: bridge for bridge in bridges}


def load_decoder(
    src: str | Path, *, revision: str | None = None, trust_remote_code: bool = False, **options: Any
) -> Decoder:
    """A model of whatever family the checkpoint's config names; options as `loading.load_checkpoint`.

    Args:
        src: a checkpoint; or a PEFT adapter that names its base, which is then loaded with the adapter built in.
        trust_remote_code: with backend="hf", run modelling code that comes with the checkpoint.
    Raises:
        UnsupportedModelType: no bridge for the config's `model_type`.
        UnsupportedLoad: an adapter that names no base, or is given another adapter; code without the fallback backend.
    """
    if options.get("backend") == FALLBACK:
        found = _load_fallback(src, revision=revision, trust_remote_code=trust_remote_code, **options)
        return cast("Decoder", found)  # the same surface, which AutoDecoder's signature tells apart
    if trust_remote_code:
        raise UnsupportedLoad(
            "trust_remote_code = True with the native backend, which never runs code from a checkpoint.",
            remedy=f'drop it, or pass backend="{FALLBACK}" too',
        )
    folder = resolve(src, revision=revision)
    if is_adapter(folder):
        base, base_revision = base_of(folder, options.pop("lora", None))
        return load_decoder(base, revision=base_revision, lora=folder, **options)
    model_type = read_config(folder).get("model_type")
    if not isinstance(model_type, str):
        stated = "states no model_type" if model_type is None else f"states model_type = {model_type!r}, no name"
        raise UnsupportedModelType(
            f"{CONFIG} {stated}.",
            read_from=str(folder / CONFIG),
            remedy=f"add the family of these weights, one of {', '.join(sorted(_points()))}",
        )
    return get_bridge(model_type, read_from=str(folder / CONFIG)).load(folder, name=str(src), **options)


def _load_fallback(src: str | Path, *, backend: str, cls: type[Any] | None = None, **options: Any) -> HFDecoder:
    """The wrapped transformers model; a family class cannot be asked for one."""
    from bestiary.bridges.hf_fallback import load_fallback

    if options.pop("head", None) is not None:
        raise UnsupportedLoad(
            f"head with backend = {backend!r}, which wraps language models alone.",
            remedy="drop one of the two, or call transformers' AutoModelForSequenceClassification",
        )
    if cls is not None:
        raise UnsupportedLoad(
            f"backend = {backend!r} wraps transformers' model, which is no {cls.__name__}.",
            remedy=f'AutoDecoder.from_pretrained(src, backend="{backend}")',
        )
    return load_fallback(src, native=frozenset(_points()), **options)


class _Auto:
    """The entry point "auto": loads whatever a checkpoint says it is."""

    load = staticmethod(load_decoder)


AUTO = _Auto()
