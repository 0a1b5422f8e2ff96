"""Runs Megatron's `pretrain()` again and again in the processes of one gloo group.

What runs in the replicas; `megatron_world` starts them and talks to them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import io
import json
import math
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from host_reads import host_reads

from odb_megatron.testing.runs_again import forget_run, keep_imports

__all__ = ["Case", "Fault", "Outcome", "serve"]

CASE_TIMEOUT_S = 150
"""A run that takes longer prints where every thread is and ends its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An end in the middle of a forward step.

    Attributes:
        iteration: 1-based; that of the evaluation follows it.
        kind: `raise`, `exit` (status 0), `exit 3`, or `late`: Megatron's exit duration is over.
        training: in a training step, or in an evaluation.
    """

    iteration: int
    kind: str
    training: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of `pretrain()`.

    Attributes:
        flags: the command line behind the script's name.
        items: own datasets per split (train, valid, test) as lists of items; None: `--data-path`.
        rank_flags: more flags of single ranks, by rank.
        fault: what goes wrong, on every rank.
        merged_on: ranks that take all samples of a micro-batch for one, as if they had been sent no
            `cu_seqlens`.
        killed_in: iteration in whose first micro-batch every process is killed by SIGKILL.
        terminated_in: iteration in whose first micro-batch the last rank gets a SIGTERM.
        nan_in: ("once" or "always", iteration): the last rank's loss of that iteration's first
            micro-batch is NaN, in the first attempt or in every one.
        stage: script of examples/modelopt to run instead of `pretrain()`.
        has_images: samples may have images.
        counts_reads: whether reads of tensors on the host are counted.
        compared_with: what counts once, `token` or `sample`, in a plain loop over all the training
            items that every step is compared with; empty for none.
    """

    flags: tuple[str, ...]
    items: tuple[list[dict[str, Any]] | None, ...] | None = None
    rank_flags: dict[int, tuple[str, ...]] = field(default_factory=dict)
    fault: Fault | None = None
    merged_on: tuple[int, ...] = ()
    killed_in: int | None = None
    terminated_in: int | None = None
    nan_in: tuple[str, int] | None = None
    stage: str = ""
    has_images: bool = False
    counts_reads: bool = False
    compared_with: str = ""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one replica did.

    Attributes:
        error: exception raised as "Type: text", empty if none (and for `sys.exit(0)`).
        exited: whether the run ended by `sys.exit(0)`.
        output: everything printed.
        steps: this replica's lines of the step log (`--odb-log-dir`).
        forwards: training micro-batches run, by iteration (1-based).
        flops: arguments of Megatron's FLOPs function in each training iteration:
            (batch size, real tokens, squared tokens).
        learning_rates: as Megatron logs them, by iteration.
        eval_ids: stream positions of each evaluation step, in order.
        final: some of Megatron's arguments after the run.
        restored: whether every name that ODB replaces is the original again.
        reads: where this package has read tensors on the host, or waited for the device, in the
            trainer's thread.
        seconds: wall clock.
        usage: (threads, file descriptors, child processes) of this process at the end of each
            training iteration.
        threads: threads that make steps and are still alive after the run.
        plain: of each step the loss of the plain loop, and how far gradients are from its own: the
            largest ||g - plain|| / ||plain|| of a parameter.
        threads_in_all: threads of the process after the run, those of torch's backends included.
    """

    error: str = ""
    trace: str = ""
    exited: bool = False
    output: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    forwards: dict[int, int] = field(default_factory=dict)
    flops: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    learning_rates: dict[int, float] = field(default_factory=dict)
    eval_ids: list[tuple[int, ...]] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    restored: bool = True
    usage: list[tuple[int, int, int]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    seconds: float = 0.0
    threads: int = 0
    threads_in_all: int = 0
    plain: list[tuple[float, float]] = field(default_factory=list)


class ListDataset:
    """A user's own map-style dataset."""

    def __init__(self, items: Sequence[dict[str, Any]]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._items[index]


def serve(rank: int, connections: Sequence[Connection]) -> None:
    """Run the cases that arrive on this replica's connection until None does."""
    keep_imports()
    connection = connections[rank]
    while (case := connection.recv()) is not None:
        connection.send(run_case(case))


def run_case(case: Case) -> Outcome:
    """Run one case in this process."""
    outcome = Outcome()
    printed = io.StringIO()
    started = time.monotonic()
    faulthandler.dump_traceback_later(CASE_TIMEOUT_S, exit=True, file=sys.__stderr__)
    argv = sys.argv
    rank = torch.distributed.get_rank()
    sys.argv = ["pretrain_gpt_odb.py", *case.flags, *case.rank_flags.get(rank, ())]
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            _merged() if rank in case.merged_on else contextlib.nullcontext(),
        ):
            _pretrain(case, outcome)
    except SystemExit as stop:
        outcome.exited = not stop.code
        outcome.error = f"SystemExit: {stop.code}" if stop.code else ""
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.trace = traceback.format_exc()
    finally:
        sys.argv = argv
        outcome.final = _final_values()
        names = [thread.name for thread in threading.enumerate()]
        outcome.threads = sum(name.startswith("the step queue") for name in names)
        forget_run()
        outcome.threads_in_all = len(os.listdir("/proc/self/task"))
        faulthandler.cancel_dump_traceback_later()
    outcome.output = printed.getvalue()
    outcome.steps = _read_steps(case)
    outcome.seconds = time.monotonic() - started
    return outcome


