"""Sections of a run's file: frozen records that refuse unknown keys; errors name key, value and the nearest key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from bestiary.kernels.errors import BestiaryError


class Section(BaseModel):
    """A part of a run's file. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


S = TypeVar("S", bound=Section)


def read_mapping(file: Path, error: type[BestiaryError]) -> dict[str, Any]:
    """The content of a YAML or JSON file, which is a mapping.

    Raises:
        error: the file is missing, is not readable as what its name says, or is no mapping.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as problem:
        raise error(f"the run's file cannot be read ({problem.strerror}).", read_from=str(file)) from problem
    try:
        whole = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as problem:
        raise error(f"not readable as {file.suffix[1:] or 'yaml'}: {problem}", read_from=str(file)) from problem
    if not isinstance(whole, Mapping):
        raise error("the file is no mapping of sections.", read_from=str(file), remedy="data: {…}, optim: {…}, …")
    return dict(whole)


def validated(section: type[S], value: Any, *, place: str, read_from: str, error: type[BestiaryError]) -> S:
    """`value` as a section.

    Args:
        place: where it stands in the file, "" for the whole of it.
    Raises:
        error: the first wrong key or value, by its dotted name; an unknown key with the nearest known one.
    """
    try:
        return section.model_validate(value)
    except ValidationError as problem:
        first = problem.errors()[0]
        path = [str(part) for part in first["loc"]]
        where = ".".join((*([place] if place else []), *path)) or "the file"
        if first["type"] == "extra_forbidden":
            near = get_close_matches(path[-1], fields_at(section, path[:-1]), 1)
            raise error(
                f"{where} is no known key.",
                read_from=read_from,
                remedy=f"did you mean {near[0]}?" if near else f"one of {', '.join(fields_at(section, path[:-1]))}",
            ) from problem
        given = "" if first["type"] == "missing" or isinstance(first["input"], Mapping) else f" = {first['input']!r}"
        raise error(f"{where}{given}: {first['msg'].removeprefix('Value error, ')}.", read_from=read_from) from problem


def fields_at(section: type[BaseModel], path: list[str]) -> list[str]:
    """Names of the keys that stand at a path of keys and list indices below a section."""
    here: type[BaseModel] | None = section
    for part in path:
        if here is None or part not in here.model_fields:
            continue  # an index into a list, whose element is already `here`
        here = _section_in(here.model_fields[part].annotation)
    return [] if here is None else list(here.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section type inside an annotation such as `Section | None` or `tuple[Section, …]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _section_in(inner)
        if found is not None:
            return found
    return None
