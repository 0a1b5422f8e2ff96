"""`plan_step`: what holds for every step, cases that broke other systems, and how good plans are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan import CostModel, StepPlan, plan_step
from odb_megatron.plan.step_planner import SHARE_OVERHEAD


def check(plan: StepPlan, lengths: list[int], **args: Any) -> None:
    """Assert all that a plan promises, from its arguments alone."""
    replicas, budget, alignment = args["num_replicas"], args["token_budget"], args["alignment"]
    patches = args["patches"] or [0] * len(lengths)
    groups = args["groups"] or [-1] * len(lengths)
    solo = args["solo"] or [False] * len(lengths)
    cap = args["max_patches"] or sum(patches)
    count, part = plan.num_micro_batches, math.lcm(2, alignment)
    padded = [-(-length // alignment) * alignment for length in lengths]
    cost = args["cost"] or CostModel()
    assert count % args["count_multiple"] == 0
    assert count >= args["min_micro_batches"]
    assert [len(row) for row in plan.micro_batches] == [count] * replicas
    places: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(lengths))}
    for replica, row in enumerate(plan.micro_batches):
        for m, samples in enumerate(row):
            for index in samples:
                places[index].append((replica, m))
            widths = {plan.shares.get(index, 1) for index in samples}
            assert len(widths) <= 1, "shared samples stand among those of the same group only"
            width = max(widths, default=1)
            sizes = [
                padded[index] if width == 1 else -(-padded[index] // (width * part)) * part
                for index in samples
            ]
            units = {(groups[index], index if groups[index] < 0 else 0) for index in samples}
            if len(units) > 1 or not any(solo[index] for index in samples):
                assert sum(sizes) <= budget
            if len(units) > 1:
                assert sum(patches[index] for index in samples) <= cap
            price = sum(cost.sample(padded[index], num_patches=patches[index]) for index in samples)
            shared = price * (100 + SHARE_OVERHEAD) / (100 * width) if width > 1 else price
            assert shared <= plan.loads[replica][m] <= shared + len(samples)
        own = [one for one in row if not plan.shares.keys() & set(one)]
        units_here = {(groups[i], i if groups[i] < 0 else 0) for one in own for i in one}
        assert all(own) or len(units_here) < len(own), "idle only with too few samples"
    for index, at in places.items():
        width = plan.shares.get(index, 1)
        first = at[0][0]
        assert width & (width - 1) == 0
        assert width <= args["max_share"]
        assert at == [(first + k, at[0][1]) for k in range(width)]
        assert first % width == 0
        assert groups[index] < 0 or at == places[groups.index(groups[index])]
    fixed = count * cost.fixed
    assert plan.costs == tuple(sum(loads) + fixed for loads in plan.loads)


NUMBERS = {"patches": (0, 9), "groups": (-3, 5), "owner": (0, 8), "solo": (0, 1)}
SAMPLES = st.lists(
    st.tuples(st.floats(0.01, 2), *(st.integers(*span) for span in NUMBERS.values())), max_size=40
)
ARGUMENTS = st.fixed_dictionaries(
    {
        "num_replicas": st.integers(1, 9),
        "token_budget": st.integers(4, 64),
        "sync": st.sampled_from(["step", "microbatch"]),
        "alignment": st.integers(1, 4),
        "max_patches": st.sampled_from([None, 6, 20]),
        "cost": st.none()
        | st.builds(
            CostModel.from_ratios,
            quadratic=st.sampled_from([0.0, 0.1, 2.0]),
            fixed_tokens=st.sampled_from([0.0, 3.0, 50.0]),
            patch_tokens=st.sampled_from([0.0, 5.0]),
        ),
        "count_multiple": st.integers(1, 3),
        "min_micro_batches": st.integers(1, 5),
        "max_share": st.sampled_from([1, 2, 3, 8, 64]),
    }
)


@settings(max_examples=300)
@given(SAMPLES, st.sets(st.sampled_from([*NUMBERS, "long"])), ARGUMENTS)
def test_every_plan_keeps_its_promises(
    samples: list[tuple[Any, ...]], given: set[str], args: dict[str, Any]
) -> None:
    longest = args["token_budget"] if "long" in given else args["token_budget"] // 2
    lengths = [max(1, int(sample[0] * longest)) for sample in samples]
    for at, name in enumerate(NUMBERS, 1):
        args[name] = [sample[at] for sample in samples] if name in given else None
    try:
        plan = plan_step(lengths, **args)
    except ValueError as error:
        assert "raise the token budget" in str(error)
        return
    assert plan == plan_step(np.array(lengths, dtype=np.int64), **args)
    check(plan, lengths, **args)
