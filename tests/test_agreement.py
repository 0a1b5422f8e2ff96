"""`odb_megatron.comm.agreement` over real gloo processes."""

from __future__ import annotations

import pytest

from odb_megatron.comm.agreement import differences
from odb_megatron.testing.gloo import run_replicas


def _cases(rank: int) -> list[list[str]]:
    """Ranks 2 (leader), 0 and 1 form a replica, rank 3 another."""
    ranks = [3] if rank == 3 else [2, 0, 1]
    same = {"seed": "1", "lr": "0.1"}
    own = {**same, "seed": "7"} if rank == 1 else same
    more = {**same, "new": "x" * 2000} if rank == 0 else same
    return [
        differences(values, ranks=ranks, name="test", timeout_s=60) for values in (same, own, more)
    ]


@pytest.mark.slow
def test_all_ranks_learn_what_differs() -> None:
    first, second, third, alone = run_replicas(_cases, 4, timeout_s=150)
    assert first == second == third
    assert alone == [[], [], []]
    equal, seeds, more = first
    assert equal == []
    assert seeds == ["seed is 7 on rank 1 and 1 on the leader"]
    assert len(more) == 1
    assert more[0].startswith("new is xxx")
    assert len(more[0]) == 1024
