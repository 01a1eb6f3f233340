"""The page: it says all that the verdict says, escapes all of it, loads nothing, and a real browser shows it well."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestiary.verify.html_report import html_report, html_self_test
from bestiary.verify.markup import VOID, Html, join, tag
from bestiary.verify.plots import Point, Series, error_plot
from bestiary.verify.verdict import Exit, report
from tests.verify.browser import Browser, executable, picture
from tests.verify.verdicts import failing, full, self_test, verdict

EVIL = "</style></title></pre>\"'><script data-evil>alert(1)</script><img data-evil src=x onerror=alert(1)>&amp;\x00"
SIZES = {"phone": (390, 844), "desk": (1280, 900)}


def pages() -> dict[str, str]:
    """A page of each kind: one that passes, one that fails, several with a kill matrix, the self-test."""
    return {
        "pass": html_report(report([verdict()])),
        "fail": html_report(report([full()])),
        "several": html_report(report([full("gemma3"), verdict(), failing(190)]), self_test()),
        "self-test": html_self_test(self_test()),
        "hostile": html_report(report([full(EVIL), full(EVIL)]), self_test(EVIL)),
    }


class Reader(HTMLParser):
    """Elements, attributes and text of a page; fails on a tag that is closed in the wrong place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attrs)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


# ------------------------------------------------------------------ markup


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r")), st.sampled_from(["td", "title"]))
def test_any_text_comes_back_as_text_from_element_and_attribute(text, name):
    shown = re.sub("[\x00-\x08\x0b-\x1f]", "\ufffd", text)
    found = read(tag(name, text, title=text))
    assert "".join(found.text) == shown
    assert found.elements == [(name, {"title": shown})]


def test_markup_is_embedded_once_and_text_of_it_is_not_markup():
    assert tag("b", tag("i", "<x>"), "<i>", 3, None, [1.5]) == "<b><i>&lt;x&gt;</i>&lt;i&gt;31.5</b>"
    assert isinstance(join("a"), Html)
    assert tag("br") == "<br>"
    assert tag("p", data_label="x", open=True, hidden=False, id=None) == '<p data-label="x" open></p>'


# ------------------------------------------------------------------ content


@pytest.mark.parametrize("name", ["pass", "fail", "several", "self-test", "hostile"])
def test_a_page_is_whole_runs_no_script_and_loads_nothing(name):
    found = read(pages()[name])
    assert not {element for element, _ in found.elements} & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
    }
    for element, attributes in found.elements:
        assert not [key for key in attributes if key.startswith("on") or key == "style"], element
        for key in ("href", "src", "srcset", "action", "data"):
            value = attributes.get(key)
            assert value is None or value.startswith("#") or value == "data:,", (element, value)
    assert "@import" not in pages()[name]
    assert "url(" not in pages()[name]


