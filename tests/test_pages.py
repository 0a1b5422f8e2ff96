"""Pages and charts: what they hold, what they refuse, and how they look in a real browser."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from odb_megatron.pages import (
    Chart,
    Form,
    Page,
    Section,
    Table,
    Tile,
    chart_svg,
    render_page,
    standalone_svg,
    theme,
    write_page,
    write_png,
)
from odb_megatron.pages.pictures import set_tooltip
from tests.browser import Browser, browser, page_problems

__all__ = ["browser"]

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pages)")
pytest.importorskip("jinja2", reason="jinja2 is not installed (the extra pages)")


def _bars(figure: Any, form: Form) -> None:
    axes = figure.subplots()
    names = ["one", "two"] if form.is_narrow else ["number one", "number two"]
    bars = axes.bar(names, [3, 5], color=[theme.BLUE, theme.ORANGE])
    for bar, hatch, name in zip(bars, theme.HATCHES, names, strict=False):
        bar.set_hatch(hatch)
        set_tooltip(bar, f"{name}: <5 & more>")
    axes.set_ylabel("seconds")
    axes.grid(axis="y")


CHART = Chart(
    title="Bars",
    draw=_bars,
    caption="Two of them.",
    table=Table(columns=("bar", "value"), rows=(("one", "3"), ("two", "5"))),
)


def _page(*sections: Chart | Section) -> Page:
    return Page(
        title="A <page> & more",
        summary="What it is.",
        tiles=[Tile(label=f"figure {n}", value=f"{n}.5 %", note="of all") for n in range(5)],
        sections=sections,
        notes=["odb-megatron inspect 'a b'"],
    )


def test_a_page_passes_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "words.html"
    long = Table(
        columns=["name", *(f"column {n}" for n in range(12))], rows=[["x", *"123456789abc"]]
    )
    words = Section(title="Words", paragraphs=["word " * 40], table=long, code="make train " * 20)
    write_page(path, _page(CHART, words, CHART))
    assert page_problems(browser, path) == []


def _far_away(axes: Any) -> None:
    axes.lines[0].set_data([5, 6], [5, 6])


def test_the_checks_see_each_defect(browser: Browser, tmp_path: Path) -> None:
    defects: dict[str, Callable[[Any], Any]] = {
        '"over" overlaps "under"|"under" overlaps "over"': lambda a: a.text(0, 0, "over"),
        r'"small" is 7\.\d px': lambda a: a.text(0, 0.2, "small", fontsize=7),
        '"pale" has contrast 1': lambda a: a.text(0, 0.5, "pale", color=theme.GRID),
        '"far to the right" is cut': lambda a: a.text(1.1, 0.5, "far to the right"),
        "axes of chart 4 show nothing": _far_away,
    }

    def chart(title: str, spoil: Callable[[Any], Any]) -> Chart:
        def draw(figure: Any, form: Form) -> None:
            figure.set_layout_engine("none")
            axes = figure.subplots()
            axes.plot([0, 1], [0, 1])
            axes.set(xlim=(0, 1), ylim=(0, 1))
            axes.text(0, 0, "under")
            spoil(axes)

        return Chart(title=title, draw=draw)

    path = tmp_path / "page.html"
    charts = [chart(f"chart {n}", spoil) for n, spoil in enumerate(defects.values())]
    write_page(path, _page(*charts))
    problems = page_problems(browser, path)
    for expected in defects:
        for at in ("desktop light", "desktop dark", "phone light", "phone dark"):
            if "pale" in expected and "dark" in at:
                expected = '"pale" has contrast'
            pattern = re.compile(f"{at}: .*({expected})")
            assert any(pattern.search(problem) for problem in problems), (pattern, problems)


def test_the_checks_see_a_wide_page_and_a_request(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        "<body style='background: white'><div style='width: 2000px'>wide</div>"
        "<img src='http://localhost:9/a.png'>"
    )
    problems = page_problems(browser, path)
    for expected in ("scrolls sideways", "http://localhost:9/a.png", "one background"):
        assert any(expected in problem for problem in problems), problems


def test_the_text_of_a_page_is_escaped_and_complete() -> None:
    html = render_page(_page(CHART, CHART))
    assert html.count("A &lt;page&gt; &amp; more") == 2
    assert "<title>one: &lt;5 &amp; more&gt;</title>" in html
    assert "<title>number one: &lt;5 &amp; more&gt;</title>" in html
    assert "Two of them." in html
    assert html.count('<th scope="row">two</th><td>5</td>') == 2
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) > 20
    assert {name.removeprefix("#") for name in re.findall(r'href="(#[^"]+)"', html)} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(ids)
    assert not re.search(r"<script|<link rel=.stylesheet|src=", html)


def test_an_svg_follows_the_theme_and_is_the_same_twice() -> None:
    wide = chart_svg(CHART, Form.WIDE, prefix="a")
    assert wide == chart_svg(CHART, Form.WIDE, prefix="a")
    assert 'width="880" height="320"' in wide
    assert 'aria-label="Bars"' in wide
    assert "var(--blue)" in wide
    assert "currentColor" in wide
    assert not re.search(r"#[0-9a-f]{6}\b", wide)
    assert 'width="328"' in chart_svg(CHART, Form.NARROW, prefix="a")


def test_an_svg_that_stands_alone() -> None:
    text = standalone_svg(CHART)
    root = ElementTree.fromstring(text)
    (style,) = root.findall("{http://www.w3.org/2000/svg}style")
    assert style.text is not None
    assert "prefers-color-scheme: dark" in style.text
    assert f"--blue: {theme.DARK['blue']}" in style.text


def test_a_png_holds_all_charts(tmp_path: Path) -> None:
    from matplotlib.image import imread

    write_png(tmp_path / "one.png", [CHART])
    write_png(tmp_path / "two.png", [CHART, CHART])
    one, two = imread(tmp_path / "one.png"), imread(tmp_path / "two.png")
    assert two.shape[0] == 2 * one.shape[0]
    assert two.shape[1] == one.shape[1] == 2 * Form.WIDE.value


def test_light_and_dark_values_are_told_apart_from_their_background() -> None:
    assert set(theme.LIGHT) == set(theme.DARK)
    assert len(set(theme.LIGHT.values())) == len(theme.LIGHT)
    for colours in (theme.LIGHT, theme.DARK):
        for name, least in (("text", 4.5), ("muted", 4.5), *((n, 3) for n in _SERIES_NAMES)):
            assert _contrast(colours[name], colours["surface"]) >= least, name


_SERIES_NAMES = ("blue", "orange", "green", "purple", "grey", "red")


def _contrast(one: str, other: str) -> float:
    low, high = sorted(_luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# --- what is refused -------------------------------------------------------------------------


def test_a_foreign_colour_is_refused() -> None:
    chart = Chart(title="Pink", draw=lambda figure, form: figure.subplots().plot([1, 2], "#ff00ff"))
    with pytest.raises(ValueError, match="'Pink' uses the colour #ff00ff, which has no dark value"):
        chart_svg(chart, Form.WIDE, prefix="a")


def test_axes_without_data_are_refused(tmp_path: Path) -> None:
    empty = Chart(title="Empty", draw=lambda figure, form: figure.subplots())
    with pytest.raises(ValueError, match="axes 0 of chart 'Empty' show nothing"):
        chart_svg(empty, Form.WIDE, prefix="a")
    with pytest.raises(ValueError, match="axes 0 of chart 'Empty' show nothing"):
        write_png(tmp_path / "a.png", [empty])
    none = Chart(title="None", draw=lambda figure, form: None)
    with pytest.raises(ValueError, match="chart 'None' drew no axes"):
        chart_svg(none, Form.WIDE, prefix="a")


def test_values_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="has 1 cells; the table has 2 columns"):
        Table(columns=("a", "b"), rows=(("1",),))
    with pytest.raises(ValueError, match="a chart needs a title"):
        Chart(title=" ", draw=_bars)
    with pytest.raises(ValueError, match="narrow_height of chart 'A' is 10 px; at least 60"):
        Chart(title="A", draw=_bars, narrow_height=10)


@pytest.mark.parametrize(
    ("package", "what"), [("matplotlib", "a chart"), ("jinja2", "a page")], ids=["chart", "page"]
)
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, package: str, what: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    expected = f"{what} needs {package}, which is not installed: pip install 'odb-megatron[pages]'"
    with pytest.raises(ValueError, match=re.escape(expected)):
        render_page(_page(CHART))
