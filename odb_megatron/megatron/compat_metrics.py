"""What Megatron gathers during a step to log it, which it keeps in other places in each version.

Must not log. What a version does not have is left out; each function says what that means.

| gathered | kept in |
|---|---|
| losses of routers | `moe_logging`'s tracker; before 0.18 a dictionary of `moe_utils` |
| losses of multi-token prediction | `MTPLossLoggingHelper.tracker` |
| lengths of packed samples | two names of `training`; before 0.18 nowhere |
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from odb_megatron.plan.record import StepTotals

__all__ = [
    "LoggedFlops",
    "counts_real_flops",
    "flops_of_real_tokens",
    "forget_metrics",
    "logged_per_micro_batch",
    "metrics_kept",
    "seqlen_stats_updater",
]

_UPDATER = "update_seqlen_stats_from_cu_seqlens"

_LENGTHS = {"_seqlen_stats_in_iteration": None, "_seqlen_stats_active": False}
"""Names of `training` with the sums of an iteration's lengths, and their values before it."""


def seqlen_stats_updater() -> Callable[[Any], None]:
    """Return Megatron's accounting of packed samples' FLOPs, which takes `cu_seqlens`.

    Without it (0.17) `flops_of_real_tokens` stands in.
    """
    from megatron.training import training

    update: Callable[[Any], None] | None = getattr(training, _UPDATER, None)
    return _ignore if update is None else update


def counts_real_flops(module: Any = None) -> bool:
    """Whether Megatron counts the FLOPs of packed samples by their real lengths.

    Args:
        module: `megatron.training.training`; imported where it is not given.
    """
    if module is None:
        from megatron.training import training

        module = training
    return hasattr(module, _UPDATER)


def flops_of_real_tokens(
    function: Callable[..., Any], args: argparse.Namespace, *, num_tokens: float, num_squared: float
) -> Any:
    """Return the FLOPs of a step's real lengths, from a function that knows one length for all.

    It is `batch * length * (a + b * length)` (training.py `num_floating_point_operations`, 0.17.1),
    so the length Σl² / Σl, and as many samples of it as have Σl tokens, give the sum over samples.

    Args:
        function: Megatron's, of its arguments and a batch size.
        args: Megatron's arguments.
        num_tokens: Σl of the step.
        num_squared: Σl² of the step.
    """
    if not num_tokens:
        return 0.0
    changed = copy.copy(args)
    changed.seq_length = num_squared / num_tokens
    return function(changed, num_tokens / changed.seq_length)


class LoggedFlops:
    """Sums of lengths since Megatron's last log line.

    The line's throughput is the FLOPs of one step over the mean time of its interval's
    (`training_log`, 0.17 to 0.19). Steps differ here, so that it must be the mean step.
    """

    def __init__(self) -> None:
        self._steps: dict[int, tuple[int, int]] = {}
        self._is_logging = False

    def add(self, totals: StepTotals) -> None:
        """A step is about to run (again, when Megatron replays it)."""
        self._steps[totals.step] = (totals.num_tokens, totals.num_squared_tokens)

    @contextmanager
    def line(self, iteration: int, interval: int) -> Iterator[None]:
        """Megatron logs an iteration within, and prints a line at multiples of `interval`."""
        self._is_logging = True
        try:
            yield
        finally:
            self._is_logging = False
            if not iteration % interval:
                self._steps.clear()

    def mean(self) -> tuple[float, float] | None:
        """Return the mean tokens and squared tokens of a step; None outside of `line`."""
        if not self._is_logging or not self._steps:
            return None
        tokens, squared = (sum(values) for values in zip(*self._steps.values(), strict=True))
        return tokens / len(self._steps), squared / len(self._steps)


def forget_metrics() -> None:
    """Drop what a run has gathered, so that the next one starts as in a fresh process."""
    from megatron.training import training

    for name, value in _LENGTHS.items():
        if hasattr(training, name):
            setattr(training, name, value)


@contextmanager
def metrics_kept() -> Iterator[None]:
    """Put back, at its end, what waits to be logged; it begins with nothing gathered."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import training

    routers, name = _router_losses()
    kept: list[tuple[Any, str, Any]] = [(routers, name, {}), (MTPLossLoggingHelper, "tracker", {})]
    kept += [(training, name, value) for name, value in _LENGTHS.items() if hasattr(training, name)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in kept]
    for owner, name, value in kept:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


@contextmanager
def logged_per_micro_batch(module: Any, count: int) -> Iterator[None]:
    """Have `training_log` average the losses of `count` micro-batches.

    It scales them by `1 / get_num_microbatches()`, which here counts samples.

    Args:
        module: `megatron.training.training`.
        count: micro-batches that this replica ran in the step.
    """
    scale = 1 / count
    wrap: dict[str, Callable[[Any], Any]] = {
        "get_moe_metrics_tracker": lambda found: lambda: _Scaled(found(), "report", scale),
        "track_moe_metrics": lambda found: _scaled(found, scale),  # 0.17
        "MTPLossLoggingHelper": lambda found: _Scaled(found, "track_mtp_metrics", scale),
    }
    originals = {name: getattr(module, name) for name in wrap if hasattr(module, name)}
    for name, original in originals.items():
        setattr(module, name, wrap[name](original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def _router_losses() -> tuple[Any, str]:
    """Return where the routers' losses are kept: an object, and the name of its attribute."""
    from megatron.core.transformer.moe import moe_utils

    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:
        return moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"
    return moe_logging.get_moe_metrics_tracker(), "_metrics"


class _Scaled:
    """An object one of whose methods gets another loss scale."""

    def __init__(self, wrapped: Any, name: str, scale: float) -> None:
        self._wrapped, self._name, self._scale = wrapped, name, scale

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        return _scaled(found, self._scale) if name == self._name else found


def _scaled(function: Callable[..., Any], scale: float) -> Callable[..., Any]:
    """Return a function whose `loss_scale`, given by name or as the first argument, is another."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            return function(scale, *args[1:], **kwargs)
        return function(**{**kwargs, "loss_scale": scale})

    return call


def _ignore(cu_seqlens: Any) -> None:
    del cu_seqlens
