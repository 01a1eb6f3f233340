"""`bestiary data inspect` as one HTML page that loads nothing: what is trained stands in colour."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from bestiary.training.data.inspection import Report, Shown, SourceReport
from bestiary.verify.markup import Html, document, tag

# On top of the report's own sheet: tokens of a sample, and bars.
STYLE = """
.sample { background: var(--code); border-radius: 6px; padding: 10px 12px; margin: 6px 0 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 12.5px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  color: var(--soft); max-height: 460px; overflow-y: auto; }
.sample mark { background: var(--good-bg); color: var(--good); border-radius: 3px; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 3px 12px; align-items: center; }
.bars i { display: block; height: 12px; border-radius: 3px; background: var(--s0); min-width: 1px; }
.bars span { color: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
"""


def data_page(report: Report, title: str) -> str:
    """The page of a report."""
    sheet = files("bestiary.verify").joinpath("report.css").read_text(encoding="utf-8") + STYLE
    warned = len(report.warnings) + sum(len(one.warnings) for one in report.sources)
    refused = sum(one.refused for one in report.sources)
    body = [
        _banner(report, title, warned, refused),
        _warnings(report),
        _sources(report),
        tag("section", tag("h3", "Lengths in tokens"), _histogram(report)),
        tag("section", tag("h3", "Packing"), _packing(report)),
        [_source(one) for one in report.sources],
    ]
    foot = tag("footer", "Made by bestiary data inspect. This page loads nothing and runs no script.")
    return document(f"Data: {title}", style=sheet, body=[tag("main", body), foot])


def percent(share: float) -> str:
    """A share as people read it."""
    return f"{share:.1%}"


def ratio(part: int, whole: int) -> float:
    """Their ratio, 0 of nothing."""
    return part / whole if whole else 0.0


def _banner(report: Report, title: str, warned: int, refused: int) -> Html:
    tokens, loss = sum(one.tokens for one in report.sources), sum(one.loss_tokens for one in report.sources)
    facts = {
        "documents": f"{sum(one.documents for one in report.sources):,}",
        "tokens": f"{tokens:,}",
        "trained": percent(ratio(loss, tokens)),
        "warnings": str(warned),
        "refused rows": str(refused),
    }
    return tag(
        "header",
        tag("p", "bestiary data inspect", class_="kicker"),
        tag("h1", title),
        tag("p", [tag("span", f"{name} ", tag("b", value)) for name, value in facts.items()], class_="facts"),
        tag(
            "p", [tag("span", f"{name} ", tag("b", value)) for name, value in report.tokenizer.items()], class_="facts"
        ),
        class_=f"banner {'bad' if refused else 'warn' if warned else 'good'}",
    )


def _warnings(report: Report) -> Html | None:
    found = [*report.warnings, *(f"{one.name}: {text}" for one in report.sources for text in one.warnings)]
    found += [f"{one.name}: refused: {text}" for one in report.sources for text in one.refusals]
    if not found:
        return None
    return tag("section", tag("h3", "Warnings"), tag("ul", [tag("li", text) for text in found], class_="note"))


def _sources(report: Report) -> Html:
    head = ("source", "kind", "rows", "refused", "tokens", "trained", "share of documents", "share of tokens")
    rows = []
    for one in report.sources:
        documents, tokens = report.shares[one.name]
        cells = (one.kind, f"{one.rows:,}", one.refused, f"{one.tokens:,}", percent(ratio(one.loss_tokens, one.tokens)))
        shown = [tag("td", cell) for cell in (*cells, percent(documents), percent(tokens))]
        rows.append(tag("tr", tag("th", one.name, scope="row"), shown))
    table = tag("table", tag("thead", tag("tr", [tag("th", cell) for cell in head])), tag("tbody", rows), class_="grid")
    return tag("section", tag("h3", "Sources"), tag("div", table, class_="scroll"))


def range_words(low: int, high: int | None) -> str:
    """A range of lengths."""
    return f"{low:,} and more" if high is None else f"{low:,} to {high - 1:,}"


def _histogram(report: Report) -> Html:
    rows = [(range_words(low, high), count) for low, high, count in report.histogram]
    most = max([count for _, count in rows], default=0) or 1
    return _bars([(name, count, f"{count:,}") for name, count in rows], most)


def _packing(report: Report) -> Html:
    packing = report.packing
    bars = [
        ("packed", packing["packed"], percent(packing["packed"])),
        ("padded in batches of 8", packing["padded"], percent(packing["padded"])),
    ]
    return tag(
        "div", tag("p", f"{packing['packs']:.0f} packs; share of slots that hold a token", class_="mute"), _bars(bars)
    )


def _bars(rows: Sequence[tuple[str, float, str]], whole: float = 1.0) -> Html:
    """Bars with a name and a figure; `whole` fills the width."""
    cells = [
        (tag("span", name), tag("i", style=f"width:{value / whole:.2%}"), tag("span", words))
        for name, value, words in rows
    ]
    return tag("div", cells, class_="bars")


def _source(one: SourceReport) -> Html:
    coverage = [
        (role, ratio(trained, tokens), f"{percent(ratio(trained, tokens))} of {tokens:,}")
        for role, (tokens, trained) in one.by_role.items()
    ]
    return tag(
        "section",
        tag("h3", one.name),
        tag("h4", "Trained share of each role"),
        _bars(coverage),
        tag("h4", "Samples: what is trained is marked"),
        [_sample(shown) for shown in one.samples],
    )


def _sample(shown: Shown) -> Html:
    runs = [tag("mark" if run.trained else "span", run.text, title=f"{run.role}, {run.tokens}") for run in shown.runs]
    caption = tag("p", f"{shown.where}: {shown.trained} of {shown.tokens} tokens trained", class_="mute")
    return tag("div", caption, tag("div", runs, class_="sample"))
