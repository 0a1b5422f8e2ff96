"""`--odb-max-patches` in every plan: no micro-batch has more, but for a single sample that does."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.policy import BalanceScope, ExchangeMode, PolicyName
from odb_megatron.testing.invariants import tally_run
from odb_megatron.testing.worlds import World

SEEN: Counter[str] = Counter()


@st.composite
def worlds(draw: Any) -> World:
    """Replicas, lengths and patches: text, pictures, and pictures above the cap."""
    num_replicas = draw(st.integers(1, 4))
    policy = draw(st.sampled_from(PolicyName))
    cap = draw(st.one_of(st.integers(1, 4), st.integers(1, 40)))  # small ones are filled often
    one = st.tuples(
        st.integers(1, 64),
        st.one_of(st.just(0), st.integers(1, cap), st.integers(1, 3 * cap)),
    )
    samples = draw(st.lists(one, min_size=1, max_size=60))
    batch = draw(st.integers(num_replicas, 8 * num_replicas))
    config = PlanConfig(
        policy=policy,
        total=len(samples),
        global_batch_size=batch,
        num_replicas=num_replicas,
        token_budget=draw(st.sampled_from([64, 128, 300])),
        multiple=draw(st.sampled_from([1, 4])),
        window=max(batch, draw(st.integers(4, 40))),
        max_delay_steps=draw(st.integers(1, 6)),
        count_multiple=draw(st.sampled_from([1, 1, 2])),
        cost=CostModel.from_ratios(
            quadratic=draw(st.sampled_from([0.0, 1 / 64])),
            fixed_tokens=3.0,
            patch_tokens=draw(st.sampled_from([0.0, 0.5, 4.0])),
        ),
        max_patches=cap,
        balance=draw(st.sampled_from(BalanceScope)),
        exchange=draw(st.sampled_from(ExchangeMode)),
    )
    lengths, patches = zip(*samples, strict=True)
    return World(config=config, lengths=lengths, patches=patches)


@settings(max_examples=200)
@given(worlds())
def check(world: World) -> None:
    steps = world.run()
    emitted: list[int] = []
    for plans in steps:
        for plan in plans:
            for micro_batch in plan.micro_batches:
                emitted += micro_batch
                total = sum(world.patches[position] for position in micro_batch)
                alone = len(micro_batch) == 1
                assert total <= world.config.max_patches or alone, (micro_batch, total)
                SEEN["above the cap, alone"] += total > world.config.max_patches
                SEEN["several pictures"] += len(micro_batch) > 1 and total > 0
                SEEN["filled to the cap"] += total == world.config.max_patches and not alone
                SEEN["moved"] += bool(plan.receives)
    assert sorted(emitted) == list(range(len(world.lengths)))
    assert not tally_run(world, steps, drained_at=None).num_violations


def test_the_cap_is_never_exceeded() -> None:
    """And the cases that matter did occur."""
    SEEN.clear()
    check()
    assert len(SEEN) == 4
    assert min(SEEN.values()) > 0, SEEN
