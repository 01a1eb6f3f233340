"""The kill matrix of a self-test: planted bug × level, and benign rewrites that must raise no alarm.

Where `--matrix` asked further levels a cell also says in how many families they saw the bug that they need not see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bestiary.verify.html_sections import scroll, section
from bestiary.verify.markup import Html, tag
from bestiary.verify.self_test import FamilyResult, Kill, SelfTest


def kill_words(result: SelfTest) -> str:
    """ "388/388 planted bugs killed, 0/60 false alarms"."""
    kills = [kill for family in result.families for kill in family.kills]
    alarms, runs = sum(len(f.alarms) for f in result.families), sum(len(f.passes) for f in result.families)
    killed = sum(kill.killed for kill in kills)
    return f"{killed}/{len(kills)} planted bugs killed, {alarms}/{runs} false alarms"


def kill_section(result: SelfTest) -> Html:
    """Sums a family and level, then every bug; problems first."""
    kills = [(family.family, kill) for family in result.families for kill in family.kills]
    asked = {level for _, kill in kills for level in (kill.level, *kill.asked)}
    levels = sorted(asked, key=lambda level: (not level.startswith("V"), level))
    named = sum(kill.named for _, kill in kills)
    killed = sum(kill.killed for _, kill in kills)
    return tag(
        "article",
        tag("h2", "Kill matrix"),
        tag("p", f"{kill_words(result)}; the cause of {named}/{killed} kills is named."),
        tag("ul", [tag("li", problem) for problem in result.problems], class_="note") if result.problems else None,
        section("By family and level", scroll(_sums(result.families, levels))),
        section(f"Every bug, {len({kill.bug for _, kill in kills})}", scroll(_bugs(kills, levels)), closed=True),
        section("Benign rewrites", scroll(_rewrites(result.families)), closed=True),
        id="kill-matrix",
    )


def _sums(families: Sequence[FamilyResult], levels: Sequence[str]) -> Html:
    rows = []
    for family in families:
        planted = Counter(kill.level for kill in family.kills)
        found = Counter(kill.level for kill in family.kills if kill.killed)
        cells = [_ratio(found[level], planted[level]) for level in levels]
        total = _ratio(sum(found.values()), len(family.kills))
        alarms = tag("td", f"{len(family.alarms)}/{len(family.passes)}", class_="bad" if family.alarms else "good")
        rows.append(tag("tr", tag("th", family.family, scope="row"), cells, total, alarms))
    heads = ("family", *levels, "killed", "alarms")
    return _grid(heads, rows)


def _ratio(found: int, planted: int, hint: str | None = None, *, doubtful: bool = False) -> Html:
    if not planted:
        return tag("td", "·", class_="mute")
    css = "bad" if found < planted else "warn" if doubtful else "good"
    return tag("td", f"{found}/{planted}", title=hint, class_=css)


def _grid(heads: Sequence[str], rows: Sequence[Html]) -> Html:
    head = tag("tr", [tag("th", text) for text in heads])
    return tag("table", tag("thead", head), tag("tbody", rows), class_="grid")


def _bugs(kills: Sequence[tuple[str, Kill]], levels: Sequence[str]) -> Html:
    """A row a bug; a cell says in how many families its level killed it. Survivors stand first."""
    bugs: dict[str, list[tuple[str, Kill]]] = {}
    for family, kill in kills:
        bugs.setdefault(kill.bug, []).append((family, kill))
    rows = []
    for bug, own in sorted(bugs.items(), key=lambda item: (all(kill.killed for _, kill in item[1]), item[0])):
        cells = []
        for level in levels:
            here = [(family, kill) for family, kill in own if kill.level == level]
            hint = "; ".join(f"{family}: {_word(kill)}" for family, kill in here)
            found = sum(kill.killed for _, kill in here)
            doubtful = any(not kill.named for _, kill in here)
            cells.append(_ratio(found, len(here), hint, doubtful=doubtful) if here else _also(own, level))
        label = tag("th", tag("code", bug), tag("small", own[0][1].cause), scope="row")
        rows.append(tag("tr", label, cells))
    return _grid(("planted bug", *levels), rows)


def _also(own: Sequence[tuple[str, Kill]], level: str) -> Html:
    """In how many families a level that need not see the bug sees it; a dot where none was asked."""
    asked = [(family, level in kill.seen_by) for family, kill in own if level in kill.asked]
    if not asked:
        return tag("td", "·", class_="mute")
    hint = "; ".join(f"{family}: {'sees it too' if seen else 'does not see it'}" for family, seen in asked)
    return tag("td", f"({sum(seen for _, seen in asked)}/{len(asked)})", title=hint, class_="mute")


def _word(kill: Kill) -> str:
    if not kill.killed:
        return f"survives ({kill.verdict})"
    return f"killed by {kill.check}" + ("" if kill.named else ", cause not named")


def _rewrites(families: Sequence[FamilyResult]) -> Html:
    names = list(dict.fromkeys(run.rewrite for family in families for run in family.passes))
    rows = []
    for name in names:
        cells = []
        for family in families:
            run = next((run for run in family.passes if run.rewrite == name), None)
            if run is None:
                cells.append(tag("td", "·", class_="mute"))
            else:
                hint = f"{run.levels}: {run.check} {run.detail}".strip()
                word = "pass" if run.passed else "alarm"
                cells.append(tag("td", word, title=hint, class_="good" if run.passed else "bad"))
        rows.append(tag("tr", tag("th", tag("code", name), scope="row"), cells))
    return _grid(("benign rewrite", *(family.family for family in families)), rows)
