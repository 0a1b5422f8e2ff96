"""`odb_megatron.data.sample`: what a sample refuses, counts, and survives a worker."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from odb_megatron.data.sample import BadRecordError, Sample, Skipped, SkipReason


def _sample(tokens: object, labels: object, mask: object) -> Sample:
    return Sample(
        tokens=np.array(tokens, dtype=np.int64),
        labels=np.array(labels, dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.float32),
    )


def test_length_and_loss_tokens() -> None:
    sample = _sample([5, 6, 7], [6, 7, 8], [0, 1, 1])
    assert (len(sample), sample.num_loss_tokens) == (3, 2)
    assert (sample.source, sample.truncated) == (0, 0)
    assert _sample([5], [6], [0]).num_loss_tokens == 0


@pytest.mark.parametrize(
    ("tokens", "labels", "mask"),
    [
        ([1, 2], [1, 2, 3], [1, 1]),
        ([1, 2], [1, 2], [1]),
        ([], [], []),
        ([[1, 2]], [[1, 2]], [[1, 1]]),
        (1, 1, 1),
    ],
)
def test_shapes_are_checked(tokens: object, labels: object, mask: object) -> None:
    with pytest.raises(ValueError, match="must be 1-D, of one length >= 1; got shapes"):
        _sample(tokens, labels, mask)


def test_weights() -> None:
    sample = _sample([5, 6, 7], [6, 7, 8], [0, 0.5, 2])
    assert (sample.num_loss_tokens, sample.loss_weight) == (2, 2.5)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_what_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=f"loss_mask holds {weight:g} at token 1: weights of the"):
        _sample([1, 2], [2, 3], [1, weight])


def test_a_bad_record_names_its_place_and_the_way_out() -> None:
    error = BadRecordError(path="a.jsonl", line=3, reason="no columns")
    assert str(error) == (
        "a.jsonl:3: no columns. Mend the record, or pass --odb-max-bad-records N to leave "
        "out up to N such records (counted in the summary)"
    )
    assert isinstance(error, ValueError)


def test_all_survive_a_process_boundary() -> None:
    error = BadRecordError(path="a.jsonl", line=3, reason="no columns")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.path, copy.line, copy.reason) == (
        BadRecordError, str(error), "a.jsonl", 3, "no columns"
    )  # fmt: skip
    skipped = Skipped(reason=SkipReason.OVERLONG, message="too long", source=2)
    assert pickle.loads(pickle.dumps(skipped)) == skipped
    sample = pickle.loads(pickle.dumps(_sample([5, 6], [6, 7], [0, 1])))
    assert sample.tokens.tolist() == [5, 6]
    assert sample.num_loss_tokens == 1
