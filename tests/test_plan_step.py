"""`plan_step`: what every plan promises, cases that broke other systems, how good plans are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan import CostModel, StepPlan, plan_step


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
            shared = price * (100 + cost.share) / (100 * width) if width > 1 else price
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


NUMBERS = {"patches": (0, 9), "groups": (-3, 5), "owner": (-1, 8), "solo": (0, 1)}
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
    if args["owner"]:
        args["owner"] = [min(one, args["num_replicas"] - 1) for one in args["owner"]]
    try:
        plan = plan_step(lengths, **args)
    except ValueError:  # of no group, and none is too long: then there is a plan
        longest = -(-max(lengths) // args["alignment"]) * args["alignment"]
        assert args["groups"] or longest > args["token_budget"]
        return
    assert plan == plan_step(np.array(lengths, dtype=np.int64), **args)
    check(plan, lengths, **args)


@pytest.mark.parametrize(
    ("lengths", "budget", "args", "count"),
    [
        ([8, 8, 8, 8], 8, {}, 2),  # one replica has read one, the other three
        ([2, 2, 2, 2], 10, {}, 1),  # all would fit one micro-batch
        ([12, 1, 1, 1], 12, {}, 1),
        ([7, 7, 7, 7], 16, {"alignment": 8}, 1),  # full to the last token after padding
        ([15, 15], 16, {"alignment": 4}, 1),
        ([5, 5, 5, 5, 5], 5, {"count_multiple": 4}, 4),
        ([1], 5, {}, 1),
        ([], 5, {"count_multiple": 3}, 3),
        ([8192] * 16, 8192, {}, 8),  # no token to spare
        ([1, 1, 1, 1], 9, {"patches": [9, 9, 1, 1], "max_patches": 5}, 2),
    ],
)
@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_cases_that_broke_other_systems(
    lengths: list[int], budget: int, args: dict[str, Any], count: int, sync: Any
) -> None:
    plan = plan_step(lengths, num_replicas=2, token_budget=budget, sync=sync, **args)
    assert plan.num_micro_batches == count
    defaults = dict.fromkeys(("patches", "max_patches", "cost", "groups", "owner", "solo"))
    ones = dict.fromkeys(("alignment", "count_multiple", "min_micro_batches", "max_share"), 1)
    check(plan, lengths, num_replicas=2, token_budget=budget, **(defaults | ones | args))


def test_an_overlong_sample_is_named_shared_or_alone() -> None:
    lengths = [3, 21, 4]
    with pytest.raises(ValueError, match="sample 1 takes up 21 tokens"):
        plan_step(lengths, num_replicas=4, token_budget=10)
    with pytest.raises(ValueError, match="sample 1, 2 takes up 25 tokens"):
        plan_step(lengths, num_replicas=4, token_budget=10, groups=[-1, 0, 0], max_share=2)
    assert plan_step(lengths, num_replicas=4, token_budget=10, max_share=4).shares[1] == 4
    plan = plan_step(lengths, num_replicas=4, token_budget=10, solo=[False, True, False])
    assert (1,) in [one for row in plan.micro_batches for one in row]


def test_samples_stay_with_their_reader_where_time_is_equal() -> None:
    for sync in ("step", "microbatch"):
        plan = plan_step([5, 5, 5], num_replicas=3, token_budget=5, sync=sync, owner=[2, 0, 1])
        assert plan.micro_batches == (((1,),), ((2,),), ((0,),))


def drawn(num: int, cv: float) -> tuple[npt.NDArray[np.int64], CostModel]:
    """Return lognormal lengths, and a cost of which attention is 30 %, overhead 5 %."""
    spread = math.log(1 + cv * cv)
    real = np.random.RandomState(0).lognormal(math.log(500) - spread / 2, spread**0.5, num)
    lengths: npt.NDArray[np.int64] = np.clip(np.round(real), 1, 8192).astype(np.int64)
    quadratic = 3 / 7 * int(lengths.sum()) / int((lengths**2).sum())
    return lengths, CostModel.from_ratios(quadratic=quadratic, fixed_tokens=0.05 * 8192 / 0.7)


@pytest.mark.parametrize(
    ("sync", "max_share", "cv", "floor"),
    [
        ("step", 1, 0.29, 0.994),
        ("step", 1, 0.48, 0.994),
        ("step", 1, 1.0, 0.994),
        ("step", 1, 2.0, 0.992),
        ("microbatch", 1, 0.48, 0.993),
        ("microbatch", 1, 1.0, 0.948),
        ("microbatch", 1, 2.0, 0.93),
        ("microbatch", 64, 1.0, 0.985),
        ("microbatch", 64, 2.0, 0.965),
    ],
)
def test_plans_are_near_the_bound(sync: Any, max_share: int, cv: float, floor: float) -> None:
    replicas, steps, batch = 8, 8, 970
    lengths, cost = drawn(steps * batch, cv)
    time = 0
    for step in lengths.reshape(steps, batch):
        plan = plan_step(
            step,
            num_replicas=replicas,
            token_budget=8192,
            sync=sync,
            cost=cost,
            max_share=max_share,
        )
        loads = np.array(plan.loads)
        slowest = loads.sum(1).max() if sync == "step" else loads.max(0).sum()
        time += int(slowest) + plan.num_micro_batches * cost.fixed
    work = int(cost.samples(lengths, np.zeros_like(lengths)).sum())
    fewest = -(-int(lengths.sum()) // 8192)
    assert (work + fewest * cost.fixed) / replicas / time >= floor
