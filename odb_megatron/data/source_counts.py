"""What a replica has consumed of each data source, packed or padded.

Pure counting; must not print or exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from odb_megatron.data.sample import HoleReason

__all__ = ["SourceCounts"]


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

    def add_hole(self, reason: HoleReason, message: str) -> None:
        """Count a position that emits nothing."""
        if reason is HoleReason.OVERLONG:
            self.overlong += 1
        else:
            self.bad_records += 1
        self.first_message = self.first_message or message

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the integer fields, in order."""
        return tuple(field.name for field in fields(cls) if field.name != "first_message")
