"""The parts of one verdict's page: levels, why it failed, plots of the error, config coverage, configs, environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bestiary.verify.markup import Child, Html, tag
from bestiary.verify.plots import COLOURS, Point, Series, error_plot
from bestiary.verify.report import figure_text
from bestiary.verify.verdict import Divergence, FieldFinding, Profile, Verdict

MAX_FINDINGS = 60
FIRST_FINDINGS = 8
"""Findings that are shown before the fold."""
X_TICKS = 7

_TONES = {"pass": "good", "ok": "good", "refused": "warn", "inconclusive": "warn", "not run": "mute"}
_ANSWERS = {
    "equal": "good",
    "moved": "good",
    "refused": "warn",
    "not compared": "mute",
    "ignored": "bad",
    "different": "bad",
}
_WORST_FIRST = ("ignored", "different", "not compared", "refused", "moved", "equal")
_KINDS = {
    "live": "moves logits or loss",
    "shape": "changes the weights' names or shapes",
    "train": "acts in train mode only",
    "dead": "moves nothing",
    "rejected": "Hugging Face cannot run it",
}


def tone(word: str) -> str:
    """The class of a verdict's or level's word: good, warn, bad or mute."""
    return _TONES.get(word, "bad")


def badge(word: str) -> Html:
    """A word in its colour."""
    return tag("span", word, class_=f"badge {tone(word)}")


def section(title: str, *children: Child, closed: bool | None = None) -> Html:
    """A section; with `closed` one that folds."""
    if closed is None:
        return tag("section", tag("h3", title), children)
    return tag("details", tag("summary", tag("h3", title)), children, open=not closed)


def scroll(table: Html) -> Html:
    """A table that scrolls by itself where the screen is too narrow."""
    return tag("div", table, class_="scroll")


def cards(heads: Sequence[str], rows: Sequence[Sequence[Html]], css: str = "") -> Html:
    """A table whose rows become cards on a narrow screen, each cell beside its column's name."""
    body = [tag("tr", row) for row in rows]
    return tag(
        "table",
        tag("thead", tag("tr", [tag("th", head) for head in heads])),
        tag("tbody", body),
        class_=f"cards {css}".strip(),
    )


def cell(head: str, *children: Child, css: str | None = None) -> Html:
    """A cell of a table of `cards`, under the column `head`."""
    return tag("td", tag("div", children), data_label=head, class_=css)


def level_sections(verdict: Verdict) -> list[Html]:
    """All sections of a verdict, those with nothing to say left out."""
    parts = (_levels, _found, _plots, _coverage, _kernels, _keys, _activity, _configs, _environment)
    return [part for make in parts if (part := make(verdict)) is not None]


# ------------------------------------------------------------------ levels and failures


def _levels(verdict: Verdict) -> Html:
    heads = ("level", "status", "checks", "worst figure", "gate", "seconds")
    rows = []
    for level in verdict.levels:
        worst = level.worst
        extra = [f", {count} {word}" for word in ("refused", "skipped") if (count := vars(level)[word])]
        figure = [tag("b", figure_text(worst)), " ", tag("code", worst.check)] if worst else "–"
        rows.append(
            [
                cell("level", tag("b", level.id), " ", level.title, css="head"),
                cell("status", badge(level.status)),
                cell("checks", f"{level.passed}/{level.planned}", extra),
                cell("worst figure", figure, css=None if worst else "none"),
                cell("gate", f"{worst.gate:g}" if worst else "exact", css=None if worst else "none"),
                cell("seconds", f"{level.seconds:.1f}", css="seconds"),
            ]
        )
    return section("Levels", cards(heads, rows, "levels"))


