"""The verdict: what a run found, as data with invariants that no caller can break.

`passed + failed + skipped + refused == planned` holds for every level, a skip is never a pass, and the exit code
follows from the levels. The JSON schema of `Report` is committed beside this file; `write_schema` renews it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA = "bestiary.verdict/1"
SCHEMA_FILE = Path(__file__).with_name("verdict.schema.json")
MAX_POINTS = 128
"""Entries of a profile along one axis."""


class Exit(IntEnum):
    """Exit codes of `verify-bridge`."""

    PASS = 0
    NUMERIC = 1
    KEYS = 2
    CONFIG = 3
    REFUSED = 4
    INCONCLUSIVE = 5
    TAMPERING = 6
    USAGE = 7


PRECEDENCE = (
    Exit.USAGE,
    Exit.TAMPERING,
    Exit.KEYS,
    Exit.CONFIG,
    Exit.NUMERIC,
    Exit.INCONCLUSIVE,
    Exit.REFUSED,
    Exit.PASS,
)
"""Of several findings the first of these is the exit code."""

Word = Literal["pass", "numeric", "keys", "config", "refused", "inconclusive", "tampering", "usage"]
WORDS: dict[Exit, Word] = {
    Exit.PASS: "pass",
    Exit.NUMERIC: "numeric",
    Exit.KEYS: "keys",
    Exit.CONFIG: "config",
    Exit.REFUSED: "refused",
    Exit.INCONCLUSIVE: "inconclusive",
    Exit.TAMPERING: "tampering",
    Exit.USAGE: "usage",
}
Status = Literal["ok", "fail", "refused", "inconclusive", "not run"]


def today() -> str:
    """The date in UTC, as a verdict is stamped with."""
    return datetime.now(UTC).date().isoformat()


def first_present(codes: Iterable[int]) -> Exit:
    """The code of `codes` that comes first in `PRECEDENCE`; USAGE for none at all (nothing was verified)."""
    present = {Exit(code) for code in codes}
    return next((code for code in PRECEDENCE if code in present), Exit.USAGE)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True)


class Worst(_Strict):
    """The figure of a level that came nearest to its gate, or went furthest past it; figure None: not finite."""

    check: str
    figure: float | None
    gate: float


class Finding(_Strict):
    """One check that did not pass: its id, what it found and the exit code that finding means."""

    check: str
    status: Literal["failed", "refused", "inconclusive", "skipped"]
    exit_code: Exit
    detail: str
    figure: float | None = None
    gate: float | None = None


class Level(_Strict):
    """One level of VERIFY: counts, time, worst figure; `findings` lists every check that did not pass (at most 200)."""

    id: str
    title: str
    status: Status
    planned: int = Field(ge=0)
    passed: int = Field(ge=0)
    failed: int = Field(ge=0)
    skipped: int = Field(ge=0)
    refused: int = Field(ge=0)
    seconds: float = Field(ge=0)
    worst: Worst | None = None
    findings: list[Finding] = Field(default_factory=list, max_length=200)

    @model_validator(mode="after")
    def _counts_add_up(self) -> Level:
        if self.passed + self.failed + self.skipped + self.refused != self.planned:
            raise ValueError(
                f"{self.id}: passed {self.passed} + failed {self.failed} + skipped {self.skipped}"
                f" + refused {self.refused} is not planned {self.planned}"
            )
        if self.status == "ok" and (self.failed or self.skipped or not self.planned):
            raise ValueError(f"{self.id}: a level with failed, skipped or no checks cannot be ok")
        return self


class Divergence(_Strict):
    """The earliest place where inputs agree and an output does not."""

    module: str
    hf_module: str
    tensor: str
    layer: int | None = None
    layer_type: str | None = None
    position: int | None = None
    index: list[int] = Field(default_factory=list)
    ours: float | None = None
    hf: float | None = None
    rel_rms: float | None = None
    max_over_std: float | None = None
    inputs_equal: bool
    pattern: list[str] = Field(default_factory=list)
    case: str


class Hypothesis(_Strict):
    """A planted bug that, applied to the reference, reproduces our output to `reproduces_to` (max|Δ|/std)."""

    mutation_id: str
    reproduces_to: float
    hint: str
    config_fields: list[str] = Field(default_factory=list)


class FieldFinding(_Strict):
    """One config field and value, how Hugging Face reacts to it and what ours did.

    Attributes:
        before: the value it replaced in Hugging Face's config.
        read_as: fields of our config that it changed, with both values.
        read_in: the line of the bridge that names it.
    """

    field: str
    value: Any
    kind: Literal["live", "shape", "train", "dead", "rejected"]
    ours: Literal["equal", "refused", "ignored", "different", "moved", "not compared"]
    note: str = ""
    before: Any = None
    read_as: list[str] = Field(default_factory=list)
    read_in: str = ""


class LayerError(_Strict):
    """The worst figure of a layer's outputs, or of a module outside the layers (`layer` None); None: not finite."""

    module: str
    figure: float | None
    layer: int | None = None
    layer_type: str | None = None