def _pretrain(case: Case, outcome: Outcome) -> None:
    """As examples/pretrain_gpt_odb.py, observed."""
    from megatron.training import training

    from odb_megatron.megatron.run import OdbRun
    from odb_megatron.megatron.setup import read_args

    if case.stage:
        script = Path(__file__).parents[1] / "examples" / "modelopt" / f"{case.stage}.py"
        made = "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"  # by the stage
        before = _replaced_names() | {made: None}
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            outcome.restored = _replaced_names() | {made: None} == before
        return
    kind: type[OdbRun] = OdbRun
    extra = None
    if case.has_images:
        from odb_megatron.megatron.image_run import ImageRun
        from odb_megatron.megatron.images import refuse_unsupported

        sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "multimodal"))
        import pretrain_pictures

        kind, extra = ImageRun, pretrain_pictures.add_arguments
    args = read_args({"tokenizer_type": "HuggingFaceTokenizer"}, extra)
    model_class = None
    if case.has_images:
        refuse_unsupported(args)
        vision = pretrain_pictures.vision_shape(args)
        from image_gpt import ImageGPT

        model_class = functools.partial(ImageGPT, vision=vision)
    datasets = None if case.items is None else _datasets(case.items)
    with _observed(training, outcome), _compared(training, outcome, case):
        before = _replaced_names()
        try:
            reads = (
                host_reads(within="odb_megatron/")
                if case.counts_reads
                else contextlib.nullcontext([])
            )
            with kind(args, datasets=datasets) as run, reads as outcome.reads:
                step = _counted(run.forward_step, outcome, args, case)
                run.pretrain(forward_step=step, model_class=model_class)
        finally:
            outcome.restored = _replaced_names() == before


@contextlib.contextmanager
def _merged() -> Iterator[None]:
    """Leave out where samples begin, as far as attention goes."""
    from odb_megatron.megatron import forward_step

    original = forward_step.packed_seq_params

    def one_sample(**values: Any) -> Any:
        whole = {
            name: value[[0, -1]] if name in ("cu_seqlens_q", "cu_seqlens_kv") else value
            for name, value in values.items()
        }
        length = int(whole["cu_seqlens_q"][-1])
        return original(**{**whole, "max_seqlen_q": length, "max_seqlen_kv": length})

    forward_step.packed_seq_params = one_sample
    try:
        yield
    finally:
        forward_step.packed_seq_params = original


def _datasets(items: Sequence[list[dict[str, Any]] | None]) -> Callable[..., list[Any]]:
    def build(_sizes: Sequence[int | None]) -> list[Any]:
        return [ListDataset(split) if isinstance(split, list) else split for split in items]

    return build


