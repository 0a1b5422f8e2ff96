"""The data path by itself: how long a trainer waits for a step, and what the path costs.

    python benchmarks/data_path.py --json build/bench/data_path.json

Real chat data, real tokenization in worker processes, real gloo between replicas; the trainer is a
sleep of 50 ms per step. Two measurements:

1. Wait. Replicas (processes) train steps; every `next()` is timed.
2. Throughput. One replica takes steps as fast as they come, in turns with a plain DataLoader over
   the same data set with the same collate function and as many workers, and with the package
   `online-dynamic-batching` where it can be imported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from common import ChatData, chat_stream, parser_of, prepare, write_json

from odb_megatron.comm.groups import SourceGroup
from odb_megatron.data.feed import StepFeed
from odb_megatron.data.sample import Sample
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.thd import MicroBatch
from odb_megatron.data.wire import StepHeader, assemble
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.record import PlanConfig
from odb_megatron.testing.gloo import run_replicas
from odb_megatron.testing.replicas import thread_channels

try:
    import odb as reference  # type: ignore[import-not-found]
except ImportError:
    reference = None

CONTEXT, BUDGET = 4096, 8192
WARM_UP, STEP_S = 10, 0.05
CLOSE_S = 60.0


def main() -> None:
    """Measure both, print and write them."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", default="chitchat", help="chitchat, chat-mix, or a JSON file")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="of each replica")
    parser.add_argument("--share", type=int, default=4, help="samples per replica and step")
    parser.add_argument("--batch", type=int, default=32, help="the same, for the throughput")
    parser.add_argument("--steps", type=int, default=200, help="steps timed")
    parser.add_argument("--repeats", type=int, default=5, help="of each throughput, in turns")
    parser.add_argument("--samples", type=int, default=2000, help="of each throughput")
    parser.add_argument("--plan-ahead", type=int, default=2)
    args = parser.parse_args()
    data = prepare(args.data)
    setting = {name: value for name, value in vars(args).items() if name != "json"}
    result: dict[str, Any] = {"setting": setting, "sample_ms": sample_ms(data)}
    found = run_replicas(train, args.replicas, data, args, timeout_s=600.0)
    worst = max(found, key=lambda one: one["wait_fraction"])
    slowest = max(one["worst_step_wait_us"] for one in found)
    result |= {**worst, "worst_step_wait_us": slowest, "by_replica": found}
    print(
        f"wait {result['wait_fraction']:.3%} of {result['step_ms']:.1f} ms steps; next(): median "
        f"{result['p50_next_us']:.0f} µs, p99 {result['p99_next_us']:.0f} µs; worst step waited "
        f"{slowest:.0f} µs ({result['sample_ms']:.2f} ms of processor time per sample)",
        flush=True,
    )
    result |= measure_throughput(data, args)
    print(
        *(f"{name} {value}" for name, value in result.items() if "per_s" in name or "rel" in name)
    )
    write_json(args.json, result)


def sample_ms(data: ChatData) -> float:
    """Milliseconds to read, template and tokenize a sample, in one process."""
    stream = stream_of(data, num_samples=300)
    for position in range(50):
        stream.fetch(position)
    started = time.process_time()
    for position in range(50, 300):
        stream.fetch(position)
    return 1e3 * (time.process_time() - started) / 250


def stream_of(data: ChatData, *, num_samples: int) -> SampleStream:
    """Return the first samples of a random order."""
    return chat_stream(data, context=CONTEXT, budget=BUDGET, num_samples=num_samples)


def feed_of(
    data: ChatData, args: argparse.Namespace, channel: Any, *, share: int, num_samples: int
) -> StepFeed:
    """Return one replica's feed."""
    stream = stream_of(data, num_samples=num_samples)
    config = PlanConfig(
        total=num_samples,
        global_batch_size=share * channel.num_replicas,
        num_replicas=channel.num_replicas,
        token_budget=BUDGET,
        cost=CostModel.from_ratios(quadratic=1 / 8192, fixed_tokens=400),
        data=stream.fingerprint(),
    )
    loader = StepLoader(stream, config, channel=channel, num_workers=args.workers)
    return StepFeed(loader, plan_ahead=args.plan_ahead)


# --- wait ------------------------------------------------------------------------------------


def wait_figures(next_us: Sequence[Sequence[float]], total_s: float) -> dict[str, Any]:
    """Return the figures of one trainer.

    Args:
        next_us: microseconds of every `next()`, by step.
        total_s: seconds of all steps.
    """
    calls = np.array([us for step in next_us for us in step])
    steps = np.array([sum(step) for step in next_us])
    return {
        "wait_fraction": float(steps.sum() / 1e6 / total_s),
        "p50_next_us": float(np.percentile(calls, 50)),
        "p99_next_us": float(np.percentile(calls, 99)),
        "p99_step_wait_us": float(np.percentile(steps, 99)),
        "worst_step_wait_us": float(steps.max()),
        "step_ms": 1e3 * total_s / len(steps),
        "steps_over_1_ms": [[at, round(float(us))] for at, us in enumerate(steps) if us > 1000],
    }


