"""The step loop of one replica: read, measure, agree, plan, deliver and pack.

A generator. Whatever needs the other replicas is an `Ask` that it yields and whose answer it is
sent, so that the same loop runs in a thread, in a process of its own, or for all replicas of a test
in one thread. A loop that meets an error goes through the same exchanges as all others until the
next gather, where it tells them; a block that exchanges samples without it makes no step either.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from odb_megatron.data.iterable import HEAD_ITEMS
from odb_megatron.data.sample import BadRecords, Sample, Skipped, SkipReason
from odb_megatron.data.wire import (
    SampleWireError,
    decode_sample,
    encode_header,
    encode_sample,
    pack_step,
    wire_size,
)
from odb_megatron.plan.blocks import blocks_of, even_blocks, offered
from odb_megatron.plan.pipeline import in_best_order
from odb_megatron.plan.record import (
    HEADER,
    ROW,
    SUMMARY,
    TEXT_BYTES,
    TRUNCATED,
    LoaderClosedError,
    PlanConfig,
    ReplicaFailedError,
    StepTotals,
    config_differences,
)
from odb_megatron.plan.step_planner import StepPlan, plan_step

__all__ = ["Ask", "Failure", "PackedStep", "Progress", "Reader", "Request", "SourceCounts"]
__all__ += ["StepLoop"]

T = TypeVar("T")
Array = npt.NDArray[Any]

_COUNT = struct.Struct("<q")
_MAX_ERROR = 2000
_CONSEQUENCES = ("SampleLostError", "ReplicaFailedError")
_GONE = "replica {} has failed in this step; its own output says why"


class SampleLostError(RuntimeError):
    """Another replica's sample did not arrive whole: it has failed, or the connection is bad."""


class Reader(Protocol):
    """The samples of one replica, in the order in which it reads them."""

    def read(self, count: int) -> list[tuple[int, Sample | Skipped]]:
        """Return the next samples with their ids, fewer where the source ends."""

    def has_ended(self) -> bool:
        """Whether there is no further sample."""

    def head(self) -> bytes:
        """Return what must differ between replicas' own iterators; of one size."""

    def check_heads(self, heads: Sequence[bytes]) -> None:
        """Raise if replicas read the same samples; the same on all."""

    def state(self) -> Any:
        """Return where the source is after what was read, as JSON values; None if it has none."""

    def close(self) -> None:
        """Read nothing more; end worker processes."""


