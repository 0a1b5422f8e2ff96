"""A sample token by token, with what is learnt of it marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from odb_megatron.data.sample import Sample

__all__ = ["as_lines", "as_object"]

_LEARNT, _RESET = "\x1b[1;32m", "\x1b[0m"

Decode = Callable[[Sequence[int]], list[str]]


def as_object(sample: Sample, decode: Decode, *, template: str = "") -> dict[str, Any]:
    """Return `ids`, the `loss` weight of each as a label, their `text`, and the `template`."""
    ids = [*sample.tokens.tolist(), int(sample.labels[-1])]
    weights = [0.0, *sample.loss_mask.tolist()]
    return {"ids": ids, "loss": weights, "text": decode(ids), "template": template}


def as_lines(shown: dict[str, Any], *, colour: bool = False, most: int = 0) -> list[str]:
    """Return a line for each token: + where it is learnt, its weight if not 1, id and text.

    Args:
        shown: from `as_object`.
        colour: mark what is learnt in green as well.
        most: tokens shown, the first of them; 0 for all.
    """
    lines = []
    tokens = zip(shown["ids"], shown["loss"], shown["text"], strict=True)
    for number, weight, text in islice(tokens, most or None):
        part = f" x{weight:.4g}" if weight not in (0, 1) else ""
        line = f"{'+' if weight else ' '} {number:>7}  {text!r}{part}"
        lines.append(f"{_LEARNT}{line}{_RESET}" if colour and weight else line)
    if most and len(shown["ids"]) > most:
        lines.append(f"  ... and {len(shown['ids']) - most} more tokens")
    return lines
