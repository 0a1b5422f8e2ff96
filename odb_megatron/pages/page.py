"""A page: title, figures in tiles, sections; one HTML file that needs no network and no script.

Only puts together what it is given. All text is escaped by the template; the one thing that is not
is the SVG that `pictures` makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from odb_megatron import __version__
from odb_megatron.pages import theme
from odb_megatron.pages.chart import Chart, Form, Table
from odb_megatron.pages.needs import require
from odb_megatron.pages.pictures import chart_svg

__all__ = ["Page", "Section", "Tile", "render_page", "write_page"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A figure of the summary.

    Attributes:
        label: what it is.
        value: with its unit.
        note: a few words below it.
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of words, a table, or both.

    Attributes:
        title: heading.
        paragraphs: of text.
        table: numbers, shown open.
        code: shown as it is, in a fixed-width font; it may scroll sideways.
    """

    title: str
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What `write_page` writes.

    Attributes:
        title: heading and title of the document.
        summary: a sentence or two below it.
        tiles: the figures that matter most.
        sections: in their order.
        notes: small print at the end: the command, the versions.
    """

    title: str
    summary: str = ""
    tiles: Sequence[Tile] = ()
    sections: Sequence[Chart | Section] = ()
    notes: Sequence[str] = ()


def render_page(page: Page) -> str:
    """Return the page as HTML.

    Raises:
        ValueError: jinja2 or matplotlib is missing, or a chart cannot be shown (see `pictures`).
    """
    jinja2 = require("jinja2", purpose="a page")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    files = resources.files("odb_megatron.pages")
    template = environment.from_string((files / "page.html").read_text(encoding="utf-8"))
    sections = [_section(index, part) for index, part in enumerate(page.sections)]
    text: str = template.render(
        page=page,
        sections=sections,
        style=(files / "page.css").read_text(encoding="utf-8"),
        light=theme.css_variables(theme.LIGHT),
        dark=theme.css_variables(theme.DARK),
        version=__version__,
    )
    return text


def write_page(path: Path, page: Page) -> None:
    """Write the page as one HTML file.

    Args:
        path: file to write; its folder exists.
        page: what to write.

    Raises:
        ValueError: see `render_page`.
        OSError: the file cannot be written.
    """
    path.write_text(render_page(page), encoding="utf-8")


def _section(index: int, part: Chart | Section) -> dict[str, object]:
    if isinstance(part, Section):
        return {"part": part, "is_chart": False}
    drawn = {
        form.name.lower(): chart_svg(part, form, prefix=f"c{index}{form.name[0].lower()}")
        for form in Form
    }
    return {"part": part, "is_chart": True, **drawn}
