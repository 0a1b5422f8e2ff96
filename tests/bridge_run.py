"""Runs Megatron-Bridge's `pretrain()` and `finetune()` again and again in the same processes.

Starting processes takes half a minute, a run about a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import multiprocessing
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Bridge", "Case", "Outcome", "Run"]

CASE_TIMEOUT_S = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of the launcher, or of `enable` and Bridge's own `pretrain()`.

    Attributes:
        argv: of the launcher.
        settings: for `enable`, in place of the launcher: `argv` are Bridge's overrides then.
        after: with `settings`: overrides applied after `enable`.
        statement: with `settings`: Python run on `cfg` after that.
        log: folder of the step log.
        merged: whether this process takes all samples of a micro-batch for one.
    """

    argv: tuple[str, ...]
    settings: dict[str, Any] | None = None
    after: tuple[str, ...] = ()
    statement: str = ""
    log: str = ""
    merged: bool = False


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one rank did.

    Attributes:
        error: exception raised as "Type: text", or exit code; empty if none.
        output: everything printed.
        steps: this replica's lines of the step log.
        forwards: training micro-batches run, by optimizer steps done before.
        evaluated: evaluation micro-batches run.
        restored: whether every name that ODB replaces is the original again.
        threads: threads that make steps and are still alive after the run.
        dataset: class of the dataset configuration.
    """

    error: str = ""
    trace: str = ""
    output: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    forwards: dict[int, int] = field(default_factory=dict)
    evaluated: int = 0
    restored: bool = True
    threads: int = 0
    dataset: str = ""


def serve(rank: int, connections: Sequence[Connection]) -> None:
    """Run the cases that arrive on this rank's connection until None does."""
    from odb_megatron.testing import bridge_cpu
    from odb_megatron.testing.runs_again import keep_imports

    bridge_cpu.activate()
    keep_imports()
    connection = connections[rank]
    while (case := connection.recv()) is not None:
        connection.send(_run(case))


def _run(case: Case) -> Outcome:
    import bridge_recipe
    from megatron.bridge.training.utils import checkpoint_utils

    from odb_megatron.testing.runs_again import forget_run

    outcome, printed = Outcome(), io.StringIO()
    faulthandler.dump_traceback_later(CASE_TIMEOUT_S, exit=True, file=sys.__stderr__)
    bridge_recipe.forwards.clear()
    before = _replaced_names()
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            _merged() if case.merged else contextlib.nullcontext(),
        ):
            _call(case, outcome)
    except SystemExit as stop:
        outcome.error = f"SystemExit: {stop.code}" if stop.code else ""
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.trace = traceback.format_exc()
    finally:
        forget_run()
        # Bridge keeps what it read of a checkpoint, and then changes it (checkpoint_utils.py 384).
        checkpoint_utils.read_train_state.cache_clear()
        checkpoint_utils.read_run_config.cache_clear()
        faulthandler.cancel_dump_traceback_later()
    names = [thread.name for thread in threading.enumerate()]
    outcome.threads = sum(name.startswith("the step queue") for name in names)
    outcome.restored = _replaced_names() == before
    outcome.output = printed.getvalue()
    outcome.forwards = dict(Counter(step for training, step in bridge_recipe.forwards if training))
    outcome.evaluated = sum(not training for training, _ in bridge_recipe.forwards)
    outcome.steps = _logged(case.log)
    return outcome


def _call(case: Case, outcome: Outcome) -> None:
    from odb_megatron.bridge import enable, run_recipe

    if case.settings is None:
        run_recipe.main(case.argv)
        return
    import bridge_recipe
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    cfg = bridge_recipe.tiny_pretrain_config()
    cfg = process_config_with_overrides(cfg, cli_overrides=list(case.argv))
    enable(cfg, **case.settings)
    if case.after:
        cfg = process_config_with_overrides(cfg, cli_overrides=list(case.after))
    exec(case.statement, {"cfg": cfg})
    outcome.dataset = type(cfg.dataset).__name__
    pretrain(cfg, bridge_recipe.forward_step)


@contextlib.contextmanager
def _merged() -> Any:
    """Leave out where samples begin, as far as attention goes."""
    from odb_megatron.bridge import run

    original = run.as_batch

    def one_sample(item: Any) -> dict[str, Any]:
        batch = original(item)
        whole = batch["cu_seqlens_q"][[0, -1]]
        for name in batch:
            if name.startswith("cu_seqlens"):
                batch[name] = whole
            if name.startswith("max_seqlen"):
                batch[name] = whole[-1]
        return batch

    run.as_batch = one_sample
    try:
        yield
    finally:
        run.as_batch = original


def _replaced_names() -> list[Any]:
    import importlib

    from megatron.core import num_microbatches_calculator

    names = {
        "train": (
            "get_forward_backward_func",
            "training_log",
            "save_checkpoint_and_time",
        ),
        "eval": ("get_forward_backward_func",),
        "pretrain": ("_finish_train", "_cleanup_after_pretrain_failure"),
    }
    found = [
        getattr(importlib.import_module(f"megatron.bridge.training.{module}"), name)
        for module, all_names in names.items()
        for name in all_names
    ]
    return [*found, num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR]


