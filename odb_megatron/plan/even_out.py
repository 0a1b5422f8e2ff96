"""Evens out bins of samples: moves and swaps between the costliest and the others.

Pure, integers only. A bin is a replica (balance scope `step`) or one of its micro-batches (scope
`microbatch`); it has a target cost and room for tokens and patches. Must not know steps or records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.sample_list import StepSamples

__all__ = ["Bins", "Room"]

Integers = npt.NDArray[np.int64]

_TOLERANCE_BITS = 8  # a bin is even enough within 1/256 of its target
_PARTNERS = 6
_LEAST_GAIN_BITS = 4  # what does not mend 1/16 of the excess is not worth a move
_ROUNDS_PER_BIN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a bin may hold.

    Attributes:
        tokens: most padded tokens; a sample counts for at most `token_budget`.
        token_budget: of one micro-batch.
        patches: most patches, 0 for no cap.
    """

    tokens: int
    token_budget: int
    patches: int = 0


class Bins:
    """Bins, what is in them, and how far they are from their targets.

    Args:
        samples: the step's.
        replica_of: replica of each bin, int64 [bins].
        group_of: bins of one group share their height: what counts is the costliest of each group.
        targets: cost aimed at, int64 [bins].
        room: what a bin may hold.
    """

    def __init__(
        self,
        samples: StepSamples,
        *,
        replica_of: Integers,
        group_of: Integers,
        targets: Integers,
        room: Room,
    ) -> None:
        num = len(targets)
        self.bin_of: Integers = np.full(len(samples), -1, dtype=np.int64)
        self.loads: Integers = np.zeros(num, dtype=np.int64)
        self.targets = targets.copy()
        self._costs, self._owner, self._payload = samples.cost, samples.owner, samples.payload
        self._sizes = np.minimum(samples.padded, room.token_budget)
        self._patches = samples.patches
        self._room = room
        self._replica_of, self._group_of = replica_of, group_of
        self._tokens: Integers = np.zeros(num, dtype=np.int64)
        self._used: Integers = np.zeros(num, dtype=np.int64)
        self._members: list[npt.NDArray[np.intp]] = []

    def put_all(self, bin_of: Integers) -> None:
        """Take a placement of all samples."""
        num = len(self.targets)
        self.bin_of = bin_of.copy()
        order = np.lexsort((self._costs, bin_of))
        ends = np.searchsorted(bin_of[order], np.arange(num + 1))
        self._members = [order[ends[at] : ends[at + 1]] for at in range(num)]
        for sums, values in (
            (self.loads, self._costs),
            (self._tokens, self._sizes),
            (self._used, self._patches),
        ):
            running = np.concatenate((np.zeros(1, dtype=np.int64), values[order].cumsum()))
            sums[:] = running[ends[1:]] - running[ends[:-1]]

    @property
    def members(self) -> list[npt.NDArray[np.intp]]:
        """Samples of each bin, by rising cost."""
        return self._members

    def within_room(self) -> bool:
        """Whether no bin holds more tokens or patches than it may."""
        room = self._room
        fits = bool((self._tokens <= room.tokens).all())
        return fits and (not room.patches or bool((self._used <= room.patches).all()))

    def even_out(self) -> None:
        """Lower the costliest bins by moves and swaps until they are even or nothing helps."""
        for _ in range(_ROUNDS_PER_BIN * len(self.targets) + 64):
            over = self.loads - self.targets
            worst = int(over.argmax())
            if int(over[worst]) <= int(self.targets[worst]) >> _TOLERANCE_BITS:
                return
            if self._relieve(worst, over):
                continue
            group = self._group_of == self._group_of[worst]  # its height is what it is
            self.targets[group] = np.maximum(self.targets[group], self.loads[worst])

    def fill_up(self, least: int) -> None:
        """Give each bin of fewer than `least` samples the cheapest ones of bins with more."""
        sizes = np.array([len(members) for members in self._members])
        for poor in np.flatnonzero(sizes < least).tolist():
            while sizes[poor] < least:
                rich = np.flatnonzero(sizes > least)
                if not len(rich):
                    return
                cheapest = np.array([self._members[at][0] for at in rich.tolist()])
                own = self._owner[cheapest] == self._replica_of[poor]
                at = int(np.lexsort((cheapest, self._costs[cheapest], ~own))[0])
                sizes[rich[at]] -= 1
                sizes[poor] += 1
                self.move(int(cheapest[at]), poor)

    def _relieve(self, worst: int, over: Integers) -> bool:
        """Take cost from a bin; return whether that was possible."""
        excess = int(over[worst])
        tolerance = int(self.targets[worst]) >> _TOLERANCE_BITS
        best: tuple[int, int, int] | None = None
        best_score = excess - (excess >> _LEAST_GAIN_BITS)
        for partner in np.argsort(over, kind="stable")[:_PARTNERS].tolist():
            if partner == worst:
                break
            found = self._exchange(worst, partner, excess, -int(over[partner]), tolerance)
            if found is None:
                continue
            give, take, score = found
            if score <= best_score:
                best, best_score = (give, take, partner), score
                if score <= max(tolerance, excess + int(over[partner])):
                    break
        if best is None:
            return False
        give, take, partner = best
        self.move(give, partner)
        if take >= 0:
            self.move(take, worst)
        return True

    def _exchange(
        self, worst: int, partner: int, excess: int, gap: int, tolerance: int
    ) -> tuple[int, int, int] | None:
        """Return what one bin gives, what it takes (-1: nothing), and the larger excess left."""
        mine, yours = self._members[worst], self._members[partner]
        high = gap + tolerance
        low = min(excess, gap) - tolerance
        costs = self._costs[mine]
        yours = np.concatenate((_NOTHING, yours))
        theirs = self._costs[yours]
        theirs[0] = 0
        first = np.searchsorted(theirs, costs - high)
        take = np.concatenate((np.minimum(first, len(theirs) - 1), np.maximum(first - 1, 0)))
        give = np.concatenate((mine, mine))
        taken = yours[take]
        net = self._costs[give] - theirs[take]
        size, patches = self._sizes[give], self._patches[give]
        real = take > 0
        size = size - np.where(real, self._sizes[taken], 0)
        fits = (size <= self._room.tokens - self._tokens[partner]) & (
            -size <= self._room.tokens - self._tokens[worst]
        )
        if self._room.patches:
            patches = patches - np.where(real, self._patches[taken], 0)
            fits &= (patches <= self._room.patches - self._used[partner]) & (
                -patches <= self._room.patches - self._used[worst]
            )
        fits &= net > 0
        if not fits.any():
            return None
        score = np.maximum(excess - net, net - gap)
        good = fits & (net >= low) & (net <= high)
        if good.any():
            bytes_moved = self._bytes(give, worst, partner)
            bytes_moved += np.where(real, self._bytes(taken, partner, worst), 0)
            at = int(np.where(good, bytes_moved, _FAR).argmin())
        else:
            at = int(np.where(fits, score, _FAR).argmin())
        return int(give[at]), int(taken[at]) if real[at] else -1, int(score[at])

    def _bytes(self, samples: npt.NDArray[np.intp], source: int, target: int) -> Integers:
        """Return the change of the bytes moved in the step when samples change their bin."""
        owner, payload = self._owner[samples], self._payload[samples]
        change: Integers = np.where(owner == self._replica_of[target], 0, payload)
        change -= np.where(owner == self._replica_of[source], 0, payload)
        return change

    def move(self, sample: int, target: int) -> None:
        """Put a sample into another bin."""
        source = int(self.bin_of[sample])
        cost = self._costs[sample]
        for at, sign in ((source, -1), (target, 1)):
            self.loads[at] += sign * cost
            self._tokens[at] += sign * self._sizes[sample]
            self._used[at] += sign * self._patches[sample]
        members = self._members[source]
        self._members[source] = members[members != sample]
        members = self._members[target]
        at = int(np.searchsorted(self._costs[members], cost))
        self._members[target] = np.concatenate((members[:at], [sample], members[at:]))
        self.bin_of[sample] = target


_NOTHING = np.zeros(1, dtype=np.intp)
_FAR = np.iinfo(np.int64).max