def train(_rank: int, data: ChatData, args: argparse.Namespace) -> dict[str, Any]:
    """Take steps as a trainer would; runs in one process per replica."""
    group = SourceGroup(range(args.replicas), name="train", timeout_s=120.0)
    steps = WARM_UP + args.steps
    num_samples = 2 * steps * args.share * args.replicas
    feed = feed_of(data, args, group, share=args.share, num_samples=num_samples)
    next_us: list[list[float]] = []
    queue_bytes, starts = 0, 0.0
    (iterator,) = feed.iterators
    try:
        for step in range(steps):
            if step == WARM_UP:
                starts = time.perf_counter()
            header, took = _timed(iterator)
            assert isinstance(header, StepHeader), "the run is long enough"
            times = [took]
            for _ in range(header.totals.num_micro_batches):
                times.append(_timed(iterator)[1])
                time.sleep(STEP_S / header.totals.num_micro_batches)
            if step >= WARM_UP:
                next_us.append(times)
            queue_bytes = max(queue_bytes, int(feed.delivered["queue_bytes"]))
        figures = wait_figures(next_us, time.perf_counter() - starts)
    finally:
        feed.close(timeout_s=CLOSE_S)
    return {**figures, "queue_bytes": queue_bytes}


def _timed(iterator: Iterator[Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    item = next(iterator)
    return item, 1e6 * (time.perf_counter() - started)


# --- throughput ------------------------------------------------------------------------------


def measure_throughput(data: ChatData, args: argparse.Namespace) -> dict[str, Any]:
    """Return samples per second of the whole path and of what it is compared with."""
    ways = {"whole_path": whole_path, "dataloader": plain_dataloader}
    if reference is not None:
        ways["online_dynamic_batching"] = online_dynamic_batching
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(args.repeats):
        order = list(ways.items())
        for name, way in order if repeat % 2 else reversed(order):
            rates[name].append(way(data, args))
    result: dict[str, Any] = {
        "samples_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "samples_per_s_repeats": rates,
    }
    ours = rates.pop("whole_path")
    return result | {
        f"relative_to_{name}": statistics.median(map(float.__truediv__, ours, theirs))
        for name, theirs in rates.items()
    }


def whole_path(data: ChatData, args: argparse.Namespace) -> float:
    """Take steps of one replica as fast as they come."""
    (channel,) = thread_channels(1)
    feed = feed_of(data, args, channel, share=args.batch, num_samples=2 * args.samples)
    (iterator,) = feed.iterators
    try:
        return _rate(
            (len(item.positions) for item in iterator if isinstance(item, MicroBatch)), args
        )
    finally:
        feed.close(timeout_s=CLOSE_S)


def plain_dataloader(data: ChatData, args: argparse.Namespace) -> float:
    """Take batches of as many samples as one of our micro-batches has, collated by workers."""
    items = map(stream_of(data, num_samples=200).fetch, range(200))
    mean = statistics.mean(len(item) for item in items if isinstance(item, Sample))
    per_batch = max(1, round(BUDGET / mean))
    loader = torch.utils.data.DataLoader(
        _Samples(stream_of(data, num_samples=2 * (args.samples + per_batch))),
        batch_size=per_batch,
        num_workers=args.workers,
        collate_fn=_collate,
        multiprocessing_context="forkserver",
    )
    return _rate((len(item.positions) for item in loader), args)


def online_dynamic_batching(data: ChatData, args: argparse.Namespace) -> float:
    """Take the package's batches; its look-ahead is its default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = reference.ODBDataLoader(
            _Tensors(stream_of(data, num_samples=2 * args.samples)),
            token_budget=BUDGET,
            batch_size=1,
            shuffle=False,
            num_workers=args.workers,
            prefetch_factor=64,
            collate_fn=_padded,
        )
        return _rate((len(batch["input_ids"]) for batch in loader), args)


def _rate(counts: Iterator[int], args: argparse.Namespace) -> float:
    """Samples per second, once those of four steps have come."""
    taken = 0
    while taken < 4 * args.batch:
        taken += next(counts)
    started, before = time.perf_counter(), taken
    while taken - before < args.samples:
        taken += next(counts)
    return (taken - before) / (time.perf_counter() - started)


class _Samples(torch.utils.data.Dataset[Any]):
    """The stream's samples, as a user's data set would have them."""

    def __init__(self, stream: SampleStream) -> None:
        self._stream = stream

    def __len__(self) -> int:
        return len(self._stream)

    def __getitem__(self, position: int) -> tuple[int, Any]:
        return position, self._stream.fetch(position)


class _Tensors(_Samples):
    """The same as tensors by name, which `online-dynamic-batching` takes."""

    def __getitem__(self, position: int) -> Any:
        item = self._stream.fetch(position)
        tokens = item.tokens if isinstance(item, Sample) else np.zeros(1, dtype=np.int64)
        labels = item.labels if isinstance(item, Sample) else tokens
        return {
            "input_ids": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "attention_mask": torch.ones(len(tokens), dtype=torch.int64),
        }


def _collate(items: Sequence[tuple[int, Any]]) -> MicroBatch:
    """As our loader assembles a micro-batch."""
    found = [(position, item) for position, item in items if isinstance(item, Sample)]
    return assemble([item for _, item in found], positions=[position for position, _ in found])


def _padded(items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad and stack; the package adds entries of its own, which are no tensors."""
    names = ("input_ids", "labels", "attention_mask")
    return {
        name: torch.nn.utils.rnn.pad_sequence([item[name] for item in items], batch_first=True)
        for name in names
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
