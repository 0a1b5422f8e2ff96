"""Made-up data for the tests of the data layer: every token says which record it belongs to.

Must not import Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from odb_megatron.data.order import Order, PassOrder
from odb_megatron.data.preprocess import BadRecordPolicy, SampleRules
from odb_megatron.data.sources import MapSource
from odb_megatron.data.stream import SampleStream, SourcePart
from odb_megatron.plan.padding import OverlongPolicy

__all__ = ["BASE", "Letters", "Records", "rules", "single_stream"]

BASE = 1000
"""Record r holds the tokens r * BASE, r * BASE + 1, ...; each label is the token plus one."""


def rules(
    *,
    context: int = 64,
    token_budget: int = 64,
    multiple: int = 1,
    overlong: OverlongPolicy = OverlongPolicy.ERROR,
    bad_record: BadRecordPolicy = BadRecordPolicy.ERROR,
) -> SampleRules:
    """Sample rules with small defaults."""
    return SampleRules(
        context=context,
        token_budget=token_budget,
        multiple=multiple,
        overlong=overlong,
        bad_record=bad_record,
    )


class Records:
    """A user's map-style dataset; length 0 stands for a bad record (its mask is all zero).

    Args:
        lengths: tokens of each record.
        failing: record that raises `KeyError`.
    """

    def __init__(self, lengths: Sequence[int], *, failing: int | None = None) -> None:
        self.lengths = list(lengths)
        self.failing = failing

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.failing:
            raise KeyError(f"no such thing in record {index}")
        length = self.lengths[index]
        tokens = index * BASE + np.arange(max(1, length))
        loss_mask = np.ones(tokens.size, dtype=np.float32)
        loss_mask[: tokens.size // 3] = 0  # a prompt
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": loss_mask * (length > 0)}


class Letters:
    """A `TextTokenizer` of one token per character."""

    eos_id = 0
    chat_template: str | None = None

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        """Code points."""
        return [ord(letter) for letter in text]

    @staticmethod
    def decode(ids: Sequence[int]) -> str:
        """Inverse of `encode`; the end of text is "$"."""
        return "".join(chr(i) if i else "$" for i in ids)


def single_stream(
    dataset: Any,
    *,
    seed: int = 7,
    num_samples: int | None = None,
    order: Order | None = None,
    sample_rules: SampleRules | None = None,
) -> SampleStream:
    """A stream over one map-style dataset."""
    source = MapSource(dataset, rules=sample_rules or rules(), name="made up")
    part = SourcePart(source=source, order=PassOrder(np.arange(len(source)), seed=seed))
    return SampleStream([part], num_samples=num_samples, order=order)
