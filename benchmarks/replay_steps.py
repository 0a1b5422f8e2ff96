"""A pretrain script that trains the very micro-batches of another run, in one process.

    torchrun -m odb_megatron.cpu benchmarks/replay_steps.py --replay LOG_DIR --odb ...

`--replay` names the step log (`--odb-log-dir`) of the run to repeat. Each step runs the
micro-batches of all its replicas one after the other, idle ones too: the first of each replica,
then the second of each, and so on. So nothing of the planner, the delivery or the process groups
is used. With `--together` the global auxiliary loss is that of replicas (`run_together`).
`--count-multiple N`, without `--replay`, is the ordinary
script with M rounded up to a multiple of N, as under virtual pipelining, so that a single replica
idles too. `--gradients FOLDER` writes every step's gradients (`gradient_log`), `--routing FOLDER`
every token's experts, which are those of `--like FOLDER` where scores tie (`routing_log`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradient_log import log_gradients
from routing_log import log_routing

from odb_megatron.data.loop import PackedStep, Progress, SourceCounts
from odb_megatron.data.sample import Sample, Skipped
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.wire import pack_step
from odb_megatron.megatron import providers, run
from odb_megatron.megatron.setup import parse_and_validate_args
from odb_megatron.plan.record import StepTotals
from odb_megatron.report.steps import read_run
from odb_megatron.testing.runs_again import forget_run, keep_imports

Record = dict[str, Any]


class ReplayLoader(StepLoader):
    """A step loader that takes its plans from a log.

    Attributes:
        records: the log's lines, `[step][replica]`.
    """

    records: Sequence[Sequence[Record]] = ()

    def make_step(self) -> PackedStep | None:
        """None after the log's last step."""
        at = self._at = getattr(self, "_at", -1) + 1
        if self.is_over or at == len(self.records):
            self.is_over = True
            return None
        assert isinstance(self.stream, SampleStream), "a log is replayed from random access"
        if at == 0:
            self._positions = _positions(self.stream)
        micro_batches = [
            [self._read(self._positions[name]) for name in ids]
            for parts in zip(*(record["ids"] for record in self.records[at]), strict=True)
            for ids in parts
        ]
        totals = _totals(self.records, at, micro_batches=micro_batches)
        header, payload, pixels = pack_step(totals, micro_batches, rule=self.config.size_rule)
        self._progress = Progress(
            consumed=totals.consumed_before + totals.num_consumed,
            source_counts=tuple(SourceCounts() for _ in self.stream.source_names),
        )
        return PackedStep(header, payload, pixels, self._progress)

    def end(self) -> None:
        """There is no other replica to tell."""
        self.is_over = True

    def _read(self, position: int) -> tuple[int, Sample]:
        assert isinstance(self.stream, SampleStream), "checked before the first step"
        item = self.stream.fetch(position)
        assert not isinstance(item, Skipped), f"position {position} was trained, and is skipped now"
        return position, item


def read_log(folder: Path) -> list[list[Record]]:
    """Return the log's lines, `[step][replica]`."""
    steps = read_run(str(folder)).steps
    return [[asdict(record) for record in step.records.values()] for step in steps]


def _positions(stream: SampleStream) -> dict[str, int]:
    found = {}
    for position in range(len(stream)):
        where = stream.locate(position)
        found[f"{where.source}:{where.record}@{where.epoch}"] = position
    return found


def _totals(
    records: Sequence[Sequence[Record]], at: int, *, micro_batches: Sequence[Sequence[object]]
) -> StepTotals:
    first = records[at][0]
    consumed = first["samples"] + first["left_out"]
    lengths = [n for record in records[at] for part in record["lengths"] for n in part]
    return StepTotals(
        step=at,
        num_micro_batches=len(micro_batches),
        num_consumed=consumed,
        consumed_before=first["consumed_samples"] - consumed,
        num_samples=first["samples"],
        num_left_out=first["left_out"],
        num_tokens=sum(lengths),
        num_padded_tokens=sum(lengths),
        num_squared_tokens=sum(n * n for n in lengths),
        num_loss_tokens=first["loss_tokens"],
        loss_weight=first["loss_tokens"],
        num_idle=sum(not part for part in micro_batches),
        num_replicas=1,
        cost_sum=1,
        cost_max=1,
        is_final=at == len(records) - 1,
    )


