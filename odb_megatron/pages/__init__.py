"""Pages and pictures of what the commands found: one look, light and dark, wide and narrow.

Values in, text out: knows no planner, no Megatron and no torch. matplotlib and jinja2 (the extra
`pages`) are imported when something is drawn or written, not before.
"""

from __future__ import annotations

from odb_megatron.pages.chart import Chart, Draw, Form, Table
from odb_megatron.pages.page import Page, Section, Tile, render_page, write_page
from odb_megatron.pages.pictures import chart_svg, standalone_svg, write_png

__all__ = [
    "Chart",
    "Draw",
    "Form",
    "Page",
    "Section",
    "Table",
    "Tile",
    "chart_svg",
    "render_page",
    "standalone_svg",
    "write_page",
    "write_png",
]
