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
import importlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import prepare

from odb_megatron.comm.groups import SourceGroup
from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.feed import StepFeed
from odb_megatron.data.order import PassOrder
from odb_megatron.data.sample import Sample, SampleRules
from odb_megatron.data.sources import ChatSource
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream, SourcePart
from odb_megatron.data.thd import MicroBatch
from odb_megatron.data.tokenizer import load_tokenizer
from odb_megatron.data.wire import StepHeader, assemble
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.record import PlanConfig
from odb_megatron.testing.gloo import run_replicas
from odb_megatron.testing.replicas import thread_channels

CONTEXT = 4096
BUDGET = 8192
CLOSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    Attributes:
        path: chat file.
        tokenizer: its tokenizer's folder.
        replicas: processes of the first measurement.
        workers: worker processes of each replica.
        share: samples per replica and step.
        steps: steps timed.
        warm_up: steps before them.
        step_s: seconds the trainer takes for a step.
        plan_ahead: see `StepFeed`.
    """

    path: str
    tokenizer: str
    replicas: int
    workers: int
    share: int
    steps: int
    warm_up: int
    step_s: float
    plan_ahead: int


def main() -> None:
    """Measure both, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
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
    setting = Setting(
        path=str(data.path),
        tokenizer=str(data.tokenizer),
        replicas=args.replicas,
        workers=args.workers,
        share=args.share,
        steps=args.steps,
        warm_up=10,
        step_s=0.05,
        plan_ahead=args.plan_ahead,
    )
    result: dict[str, Any] = {"setting": asdict(setting), "sample_ms": sample_ms(setting)}
    result |= measure_wait(setting)
    print(_wait_line(result), flush=True)
    larger = replace(setting, share=args.batch)
    result |= measure_throughput(larger, repeats=args.repeats, num_samples=args.samples)
    print(_throughput_line(result), flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


# --- wait ------------------------------------------------------------------------------------


def measure_wait(setting: Setting) -> dict[str, Any]:
    """Return how long trainers waited, of the replica where it was longest."""
    found = run_replicas(_train, setting.replicas, setting, timeout_s=600.0)
    worst = max(found, key=lambda one: one["wait_fraction"])
    slowest = max(one["worst_step_wait_us"] for one in found)
    return {**worst, "worst_step_wait_us": slowest, "by_replica": found}


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


def _train(rank: int, setting: Setting) -> dict[str, Any]:
    """Take steps as a trainer would; runs in one process per replica."""
    del rank
    replicas = list(range(setting.replicas))
    group = SourceGroup(replicas, name="train", timeout_s=120.0)
    steps = setting.warm_up + setting.steps
    feed = _feed(setting, group, num_samples=2 * steps * setting.share * setting.replicas)
    next_us: list[list[float]] = []
    queue_bytes, starts = 0, 0.0
    (iterator,) = feed.iterators
    try:
        for step in range(steps):
            if step == setting.warm_up:
                starts = time.perf_counter()
            times = [_timed(iterator)]
            header = times[0][0]
            assert isinstance(header, StepHeader), "the run is long enough"
            for _ in range(header.totals.num_micro_batches):
                times.append(_timed(iterator))
                time.sleep(setting.step_s / header.totals.num_micro_batches)
            if step >= setting.warm_up:
                next_us.append([us for _, us in times])
            queue_bytes = max(queue_bytes, feed.delivered["queue_bytes"])
        figures = wait_figures(next_us, time.perf_counter() - starts)
    finally:
        feed.close(timeout_s=CLOSE_S)
    return {**figures, "queue_bytes": queue_bytes}


def _timed(iterator: Iterator[Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    item = next(iterator)
    return item, 1e6 * (time.perf_counter() - started)


# --- throughput ------------------------------------------------------------------------------


def measure_throughput(setting: Setting, *, repeats: int, num_samples: int) -> dict[str, Any]:
    """Return samples per second of the whole path and of what it is compared with."""
    ways = {"whole_path": whole_path, "dataloader": plain_dataloader}
    if _reference() is not None:
        ways["online_dynamic_batching"] = online_dynamic_batching
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        order = list(ways.items())
        for name, way in order if repeat % 2 else reversed(order):
            rates[name].append(way(setting, num_samples=num_samples))
    ratios = {
        name: [ours / theirs for ours, theirs in zip(rates["whole_path"], rates[name], strict=True)]
        for name in ways
        if name != "whole_path"
    }
    result: dict[str, Any] = {
        "samples_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "samples_per_s_repeats": rates,
    }
    return result | {
        f"relative_to_{name}": statistics.median(found) for name, found in ratios.items()
    }


def whole_path(setting: Setting, *, num_samples: int) -> float:
    """Take steps of one replica as fast as they come."""
    feed = _feed(setting, thread_channels(1)[0], num_samples=2 * num_samples)
    (iterator,) = feed.iterators
    try:
        counts = (len(item.positions) for item in iterator if isinstance(item, MicroBatch))
        return _rate(counts, num_samples=num_samples, warm_up=4 * setting.share)
    finally:
        feed.close(timeout_s=CLOSE_S)


def plain_dataloader(setting: Setting, *, num_samples: int) -> float:
    """Take batches of as many samples as one of our micro-batches has, collated by workers."""
    per_batch = _per_micro_batch(_stream(setting, num_samples=200))
    stream = _stream(setting, num_samples=2 * (num_samples + per_batch))
    loader = torch.utils.data.DataLoader(
        _Samples(stream),
        batch_size=per_batch,
        num_workers=setting.workers,
        collate_fn=_collate,
        multiprocessing_context="forkserver",
    )
    counts = (len(item.positions) for item in loader)
    return _rate(counts, num_samples=num_samples, warm_up=4 * setting.share)


def online_dynamic_batching(setting: Setting, *, num_samples: int) -> float:
    """Take the package's batches; its look-ahead is its default."""
    odb = _reference()
    stream = _stream(setting, num_samples=2 * num_samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = odb.ODBDataLoader(
            _Tensors(stream),
            token_budget=BUDGET,
            batch_size=1,
            shuffle=False,
            num_workers=setting.workers,
            prefetch_factor=64,
            collate_fn=_padded,
        )
        counts = (len(batch["input_ids"]) for batch in loader)
        return _rate(counts, num_samples=num_samples, warm_up=4 * setting.share)


def _rate(counts: Iterator[int], *, num_samples: int, warm_up: int) -> float:
    """Samples per second between the first `warm_up` samples and the rest."""
    taken = 0
    while taken < warm_up:
        taken += next(counts)
    started, before = time.perf_counter(), taken
    while taken - before < num_samples:
        taken += next(counts)
    return (taken - before) / (time.perf_counter() - started)


def _per_micro_batch(stream: SampleStream) -> int:
    lengths = [len(item) for item in map(stream.fetch, range(200)) if isinstance(item, Sample)]
    return max(1, round(BUDGET / statistics.mean(lengths)))


def _reference() -> Any:
    try:
        return importlib.import_module("odb")
    except ImportError:
        return None


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


# --- both ------------------------------------------------------------------------------------


def sample_ms(setting: Setting) -> float:
    """Milliseconds to read, template and tokenize a sample, in one process."""
    stream = _stream(setting, num_samples=300)
    for position in range(50):
        stream.fetch(position)
    started = time.process_time()
    for position in range(50, 300):
        stream.fetch(position)
    return 1e3 * (time.process_time() - started) / 250


def _feed(setting: Setting, channel: Any, *, num_samples: int) -> StepFeed:
    stream = _stream(setting, num_samples=num_samples)
    config = PlanConfig(
        total=num_samples,
        global_batch_size=setting.share * channel.num_replicas,
        num_replicas=channel.num_replicas,
        token_budget=BUDGET,
        cost=CostModel.from_ratios(quadratic=1 / 8192, fixed_tokens=400),
        data=stream.fingerprint(),
    )
    loader = StepLoader(stream, config, channel=channel, num_workers=setting.workers)
    return StepFeed(loader, plan_ahead=setting.plan_ahead)


def _stream(setting: Setting, *, num_samples: int) -> SampleStream:
    rules = SampleRules(
        context=CONTEXT,
        token_budget=BUDGET,
        multiple=1,
        overlong=OverlongPolicy.TRUNCATE,
        skip_bad=True,
    )
    renderer = ChatRenderer(load_tokenizer(setting.tokenizer))
    source = ChatSource(setting.path, rules=rules, renderer=renderer)
    order = PassOrder(np.arange(len(source)), seed=1)
    return SampleStream([SourcePart(source=source, order=order)], num_samples=num_samples)


def _wait_line(result: dict[str, Any]) -> str:
    return (
        f"wait {result['wait_fraction']:.3%} of {result['step_ms']:.1f} ms steps; next(): median "
        f"{result['p50_next_us']:.0f} µs, p99 {result['p99_next_us']:.0f} µs; worst step waited "
        f"{result['worst_step_wait_us']:.0f} µs ({result['sample_ms']:.2f} ms of processor time "
        "per sample)"
    )


def _throughput_line(result: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in result["samples_per_s"].items())
    ratios = ", ".join(
        f"{name.removeprefix('relative_to_')} {value:.3f}"
        for name, value in result.items()
        if name.startswith("relative_to_")
    )
    return f"samples/s: {rates}; the whole path relative to {ratios}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
