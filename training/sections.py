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
        error: the file is missing, is not readable as what its name says, names a key twice, or is no mapping.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # editors put a mark in front that JSON has no place for
    except OSError as problem:
        raise error(f"the run's file cannot be read ({problem.strerror}).", read_from=str(file)) from problem
    except UnicodeDecodeError as problem:
        raise error(
            f"byte {problem.start} is no UTF-8: {problem.object[problem.start : problem.start + 1]!r}.",
            read_from=str(file),
            remedy="save the file as UTF-8",
        ) from problem
    try:
        whole = json.loads(text, object_pairs_hook=_once) if file.suffix == ".json" else _yaml(text)
    except (json.JSONDecodeError, _Twice, yaml.YAMLError) as problem:
        raise error(f"not readable as {file.suffix[1:] or 'yaml'}: {problem}", read_from=str(file)) from problem
    if not isinstance(whole, Mapping):
        raise error("the file is no mapping of sections.", read_from=str(file), remedy="data: {…}, optim: {…}, …")
    return dict(whole)


class _Twice(ValueError):
    """A key stands twice in one mapping, of which the last would count and the first be lost without a word."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(f"the key {key!r} stands twice in one mapping")
        found[key] = value
    return found


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which refuses what `_once` refuses; what `<<` brings may be overruled."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge")]
        seen: set[tuple[str, str]] = set()
        for key in keys:
            if (key.tag, key.value) in seen:
                raise _Twice(
                    f"the key {key.value!r} stands twice in one mapping, again in line {key.start_mark.line + 1}"
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


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


def override(section: type[BaseModel], whole: dict[str, Any], text: str, refused: type[BestiaryError]) -> None:
    """Write one `a.b=value`, the value as YAML, into the mapping of a file.

    Args:
        section: of the whole file.
    Raises:
        refused: it is no such change, or names a place below a value.
    """
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise refused(f"{text!r} is no change of the run's file.", remedy="section.key=value, e.g. optim.lr=1e-5")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise refused(f"{path} = {value!r} is no YAML value.", remedy="quote it") from error
    if isinstance(parsed, str):
        parsed = _number(parsed)
    here: Any = whole
    for depth, key in enumerate(keys[:-1]):
        inner = here[int(key)] if isinstance(here, list) and key.isdigit() and int(key) < len(here) else None
        if isinstance(here, dict):
            inner = here.get(key)
            if inner is None:
                inner = here[key] = {}
        if not isinstance(inner, dict | list):
            known = ", ".join(fields_at(section, keys[:depth]))
            raise refused(f"{'.'.join(keys[: depth + 1])} has no keys below it.", remedy=f"one of {known}")
        here = inner
    if isinstance(here, list):
        if not keys[-1].isdigit() or int(keys[-1]) >= len(here):
            raise refused(f"{path}: the list has {len(here)} elements.", remedy=f"an index below {len(here)}")
        here[int(keys[-1])] = parsed
    else:
        here[keys[-1]] = parsed


def _number(text: str) -> str | float:
    """YAML reads 1e-5 as text, for want of a dot."""
    try:
        return float(text)
    except ValueError:
        return text