def _logged(folder: str) -> list[dict[str, Any]]:
    import torch

    path = Path(folder) / f"steps-{torch.distributed.get_rank():05d}.jsonl"
    if not folder or not path.exists():
        return []
    return [line for line in map(json.loads, path.open()) if "format" not in line]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One case on all ranks."""

    ranks: list[Outcome]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The step log of the first replica."""
        return self.ranks[0].steps

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [record["loss"] for record in self.records]

    @property
    def ids(self) -> list[list[str]]:
        """Samples of each step on all replicas, sorted."""
        logs = [rank.steps for rank in self.ranks if rank.steps]
        return [
            sorted(chain.from_iterable(chain.from_iterable(r["ids"]) for r in records))
            for records in zip(*logs, strict=True)
        ]

    @property
    def replica_ids(self) -> list[list[list[list[str]]]]:
        """Samples of each step by replica and micro-batch."""
        logs = [rank.steps for rank in self.ranks if rank.steps]
        return [[record["ids"] for record in records] for records in zip(*logs, strict=True)]

    @property
    def output(self) -> str:
        """What rank 0 printed."""
        return self.ranks[0].output


class Bridge:
    """Two ranks that run cases; started when first needed.

    Args:
        folder: of logs.
        tokenizer: the tokenizer's folder.
        data: overrides that name the data.
    """

    def __init__(self, folder: Path, *, tokenizer: str, data: Sequence[str]) -> None:
        self._folder = folder
        self._common = (f"tokenizer.tokenizer_model={tokenizer}",)
        self._data = tuple(data)
        self._ends: list[Any] = []
        self._done: Future[Any] | None = None
        self._pool = ThreadPoolExecutor(1)
        self._num_runs = 0

    def run(
        self,
        *overrides: str,
        recipe: str = "tiny_pretrain_config",
        options: Sequence[str] = (),
        settings: dict[str, Any] | None = None,
        after: Sequence[str] = (),
        statement: str = "",
        own_data: bool = True,
        merged_on: Sequence[int] = (),
    ) -> Run:
        """Run a case on both ranks.

        Args:
            overrides: besides the tests' own.
            recipe: function of `bridge_recipe`.
            options: of the launcher.
            settings: see `Case`.
            after: see `Case`.
            statement: see `Case`.
            own_data: name the tests' data.
            merged_on: ranks that take all samples of a micro-batch for one.
        """
        self._start()
        self._num_runs += 1
        log = str(self._folder / f"log{self._num_runs}")
        logged = f"dataset.odb.log_dir={log}"
        if settings is None:
            argv = (
                *("--recipe", f"bridge_recipe:{recipe}", "--step", "bridge_recipe:forward_step"),
                *(*options, *self._common, logged),
                *(*(self._data if own_data else ()), *overrides),
            )
        else:
            argv = (*self._common, *overrides)
            settings = {**settings, "log_dir": log}
        for rank, end in enumerate(self._ends):
            case = Case(
                argv=argv,
                settings=settings,
                after=tuple(after),
                statement=statement,
                log=log,
                merged=rank in merged_on,
            )
            end.send(case)
        return Run(ranks=[self._receive(end) for end in self._ends])

    def train(self, *overrides: str, **case: Any) -> Run:
        """As `run`, for a run that must end without an error."""
        run = self.run(*overrides, **case)
        for rank, outcome in enumerate(run.ranks):
            if outcome.error:
                pytest.fail(
                    f"rank {rank}: {outcome.error}\n{outcome.output[-3000:]}\n{outcome.trace}"
                )
            assert outcome.restored, "a name that ODB replaces was not put back"
            assert outcome.threads == 0, "a thread that makes steps is still there"
        return run

    def refused(self, *overrides: str, **case: Any) -> str:
        """As `run`, for a run that must fail on both ranks; return what rank 0 says."""
        run = self.run(*overrides, **case)
        assert all(outcome.error for outcome in run.ranks), run.output[-2000:]
        assert all(outcome.restored for outcome in run.ranks)
        assert not any(outcome.threads for outcome in run.ranks)
        return f"{run.ranks[0].error}\n{run.output}"

    def stop(self) -> None:
        """End the processes."""
        if self._done is None:
            return
        if not self._done.done():
            for end in self._ends:
                end.send(None)
        self._done.result(timeout=60)

    def _start(self) -> None:
        if self._done is not None:
            return
        from odb_megatron.testing.gloo import run_replicas

        pipes = [multiprocessing.Pipe() for _ in range(2)]
        self._ends = [mine for mine, _ in pipes]
        theirs = [end for _, end in pipes]
        self._done = self._pool.submit(run_replicas, serve, 2, theirs, timeout_s=3600)

    def _receive(self, end: Any) -> Outcome:
        while not end.poll(0.2):
            assert self._done is not None
            if self._done.done():
                self._done.result()  # raises what ended the ranks
                raise RuntimeError("the ranks have ended without a result")
        received: Outcome = end.recv()
        return received
