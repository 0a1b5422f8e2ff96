"""The names of `megatron.training.training` that ODB replaces during a run, and nothing else.

Each replacement wraps the original and is undone by `Hooks.remove`. Must not plan or print.

| name | why |
|---|---|
| `get_forward_backward_func` | the schedule runs the plan's M, taken from the step's header |
| `config.finalize_model_grads_func`, within a schedule | ends the last micro-batch's time |
| `training_log` | tells a listener what Megatron logs; router losses per micro-batch |
| `save_checkpoint` | the data's state goes into the arguments that are saved |
| `compute_throughputs_and_append_to_progress_log` | counts real tokens |
| `num_floating_point_operations` | in a log line, those of the mean step of its interval |
| the same, where it knows one length for all (0.17) | counts real tokens |
| three functions of `moe.router` | what they do with a padding mask, and with weights (`routers`) |
| `evaluate_and_print_results` | fails on `--full-validation` (training.py 4382, 0.19.2) |
| `compile_helpers` of `core.datasets.utils` | ends the run with a wheel (`compat_helpers`) |
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol

from odb_megatron.data.feed import ChunkIterator, StepHeader
from odb_megatron.megatron.compat_helpers import compiled_once
from odb_megatron.megatron.compat_metrics import (
    LoggedFlops,
    counts_real_flops,
    flops_of_real_tokens,
    logged_per_micro_batch,
)
from odb_megatron.megatron.routers import RouterFixes
from odb_megatron.plan.record import StepTotals

__all__ = ["Hooks", "RunListener", "is_within_step"]


_SCHEDULE = "forward_backward_by_plan"


class RunListener(Protocol):
    """What the hooks tell a run."""

    def on_schedule(self, *, training: bool) -> None:
        """A schedule is about to fetch its first item."""

    def on_header(self, header: StepHeader, *, training: bool) -> None:
        """A step is about to run its schedule (again, when Megatron replays it)."""

    def wants_backward(self) -> bool:
        """Whether `on_backward` should be told in the schedule that is about to run."""

    def on_backward(self) -> None:
        """The step's last backward pass was launched; its gradients are about to be reduced."""

    def on_logged(self, values: dict[str, Any]) -> None:
        """Megatron has logged an iteration; `values` are `training_log`'s arguments by name."""

    def saving(self) -> AbstractContextManager[None]:
        """A checkpoint is written, or given up, within."""

    def on_saving(self) -> None:
        """A checkpoint is about to be written."""

    def on_loaded(self, checkpoint_args: Any) -> None:
        """A checkpoint was read that the run goes on from; its Megatron arguments."""

    def tokens_so_far(self) -> int | None:
        """Real tokens trained since the start of the run; None leaves Megatron's estimate."""


def is_within_step(trace: TracebackType | None) -> bool:
    """Whether an exception was raised within a schedule that a run has wrapped."""
    names = (frame.f_code.co_name for frame, _ in traceback.walk_tb(trace))
    return _SCHEDULE in names


