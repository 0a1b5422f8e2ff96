"""Draws charts: as SVG whose colours follow the reader's theme, and as PNG.

Decides nothing about what is shown. A colour that is not the theme's and axes without data are
errors here, so that no page can have them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from odb_megatron.pages import theme
from odb_megatron.pages.chart import Chart, Form
from odb_megatron.pages.needs import require

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure, FigureBase

__all__ = ["chart_svg", "set_tooltip", "standalone_svg", "write_png"]

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_TOOLTIP = "tooltip:"
_DPI = 72  # one point is one unit of the SVG, and one CSS pixel
_PNG_DPI = 144
_TITLE_HEIGHT = 30


def chart_svg(chart: Chart, form: Form, *, prefix: str) -> str:
    """Return a chart as an SVG element to put into an HTML page.

    Args:
        chart: what to draw.
        form: how wide.
        prefix: of all ids in it: another one for each SVG of a page.

    Raises:
        ValueError: matplotlib is missing, a colour is not the theme's, or axes show nothing.
    """
    return ElementTree.tostring(_tree(chart, form, prefix), encoding="unicode")


def standalone_svg(chart: Chart, form: Form = Form.WIDE) -> str:
    """Return a chart as the text of an SVG file that follows the reader's theme by itself.

    Raises:
        ValueError: as `chart_svg`.
    """
    root = _tree(chart, form, "chart")
    style = ElementTree.Element(f"{{{_SVG}}}style")
    light, dark = theme.css_variables(theme.LIGHT), theme.css_variables(theme.DARK)
    style.text = (
        f"svg {{ {light} color: var(--text); background: var(--surface); fill: currentColor; }} "
        "* { stroke-linejoin: round; stroke-linecap: butt; } "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    )
    root.insert(0, style)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def write_png(path: Path, charts: Sequence[Chart]) -> None:
    """Write charts below each other as a PNG, light.

    Args:
        path: file to write; its folder exists.
        charts: at least one.

    Raises:
        ValueError: as `chart_svg`.
        OSError: the file cannot be written.
    """
    require("matplotlib", purpose="a picture")
    import matplotlib

    heights = [chart.height + _TITLE_HEIGHT for chart in charts]
    with matplotlib.rc_context(theme.RC):
        figure = _figure(Form.WIDE.value, sum(heights))
        parts = figure.subfigures(len(charts), 1, height_ratios=heights, squeeze=False)
        for chart, part in zip(charts, parts[:, 0], strict=True):
            chart.draw(part, Form.WIDE)
            part.suptitle(chart.title, fontweight="bold", x=0.01, ha="left")
            _check_axes(chart, part)
        figure.savefig(path, format="png", dpi=_PNG_DPI, facecolor=theme.SURFACE)


def set_tooltip(artist: Artist, text: str) -> None:
    """Let a browser show a text over a drawn thing (a bar, a marker)."""
    artist.set_gid(_TOOLTIP + text)


def _figure(width: int, height: int) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")


def _tree(chart: Chart, form: Form, prefix: str) -> ElementTree.Element:
    require("matplotlib", purpose="a chart")
    import matplotlib

    buffer = io.StringIO()
    height = chart.height_of(form)
    with matplotlib.rc_context({**theme.RC, "svg.hashsalt": prefix}):
        figure = _figure(form.value, height)
        chart.draw(figure, form)
        _check_axes(chart, figure)
        for axes in figure.axes:
            axes.patch.set_gid("background")
            for spine in axes.spines.values():
                spine.set_gid("spine")
        figure.patch.set_gid("background")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    _tidy(root, prefix)
    _colour(root, chart)
    root.attrib.update(
        {"width": str(form.value), "height": str(height), "role": "img", "aria-label": chart.title}
    )
    return root


def _check_axes(chart: Chart, figure: FigureBase) -> None:
    drawn: Any = figure.axes
    if not drawn:
        raise ValueError(f"chart {chart.title!r} drew no axes: make some with figure.subplots()")
    for index, axes in enumerate(drawn):
        if axes.axison and not axes.has_data():
            raise ValueError(
                f"axes {index} of chart {chart.title!r} show nothing: leave the chart out where "
                "there is nothing to show"
            )


def _tidy(root: ElementTree.Element, prefix: str) -> None:
    """Drop what a page has already, make ids unique, turn tooltips into titles."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name in _PARTS:
            element.attrib["class"] = name
        elif name is not None and name.startswith(_TOOLTIP):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = name.removeprefix(_TOOLTIP)
            element.insert(0, title)
        elif name is not None:
            element.attrib["id"] = f"{prefix}-{name}"
        link = element.attrib.pop(_XLINK, None)
        if link is not None:
            element.attrib["href"] = link.replace("#", f"#{prefix}-", 1)
        for key, value in element.attrib.items():
            if "url(#" in value:
                element.attrib[key] = value.replace("url(#", f"url(#{prefix}-")


def _colour(root: ElementTree.Element, chart: Chart) -> None:
    """Put variables in place of the theme's light colours."""

    def variable(match: re.Match[str]) -> str:
        found = theme.variable_of(match[0])
        if found is None:
            raise ValueError(
                f"chart {chart.title!r} uses the colour {match[0]}, which has no dark value: use "
                "those of odb_megatron.pages.theme"
            )
        return found

    for element in root.iter():
        for name in ("fill", "stroke"):  # a variable works in a style, not in an attribute
            value = element.attrib.get(name, "")
            if value.startswith("#"):
                style = element.attrib.get("style", "")
                element.attrib["style"] = f"{name}: {value}; {style}".removesuffix("; ")
                del element.attrib[name]
        if "style" in element.attrib:
            element.attrib["style"] = _HEX.sub(variable, element.attrib["style"])


_HEX = re.compile(r"#[0-9a-f]{6}\b")
_PARTS = ("background", "spine")

ElementTree.register_namespace("", _SVG)