@contextlib.contextmanager
def _observed(training: Any, outcome: Outcome) -> Iterator[None]:
    """Note what Megatron hands to its own functions while a case runs."""

    def num_floating_point_operations(original: Any) -> Any:
        def observed(args: Any, batch_size: int, **sums: float | None) -> Any:
            tokens = sums["total_real_tokens_in_batch"]
            squared = sums["seqlen_squared_sum_in_batch"]
            outcome.flops.append((batch_size, tokens, squared))
            return original(args, batch_size, **sums)

        return observed

    def training_log(original: Any) -> Any:
        @functools.wraps(original)
        def observed(*arguments: Any, **named: Any) -> Any:
            outcome.learning_rates[arguments[3]] = arguments[2]
            outcome.usage.append(_usage())
            return original(*arguments, **named)

        return observed

    observers = {
        "num_floating_point_operations": num_floating_point_operations,
        "training_log": training_log,
    }
    originals = {name: getattr(training, name) for name in observers}
    for name, observe in observers.items():
        setattr(training, name, observe(originals[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(training, name, original)


@contextlib.contextmanager
def _compared(training: Any, outcome: Outcome, case: Case) -> Iterator[None]:
    """Before each optimizer step compute the gradient in a plain loop over all training items."""
    original = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        step = optimizer.step

        def compared_step() -> Any:
            (data, *_) = case.items or (None,)
            assert data is not None
            parameters = [one for one in model[0].parameters() if one.requires_grad]
            loss = _plain_loss(model[0].module, data, per=case.compared_with)
            expected = torch.autograd.grad(loss, parameters)
            errors = [
                float((one.main_grad - other).norm() / other.norm())
                for one, other in zip(parameters, expected, strict=True)
            ]
            outcome.plain.append((loss.item(), max(errors)))
            return step()

        optimizer.step = compared_step
        return model, optimizer, scheduler

    if case.compared_with:
        training.setup_model_and_optimizer = setup_model_and_optimizer
    try:
        yield
    finally:
        training.setup_model_and_optimizer = original


def _plain_loss(model: Any, items: Sequence[dict[str, Any]], *, per: str) -> torch.Tensor:
    """Return the sum of w * loss over the sum of w, one unpadded sample after the other."""
    total, count = torch.zeros(()), 0.0
    for item in items:
        tokens, labels = (torch.tensor(item[name])[None] for name in ("tokens", "labels"))
        weights = torch.tensor(item["loss_mask"], dtype=torch.float64)[None]
        if per == "sample":
            weights = weights / weights.sum()
        losses = model(tokens, torch.arange(tokens.numel())[None], None, labels=labels)
        total = total + (losses * weights).sum()
        count += float(weights.sum())
    return total / count


def _counted(forward_step: Any, outcome: Outcome, args: Any, case: Case) -> Any:
    """Count training micro-batches, and note what evaluation reads; fail as the case wants."""
    seen: list[Any] = []  # first micro-batch of the iteration whose loss is NaN

    def counting(data_iterator: Any, model: Any, *rest: Any) -> Any:
        if case.fault is not None:
            _fail(case.fault, args)
        if torch.is_grad_enabled():
            iteration = args.curr_iteration + 1
            is_last = args.rank == args.world_size - 1
            if iteration == case.killed_in:
                os.kill(os.getpid(), signal.SIGKILL)
            if is_last and iteration == case.terminated_in and iteration not in outcome.forwards:
                os.kill(os.getpid(), signal.SIGTERM)
            outcome.forwards[iteration] = outcome.forwards.get(iteration, 0) + 1
            items = _Noted(data_iterator, [])
            output, loss_func = forward_step(items, model, *rest)
            if not is_last or case.nan_in is None or iteration != case.nan_in[1]:
                return output, loss_func
            seen.append(items.seen[0])
            is_first = seen[-1] == seen[0] and (len(seen) == 1 or case.nan_in[0] == "always")
            return output, (lambda out: loss_func(out * math.nan)) if is_first else loss_func
        return forward_step(_Noted(data_iterator, outcome.eval_ids), model, *rest)

    return counting


def _usage() -> tuple[int, int, int]:
    tasks = os.listdir("/proc/self/task")
    children = 0
    for task in tasks:
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            children += len(Path(f"/proc/self/task/{task}/children").read_text().split())
    return len(tasks), len(os.listdir("/proc/self/fd")), children


def _fail(fault: Fault, args: Any) -> None:
    training = torch.is_grad_enabled()
    iteration = args.curr_iteration + 1
    if (training, iteration) != (fault.training, fault.iteration):
        return
    if fault.kind == "late":
        args.exit_duration_in_mins = 1e-6
    elif fault.kind == "raise":
        raise ValueError(f"no luck in iteration {iteration}")
    else:
        sys.exit(int(fault.kind.removeprefix("exit") or 0))


class _Noted:
    """An iterator that notes the stream positions of what it hands out."""

    def __init__(self, items: Iterator[Any], seen: list[tuple[int, ...]]) -> None:
        self._items = items
        self.seen = seen

    def __iter__(self) -> _Noted:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        if isinstance(item, dict):
            self.seen.append(tuple(item["position"].tolist()))
        else:
            self.seen.append(item.positions)
        return item


def _replaced_names() -> dict[str, Any]:
    from odb_megatron.megatron.hooks import CORRECTED, REPLACED

    return {
        one.name: functools.reduce(
            getattr, one.name.split("."), importlib.import_module(one.module)
        )
        for one in (*REPLACED.values(), *CORRECTED.values())
    }


def _final_values() -> dict[str, Any]:
    from megatron.training import global_vars

    args = global_vars._GLOBAL_ARGS
    if args is None:
        return {}
    names = ("train_iters", "consumed_train_samples", "consumed_valid_samples", "iteration")
    return {name: getattr(args, name, None) for name in names}


def _read_steps(case: Case) -> list[dict[str, Any]]:
    if "--odb-log-dir" not in case.flags:
        return []
    given = [at for at, flag in enumerate(case.flags) if flag == "--odb-log-dir"]
    folder = Path(case.flags[given[-1] + 1])
    path = folder / f"steps-{torch.distributed.get_rank():05d}.jsonl"
    lines = [json.loads(line) for line in path.open()] if path.exists() else []
    starts = [at for at, line in enumerate(lines) if "format" in line]  # of processes: headers
    return lines[starts[-1] + 1 :] if starts else []
