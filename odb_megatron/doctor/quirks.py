"""What a supported Megatron does otherwise than the newest one, where a user would notice.

Pure: a version and flags in, findings out. docs/versions.md has the details, and how each is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from odb_megatron.doctor.finding import Finding, fine, warning

__all__ = ["QUIRKS", "Quirk", "check_quirks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirk:
    """One difference.

    Attributes:
        first: first minor version that has it.
        last: last one.
        flags: of the command line that bring it about, all of them, some with a value
            (`--flag=value`); none for every run.
        without: a flag that avoids it.
        seen: what happens.
        way_out: what to do.
        expected: what happens otherwise.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    flags: tuple[str, ...] = ()
    without: str = ""
    seen: str
    way_out: str
    expected: str = "as 0.18 and later do it"

    def is_met(self, flags: Sequence[str]) -> bool:
        """Whether a command line brings it about."""
        given = {flag.partition("=")[0] for flag in flags}
        given |= {f"{flag}={value}" for flag, value in pairwise(flags)} | set(flags)
        return set(self.flags) <= given and self.without not in given


QUIRKS = (
    Quirk(
        first=(0, 16),
        last=(0, 16),
        seen="0.16 is tried as the core alone: no checkpoints, evaluation or schedule of "
        "megatron.training",
        way_out="train as examples/train_core_only.py does, or use megatron-core 0.17 or later",
    ),
    Quirk(
        first=(0, 17),
        last=(0, 17),
        flags=("--full-validation",),
        without="--odb",
        seen="without --odb, --full-validation fails at the second evaluation, and is refused",
        way_out="use --odb, drop --full-validation, or use megatron-core 0.18",
    ),
    Quirk(
        first=(0, 17),
        last=(0, 17),
        flags=("--odb-pad-to-budget", "--num-layers-per-virtual-pipeline-stage"),
        seen="a pipeline stage's output is freed while it is sent: it is kept, and takes memory",
        way_out="leave room for it, or use megatron-core 0.18",
    ),
    Quirk(
        first=(0, 17),
        last=(0, 17),
        seen="a checkpoint is saved for every NaN that the rerun machine finds",
        way_out="give --rerun-mode disabled, or use megatron-core 0.18",
    ),
    Quirk(
        first=(0, 18),
        last=(0, 19),
        flags=("--save", "--ckpt-format=torch", "--context-parallel-size"),
        seen="the ranks of a context-parallel group write the same file at once, which may "
        "damage it",
        way_out="use --ckpt-format torch_dist",
        expected="one rank writes each file",
    ),
)


def check_quirks(version: tuple[int, ...], flags: Sequence[str] | None) -> list[Finding]:
    """Return the quirks of a version: warnings where the flags bring them about.

    Args:
        version: of megatron-core.
        flags: of the command line; None where none was given, so that none can be warned of.
    """
    own = [quirk for quirk in QUIRKS if quirk.first <= version[:2] <= quirk.last]
    known = ".".join(map(str, version[:2]))
    subject = f"Megatron {known}"
    if not own:
        return [fine(subject, "no known difference that a run would notice")]
    found = []
    for quirk in own:
        if flags is not None and quirk.is_met(flags):
            way_out = quirk.way_out
            found.append(warning(subject, quirk.seen, expected=quirk.expected, way_out=way_out))
        else:
            cause = f" ({' '.join(quirk.flags)})" if quirk.flags else ""
            found.append(fine(subject, f"known{cause}: {quirk.seen}; {quirk.way_out}"))
    return found
