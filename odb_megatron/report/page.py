"""Charts as values, drawn as SVG that follows the reader's theme, and the pages they are on.

A page is one HTML file without scripts and without network: a template beside this module, in
`page.html.j2`'s frame. matplotlib and jinja2 (the extra `pages`) are imported when they are needed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from odb_megatron import __version__
from odb_megatron.command import need_pages

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "STYLES", "Axis", "Bar", "Chart", "Line", "Panel", "render_page"]
__all__ += ["replica_axis", "row_bar", "row_bars", "standalone_svg", "svg", "write_page"]

_FOLDER = resources.files("odb_megatron.report")
_CSS = (_FOLDER / "page.css").read_text(encoding="utf-8")
_FOUND = re.findall(r"--(\w+): (#[0-9a-f]{6});", _CSS)
COLOURS = dict(_FOUND[: len(_FOUND) // 2])
"""By name, as charts are drawn; page.css has the dark ones too."""

_NAMES = {value: name for name, value in COLOURS.items()}
WIDTHS = {False: 880, True: 328}  # in CSS pixels, by whether it is the phone's; a page has both
STYLES = (
    *(("blue", "-", "o"), ("orange", "--", "s"), ("green", "-.", "^"), ("purple", ":", "D")),
    *(("grey", "-", "v"), ("red", "--", "P")),
)
"""Colour, line style and marker of series."""

_BARS = {
    **{name: {"facecolor": COLOURS[name]} for name in ("blue", "green", "orange")},
    **{f"{name} thin": {"facecolor": COLOURS[name], "linewidth": 0} for name in ("blue", "green")},
    "rival": {"facecolor": COLOURS["grey"], "hatch": "//"},
    "idle": {"facecolor": COLOURS["grey"], "hatch": "///"},
    "waste": {"facecolor": COLOURS["faint"], "edgecolor": COLOURS["grey"], "hatch": "////"},
}
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_TIP = "tooltip:"
ElementTree.register_namespace("", _SVG)


class Bar(NamedTuple):
    """A rectangle, in one of the looks of `_BARS`."""

    x: float
    y: float
    width: float
    height: float
    look: str
    tooltip: str = ""
    label: str = ""  # behind its right end


def row_bar(row: float, left: float, width: float, look: str, tooltip: str, label: str = "") -> Bar:
    """Return a horizontal bar around a row."""
    return Bar(left, row - 0.36, width, 0.72, look, tooltip, label)


def row_bars(row: float, parts: Iterable[tuple[float, str, str]], left: float = 0) -> list[Bar]:
    """Return bars one behind the other: width, look and tooltip of each; none without a width."""
    bars = []
    for width, look, tooltip in parts:
        if width > 0:
            bars.append(row_bar(row, left, width, look, tooltip))
            left += width
    return bars


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series: points in order, between `low` and `high` a band; `style` is of matplotlib."""

    x: npt.ArrayLike
    y: npt.ArrayLike
    colour: str
    label: str = ""
    style: str = "-"
    marker: str = ""
    is_step: bool = False
    low: npt.ArrayLike | None = None
    high: npt.ArrayLike | None = None
    width: float = 2.0
    alpha: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis: its label, its ends (turned round where the first is the larger), its ticks.

    Without `ticks` there are at most `most` or, where the chart is narrow, about half as many.
    """

    label: str = ""
    ends: tuple[float | None, float | None] = (None, None)
    ticks: Mapping[float, str] | None = None
    narrow_ticks: Mapping[float, str] | None = None
    most: int = 8
    is_whole: bool = False
    is_log: bool = False
    has_grid: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it.
        bars: drawn first.
        lines: with a legend where one has a label.
        marks: dashed verticals, each with its label or none.
        dividers: plain verticals.
        top: labels above the upper edge.
        x: horizontal axis.
        y: vertical axis.
    """

    title: str = ""
    bars: Sequence[Bar] = ()
    lines: Sequence[Line] = ()
    marks: Sequence[tuple[float, str]] = ()
    dividers: Sequence[float] = ()
    top: Mapping[float, str] = field(default_factory=dict)
    x: Axis = Axis()
    y: Axis = Axis()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture with a heading, and the same numbers as a table.

    Attributes:
        title: heading, and the picture's accessible name.
        panels: side by side; below each other where it is narrow, or `is_stacked`.
        caption: what is to be seen.
        columns: heads of the table.
        rows: of the table.
        height: in CSS pixels.
        narrow_height: where it is narrow; 0 for the same.
        is_stacked: panels are below each other always.
    """

    title: str
    panels: Sequence[Panel]
    caption: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    height: int = 300
    narrow_height: int = 0
    is_stacked: bool = False


def replica_axis(rows: Sequence[object], label: str = "replica", *, room: int = 0) -> Axis:
    """Return the vertical axis of rows with names, the first on top; `room` is at least so many."""
    names = {float(row): str(rows[row]) for row in range(0, len(rows), -(-len(rows) // 12))}
    return Axis(label=label, ends=(max(len(rows), room) - 0.4, -0.6), ticks=names)


def render_page(template: str, *, folder: Path | None = None, **values: Any) -> str:
    """Return a page as HTML.

    Args:
        template: its file beside this module, or in `folder`.
        folder: of further templates.
        values: for it; `title`, `summary` and `notes` (small print) are of the frame.

    Raises:
        ValueError: a package is missing.
    """
    need_pages("a page")
    import jinja2
    import markupsafe

    numbers = count()

    def picture(chart: Chart, is_narrow: bool) -> markupsafe.Markup:
        return markupsafe.Markup(svg(chart, is_narrow=is_narrow, prefix=f"c{next(numbers)}"))

    loaders = [
        jinja2.PackageLoader("odb_megatron", "report"),
        jinja2.FileSystemLoader(folder or []),
    ]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["svg"] = picture
    return environment.get_template(template).render(version=__version__, **values)


def write_page(path: str, template: str, **values: Any) -> None:
    """Write a page; see `render_page`."""
    Path(path).write_text(render_page(template, **values), encoding="utf-8")


# --- drawing ---------------------------------------------------------------------------------


def svg(chart: Chart, *, is_narrow: bool = False, prefix: str = "chart") -> str:
    """Return a chart as an SVG element for an HTML page; `prefix` makes its ids unique there."""
    return ElementTree.tostring(_tree(chart, is_narrow, prefix), encoding="unicode")


def standalone_svg(chart: Chart, *, is_narrow: bool = False) -> str:
    """Return a chart as the text of an SVG file that follows the reader's theme by itself."""
    root = _tree(chart, is_narrow, "chart")
    style = ElementTree.Element(f"{{{_SVG}}}style")
    light, dark = (
        " ".join(f"--{name}: {value};" for name, value in part)
        for part in (_FOUND[: len(COLOURS)], _FOUND[len(COLOURS) :])
    )
    style.text = (
        f"svg {{ {light} color: var(--text); background: var(--surface); fill: currentColor; }} "
        "* { stroke-linejoin: round; stroke-linecap: butt; } "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    )
    root.insert(0, style)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _tree(chart: Chart, is_narrow: bool, prefix: str) -> ElementTree.Element:
    import matplotlib
    from matplotlib.figure import Figure

    height = (chart.narrow_height if is_narrow else 0) or chart.height
    buffer = io.StringIO()
    with resources.as_file(_FOLDER / "theme.mplstyle") as style:
        settings = matplotlib.rc_params_from_file(style, use_default_template=False)
    with matplotlib.rc_context({**settings, "svg.hashsalt": prefix}):
        size = (WIDTHS[is_narrow] / 72, height / 72)
        figure = Figure(figsize=size, dpi=72, layout="constrained")
        num = len(chart.panels)
        shape = (num, 1) if is_narrow or chart.is_stacked else (1, num)
        # Rows are as high in one panel as in the next.
        heights = [abs((y.ends[1] or 0) - (y.ends[0] or 0)) for y in (p.y for p in chart.panels)]
        ratios = heights if chart.is_stacked else None
        all_axes = figure.subplots(*shape, sharex=True, squeeze=False, height_ratios=ratios)
        for axes, panel in zip(all_axes.flat, chart.panels, strict=True):
            _draw(axes, panel, is_narrow=is_narrow)
            axes.patch.set_gid("background")
            for spine in axes.spines.values():
                spine.set_gid("spine")
        handles, labels = all_axes[0, 0].get_legend_handles_labels()
        if len(labels) > 1:
            columns = 1 if is_narrow else len(labels)
            figure.legend(handles, labels, loc="outside upper left", ncols=columns)
        figure.patch.set_gid("background")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    _tidy(root, prefix)
    about = {"width": str(WIDTHS[is_narrow]), "height": str(height), "role": "img"}
    root.attrib.update({**about, "aria-label": chart.title})
    return root


