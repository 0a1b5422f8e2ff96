"""What a run replaces of Megatron: all of it is in `REPLACED` and `CORRECTED`.

Each replacement wraps the original and is undone when the run ends. A name that an installed
Megatron does not have is an error as the run starts.
"""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from odb_megatron.data.wire import StepHeader
from odb_megatron.megatron.versions import SUPPORTED
from odb_megatron.plan.record import StepTotals

if TYPE_CHECKING:
    from odb_megatron.megatron.run import OdbRun

__all__ = ["CORRECTED", "REPLACED", "Hooks", "Replacements", "StepCalculator", "is_within_step"]


class Name(NamedTuple):
    """A name of Megatron's that is replaced; of a class attribute the class is in the name."""

    module: str
    name: str
    reason: str
    versions: str = f"megatron-core {SUPPORTED}"


_TRAINING = "megatron.training.training"
_ROUTER = "megatron.core.transformer.moe.router"

REPLACED = {
    one.name: one
    for one in (
        Name(_TRAINING, "get_forward_backward_func", "a schedule runs the plan's M and shapes"),
        Name(_TRAINING, "training_log", "the step log; FLOPs of the mean step of a log line"),
        Name(_TRAINING, "save_checkpoint", "the data's state is saved, a step's data is not"),
        Name(
            "megatron.core.num_microbatches_calculator",
            "_GLOBAL_NUM_MICROBATCHES_CALCULATOR",
            "exact sample counts in a step that is smaller than the others",
        ),
        Name(
            "megatron.core.models.backends",
            "LocalSpecProvider.core_attention",
            "local layers alone (--transformer-impl local): their attention refuses packed samples",
        ),
    )
}

CORRECTED = {
    one.name: one
    for one in (
        Name(
            _ROUTER,
            "TopKRouter._apply_expert_bias",
            "combines a mask of tokens with a map of tokens and experts as if they had one shape "
            "(router.py 738, 0.19.2)",
            "0.18 and 0.19; harmless where it is mended (main, dev)",
        ),
        Name(
            _ROUTER,
            "get_tokens_per_expert_and_token_count",
            "counts the tokens of this rank after the sum over the ranks was written over them "
            "(moe_utils.py 270 to 277, 0.19.2), so that a load-balancing loss weighs as many times "
            "too much as it has ranks",
        ),
        Name(
            _ROUTER,
            "MoEAuxLossAutoScaler.set_loss_scale",
            "divides routers' losses, which weigh tokens, by a step's loss weights, which need not "
            "be numbers of tokens",
        ),
        Name(
            "megatron.core.models.common.embeddings.rope_utils",
            "_apply_rotary_pos_emb_thd",
            "without a fused kernel: reads the lengths on the host and rotates samples one by one, "
            "in every layer (rope_utils.py 219 to 266, 0.19.2)",
        ),
        Name(
            "megatron.core.datasets.utils",
            "compile_helpers",
            "runs make, and ends the run, in wheels that have the compiled helpers and no Makefile",
        ),
    )
}
"""Defects of Megatron's own; each goes once no supported version has it."""

_SCHEDULE = "forward_backward_by_plan"


def is_within_step(trace: TracebackType | None) -> bool:
    """Whether an exception was raised within a schedule that a run has wrapped."""
    names = (frame.f_code.co_name for frame, _ in traceback.walk_tb(trace))
    return _SCHEDULE in names


class Replacements:
    """Replaced names, and their originals."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, what: Name, wrap: Callable[[Any], Any]) -> None:
        """Put what `wrap` makes of the original in its place.

        Raises:
            ValueError: this Megatron has no such name.
        """
        owner: Any = importlib.import_module(what.module)
        *classes, name = what.name.split(".")
        try:
            for part in classes:
                owner = getattr(owner, part)
            original = inspect.getattr_static(owner, name) if classes else getattr(owner, name)
        except AttributeError:
            raise ValueError(
                f"what is installed here has no {what.module}.{what.name}, which odb_megatron "
                f"replaces ({what.reason}): use {what.versions}"
            ) from None
        self.replace_in(owner, name, wrap, original=original)

    def replace_in(
        self, owner: Any, name: str, wrap: Callable[[Any], Any], *, original: Any = None
    ) -> None:
        """The same of an object's attribute."""
        original = getattr(owner, name) if original is None else original
        self._originals.append((owner, name, original))
        setattr(owner, name, wrap(original))

    def undo(self) -> None:
        """Put the originals back; harmless when called twice."""
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals = []


