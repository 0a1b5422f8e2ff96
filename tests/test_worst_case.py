"""`odb_megatron.data.worst_case`: micro-batches that fill the token budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.data.worst_case import WorstCase, worst_cases
from odb_megatron.plan.padding import SizeRule


@pytest.mark.parametrize(
    ("budget", "longest", "multiple", "max_samples", "long", "short"),
    [
        (64, 64, 1, 8, [64], [8] * 8),
        (64, 64, 1, 100, [64], [1] * 64),
        (64, 24, 1, 2, [24, 24, 16], [22, 21, 21]),  # the longest ones alone are three
        (64, 16, 4, 100, [16] * 4, [4] * 16),
        (66, 66, 4, 5, [64], [16, 12, 12, 12, 12]),
        (64, 128, 1, 4, [128], [16] * 4),  # longer samples get a micro-batch of their own
        (7, 5, 2, 9, [4, 2], [2, 2, 2]),
    ],
)
def test_cases(
    budget: int, longest: int, multiple: int, max_samples: int, long: list[int], short: list[int]
) -> None:
    cases = worst_cases(
        token_budget=budget,
        longest=longest,
        rule=SizeRule(multiple=multiple),
        max_samples=max_samples,
    )
    assert [case.name for case in cases] == ["longest samples", "most samples"]
    assert [list(case.lengths) for case in cases] == [long, short]


@given(
    budget=st.integers(1, 300),
    longest=st.integers(1, 300),
    multiple=st.sampled_from([1, 2, 4, 16]),
    max_samples=st.integers(1, 300),
)
def test_every_case_is_full_and_legal(
    budget: int, longest: int, multiple: int, max_samples: int
) -> None:
    room = budget // multiple * multiple
    rule = SizeRule(multiple=multiple)
    if room == 0 or longest < multiple:
        with pytest.raises(ValueError, match=f"no micro-batch fits: token budget {budget}"):
            worst_cases(token_budget=budget, longest=longest, rule=rule, max_samples=max_samples)
        return
    long, short = worst_cases(
        token_budget=budget, longest=longest, rule=rule, max_samples=max_samples
    )
    top = longest // multiple * multiple
    assert max(long.lengths) == top
    assert sum(long.lengths) == max(room, top)
    assert sum(short.lengths) == room
    assert len(short.lengths) == min(room // multiple, max(max_samples, len(long.lengths)))
    assert all(length % multiple == 0 for case in (long, short) for length in case.lengths)
    assert max(short.lengths) - min(short.lengths) in (0, multiple)


def test_a_micro_batch_is_the_same_everywhere_and_touches_no_generator() -> None:
    case = WorstCase(name="longest samples", lengths=(6, 2))
    rule = SizeRule(sizes=(12,), multiple=2)
    numpy, cpu = np.random.get_state()[1], torch.get_rng_state()
    one, other = (case.micro_batch(vocab_size=50, rule=rule) for _ in range(2))
    assert np.array_equal(numpy, np.random.get_state()[1])
    assert torch.equal(cpu, torch.get_rng_state())
    assert torch.equal(one.tokens, other.tokens)
    assert one.tokens.shape == (1, 12)
    assert one.loss_mask.sum() == 8
    assert one.cu_seqlens_padded.tolist() == [0, 6, 8, 12, 12, 12, 12, 12]
    assert not one.is_idle
    assert 0 <= int(one.tokens.min()) < int(one.tokens.max()) < 50
    assert str(case) == "longest samples (2 in 8 tokens, up to 6 each)"
