"""Packing of samples into micro-batches under a token budget and a patch cap.

Pure: lists of lengths in, lists of slots out; the same input gives the same output everywhere.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Caps", "MicroBatchRooms", "pack", "split", "spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What a micro-batch may hold.

    Attributes:
        token_budget: most tokens after padding. A longer sample (overlong policy `solo`) gets a
            micro-batch of its own.
        max_patches: most patches, 0 for no cap. A sample with more gets a micro-batch of its own
            too.
    """

    token_budget: int
    max_patches: int = 0


class MicroBatchRooms:
    """Free room of micro-batches while they are packed by best fit.

    Args:
        caps: limits of each micro-batch.
        count: number of micro-batches; None opens one whenever nothing else fits.
    """

    def __init__(self, caps: Caps, *, count: int | None = None) -> None:
        self._caps = caps
        self._is_open_ended = count is None
        self._num = count or 0
        self._rooms: list[tuple[int, int]] = [
            (caps.token_budget, index) for index in range(self._num)
        ]
        self._patches = [0] * self._num

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches opened so far, or `count`."""
        return self._num

    @property
    def largest(self) -> int:
        """Tokens of the largest room."""
        if self._is_open_ended:
            return self._caps.token_budget
        return self._rooms[-1][0] if self._rooms else 0

    def by_micro_batch(self) -> list[int]:
        """Return the free tokens of each micro-batch, negative where a `solo` sample sits."""
        free = [0] * self._num
        for room, index in self._rooms:
            free[index] = room
        return free

    def place(self, length: int, num_patches: int = 0) -> int:
        """Put a sample where it leaves least room; return the micro-batch, -1 if none has room."""
        rooms, cap = self._rooms, self._caps.max_patches
        at = bisect_left(rooms, (min(length, self._caps.token_budget), -1))
        while cap and at < len(rooms):
            room, index = rooms[at]
            if room == self._caps.token_budget or self._patches[index] + num_patches <= cap:
                break  # empty, or within the cap
            at += 1
        if at == len(rooms):
            if not self._is_open_ended:
                return -1
            room, index = self._caps.token_budget, self._num
            self._num += 1
            self._patches.append(num_patches)
        else:
            room, index = rooms.pop(at)
            self._patches[index] += num_patches
        insort(rooms, (room - length, index))
        return index

    def place_all(self, lengths: Sequence[int]) -> list[int]:
        """Place samples without patches, one after the other, as `place` would; -1 for no room."""
        rooms, budget = self._rooms, self._caps.token_budget
        places = []
        for length in lengths:
            at = bisect_left(rooms, (length if length < budget else budget,))
            if at < len(rooms):
                room, index = rooms.pop(at)
            elif self._is_open_ended:
                room, index = budget, self._num
                self._num += 1
                self._patches.append(0)
            else:
                places.append(-1)
                continue
            insort(rooms, (room - length, index))
            places.append(index)
        return places

    def exchange(self, index: int, *, tokens: int, num_patches: int = 0) -> None:
        """Add `tokens` and `num_patches` (negative: remove) to micro-batch `index`."""
        at = next(at for at, pair in enumerate(self._rooms) if pair[1] == index)
        room, _ = self._rooms.pop(at)
        self._patches[index] += num_patches
        insort(self._rooms, (room - tokens, index))

    def accepts(self, index: int, *, num_patches: int) -> bool:
        """Whether micro-batch `index` has room for so many more patches."""
        cap = self._caps.max_patches
        return not cap or self._patches[index] + num_patches <= cap


def pack(
    lengths: Sequence[int], *, token_budget: int, patches: Sequence[int] = (), max_patches: int = 0
) -> list[list[int]]:
    """Pack by best fit decreasing.

    Args:
        lengths: padded length of each sample, in tokens.
        token_budget: most tokens of a micro-batch; see `Caps`.
        patches: patches of each sample; empty for none.
        max_patches: see `Caps`.

    Returns:
        Micro-batches as lists of slots into `lengths`, each ascending; as few as the heuristic
        finds (without patches at most 11/9 of the optimum + 1, the known bound of best fit
        decreasing).
    """
    rooms = MicroBatchRooms(Caps(token_budget=token_budget, max_patches=max_patches))
    bins: list[list[int]] = []
    for slot in sorted(range(len(lengths)), key=lambda slot: (-lengths[slot], slot)):
        index = rooms.place(lengths[slot], patches[slot] if patches else 0)
        if index == len(bins):
            bins.append([])
        bins[index].append(slot)
    return [sorted(slots) for slots in bins]


def spread(
    lengths: Sequence[int],
    costs: Sequence[int],
    *,
    count: int,
    token_budget: int,
    patches: Sequence[int] = (),
    max_patches: int = 0,
) -> list[list[int]]:
    """Spread samples over exactly `min(count, len(lengths))` micro-batches of even cost.

    Largest cost first, each into the cheapest micro-batch with room; where that strands a sample,
    the packing of `pack` is split instead (costliest micro-batch first).

    Args:
        lengths: padded length of each sample.
        costs: cost of each sample, same order.
        count: number of micro-batches wanted; at least `len(pack(lengths))`, or a ValueError.
        token_budget: as in `pack`.
        patches: patches of each sample; empty for none.
        max_patches: as in `pack`.
    """
    caps = Caps(token_budget=token_budget, max_patches=max_patches)
    count = min(count, len(lengths))
    bins = _largest_first(lengths, costs, count, caps, patches) if count else []
    if bins is not None:
        return bins
    minimum = pack(lengths, token_budget=token_budget, patches=patches, max_patches=max_patches)
    if count < len(minimum):
        raise ValueError(f"{len(lengths)} samples need {len(minimum)} micro-batches; got {count}")
    return split(minimum, costs, count=count)


def split(bins: Sequence[Sequence[int]], costs: Sequence[int], *, count: int) -> list[list[int]]:
    """Halve the costliest micro-batch until there are `count`; there must be enough samples."""
    halved = [list(slots) for slots in bins]
    while len(halved) < count:
        divisible = [index for index, slots in enumerate(halved) if len(slots) > 1]
        at = max(divisible, key=lambda index: (sum(costs[slot] for slot in halved[index]), -index))
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0, 0]
        for slot in sorted(halved[at], key=lambda slot: (-costs[slot], slot)):
            side = 0 if loads[0] <= loads[1] else 1
            halves[side].append(slot)
            loads[side] += costs[slot]
        halved[at] = sorted(halves[0])
        halved.append(sorted(halves[1]))
    return halved


def _largest_first(
    lengths: Sequence[int],
    costs: Sequence[int],
    count: int,
    caps: Caps,
    patches: Sequence[int],
) -> list[list[int]] | None:
    order = sorted(range(len(lengths)), key=lambda slot: (-costs[slot], -lengths[slot], slot))
    bins: list[list[int]] = [[] for _ in range(count)]
    loads: list[tuple[int, int]] = [(0, index) for index in range(count)]
    tokens = [0] * count
    used = [0] * count
    for slot in order:
        more = patches[slot] if patches else 0
        for at, (load, index) in enumerate(loads):
            fits = tokens[index] + lengths[slot] <= caps.token_budget and (
                not caps.max_patches or used[index] + more <= caps.max_patches
            )
            if not bins[index] or fits:
                del loads[at]
                bins[index].append(slot)
                tokens[index] += lengths[slot]
                used[index] += more
                insort(loads, (load + costs[slot], index))
                break
        else:
            return None
    return [sorted(slots) for slots in bins]
