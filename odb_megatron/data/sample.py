"""A preprocessed sample or a skipped one, and the rules between a record's ids and the planner.

Pure values: no files, no tokenizer, no process groups. The same rules serve the packed and the
padded path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.data.images import SampleImages
from odb_megatron.errors import flag_of, setting_name
from odb_megatron.plan.padding import OverlongError, OverlongPolicy, judge_length
from odb_megatron.plan.record import SkipReason

__all__ = ["BAD_RECORD_HINT", "MAX_WEIGHT", "BadRecordError", "DataFileError"]
__all__ += ["LossPer", "Sample", "SampleRules", "SkipReason", "Skipped", "TooManyBadRecordsError"]
__all__ += ["WeightError", "apply_rules", "as_lines", "as_object", "count_scale", "shift_labels"]

MAX_WEIGHT = 16.0
"""Of a token's loss; only ratios of weights count, so larger ones can be divided."""

BAD_RECORD_HINT = ". Mend the record, or give "
"""What follows a bad record's reason in its message, before how and the traceback."""

_MAX_IDS = 1 << 31  # what a step on its way to other ranks holds
_MAX_COUNT = 1 << 30  # of a step, in int32
_MAX_REASON = 2000
_MAX_TRACE = 20_000
_LEARNT, _RESET = "\x1b[1;32m", "\x1b[0m"


class DataFileError(RuntimeError):
    """A data file that has changed, or can no longer be read: no record's fault, never skipped."""


class WeightError(ValueError):
    """Weights that this run cannot count: no record's fault, never skipped."""


class TooManyBadRecordsError(ValueError):
    """More records are bad than `--odb-max-bad-records` allows."""


