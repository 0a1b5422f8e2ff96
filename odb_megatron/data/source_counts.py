"""What a replica has consumed of each data source, packed or padded.

Pure counting; must not print or exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from odb_megatron.data.sample import SkipReason

__all__ = ["SourceCounts", "added_counts", "check_source_counts"]

_MESSAGE = 1024
"""Characters of a message that are saved."""


@dataclass(slots=True)
class SourceCounts:
    """Counts of one source.

    Attributes:
        samples: samples emitted.
        tokens: their tokens before padding.
        loss_tokens: positions of theirs that carry loss.
        truncated: samples whose end was cut.
        unlabelled: samples left without any loss token by the cut.
        solo: samples over the token budget or patch cap, in a micro-batch of their own.
        bad_records: records left out.
        overlong: samples left out for their length.
        first_message: why the first one was left out.
    """

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    truncated: int = 0
    unlabelled: int = 0
    solo: int = 0
    bad_records: int = 0
    overlong: int = 0
    first_message: str = ""

    def add_sample(
        self, *, num_tokens: int, num_loss_tokens: int, truncated: bool, solo: bool
    ) -> None:
        """Count an emitted sample."""
        self.samples += 1
        self.tokens += num_tokens
        self.loss_tokens += num_loss_tokens
        self.truncated += truncated
        self.unlabelled += num_loss_tokens == 0
        self.solo += solo

    def add_skipped(self, reason: SkipReason, message: str) -> None:
        """Count a position that emits nothing."""
        if reason is SkipReason.OVERLONG:
            self.overlong += 1
        else:
            self.bad_records += 1
        self.first_message = self.first_message or message

    def state_dict(self) -> dict[str, int | str]:
        """Return the counts, for a checkpoint."""
        return {**asdict(self), "first_message": self.first_message[:_MESSAGE]}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the integer fields, in order."""
        return tuple(field.name for field in fields(cls) if field.name != "first_message")


def added_counts(states: Iterable[list[Mapping[str, Any]]]) -> list[SourceCounts]:
    """Return the sums of saved counts, by source; the first message is the first one there is.

    Args:
        states: of each replica, `SourceCounts.state_dict` of all sources.
    """
    sums: list[SourceCounts] = []
    for replica in states:
        sums += [SourceCounts() for _ in replica[len(sums) :]]
        for total, saved in zip(sums, replica, strict=True):
            for name in SourceCounts.names():
                setattr(total, name, getattr(total, name) + saved[name])
            total.first_message = total.first_message or saved["first_message"]
    return sums


def check_source_counts(value: Any, *, num_sources: int) -> None:
    """Raise unless a value read from a file is what `SourceCounts.state_dict` gives, by source.

    Raises:
        ValueError: something else.
    """
    names = {*SourceCounts.names(), "first_message"}
    is_good = isinstance(value, list) and len(value) == num_sources
    for counts in value if is_good else ():
        is_good = is_good and isinstance(counts, Mapping) and set(counts) == names
        is_good = is_good and all(_is_sound(name, counts[name]) for name in names)
    if not is_good:
        raise ValueError(
            f"source_counts is {str(value)[:80]}; expected the counts of {num_sources} sources"
        )


def _is_sound(name: str, value: Any) -> bool:
    if name == "first_message":
        return isinstance(value, str) and len(value) <= _MESSAGE
    return type(value) is int and 0 <= value < 1 << 62
