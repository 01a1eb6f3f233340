"""Curves of runs, as a page, as a picture and as numbers."""

import json
import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestiary.tools.cli import main
from bestiary.training.plot import POINTS, Curve, MatplotlibMissing, draw, page, read_runs, ticks
from bestiary.training.tracking import RunInfo, trackers


def run(folder: Path, steps: int = 20, offset: float = 0.0, **more: float) -> Path:
    tracker = trackers((), folder, RunInfo(folder.name))
    for step in range(1, steps + 1):
        tracker.log(step, {"loss": 2.0 + offset - step / steps, "tokens_per_s": 1000.0, "mfu": 0.4, **more})
        if step % 10 == 0:
            tracker.log(step, {"eval/loss": 1.5 + offset})
    tracker.close()
    return folder


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def spots(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (spot.split(",") for spot in line.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def test_a_page_has_one_line_a_run_in_every_figure_and_loads_nothing(tmp_path: Path) -> None:
    text = page(read_runs([run(tmp_path / "first"), run(tmp_path / "second", offset=1.0)]))
    figures = svgs(text)
    assert [figure.attrib["aria-label"] for figure in figures][:3] == [
        "loss",
        "loss on held-out data",
        "tokens a second",
    ]
    for figure in figures:
        lines = figure.findall("polyline")
        assert len({line.attrib["class"] for line in lines}) == 2
    upper, lower = (spots(line) for line in reversed(figures[0].findall("polyline")))
    assert all(above[1] < below[1] for above, below in zip(upper, lower, strict=True))  # y grows downwards
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "<script" not in text


def test_a_falling_loss_falls_from_left_to_right(tmp_path: Path) -> None:
    (line,) = svgs(page(read_runs([run(tmp_path / "first")])))[0].findall("polyline")
    places = spots(line)
    assert len(places) == 20
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(places))


def test_a_loss_that_is_not_finite_leaves_a_gap() -> None:
    curve = Curve((1, 2, 3, 4, 5), (1.0, 2.0, None, 4.0, 5.0))
    assert list(curve.pieces()) == [[(1.0, 1.0), (2.0, 2.0)], [(4.0, 4.0), (5.0, 5.0)]]


@given(count=st.integers(1, 3000))
def test_long_runs_are_averaged_and_keep_their_mean(count: int) -> None:
    curve = Curve(tuple(range(count)), (3.0,) * count)
    (points,) = curve.pieces()
    assert len(points) <= POINTS
    assert all(value == pytest.approx(3.0) for _, value in points)


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
def test_ticks_are_few_rise_and_stay_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 6
    assert found == sorted(set(found))
    assert all(low - width / 100 <= tick <= low + 1.01 * width for tick in found)


def test_a_run_of_one_step_is_a_dot(tmp_path: Path) -> None:
    (line,) = svgs(page(read_runs([run(tmp_path / "first", steps=1)])))[0].findall("polyline")
    assert line.attrib["class"].startswith("p ")


def test_a_name_cannot_be_markup(tmp_path: Path) -> None:
    assert "<b>" not in page(read_runs([run(tmp_path / "<b>bold")]))


def test_a_png_is_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "plot.png"
    draw(read_runs([run(tmp_path / "first"), run(tmp_path / "second", steps=3)]), out)
    content = out.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24])[0] > 1000


def command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = main(["plot", *arguments, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_compares_runs_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(run(tmp_path / "first")), str(run(tmp_path / "second", offset=1.0))]
    code, told = command(folders, capsys)
    assert code == 0
    assert [one["loss_last"] for one in told["runs"]] == [pytest.approx(1.0), pytest.approx(2.0)]
    assert [one["eval_loss_best"] for one in told["runs"]] == [1.5, 2.5]
    assert told["runs"][0]["tokens_per_s"] == 1000.0


def test_the_command_writes_a_page_where_nothing_else_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(run(tmp_path / "first"))]) == 0
    assert (tmp_path / "plot.html").read_text().startswith("<!DOCTYPE html>")
    assert "first: 20 steps · loss 1.9500 to 1.0000 · 1,000 tok/s" in capsys.readouterr().out


@pytest.mark.parametrize(("target", "word"), [("empty", "metrics.jsonl"), ("first --out plot.pdf", ".png")])
def test_what_cannot_be_drawn_is_refused_with_a_remedy(
    target: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    name, *more = target.split()
    code, told = command([str(tmp_path / name), *more], capsys)
    assert code == 7
    assert word in told["error"]["what"] + told["error"]["remedy"]


def test_a_png_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(MatplotlibMissing, match=r"bestiary\[plot\]"):
        draw(read_runs([run(tmp_path / "first")]), tmp_path / "plot.png")
