"""From token ids to a sample: shift labels, apply the overlong and bad-record policies.

Pure apart from numpy; knows no files. The same policies serve the packed and the padded path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron.data.sample import BadRecordError, Sample, Skipped, SkipReason
from odb_megatron.plan.padding import OverlongError, OverlongPolicy, judge_length

__all__ = ["BadRecordPolicy", "SampleRules", "apply_rules", "skipped_bad_record"]
__all__ += ["check_ids", "shift_labels"]


_MAX_IDS = 1 << 31  # what a step on its way to other ranks holds


class BadRecordPolicy(Enum):
    """What happens to a record that cannot become a sample."""

    ERROR = "error"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRules:
    """Policies between a record and the planner.

    Attributes:
        context: most tokens of one sample (`--seq-length`).
        token_budget: most tokens of a micro-batch.
        multiple: see `plan.padding.length_multiple`.
        overlong: see `plan.padding.judge_length`.
        bad_record: rule for records that cannot become a sample.
        vocab_size: rows of the model's embedding: token ids lie below; 0 where it is not known.
    """

    context: int
    token_budget: int
    multiple: int = 1
    overlong: OverlongPolicy = OverlongPolicy.ERROR
    bad_record: BadRecordPolicy = BadRecordPolicy.ERROR
    vocab_size: int = 0


def shift_labels(ids: npt.NDArray[np.int64], learn: npt.NDArray[Any], *, source: int = 0) -> Sample:
    """Turn a sequence of L + 1 ids into a sample of L: each label is the token after its place.

    Args:
        ids: int64 [L + 1].
        learn: bool or float32 [L + 1]; weight in the loss of each *token* as a label.
        source: index of the data source.

    Raises:
        ValueError: fewer than 2 ids, or no token to learn.
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
    )


def check_ids(sample: Sample, rules: SampleRules) -> None:
    """Raise unless the model has a row for each token id, and each label that carries loss.

    Raises:
        ValueError: names the first id that has none; a bad record.
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


def apply_rules(sample: Sample, rules: SampleRules, *, path: str, line: int) -> Sample | Skipped:
    """Apply the overlong policy.

    No image is cut: of one that does not fit nothing is kept, nor of what follows it.

    A truncated sample may lose all its loss tokens; it is then emitted as it is (and counted),
    because the user asked for the cut.

    Raises:
        OverlongError: names the record and the hint.
    """
    try:
        verdict = judge_length(
            len(sample),
            multiple=rules.multiple,
            token_budget=rules.token_budget,
            context=rules.context,
            policy=rules.overlong,
        )
    except OverlongError as error:
        raise OverlongError(f"{path}:{line}: {error}") from None
    if verdict.keep == 0:
        return Skipped(
            reason=SkipReason.OVERLONG,
            message=f"{path}:{line}: {verdict.message}",
            source=sample.source,
        )
    if verdict.truncated == 0:
        return sample
    keep, images = verdict.keep, sample.images
    if images is not None:  # never a part of an image
        keep = images.whole_length(keep)
        images = images.kept(keep)
        if keep == 0:
            return Skipped(
                reason=SkipReason.OVERLONG,
                message=f"{path}:{line}: the image at its start is longer than {verdict.keep} "
                "tokens, so nothing is left of the sample",
                source=sample.source,
            )
    has_images = sample.images is not None
    return Sample(
        tokens=sample.tokens[:keep],
        labels=sample.labels[:keep],
        loss_mask=sample.loss_mask[:keep],
        source=sample.source,
        truncated=verdict.truncated + verdict.keep - keep,
        num_patches=(images.num_patches if images else 0) if has_images else sample.num_patches,
        images=images,
    )


def skipped_bad_record(error: BadRecordError, *, source: int) -> Skipped:
    """Return what stands for a bad record under the policy `skip`."""
    return Skipped(reason=SkipReason.BAD_RECORD, message=str(error), source=source)
