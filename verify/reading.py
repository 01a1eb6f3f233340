"""Results read back from their JSON files: whole and of the known schema, or an error that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from bestiary.kernels.errors import BestiaryError
from bestiary.verify.verdict import SCHEMA, Report

if TYPE_CHECKING:
    from bestiary.verify.self_test import SelfTest

M = TypeVar("M", bound=BaseModel)


class CorruptVerdict(BestiaryError):
    """A file that is no result of `verify-bridge`: cut off, edited into a contradiction, or of another schema.

    Remedy: write the file again: `verify-bridge … --json FILE`.
    """


def _read(path: str | Path, model: type[M], schema: str, remedy: str) -> M:
    """A result of type `model` from a file, all its invariants checked again."""
    file = Path(path)
    if not file.is_file():
        raise CorruptVerdict(f"{path} is no file.", remedy=remedy)
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or no JSON
        raise CorruptVerdict(f"{path} is no JSON document: {error}.", remedy=remedy) from error
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise CorruptVerdict(f"{path} has the schema {found!r}, not {schema!r}.", remedy=remedy)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise CorruptVerdict(
            f"{path} is no result of verify-bridge: {place}: {first['msg']} ({error.error_count()} problems).",
            remedy=remedy,
        ) from error


def read_report(path: str | Path) -> Report:
    """The report that `verify-bridge --json` wrote.

    Raises:
        CorruptVerdict: no such file, no JSON, another schema, or content that contradicts itself.
    """
    return _read(path, Report, SCHEMA, "write it again: verify-bridge … --json FILE")


def read_self_test(path: str | Path) -> SelfTest:
    """The result that `verify-bridge self-test --json` wrote.

    Raises:
        CorruptVerdict: as for `read_report`.
    """
    from bestiary.verify.self_test import SelfTest

    return _read(path, SelfTest, "bestiary.self_test/1", "write it again: verify-bridge self-test --json FILE")
