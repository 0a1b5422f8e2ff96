"""Packing of samples into micro-batches under a token budget.

Pure: lists of lengths in, lists of slots out; the same input gives the same output everywhere.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

__all__ = ["pack", "spread"]


def pack(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Pack by best fit decreasing.

    Args:
        lengths: padded length of each sample, in tokens.
        token_budget: most tokens of a micro-batch. A longer sample (overlong policy `solo`) gets
            a micro-batch of its own.

    Returns:
        Micro-batches as lists of slots into `lengths`, each ascending; as few as the heuristic
        finds (at most 11/9 of the optimum + 1, the known bound of best fit decreasing).
    """
    order = sorted(range(len(lengths)), key=lambda slot: (-lengths[slot], slot))
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for slot in order:
        at = bisect_left(rooms, (lengths[slot], -1))
        if at == len(rooms):
            bins.append([slot])
            room, index = token_budget, len(bins) - 1
        else:
            room, index = rooms.pop(at)
            bins[index].append(slot)
        insort(rooms, (room - lengths[slot], index))
    return [sorted(slots) for slots in bins]


def spread(
    lengths: Sequence[int], costs: Sequence[int], *, count: int, token_budget: int
) -> list[list[int]]:
    """Spread samples over exactly `min(count, len(lengths))` micro-batches of even cost.

    Largest cost first, each into the cheapest micro-batch with room; where that strands a sample,
    the packing of `pack` is split instead (costliest micro-batch first).

    Args:
        lengths: padded length of each sample.
        costs: cost of each sample, same order.
        count: number of micro-batches wanted; at least `len(pack(lengths))`, or a ValueError.
        token_budget: as in `pack`.
    """
    minimum = pack(lengths, token_budget=token_budget)
    if count < len(minimum):
        raise ValueError(f"{len(lengths)} samples need {len(minimum)} micro-batches; got {count}")
    count = min(count, len(lengths))
    return _largest_first(lengths, costs, count, token_budget) or _split(minimum, costs, count)


def _largest_first(
    lengths: Sequence[int], costs: Sequence[int], count: int, token_budget: int
) -> list[list[int]] | None:
    order = sorted(range(len(lengths)), key=lambda slot: (-costs[slot], -lengths[slot], slot))
    bins: list[list[int]] = [[] for _ in range(count)]
    loads: list[tuple[int, int]] = [(0, index) for index in range(count)]
    tokens = [0] * count
    for slot in order:
        for at, (load, index) in enumerate(loads):
            if not bins[index] or tokens[index] + lengths[slot] <= token_budget:
                del loads[at]
                bins[index].append(slot)
                tokens[index] += lengths[slot]
                insort(loads, (load + costs[slot], index))
                break
        else:
            return None
    return [sorted(slots) for slots in bins]


def _split(bins: list[list[int]], costs: Sequence[int], count: int) -> list[list[int]]:
    bins = [list(slots) for slots in bins]
    while len(bins) < count:
        divisible = [index for index, slots in enumerate(bins) if len(slots) > 1]
        at = max(divisible, key=lambda index: (sum(costs[slot] for slot in bins[index]), -index))
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0, 0]
        for slot in sorted(bins[at], key=lambda slot: (-costs[slot], slot)):
            side = 0 if loads[0] <= loads[1] else 1
            halves[side].append(slot)
            loads[side] += costs[slot]
        bins[at] = sorted(halves[0])
        bins.append(sorted(halves[1]))
    return bins
