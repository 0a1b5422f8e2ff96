"""Sample lengths of the GPU benchmark: a mix of chats, and lognormal lengths of four spreads.

Must not import torch: lengths are drawn before a device is needed. Longer samples are cut to the
context, as `--odb-overlong truncate` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from odb_megatron.simulation.lengths import SampleLengths, read_lengths

__all__ = ["CHAT", "CHAT_QUANTILES", "MIXES", "LengthChoice", "LengthMix", "draw_lengths"]

Integers = npt.NDArray[np.int64]

CHAT = "chat"
_SPREADS = {"cv0.29": 0.29, "cv0.48": 0.48, "cv1.0": 1.0, "cv2.0": 2.0}

MIXES = (CHAT, "cv1.0", "cv2.0", "cv0.48", "cv0.29")
"""Names, those that matter most first: the last ones are left out where time is short."""

CHAT_QUANTILES = (
    21, 40, 55, 74, 95, 109, 124, 137, 152, 166, 181, 203, 218, 234, 254, 274, 297, 313, 331, 355,
    392, 419, 447, 498, 553, 631, 728, 809, 1087, 1565, 2824, 5352, 11547,
)  # fmt: skip
"""Quantiles 0/32 to 32/32 of the chat mix (benchmarks/README.md) in tokens of Qwen's vocabulary.

Lengths drawn from it, linearly between them, stand in for a file of lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthMix:
    """Lengths of a stream of samples.

    Attributes:
        origin: where they come from.
        values: tokens of each, int64, cut to the context.
        num_cut: samples that were cut.
    """

    origin: str
    values: Integers
    num_cut: int

    def summary(self) -> dict[str, object]:
        """Return what describes them in a report."""
        about = SampleLengths(values=self.values, num_truncated=self.num_cut).summary()
        return {"origin": self.origin, **about}


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthChoice:
    """What lengths are drawn from.

    Attributes:
        context: longest sample.
        mean: mean tokens of the lognormal lengths before they are cut.
        chat_file: JSON file with a list of lengths, or an object with that list as `lengths`.
        seed: of the draws.
    """

    context: int
    mean: float
    chat_file: Path | None
    seed: int


def draw_lengths(mix: str, *, num_samples: int, choice: LengthChoice) -> LengthMix:
    """Return the lengths of a stream.

    Args:
        mix: one of `MIXES`.
        num_samples: samples of the stream.
        choice: see there.

    Raises:
        ValueError: the file cannot be used.
    """
    if mix != CHAT:
        spec = f"lognormal:mean={choice.mean:g},cv={_SPREADS[mix]:g},max={choice.context}"
        spec += f",n={num_samples},seed={choice.seed}"
        found = read_lengths(spec, token_budget=choice.context)
        at_most = int((found.values == choice.context).sum())
        return LengthMix(origin=spec, values=found.values, num_cut=at_most)
    random = np.random.default_rng([choice.seed, 7])
    if choice.chat_file is None:
        places = random.random(num_samples) * (len(CHAT_QUANTILES) - 1)
        drawn = np.interp(places, np.arange(len(CHAT_QUANTILES)), CHAT_QUANTILES)
        return _cut(np.rint(drawn).astype(np.int64), "quantiles of the chat mix", choice.context)
    known = _from_file(choice.chat_file)
    epochs = [random.permutation(known) for _ in range(-(-num_samples // len(known)))]
    values = np.concatenate(epochs)[:num_samples]
    return _cut(values, f"{choice.chat_file.name}: {len(known)} lengths", choice.context)


def _from_file(path: Path) -> Integers:
    try:
        return read_lengths(f"file:{path}#lengths", token_budget=1 << 40).values
    except ValueError as error:
        try:
            return read_lengths(f"file:{path}", token_budget=1 << 40).values
        except ValueError:
            raise ValueError(f"--chat-lengths {path}: {error}") from None


def _cut(values: Integers, origin: str, context: int) -> LengthMix:
    return LengthMix(
        origin=origin,
        values=np.minimum(values, context),
        num_cut=int((values > context).sum()),
    )
