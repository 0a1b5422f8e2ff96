"""What a check found: its status, what was seen, what was expected, the hint.

Pure: no package, file or device is looked at here.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

__all__ = ["Finding", "Status", "as_json", "exit_code", "failure", "fine", "not_applicable"]
__all__ += ["render", "warning"]

_WIDTH = 100


class Status(Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: what was looked at; several findings may share one.
        status: how it ended.
        seen: what there is.
        expected: what there should be; given with a warning or a failure.
        way_out: what to do; given with a warning or a failure.
    """

    subject: str
    status: Status
    seen: str
    expected: str = ""
    way_out: str = ""

    def __post_init__(self) -> None:
        wanted = self.status in (Status.WARNING, Status.FAILURE)
        assert not wanted or (self.expected and self.way_out), f"{self.subject}: {self.seen}"


def fine(subject: str, seen: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(subject=subject, status=Status.OK, seen=seen)


def warning(subject: str, seen: str, *, expected: str, way_out: str) -> Finding:
    """Return a finding of what may fail, or is slow."""
    return Finding(
        subject=subject, status=Status.WARNING, seen=seen, expected=expected, way_out=way_out
    )


def failure(subject: str, seen: str, *, expected: str, way_out: str) -> Finding:
    """Return a finding of what will fail."""
    return Finding(
        subject=subject, status=Status.FAILURE, seen=seen, expected=expected, way_out=way_out
    )


def not_applicable(subject: str, seen: str) -> Finding:
    """Return a finding that says why nothing was checked."""
    return Finding(subject=subject, status=Status.NOT_APPLICABLE, seen=seen)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 where there is a failure, else 0."""
    return int(any(finding.status is Status.FAILURE for finding in findings))


def render(findings: Sequence[Finding]) -> str:
    """Return the findings for a reader, and a line that counts them."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        status = "n/a" if finding.status is Status.NOT_APPLICABLE else finding.status.value
        head = f"{status:<8} {finding.subject:<{width}}  "
        lines += _wrap(head, finding.seen)
        pad = " " * len(head)
        if finding.expected:
            lines += _wrap(f"{pad}expected: ", finding.expected)
        if finding.way_out:
            lines += _wrap(f"{pad}way out:  ", finding.way_out)
    counts = Counter(finding.status for finding in findings)
    told = [_counted(counts[status], status.value) for status in Status if counts[status]]
    return "\n".join([*lines, "", f"doctor: {', '.join(told)}"])


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as plain values."""
    counts = Counter(finding.status.value for finding in findings)
    return {
        "exit_code": exit_code(findings),
        "counts": {status.value: counts[status.value] for status in Status},
        "checks": [{**asdict(finding), "status": finding.status.value} for finding in findings],
    }


def _counted(count: int, name: str) -> str:
    has_plural = count > 1 and name in ("warning", "failure")
    return f"{count} {name}{'s' if has_plural else ''}"


def _wrap(head: str, text: str) -> list[str]:
    """Return lines that begin with `head`; words, such as commands and paths, stay whole."""
    return textwrap.wrap(
        text,
        width=max(_WIDTH, len(head) + 40),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]