class Hooks:
    """Installs and removes the replacements.

    Args:
        listener: the run.
        packed: whether iterators carry step headers (ODB on).
        has_experts: whether the model is a mixture of experts.
        micro_batch_length: tokens of every micro-batch; 0 where they differ.
    """

    def __init__(
        self,
        listener: RunListener,
        *,
        packed: bool,
        has_experts: bool = False,
        micro_batch_length: int = 0,
    ) -> None:
        self._listener = listener
        self._packed = packed
        self._length = micro_batch_length
        self._count = 1
        self._totals: StepTotals | None = None
        self._logged = LoggedFlops()
        self._router_fixes = RouterFixes() if packed and has_experts else None
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace the names."""
        wrappers = {
            "get_forward_backward_func": self._wrap_get_forward_backward_func,
            "training_log": self._wrap_training_log,
            "evaluate_and_print_results": self._wrap_evaluate_and_print_results,
        }
        if self._packed:
            wrappers |= {
                "save_checkpoint": self._wrap_save_checkpoint,
                "compute_throughputs_and_append_to_progress_log": self._wrap_progress_log,
            }
            wrappers["num_floating_point_operations"] = self._wrap_flops
        for name, wrap in wrappers.items():
            self._replace(_training_module(), name, wrap)
        self._replace(_dataset_utils_module(), "compile_helpers", compiled_once)
        if self._packed:
            wrap = self._wrap_check_checkpoint_args
            self._replace(_checkpointing_module(), "check_checkpoint_args", wrap)
        if self._router_fixes is not None:
            self._router_fixes.install()

    def remove(self) -> None:
        """Put the originals back; harmless when called twice."""
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals = []
        if self._router_fixes is not None:
            self._router_fixes.remove()

    def _replace(self, module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(module, name)
        self._originals.append((module, name, original))
        setattr(module, name, wrap(original))

    def _wrap_get_forward_backward_func(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = original(*args, **kwargs)

            def forward_backward_by_plan(**arguments: Any) -> Any:
                training = not arguments.get("forward_only", False)
                self._listener.on_schedule(training=training)
                if not self._packed:
                    return schedule(**arguments)
                if arguments.get("collect_non_loss_data"):
                    raise ValueError(
                        "pretrain() was given a process_non_loss_data_func, which reads a number "
                        "of validation micro-batches that Megatron chooses, and --odb forms them "
                        "itself: leave it out"
                    )
                iterators = arguments["data_iterator"]
                chunks = iterators if isinstance(iterators, list) else [iterators]
                header, *_ = [next(chunk) for chunk in chunks]
                assert isinstance(header, StepHeader), f"expected a step header, got {header!r}"
                self._listener.on_header(header, training=training)
                arguments["num_microbatches"] = header.totals.num_micro_batches
                if self._length:  # what pipeline stages send each other
                    arguments["seq_length"] = self._length
                if training:
                    self._count, self._totals = header.totals.num_micro_batches, header.totals
                    self._logged.add(header.totals)
                    if self._router_fixes is not None:
                        self._router_fixes.begin_step(header.totals)
                if not training or not self._listener.wants_backward():
                    return schedule(**arguments)
                with self._told_of_backward(arguments["model"]):
                    return schedule(**arguments)

            return forward_backward_by_plan

        return get_forward_backward_func

    @contextmanager
    def _told_of_backward(self, model: Any) -> Iterator[None]:
        """Put `on_backward` before the schedule's call that reduces gradients.

        Without pipelining it comes right after the last backward pass (schedules.py
        `forward_backward_no_pipelining`, 0.19.2).
        """
        from megatron.core.utils import get_model_config

        config = get_model_config(model[0] if isinstance(model, list) else model)
        original = config.finalize_model_grads_func
        if original is None:  # nobody reduces them
            yield
            return

        def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
            self._listener.on_backward()
            return original(*args, **kwargs)

        config.finalize_model_grads_func = finalize_model_grads
        try:
            yield
        finally:
            config.finalize_model_grads_func = original

    def _wrap_training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            values = signature.bind(*args, **kwargs).arguments
            if self._packed:
                with (
                    logged_per_micro_batch(_training_module(), self._count),
                    self._logged.line(values["iteration"], _megatron_args().log_interval),
                ):
                    result = original(*args, **kwargs)
            else:
                result = original(*args, **kwargs)
            self._listener.on_logged(values)
            return result

        return training_log

    def _wrap_evaluate_and_print_results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
            megatron_args = _megatron_args()
            steps = megatron_args.eval_iters
            if not megatron_args.full_validation or isinstance(steps, list):
                return original(*args, **kwargs)
            iterator = signature.bind(*args, **kwargs).arguments["data_iterator"]
            first = iterator[0] if isinstance(iterator, list) else iterator
            loader = getattr(first, "iterable", None)
            # The count is the validation set's; only that one is wrapped to start again by itself,
            # and not before 0.18.
            one_pass = steps
            if isinstance(loader, ChunkIterator):
                one_pass = len(loader)
                for part in iterator if isinstance(iterator, list) else [iterator]:
                    iter(part.iterable)
            megatron_args.eval_iters = [one_pass]
            try:
                return original(*args, **kwargs)
            finally:
                megatron_args.eval_iters = steps

        return evaluate_and_print_results

    def _wrap_flops(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def num_floating_point_operations(args: Any, batch_size: Any, **options: Any) -> Any:
            totals = self._totals
            if totals is None:
                return original(args, batch_size, **options)
            mean = self._logged.mean()
            if not counts_real_flops(_training_module()):
                num_tokens, num_squared = mean or (totals.num_tokens, totals.num_squared_tokens)
                return flops_of_real_tokens(
                    original, args, num_tokens=num_tokens, num_squared=num_squared
                )
            if mean is not None:
                options["total_real_tokens_in_batch"] = mean[0]
                options["seqlen_squared_sum_in_batch"] = mean[1]
            return original(args, batch_size, **options)

        return num_floating_point_operations

    def _wrap_save_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if "train_data_iterator" in bound.arguments:
                # Else the rerun machine pickles the step it will rerun, which the resumed run plans
                # again (rerun_state_machine.py `state_dict`, 0.19.2).
                bound.arguments["train_data_iterator"] = None
            with self._listener.saving():
                self._listener.on_saving()
                return original(*bound.args, **bound.kwargs)

        return save_checkpoint

    def _wrap_check_checkpoint_args(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Look at a checkpoint's arguments (checkpointing.py `load_checkpoint`, 0.19.2)."""

        def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
            self._listener.on_loaded(checkpoint_args)
            return original(checkpoint_args, *args, **kwargs)

        return check_checkpoint_args

    def _wrap_progress_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_throughputs_and_append_to_progress_log(*args: Any, **kwargs: Any) -> Any:
            tokens = self._listener.tokens_so_far()
            if tokens is None:
                return original(*args, **kwargs)
            megatron_args = _megatron_args()
            samples, length = megatron_args.consumed_train_samples, megatron_args.seq_length
            megatron_args.consumed_train_samples, megatron_args.seq_length = tokens, 1
            try:
                return original(*args, **kwargs)
            finally:
                megatron_args.consumed_train_samples = samples
                megatron_args.seq_length = length

        return compute_throughputs_and_append_to_progress_log


def _training_module() -> Any:
    from megatron.training import training

    return training


def _dataset_utils_module() -> Any:
    from megatron.core.datasets import utils

    return utils


def _checkpointing_module() -> Any:
    from megatron.training import checkpointing

    return checkpointing


def _megatron_args() -> Any:
    from megatron.training import get_args

    return get_args()