def test_a_page_fits_phones_and_both_colour_schemes():
    page = pages()["fail"]
    metas = [attributes for element, attributes in read(page).elements if element == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    assert any("default-src 'none'" in (one.get("content") or "") for one in metas)
    assert "prefers-color-scheme: dark" in page


def test_all_that_the_verdict_says_is_on_the_page():
    one = full()
    text = " ".join(read(html_report(report([one]))).text)
    assert one.first_divergence is not None
    assert one.repro is not None
    wanted = [one.family, one.reference_class, one.verdict, one.error, one.repro, one.first_divergence.module]
    wanted += [one.first_divergence.tensor, one.hypotheses[0].hint, *one.weak, *one.keys.missing, *one.hashes.values()]
    wanted += [level.title for level in one.levels] + [level.findings[0].check for level in one.levels]
    for item in one.config:
        wanted += [item.field, item.kind.upper(), item.ours, *item.read_as, item.read_in]
    wanted += [one.kernels[0].operation, one.kernels[1].status, "1 of 2 ran here"]
    assert [entry for entry in wanted if entry not in text] == []


def test_the_kill_matrix_shows_each_bug_under_its_level_and_survivors_first():
    page = html_report(report([verdict()]), self_test())
    text = " ".join(read(page).text)
    assert "3/4 planted bugs killed, 1/2 false alarms" in text
    assert text.index("G22_window") < text.index("C01_gate_up_swapped")
    row = page[page.index("<code>G22_window") :].partition("</tr>")[0]
    cells = re.findall(r'<td(?: title="([^"]*)")? class="(\w+)">([^<]*)</td>', row)
    assert [(css, shown) for _, css, shown in cells] == [("mute", "·"), ("bad", "1/2")]
    assert "gemma3_text: survives" in cells[1][0]


def test_the_kill_matrix_shows_which_other_levels_see_a_bug_where_they_were_asked():
    result = self_test()
    for family, seen in zip(result.families, (["V4"], []), strict=True):
        family.kills[0].asked, family.kills[0].seen_by = ["V4", "V6"], seen
    page = html_report(report([verdict()]), result)
    row = page[page.index("<code>C01_gate_up") :].partition("</tr>")[0]
    cells = re.findall(r'<td(?: title="([^"]*)")? class="\w+">([^<]*)</td>', row)
    assert [shown for _, shown in cells] == ["2/2", "(1/2)", "·", "(0/2)"]  # V2, V4, V5, V6
    assert "qwen3: sees it too; gemma3_text: does not see it" in cells[1][0]


def test_checks_that_fail_alike_are_one_row_that_counts_them():
    text = " ".join(read(html_report(report([failing(190)]))).text)
    assert "Checks that did not pass, 1330" in text
    assert text.count(" and 189 more") == 7


def test_several_families_are_folded_unless_they_fail():
    page = html_report(report([verdict(), full("gemma3")]))
    folds = [(a.get("id"), "open" in a) for name, a in read(page).elements if name == "details" and a.get("id")]
    assert folds == [("family-0", False), ("family-1", True)]
    assert "1 of 2 not passing: gemma3" in page


@pytest.mark.parametrize("code", [code for code in Exit if code is not Exit.PASS])
def test_no_banner_but_that_of_a_pass_is_green(code):
    bad = verdict(code, levels=[verdict().levels[0].model_copy(update={"status": "fail", "passed": 2, "failed": 1})])
    assert 'class="banner good"' in html_report(report([verdict()]))
    assert 'class="banner good"' not in html_report(report([bad]))


# ------------------------------------------------------------------ plots


def plot(*figures: float | None) -> Reader:
    points = [Point(i, figure, f"hint {i}") for i, figure in enumerate(figures)]
    return read(error_plot([Series("s", points)], title="t", gate=1e-10, x_title="x", x_ticks=[(0, "0")], lines=False))


def heights(found: Reader) -> list[float]:
    return [float(a["cy"] or "nan") for name, a in found.elements if name == "circle" and a.get("cx") != "6.0"]


def test_larger_errors_stand_higher_zero_lowest_and_what_is_not_finite_highest():
    ys = heights(plot(0.0, 1e-15, 1e-12, 1e-2, None))
    assert ys == sorted(ys, reverse=True)
    assert len(set(ys)) == 5
    assert all(0 < y < 210 for y in ys)


def test_the_gate_separates_what_passes_from_what_fails():
    found = plot(0.9e-10, 1.1e-10)
    (line,) = [a for name, a in found.elements if name == "line" and a.get("class") == "gate"]
    below, above = heights(found)
    assert above < float(line["y1"] or "nan") < below


# ------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser():
    one = Browser(executable())
    yield one
    one.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, page in pages().items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return folder


def brightness(colour: tuple[int, ...]) -> float:
    return sum(colour) / len(colour)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["pass", "fail", "several", "self-test", "hostile"])
def test_a_browser_shows_the_page(browser, files, name, size, dark):
    """Without a complaint on its console or a request, no wider than the screen, not blank, in the scheme asked for."""
    width, height = SIZES[size]
    browser.complaints.clear()
    browser.open(files / f"{name}.html", width=width, height=height, dark=dark)
    browser.ask("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert browser.ask("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    assert browser.ask("document.scripts.length + document.querySelectorAll('[data-evil]').length") == 0
    assert browser.ask("document.querySelector('h1').getBoundingClientRect().height") > 10
    shot = picture(browser.screenshot(scale=0.25))
    assert abs(shot.width - width / 4) <= 1
    assert abs(shot.height - height / 4) <= 1
    colours = shot.colours()
    assert len(colours) > 20
    assert max(colours.values()) < 0.9 * sum(colours.values())
    assert (brightness(max(colours, key=lambda colour: colours[colour])) < 128) == dark
    assert browser.complaints == []


def test_nothing_reaches_over_the_edge_of_a_phone(browser, files):
    """Outside the boxes that scroll by themselves, in every section opened."""
    browser.open(files / "several.html", width=390, height=844)
    browser.ask("document.querySelectorAll('details').forEach(one => { one.open = true })")
    over = browser.ask(
        "[...document.querySelectorAll('main *')].filter(one => !one.closest('.scroll') && !one.closest('thead')"
        " && one.getBoundingClientRect().right > 390.5).map(one => one.outerHTML.slice(0, 80))"
    )
    assert over == []


def test_the_browser_test_notices_what_a_page_must_not_do(browser, tmp_path):
    """A script, a request and an overflow are seen; else the tests above would pass on anything."""
    (tmp_path / "bad.html").write_text(
        "<!DOCTYPE html><meta name=viewport content='width=device-width'><link rel=icon href='data:,'>"
        "<body style='margin:0'><div style='width:2000px'>wide</div><script>console.error('noise'); fetch('http://127.0.0.1:9/')</script>"
    )
    browser.complaints.clear()
    browser.open(tmp_path / "bad.html", width=390, height=844)
    assert browser.ask("document.documentElement.scrollWidth") == 2000
    assert any("noise" in text for text in browser.complaints)
    assert any("127.0.0.1:9" in text for text in browser.complaints)
    browser.complaints.clear()
