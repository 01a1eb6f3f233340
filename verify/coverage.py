"""What became of a config field: Hugging Face's own value, what our bridge made of the new one, where it is read."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal

from bestiary.bridges.errors import UnsupportedConfig
from bestiary.models import DecoderConfig
from bestiary.verify.lab import Lab
from bestiary.verify.reference import hf_config
from bestiary.verify.sweep import Kind, Variant
from bestiary.verify.verdict import FieldFinding

Answer = Literal["equal", "refused", "ignored", "different", "moved", "not compared"]

MAX_READ = 6
MAX_TEXT = 60
READERS = ("bestiary.bridges.fields", "bestiary.bridges.rope")
"""Modules that read fields for every bridge."""


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _short(value: Any) -> str:
    text = str(_plain(value))
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _leaves(path: str, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if is_dataclass(before) and type(before) is type(after):
        for field in fields(before):
            name = f"{path}.{field.name}" if path else field.name
            yield from _leaves(name, getattr(before, field.name), getattr(after, field.name))
    else:
        yield f"{path}: {_short(before)} → {_short(after)}"


def read_as(before: DecoderConfig, after: DecoderConfig) -> list[str]:
    """Fields of our config that a variant changed, with both values."""
    return list(_leaves("", before, after))[:MAX_READ]


def hf_value(variant: Variant, defaults: Mapping[str, Any]) -> Any:
    """The value that a variant replaced: from the file, else from the class's `defaults`; None where neither has it."""
    for source in (variant.against, defaults):
        value: Any = source
        for name in variant.field.replace("[", ".").replace("]", "").split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


@cache
def read_in(module: str, field: str) -> str:
    """The line that names a field, as "bridges/gemma3.py:61": in the bridge's `module`, else in what all bridges share.

    "" where no line names it: a field that nobody reads.
    """
    leaf = field.replace("]", "").replace("[", ".").rpartition(".")[2].partition("+")[0]
    for name in (module, *READERS):
        if name not in sys.modules:
            continue
        lines = inspect.getsource(sys.modules[name]).splitlines()
        line = next((number for number, text in enumerate(lines, 1) if f'"{leaf}"' in text), None)
        if line is not None:
            return f"{'/'.join(name.split('.')[-2:])}.py:{line}"
    return ""


def _read_as(lab: Lab, variant: Variant) -> list[str]:
    """What the variant changed in our config; nothing where the config that it varies is none."""
    own = lab.ours.decoder_config
    try:
        before = own(variant.against)
    except UnsupportedConfig:
        return []
    return read_as(before, own(variant.raw))


def finding(lab: Lab, variant: Variant, kind: Kind, answer: Answer, note: str = "") -> FieldFinding:
    """The row of a variant in the verdict's coverage table."""
    defaults = lab.once(("defaults",), lambda: hf_config(lab.reference, lab.cases[lab.main_case]).to_dict())
    return FieldFinding(
        field=variant.field,
        value=variant.value,
        kind=kind.value,
        ours=answer,
        note=note[:200],
        before=hf_value(variant, defaults),
        read_as=[] if answer == "refused" else _read_as(lab, variant),
        read_in=read_in(lab.ours.current.config_from_hf.__module__, variant.field),
    )