def _draw(axes: Axes, panel: Panel, *, is_narrow: bool) -> None:
    from matplotlib.patches import Rectangle

    for bar in panel.bars:
        patch = Rectangle((bar.x, bar.y), bar.width, bar.height, **_BARS[bar.look])
        if bar.tooltip:
            patch.set_gid(_TIP + bar.tooltip)
        axes.add_patch(patch)
        if bar.label:
            at = (bar.x + bar.width, bar.y + bar.height / 2)
            axes.annotate(bar.label, at, (4, 0), textcoords="offset points", va="center")
    for line in panel.lines:
        colour = COLOURS[line.colour]
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.25, linewidth=0)
        axes.plot(
            line.x,
            line.y,
            color=colour,
            linestyle=line.style,
            marker=line.marker,
            label=line.label,
            drawstyle="steps-post" if line.is_step else "default",
            linewidth=line.width,
            alpha=line.alpha,
        )
    for place in panel.dividers:
        axes.axvline(place, color=COLOURS["text"], linewidth=0.8)
    axes.set_title(panel.title)
    axes.autoscale_view()
    _set_axis(axes, "x", panel.x, is_narrow=is_narrow)
    _set_axis(axes, "y", panel.y, is_narrow=is_narrow)
    axes.label_outer()
    for place, label in panel.marks:
        axes.axvline(place, color=COLOURS["red"], linestyle="--", linewidth=1.5)
        across, _ = axes.transAxes.inverted().transform(axes.transData.transform((place, 0)))
        is_right = across > 0.5
        axes.annotate(
            label,
            (place, 1.0),
            (-4 if is_right else 4, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if is_right else "left",
            color=COLOURS["red"],
        )
    if panel.top:
        top = axes.secondary_xaxis("top")
        top.set_xticks(list(panel.top), list(panel.top.values()))
        top.tick_params(length=0)
        top.spines[:].set_visible(False)


def _set_axis(axes: Axes, name: str, axis: Axis, *, is_narrow: bool) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    drawn: Any = getattr(axes, f"{name}axis")
    most = max(4, axis.most // 2) if is_narrow else axis.most
    ticks = axis.narrow_ticks if is_narrow and axis.narrow_ticks else axis.ticks
    if axis.is_log:
        axes.set_xscale("log", base=2)
    axes.set(**{f"{name}lim": axis.ends, f"{name}label": axis.label})
    if ticks is not None:
        drawn.set_ticks(list(ticks), list(ticks.values()))
        drawn.set_minor_locator(NullLocator())
        if name == "y":
            drawn.set_tick_params(length=0)
    elif axis.is_log:
        low, high = axes.get_xlim()
        is_wide = high / low > 8  # else powers of two are too few
        drawn.set_major_locator(LogLocator(2, numticks=most) if is_wide else MaxNLocator(4))
        drawn.set_major_formatter(lambda at, _: f"{at / 1024:g}k" if at % 1024 == 0 else f"{at:g}")
        drawn.set_minor_locator(NullLocator())
    else:
        drawn.set_major_locator(MaxNLocator(most, integer=axis.is_whole))
    if axis.has_grid:
        drawn.grid(visible=True)


def _tidy(root: ElementTree.Element, prefix: str) -> None:
    """Drop what a page has already, make ids unique, turn tooltips into titles, name colours."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        attributes = element.attrib
        name = attributes.pop("id", "")
        if name in ("background", "spine"):
            attributes["class"] = name
        elif name.startswith(_TIP):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = name.removeprefix(_TIP)
            element.insert(0, title)
        elif name:
            attributes["id"] = f"{prefix}-{name}"
        link = attributes.pop(_XLINK, None)
        if link is not None:
            attributes["href"] = link.replace("#", f"#{prefix}-", 1)
        for key, value in attributes.items():
            attributes[key] = value.replace("url(#", f"url(#{prefix}-")
        for key in ("fill", "stroke"):  # a variable works in a style, not in an attribute
            if attributes.get(key, "").startswith("#"):
                attributes["style"] = f"{key}: {attributes.pop(key)}; {attributes.get('style', '')}"
        if "style" in attributes:
            attributes["style"] = re.sub(r"#[0-9a-f]{6}\b", _variable, attributes["style"])


def _variable(colour: re.Match[str]) -> str:
    """Return the CSS variable of a light colour; KeyError for one that has no dark value."""
    return f"var(--{_NAMES[colour[0]]})"
