"""A comparison as an aligned table.

Pure: figures in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["render_table"]

_COLUMNS = (
    ("fraction_of_bound", "bound", 4),
    ("fraction_of_reachable", "reach", 4),
    ("samples_per_s_rel", "speed", 3),
    ("pipeline_efficiency", "pipe", 4),
    ("pipeline_samples_per_s_rel", "pipe speed", 3),
    ("samples_per_step", "smp/step", 1),
    ("mean_M", "M", 2),
    ("balance_step", "bal step", 4),
    ("balance_microbatch", "bal mb", 4),
    ("fill", "fill", 3),
    ("padding_fraction", "pad", 3),
    ("over_budget", "over", 0),
    ("max_delay_steps", "delay", 0),
    ("bytes_moved_per_step", "moved B", 0),
    ("ks_ratio", "ks", 3),
    ("long_sample_weight", "long w", 4),
    ("outlier_share_p99_ratio", "outl p99", 3),
    ("mean_length_lag1", "lag1", 2),
)


def render_table(policies: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one row per policy for the whole run, then one for its steady part.

    Args:
        policies: as in the JSON.
    """
    shown = [
        column
        for column in _COLUMNS
        if not column[0].startswith("pipeline") or any(column[0] in p for p in policies.values())
    ]
    rows = [["policy", "part", *(title for _, title, _ in shown)]]
    for part in ("whole", "steady"):
        for name, figures in policies.items():
            found = figures if part == "whole" else figures["steady"]
            if found is not None:
                rows.append([name, part, *(_cell(found.get(key), n) for key, _, n in shown)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_line(row, widths) for row in rows)


def _cell(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
    return "  ".join(names + numbers).rstrip()
