"""`odb_megatron.plan.window`: the columns against a plain list of samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.plan.window import Column, SampleWindow, token_counts


def _row(position: int, arrival: int, *, cost: int, due: int = -1) -> tuple[int, ...]:
    return (position, arrival, cost, cost, 1, 0, cost, arrival % 2, due, 5 * cost)


ROUND = st.tuples(st.integers(0, 40), st.integers(0, 2**32 - 1), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.lists(ROUND, max_size=12))
def test_against_a_list(rounds: list[tuple[int, int, bool]]) -> None:
    """Any mixture of appending, extending, looking at a part and removing from it."""
    window = SampleWindow()
    plain: list[tuple[int, ...]] = []
    arrived = emitted = 0
    for step, (count, seed, at_once) in enumerate(rounds):
        random = np.random.RandomState(seed)
        new = [_row(7 * arrived + i, arrived + i, cost=random.randint(1, 99)) for i in range(count)]
        arrived += count
        plain += new
        if at_once and new:
            window.extend(np.array(new, dtype=np.int64).T)
        else:
            for row in new:
                window.append(row)
        most = random.randint(0, 60)
        assert window.rows(most).T.tolist() == [list(row) for row in plain[:most]]
        chosen = random.rand(min(most, len(plain))) < 0.5
        emitted += int(chosen.sum())
        window.remove(chosen)
        kept = [row for row, gone in zip(plain, chosen, strict=False) if not gone]
        plain = kept + plain[len(chosen) :]
        window.mark_due(num_emitted=emitted, step=step)
        plain = [
            (*row[: Column.DUE], step, *row[Column.DUE + 1 :])
            if row[Column.DUE] < 0 and row[Column.ARRIVAL] < emitted
            else row
            for row in plain
        ]
        assert len(window) == len(plain)
        assert window.cost == sum(row[Column.COST] for row in plain)
        assert window.rows().T.tolist() == [list(row) for row in plain]


def test_a_large_window_grows_and_shrinks() -> None:
    """Guard: the buffer is both grown and compacted."""
    window = SampleWindow()
    arrived = 0
    for size in (1000, 10, 3000, 1, 5000):
        for _ in range(size):
            window.append(_row(arrived, arrived, cost=2))
            arrived += 1
        window.remove(np.ones(min(len(window), 900), dtype=np.bool_))
    positions = window.rows()[Column.POSITION].tolist()
    assert positions == list(range(arrived - len(window), arrived))
    assert window.cost == 2 * len(window)


def test_token_counts() -> None:
    rows = np.array([_row(0, 1, cost=3), _row(1, 2, cost=4)], dtype=np.int64).T
    assert token_counts(rows) == {
        "num_truncated": 1,
        "num_tokens": 7,
        "num_padded_tokens": 7,
        "num_squared_tokens": 25,
        "num_loss_tokens": 2,
    }
