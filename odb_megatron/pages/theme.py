"""Colours and type of all charts and pages.

Constants only. Charts are drawn in the light values; the SVG names them as CSS variables, which
have a dark value too. The series differ in lightness as well as in hue (after Okabe and Ito), and
each reaches 3:1 against both backgrounds; text reaches 4.5:1. Colour never stands alone: give a
series a hatch, a marker, a line style or a label of its own as well.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BLUE",
    "DARK",
    "FAINT",
    "FONT_SIZE",
    "GREEN",
    "GREY",
    "GRID",
    "HATCHES",
    "LIGHT",
    "MARKERS",
    "MUTED",
    "ORANGE",
    "PURPLE",
    "RC",
    "RED",
    "SERIES",
    "SURFACE",
    "TEXT",
    "css_variables",
    "variable_of",
]

TEXT = "#1a1f24"
MUTED = "#57616b"
GRID = "#d3dae0"
SURFACE = "#ffffff"
FAINT = "#e6ebf0"
BLUE = "#0b62a8"
ORANGE = "#c05f00"
GREEN = "#00805f"
PURPLE = "#8e3b86"
GREY = "#707c87"
RED = "#b3261e"

LIGHT = {
    "text": TEXT,
    "muted": MUTED,
    "grid": GRID,
    "surface": SURFACE,
    "faint": FAINT,
    "blue": BLUE,
    "orange": ORANGE,
    "green": GREEN,
    "purple": PURPLE,
    "grey": GREY,
    "red": RED,
}
DARK = {
    "text": "#e8ecf0",
    "muted": "#a9b4be",
    "grid": "#38414a",
    "surface": "#14181d",
    "faint": "#262d35",
    "blue": "#62b0ee",
    "orange": "#f2a654",
    "green": "#45cfa6",
    "purple": "#d592cf",
    "grey": "#8793a0",
    "red": "#f2867d",
}

SERIES = (BLUE, ORANGE, GREEN, PURPLE, GREY, RED)
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")
MARKERS = ("o", "s", "^", "D", "v", "P")

FONT_SIZE = 12

RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": FONT_SIZE,
    "axes.titlesize": FONT_SIZE,
    "axes.labelsize": FONT_SIZE,
    "xtick.labelsize": FONT_SIZE,
    "ytick.labelsize": FONT_SIZE,
    "legend.fontsize": FONT_SIZE,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "legend.facecolor": SURFACE,
    "legend.edgecolor": GRID,
    "legend.frameon": False,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler('color', {list(SERIES)})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "patch.edgecolor": SURFACE,
    "hatch.color": SURFACE,
    "hatch.linewidth": 1.0,
    "lines.color": BLUE,
    "patch.facecolor": BLUE,
    "boxplot.flierprops.color": TEXT,
}
"""Settings of matplotlib under which every chart is drawn."""


def variable_of(colour: str) -> str | None:
    """Return the CSS value that stands for a light colour; None for one that is not the theme's."""
    if colour == TEXT:
        return "currentColor"
    name = _NAMES.get(colour)
    return None if name is None else f"var(--{name})"


def css_variables(colours: dict[str, str]) -> str:
    """Return the declarations of a theme's variables."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


_NAMES = {value: name for name, value in LIGHT.items()}
