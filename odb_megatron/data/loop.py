"""The step loop of one replica: read, measure, agree, plan, deliver and pack.

A generator. Whatever needs the other replicas is an `Ask` that it yields and whose answer it is
sent, so that the same loop runs in a thread, in a process of its own, or for all replicas of a test
in one thread. A loop that meets an error goes through the same exchanges as all others until the
next gather, where it tells them; a block that exchanges samples without it makes no step either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from odb_megatron.data.iterable import HEAD_ITEMS
from odb_megatron.data.sample import (
    BAD_RECORD_HINT,
    Sample,
    Skipped,
    SkipReason,
    TooManyBadRecordsError,
)
from odb_megatron.data.wire import (
    SampleWireError,
    StepHeader,
    decode_sample,
    encode_sample,
    pack_step,
    wire_size,
)
from odb_megatron.data.workers import Reader
from odb_megatron.errors import setting_name
from odb_megatron.plan.blocks import blocks_of, even_blocks, offered
from odb_megatron.plan.pipeline import in_best_order
from odb_megatron.plan.record import (
    HEADER,
    ROW,
    SUMMARY,
    TABLE,
    TEXT_BYTES,
    TRUNCATED,
    LoaderClosedError,
    PlanConfig,
    ReplicaFailedError,
    StepTotals,
    config_differences,
    num_patches,
)
from odb_megatron.plan.step_planner import StepPlan, plan_step

__all__ = ["Ask", "Failure", "PackedStep", "Progress", "Request", "SourceCounts", "StepLoop"]

T = TypeVar("T")
Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]
Packed = tuple[StepHeader, npt.NDArray[np.uint8], npt.NDArray[np.uint8] | None]

_MAX_ERROR = 2000
_MAX_NAMED = 3
_CONSEQUENCES = (SampleWireError.__name__, ReplicaFailedError.__name__)


@dataclass
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


@dataclass(frozen=True)
class Ask:
    """What the other replicas are needed for: a method of `comm.groups.SourceGroup`."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True)
class PackedStep:
    """A finished step as it is handed on: see `wire`.

    Attributes:
        header: of the step.
        payload: tokens, labels and loss of its micro-batches, uint8.
        pixels: patches of its images, uint8; None without any.
        progress: the loop's after it.
    """

    header: StepHeader
    payload: npt.NDArray[np.uint8]
    pixels: npt.NDArray[np.uint8] | None
    progress: Progress


@dataclass(frozen=True, slots=True)
class Failure:
    """This loop has failed: its trainer is to end, while the loop tells the others."""

    error: BaseException


