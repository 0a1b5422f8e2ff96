"""`odb_megatron.data.preprocess`: shifted labels, and each overlong policy at its edge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_data import rules

from odb_megatron.data.preprocess import (
    MAX_WEIGHT,
    LossPer,
    WeightError,
    apply_rules,
    count_scale,
    shift_labels,
    skipped_bad_record,
)
from odb_megatron.data.sample import BadRecordError, Sample, Skipped, SkipReason
from odb_megatron.plan.padding import OverlongError, OverlongPolicy


def _shifted(ids: list[int], learn: list[bool]) -> Sample:
    return shift_labels(np.array(ids, dtype=np.int64), np.array(learn, dtype=np.bool_), source=2)


def _of_length(length: int, *, num_masked: int = 0) -> Sample:
    learn = [i > num_masked for i in range(length + 1)]
    return _shifted(list(range(length + 1)), learn)


def _ruled(sample: Sample, policy: OverlongPolicy, **limits: int) -> Sample | Skipped:
    return apply_rules(sample, rules(overlong=policy, **limits), path="a.jsonl", line=9)


@given(st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=2, max_size=30))
def test_a_label_is_the_next_token_and_learns_as_that_token(pairs: list[tuple[int, bool]]) -> None:
    ids, learn = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if not any(learn[1:]):
        with pytest.raises(ValueError, match="no token to learn from: every label is masked"):
            _shifted(ids, learn)
        return
    sample = _shifted(ids, learn)
    assert sample.tokens.tolist() == ids[:-1]
    assert sample.labels.tolist() == ids[1:]
    assert sample.loss_mask.tolist() == [float(flag) for flag in learn[1:]]
    assert sample.source == 2


@pytest.mark.parametrize("ids", [[], [4]])
def test_too_few_ids(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"^{len(ids)} token\(s\): at least 2 are needed"):
        _shifted(ids, [True] * len(ids))


@pytest.mark.parametrize("policy", OverlongPolicy)
def test_a_sample_that_just_fits_is_untouched(policy: OverlongPolicy) -> None:
    sample = _of_length(8)
    assert _ruled(sample, policy, context=8, token_budget=8) is sample
    assert _ruled(sample, policy, context=12, token_budget=12, multiple=4) is sample


@pytest.mark.parametrize(("context", "budget"), [(8, 20), (20, 8)])
def test_one_token_too_many(context: int, budget: int) -> None:
    sample, limits = _of_length(9), {"context": context, "token_budget": budget}
    with pytest.raises(OverlongError, match=r"^a.jsonl:9: 9 tokens; the limit is 8 .*: use --odb"):
        _ruled(sample, OverlongPolicy.ERROR, **limits)
    skipped = _ruled(sample, OverlongPolicy.DROP, **limits)
    assert isinstance(skipped, Skipped)
    assert (skipped.reason, skipped.source) == (SkipReason.OVERLONG, 2)
    assert skipped.message.startswith("a.jsonl:9: 9 tokens; the limit is 8")
    cut = _ruled(sample, OverlongPolicy.TRUNCATE, **limits)
    assert isinstance(cut, Sample)
    assert (len(cut), cut.truncated, cut.source) == (8, 1, 2)
    assert cut.tokens.tolist() == sample.tokens.tolist()[:8]
    assert cut.labels.tolist() == sample.labels.tolist()[:8]
    assert cut.num_loss_tokens == 8


def test_the_number_of_tokens_cut_is_kept() -> None:
    cut = _ruled(_of_length(50), OverlongPolicy.TRUNCATE, context=20, token_budget=30)
    assert isinstance(cut, Sample)
    assert (len(cut), cut.truncated) == (20, 30)


def test_solo_goes_over_the_budget_and_not_over_the_context() -> None:
    sample = _of_length(9)
    assert _ruled(sample, OverlongPolicy.SOLO, context=9, token_budget=8) is sample
    with pytest.raises(OverlongError, match="a.jsonl:9: .*the limit is 8 .*--seq-length"):
        _ruled(sample, OverlongPolicy.SOLO, context=8, token_budget=20)


def test_padding_counts() -> None:
    with pytest.raises(OverlongError, match=r"9 tokens \(12 after padding to 4\)"):
        _ruled(_of_length(9), OverlongPolicy.ERROR, context=11, token_budget=11, multiple=4)
    cut = _ruled(_of_length(9), OverlongPolicy.TRUNCATE, context=11, token_budget=11, multiple=4)
    assert isinstance(cut, Sample)
    assert (len(cut), cut.truncated) == (8, 1)


def test_a_cut_may_take_all_loss_tokens() -> None:
    cut = _ruled(_of_length(9, num_masked=8), OverlongPolicy.TRUNCATE, context=8, token_budget=8)
    assert isinstance(cut, Sample)
    assert cut.num_loss_tokens == 0


def test_the_hole_of_a_bad_record_keeps_its_message() -> None:
    error = BadRecordError(path="a.jsonl", line=3, reason="no columns")
    skipped = skipped_bad_record(error, source=1)
    assert skipped == Skipped(reason=SkipReason.BAD_RECORD, message=str(error), source=1)


def test_labels_have_the_weights_of_their_tokens() -> None:
    weights = np.array([9, 0.5, 0, 2], dtype=np.float32)
    assert shift_labels(np.arange(4), weights).loss_mask.tolist() == [0.5, 0, 2]


@pytest.mark.parametrize("loss_per", LossPer)
@pytest.mark.parametrize("batch_size", [1, 7, 512, 1 << 20])
@pytest.mark.parametrize("context", [1, 4096, 1 << 17])
def test_the_scale_is_the_largest_that_fits(
    loss_per: LossPer, batch_size: int, context: int
) -> None:
    scale = count_scale(loss_per, batch_size=batch_size, context=context)
    assert scale.bit_count() == 1
    per_sample = 1 if loss_per is LossPer.SAMPLE else context * int(MAX_WEIGHT)
    most = 1 << (20 if loss_per is LossPer.SAMPLE else 14)
    total = batch_size * per_sample * scale
    assert total <= 1 << 30 or scale == 1
    assert scale == most or 2 * total > 1 << 30


def test_a_sample_counts_once_after_the_cut() -> None:
    weights = np.array([0, 1, 0, 0.5, 2, 4], dtype=np.float32)
    sample = shift_labels(np.arange(6), weights)
    limits = rules(context=4, token_budget=4, overlong=OverlongPolicy.TRUNCATE)
    once = replace(limits, loss_per=LossPer.SAMPLE, count_scale=8)
    found = apply_rules(sample, once, path="a.jsonl", line=9)
    assert isinstance(found, Sample)
    np.testing.assert_allclose(found.loss_mask, np.array([8, 0, 4, 16]) / 3.5, rtol=1e-6)
    assert (found.loss_mask.dtype, found.truncated) == (np.float32, 1)
    scaled = apply_rules(sample, replace(limits, count_scale=4), path="a.jsonl", line=9)
    assert isinstance(scaled, Sample)
    assert scaled.loss_mask.tolist() == [4, 0, 2, 8]
    tiny = replace(sample, loss_mask=np.full(5, 1e-40, dtype=np.float32))
    found = apply_rules(tiny, once, path="a.jsonl", line=9)
    assert isinstance(found, Sample)
    np.testing.assert_allclose(found.loss_mask, [2] * 4, rtol=1e-6)
    nothing = replace(sample, loss_mask=np.array([0, 0, 0, 0, 1], dtype=np.float32))
    found = apply_rules(nothing, once, path="a.jsonl", line=9)
    assert isinstance(found, Sample)
    assert found.num_loss_tokens == 0


def test_fractions_where_only_whole_weights_can_be_counted() -> None:
    whole = replace(rules(), whole_weights=True)
    sample = shift_labels(np.arange(4), np.array([0, 0, 1, 3], dtype=np.float32))
    assert apply_rules(sample, whole, path="a.jsonl", line=9) is sample
    other = replace(sample, loss_mask=np.array([1, 0.5, 0], dtype=np.float32))
    with pytest.raises(WeightError, match=r"^a.jsonl:9: a weight of 0.5: .*--odb-loss-per token"):
        apply_rules(other, whole, path="a.jsonl", line=9)
    assert apply_rules(other, rules(), path="a.jsonl", line=9) is other
