"""What a chart is before it is drawn: a drawing function, its words, and its numbers as a table.

Plain values; imports neither matplotlib nor jinja2.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

__all__ = ["Chart", "Draw", "Form", "Table"]


class Form(enum.Enum):
    """How wide a chart is drawn, in CSS pixels; the page shows the one that fits."""

    WIDE = 880
    NARROW = 328

    @property
    def is_narrow(self) -> bool:
        """Whether it is the phone's."""
        return self is Form.NARROW


Draw = Callable[["FigureBase", Form], None]
"""Draws into an empty figure: makes the axes it needs (`figure.subplots()`), in colours of `theme`,
and shortens its labels where the form is narrow. One point of matplotlib is one CSS pixel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Numbers with names.

    Attributes:
        columns: heads; the first is that of the rows' names.
        rows: as text, each as long as `columns`.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {list(row)} has {len(row)} cells; the table has {len(self.columns)} "
                    f"columns {list(self.columns)}: give one cell per column"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A section of a page that shows a picture.

    Attributes:
        title: heading, and the picture's accessible name.
        draw: see `Draw`.
        caption: what is to be seen, in a sentence or two.
        table: the same numbers; None where the caption gives them all.
        height: of the wide form, in CSS pixels.
        narrow_height: of the narrow form; None for the same.
    """

    title: str
    draw: Draw
    caption: str = ""
    table: Table | None = None
    height: int = 320
    narrow_height: int | None = None

    def __post_init__(self) -> None:
        if not self.title.strip():
            raise ValueError("a chart needs a title: it is its heading and its accessible name")
        for name in ("height", "narrow_height"):
            value = getattr(self, name)
            if value is not None and value < 60:
                raise ValueError(f"{name} of chart {self.title!r} is {value} px; at least 60")

    def height_of(self, form: Form) -> int:
        """Return the height in CSS pixels."""
        if form.is_narrow and self.narrow_height is not None:
            return self.narrow_height
        return self.height
