"""What a run consumed of each data source, over all replicas.

Must not print; `report` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from odb_megatron.comm.control import ControlGroup
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.report.live import SourceTotals

__all__ = ["source_totals"]

_MESSAGE_BYTES = 1024


def source_totals(
    sources: Sequence[str], counted: Sequence[SourceCounts], *, exchange: ControlGroup | None
) -> list[SourceTotals]:
    """Return the totals of each source.

    Args:
        sources: their names.
        counted: what this replica has consumed of each.
        exchange: to the other replicas, all of which must call this; None for this one alone.
    """
    names = SourceCounts.names()
    numbers = [getattr(counts, name) for counts in counted for name in names]
    messages = [counts.first_message for counts in counted]
    if exchange is not None:
        gathered = exchange.gather_counts(numbers)
        numbers = [sum(values) for values in zip(*gathered, strict=True)]
        messages = _first_messages(messages, exchange)
    return [
        SourceTotals(
            name=source,
            first_message=message,
            **dict(zip(names, numbers[at * len(names) :], strict=False)),
        )
        for at, (source, message) in enumerate(zip(sources, messages, strict=True))
    ]


def _first_messages(own: Sequence[str], exchange: ControlGroup) -> list[str]:
    """Return, for each source, the message of the first replica that has one, cut to fit."""
    sent = b"".join(text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0") for text in own)
    found = exchange.exchange(sent)
    places = [slice(at, at + _MESSAGE_BYTES) for at in range(0, len(sent), _MESSAGE_BYTES)]
    texts = [[part[at].rstrip(b"\0").decode("utf-8", "ignore") for part in found] for at in places]
    return [next(filter(None, replicas), "") for replicas in texts]
