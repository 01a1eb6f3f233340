"""The verdict as one HTML page: what was found, where errors lie, which config fields are covered, on what machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bestiary.verify.html_kills import kill_section, kill_words
from bestiary.verify.html_sections import badge, level_sections, scroll, section, tone
from bestiary.verify.markup import Child, Html, document, join, tag
from bestiary.verify.report import MEANING, report_word, totals, whose_text
from bestiary.verify.self_test import SelfTest
from bestiary.verify.verdict import Exit, Level, Report, Verdict

STYLE = Path(__file__).with_name("report.css")
_SHORT = {"ok": "ok", "fail": "FAIL", "refused": "ref.", "inconclusive": "inc.", "not run": "–"}
_WORD = {word: word for word in ("pass", "refused", "inconclusive")}
_STATUS = {"ok": "good", "fail": "bad", "refused": "warn", "inconclusive": "warn", "not run": "mute"}


def html_report(report: Report, self_test: SelfTest | None = None) -> str:
    """The page of a report, with the kill matrix of a self-test where one is given."""
    verdicts = report.verdicts
    several = len(verdicts) > 1
    body = [
        _banner(report),
        _overview(verdicts) if several else None,
        *(_family(verdict, number, alone=not several) for number, verdict in enumerate(verdicts)),
        kill_section(self_test) if self_test else None,
    ]
    return _page(f"{', '.join(verdict.family for verdict in verdicts)}: {report_word(report)}", body)


def html_self_test(result: SelfTest) -> str:
    """The page of a self-test."""
    facts = {"gate": result.gate_version, "seed": result.seed, "seconds": f"{result.seconds:.0f}"}
    good = result.exit_code == Exit.PASS
    head = tag(
        "header",
        tag("p", "verify-bridge self-test", class_="kicker"),
        tag("h1", tag("span", "pass" if good else "fail", class_="word"), " ", kill_words(result)),
        tag("p", _facts(facts | {"exit": int(result.exit_code)}), class_="facts"),
        class_=f"banner {'good' if good else 'bad'}",
    )
    return _page("verify-bridge self-test", [head, kill_section(result)])


def _page(title: str, body: Child) -> str:
    foot = tag("footer", "Made by verify-bridge. This page loads nothing and runs no script.")
    return document(title, style=STYLE.read_text(encoding="utf-8"), body=[tag("main", body), foot])


def _facts(facts: Mapping[str, object]) -> Html:
    return join((tag("span", f"{name} ", tag("b", str(value))) for name, value in facts.items()))


def _banner(report: Report) -> Html:
    word = report_word(report)
    first, count = report.verdicts[0], len(report.verdicts)
    failing = [one.family for one in report.verdicts if one.exit_code != Exit.PASS]
    if count == 1:
        subject = f"{first.family} against {first.reference_class}"
    elif failing:
        subject = f"{len(failing)} of {count} not passing: {', '.join(failing)}"
    else:
        subject = f"all {count} families"
    passed, planned = (sum(numbers) for numbers in zip(*map(totals, report.verdicts), strict=True))
    facts = {
        "transformers": first.env.get("transformers", "?"),
        "checks": f"{passed}/{planned}",
        "seed": first.seed,
        "gate": first.gate_version,
        "seconds": f"{sum(one.seconds for one in report.verdicts):.0f}",
        "exit": int(report.exit_code),
    }
    remarks = []
    if any(one.scope == "partial" for one in report.verdicts):
        remarks.append("Partial run: some levels or checks were not asked.")
    remarks += [whose for one in report.verdicts if (whose := whose_text(one)) is not None]
    if not all(one.official for one in report.verdicts):
        remarks.append("Some gates were tightened: this is not a run by the official ones.")
    return tag(
        "header",
        tag("p", "verify-bridge", class_="kicker"),
        tag("h1", tag("span", _WORD.get(word, "fail"), class_="word"), " ", subject),
        tag("p", MEANING[word]),
        [tag("p", tag("b", remark)) for remark in remarks],
        tag("p", _facts(facts), class_="facts"),
        class_=f"banner {tone(word)}",
    )


def _overview(verdicts: Sequence[Verdict]) -> Html:
    levels = list(dict.fromkeys(level.id for verdict in verdicts for level in verdict.levels))
    rows = []
    for number, verdict in enumerate(verdicts):
        by_id = {level.id: level for level in verdict.levels}
        name = tag("a", verdict.family, href=f"#family-{number}")
        cells = [_cell(by_id.get(level)) for level in levels]
        rows.append(tag("tr", tag("th", name, scope="row"), tag("td", badge(verdict.verdict)), cells))
    head = tag("tr", tag("th", "family"), tag("th", "verdict"), [tag("th", level) for level in levels])
    return section("Overview", scroll(tag("table", tag("thead", head), tag("tbody", rows), class_="grid")))


def _cell(level: Level | None) -> Html:
    if level is None:
        return tag("td", "·", class_="mute")
    hint = f"{level.title}: {level.passed}/{level.planned}, {level.status}"
    return tag("td", _SHORT[level.status], title=hint, class_=_STATUS[level.status])


def _family(verdict: Verdict, number: int, *, alone: bool) -> Html:
    """A verdict in full; one of several is folded unless it does not pass."""
    if alone:
        return tag("article", level_sections(verdict), id=f"family-{number}")
    passed, planned = totals(verdict)
    summary = tag("summary", tag("h2", verdict.family), badge(verdict.verdict), tag("span", f"{passed}/{planned}"))
    inner = tag("p", f"against {verdict.reference_class}, {verdict.seconds:.0f} s", class_="mute")
    opened = verdict.exit_code != Exit.PASS
    return tag("details", summary, inner, level_sections(verdict), id=f"family-{number}", open=opened, class_="family")
