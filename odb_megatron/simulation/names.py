"""Names of what a simulation compares, in the order of its table.

Light to import: the command line needs them before numpy is loaded.
"""

from __future__ import annotations

__all__ = ["BOUND", "IDEAL", "ONLINE_BOUND", "POLICY_NAMES", "select_names"]

BOUND = "bound"
ONLINE_BOUND = "bound-online"
IDEAL = "lpt-window"

POLICY_NAMES = (
    "standard",
    "standard-safe",
    "sorted",
    "sorted-bucketed",
    "sorted-aligned",
    "odb-reference",
    "dp-balanced",
    "ffd",
    "samples",
    "cost",
    IDEAL,
    ONLINE_BOUND,
    BOUND,
)


def select_names(text: str) -> tuple[str, ...]:
    """Return the names asked for, in the order of the table.

    Args:
        text: names separated by commas, or `all`.

    Raises:
        ValueError: a name is not known, or none is given.
    """
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if asked == ["all"]:
        return POLICY_NAMES
    expected = f"expected all, or some of {', '.join(POLICY_NAMES)}, separated by commas"
    if "all" in asked:
        others = ", ".join(name for name in asked if name != "all") or "itself"
        raise ValueError(
            f"--policy {text}: all stands for every policy, {others} included: give all alone, or "
            "only the names you want"
        )
    for name in asked:
        if name not in POLICY_NAMES:
            raise ValueError(f"--policy {text}: there is no policy {name!r}: {expected}")
    if not asked:
        raise ValueError(f"--policy {text!r} names no policy: {expected}")
    return tuple(name for name in POLICY_NAMES if name in asked)
