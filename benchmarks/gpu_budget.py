"""Which rows of a benchmark fit into its minutes, and how many rounds each of them gets.

Pure: seconds in, decisions out. Must not read a clock; what a round takes is measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ArmClock", "RoundLimits", "RowPlan", "fits", "plan_rows"]

_MARGIN = 1.15
"""A round may take so much longer than the slowest one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """Measured rounds of a row, beside its one round of warm-up."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"rounds must be 1 <= least <= most; got {self.least}, {self.most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """What is run.

    Attributes:
        rounds: measured rounds of each row that fits, in the order given.
        left_out: why each other row does not fit.
    """

    rounds: Mapping[str, int]
    left_out: Mapping[str, str]


def plan_rows(round_s: Mapping[str, float], *, left_s: float, limits: RoundLimits) -> RowPlan:
    """Choose rows in the order given, then give all of them the same number of rounds.

    Args:
        round_s: seconds that a round of each row is expected to take.
        left_s: seconds left.
        limits: rounds of a row.
    """
    chosen: list[str] = []
    left_out: dict[str, str] = {}
    spent = 0.0
    for name, seconds in round_s.items():
        least = seconds * (1 + limits.least) * _MARGIN
        if spent + least <= left_s:
            chosen.append(name)
            spent += least
        else:
            left_out[name] = (
                f"its warm-up and {limits.least} rounds need about {least:.0f} s, "
                f"{max(0.0, left_s - spent):.0f} s were left"
            )
    total = sum(round_s[name] for name in chosen)
    rounds = limits.most
    if total > 0:
        rounds = int(left_s / (_MARGIN * total)) - 1
    rounds = min(limits.most, max(limits.least, rounds))
    return RowPlan(rounds=dict.fromkeys(chosen, rounds), left_out=left_out)


def fits(seconds: float, *, left_s: float) -> bool:
    """Whether something that took `seconds` last time can be begun."""
    return seconds * _MARGIN <= left_s


class ArmClock:
    """Says how long an arm's next step will take.

    As long as its last one; if the arm before took longer than its own last one, by as much longer.

    Args:
        arm_s: what each arm's step is predicted to take.
    """

    def __init__(self, arm_s: Mapping[str, float]) -> None:
        self._last_s = dict(arm_s)
        self._running: tuple[str, float] | None = None

    def begin(self, name: str, now: float) -> float:
        """A step of this arm is about to begin, and the one before has ended."""
        slower = 1.0
        if self._running is not None:
            arm, since = self._running
            slower = max(1.0, (now - since) / max(1e-9, self._last_s[arm]))
            self._last_s[arm] = now - since
        self._running = (name, now)
        return self._last_s[name] * slower
