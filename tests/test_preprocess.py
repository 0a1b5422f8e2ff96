"""`odb_megatron.data.preprocess`: shifted labels, and each overlong policy at its edge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_data import rules

from odb_megatron.data.preprocess import apply_rules, shift_labels, skipped_bad_record
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