Request = Ask | PackedStep | Failure
Requests = Generator[Request, Any, T]


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
        self._items: list[tuple[int, Sample | Skipped]] = []  # read in this step
        self._held: dict[int, tuple[int, Sample]] = {}  # the samples here, by slot of the table
        self._arrived: dict[int, Any] = {}  # bytes of samples from other blocks, by slot
        self._counts = [SourceCounts() for _ in range(num_sources)]
        self._num_bad, self._first_bad = start.num_bad, list[str]()
        self._closing = False
        self._error: Exception | None = None

    @property
    def progress(self) -> Progress:
        """Where the loop stands after the last step made."""
        return Progress(
            consumed=self._consumed,
            num_bad=self._num_bad,
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
                began = time.perf_counter()
                headers, table, blocks = yield from self._agree()
                if not self._num_consumed:
                    return
                slots = table["slot"][table["owner"] == self._own].tolist()
                pairs, self._items = zip(slots, self._items, strict=True), []
                self._held = {
                    slot: (number, item)
                    for slot, (number, item) in pairs
                    if isinstance(item, Sample)
                }
                if len(blocks) > 1:
                    table = yield from self._even_out(table, blocks)
                trained = table[table["tokens"] > 0]
                plan = yield from self._plan(trained)
                totals = self._attempt(self._totals, headers, table, plan)
                if len(blocks) > 1:
                    own = (totals or StepTotals()).to_bytes()
                    totals = self._attempt(StepTotals.merged, (yield from self._blocks_tell(own)))
                yield from self._deliver(trained, plan)
                packed = self._attempt(self._pack, trained, plan, totals)
                self._step += 1
                self._consumed += self._num_consumed
                self._attempt(self._count_bad, totals)
                progress = self._attempt(lambda: self.progress)
                if packed is None or progress is None:  # the others learn it in the next gather
                    assert self._error is not None
                    yield Failure(self._error)
                else:
                    header = replace(packed[0], plan_us=round((time.perf_counter() - began) * 1e6))
                    yield PackedStep(header, *packed[1:], progress)
        finally:
            self._reader.close()

    # --- read, measure, agree ------------------------------------------------------------------

    def _agree(self) -> Requests[tuple[Array, Array, Array]]:
        """Read the next global batch with all replicas.

        One round, but before the first step, and where an iterator ends inside its share: what is
        missing is read in another, by those that have not ended.

        Returns:
            `HEADER` of the block's replicas in all rounds, `TABLE` of its samples, skipped ones
            included, and `SUMMARY` of each block.
        """
        config, headers, rows, owners = self._config, [], [], []
        wanted = missing = min(config.global_batch_size, config.total - self._consumed)
        while True:
            shares = self._shares(missing if self._knows_ends else 0)
            records = yield Ask("gather", (self._record(shares[self._own], max(shares)),))
            found = np.concatenate([np.frombuffer(one, HEADER, 1) for one in records])
            counts = np.minimum(found["rows"], max(shares)).tolist()
            for owner, (record, count) in enumerate(zip(records, counts, strict=True)):
                rows.append(np.frombuffer(record, ROW, count, HEADER.itemsize))
                owners += [owner] * count
            headers.append(found)
            table = _table(np.concatenate(rows), owners)
            blocks = yield from self._summaries(found, table)
            if blocks["failed"].any() or blocks["differs"].any():
                yield from self._fail()
            if blocks["closing"].any() and (wanted or missing):
                raise LoaderClosedError("a replica has closed its loader: no further step is made")
            self._ended |= found["ended"] > 0
            self._num_live = blocks["live"].tolist()
            is_asked, self._knows_ends = self._knows_ends, True
            missing = wanted - int(blocks["rows"].sum())
            if is_asked and (missing == 0 or not any(self._num_live)):
                self._num_consumed = wanted - missing
                yield from self._compare_heads()
                return np.concatenate(headers), table, blocks

    def _shares(self, missing: int) -> list[int]:
        """Return how many samples each replica of the block reads; those without end alike."""
        live = sum(self._num_live)
        at = sum(self._num_live[: self._block_number])
        shares = []
        for ended in self._ended.tolist():
            shares.append(0 if ended else missing // live + (at < missing % live))
            at += not ended
        return shares

    def _record(self, count: int, most: int) -> bytes:
        """Read so many samples; return this replica's record, with room for the most."""
        header, rows = np.zeros(1, dtype=HEADER), np.zeros(most, dtype=ROW)
        header["config"], header["step"] = self._digest, self._step
        header["consumed"] = self._consumed
        found = None if self._closing else self._attempt(self._read, count)
        if found is not None:
            read, wait_us, header["loss_weight"] = found
            rows[: len(read)], header["rows"] = read, len(read)
            header["wait_us"] = min(wait_us, (1 << 32) - 1)
            header["ended"] = self._attempt(self._reader.has_ended) or False
        header["closing"], header["failed"] = self._closing, self._error is not None
        return header.tobytes() + rows.tobytes()

    def _read(self, count: int) -> tuple[Array, int, int]:
        """Read and measure; return `ROW` of each sample, the wait for them, the sum of weights."""
        started, weight = time.perf_counter(), 0
        items = self._reader.read(count)
        wait_us = round((time.perf_counter() - started) * 1e6)
        rows = np.zeros(len(items), dtype=ROW)
        for row, (_, item) in zip(rows, items, strict=True):
            if isinstance(item, Skipped):
                row["loss_tokens"] = item.reason
                self._counts[item.source].add_skipped(item.reason, item.message)
                if item.reason is SkipReason.BAD_RECORD:
                    first_line = item.message.partition("\n")[0]
                    self._first_bad.append(first_line.partition(BAD_RECORD_HINT)[0])
                    del self._first_bad[_MAX_NAMED:]
            else:
                patches = item.num_patches | (TRUNCATED if item.truncated else 0)
                row["tokens"], row["loss_tokens"] = len(item), item.num_loss_tokens
                row["patches"], row["bytes"] = patches, wire_size(item)
                weight += round(item.loss_weight)
        self._items += items
        return rows, wait_us, weight

    def _blocks_tell(self, record: bytes) -> Requests[list[bytes]]:
        found: list[bytes] = yield Ask("gather_blocks", (record,))
        return found

    def _summaries(self, headers: Array, table: Array) -> Requests[Array]:
        """Return a `SUMMARY` of each block."""
        own = np.zeros(1, dtype=SUMMARY)
        same = [headers[name] == headers[name][0] for name in ("config", "step", "consumed")]
        own["failed"] = headers["failed"].any() or self._error is not None
        own["closing"], own["differs"] = headers["closing"].any(), not np.all(same)
        own["config"], own["consumed"] = self._digest, self._consumed
        own["rows"] = len(table)
        own["live"] = int((~self._ended & (headers["ended"] == 0)).sum())
        if len(self._all_blocks) == 1:
            return own
        costs = self._config.cost.samples(table["tokens"].astype(np.int64), num_patches(table))
        costs = np.where(table["tokens"] > 0, costs, 0)
        own["cost"], offers = costs.sum(), offered(costs)
        row = own["offers"][0][: len(offers)]
        row["row"], row["cost"] = table[offers], costs[offers]
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

    def _count_bad(self, totals: StepTotals) -> None:
        """Count a step's bad records: all replicas count the same, so all raise in one step."""
        self._num_bad += totals.num_bad
        limit = self._config.max_bad_records
        if limit is not None and self._num_bad > limit:
            named = " | ".join(self._first_bad) or "none; other replicas name theirs"
            raise TooManyBadRecordsError(
                f"{self._num_bad} of the {self._consumed} samples consumed so far are bad records, "
                f"and {setting_name('odb_max_bad_records')} {limit} are allowed. The first of this "
                f"replica: {named}. Mend the data, or raise it"
            )

    # --- plan ----------------------------------------------------------------------------------

    def _even_out(self, table: Array, blocks: Array) -> Requests[Array]:
        """Move whole samples from heavy to light blocks; they pass through the first replicas."""
        sizes = [len(block) for block in self._all_blocks]
        costs = [one[one > 0].tolist() for one in blocks["offers"]["cost"]]
        moves = even_blocks(blocks["cost"].tolist(), sizes, costs)
        if not moves:
            return table
        by, number, to = np.array(moves).T
        moved = blocks["offers"]["row"][by, number]
        leaving = moved[by == self._block_number]
        data = yield from self._collect(leaving)
        room = max(int(moved["bytes"][by == at].sum()) for at in range(len(sizes)))
        found = yield from self._blocks_tell(data.ljust(room, b"\0"))
        stays = ~np.isin(table["slot"], leaving["slot"])
        moved["slot"], moved["owner"] = len(table) + np.arange(len(moved)), -1
        for at, part in enumerate(found):
            self._arrived |= _cut(part, moved[by == at])
        return np.concatenate([table[stays], moved[to == self._block_number]])

    def _collect(self, leaving: Array) -> Requests[bytes]:
        """Return the samples that leave the block, in this order, on its first replica."""
        parts: dict[int, Any] = {}
        if leaving["owner"].any():  # another than the first has read one
            parts = yield from self._exchange(leaving, np.zeros(len(leaving), np.int64))
        if self._own == 0:
            held = [slot for slot in leaving["slot"].tolist() if slot not in parts]
            parts |= {slot: self._attempt(self._encoded, [slot]) for slot in held}
        if self._own or self._error is not None:
            return b""  # filled with zeros, an error to whoever gets them
        return b"".join(parts[slot] for slot in leaving["slot"].tolist())

    def _planned(self, rows: Array, least: int) -> StepPlan:
        config, rule = self._config, self._rule
        tokens = rows["tokens"].astype(np.int64)
        padded = rule.padded_all(tokens)
        budget = rule.sizes[-1] if rule.sizes else config.token_budget
        return plan_step(
            padded if rule.sizes else tokens,
            num_replicas=len(self._block),
            token_budget=budget,
            sync=config.sync.value,
            alignment=config.multiple,
            patches=num_patches(rows),
            max_patches=config.max_patches or None,
            cost=config.cost,
            count_multiple=config.count_multiple,
            min_micro_batches=least,
            max_share=config.max_share,
            owner=np.maximum(rows["owner"], 0),
            solo=padded > budget,
        )

    def _plan(self, rows: Array) -> Requests[StepPlan | None]:
        """Return the block's plan of these; blocks plan again until all have as many micro-batches.

        None, with an error, where this replica cannot plan, or another block's first one.
        """
        plan = self._attempt(self._planned, rows, 1)
        while len(self._all_blocks) > 1:
            own = (plan.num_micro_batches if plan else 0).to_bytes(8, "little")
            counts = [int.from_bytes(one, "little") for one in (yield from self._blocks_tell(own))]
            if not min(counts):
                self._lose(self._all_blocks[counts.index(0)].start)
                return None
            if min(counts) == max(counts):
                break
            if plan is not None and plan.num_micro_batches < max(counts):
                plan = self._attempt(self._planned, rows, max(counts))
        return plan and self._attempt(in_best_order, plan, self._config.pipeline)

    def _totals(self, headers: Array, table: Array, plan: StepPlan) -> StepTotals:
        trained, skipped = table[table["tokens"] > 0], table[table["tokens"] == 0]
        tokens = trained["tokens"].astype(np.int64)
        index, replica = _trainers(plan)
        moved = trained[index][trained["owner"][index] != replica]
        rule, shared = self._rule, [(int(tokens[at]), k) for at, k in plan.shares.items()]
        longer = sum(rule.shared(k).padded(num) - rule.padded(num) for num, k in shared)
        is_final = self._consumed + self._num_consumed >= self._config.total
        if self._config.has_unknown_end:
            is_final = not any(self._num_live)
        return StepTotals(
            step=self._step,
            consumed_before=self._consumed,
            num_consumed=self._num_consumed,
            num_micro_batches=plan.num_micro_batches,
            num_replicas=self._config.num_replicas,
            num_samples=len(trained),
            num_left_out=len(skipped),
            num_bad=int((skipped["loss_tokens"] == SkipReason.BAD_RECORD).sum()),
            num_truncated=int((trained["patches"] >= TRUNCATED).sum()),
            num_tokens=int(tokens.sum()),
            num_padded_tokens=int(self._rule.padded_all(tokens).sum()) + longer,
            num_squared_tokens=int((tokens**2).sum()),
            num_loss_tokens=int(trained["loss_tokens"].sum()),
            loss_weight=int(headers["loss_weight"].sum()),
            num_patches=int(num_patches(trained).sum()),
            num_idle=sum(not one for row in plan.micro_batches for one in row),
            num_shared=len(shared),
            num_moved=len(moved),
            bytes_moved=int(moved["bytes"].sum()),
            cost_sum=sum(plan.costs),
            cost_max=max(plan.costs),
            wait_us=int(headers["wait_us"].max()),
            is_final=is_final,
        )

    # --- deliver and pack ----------------------------------------------------------------------

    def _deliver(self, rows: Array, plan: StepPlan | None) -> Requests[None]:
        """Hold the samples that this replica trains."""
        index, replica = _trainers(plan)
        rows, parts = rows[index], {}
        if len(self._block) > 1:  # also where nothing moves: who cannot plan does not know it
            parts = yield from self._exchange(rows, replica)
        comes = rows["slot"][(rows["owner"] < 0) & (replica == self._own)]
        parts |= {slot: self._arrived[slot] for slot in comes.tolist()}
        self._arrived = {}
        self._attempt(self._decoded, parts)

    def _exchange(self, rows: Array, to: Integers) -> Requests[dict[int, Any]]:
        """Send samples to replicas of the block; return the bytes of those that come, by slot.

        None come, with an error, where a replica of the block has failed.
        """
        own, first, owner = self._own, self._block.start, rows["owner"]
        others = [at for at in range(len(self._block)) if at != own]
        go = {at: rows["slot"][(owner == own) & (to == at)].tolist() for at in others}
        come = {at: rows[(owner == at) & (to == own)] for at in others}
        sent = {first + at: self._attempt(self._encoded, of) or b"" for at, of in go.items() if of}
        sizes = {first + at: int(of["bytes"].sum()) for at, of in come.items() if len(of)}
        found = yield Ask("exchange", (self._step, None if self._error else sent, sizes))
        parts: dict[int, Any] = {}
        for by, data in found.items():
            if data is None:
                self._lose(by)
                return {}
            parts |= _cut(data, come[by - first])
        return parts

    def _lose(self, replica: int) -> None:
        text = f"replica {replica} has failed in this step; its own output says why"
        self._error = self._error or ReplicaFailedError(text)

    def _encoded(self, slots: Sequence[int]) -> bytes:
        return b"".join(encode_sample(*self._held[slot]) for slot in slots)

    def _decoded(self, parts: Mapping[int, Any]) -> None:
        self._held |= {slot: decode_sample(part) for slot, part in parts.items()}

    def _pack(self, rows: Array, plan: StepPlan, totals: StepTotals) -> Packed:
        slots, budget, most = rows["slot"], self._config.token_budget, self._config.max_patches
        found, shares = [], []
        for row in plan.micro_batches[self._own]:
            found.append([self._held[slot] for slot in slots[[*row]].tolist()])
            width = plan.shares.get(row[0], 1) if row else 1
            shares.append((width, self._own % width))
            for _, sample in found[-1] if shares[-1][1] == 0 else ():
                is_over = self._rule.padded(len(sample)) > budget and width == 1
                self._counts[sample.source].add_sample(
                    num_tokens=len(sample),
                    num_loss_tokens=sample.num_loss_tokens,
                    truncated=sample.truncated > 0,
                    solo=is_over or sample.num_patches > most > 0,
                )
        return pack_step(totals, found, rule=self._rule, shares=shares)

    def _attempt(self, function: Callable[..., T], *args: Any) -> T | None:
        """Return what a function does; its error, or an earlier one, is told in the next gather."""
        if self._error is None:
            try:
                return function(*args)
            except Exception as error:
                self._error = error
        return None


def _table(rows: Array, owners: Sequence[int]) -> Array:
    """Return the samples that the block's replicas have read."""
    table = np.zeros(len(rows), dtype=TABLE)
    table[[*ROW.names]] = rows  # type: ignore[misc]
    table["slot"], table["owner"] = np.arange(len(rows)), owners
    return table


def _trainers(plan: StepPlan | None) -> tuple[Integers, Integers]:
    """Return each sample of a plan, by its index there, and the replica that trains it."""
    rows = [[*chain.from_iterable(row)] for row in plan.micro_batches] if plan else []
    index = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
    return index, np.repeat(np.arange(len(rows)), [len(row) for row in rows])


def _cut(data: Any, rows: Array) -> dict[int, Any]:
    """Return the bytes of each of some samples that follow each other, by slot."""
    view, begin, parts = memoryview(data), 0, {}
    for slot, size in zip(rows["slot"].tolist(), rows["bytes"].tolist(), strict=True):
        parts[slot] = view[begin : begin + size]
        begin += size
    return parts
