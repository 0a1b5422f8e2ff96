"""What the data side takes from a trainer thread that only launches work.

    python benchmarks/interference.py --json build/bench/interference.json

The trainer thread runs a loop of pure Python, which needs the interpreter's lock all the time, as
launching kernels does. In turns it runs alone, and beside the data side of one of 64 replicas at
full speed: real chat data tokenized in worker processes, a step of 2048 samples planned for 64
replicas, samples received from the others, packed and handed over. The trainer takes each step as
soon as it is ready; the time it takes steps in is left out, and reported as `take_share`. Trainer
and data side each have a core, so that only the lock and memory are shared; `slowdown` is the
median over pairs of turns of the loop's rate alone over its rate beside the data side, minus 1.
`thread_s` is the CPU time of the data side's thread for a step, which bounds what it can take.
The other replicas' records and samples are synthetic here, since their loops run elsewhere.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from common import ChatData, chat_stream, parser_of, prepare, write_json

from odb_megatron.data.feed import StepFeed
from odb_megatron.data.sample import Sample
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.wire import encode_sample
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.record import HEADER, ROW, PlanConfig

REPLICAS, SHARE = 64, 32
CONTEXT, BUDGET = 4096, 8192


class SyntheticPeers:
    """A `step_loader.Channel` to replicas that always answer at once.

    All samples of one of them are equal, so that what it sends follows from the number of bytes.
    """

    def __init__(self) -> None:
        self.replica, self.num_replicas = 0, REPLICAS
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(6.0, 0.8, REPLICAS), 1, CONTEXT).astype(int).tolist()
        samples = [encode_sample(0, _sample(length)) for length in lengths]
        self._samples = samples
        self._rows = [
            np.array([(length, length, 0, len(data))] * SHARE, dtype=ROW).tobytes()
            for length, data in zip(lengths, samples, strict=True)
        ]

    def gather(self, record: bytes) -> list[bytes]:
        """Answer with the own header and rows of each replica's own."""
        header = record[: HEADER.itemsize]
        return [record, *(header + rows for rows in self._rows[1:])]

    def gather_blocks(self, record: bytes) -> list[bytes]:
        """There is one block."""
        return [record]

    def gather_all(self, record: bytes) -> list[bytes]:
        """Everybody has the same to say."""
        return [record] * REPLICAS

    def exchange(
        self, step: int, sends: Mapping[int, bytes] | None, receives: Mapping[int, int]
    ) -> dict[int, bytes]:
        """Answer with as many samples as are expected."""
        del step, sends
        own = self._samples
        return {peer: own[peer] * (size // len(own[peer])) for peer, size in receives.items()}

    def close(self) -> None:
        """Nothing is open."""


def _sample(length: int) -> Sample:
    ids = np.arange(length + 1, dtype=np.int64)
    return Sample(tokens=ids[:-1], labels=ids[1:], loss_mask=np.ones(length, dtype=np.float32))


class Trainer:
    """The loop, and the steps it takes.

    Args:
        feed: the data side; None while the loop runs alone.
    """

    def __init__(self, feed: StepFeed | None) -> None:
        self._feed = feed
        self._items: Any = None if feed is None else feed.iterators[0]
        self.steps = 0
        self.take_s = 0.0

    def rate(self, seconds: float) -> float:
        """Run for so long; return loops per second outside of taking steps."""
        took, count, value = 0.0, 0, 1
        while took < seconds:
            started = time.perf_counter()
            for _ in range(20_000):
                value = (value * 1103515245 + 12345) & 0x7FFFFFFF
            took += time.perf_counter() - started
            count += 20_000
            if self._feed is not None and self._feed.num_ready:
                self.take()
        return count / took

    def take(self) -> None:
        """Take a step."""
        started = time.perf_counter()
        header = next(self._items)
        for _ in header.positions:
            next(self._items)
        self.take_s += time.perf_counter() - started
        self.steps += 1


def measure(data: ChatData, *, workers: int, seconds: float, pairs: int) -> dict[str, Any]:
    """Return the benchmark's figures."""
    cores = sorted(os.sched_getaffinity(0))
    stream = chat_stream(data, context=CONTEXT, budget=BUDGET, num_samples=1 << 30)
    config = PlanConfig(
        total=1 << 30,
        global_batch_size=REPLICAS * SHARE,
        num_replicas=REPLICAS,
        token_budget=BUDGET,
        cost=CostModel.from_ratios(quadratic=1e-4, fixed_tokens=0.05 * BUDGET),
    )
    os.sched_setaffinity(0, set(cores[1:]) or set(cores))  # processes started now stay there
    peers = SyntheticPeers()
    feed = StepFeed(
        StepLoader(stream, config, channel=cast(Any, peers), num_workers=workers), plan_ahead=2
    )
    beside, alone = Trainer(feed), Trainer(None)
    beside.take()
    beside.take_s, beside.steps = 0.0, 0  # processes start with the first
    _wait_until_full(feed)
    os.sched_setaffinity(0, {cores[0]})
    for thread in threading.enumerate():
        if thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, {cores[0]})
    ratios, rates, wall = [], [], 0.0
    before_s = _thread_s()
    for _ in range(pairs):
        single = alone.rate(seconds)  # the data side waits for room
        started = time.perf_counter()
        both = beside.rate(seconds)
        wall += time.perf_counter() - started
        ratios.append(single / both - 1.0)
        rates.append(single)
        _wait_until_full(feed)
    steps, thread_s = beside.steps, _thread_s() - before_s
    feed.close(timeout_s=30.0)
    return {
        "slowdown": statistics.median(ratios),
        "slowdown_pairs": ratios,
        "loops_per_s": statistics.median(rates),
        "steps_per_s": steps / wall,
        "samples_planned_per_s": steps * REPLICAS * SHARE / wall,
        "take_share": beside.take_s / wall,
        "thread_s": thread_s / steps,
        "workers": workers,
        "cores": len(cores),
    }


def _thread_s() -> float:
    """CPU seconds of the thread that makes steps: all that it can take from the trainer's."""
    found = [one.ident for one in threading.enumerate() if one.name == "the step queue"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(one)) for one in found if one)


def _wait_until_full(feed: StepFeed) -> None:
    while feed.num_ready < 2:
        time.sleep(0.05)
    time.sleep(0.3)  # workers fetch ahead


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", default="chitchat", help="chitchat, chat-mix, or a JSON file")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    data, options = prepare(args.data), {"seconds": args.seconds, "pairs": args.pairs}
    found = measure(data, workers=args.workers, **options)
    print(
        f"slowdown {found['slowdown']:.2%} at {found['steps_per_s']:.1f} steps/s "
        f"({found['samples_planned_per_s']:.0f} samples planned per second)"
    )
    write_json(args.json, found)


if __name__ == "__main__":
    main()