class Hooks(Replacements):
    """Installs and removes a run's replacements.

    Args:
        run: is called at schedules, logged iterations and saves.
        packed: whether iterators carry step headers (ODB on).
        has_experts: whether the model is a mixture of experts.
        plans_shapes: whether pipeline stages take each other's shapes from step headers.
    """

    def __init__(
        self,
        run: OdbRun,
        *,
        packed: bool,
        has_experts: bool = False,
        plans_shapes: bool = False,
    ) -> None:
        super().__init__()
        self._run = run
        self._packed, self._has_experts = packed, has_experts
        self._plans_shapes = plans_shapes
        self._totals: StepTotals | None = None
        self._lengths: list[tuple[int, int]] = []  # of the steps since the last log line

    def install(self) -> None:
        """Replace the names."""
        self._replace("get_forward_backward_func", self._wrap_get_forward_backward_func)
        self._replace("training_log", self._wrap_training_log)
        self.replace(CORRECTED["compile_helpers"], _compiled_once)
        if not self._packed:
            return
        self._replace("save_checkpoint", self._wrap_save_checkpoint)
        self.replace(CORRECTED["_apply_rotary_pos_emb_thd"], _rotated_at_once)
        if self._has_experts:
            for name, wrap in _ROUTERS.items():
                self.replace(CORRECTED[name], wrap)
            self.replace(CORRECTED["MoEAuxLossAutoScaler.set_loss_scale"], self._wrap_loss_scale)

    def _replace(self, name: str, wrap: Callable[[Any], Any]) -> None:
        self.replace(REPLACED[name], wrap)

    def _wrap_get_forward_backward_func(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = original(*args, **kwargs)

            def forward_backward_by_plan(**arguments: Any) -> Any:
                training = not arguments.get("forward_only", False)
                self._run.on_schedule(training=training)
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
                self._run.on_header(header, training=training)
                arguments["num_microbatches"] = header.totals.num_micro_batches
                if training:
                    self._totals = header.totals
                with self._shapes(arguments, header):
                    result = schedule(**arguments)
                if training:
                    self._run.on_trained()
                return result

            return forward_backward_by_plan

        return get_forward_backward_func

    def _shapes(
        self, arguments: dict[str, Any], header: StepHeader
    ) -> AbstractContextManager[None]:
        if not self._plans_shapes:
            return nullcontext()
        from odb_megatron.megatron.pipeline import planned_shapes

        return planned_shapes(arguments, header.sizes)

    def _wrap_training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if self._packed and self._totals is not None:
                self._take_mean_step(bound.arguments)
            result = original(*bound.args, **bound.kwargs)
            self._run.on_logged(bound.arguments)
            return result

        return training_log

    def _take_mean_step(self, values: dict[str, Any]) -> None:
        """A line's throughput is one step's FLOPs over the mean time of its interval's steps."""
        from megatron.training import get_args

        assert self._totals is not None
        self._lengths.append((self._totals.num_tokens, self._totals.num_squared_tokens))
        tokens, squared = (sum(values) for values in zip(*self._lengths, strict=True))
        values["total_real_tokens_in_batch"] = tokens / len(self._lengths)
        values["seqlen_squared_sum_in_batch"] = squared / len(self._lengths)
        if not values["iteration"] % get_args().log_interval:
            self._lengths.clear()

    def _wrap_save_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            # Else the rerun machine pickles the step it will rerun, which the resumed run plans
            # again (rerun_state_machine.py `state_dict`, 0.19.2).
            bound.arguments["train_data_iterator"] = None
            with self._run.saving():
                return original(*bound.args, **bound.kwargs)

        return save_checkpoint

    def _wrap_loss_scale(self, original: staticmethod[Any, Any]) -> staticmethod[[Any], None]:
        def set_loss_scale(scale: Any) -> None:
            totals = self._totals
            weight = 1.0  # that Megatron counts for a loss token
            if totals is not None and totals.num_loss_tokens:
                weight = totals.loss_weight / totals.num_loss_tokens
            original.__func__(scale if weight == 1 else scale * weight)

        return staticmethod(set_loss_scale)


def _apply_expert_bias(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_expert_bias(router: Any, routing_map: Any, padding_mask: Any = None) -> Any:
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        return original(router, routing_map)

    return apply_expert_bias


def _count_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """The weight of a loss becomes the mean over its ranks, whichever of them have the padding.

    Without padding that is what Megatron gives with no mask.
    """

    def count(*, reduce_group: Any, with_padding_mask: bool = False, **options: Any) -> Any:
        found = original(reduce_group=reduce_group, with_padding_mask=with_padding_mask, **options)
        if not with_padding_mask:
            return found
        per_expert, _, total = found
        groups = options.get("reduce_groups") or [reduce_group]  # several in dev
        return per_expert, total / math.prod(group.size() for group in groups), total

    return count


_ROUTERS = {
    "TopKRouter._apply_expert_bias": _apply_expert_bias,
    "get_tokens_per_expert_and_token_count": _count_tokens,
}


def _rotated_at_once(_original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.models.common.embeddings import rope_utils

    def rotate(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, **options: Any) -> Tensor:
        group = options.pop("cp_group")
        options.pop("max_seqlen", None)  # of main
        size, rank = group.size(), group.rank()
        starts = cu_seqlens // size
        place = torch.arange(t.size(0), device=t.device, dtype=starts.dtype)
        sample = torch.searchsorted(starts, place, right=True) - 1
        place = place - starts[sample]
        if (
            size > 1
        ):  # of a sample's 2 * size chunks this rank has the one at `rank`, and its mirror
            chunk = (starts[sample + 1] - starts[sample]) // 2
            place = place + chunk * torch.where(place < chunk, rank, 2 * size - 2 - rank)
        if freqs.size(0) == t.size(0) * size:  # of every place of the pack
            place = place + cu_seqlens[sample]
        rotated: Tensor = rope_utils._apply_rotary_pos_emb_bshd(
            t.unsqueeze(1), freqs[place], **options
        )
        return rotated.squeeze(1)

    return rotate


def _compiled_once(original: Callable[[], Any]) -> Callable[[], Any]:
    folder = Path(inspect.getfile(inspect.unwrap(original))).parent

    def compile_helpers() -> Any:
        built = any((folder / f"helpers_cpp{end}").is_file() for end in EXTENSION_SUFFIXES)
        return None if built and not (folder / "Makefile").is_file() else original()

    return compile_helpers


class _StepCount(Fraction):
    """Samples per replica of a step; times the data-parallel size it is an integer again.

    `1 / count` is 1 / M: Megatron divides by it what it has added up over micro-batches to log it,
    the losses of routers and of multi-token prediction (training.py 2760 to 2806, 0.19.2).
    """

    num_micro_batches: int

    def __mul__(self, other: Any) -> Any:
        value = Fraction.__mul__(self, other)
        if not isinstance(value, Fraction):
            return value
        if value.denominator == 1:
            return value.numerator
        return _step_count(value, self.num_micro_batches)

    __rmul__ = __mul__

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.num_micro_batches


def _step_count(value: Fraction, num_micro_batches: int) -> _StepCount:
    count = _StepCount(value)
    count.num_micro_batches = num_micro_batches
    return count


class StepCalculator:
    """Stands in for Megatron's global micro-batch calculator during a run.

    Megatron multiplies `get_num_microbatches()` by micro-batch size and data-parallel size wherever
    it counts samples (train_step 2523, training_log 2661, train 3937; 0.19.2). With micro-batches
    of 1 its count is "samples per replica", and that is what it gets here. Between `begin_step` and
    the loop's next `update` it is the step's own; otherwise the base calculator's, so the loop's
    check that the count never decreases (training.py 3766) and its save on an increase see a
    constant.
    """

    def __init__(self, base: Any, *, num_replicas: int) -> None:
        self._base = base
        self._num_replicas = num_replicas
        self._totals: StepTotals | None = None

    def begin_step(self, totals: StepTotals) -> None:
        """The trainer is about to run this step."""
        self._totals = totals

    def get(self) -> int | _StepCount:
        """Samples per replica of the step in progress."""
        totals = self._totals
        if totals is None:
            count: int = self._base.get()
            return count
        samples = Fraction(totals.num_consumed, self._num_replicas)
        return _step_count(samples, totals.num_micro_batches)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """The loop is between steps."""
        self._totals = None
        self._base.update(consumed_samples, consistency_check, verbose)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)