def _found(verdict: Verdict) -> Html | None:
    first = verdict.first_divergence
    found = [(level, item) for level in verdict.levels for item in level.findings if item.status != "refused"]
    notes = [*([verdict.error] if verdict.error else []), *(f"weak test: {reason}" for reason in verdict.weak)]
    if not (found or notes or first):
        return None
    causes = [
        tag(
            "li", one.hint, tag("small", f" – planted as {one.mutation_id}, reproduces ours to {one.reproduces_to:.0e}")
        )
        for one in verdict.hypotheses
    ]
    repro = verdict.repro if any(item.status == "failed" for _, item in found) else None
    alike: dict[tuple[str, str, str], list[str]] = {}
    for level, item in found:
        alike.setdefault((level.id, item.status, item.detail), []).append(item.check)
    rows = [
        [
            cell("level", level, css="head"),
            cell("check", tag("code", checks[0]), tag("small", f" and {len(checks) - 1} more") if checks[1:] else None),
            cell("status", tag("span", status, class_=f"badge {_finding_tone(status)}")),
            cell("detail", tag("span", detail, class_="pre")),
        ]
        for (level, status, detail), checks in list(alike.items())[:MAX_FINDINGS]
    ]
    more = len(alike) - len(rows)
    heads = ("level", "check", "status", "detail")
    return section(
        "What was found",
        [tag("p", note, class_="note") for note in notes],
        _divergence(first) if first else None,
        [tag("h4", "Likely cause"), tag("ol", causes)] if causes else None,
        [tag("h4", "See it again"), tag("pre", repro)] if repro else None,
        [tag("h4", f"Checks that did not pass, {len(found)}"), cards(heads, rows[:FIRST_FINDINGS])] if rows else None,
        _more(heads, rows[FIRST_FINDINGS:]),
        tag("p", f"… and {more} more in the JSON verdict.", class_="mute") if more else None,
    )


def _more(heads: Sequence[str], rows: Sequence[Sequence[Html]]) -> Html | None:
    return section(f"{len(rows)} more", cards(heads, rows), closed=True) if rows else None


def _finding_tone(status: str) -> str:
    return {"failed": "bad", "inconclusive": "warn"}.get(status, "mute")


def _divergence(first: Divergence) -> list[Html]:
    facts: dict[str, Any] = {
        "module": first.module,
        "Hugging Face's": first.hf_module,
        "tensor": first.tensor,
        "config": first.case,
        "layer type": first.layer_type,
        "position": first.position,
        "index": first.index or None,
        "ours": None if first.ours is None else f"{first.ours:.6g}",
        "theirs": None if first.hf is None else f"{first.hf:.6g}",
        "max|Δ|/std": first.max_over_std and f"{first.max_over_std:.2e}",
        "pattern": ", ".join(first.pattern),
        "inputs": "equal" if first.inputs_equal else "differ already",
    }
    return [tag("h4", "First divergence"), definitions(facts)]


def definitions(facts: Mapping[str, Any]) -> Html:
    """Names and values, those without a value left out."""
    shown = [(name, value) for name, value in facts.items() if value not in (None, "")]
    return tag("dl", [tag("div", tag("dt", name), tag("dd", str(value))) for name, value in shown])


# ------------------------------------------------------------------ plots


def _plots(verdict: Verdict) -> Html | None:
    figures = []
    for level in dict.fromkeys(profile.level for profile in verdict.profiles):
        own = [profile for profile in verdict.profiles if profile.level == level]
        figures += [plot for make in (_layer_plot, _position_plot) if (plot := make(level, own)) is not None]
    if not figures:
        return None
    hint = tag("p", "max|Δ| over the standard deviation of the reference, the worst of each place.", class_="mute")
    return section("Where the error lies", hint, tag("div", figures, class_="plots"))


def _folded(series: list[Series]) -> list[Series]:
    """As many series as there are colours: what is beyond them is drawn as one."""
    if len(series) <= COLOURS:
        return series
    rest = [point for one in series[COLOURS - 1 :] for point in one.points]
    return [*series[: COLOURS - 1], Series(f"{len(series) - COLOURS + 1} more", _in_order(iter(rest)))]


