"""A fully preprocessed sample, or a skipped one.

Pure values: no files, no tokenizer, no process groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.data.images import SampleImages
from odb_megatron.plan.record import SkipReason

__all__ = ["BAD_RECORD_WAY_OUT", "BadRecordError", "DataFileError", "Sample", "SkipReason"]
__all__ += ["Skipped"]

BAD_RECORD_WAY_OUT = (
    ". Mend the record, or pass --odb-max-bad-records N to leave out up to N such records (counted "
    "in the summary)"
)
"""End of a bad record's message, before the traceback."""

_MAX_REASON = 2000
_MAX_TRACE = 20_000


class DataFileError(RuntimeError):
    """A data file that has changed, or can no longer be read: no record's fault, never skipped."""


class BadRecordError(ValueError):
    """A record that cannot become a sample.

    Args:
        path: file the record comes from.
        line: 1-based line of the file (JSONL), or 1-based record number (JSON array, document).
        reason: what was seen and what was expected; cut where it quotes a very long text.
        trace: traceback of what a user's dataset raised, if it did; of a long one its end.
    """

    def __init__(self, *, path: str, line: int, reason: str, trace: str = "") -> None:
        if len(reason) > _MAX_REASON:
            reason = f"{reason[:_MAX_REASON]} ... ({len(reason)} characters)"
        trace = trace[-_MAX_TRACE:]
        original = f"\nOriginal traceback:\n{trace}" if trace else ""
        super().__init__(f"{path}:{line}: {reason}{BAD_RECORD_WAY_OUT}{original}")
        self.path = path
        self.line = line
        self.reason = reason
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the trip from a data-loader worker."""
        return _bad_record, (self.path, self.line, self.reason, self.trace)


def _bad_record(path: str, line: int, reason: str, trace: str) -> BadRecordError:
    return BadRecordError(path=path, line=line, reason=reason, trace=trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence, already shifted: `labels[i]` is the token after `tokens[i]`.

    Attributes:
        tokens: int64 [L], L >= 1.
        labels: int64 [L].
        loss_mask: float32 [L], the weight of each label's loss, finite and not negative.
        source: index of the data source it came from (0 for a single source).
        truncated: number of tokens cut off its end (0 if whole).
        num_patches: image patches it stands for; those of `images`, where it has any.
        images: its pictures; None where it has none, or where patches steer planning only.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    source: int = 0
    truncated: int = 0
    num_patches: int = 0
    images: SampleImages | None = None

    def __post_init__(self) -> None:
        shapes = {self.tokens.shape, self.labels.shape, self.loss_mask.shape}
        if len(shapes) != 1 or self.tokens.ndim != 1 or self.tokens.size == 0:
            raise ValueError(
                "a sample's tokens, labels and loss_mask must be 1-D, of one length >= 1; got "
                f"shapes {self.tokens.shape}, {self.labels.shape}, {self.loss_mask.shape}"
            )
        if self.num_patches < 0:
            raise ValueError(f"a sample's num_patches must not be negative; got {self.num_patches}")
        if not (np.isfinite(self.loss_mask).all() and self.loss_mask.min() >= 0):
            bad = ~(np.isfinite(self.loss_mask) & (self.loss_mask >= 0))
            raise ValueError(
                f"a sample's loss_mask holds {self.loss_mask[bad][0]:g} at token "
                f"{np.flatnonzero(bad)[0]}: weights of the loss must be finite and not negative"
            )
        if self.images is not None:
            self._check_images(self.images)

    def __len__(self) -> int:
        return int(self.tokens.size)

    def _check_images(self, images: SampleImages) -> None:
        if self.num_patches != images.num_patches:
            raise ValueError(
                f"a sample's num_patches is {self.num_patches}; its images have "
                f"{images.num_patches}"
            )
        if int(images.ends[-1]) > len(self):
            raise ValueError(
                f"a sample's last image ends at token {images.ends[-1]}; it has {len(self)} tokens"
            )
        for start, end in zip(images.starts.tolist(), images.ends.tolist(), strict=True):
            if self.loss_mask[max(0, start - 1) : end - 1].any():  # labels are one place ahead
                raise ValueError(
                    "a sample's loss_mask is not 0 where the label is a visual token (of the image "
                    f"at tokens {start} to {end - 1}): there is nothing to learn there, set it to 0"
                )

    @property
    def num_loss_tokens(self) -> int:
        """Number of positions that carry loss."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def loss_weight(self) -> float:
        """Sum of their weights."""
        return float(self.loss_mask.sum(dtype=np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A sample of the stream that is consumed and not trained: counted and reported.

    Attributes:
        reason: which policy left it out.
        message: the error that `error` would have raised.
        source: index of the data source.
    """

    reason: SkipReason
    message: str
    source: int = 0