@contextlib.contextmanager
def run_together(forward_step: Callable[..., Any], count: int) -> Iterator[Callable[..., Any]]:
    """Yield a forward step that takes each `count` micro-batches in a row as run at one time.

    Megatron defines the global auxiliary loss over the micro-batches that replicas run at the same
    time: the share of tokens per expert is that of all of them. One process runs them one after the
    other, so it first runs all of them without gradients to count, and hands the counts to the runs
    with gradients. Nothing of what ODB corrects in routers is used.
    """
    import torch
    from megatron.core.transformer.moe import router as module

    kind = module.TopKRouter
    originals = kind.routing, kind._apply_global_aux_loss
    counts: dict[Any, Any] = {}  # by router: tokens per expert of the micro-batches together
    before: dict[Any, Any] = {}  # by router: what was added up over the step's earlier ones
    waiting: deque[Any] = deque()

    def routing(self: Any, logits: Any, padding_mask: Any = None) -> Any:
        if not torch.is_grad_enabled():
            flat_mask = None if padding_mask is None else padding_mask.reshape(-1)
            chosen, _ = module.compute_routing_scores_for_aux_loss(
                logits.view(-1, logits.shape[-1]),
                self.topk,
                self.score_function,
                padding_mask=flat_mask,
            )
            counts[self] = counts.get(self, 0) + chosen.sum(dim=0)
        return originals[0](self, logits, padding_mask=padding_mask)

    def apply_global_aux_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(waiting) == count - 1:
            before[self] = self.global_tokens_per_expert.clone(), self.ga_steps.clone()
        self.global_tokens_per_expert.copy_(before[self][0])
        self.ga_steps.copy_(before[self][1])

        def together(**_options: Any) -> Any:
            total = counts[self].sum() / self.topk
            return counts[self], total / count, total

        mended = module.get_tokens_per_expert_and_token_count
        module.get_tokens_per_expert_and_token_count = together
        try:
            return originals[1](self, *args, **kwargs)
        finally:
            module.get_tokens_per_expert_and_token_count = mended

    def step(data_iterator: Any, model: Any, *rest: Any) -> Any:
        if not waiting:
            counts.clear()
            waiting.extend(next(data_iterator) for _ in range(count))
            with torch.no_grad():
                for item in waiting:
                    forward_step(iter([item]), model, *rest)
        item = waiting.popleft()
        return forward_step(iter([item]), model, *rest)

    kind.routing, kind._apply_global_aux_loss = routing, apply_global_aux_loss
    try:
        yield step
    finally:
        kind.routing, kind._apply_global_aux_loss = originals


def main() -> None:
    """Run the script; with `--batch FILE` once for each command line of a JSON file."""
    if sys.argv[1:2] != ["--batch"]:
        _run()
        return
    keep_imports()
    for flags in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")):
        sys.argv[1:] = flags
        print("replay_steps.py:", *flags, flush=True)
        _run()
        forget_run()


def _run() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--count-multiple", type=int)
    parser.add_argument("--gradients", type=Path)
    parser.add_argument("--routing", type=Path)
    parser.add_argument("--like", type=Path)
    own, sys.argv[1:] = parser.parse_known_args()
    originals = providers.__dict__["StepLoader"], providers.__dict__["count_multiple"]
    if own.replay is not None:
        ReplayLoader.records = read_log(own.replay)
        setattr(providers, "StepLoader", ReplayLoader)  # noqa: B010
    if own.count_multiple is not None:
        setattr(providers, "count_multiple", lambda _args: own.count_multiple)  # noqa: B010
    try:
        with contextlib.nullcontext() if own.gradients is None else log_gradients(own.gradients):
            _pretrain(own)
    finally:
        setattr(providers, "StepLoader", originals[0])  # noqa: B010
        setattr(providers, "count_multiple", originals[1])  # noqa: B010


def _pretrain(own: argparse.Namespace) -> None:
    num_together = len(ReplayLoader.records[0]) if own.together else 1
    args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"})
    with contextlib.ExitStack() as stack:
        odb = stack.enter_context(run.OdbRun(args))
        forward_step = odb.forward_step
        if own.routing is not None:
            logged = log_routing(own.routing, forward_step, like=own.like)
            forward_step = stack.enter_context(logged)
        if num_together > 1:
            forward_step = stack.enter_context(run_together(forward_step, num_together))
        odb.pretrain(forward_step=forward_step)


if __name__ == "__main__":
    main()