def _layer_plot(level: str, profiles: Sequence[Profile]) -> Html | None:
    own = [profile for profile in profiles if profile.layers]
    if not own:
        return None
    most = max(entry.layer or 0 for profile in own for entry in profile.layers)
    series = [Series(profile.case, _in_order(_layer_points(profile, most))) for profile in own]
    step = -(-(most + 1) // X_TICKS)
    ticks: list[tuple[float, str]] = [(layer, str(layer)) for layer in range(0, most + 1, step)]
    places = {point.x for one in series for point in one.points}
    ticks += [(place, name) for place, name in ((-1, "in"), (most + 1, "out")) if place in places]
    if len(ticks) > 1 and most + 1 in places and most % step == 0 and step > 1:
        ticks = [tick for tick in ticks if tick[0] != most]
    return error_plot(
        _folded(series), title=f"{level}: error by layer", gate=own[0].gate, x_title="layer", x_ticks=ticks, lines=False
    )


def _layer_points(profile: Profile, most: int) -> Iterator[Point]:
    """Layers at their numbers; what stands before them at −1, what stands behind at one more than the last."""
    behind = False
    outside: dict[int, tuple[float | None, str]] = {}
    for entry in profile.layers:
        kind = f", {entry.layer_type}" if entry.layer_type else ""
        hint = f"{profile.case}, {entry.module}{kind}: {'not finite' if entry.figure is None else entry.figure}"
        if entry.layer is not None:
            behind = True
            yield Point(entry.layer, entry.figure, hint)
            continue
        place = most + 1 if behind else -1
        known = outside.get(place)
        if known is None or (known[0] is not None and (entry.figure is None or entry.figure > known[0])):
            outside[place] = entry.figure, hint
    for place, (figure, hint) in outside.items():
        yield Point(place, figure, hint)


def _in_order(points: Iterator[Point]) -> list[Point]:
    return sorted(points, key=lambda point: point.x)


def _position_plot(level: str, profiles: Sequence[Profile]) -> Html | None:
    own = [profile for profile in profiles if profile.positions]
    if not own:
        return None
    series = [
        Series(
            profile.case,
            [Point(index * profile.stride, figure, "") for index, figure in enumerate(profile.positions)],
        )
        for profile in own
    ]
    last = max(int(one.points[-1].x) for one in series)
    step = _round_step(last, X_TICKS)
    ticks: list[tuple[float, str]] = [(place, str(place)) for place in range(0, last + 1, step)]
    return error_plot(
        _folded(series),
        title=f"{level}: error by position",
        gate=own[0].gate,
        x_title="position in the text",
        x_ticks=ticks,
        lines=True,
    )


def _round_step(last: int, most: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, … that makes at most `most` steps."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if last // (power * factor) < most:
                return power * factor
        power *= 10


# ------------------------------------------------------------------ config coverage


def _json(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:119] + "…"


def _coverage(verdict: Verdict) -> Html | None:
    if not verdict.config:
        return None
    heads = ("field", "class", "HF's value", "value tried", "ours", "read as", "read in")
    ordered = sorted(verdict.config, key=lambda item: _WORST_FIRST.index(item.ours))
    kinds, answers = (Counter(vars(item)[name] for item in verdict.config) for name in ("kind", "ours"))
    chips = [tag("span", f"{kind.upper()} ", tag("b", count), title=_KINDS[kind]) for kind, count in kinds.items()]
    said = [
        tag("span", f"{answer} ", tag("b", answers[answer]), class_=_ANSWERS[answer])
        for answer in _WORST_FIRST
        if answers[answer]
    ]
    bad = [_field(item) for item in ordered if _ANSWERS[item.ours] == "bad"]
    rest = cards(heads, [_field(item) for item in ordered if _ANSWERS[item.ours] != "bad"])
    return section(
        f"Config coverage, {len({item.field for item in verdict.config})} fields",
        tag("p", chips, class_="chips"),
        tag("p", said, class_="chips"),
        [cards(heads, bad[:FIRST_FINDINGS]), _more(heads, bad[FIRST_FINDINGS:])] if bad else None,
        section("Values that agree or are refused", rest, closed=True) if bad else rest,
        closed=not bad,
    )


def _field(item: FieldFinding) -> list[Html]:
    reading: list[Html] = [tag("code", text) for text in item.read_as]
    return [
        cell("field", tag("code", item.field), css="head"),
        cell("class", tag("abbr", item.kind.upper(), title=_KINDS[item.kind])),
        cell("HF's value", tag("code", _json(item.before))),
        cell("value tried", tag("code", _json(item.value))),
        cell("ours", tag("span", item.ours, class_=f"badge {_ANSWERS[item.ours]}"), tag("small", " ", item.note)),
        cell("read as", [[one, tag("br")] for one in reading] if reading else "–"),
        cell("read in", tag("code", item.read_in) if item.read_in else "–", css="line"),
    ]


# ------------------------------------------------------------------ the rest


def _keys(verdict: Verdict) -> Html | None:
    keys = verdict.keys
    groups = (("missing", keys.missing), ("unexpected", keys.unexpected), ("of another shape", keys.shape_mismatch))
    lists = [
        [tag("h4", f"{len(names)} {title}"), tag("ul", [tag("li", tag("code", name)) for name in names[:MAX_FINDINGS]])]
        for title, names in groups
        if names
    ]
    ignored = [
        [cell("key", tag("code", name), css="head"), cell("reason", reason)]
        for name, reason in list(keys.ignored_with_reason.items())[:MAX_FINDINGS]
    ]
    if not lists and not ignored:
        return None
    table = [tag("h4", "Ignored with a reason"), cards(("key", "reason"), ignored)] if ignored else None
    return section("Keys", lists, table, closed=not lists)


def _kernels(verdict: Verdict) -> Html | None:
    if not verdict.kernels:
        return None
    rows = [
        [
            cell("operation", tag("code", one.operation), css="head"),
            cell("implementation", tag("code", one.implementation)),
            cell("status", tag("span", one.status, class_=f"badge {'good' if one.status == 'ran' else 'mute'}")),
            cell("calls", one.calls),
            cell("note", one.note),
        ]
        for one in verdict.kernels
    ]
    ran = sum(one.status == "ran" for one in verdict.kernels)
    heads = ("operation", "implementation", "status", "calls", "note")
    return section(f"Optimised paths, {ran} of {len(rows)} ran here", cards(heads, rows), closed=True)


def _activity(verdict: Verdict) -> Html | None:
    if not verdict.activity:
        return None
    rows = []
    for case, activity in verdict.activity.items():
        clipped = [f"{name} {share:.0%}" for name, share in activity.clipped.items()]
        margin = activity.min_router_margin
        dead = ", ".join(activity.dead_params) or "none"
        rows.append(
            [
                cell("config", case, css="head"),
                cell("parameters that move nothing", dead),
                cell("values clipped", ", ".join(clipped) or "–"),
                cell("smallest router margin", "–" if margin is None else f"{margin:.1e}"),
                cell("deterministic", "yes" if activity.deterministic else "no"),
            ]
        )
    heads = ("config", "parameters that move nothing", "values clipped", "smallest router margin", "deterministic")
    return section("Do the configs act?", cards(heads, rows), closed=True)


def _configs(verdict: Verdict) -> Html | None:
    if not verdict.cases:
        return None
    shown = [
        tag("details", tag("summary", name), tag("pre", json.dumps(raw, indent=1, ensure_ascii=False)))
        for name, raw in verdict.cases.items()
    ]
    return section("Configs it was verified on", shown, closed=True)


def _environment(verdict: Verdict) -> Html:
    hashes = [tag("div", tag("dt", name), tag("dd", tag("code", value))) for name, value in verdict.hashes.items()]
    return section(
        "Environment and hashes",
        definitions({**verdict.env, "gate version": verdict.gate_version, "seed": verdict.seed}),
        tag("h4", "sha256"),
        tag("dl", hashes, class_="wide"),
        closed=False,
    )
