"""The verdict as a Markdown card, to stand beside a port or an exported checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from bestiary.verify.report import MEANING, figure_text, totals, whose_text
from bestiary.verify.self_test import SelfTest
from bestiary.verify.verdict import Exit, Report, Verdict

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def _md(text: str) -> str:
    """Text on one line that Markdown shows as it is, in a table as well."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Text as code; a bar would end a table's cell even there."""
    flat = " ".join(text.split()).replace("`", "'")
    return f"`{flat}`" if "|" not in flat else _md(flat)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def card(report: Report, self_test: SelfTest | None = None) -> str:
    """A card over all verdicts of a report; with a self-test, what the verifier found of planted bugs."""
    lines: list[str] = []
    for verdict in report.verdicts:
        lines += _verdict(verdict)
    if self_test is not None:
        lines += _self_test(self_test, [verdict.family for verdict in report.verdicts])
    return "\n".join(lines).rstrip("\n") + "\n"


def _verdict(verdict: Verdict) -> Iterator[str]:
    passed, planned = totals(verdict)
    version = verdict.env.get("transformers", "?")
    yield f"# {_md(verdict.family)}: {verdict.verdict}"
    yield ""
    yield (
        f"Compared with `{verdict.reference_class}` of transformers {_md(version)} by `verify-bridge`: "
        f"{passed} of {planned} checks passed. {MEANING[verdict.verdict]}"
    )
    yield ""
    if verdict.scope == "partial":
        yield "This was a partial run: some levels or checks were not asked."
        yield ""
    whose = whose_text(verdict)
    if whose is not None:
        yield _md(whose)
        yield ""
    if not verdict.official:
        yield "Some gates were tightened: this is not a run by the official ones."
        yield ""
    for reason in filter(None, [verdict.error, *verdict.weak]):
        yield f"* {_md(reason)}"
    if verdict.error or verdict.weak:
        yield ""
    yield from _levels(verdict)
    yield from _divergence(verdict)
    yield from _config(verdict)
    yield "## Environment"
    yield ""
    facts = {"made": verdict.made} if verdict.made else {}
    facts |= {"revision": verdict.revision} if verdict.revision else {}
    facts |= {**verdict.env, "seed": str(verdict.seed), "gate version": str(verdict.gate_version)}
    facts |= {f"sha256 of {name}": value for name, value in verdict.hashes.items()}
    yield from _table(("", ""), [(_md(name), _code(value)) for name, value in facts.items()])


def _levels(verdict: Verdict) -> Iterator[str]:
    yield "## Levels"
    yield ""
    rows = []
    for level in verdict.levels:
        worst = level.worst
        rows.append(
            (
                f"{level.id} {level.title}",
                level.status,
                f"{level.passed}/{level.planned}" + (f", {level.refused} refused" if level.refused else ""),
                f"{figure_text(worst)} at {_code(worst.check)}" if worst else "exact",
                f"{worst.gate:g}" if worst else "–",
            )
        )
    yield from _table(("level", "status", "checks", "worst figure", "gate"), rows)


def _divergence(verdict: Verdict) -> Iterator[str]:
    first = verdict.first_divergence
    if first is None and (verdict.exit_code == Exit.PASS or verdict.repro is None):
        return
    yield "## Where it fails"
    yield ""
    if first is not None:
        pattern = f" ({_md(', '.join(first.pattern))})" if first.pattern else ""
        yield f"* First divergence: {_code(first.module)}, {_md(first.tensor)}, config {_code(first.case)}{pattern}"
    for one in verdict.hypotheses[:3]:
        yield f"* Likely cause: {_md(one.hint)} (reproduces ours to {one.reproduces_to:.0e})"
    if verdict.repro:
        yield f"* See it again: {_code(verdict.repro)}"
    yield ""


def _config(verdict: Verdict) -> Iterator[str]:
    if not verdict.config:
        return
    yield "## Config coverage"
    yield ""
    kinds = Counter(item.kind for item in verdict.config)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    yield f"{len({item.field for item in verdict.config})} fields, {len(verdict.config)} values: {counts}."
    yield ""
    for word in ("ignored", "different", "refused"):
        names = dict.fromkeys(item.field for item in verdict.config if item.ours == word)
        if names:
            yield f"* {word}: {', '.join(map(_code, names))}"
    yield ""


def _self_test(result: SelfTest, wanted: Sequence[str]) -> Iterator[str]:
    families = [family for family in result.families if family.family in wanted] or result.families
    yield "## Planted bugs"
    yield ""
    rows = []
    for family in families:
        killed = [kill for kill in family.kills if kill.killed]
        named = sum(kill.named for kill in killed)
        alarms = f"{len(family.alarms)}/{len(family.passes)}"
        rows.append((_md(family.family), f"{len(killed)}/{len(family.kills)}", f"{named}/{len(killed)}", alarms))
    yield from _table(("family", "killed", "cause named", "false alarms"), rows)
