"""Ways to form the steps of data-parallel training from sample lengths alone, and their times.

`POLICIES` maps a name to a function of a `Stream` of samples and a `Setting` that returns a
`Schedule`; `measure` gives the times of any schedule alike. docs/reports.md describes each.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from itertools import chain, repeat, zip_longest
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.blocks import blocks_of, even_blocks, offered
from odb_megatron.plan.cost import COST_UNIT, CostModel
from odb_megatron.plan.pipeline import Pipeline, in_best_order, step_times
from odb_megatron.plan.step_planner import SHARE_OVERHEAD, StepPlan, plan_step

__all__ = ["POLICIES", "REFERENCE", "Schedule", "Setting", "Stream", "Times", "bound_time"]
__all__ += [
    "dp_balanced",
    "load_figures",
    "measure",
    "odb",
    "shares_model",
    "sorted_buckets",
    "standard_safe",
]

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MicroBatches = Sequence[Sequence[int]]
Step = Sequence[MicroBatches]

BYTES_PER_TOKEN = 4
ATTENTION_SHARE, FIXED_SHARE = 0.3, 0.05
NUM_BUCKETS = 32
REFERENCE, REFERENCE_BUFFER = "online-dynamic-batching", 1024


# --- what is compared ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all policies of a simulation have in common.

    Attributes:
        num_replicas: data-parallel size.
        token_budget: most tokens of a micro-batch.
        global_batch_size: samples per step.
        cost: cost model.
        sync: where replicas wait for each other, at the end of a step or of each micro-batch.
        pipeline: how the model is cut into stages.
        max_share: most replicas that share a sample (`odb`).
        seed: of everything random.
    """

    num_replicas: int
    token_budget: int
    global_batch_size: int
    cost: CostModel
    sync: Literal["step", "microbatch"] = "step"
    pipeline: Pipeline = Pipeline()
    max_share: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        stages, chunks, group = astuple(self.pipeline)
        if chunks > 1 and stages == 1:
            raise ValueError(f"--vpp {chunks} needs a pipeline: pass --pp with at least 2 stages")
        if group and (chunks == 1 or group < stages):
            raise ValueError(f"--vpp-group {group} needs --vpp, and at least --pp {stages}")
        if self.max_share & (self.max_share - 1):
            raise ValueError(f"--share-long {self.max_share} is not a power of two")

    @property
    def samples_per_row(self) -> int:
        """Most samples of a micro-batch where a step has the fewest per replica."""
        return max(1, self.global_batch_size // (self.num_replicas * self.pipeline.count_multiple))


def shares_model(
    lengths: Integers,
    *,
    token_budget: int,
    attention: float = ATTENTION_SHARE,
    fixed: float = FIXED_SHARE,
) -> CostModel:
    """Return a cost model from shares.

    Args:
        lengths: of all samples.
        token_budget: tokens of a full micro-batch.
        attention: its share in the cost of all samples.
        fixed: per-micro-batch overhead, over the cost of a micro-batch full of average tokens.
    """
    for flag, share in (("--attention-share", attention), ("--fixed-cost", fixed)):
        if not 0 <= share < 1:
            raise ValueError(f"{flag} {share} is not in [0, 1)")
    squares = (lengths.astype(np.float64) ** 2).sum()
    quadratic = attention / (1 - attention) * float(lengths.sum() / squares)
    without = CostModel.from_ratios(quadratic=quadratic, fixed_tokens=0)
    rate = int(without.samples(lengths, np.zeros_like(lengths)).sum()) / int(lengths.sum())
    return CostModel.from_ratios(
        quadratic=quadratic, fixed_tokens=fixed * token_budget * rate / COST_UNIT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The samples of a run in Megatron's order.

    Attributes:
        lengths: tokens of the sample at each position; 0 where a position has none (bad record).
        costs: of each.
        num_epochs: the stream is so many epochs of equal size.
    """

    lengths: Integers
    costs: Integers
    num_epochs: int = 1

    @classmethod
    def of_epochs(cls, lengths: Integers, *, epochs: int, cost: CostModel, seed: int) -> Stream:
        """Repeat the samples, each epoch but the first in an order of its own."""
        random = np.random.default_rng([seed, 1])
        later = [lengths[random.permutation(len(lengths))] for _ in range(epochs - 1)]
        stream = np.concatenate([lengths, *later])
        costs = cost.samples(stream, np.zeros_like(stream))
        return cls(lengths=stream, costs=costs, num_epochs=epochs)

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class Schedule:
    """All steps of a run.

    Attributes:
        steps: stream positions as [step][replica][m]; idle micro-batches are empty.
        shares: how many replicas share a sample, by position, each of which has it.
        is_padded: each sample is computed at the length of its micro-batch's longest.
        ramp: samples at either end of the run that its start and end make untypical.
    """

    steps: Sequence[Step]
    shares: Mapping[int, int] = field(default_factory=dict)
    is_padded: bool = False
    ramp: int = 0

    def __len__(self) -> int:
        return len(self.steps)


def _dealt(
    micro_batches: MicroBatches, num_replicas: int, *, count: int, multiple: int = 1
) -> list[Step]:
    """Assign micro-batches to steps, neighbours to the replicas of one micro-batch index.

    Args:
        micro_batches: in order; idle ones fill the last step.
        num_replicas: data-parallel size.
        count: M.
        multiple: that the last step's M is a multiple of; it may be smaller.
    """
    idle = [()] * (-len(micro_batches) % (num_replicas * multiple))
    filled = [*micro_batches, *idle]
    size = count * num_replicas
    steps = [filled[start : start + size] for start in range(0, len(filled), size)]
    return [[step[replica::num_replicas] for replica in range(num_replicas)] for step in steps]


# --- time ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Times:
    """Of a schedule's steps; [steps] each, times in cost units.

    Attributes:
        counts: M.
        samples: samples; a shared one counts once.
        work: cost of the samples at their own lengths.
        tokens: of the samples.
        computed: tokens computed, padding included.
        over_budget: micro-batches that compute more tokens than the budget.
        shared: samples that several replicas share.
        bytes_moved: payload of samples trained elsewhere than on the replica that reads them.
        step: its time under the setting's sync.
        pipeline: that of the slowest replica's stages; `step` without a pipeline.
        balance_step: mean over largest cost of the replicas.
        balance_microbatch: the same per micro-batch index, weighted by its time.
        costs: of each micro-batch, overhead included, [replicas, M] each.
        steady: the steps without the first and last global batch, or ramp.
    """

    counts: Integers
    samples: Integers
    work: Floats
    tokens: Floats
    computed: Integers
    over_budget: Integers
    shared: Floats
    bytes_moved: Integers
    step: Floats
    pipeline: Floats
    balance_step: Floats
    balance_microbatch: Floats
    costs: list[Floats]
    steady: slice


def measure(schedule: Schedule, stream: Stream, setting: Setting) -> Times:
    """Return the times of all steps."""
    num = setting.num_replicas
    counts = np.array([len(step[0]) for step in schedule.steps])
    batches = [batch for step in schedule.steps for row in step for batch in row]
    sizes = np.array(list(map(len, batches)))
    positions = np.fromiter(chain.from_iterable(batches), dtype=np.int64)
    lengths, own = stream.lengths[positions], stream.costs[positions]
    parts = np.array([schedule.shares.get(position, 1) for position in positions.tolist()])
    is_shared = parts > 1
    starts = np.append(0, np.cumsum(sizes))  # of micro-batches in the samples
    bounds = np.append(0, np.cumsum(counts * num))  # of steps in the micro-batches
    of_step = starts[bounds]
    if schedule.is_padded:
        longest, filled = np.zeros_like(sizes), np.flatnonzero(sizes)
        if len(filled):
            longest[filled] = np.maximum.reduceat(lengths, starts[filled])
        computed = longest * sizes
        costs = setting.cost.samples(longest, np.zeros_like(longest)) * sizes
    else:
        # A part of a shared sample is a zigzag pair of pieces.
        taken = np.where(is_shared, -(-lengths // (2 * parts)) * 2, lengths)
        costs = np.where(is_shared, -(-own * (100 + SHARE_OVERHEAD) // (100 * parts)), own)
        computed, costs = _sums(taken, starts), _sums(costs, starts)
    flat = np.split((costs + setting.cost.fixed).astype(np.float64), bounds[1:-1])
    spent = [step.reshape(num, -1) for step in flat]
    slowest = np.array([step.sum(axis=1).max() for step in spent])
    highest = np.array([step.max(axis=0).sum() for step in spent])  # of each micro-batch index
    even = np.array([step.sum() / num for step in spent])
    time = slowest if setting.sync == "step" else highest
    in_stages = time
    if setting.pipeline.stages > 1:
        whole = 3 * setting.pipeline.stages * setting.pipeline.chunks  # time of a unit of cost
        in_stages = np.array([step_times(step, setting.pipeline).max() / whole for step in spent])
    trained_by = np.concatenate([np.repeat(np.arange(num), count) for count in counts])
    read_by = positions % setting.global_batch_size % num
    moves = (np.repeat(trained_by, sizes) != read_by) & (not schedule.is_padded)
    samples = np.rint(_sums(1 / parts, of_step)).astype(np.int64)
    depth, ends = max(setting.global_batch_size, schedule.ramp), np.cumsum(samples)
    first = int(np.searchsorted(ends - samples, depth, side="left"))
    last = int(np.searchsorted(ends, len(stream) - depth, side="right"))
    return Times(
        counts=counts,
        samples=samples,
        work=_sums(own / parts, of_step),
        tokens=_sums(lengths / parts, of_step),
        computed=_sums(computed, bounds),
        over_budget=_sums((computed > setting.token_budget).astype(np.int64), bounds),
        shared=_sums(is_shared / parts, of_step),
        bytes_moved=_sums(BYTES_PER_TOKEN * -(-lengths // parts) * moves, of_step),
        step=time,
        pipeline=in_stages,
        balance_step=np.divide(even, slowest, out=np.ones_like(even), where=slowest > 0),
        balance_microbatch=np.divide(even, highest, out=np.ones_like(even), where=highest > 0),
        costs=spent,
        steady=slice(first, last) if last > first else slice(0, 0),
    )


def _sums(values: npt.NDArray[Any], starts: Integers) -> npt.NDArray[Any]:
    """Return the sum of each stretch from one start to the next."""
    found: npt.NDArray[Any] = np.diff(np.append(0, np.cumsum(values))[starts])
    return found


def bound_time(*, work: float, tokens: float, setting: Setting) -> float:
    """Return the time below which no schedule can stay.

    All samples' cost and the overhead of ceil(tokens / budget) micro-batches, shared evenly.
    """
    fewest = math.ceil(round(tokens) / setting.token_budget)
    return (work + fewest * setting.cost.fixed) / setting.num_replicas


def load_figures(times: Times, setting: Setting, span: slice = slice(None)) -> dict[str, Any]:
    """Return how full the micro-batches of some steps are, and how many there are."""
    tokens, computed = float(times.tokens[span].sum()), int(times.computed[span].sum())
    counts = times.counts[span]
    room = int(counts.sum()) * setting.num_replicas * setting.token_budget
    return {
        "fill": tokens / room,
        "padding_fraction": max(0.0, 1 - tokens / computed) if computed else None,
        "over_budget": int(times.over_budget[span].sum()),
        "mean_M": float(counts.mean()),
        "bytes_moved_per_step": float(times.bytes_moved[span].mean()),
    }


# --- policies --------------------------------------------------------------------------------


def odb(stream: Stream, setting: Setting, *, is_ordered: bool = True) -> Schedule:
    """Return what training runs: the next global batch, planned by `plan_step` in each block.

    Replicas plan in blocks; each has read every `num_replicas`-th sample of the global batch. Some
    samples move between blocks first. Blocks plan again until all have the same M. Then the micro-
    batches of each are put in order for the pipeline.
    """
    num, batch_size = setting.num_replicas, setting.global_batch_size
    blocks = blocks_of(num)
    steps, shares = list[Step](), dict[int, int]()

    def plan(table: Integers, block: range, least: int) -> StepPlan:
        lengths, owner = stream.lengths[table], table % batch_size % num - block.start
        return plan_step(
            lengths,
            num_replicas=len(block),
            token_budget=setting.token_budget,
            sync=setting.sync,
            cost=setting.cost,
            count_multiple=setting.pipeline.count_multiple,
            min_micro_batches=least,
            max_share=setting.max_share,
            owner=np.where((owner < 0) | (owner >= len(block)), 0, owner),
            solo=lengths > setting.token_budget if setting.max_share == 1 else None,
        )

    for start in range(0, len(stream), batch_size):
        batch = np.arange(start, min(start + batch_size, len(stream)))
        batch = batch[np.argsort(batch % batch_size % num, kind="stable")]  # as gathered
        tables = [batch[np.isin(batch % batch_size % num, block)] for block in blocks]
        tables = [table[stream.lengths[table] > 0] for table in _evened(tables, blocks, stream)]
        plans = list(map(plan, tables, blocks, [1] * len(blocks)))
        while len(counts := {found.num_micro_batches for found in plans}) > 1:
            plans = [
                plan(table, block, max(counts)) if own.num_micro_batches < max(counts) else own
                for table, block, own in zip(tables, blocks, plans, strict=True)
            ]
        if is_ordered:
            plans = [in_best_order(own, setting.pipeline) for own in plans]
        step: list[MicroBatches] = []
        for table, own in zip(tables, plans, strict=True):
            names = table.tolist()
            step += [[[names[i] for i in batch] for batch in row] for row in own.micro_batches]
            shares |= {names[index]: share for index, share in own.shares.items()}
        steps.append(step)
    return Schedule(steps, shares)


def _evened(tables: list[Integers], blocks: list[range], stream: Stream) -> list[Integers]:
    """Move samples from heavy to light blocks, as training does."""
    offers = [table[offered(stream.costs[table])] for table in tables]
    costs = [[cost for cost in stream.costs[own].tolist() if cost] for own in offers]
    sums = [int(stream.costs[table].sum()) for table in tables]
    for block, number, to in even_blocks(sums, list(map(len, blocks)), costs):
        sample = offers[block][number]
        tables[block] = tables[block][tables[block] != sample]
        tables[to] = np.append(tables[to], sample)
    return tables


def _packed(
    pack: Callable[[Sequence[int], int], list[list[int]]], stream: Stream, setting: Setting
) -> Schedule:
    """Pack each global batch into bins; bin `k * replicas + r` is micro-batch k of replica r.

    Samples move from the last bins into bins of their own until the number of bins is a multiple of
    the replicas (times the group size under virtual pipelining).
    """
    num, steps = setting.num_replicas, list[Step]()
    multiple = num * setting.pipeline.count_multiple
    for start in range(0, len(stream), setting.global_batch_size):
        batch = stream.lengths[start : start + setting.global_batch_size]
        filled = np.flatnonzero(batch)
        bins = pack(batch[filled].tolist(), setting.token_budget)
        index = len(bins) - 1
        while len(bins) % multiple and index >= 0:
            if len(bins[index]) > 1:
                bins.append([bins[index].pop()])
            else:
                index -= 1
        # Upstream stops where there are too few samples; here empty bins are added.
        bins += [[] for _ in range(-len(bins) % multiple or multiple * (not bins))]
        positions = [(start + filled[slots]).tolist() if slots else [] for slots in bins]
        steps += _dealt(positions, num, count=len(bins) // num)
    return Schedule(steps)


def dp_balanced(stream: Stream, setting: Setting) -> Schedule:
    """Return Megatron's `dp_balanced` (`DpBalancedScheduler`, core/datasets/data_schedule.py)."""

    def next_fit(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
        bins: list[list[int]] = []
        room = -1
        for slot, length in enumerate(lengths):
            if not bins or length > room:
                bins.append([])
                room = token_budget
            bins[-1].append(slot)
            room -= length
        return bins

    return _packed(next_fit, stream, setting)


def ffd(stream: Stream, setting: Setting) -> Schedule:
    """Return first-fit decreasing per global batch, as SkyRL and NeMo-RL pack."""

    def first_fit_decreasing(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
        bins: list[list[int]] = []
        rooms = np.full(len(lengths), token_budget)
        for slot in sorted(range(len(lengths)), key=lambda slot: -lengths[slot]):
            fits = np.flatnonzero(rooms[: len(bins)] >= lengths[slot])
            at = int(fits[0]) if len(fits) else len(bins)
            if at == len(bins):
                bins.append([])
            bins[at].append(slot)
            rooms[at] -= lengths[slot]
        return bins

    return _packed(first_fit_decreasing, stream, setting)


def standard_safe(stream: Stream, setting: Setting) -> Schedule:
    """Return the stream in order in padded fixed batches whose worst case fits the budget.

    Of the sizes that fit the fastest is taken; a step is no larger than the global batch size.
    """
    share, multiple = setting.samples_per_row, setting.pipeline.count_multiple
    most = min(share, max(1, setting.token_budget // int(stream.lengths.max())))
    found = []
    for size in (most, *(1 << bits for bits in range(most.bit_length()))):
        even = share // -(-share // size)  # equal parts of a replica's share, where that is nearer
        size = even if share // even * even > share // size * size else size
        batches = [range(at, min(at + size, len(stream))) for at in range(0, len(stream), size)]
        count = share // size * multiple
        steps = _dealt(batches, setting.num_replicas, count=count, multiple=multiple)
        found.append(Schedule(steps, is_padded=True))
    return min(found, key=lambda schedule: measure(schedule, stream, setting).pipeline.sum())


def sorted_buckets(stream: Stream, setting: Setting) -> Schedule:
    """Return padded micro-batches from buckets of like lengths, all known beforehand.

    An epoch's samples fall into `NUM_BUCKETS` buckets of equal number, in random order, and are
    cut into micro-batches, longest * number <= budget; groups of one per replica, of like lengths,
    are in random order. Micro-batches are cut to an equal part of a replica's share of the global
    batch size where that comes nearer to it than what the budget holds.
    """
    num, num_samples = setting.num_replicas, int(np.count_nonzero(stream.lengths))
    share, multiple = setting.samples_per_row, setting.pipeline.count_multiple
    whole = _bucketed(stream, setting, most=num_samples)
    parts = max(1, math.ceil(share * len(whole) / num_samples))

    def fit(batches: list[list[int]]) -> tuple[float, int]:
        """Return how near to the global batch size steps come, 5 % above it at most, and M."""
        rows = max(1, math.floor(1.05 * share * len(batches) / num_samples))
        ratio = rows * num_samples / len(batches) / share
        return min(ratio, 1 / ratio), rows * multiple

    cut = _bucketed(stream, setting, most=max(1, share // parts))
    dealt = max((whole, cut), key=lambda batches: fit(batches)[0])
    steps = _dealt(dealt, num, count=fit(dealt)[1], multiple=multiple)
    return Schedule(steps, is_padded=True)


def _bucketed(stream: Stream, setting: Setting, *, most: int) -> list[list[int]]:
    random = np.random.default_rng([setting.seed, 3])
    num, lengths = setting.num_replicas, stream.lengths
    dealt: list[list[int]] = []
    for positions in np.split(np.arange(len(stream)), stream.num_epochs):
        filled = positions[lengths[positions] > 0]
        order = filled[np.argsort(-lengths[filled], kind="stable")]
        batches: list[list[int]] = []
        for bucket in np.array_split(order, NUM_BUCKETS):
            longest = room = 0
            for position in random.permutation(bucket).tolist():
                longest = max(longest, int(lengths[position]))
                if not room or longest * (len(batches[-1]) + 1) > setting.token_budget:
                    batches.append([])
                    longest, room = int(lengths[position]), most
                batches[-1].append(position)
                room -= 1
        whole = len(batches) // num * num
        for first in random.permutation(range(0, whole, num)).tolist():
            dealt += batches[first : first + num]
        rest = batches[whole:]
        dealt += rest + [[]] * (-len(rest) % num)
    return dealt


def odb_reference(stream: Stream, setting: Setting) -> Schedule:
    """Return the groups of the package `online-dynamic-batching`: join mode, its defaults.

    N threads run the package's own `collate_loop_odb`, which calls its `grouping_data`; only the
    queues and the all-gather are replaced by ones within the process. A replica's shard is every
    N-th position. Each group is a padded micro-batch; a step takes so many that it holds the
    global batch size most nearly. A replica that ends early idles.

    Raises:
        ImportError: the package is missing; with the command that installs it.
    """
    try:
        modules: list[Any] = [importlib.import_module(f"odb.{n}") for n in ("collate", "grouping")]
    except ImportError as error:
        raise ImportError(f"not importable ({error}): pip install {REFERENCE}==0.1.2") from error
    num, multiple = setting.num_replicas, setting.pipeline.count_multiple
    groups: list[list[list[int]]] = [[] for _ in range(num)]
    slots: list[Any] = [None] * num
    barrier, own = threading.Barrier(num), threading.local()

    def gather(output: Any, value: Any, *, group: object = None) -> None:
        slots[own.rank] = value
        barrier.wait()
        for rank, part in enumerate(output.view(num, -1)):
            part.copy_(slots[rank])
        barrier.wait()

    def run(replica: int) -> None:
        own.rank = replica
        shard = range(replica, len(stream), num)
        pairs = [(position, int(stream.lengths[position])) for position in shard]
        samples = ([{"input_ids": (0,) * num, "position": at}] for at, num in pairs if num)
        items = chain(enumerate(samples), repeat((len(pairs), None)))

        def put(item: tuple[int, Any], timeout: float | None = None) -> None:
            if isinstance(item[1], dict):  # else an idle slot
                groups[replica].append(item[1]["positions"])

        try:
            modules[0].collate_loop_odb(
                SimpleNamespace(get=lambda timeout=None: next(items)),
                SimpleNamespace(put=put),
                lambda batch: {"positions": [sample["position"] for sample in batch]},
                REFERENCE_BUFFER,
                setting.token_budget,
                threading.Event(),
                join_mode=True,
            )
        except BaseException:
            barrier.abort()
            raise

    dist: SimpleNamespace = SimpleNamespace(
        distributed_c10d=SimpleNamespace(),
        is_initialized=lambda: True,
        new_group=lambda **_: dist,
        destroy_process_group=lambda group: None,
        get_world_size=lambda group=None: num,
        get_rank=lambda group=None: own.rank,
        all_gather_into_tensor=gather,
    )
    torch, before = modules[0].torch, [module.dist for module in modules]
    num_threads, sharing = torch.get_num_threads(), torch.multiprocessing.get_sharing_strategy()
    try:
        for module in modules:
            module.dist = dist
        with ThreadPoolExecutor(num) as pool:
            list(pool.map(run, range(num)))
    finally:
        for module, old in zip(modules, before, strict=True):
            module.dist = old
        torch.set_num_threads(num_threads)
        torch.multiprocessing.set_sharing_strategy(sharing)
    dealt: list[list[int]] = [group or [] for row in zip_longest(*groups) for group in row]
    mean = max(1.0, sum(map(len, dealt)) / max(1, sum(map(len, groups))))
    rows = max(1, round(setting.global_batch_size / (num * mean * multiple)))
    steps = _dealt(dealt, num, count=rows * multiple, multiple=multiple)
    return Schedule(steps, is_padded=True, ramp=REFERENCE_BUFFER * num)


POLICIES: dict[str, Callable[[Stream, Setting], Schedule]] = {
    "standard-safe": standard_safe,
    "sorted-bucketed": sorted_buckets,
    "odb-reference": odb_reference,
    "dp-balanced": dp_balanced,
    "ffd": ffd,
    "odb": odb,
}
