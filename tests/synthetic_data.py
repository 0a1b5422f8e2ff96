"""Made-up data for the tests of the data layer, and the steps that replicas make of it.

Every token says which record it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from odb_megatron.data.loop import PackedStep
from odb_megatron.data.order import CyclicOrder, PassOrder
from odb_megatron.data.sample import Sample, SampleRules
from odb_megatron.data.sources import MapSource
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream, SourcePart
from odb_megatron.data.thd import MicroBatch
from odb_megatron.data.wire import StepHeader
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.record import PlanConfig
from odb_megatron.testing.replicas import ThreadChannel, run_in_threads, thread_channels

__all__ = ["BASE", "BUDGET", "LENIENT", "Letters", "Records", "check_content", "in_threads"]
__all__ += ["lenient_stream", "metadata_of", "rules", "single_stream", "step_config", "steps_of"]

T = TypeVar("T")

BASE = 1000
"""Record r holds the tokens r * BASE, r * BASE + 1, ...; each label is the token plus one."""

BUDGET = 32

LENIENT: dict[str, Any] = {
    "context": BUDGET,
    "token_budget": BUDGET,
    "skip_bad": True,
    "overlong": OverlongPolicy.DROP,
}


def rules(
    *,
    context: int = 64,
    token_budget: int = 64,
    multiple: int = 1,
    overlong: OverlongPolicy = OverlongPolicy.ERROR,
    skip_bad: bool = False,
    vocab_size: int = 0,
) -> SampleRules:
    """Sample rules with small defaults."""
    return SampleRules(
        context=context,
        token_budget=token_budget,
        multiple=multiple,
        overlong=overlong,
        skip_bad=skip_bad,
        vocab_size=vocab_size,
    )


class Records:
    """A user's map-style dataset; length 0 stands for a bad record (its mask is all zero).

    Args:
        lengths: tokens of each record.
        failing: record that raises `KeyError`.
    """

    def __init__(self, lengths: Sequence[int], *, failing: int | None = None) -> None:
        self.lengths = list(lengths)
        self.failing = failing

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.failing:
            raise KeyError(f"no such thing in record {index}")
        length = self.lengths[index]
        tokens = index * BASE + np.arange(max(1, length))
        loss_mask = np.ones(tokens.size, dtype=np.float32)
        loss_mask[: tokens.size // 3] = 0  # a prompt
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": loss_mask * (length > 0)}


class Letters:
    """A tokenizer of Megatron's, of one token per character."""

    eos_id = 0
    chat_template: str | None = None

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def text_to_ids(self, text: str) -> list[int]:
        """Code points."""
        return [ord(letter) for letter in text]

    @staticmethod
    def decode(ids: Sequence[int]) -> str:
        """Inverse of `encode`; the end of text is "$"."""
        return "".join(chr(i) if i else "$" for i in ids)


def single_stream(
    dataset: Any,
    *,
    seed: int = 7,
    num_samples: int | None = None,
    order: CyclicOrder | None = None,
    sample_rules: SampleRules | None = None,
) -> SampleStream:
    """A stream over one map-style dataset."""
    source = MapSource(dataset, rules=sample_rules or rules(), name="synthetic")
    part = SourcePart(source=source, order=PassOrder(np.arange(len(source)), seed=seed))
    return SampleStream([part], num_samples=num_samples, order=order)


def lenient_stream(
    lengths: Sequence[int], *, num_samples: int | None = None, kind: type[Records] = Records
) -> SampleStream:
    """A stream that skips bad and overlong records."""
    return single_stream(kind(lengths), num_samples=num_samples, sample_rules=rules(**LENIENT))


def step_config(**changes: Any) -> PlanConfig:
    """Steps of 4 samples on 2 replicas; costs such that long samples move."""
    values: dict[str, Any] = {
        "total": 20,
        "global_batch_size": 4,
        "num_replicas": 2,
        "token_budget": BUDGET,
        "cost": CostModel.from_ratios(quadratic=1 / 64, fixed_tokens=3),
    }
    return PlanConfig(**values | changes)


def metadata_of(step: PackedStep | None) -> StepHeader:
    """What a step's header says, without times."""
    assert step is not None
    totals = replace(step.header.totals, wait_us=0)
    return replace(step.header, totals=totals, plan_us=0)


def steps_of(loader: StepLoader, *, most: int | None = None) -> list[PackedStep]:
    """Make all steps, or so many."""
    steps: list[PackedStep] = []
    while len(steps) != most and (step := loader.make_step()) is not None:
        steps.append(step)
    return steps


def check_content(items: Sequence[MicroBatch], stream: SampleStream) -> None:
    """Each packed micro-batch holds, in order, the samples it names, and nothing else."""
    for item in items:
        assert item.tokens.shape[1] == int(item.cu_seqlens_padded[-1])
        carried = 0
        for slot, position in enumerate(item.positions):
            sample = stream.fetch(position)
            assert isinstance(sample, Sample)
            start = int(item.cu_seqlens_padded[slot])
            part = slice(start, start + len(sample))
            assert int(item.cu_seqlens[slot + 1] - item.cu_seqlens[slot]) == len(sample)
            for name in ("tokens", "labels", "loss_mask"):
                assert getattr(item, name)[0, part].tolist() == getattr(sample, name).tolist()
            carried += sample.num_loss_tokens
        assert int(item.loss_mask.sum()) == carried


def in_threads(
    function: Callable[[ThreadChannel], T], num_replicas: int = 2, **options: Any
) -> list[T]:
    """Run `function` on each replica; return the results, or raise what the first has raised."""
    results = run_in_threads(function, thread_channels(num_replicas, **options))
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
