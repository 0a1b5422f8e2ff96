"""Charts and the frame of pages: what they hold, and how they look in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from odb_megatron.report import page
from odb_megatron.report.page import Axis, Bar, Chart, Line, Panel, svg
from tests.browser import Browser, browser, page_problems

__all__ = ["browser"]

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pages)")
pytest.importorskip("jinja2", reason="jinja2 is not installed (the extra pages)")

CHART = Chart(
    title="Bars",
    caption="Two of them.",
    panels=[
        Panel(
            bars=[Bar(0, 0, 1, 3, "blue", "<5 & more>"), Bar(1, 0, 1, 5, "waste", "x", "five")],
            lines=[Line(x=[0, 1], y=[1, 2], colour="orange", label="line")],
            marks=[(1.5, "limit")],
            x=Axis(ends=(0, 3), ticks={0.5: "one", 1.5: "two"}),
            y=Axis(label="seconds", ends=(0, None), has_grid=True),
        )
    ],
    columns=["bar", "value"],
    rows=[["one", "3"], ["two", "5"]],
)


def _page(*charts: Chart) -> str:
    return page.render_page(
        "run.html.j2",
        title="A <page> & more",
        summary="What it is.",
        tiles=[(f"figure {n}", f"{n}.5 %") for n in range(5)],
        differences=(),
        charts=charts,
        whole=[["word " * 40, "9"]],
        starts=(),
        notes=["odb-megatron inspect 'a b'"],
    )


def test_a_page_passes_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "words.html"
    path.write_text(_page(CHART, CHART))
    assert page_problems(browser, path) == []


def test_the_checks_see_defects(browser: Browser, tmp_path: Path) -> None:
    """Text that is cut or overlaps, a page that is too wide, a request, one colour scheme."""
    path = tmp_path / "page.html"
    text = "<text x='{}' y='20' style='font-size: {}px; fill: {}'>{}</text>"
    parts = [("10", "12", "black", "under"), ("12", "12", "black", "over")]
    parts += [("90", "12", "black", "far out"), ("40", "7", "black", "small")]
    parts += [("10", "12", "#eee", "pale")]
    path.write_text(
        "<body style='background: white'><div style='width: 2000px'>wide</div>"
        "<img src='http://localhost:9/a.png'>"
        "<svg width='100' height='40' aria-label='it'>"
        + "".join(text.format(*part) for part in parts)
        + "</svg>"
    )
    problems = page_problems(browser, path)
    for expected in (
        *("scrolls sideways", "http://localhost:9/a.png", "one background", "overlaps"),
        *("is cut by the edge of it", '"small" is 7.0 px', '"pale" has contrast 1'),
    ):
        assert any(expected in problem for problem in problems), (expected, problems)


def test_the_text_of_a_page_is_escaped_and_complete() -> None:
    html = _page(CHART, CHART)
    assert html.count("A &lt;page&gt; &amp; more") == 2
    assert html.count("<title>&lt;5 &amp; more&gt;</title>") == 4
    assert "Two of them." in html
    assert html.count('<th scope="row">two</th><td>5</td>') == 2
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) > 20
    assert {name.removeprefix("#") for name in re.findall(r'href="(#[^"]+)"', html)} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(ids)
    assert not re.search(r"<script|<link rel=.stylesheet|src=", html)


def test_an_svg_follows_the_theme_and_is_the_same_twice() -> None:
    wide = svg(CHART)
    assert wide == svg(CHART)
    assert 'width="880" height="300"' in wide
    assert 'aria-label="Bars"' in wide
    assert "var(--blue)" in wide
    assert not re.search(r"#[0-9a-f]{6}\b", wide)
    assert 'width="328"' in svg(CHART, is_narrow=True)
    (style,) = ElementTree.fromstring(page.standalone_svg(CHART)).findall("{*}style")
    assert "prefers-color-scheme: dark" in str(style.text)
    assert f"--blue: {page.COLOURS['blue']}" in str(style.text)
