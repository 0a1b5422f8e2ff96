"""From token ids to a sample: shift labels, apply the overlong and bad-record policies.

Pure apart from numpy; knows no files. The same policies serve the packed and the padded path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from odb_megatron.data.sample import BadRecordError, Sample, Skipped, SkipReason
from odb_megatron.plan.padding import OverlongError, OverlongPolicy, judge_length

__all__ = ["MAX_WEIGHT", "BadRecordPolicy", "LossPer", "SampleRules", "WeightError", "apply_rules"]
__all__ += ["check_ids", "check_weights", "count_scale", "shift_labels", "skipped_bad_record"]

MAX_WEIGHT = 16.0
"""Of a token's loss; only ratios of weights count, so larger ones can be divided."""

_MAX_IDS = 1 << 31  # what a step on its way to other ranks holds
_MAX_COUNT = 1 << 30  # of a step, in int32


class WeightError(ValueError):
    """Weights that this run cannot count: no record's fault, never skipped."""


class LossPer(Enum):
    """What counts once in the loss of a step."""

    SAMPLE = "sample"
    TOKEN = "token"


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
        loss_per: what counts once; `SAMPLE` divides a sample's weights by their sum.
        count_scale: what weights are multiplied by, see `count_scale`.
        whole_weights: refuse weights that are no whole numbers.
    """

    context: int
    token_budget: int
    multiple: int = 1
    overlong: OverlongPolicy = OverlongPolicy.ERROR
    bad_record: BadRecordPolicy = BadRecordPolicy.ERROR
    vocab_size: int = 0
    loss_per: LossPer = LossPer.TOKEN
    count_scale: int = 1
    whole_weights: bool = False


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
) -> Sample:
    """Turn a sequence of L + 1 ids into a sample of L: each label is the token after its place.

    Args:
        ids: int64 [L + 1].
        learn: bool or float32 [L + 1]; whether each *token* is to be predicted, or its weight.
        source: index of the data source.

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


def check_weights(sample: Sample) -> None:
    """Raise where a weight of the data is above `MAX_WEIGHT`.

    Raises:
        ValueError: names the largest; a bad record.
    """
    most = float(sample.loss_mask.max())
    if most > MAX_WEIGHT:
        raise ValueError(
            f"a weight of {most:g}; expected at most {MAX_WEIGHT:g}: divide all weights of the "
            "data by one number, since only their ratios count"
        )


def apply_rules(sample: Sample, rules: SampleRules, *, path: str, line: int) -> Sample | Skipped:
    """Apply the overlong policy, then weigh what is left (`--odb-loss-per`).

    No image is cut: of one that does not fit nothing is kept, nor of what follows it.

    A truncated sample may lose all its loss tokens; it is then emitted as it is (and counted),
    because the user asked for the cut.

    Raises:
        OverlongError: names the record and the hint.
        WeightError: weights that are no whole numbers, where those are needed.
    """
    if rules.whole_weights and (fractional := np.mod(sample.loss_mask, 1) != 0).any():
        raise WeightError(
            f"{path}:{line}: a weight of {sample.loss_mask[fractional][0]:g}: Megatron counts "
            "tokens in whole numbers, so say how such weights count, with --odb-loss-per token or "
            "--odb-loss-per sample"
        )
    found = _cut(sample, rules, path=path, line=line)
    return _weighed(found, rules) if isinstance(found, Sample) else found


def _weighed(sample: Sample, rules: SampleRules) -> Sample:
    """Return the sample with scaled weights; the only place where that is done."""
    scale: float = rules.count_scale
    if rules.loss_per is LossPer.SAMPLE:
        scale /= sample.loss_weight or 1.0
    if scale == 1:
        return sample
    weights = (sample.loss_mask * np.float64(scale)).astype(np.float32)
    return replace(sample, loss_mask=weights)


def _cut(sample: Sample, rules: SampleRules, *, path: str, line: int) -> Sample | Skipped:
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
