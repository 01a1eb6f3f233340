"""Progress between two verdicts: which levels and checks pass now, which fail now, how the figures moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bestiary.kernels.errors import BestiaryError
from bestiary.verify.report import figure_text
from bestiary.verify.verdict import Exit, Level, Report, Verdict, Word, Worst

MAX_SHOWN = 6
MAX_FINDINGS = 200
"""At so many findings a level has left some out, and what it does not list may fail all the same."""


class OtherGateVersion(BestiaryError):
    """Two verdicts that were judged by other gates: "ok" does not mean the same in both.

    Remedy: verify both with the same version of bestiary.
    """


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True)


class LevelChange(_Strict):
    """One level before and after; None: it is not in that verdict.

    Attributes:
        fixed: checks that did not pass and pass now.   broken: checks that passed and do not any more.
        first_seen: checks that do not pass in a level that did not run before.   still: those that never passed.
        worse: whether something that was verified fails now.   lost: whether something is not verified any more.
    """

    id: str
    title: str
    before: str | None
    after: str | None
    passed: tuple[int, int]
    planned: tuple[int, int]
    worst: tuple[Worst | None, Worst | None]
    fixed: list[str] = Field(default_factory=list)
    broken: list[str] = Field(default_factory=list)
    first_seen: list[str] = Field(default_factory=list)
    still: list[str] = Field(default_factory=list)
    worse: bool
    lost: bool

    @property
    def changed(self) -> bool:
        """Whether there is something to tell."""
        counts = self.passed[0] != self.passed[1] or self.planned[0] != self.planned[1]
        return self.before != self.after or counts or bool(self.fixed or self.broken or self.first_seen)


class FamilyChange(_Strict):
    """One family before and after; None: it is not in that report. `notes`: what else differs between the runs."""

    family: str
    before: Word | None
    after: Word | None
    levels: list[LevelChange] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class Diff(_Strict):
    """What `verify-bridge diff --json` writes.

    Exit code 0: nothing got worse. 1: something that passed fails now. 5: something is not verified any more.
    """

    schema_: Literal["bestiary.diff/1"] = Field(default="bestiary.diff/1", alias="schema")
    exit_code: Exit
    families: list[FamilyChange]

    def to_json(self) -> str:
        """The difference as JSON text."""
        return self.model_dump_json(by_alias=True, indent=1)

    def text(self) -> str:
        """A block a family, then the sums."""
        lines = [line for family in self.families for line in _family_lines(family)]
        levels = [level for family in self.families for level in family.levels]
        fixed, broken = sum(len(level.fixed) for level in levels), sum(len(level.broken) for level in levels)
        before, after = (sum(word == "ok" for word in words) for words in _columns(levels))
        counts = f"levels ok {before} → {after}, checks newly passing {fixed}, newly failing {broken}"
        return "\n".join([*lines, counts, f"exit {int(self.exit_code)}"])


def _columns(levels: Sequence[LevelChange]) -> tuple[list[str | None], list[str | None]]:
    return [level.before for level in levels], [level.after for level in levels]


def diff(before: Report, after: Report) -> Diff:
    """The progress from one report to another, family by family and level by level.

    Raises:
        OtherGateVersion: they were judged by other gates.
    """
    versions = sorted({verdict.gate_version for report in (before, after) for verdict in report.verdicts})
    if len(versions) > 1:
        raise OtherGateVersion(
            f"the verdicts are of gate versions {' and '.join(map(str, versions))}.",
            remedy="verify again with one version of verify-bridge, and compare those",
        )
    old = {verdict.family: verdict for verdict in before.verdicts}
    new = {verdict.family: verdict for verdict in after.verdicts}
    families = [_family(name, old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])]
    return Diff(exit_code=_exit(families), families=families)


def _exit(families: Sequence[FamilyChange]) -> Exit:
    levels = [level for family in families for level in family.levels]
    fell = [family for family in families if family.before == "pass" and family.after not in ("pass", None)]
    if fell or any(level.worse for level in levels):
        return Exit.NUMERIC
    if any(level.lost for level in levels) or any(family.after is None for family in families):
        return Exit.INCONCLUSIVE
    return Exit.PASS


def _family(name: str, before: Verdict | None, after: Verdict | None) -> FamilyChange:
    words = [verdict.verdict if verdict else None for verdict in (before, after)]
    change = FamilyChange(family=name, before=words[0], after=words[1])
    if before is None or after is None:
        return change
    old, new = {level.id: level for level in before.levels}, {level.id: level for level in after.levels}
    change.levels = [_level(old.get(id), new.get(id)) for id in dict.fromkeys([*old, *new])]
    change.notes = list(_notes(before, after))
    return change


def _notes(before: Verdict, after: Verdict) -> Iterator[str]:
    for name, a, b in (
        ("reference", before.reference_class, after.reference_class),
        ("seed", before.seed, after.seed),
        ("scope", before.scope, after.scope),
        ("official gates", before.official, after.official),
        *((name, before.env.get(name), after.env.get(name)) for name in ("transformers", "torch", "device")),
    ):
        if a != b:
            yield f"{name} {a} → {b}"
    changed = [name for name in before.hashes if before.hashes[name] != after.hashes.get(name)]
    if changed:
        yield f"files changed: {', '.join(changed)}"


def _ran(level: Level | None) -> bool:
    return level is not None and level.status != "not run"


def _open(level: Level | None) -> list[str]:
    """Checks of a level that ran which did not pass; a refusal is an answer."""
    if level is None or not _ran(level):
        return []
    return [item.check for item in level.findings if item.status in ("failed", "inconclusive")]


def _level(before: Level | None, after: Level | None) -> LevelChange:
    known = after or before
    if known is None:
        raise ValueError("a level that is in neither verdict")
    was, now = _open(before), _open(after)
    whole = before is None or len(before.findings) < MAX_FINDINGS
    fewer = before is not None and after is not None and after.planned < before.planned
    change = LevelChange(
        id=known.id,
        title=known.title,
        before=before.status if before else None,
        after=after.status if after else None,
        passed=(before.passed if before else 0, after.passed if after else 0),
        planned=(before.planned if before else 0, after.planned if after else 0),
        worst=(before.worst if before else None, after.worst if after else None),
        worse=_ran(before) and after is not None and _worse(before, after),
        lost=_ran(before) and (not _ran(after) or fewer),
    )
    if not _ran(after):
        return change
    if not _ran(before):
        change.first_seen = now
        return change
    change.still = [check for check in now if check in was]
    # A check that is not listed may not have been asked (a partial run), or may have been left out of the list.
    change.fixed = [] if fewer or len(now) >= MAX_FINDINGS else [check for check in was if check not in now]
    change.broken = [check for check in now if check not in was] if whole else []
    change.worse = change.worse or bool(change.broken)
    return change


def _worse(before: Level | None, after: Level) -> bool:
    """Whether a level that ran lost its "ok", or more of its checks fail."""
    if before is None or after.status == "not run":
        return False
    return (before.status == "ok" and after.status != "ok") or after.failed > before.failed


# ------------------------------------------------------------------ text


def _family_lines(family: FamilyChange) -> Iterator[str]:
    yield f"{family.family}   {family.before or 'not there'} → {family.after or 'not there'}"
    for level in family.levels:
        if level.changed:
            yield from _level_lines(level)
    for note in family.notes:
        yield f"  {note}"
    figures = [level for level in family.levels if not level.changed and _moved(level)]
    if figures:
        shown = ", ".join(f"{level.id} {_figures(level)}" for level in figures)
        yield f"  figures           {shown}"


def _moved(level: LevelChange) -> bool:
    a, b = (None if worst is None else figure_text(worst) for worst in level.worst)
    return a != b


def _figures(level: LevelChange) -> str:
    a, b = ("–" if worst is None else figure_text(worst) for worst in level.worst)
    return f"{a} → {b}"


def _level_lines(level: LevelChange) -> Iterator[str]:
    states = [
        f"{status} {passed}/{planned}" if status else "not there"
        for status, passed, planned in zip((level.before, level.after), level.passed, level.planned, strict=True)
    ]
    figures = f"   worst {_figures(level)}" if _moved(level) else ""
    yield f"  {level.id} {level.title:<11}    {states[0]} → {states[1]}{figures}"
    for word, checks in (
        ("newly passing", level.fixed),
        ("newly failing", level.broken),
        ("fails, seen first", level.first_seen),
    ):
        for check in checks[:MAX_SHOWN]:
            yield f"     {word:<18} {check}"
        if len(checks) > MAX_SHOWN:
            yield f"     {word:<18} … and {len(checks) - MAX_SHOWN} more"