class Profile(_Strict):
    """Where the error of one comparison lies: a level on one tiny config, or on one input of a checkpoint.

    Attributes:
        layers: in the order of execution.
        positions: the worst figure of `stride` positions each, from position 0 on; None: not finite.
    """

    level: str
    case: str
    gate: float
    layers: list[LayerError] = Field(default_factory=list, max_length=MAX_POINTS)
    stride: int = Field(default=1, ge=1)
    positions: list[float | None] = Field(default_factory=list, max_length=MAX_POINTS)


class Keys(_Strict):
    """Coverage of checkpoint keys."""

    missing: list[str] = Field(default_factory=list)
    unexpected: list[str] = Field(default_factory=list)
    shape_mismatch: list[str] = Field(default_factory=list)
    ignored_with_reason: dict[str, str] = Field(default_factory=dict)


class Activity(_Strict):
    """Whether the tiny configs exercise what they must: dead parameters and inactive clips make a run inconclusive."""

    dead_params: list[str] = Field(default_factory=list)
    clipped: dict[str, float] = Field(default_factory=dict)
    min_router_margin: float | None = None
    deterministic: bool = True


class KernelPath(_Strict):
    """An optimised implementation and whether level K ran it: `calls` counts its choices in the dispatch log.

    One for another device or another architecture is named here and counts in no level.
    """

    operation: str
    implementation: str
    status: Literal["ran", "another device", "another architecture"]
    calls: int = Field(ge=0)
    note: str = ""


class Implementation(_Strict):
    """Somebody else's implementation, verified in place of ours.

    Attributes:
        factory: "package.module:factory", as `--ours` names it.
        source_hash: sha256 over its file; "" without one.
        omitted: levels and checks that it was not asked, and why: what they look at it does not have.
    """

    factory: str
    source_hash: str
    omitted: list[str] = Field(default_factory=list)


class Verdict(_Strict):
    """The finding for one family or checkpoint; `implementation` where it is not ours that was verified.

    Attributes:
        made: date on which it was made, in UTC, as 2026-11-30; "" in a verdict from before there was a date.
        revision: commit of the hub's repository that was verified; None: a family, or a folder of somebody's own.
    """

    family: str
    model_type: str
    reference_class: str
    head: Literal["lm", "score"] = "lm"
    verdict: Word
    exit_code: Exit
    scope: Literal["full", "partial"]
    gate_version: int
    official: bool
    env: dict[str, str]
    hashes: dict[str, str]
    seed: int
    made: str = ""
    revision: str | None = None
    seconds: float
    levels: list[Level]
    cases: dict[str, dict[str, Any]] = Field(default_factory=dict)
    first_divergence: Divergence | None = None
    hypotheses: list[Hypothesis] = Field(default_factory=list)
    keys: Keys = Field(default_factory=Keys)
    config: list[FieldFinding] = Field(default_factory=list)
    activity: dict[str, Activity] = Field(default_factory=dict)
    kernels: list[KernelPath] = Field(default_factory=list)
    profiles: list[Profile] = Field(default_factory=list)
    weak: list[str] = Field(default_factory=list)
    implementation: Implementation | None = None
    repro: str | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _passes_only_if_everything_did(self) -> Verdict:
        if WORDS[self.exit_code] != self.verdict:
            raise ValueError(f"verdict {self.verdict!r} and exit code {int(self.exit_code)} contradict each other")
        if self.exit_code == Exit.PASS:
            if not self.levels or any(level.status != "ok" for level in self.levels):
                raise ValueError("a verdict passes only if it has levels and each of them is ok")
            if self.error or self.weak:
                raise ValueError("a verdict with an error or a weak test cannot pass")
        return self


class Report(_Strict):
    """What `--json` writes: one verdict a family and the exit code over all of them."""

    schema_: Literal["bestiary.verdict/1"] = Field(default="bestiary.verdict/1", alias="schema")
    exit_code: Exit
    verdicts: list[Verdict]

    @model_validator(mode="after")
    def _code_follows(self) -> Report:
        expected = first_present(verdict.exit_code for verdict in self.verdicts)
        if self.exit_code != expected:
            raise ValueError(f"exit code {int(self.exit_code)} does not follow from the verdicts ({int(expected)})")
        return self

    def to_json(self, *, indent: int | None = 1) -> str:
        """The report as JSON text, keys as in the schema; one line with `indent` None."""
        return self.model_dump_json(by_alias=True, indent=indent)


def report(verdicts: list[Verdict]) -> Report:
    """The report over `verdicts`, with the exit code that follows from them."""
    return Report(exit_code=first_present(verdict.exit_code for verdict in verdicts), verdicts=verdicts)


def schema_text() -> str:
    """The JSON schema of `Report`, as committed in `SCHEMA_FILE`."""
    return json.dumps(Report.model_json_schema(by_alias=True), indent=1, sort_keys=True) + "\n"


def write_schema() -> Path:
    """Renews the committed schema file and returns its path."""
    SCHEMA_FILE.write_text(schema_text())
    return SCHEMA_FILE
