"""`odb_megatron.data.sample`: what a sample is, and the rules between a record and the planner."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_data import rules

from odb_megatron.data.sample import (
    MAX_WEIGHT,
    BadRecordError,
    LossPer,
    Sample,
    Skipped,
    SkipReason,
    WeightError,
    apply_rules,
    count_scale,
    shift_labels,
)
from odb_megatron.plan.padding import OverlongError, OverlongPolicy

ERROR, DROP = OverlongPolicy.ERROR, OverlongPolicy.DROP
TRUNCATE, SOLO = OverlongPolicy.TRUNCATE, OverlongPolicy.SOLO


def _sample(tokens: object, labels: object, mask: object) -> Sample:
    return Sample(
        tokens=np.array(tokens, dtype=np.int64),
        labels=np.array(labels, dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("tokens", "labels", "mask", "error"),
    [
        ([1, 2], [1, 2, 3], [1, 1], "must be 1-D, of one length >= 1; got shapes"),
        ([1, 2], [1, 2], [1], "got shapes"),
        ([], [], [], "got shapes"),
        ([[1, 2]], [[1, 2]], [[1, 1]], "got shapes"),
        (1, 1, 1, "got shapes"),
        ([1, 2], [2, 3], [1, -1.0], "loss_mask holds -1 at token 1: weights of the"),
        ([1, 2], [2, 3], [1, float("nan")], "holds nan at token 1"),
        ([1, 2], [2, 3], [float("inf"), 1], "holds inf at token 0"),
    ],
)
def test_what_is_no_sample(tokens: object, labels: object, mask: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        _sample(tokens, labels, mask)


def test_counts() -> None:
    sample = _sample([5, 6, 7], [6, 7, 8], [0, 0.5, 2])
    assert (len(sample), sample.num_loss_tokens, sample.loss_weight) == (3, 2, 2.5)


def test_all_survive_a_process_boundary() -> None:
    error = BadRecordError(path="a.jsonl", line=3, reason="no columns")
    assert str(error) == (
        "a.jsonl:3: no columns. Mend the record, or give --odb-max-bad-records N to leave out up "
        "to N such records (counted in the summary)"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.path, copy.line, copy.reason) == (
        BadRecordError, str(error), "a.jsonl", 3, "no columns"
    )  # fmt: skip
    skipped = Skipped(reason=SkipReason.OVERLONG, message="too long", source=2)
    assert pickle.loads(pickle.dumps(skipped)) == skipped
    assert pickle.loads(pickle.dumps(_sample([5, 6], [6, 7], [0, 1]))).tokens.tolist() == [5, 6]


# --- shifting -----------------------------------------------------------------------------------


def _shifted(ids: list[int], learn: list[Any]) -> Sample:
    kind = np.bool_ if isinstance(learn[-1:], bool) else np.float32
    return shift_labels(np.array(ids, dtype=np.int64), np.array(learn, dtype=kind), source=2)


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0, 0.5, 2])), max_size=30))
def test_a_label_is_the_next_token_and_learns_as_that_token(pairs: list[tuple[int, float]]) -> None:
    ids, learn = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if len(ids) < 2 or not any(learn[1:]):
        error = f"^{len(ids)} token" if len(ids) < 2 else "no token to learn from: every label"
        with pytest.raises(ValueError, match=error):
            _shifted(ids, learn)
        return
    sample = _shifted(ids, learn)
    assert sample.tokens.tolist() == ids[:-1]
    assert sample.labels.tolist() == ids[1:]
    assert sample.loss_mask.tolist() == learn[1:]
    assert sample.source == 2


# --- what does not fit --------------------------------------------------------------------------


def _ruled(length: int, policy: OverlongPolicy, **limits: int) -> Sample | Skipped:
    sample = _shifted(list(range(length + 1)), [1.0] * (length + 1))
    return apply_rules(sample, rules(overlong=policy, **limits), path="a.jsonl", line=9)


@pytest.mark.parametrize(
    ("length", "limits", "kept"),
    [
        (8, {"context": 8, "token_budget": 8}, 8),
        (8, {"context": 12, "token_budget": 12, "multiple": 4}, 8),
        (9, {"context": 8, "token_budget": 20}, 8),
        (9, {"context": 20, "token_budget": 8}, 8),
        (50, {"context": 20, "token_budget": 30}, 20),
        (9, {"context": 11, "token_budget": 11, "multiple": 4}, 8),
    ],
)
def test_each_overlong_policy_at_its_edge(length: int, limits: dict[str, int], kept: int) -> None:
    cut = _ruled(length, TRUNCATE, **limits)
    assert isinstance(cut, Sample)
    assert (len(cut), cut.truncated, cut.source) == (kept, length - kept, 2)
    assert cut.labels.tolist() == list(range(1, kept + 1))
    if kept == length:
        assert all(
            isinstance(_ruled(length, policy, **limits), Sample) for policy in OverlongPolicy
        )
        return
    with pytest.raises(OverlongError, match=rf"^a.jsonl:9: {length} tokens.*the limit is "):
        _ruled(length, ERROR, **limits)
    skipped = _ruled(length, DROP, **limits)
    assert isinstance(skipped, Skipped)
    assert (skipped.reason, skipped.source) == (SkipReason.OVERLONG, 2)
    assert skipped.message.startswith(f"a.jsonl:9: {length} tokens")


def test_solo_goes_over_the_budget_and_not_over_the_context() -> None:
    alone = _ruled(9, SOLO, context=9, token_budget=8)
    assert isinstance(alone, Sample)
    assert (len(alone), alone.truncated) == (9, 0)
    with pytest.raises(OverlongError, match="a.jsonl:9: .*the limit is 8 .*--seq-length"):
        _ruled(9, SOLO, context=8, token_budget=20)


# --- weights ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("mask", "loss_per", "scale", "expected"),
    [
        ([1, 0, 0.5, 2, 4], LossPer.SAMPLE, 8, [8 / 3.5, 0, 4 / 3.5, 16 / 3.5]),
        ([1, 0, 0.5, 2, 4], LossPer.TOKEN, 4, [4, 0, 2, 8]),
        ([1e-40] * 5, LossPer.SAMPLE, 8, [2] * 4),
        ([0, 0, 0, 0, 1], LossPer.SAMPLE, 8, [0] * 4),  # a cut may take all loss tokens
    ],
)
def test_a_sample_is_weighed_after_the_cut(
    mask: list[float], loss_per: LossPer, scale: int, expected: list[float]
) -> None:
    limits = rules(context=4, token_budget=4, overlong=TRUNCATE)
    limits = replace(limits, loss_per=loss_per, count_scale=scale)
    sample = _sample(range(5), range(1, 6), mask)
    found = apply_rules(sample, limits, path="a.jsonl", line=9)
    assert isinstance(found, Sample)
    np.testing.assert_allclose(found.loss_mask, expected, rtol=1e-6)
    assert (found.loss_mask.dtype, found.truncated) == (np.float32, 1)


def test_fractions_where_only_whole_weights_can_be_counted() -> None:
    whole = replace(rules(), whole_weights=True)
    sample, other = _sample([0, 1, 2], [1, 2, 3], [0, 1, 3]), _sample([0, 1], [1, 2], [1, 0.5])
    assert apply_rules(sample, whole, path="a.jsonl", line=9) is sample
    with pytest.raises(WeightError, match=r"^a.jsonl:9: a weight of 0.5: .*--odb-loss-per token"):
        apply_rules(other, whole, path="a.jsonl", line=9)
    assert apply_rules(other, rules(), path="a.jsonl", line=9) is other
