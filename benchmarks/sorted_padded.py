"""A pretrain script for length-sorted padded batches, all lengths known beforehand: no ODB.

Takes Megatron's flags as examples/pretrain_gpt_odb.py does, and `--sorted-token-budget`. The data
is read once to learn all lengths and again while training, so that reading is in a step's time as
for the other variants.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from odb_megatron.data.sample import Sample, Skipped
from odb_megatron.data.stream import PaddedDataset
from odb_megatron.data.wire import StepHeader
from odb_megatron.megatron.hooks import REPLACED, Hooks
from odb_megatron.megatron.run import OdbRun
from odb_megatron.megatron.setup import parse_and_validate_args
from odb_megatron.plan.record import StepTotals

Round = tuple[tuple[int, ...], ...]
"""One micro-batch of stream positions for each replica."""

Step = list[Round]
"""`step[m][replica]` is that replica's micro-batch m."""


_ZERO: tuple[str, ...] = (
    "num_left_out",
    "num_bad",
    "num_patches",
    "num_idle",
    "num_moved",
    "bytes_moved",
)
_ZERO += ("wait_us",)


class SortedRun(OdbRun):
    """The padded baseline's run with its train data in sorted batches of varying size.

    Steps come with a header, as packed ones do, so that every step has its own M and the counters
    follow its samples.
    """

    def __init__(self, args: argparse.Namespace, *, token_budget: int) -> None:
        super().__init__(args)
        self._token_budget = token_budget
        self._hooks = Hooks(self, packed=True)

    def _make_provider(self) -> Callable[..., tuple[Any, Any, Any]]:
        base = super()._make_provider()

        def provider(sizes: Sequence[int | None], vp_stage: int | None = None) -> Any:
            train, _, _ = base(sizes, vp_stage)
            return self._sorted_items(train), None, None

        provider.is_distributed = True  # type: ignore[attr-defined]  # every rank builds its data
        return provider

    def _sorted_items(self, dataset: PaddedDataset) -> Iterator[Any]:
        args, group = self._args, self._groups[0]
        samples = [_sample(dataset, position) for position in range(len(dataset))]
        rounds = sorted_rounds(
            [len(sample) for sample in samples],
            token_budget=self._token_budget,
            max_samples=args.global_batch_size // group.num_replicas,
            num_replicas=group.num_replicas,
        )
        steps = sorted_steps(rounds, global_batch_size=args.global_batch_size, seed=args.seed)
        calculator = REPLACED["_GLOBAL_NUM_MICROBATCHES_CALCULATOR"]
        self._hooks.replace(calculator, self._make_calculator)
        args.dataloader_type = "external"
        args.train_iters = len(steps)
        totals = all_totals(steps, samples)
        return _items(dataset, steps, totals, replica=group.replica)


def sorted_rounds(
    lengths: Sequence[int], *, token_budget: int, max_samples: int, num_replicas: int
) -> list[Round]:
    """Cut the samples, longest first, into batches; deal neighbours to the replicas of a round.

    A batch holds as many samples as fit `longest * number <= token_budget`. Batches of most samples
    are halved until their number is a multiple of the replicas.

    Args:
        lengths: by stream position.
        token_budget: most tokens of a batch, padding included.
        max_samples: most samples of a batch, so that a round is no larger than a step.
        num_replicas: data-parallel size.

    Raises:
        ValueError: a sample over the budget, no room for one, or samples that are no multiple of
            the replicas.
    """
    if max(lengths, default=0) > token_budget:
        raise ValueError(f"a sample of {max(lengths)} tokens is over the budget of {token_budget}")
    if len(lengths) % num_replicas or max_samples < 1:
        raise ValueError(
            f"{len(lengths)} samples in batches of at most {max_samples} cannot be dealt to "
            f"{num_replicas} replicas: give a multiple of the replicas, and at least 1 per batch"
        )
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        size = min(max_samples, token_budget // max(1, lengths[order[start]]))
        batches.append(order[start : start + size])
        start += size
    while len(batches) % num_replicas:
        at = max(range(len(batches)), key=lambda index: (len(batches[index]), -index))
        half = len(batches[at]) // 2
        batches[at : at + 1] = [batches[at][:half], batches[at][half:]]
    return [
        tuple(tuple(batch) for batch in batches[at : at + num_replicas])
        for at in range(0, len(batches), num_replicas)
    ]


def sorted_steps(rounds: Sequence[Round], *, global_batch_size: int, seed: int) -> list[Step]:
    """Shuffle the rounds and gather them into steps of about `global_batch_size` samples.

    A step ends where the samples emitted so far come closest to that many per step.
    """
    shuffled = list(rounds)
    random.Random(seed).shuffle(shuffled)
    steps: list[Step] = []
    current: list[Round] = []
    emitted = 0
    for one in shuffled:
        size = sum(len(batch) for batch in one)
        target = (len(steps) + 1) * global_batch_size
        if current and abs(emitted - target) < abs(emitted + size - target):
            steps.append(current)
            current = []
        current.append(one)
        emitted += size
    if current:
        steps.append(current)
    return steps


def num_padded(positions: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of a batch, padding included."""
    return len(positions) * max(lengths[position] for position in positions)


def all_totals(steps: Sequence[Step], samples: Sequence[Sample]) -> list[StepTotals]:
    """The totals of each step, in the form a plan has them; the cost is padded tokens."""
    lengths = [len(sample) for sample in samples]
    consumed = 0
    built = []
    for index, step in enumerate(steps):
        positions = [at for one in step for batch in one for at in batch]
        costs = tuple(
            sum(num_padded(batch, lengths) for batch in batches)
            for batches in zip(*step, strict=True)
        )
        totals = StepTotals(
            **dict.fromkeys(_ZERO, 0),
            step=index,
            num_micro_batches=len(step),
            num_consumed=len(positions),
            consumed_before=consumed,
            num_samples=len(positions),
            num_truncated=sum(samples[at].truncated > 0 for at in positions),
            num_tokens=sum(lengths[at] for at in positions),
            num_padded_tokens=sum(costs),
            num_squared_tokens=sum(lengths[at] ** 2 for at in positions),
            num_loss_tokens=sum(samples[at].num_loss_tokens for at in positions),
            loss_weight=round(sum(samples[at].loss_weight for at in positions)),
            num_replicas=len(costs),
            cost_sum=sum(costs),
            cost_max=max(costs),
            is_final=index == len(steps) - 1,
        )
        consumed += len(positions)
        built.append(totals)
    return built


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--sorted-token-budget", type=int, required=True)
    options, rest = parser.parse_known_args()
    sys.argv = [sys.argv[0], *rest]
    args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"})
    with SortedRun(args, token_budget=options.sorted_token_budget) as run:
        run.pretrain()


def _items(
    dataset: PaddedDataset,
    steps: Sequence[Step],
    totals: Sequence[StepTotals],
    *,
    replica: int,
) -> Iterator[Any]:
    """One replica's items: per step its header, then batches as the padded baseline has them."""
    for step, total in zip(steps, totals, strict=True):
        batches = tuple(one[replica] for one in step)
        yield StepHeader(totals=total, positions=batches)
        for batch in batches:
            yield torch.utils.data.default_collate([dataset[position] for position in batch])


def _sample(dataset: PaddedDataset, position: int) -> Sample:
    sample = dataset.stream.fetch(position)
    if isinstance(sample, Skipped):
        raise ValueError(f"sorted batches take whole data only; left out: {sample.message}")
    return sample


if __name__ == "__main__":
    main()
