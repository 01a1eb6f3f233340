"""Curves of runs from their metrics.jsonl, side by side: a page that loads nothing, or a PNG through matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.training.tracking import METRICS, read_metrics
from bestiary.verify.markup import Html, document, tag
from bestiary.verify.plots import COLOURS

CURVES: tuple[tuple[str, str], ...] = (
    ("rl/reward", "mean reward"),
    ("eval/reward", "mean reward on held-out prompts"),
    ("loss", "loss"),
    ("eval/loss", "loss on held-out data"),
    ("rl/mismatch_mean", "mean difference of log-probabilities, engine and policy"),
    ("tokens_per_s", "tokens a second"),
    ("mfu", "model FLOPs utilisation"),
    ("grad_norm", "norm of the gradients"),
    ("mem_gib", "peak memory in GiB"),
)
"""Keys of metrics.jsonl that are drawn where a run has them, and their titles."""

POINTS = 400  # of a curve; more are averaged
WIDTH, HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 10, 30
_STYLE = """
main.curves { max-width: 1160px; }
.curves .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 16px; }
.curves figure { margin: 0; }
.curves figcaption { font-weight: 600; font-size: 14px; }
.curves svg { width: 100%; height: auto; }
.curves .g { stroke: var(--rule); stroke-width: 1; }
.curves text { fill: var(--soft); font-size: 11px; }
.curves .e { text-anchor: end; }
.curves .c { text-anchor: middle; }
.curves .l, .curves .p { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.curves .p { stroke-width: 5; stroke-linecap: round; }
.curves .legend span { display: inline-block; margin-right: 18px; font-size: 13.5px; }
.curves .legend i { display: inline-block; width: 18px; height: 3px; margin-right: 6px; vertical-align: middle; }
""" + "".join(
    f".curves .l.s{i}, .curves .p.s{i} {{ stroke: var(--s{i}); }} .curves i.s{i} {{ background: var(--s{i}); }}\n"
    for i in range(COLOURS)
)


class NothingToPlot(BestiaryError):
    """A run without figures, or a file type that is not drawn.

    Remedy: name the folder of a run that took a step, and a file ending in .html or .png.
    """


class MatplotlibMissing(BestiaryError):
    """PNG files need a package that is not installed.

    Remedy: `pip install 'bestiary[plot]'`, or write an .html file.
    """


@dataclass(frozen=True)
class Curve:
    """Figures of one key: steps that rise, and values; None: not finite."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    def pieces(self) -> Iterator[list[tuple[float, float]]]:
        """Runs of finite points, averaged so that a curve has about `POINTS` of them."""
        size = -(-len(self.steps) // POINTS)
        piece: list[tuple[float, float]] = []
        for start in range(0, len(self.steps), size):
            steps, values = self.steps[start : start + size], self.values[start : start + size]
            finite = [value for value in values if value is not None]
            if len(finite) == len(values):
                piece.append((sum(steps) / len(steps), sum(finite) / len(finite)))
            elif piece:
                yield piece
                piece = []
        if piece:
            yield piece


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run, by key of metrics.jsonl."""

    name: str
    curves: dict[str, Curve]

    def summary(self) -> RunSummary:
        """What a table says of it."""

        def finite(key: str) -> list[float]:
            curve = self.curves.get(key)
            return [] if curve is None else [value for value in curve.values if value is not None]

        losses, held_out = finite("loss"), finite("eval/loss")
        speeds, shares, memory = finite("tokens_per_s"), finite("mfu"), finite("mem_gib")
        return RunSummary(
            name=self.name,
            steps=max(curve.steps[-1] for curve in self.curves.values()),
            loss_first=losses[0] if losses else None,
            loss_last=losses[-1] if losses else None,
            eval_loss_best=min(held_out, default=None),
            tokens_per_s=median(speeds) if speeds else None,
            mfu=median(shares) if shares else None,
            mem_gib=max(memory, default=None),
        )


@dataclass(frozen=True)
class RunSummary:
    """A run in a line; speeds are medians over its steps, memory the most."""

    name: str
    steps: int
    loss_first: float | None
    loss_last: float | None
    eval_loss_best: float | None
    tokens_per_s: float | None
    mfu: float | None
    mem_gib: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def read_runs(paths: Sequence[Path]) -> list[RunCurves]:
    """The curves of runs.

    Args:
        paths: folders of runs, or files in the format of metrics.jsonl.
    Raises:
        NothingToPlot: no such run, or none of its figures is a curve.   MetricsDamaged: names the line.
    """
    found = []
    for path, name in zip(paths, _names(paths), strict=True):
        file = path / METRICS if path.is_dir() else path
        if not file.is_file():
            raise NothingToPlot(f"{file} is not there.", remedy="the folder of a run: what `out` names in its file")
        rows = read_metrics(file)
        curves = {key: _curve(rows, key) for key, _ in CURVES}
        drawn = {key: curve for key, curve in curves.items() if curve.steps}
        if not drawn:
            raise NothingToPlot(
                f"{file} has no step with any of {', '.join(curves)}.", remedy="wait for the first step"
            )
        found.append(RunCurves(name, drawn))
    return found


def draw(runs: Sequence[RunCurves], out: Path) -> None:
    """Write the curves to a file, .png or .html.

    Raises:
        NothingToPlot: another suffix.   MatplotlibMissing: a PNG without matplotlib.
    """
    if out.suffix == ".html":
        out.write_text(page(runs), encoding="utf-8")
    elif out.suffix == ".png":
        _png(runs, out)
    else:
        raise NothingToPlot(f"--out {out} ends in {out.suffix!r}.", remedy="a file that ends in .html or .png")


def page(runs: Sequence[RunCurves]) -> str:
    """One HTML page with inline SVG, without a script and without anything from elsewhere."""
    sheet = files("bestiary.verify").joinpath("report.css").read_text(encoding="utf-8") + _STYLE
    title = " · ".join(run.name for run in runs)
    names = [(tag("i", class_=f"s{number % COLOURS}"), run.name) for number, run in enumerate(runs)]
    body = tag(
        "main",
        tag("header", tag("p", "bestiary plot", class_="kicker"), tag("h1", title), class_="banner good"),
        tag("section", tag("p", [tag("span", *name) for name in names], class_="legend"), _table(runs)),
        tag("section", tag("div", [_figure(runs, key, words) for key, words in _shown(runs)], class_="plots")),
        class_="curves",
    )
    return document(f"Runs: {title}", style=sheet, body=body)


def _shown(runs: Sequence[RunCurves]) -> list[tuple[str, str]]:
    return [(key, words) for key, words in CURVES if any(key in run.curves for run in runs)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of folders; whole paths where two are alike."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    short = [folder.resolve().name for folder in folders]
    return [str(path) if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]


def _curve(rows: Sequence[dict[str, Any]], key: str) -> Curve:
    kept = [(row["step"], row[key]) for row in rows if key in row]
    return Curve(tuple(step for step, _ in kept), tuple(value for _, value in kept))


# ---------------------------------------------------------------------- HTML


def _table(runs: Sequence[RunCurves]) -> Html:
    head = ("run", "steps", "first loss", "last loss", "best held-out loss", "tokens/s", "MFU", "GiB")
    rows = []
    for one in (run.summary() for run in runs):
        losses = [_number(loss, ".4f") for loss in (one.loss_first, one.loss_last, one.eval_loss_best)]
        speeds = (_number(one.tokens_per_s, ",.0f"), _number(one.mfu, ".1%"), _number(one.mem_gib, ".2f"))
        cells = [tag("td", cell) for cell in (f"{one.steps:,}", *losses, *speeds)]
        rows.append(tag("tr", tag("th", one.name, scope="row"), cells))
    table = tag("table", tag("thead", tag("tr", [tag("th", cell) for cell in head])), tag("tbody", rows), class_="grid")
    return tag("div", table, class_="scroll")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _figure(runs: Sequence[RunCurves], key: str, words: str) -> Html:
    pieces = [(n, piece) for n, run in enumerate(runs) if key in run.curves for piece in run.curves[key].pieces()]
    points = [point for _, piece in pieces for point in piece]
    across = _span([x for x, _ in points])
    up = _span([y for _, y in points])

    def x(step: float) -> float:
        return _LEFT + (step - across[0]) / (across[1] - across[0]) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - up[0]) / (up[1] - up[0]) * (HEIGHT - _TOP - _BOTTOM)

    grid = [
        (
            tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=f"{y(value):.1f}", y2=f"{y(value):.1f}", class_="g"),
            tag("text", f"{value:g}", x=_LEFT - 6, y=f"{y(value) + 4:.1f}", class_="e"),
        )
        for value in ticks(*up)
    ]
    steps = [
        tag("text", f"{value:g}", x=f"{x(value):.1f}", y=HEIGHT - _BOTTOM + 15, class_="c") for value in ticks(*across)
    ]
    lines = []
    for number, piece in pieces:
        spots = [f"{x(step):.1f},{y(value):.1f}" for step, value in piece]
        colour = f"s{number % COLOURS}"
        if len(spots) == 1:  # a line of no length with round ends is a dot
            lines.append(tag("polyline", points=f"{spots[0]} {spots[0]}", class_=f"p {colour}"))
        else:
            lines.append(tag("polyline", points=" ".join(spots), class_=f"l {colour}"))
    image = tag("svg", grid, steps, lines, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=words)
    return tag("figure", tag("figcaption", words), image)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest, apart at least a little."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        room = abs(low) / 10 or 1.0
        return low - room, high + room
    return low, high


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` of them: multiples of 1, 2 or 5 · 10^n."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(index * step, digits) for index in range(first, last + 1)][:most]


# ---------------------------------------------------------------------- PNG


def _png(runs: Sequence[RunCurves], out: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MatplotlibMissing(
            f"{out} is a PNG, and matplotlib is not installed.",
            remedy="pip install 'bestiary[plot]', or --out with a name that ends in .html",
        ) from error
    shown = _shown(runs)
    height = -(-len(shown) // 2)
    figure = Figure(figsize=(12, 3.6 * height), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (key, words) in enumerate(shown, start=1):
        axes = figure.add_subplot(height, 2, place)
        for number, run in enumerate(runs):
            for part, piece in enumerate(run.curves[key].pieces() if key in run.curves else ()):
                name = run.name if part == 0 else "_again"
                mark = "o" if len(piece) == 1 else ""
                axes.plot(*zip(*piece, strict=True), marker=mark, color=f"C{number}", label=name, linewidth=1.4)
        axes.set(title=words, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=110)
