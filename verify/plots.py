"""Plots of errors as inline SVG: a logarithmic axis, the gate as a dashed line, one colour and one mark a series."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bestiary.verify.markup import Html, join, tag

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 12, 34
MAX_TICKS = 6
COLOURS = 6
"""Colours that the style sheet defines, `--s0` to `--s5`."""


@dataclass(frozen=True)
class Point:
    """A figure (None: not finite) at a place on the horizontal axis, and what a pointer over it shows."""

    x: float
    figure: float | None
    hint: str


@dataclass(frozen=True)
class Series:
    """Points of one name, drawn as marks, or as a line where they are many."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class _Axis:
    """Decades of the vertical axis; exact zeros stand one below `low`, what is not finite one above `high`."""

    low: int
    high: int
    zeros: bool
    infinite: bool

    @property
    def bottom(self) -> int:
        return self.low - self.zeros

    @property
    def top(self) -> int:
        return self.high + self.infinite

    def y(self, figure: float | None) -> float:
        place: float = self.top if figure is None else self.bottom if figure == 0 else math.log10(figure)
        return TOP + (self.top - place) / (self.top - self.bottom) * (HEIGHT - TOP - BOTTOM)


def _axis(series: Sequence[Series], gate: float) -> _Axis:
    figures = [point.figure for one in series for point in one.points]
    positive = [figure for figure in figures if figure] + [gate]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return _Axis(low, max(high, low + 1), 0 in figures, None in figures)


def _ticks(axis: _Axis) -> Iterator[tuple[float, str]]:
    step = -(-(axis.high - axis.low) // MAX_TICKS)
    for decade in range(axis.high, axis.low - 1, -step):
        yield axis.y(10.0**decade), f"1e{decade}"
    if axis.zeros:
        yield axis.y(0.0), "0"
    if axis.infinite:
        yield axis.y(None), "∞"


def mark(number: int, x: float, y: float, hint: str = "") -> Html:
    """The mark of series `number`: circle, square, diamond or triangle, so that colour is not all that tells."""
    shapes: tuple[Callable[[], Html], ...] = (
        lambda: tag("circle", title, cx=f"{x:.1f}", cy=f"{y:.1f}", r="3.4", class_=css),
        lambda: tag("rect", title, x=f"{x - 3:.1f}", y=f"{y - 3:.1f}", width=6, height=6, class_=css),
        lambda: tag("path", title, d=f"M{x:.1f} {y - 4.3:.1f}l4.3 4.3-4.3 4.3-4.3-4.3z", class_=css),
        lambda: tag("path", title, d=f"M{x:.1f} {y - 4:.1f}l4 7h-8z", class_=css),
    )
    title, css = tag("title", hint) if hint else None, f"m s{number % COLOURS}"
    return shapes[number % len(shapes)]()


def _line(number: int, one: Series, axis: _Axis, x: Callable[[float], float]) -> Html:
    spots = [f"{x(point.x):.1f},{axis.y(point.figure):.1f}" for point in one.points]
    return tag("polyline", points=" ".join(spots), class_=f"l s{number % COLOURS}")


def error_plot(
    series: Sequence[Series],
    *,
    title: str,
    gate: float,
    x_title: str,
    x_ticks: Sequence[tuple[float, str]],
    lines: bool,
) -> Html:
    """A figure with its legend.

    Args:
        gate: drawn as a dashed line; a figure above it fails.
        x_ticks: places of the horizontal axis that carry a label.
        lines: a line a series, for many points; marks joined by a thin line otherwise.
    """
    axis = _axis(series, gate)
    places = [point.x for one in series for point in one.points]
    first, last = min(places), max(places)

    def x(place: float) -> float:
        inner = LEFT + 8, WIDTH - RIGHT - 8
        share = 0.5 if first == last else (place - first) / (last - first)
        return inner[0] + share * (inner[1] - inner[0])

    grid = [
        join(
            tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="g"),
            tag("text", label, x=LEFT - 5, y=f"{y + 3.5:.1f}", class_="e"),
        )
        for y, label in _ticks(axis)
    ]
    labels = [tag("text", label, x=f"{x(place):.1f}", y=HEIGHT - BOTTOM + 15, class_="c") for place, label in x_ticks]
    at = axis.y(gate)
    limit = join(
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="gate"),
        tag(
            "text",
            f"gate {gate:g}",
            x=WIDTH - RIGHT,
            y=f"{at - 4:.1f}" if at > 20 else f"{at + 12:.1f}",
            class_="e gate",
        ),
    )
    drawn = []
    for number, one in enumerate(series):
        drawn.append(_line(number, one, axis, x))
        if not lines or len(one.points) == 1:
            drawn += [mark(number, x(point.x), axis.y(point.figure), point.hint) for point in one.points]
    image = tag(
        "svg",
        tag("title", title),
        grid,
        labels,
        tag("text", x_title, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 4, class_="c"),
        limit,
        drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=title,
        class_="thin" if lines else None,
    )
    legend = [
        tag("span", tag("svg", mark(number, 6, 6), viewBox="0 0 12 12", aria_hidden="true"), one.name)
        for number, one in enumerate(series)
    ]
    return tag("figure", tag("figcaption", title), image, tag("p", legend, class_="legend"))