@dataclass(slots=True)
class SourceCounts:
    """What a replica has consumed of one data source.

    Attributes:
        samples: samples emitted.
        tokens: their tokens before padding.
        loss_tokens: positions of theirs that carry loss.
        truncated: samples whose end was cut.
        unlabelled: samples left without any loss token by the cut.
        solo: samples over the token budget or patch cap, in a micro-batch of their own.
        bad_records: records left out.
        overlong: samples left out for their length.
        first_message: why the first one was left out.
    """

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    truncated: int = 0
    unlabelled: int = 0
    solo: int = 0
    bad_records: int = 0
    overlong: int = 0
    first_message: str = ""

    def add_sample(
        self, *, num_tokens: int, num_loss_tokens: int, truncated: bool, solo: bool
    ) -> None:
        """Count an emitted sample."""
        self.samples += 1
        self.tokens += num_tokens
        self.loss_tokens += num_loss_tokens
        self.truncated += truncated
        self.unlabelled += num_loss_tokens == 0
        self.solo += solo

    def add_skipped(self, reason: SkipReason, message: str) -> None:
        """Count a position that emits nothing."""
        self.overlong += reason is SkipReason.OVERLONG
        self.bad_records += reason is not SkipReason.OVERLONG
        self.first_message = self.first_message or message

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the integer fields, in order."""
        return tuple(field.name for field in fields(cls) if field.name != "first_message")


@dataclass(frozen=True, slots=True)
class Ask:
    """What the other replicas are needed for: a method of `comm.groups.SourceGroup`."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a loop stands after a step, or before the first.

    Attributes:
        consumed: samples consumed by all replicas since the run's start.
        num_bad: bad records of all replicas since the run's start.
        source_counts: what this replica has read of each source since the loop began.
        source: state of an iterable source; None for random access.
    """

    consumed: int
    num_bad: int = 0
    source_counts: tuple[SourceCounts, ...] = ()
    source: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """A finished step as it is handed on: see `wire`.

    Attributes:
        header: bytes of its metadata.
        payload: tokens, labels and loss of its micro-batches, uint8.
        pixels: patches of its images, uint8; None without any.
        progress: the loop's after it.
    """

    header: bytes
    payload: npt.NDArray[np.uint8]
    pixels: npt.NDArray[np.uint8] | None
    progress: Progress


@dataclass(frozen=True, slots=True)
class Failure:
    """This loop has failed: its trainer is to end, while the loop tells the others."""

    error: BaseException


Request = Ask | PackedStep | Failure
Requests = Generator[Request, Any, T]


@dataclass(frozen=True, slots=True)
class _Table:
    """The samples of a step that the replicas of the block have read, or that came to it.

    Attributes:
        rows: `ROW` [n], skipped ones included.
        owner: int [n], the replica that has read it, counted in the block; -1 for another block's.
        here: bool [n], whether it is still the block's.
        wait_us: longest wait for data of one of them.
        loss_weight: sum of the scaled weights of what they have read.
    """

    rows: Array
    owner: Array
    here: Array
    wait_us: int
    loss_weight: int

    @property
    def trained(self) -> Array:
        """Which the block trains, bool [n]."""
        trained: Array = (self.rows["tokens"] > 0) & self.here
        return trained

    @classmethod
    def merged(cls, rounds: Sequence[tuple[Array, Array, Array]]) -> _Table:
        """Return the samples of several rounds: headers, rows and owners of each."""
        headers, rows, owner = map(np.concatenate, zip(*rounds, strict=True))
        wait_us, weight = int(headers["wait_us"].max()), int(headers["loss_weight"].sum())
        return cls(rows, owner, np.ones(len(rows), dtype=bool), wait_us, weight)


def _patches(rows: Array) -> Array:
    found: Array = (rows["patches"] & ~np.uint32(TRUNCATED)).astype(np.int64)
    return found


class StepLoop:
    """Makes the steps of one replica.

    Args:
        reader: what this replica reads.
        config: what all replicas agree on.
        replica: which one this is.
        num_sources: data sources, for the counts.
        start: where to go on.
    """

    def __init__(
        self,
        reader: Reader,
        config: PlanConfig,
        *,
        replica: int,
        num_sources: int = 1,
        start: Progress | None = None,
    ) -> None:
        start = start or Progress(consumed=0)
        self._reader, self._config, self._replica = reader, config, replica
        self._rule, self._digest = config.size_rule, config.digest()
        self._all_blocks = blocks_of(config.num_replicas, config.block)
        self._num_blocks = len(self._all_blocks)
        self._block = next(one for one in self._all_blocks if replica in one)
        self._block_number = self._all_blocks.index(self._block)
        self._own = replica - self._block.start  # this replica, counted in the block
        self._num_live = [len(one) for one in self._all_blocks]  # iterators that go on, by block
        self._ended = np.zeros(len(self._block), dtype=bool)
        # A first round, of headers alone, tells which iterators have ended (also at a resume), and
        # whether configurations differ, from which the size of later records follows.
        self._knows_ends = False
        self._has_compared = start.source is not None  # a resumed run's iterators were compared
        self._step, self._consumed, self._num_consumed = 0, start.consumed, 0
        self._blocks = np.zeros(1, dtype=SUMMARY)  # of this step
        self._items: list[tuple[int, Sample | Skipped]] = []  # read in this step
        self._held: dict[int, tuple[int, Sample]] = {}  # the same by place in the table
        self._arrived: dict[int, Any] = {}  # from other blocks, by place in the table
        self._counts = [SourceCounts() for _ in range(num_sources)]
        self._bad = BadRecords(config.max_bad_records, num=start.num_bad)
        self._wait_us, self._loss_weight, self._began = 0, 0, 0.0
        self._closing = False
        self._error: Exception | None = None

    @property
    def progress(self) -> Progress:
        """Where the loop stands after the last step made."""
        return Progress(
            consumed=self._consumed,
            num_bad=self._bad.num,
            source_counts=tuple(map(replace, self._counts)),
            source=self._reader.state(),
        )

    def close(self) -> None:
        """Make no further step: the next gather tells the others. Any thread may call it."""
        self._closing = True

    def run(self) -> Requests[None]:
        """Make all steps.

        Raises:
            LoaderClosedError: a replica has closed its loader; it may be this one.
            ReplicaFailedError: another replica has failed.
            Exception: what this one has met, once the others know.
        """
        try:
            while True:
                self._began = time.perf_counter()
                table = yield from self._agree()
                if table is None:
                    return
                self._hold(table)
                if self._num_blocks > 1:
                    table = yield from self._even_out(table)
                plan = yield from self._plan(table)
                totals = self._attempt(self._totals, table, plan)
                if self._num_blocks > 1:
                    own = (
                        totals.to_bytes()
                        if totals
                        else bytes(_COUNT.size * len(fields(StepTotals)))
                    )
                    totals = self._attempt(StepTotals.merged, (yield from self._blocks_tell(own)))
                samples = yield from self._deliver(table, plan)
                step = self._attempt(self._pack, plan, totals, samples)
                self._step += 1
                self._consumed += self._num_consumed
                self._attempt(self._bad.add_up, totals)
                progress = self._attempt(lambda: self.progress)
                if step is not None and progress is not None:
                    yield replace(step, progress=progress)
                else:  # the others learn it in the next gather
                    assert self._error is not None
                    yield Failure(self._error)
        finally:
            self._reader.close()

    # --- read, measure, agree ------------------------------------------------------------------

    def _agree(self) -> Requests[_Table | None]:
        """Read the next global batch with all replicas; None where there is none.

        One round, but before the first step, and where an iterator ends inside its share: what is
        missing is read in another, by those that have not ended.
        """
        config = self._config
        wanted = min(config.global_batch_size, config.total - self._consumed)
        missing, rounds = wanted, []
        while True:
            shares = self._shares(missing if self._knows_ends else 0)
            own = None if self._closing else self._attempt(self._read, shares[self._own])
            found = yield from self._gather(own, most=max(shares))
            rounds.append(found)
            merged = _Table.merged(rounds)
            blocks = yield from self._summaries(found[0], merged)
            if blocks["failed"].any() or blocks["differs"].any():
                yield from self._fail()
            if blocks["closing"].any() and (wanted or missing):
                raise LoaderClosedError("a replica has closed its loader: no further step is made")
            self._ended |= found[0]["ended"] > 0
            self._num_live = blocks["live"].tolist()
            is_asked, self._knows_ends = self._knows_ends, True
            missing = wanted - int(blocks["rows"].sum())
            if is_asked and (missing == 0 or not any(self._num_live)):
                self._num_consumed, self._blocks = wanted - missing, blocks
                yield from self._compare_heads()
                return merged if self._num_consumed else None

    def _shares(self, missing: int) -> list[int]:
        """Return how many samples each replica of the block reads; those without end alike."""
        live = sum(self._num_live)
        at = sum(self._num_live[: self._block_number])
        shares = []
        for ended in self._ended.tolist():
            shares.append(0 if ended else missing // live + (at < missing % live))
            at += not ended
        return shares

    def _read(self, count: int) -> Array:
        """Read and measure; return a `ROW` for each sample."""
        started = time.perf_counter()
        items = self._reader.read(count)
        self._loss_weight = 0
        self._wait_us = min(round((time.perf_counter() - started) * 1e6), (1 << 32) - 1)
        rows = np.zeros(len(items), dtype=ROW)
        for row, (_, item) in zip(rows, items, strict=True):
            if isinstance(item, Skipped):
                row["loss_tokens"] = item.reason
                self._counts[item.source].add_skipped(item.reason, item.message)
                self._bad.note(item)
            else:
                patches = item.num_patches | (TRUNCATED if item.truncated else 0)
                row["tokens"], row["loss_tokens"] = len(item), item.num_loss_tokens
                row["patches"], row["bytes"] = patches, wire_size(item)
                self._loss_weight += round(item.loss_weight)
        self._items += items
        return rows

    def _gather(self, own: Array | None, *, most: int) -> Requests[tuple[Array, Array, Array]]:
        """Send this replica's record of a round; return headers, rows and owners of the block."""
        header = np.zeros((), dtype=HEADER)
        header["config"], header["step"] = self._digest, self._step
        header["consumed"], header["closing"] = self._consumed, self._closing
        rows = np.zeros(most, dtype=ROW)
        if own is not None:
            header["rows"], header["wait_us"] = len(own), self._wait_us
            header["loss_weight"] = self._loss_weight
            header["ended"] = self._attempt(self._reader.has_ended) or False
            rows[: len(own)] = own
        header["failed"] = self._error is not None
        records = yield Ask("gather", (header.tobytes() + rows.tobytes(),))
        headers = np.array([np.frombuffer(one, HEADER, 1)[0] for one in records])
        counts = np.minimum(headers["rows"], most).tolist()
        read = [
            np.frombuffer(one, ROW, count, HEADER.itemsize)
            for one, count in zip(records, counts, strict=True)
        ]
        return headers, np.concatenate(read), np.repeat(np.arange(len(read)), counts)

    def _blocks_tell(self, record: bytes) -> Requests[list[bytes]]:
        found: list[bytes] = yield Ask("gather_blocks", (record,))
        return found

    def _summaries(self, headers: Array, table: _Table) -> Requests[Array]:
        """Return a `SUMMARY` of each block."""
        own = np.zeros(1, dtype=SUMMARY)
        same = [headers[name] == headers[name][0] for name in ("config", "step", "consumed")]
        own["failed"] = headers["failed"].any() or self._error is not None
        own["closing"], own["differs"] = headers["closing"].any(), not np.all(same)
        own["config"], own["consumed"] = self._digest, self._consumed
        own["rows"] = len(table.rows)
        own["live"] = int((~self._ended & (headers["ended"] == 0)).sum())
        if self._num_blocks == 1:
            return own
        costs = self._config.cost.samples(
            table.rows["tokens"].astype(np.int64), _patches(table.rows)
        )
        costs = np.where(table.rows["tokens"] > 0, costs, 0)
        own["cost"] = costs.sum()
        offers = offered(costs)
        row = own["offers"][0][: len(offers)]
        row["row"], row["cost"], row["index"] = table.rows[offers], costs[offers], offers
        found = yield from self._blocks_tell(own.tobytes())
        blocks = np.frombuffer(b"".join(found), dtype=SUMMARY).copy()
        differs = (blocks["config"] != self._digest) | (blocks["consumed"] != self._consumed)
        blocks["differs"] |= differs.any()
        return blocks

    def _compare_heads(self) -> Requests[None]:
        """Notice replicas that read the same samples: once, when each has read enough to tell."""
        config, num_read = self._config, self._consumed + self._num_consumed
        is_enough = num_read >= HEAD_ITEMS * config.num_replicas or not any(self._num_live)
        if config.has_iterators and is_enough and not self._has_compared:
            self._has_compared = True
            heads = yield Ask("gather_all", (self._reader.head(),))
            self._reader.check_heads(heads)

    def _fail(self) -> Requests[None]:
        """Exchange what went wrong, and raise."""
        error = "" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        text = f"{error[:_MAX_ERROR]}\0{self._config.to_text()}".encode()
        texts = yield Ask("gather_all", (text[:TEXT_BYTES].ljust(TEXT_BYTES),))
        parts = [one.decode("utf-8", "replace").rstrip().partition("\0") for one in texts]
        failed = {at: text for at, (text, _, _) in enumerate(parts) if text}
        causes = {at: text for at, text in failed.items() if not text.startswith(_CONSEQUENCES)}
        if self._error is not None and (self._replica in causes or not causes):
            raise self._error
        named = [f"replica {at} failed: {text}" for at, text in (causes or failed).items()]
        raise ReplicaFailedError("; ".join(named) or config_differences([p[2] for p in parts]))

    def _hold(self, table: _Table) -> None:
        """Keep the samples that this replica has read by their places in the table."""
        places = np.flatnonzero(table.owner == self._own).tolist()
        items, self._items = self._items, []
        self._held = {
            at: (number, item)
            for at, (number, item) in zip(places, items, strict=True)
            if isinstance(item, Sample)
        }

    # --- plan ----------------------------------------------------------------------------------

    def _even_out(self, table: _Table) -> Requests[_Table]:
        """Move whole samples from heavy to light blocks; they pass through the first replicas."""
        offers, own = self._blocks["offers"], self._block_number
        sizes = [len(block) for block in self._all_blocks]
        costs = [one[one > 0].tolist() for one in offers["cost"]]
        moves = even_blocks(self._blocks["cost"].tolist(), sizes, costs)
        if not moves:
            return table
        leaving = [int(offers[by][number]["index"]) for by, number, _ in moves if by == own]
        here = table.here.copy()
        here[leaving] = False
        data = yield from self._collect(table, leaving)
        moved = [(by, offers[by][number]["row"], to) for by, number, to in moves]
        room = [0] * len(sizes)
        for by, row, _ in moved:
            room[by] += int(row["bytes"])
        found = yield from self._blocks_tell(data.ljust(max(room), b"\0"))
        ends, arrived = [0] * len(sizes), list[Array]()
        for by, row, to in moved:
            begin, ends[by] = ends[by], ends[by] + int(row["bytes"])
            if to == own:
                self._arrived[len(table.rows) + len(arrived)] = found[by][begin : ends[by]]
                arrived.append(row)
        rows = np.concatenate([table.rows, np.array(arrived, dtype=ROW)])
        owner = np.concatenate([table.owner, np.full(len(arrived), -1)])
        here = np.concatenate([here, np.ones(len(arrived), dtype=bool)])
        return replace(table, rows=rows, owner=owner, here=here)

    def _collect(self, table: _Table, leaving: Sequence[int]) -> Requests[bytes]:
        """Return the samples that leave the block, in this order, on its first replica."""
        first, sizes = self._block.start, table.rows["bytes"].tolist()
        by: dict[int, list[int]] = {}  # by owner
        for at in leaving:
            by.setdefault(int(table.owner[at]), []).append(at)
        own = self._attempt(self._encoded, by.get(self._own, ())) or b""
        parts: dict[int, Any] = {self._own: own}
        if any(by):  # of others than the first
            is_first = self._own == 0
            sends = {first: own} if self._own in by and not is_first else {}
            receives = {first + one: sum(sizes[at] for at in of) for one, of in by.items() if one}
            found = yield from self._exchange(sends, receives if is_first else {})
            parts |= {one - first: data for one, data in (found or {}).items()}
        if self._error is not None:
            return bytes(sum(sizes[at] for at in leaving))  # zeros, an error to whoever gets them
        ends, samples = dict.fromkeys(by, 0), []
        for one in table.owner[leaving].tolist() if self._own == 0 else ():
            at = by[one][ends[one]]
            ends[one] += 1
            begin = sum(sizes[before] for before in by[one][: ends[one] - 1])
            samples.append(parts[one][begin : begin + sizes[at]])
        return b"".join(samples)

    def _planned(self, table: _Table, least: int) -> StepPlan:
        """Plan the block's samples; indices are those of `table.trained`."""
        config, rule = self._config, self._rule
        rows = table.rows[table.trained]
        tokens = rows["tokens"].astype(np.int64)
        budget = rule.sizes[-1] if rule.sizes else config.token_budget
        return plan_step(
            rule.padded_all(tokens) if rule.sizes else tokens,
            num_replicas=len(self._block),
            token_budget=budget,
            sync=config.sync.value,
            alignment=config.multiple,
            patches=_patches(rows),
            max_patches=config.max_patches or None,
            cost=config.cost,
            count_multiple=config.count_multiple,
            min_micro_batches=least,
            max_share=config.max_share,
            owner=np.maximum(table.owner[table.trained], 0),
            solo=rule.padded_all(tokens) > budget,
        )

    def _plan(self, table: _Table) -> Requests[StepPlan | None]:
        """Return the block's plan; blocks plan again until all have as many micro-batches.

        None, with an error, where this replica cannot plan, or another block's first one.
        """
        plan = self._attempt(self._planned, table, 1)
        while self._num_blocks > 1:
            own = _COUNT.pack(plan.num_micro_batches if plan else 0)
            counts = [_COUNT.unpack(one)[0] for one in (yield from self._blocks_tell(own))]
            if not min(counts):
                self._lose(self._all_blocks[counts.index(0)].start)
                return None
            if min(counts) == max(counts):
                break
            if plan is not None and plan.num_micro_batches < max(counts):
                plan = self._attempt(self._planned, table, max(counts))
        return plan and self._attempt(in_best_order, plan, self._config.pipeline)

    def _totals(self, table: _Table, plan: StepPlan) -> StepTotals:
        config, rows = self._config, table.rows
        trained = rows[table.trained]
        skipped = rows[rows["tokens"] == 0]
        tokens = trained["tokens"].astype(np.int64)
        owner = table.owner[table.trained].tolist()
        moved = [
            index
            for replica, row in enumerate(plan.micro_batches)
            for members in row
            for index in members
            if owner[index] != replica
        ]
        is_final = self._consumed + self._num_consumed >= config.total
        if config.has_unknown_end:
            is_final = not any(self._num_live)
        return StepTotals(
            step=self._step,
            consumed_before=self._consumed,
            num_consumed=self._num_consumed,
            num_micro_batches=plan.num_micro_batches,
            num_replicas=config.num_replicas,
            num_samples=len(trained),
            num_left_out=len(skipped),
            num_bad=int((skipped["loss_tokens"] == SkipReason.BAD_RECORD).sum()),
            num_truncated=int((trained["patches"] >= TRUNCATED).sum()),
            num_tokens=int(tokens.sum()),
            num_padded_tokens=int(self._rule.padded_all(tokens).sum()),
            num_squared_tokens=int((tokens**2).sum()),
            num_loss_tokens=int(trained["loss_tokens"].sum(dtype=np.int64)),
            loss_weight=table.loss_weight,
            num_patches=int(_patches(trained).sum()),
            num_idle=sum(not one for row in plan.micro_batches for one in row),
            num_moved=len(moved),
            bytes_moved=int(trained["bytes"][moved].sum(dtype=np.int64)),
            cost_sum=sum(plan.costs),
            cost_max=max(plan.costs),
            wait_us=table.wait_us,
            is_final=is_final,
        )

    # --- deliver and pack ----------------------------------------------------------------------

    def _deliver(
        self, table: _Table, plan: StepPlan | None
    ) -> Requests[dict[int, tuple[int, Sample]]]:
        """Return the samples that this replica trains with their ids, by index of the plan."""
        first, own = self._block.start, self._own
        places = np.flatnonzero(table.trained).tolist()  # in the table, by index of the plan
        owner, sizes = table.owner.tolist(), table.rows["bytes"].tolist()
        sends: dict[int, list[int]] = {}
        receives: dict[int, list[int]] = {}
        for replica, row in enumerate(plan.micro_batches if plan else ()):
            for at in (places[index] for members in row for index in members):
                if owner[at] == own != replica:
                    sends.setdefault(replica, []).append(at)
                elif owner[at] != own == replica:
                    receives.setdefault(owner[at], []).append(at)
        parts: dict[int, Any] = {-1: b"".join(self._arrived[at] for at in receives.get(-1, ()))}
        if len(self._block) > 1:  # also where nothing moves: who cannot plan does not know it
            sent = {first + to: self._attempt(self._encoded, of) or b"" for to, of in sends.items()}
            expected = {first + by: sum(sizes[at] for at in of) for by, of in receives.items()}
            expected.pop(first - 1, None)
            found = yield from self._exchange(sent, expected)
            parts |= {by - first: data for by, data in (found or {}).items()}
        found_here = self._attempt(self._decoded, receives, parts, sizes) or {}
        held, self._held, self._arrived = self._held | found_here, {}, {}
        return {index: held[at] for index, at in enumerate(places) if at in held}

    def _exchange(
        self, sends: Mapping[int, bytes], receives: Mapping[int, int]
    ) -> Requests[Mapping[int, Any] | None]:
        """Exchange samples; None, with an error, where a replica of the block has failed."""
        found = yield Ask("exchange", (self._step, None if self._error else sends, receives))
        failed = [by for by, part in found.items() if part is None]
        if failed:
            self._lose(failed[0])
        return None if failed else found

    def _lose(self, replica: int) -> None:
        self._error = self._error or ReplicaFailedError(_GONE.format(replica))

    def _encoded(self, places: Sequence[int]) -> bytes:
        return b"".join(encode_sample(*self._held[at]) for at in places)

    def _decoded(
        self, receives: Mapping[int, Sequence[int]], parts: Mapping[int, Any], sizes: Sequence[int]
    ) -> dict[int, tuple[int, Sample]]:
        found = {}
        for by, places in receives.items():
            data, begin = memoryview(parts[by]), 0
            for at in places:
                end = begin + sizes[at]
                try:
                    found[at] = decode_sample(data[begin:end])
                except SampleWireError as error:
                    who = f"replica {self._block.start + by}" if by >= 0 else "another block"
                    raise SampleLostError(f"a sample did not arrive from {who}: {error}") from error
                begin = end
        return found

    def _pack(
        self, plan: StepPlan, totals: StepTotals, samples: Mapping[int, tuple[int, Sample]]
    ) -> PackedStep:
        found = [[samples[index] for index in row] for row in plan.micro_batches[self._own]]
        budget, most = self._config.token_budget, self._config.max_patches
        for _, sample in (pair for members in found for pair in members):
            self._counts[sample.source].add_sample(
                num_tokens=len(sample),
                num_loss_tokens=sample.num_loss_tokens,
                truncated=sample.truncated > 0,
                solo=self._rule.padded(len(sample)) > budget or sample.num_patches > most > 0,
            )
        metadata, payload, pixels = pack_step(totals, found, rule=self._rule)
        plan_us = round((time.perf_counter() - self._began) * 1e6)
        return PackedStep(
            header=encode_header(replace(metadata, plan_us=plan_us)),
            payload=payload,
            pixels=pixels,
            progress=Progress(consumed=totals.consumed_before),
        )

    def _attempt(self, function: Callable[..., T], *args: Any) -> T | None:
        """Return what a function does; its error, or an earlier one, is told in the next gather."""
        if self._error is None:
            try:
                return function(*args)
            except Exception as error:
                self._error = error
        return None