class BadRecordError(ValueError):
    """A record that cannot become a sample.

    Args:
        path: file the record comes from.
        line: 1-based line of the file (JSONL), or 1-based record number (JSON array, document).
        reason: what was seen and what was expected; cut where it quotes a very long text.
        trace: traceback of what a user's dataset raised, if it did; of a long one its end.
    """

    def __init__(self, path: str, line: int, reason: str, trace: str = "") -> None:
        super().__init__(path, line, reason, trace)  # survives the trip from a worker
        self.path, self.line, self.reason, self.trace = path, line, reason, trace[-_MAX_TRACE:]

    def __str__(self) -> str:
        reason = self.reason
        if len(reason) > _MAX_REASON:
            reason = f"{reason[:_MAX_REASON]} ... ({len(reason)} characters)"
        original = f"\nOriginal traceback:\n{self.trace}" if self.trace else ""
        how = f"{BAD_RECORD_HINT}{setting_name('odb_max_bad_records')} N to leave out up to N such"
        return f"{self.path}:{self.line}: {reason}{how} records (counted in the summary){original}"


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
        if (is_bad := ~(np.isfinite(self.loss_mask) & (self.loss_mask >= 0))).any():
            at = int(is_bad.argmax())
            raise ValueError(
                f"a sample's loss_mask holds {self.loss_mask[at]:g} at token {at}: weights of the "
                "loss must be finite and not negative"
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
        reason: which rule left it out.
        message: the error that it would have been.
        source: index of the data source.
    """

    reason: SkipReason
    message: str
    source: int = 0


# --- rules --------------------------------------------------------------------------------------


class LossPer(Enum):
    """What counts once in the loss of a step."""

    SAMPLE = "sample"
    TOKEN = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRules:
    """Rules between a record and the planner.

    Attributes:
        context: most tokens of one sample (`--seq-length`).
        token_budget: most tokens of a micro-batch.
        multiple: see `plan.padding.length_multiple`.
        overlong: see `plan.padding.judge_length`.
        skip_bad: records that cannot become a sample are skipped; else they are errors.
        vocab_size: rows of the model's embedding: token ids lie below; 0 where it is not known.
        loss_per: what counts once; `SAMPLE` divides a sample's weights by their sum.
        count_scale: what weights are multiplied by, see `count_scale`.
        whole_weights: refuse weights that are no whole numbers.
        name: what the run's host calls a setting; worker processes go by it.
    """

    context: int
    token_budget: int
    multiple: int = 1
    overlong: OverlongPolicy = OverlongPolicy.ERROR
    skip_bad: bool = False
    vocab_size: int = 0
    loss_per: LossPer = LossPer.TOKEN
    count_scale: int = 1
    whole_weights: bool = False
    name: Callable[[str], str] = flag_of


def count_scale(loss_per: LossPer, *, batch_size: int, context: int) -> int:
    """Return the power of two by which a run multiplies its weights, the largest that is safe.

    Megatron adds up a step's "tokens" as int32 (schedules.py `forward_step_calc_loss`, 0.19.2), so
    a micro-batch's sum of weights is rounded to a whole number. Scaled by S it is wrong by 1 / 2S
    at most, and S cancels: gradients and logged losses are sums of weighted losses over sums of
    weights. It must be one number for the whole run, since an evaluation adds up several steps.

    The step's sum stays within 2^30 (where S is above 1), and the gradient of a logit near what FP8
    (E5M2, up to 57344) holds before its scales have adapted: it is at most S = 2^14 for a token of
    weight 1, and S / n = 2^20 / n for one of n in a sample.

    Args:
        loss_per: what counts once.
        batch_size: samples of a step.
        context: most tokens of a sample.
    """
    if loss_per is LossPer.SAMPLE:
        bound, most = batch_size, 1 << 20
    else:
        bound, most = batch_size * context * int(MAX_WEIGHT), 1 << 14
    room = max(1, _MAX_COUNT // bound)
    return min(most, 1 << (room.bit_length() - 1))


def shift_labels(
    ids: npt.NDArray[np.int64],
    learn: npt.NDArray[np.bool_ | np.float32],
    *,
    source: int = 0,
    images: SampleImages | None = None,
) -> Sample:
    """Turn a sequence of L + 1 ids into a sample of L: each label is the token after its place.

    Args:
        ids: int64 [L + 1].
        learn: bool or float32 [L + 1]; whether each *token* is to be predicted, or its weight.
        source: index of the data source.
        images: its pictures.

    Raises:
        ValueError: fewer than 2 ids, no token to learn, or a weight that is none.
    """
    if ids.size < 2:
        raise ValueError(f"{ids.size} token(s): at least 2 are needed to predict one from another")
    if not learn[1:].any():
        raise ValueError("no token to learn from: every label is masked")
    return Sample(
        tokens=ids[:-1],
        labels=ids[1:],
        loss_mask=learn[1:].astype(np.float32),
        source=source,
        num_patches=images.num_patches if images else 0,
        images=images,
    )


def check_sample(sample: Sample, rules: SampleRules) -> None:
    """Raise unless the model has a row for each id that counts, and weights are small enough.

    Raises:
        ValueError: a bad record.
    """
    limit = rules.vocab_size or _MAX_IDS
    learnt = sample.labels[sample.loss_mask > 0]
    for what, ids in (("token", sample.tokens), ("label", learnt)):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
            at = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
            raise ValueError(
                f"{what} id {ids[at]} is outside the vocabulary of {limit} ids (0 to {limit - 1}): "
                "use the tokenizer that made the data, and a model of its size"
            )
    if (most := float(sample.loss_mask.max())) > MAX_WEIGHT:
        raise ValueError(
            f"a weight of {most:g}; expected at most {MAX_WEIGHT:g}: divide all weights of the "
            "data by one number, since only their ratios count"
        )


def apply_rules(sample: Sample, rules: SampleRules, *, path: str, line: int) -> Sample | Skipped:
    """Apply the overlong policy, then weigh what is left (`--odb-loss-per`).

    A truncated sample may lose all its loss tokens; it is then emitted as it is (and counted),
    because the user asked for the cut. No image is cut: of one that does not fit nothing is kept,
    nor of what follows it.

    Raises:
        OverlongError: names the record and the hint.
        WeightError: weights that are no whole numbers, where those are needed.
    """
    if rules.whole_weights and (fractional := np.mod(sample.loss_mask, 1) != 0).any():
        raise WeightError(
            f"{path}:{line}: a weight of {sample.loss_mask[fractional][0]:g}: Megatron counts "
            "tokens in whole numbers, so say how such weights count, with "
            f"{rules.name('odb_loss_per')} token or {rules.name('odb_loss_per')} sample"
        )
    limits = {"context": rules.context, "token_budget": rules.token_budget}
    try:
        keep, message = judge_length(
            len(sample), multiple=rules.multiple, policy=rules.overlong, **limits
        )
    except OverlongError as error:
        overlong, budget, context = map(
            rules.name, ("odb_overlong", "odb_token_budget", "seq_length")
        )
        raise OverlongError(
            f"{path}:{line}: {error}: use {overlong} truncate, drop or (up to {context}) solo, or "
            f"raise {budget} / {context}"
        ) from None
    images, num_patches = sample.images, sample.num_patches
    if 0 < keep < len(sample) and images is not None:
        message = (
            f"the image at its start is longer than {keep} tokens, so nothing is left of the sample"
        )
        keep = images.whole_length(keep)
        images = images.kept(keep)
        num_patches = images.num_patches if images else 0
    if keep == 0:
        message = f"{path}:{line}: {message}"
        return Skipped(reason=SkipReason.OVERLONG, message=message, source=sample.source)
    scale: float = rules.count_scale
    if rules.loss_per is LossPer.SAMPLE:
        scale /= float(sample.loss_mask[:keep].sum(dtype=np.float64)) or 1.0
    if keep == len(sample) and scale == 1:
        return sample
    return replace(
        sample,
        tokens=sample.tokens[:keep],
        labels=sample.labels[:keep],
        loss_mask=(sample.loss_mask[:keep] * np.float64(scale)).astype(np.float32),
        truncated=len(sample) - keep,
        num_patches=num_patches,
        images=images,
    )


# --- showing ------------------------------------------------------------------------------------


def as_object(
    sample: Sample, decode: Callable[[Sequence[int]], list[str]], *, template: str = ""
) -> dict[str, Any]:
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
