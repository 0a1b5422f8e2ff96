"""The names of Bridge that ODB replaces during a run, and the one that begins it.

Each replacement wraps the original and is undone by `BridgeHooks.undo`; `install_entry` stays,
and leaves runs alone whose configuration never had ODB.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from odb_megatron.megatron.hooks import Hooks, Name, Replacements
from odb_megatron.megatron.run import OdbRun

__all__ = ["BridgeHooks", "install_entry"]

_TRAINING = "megatron.bridge.training"
_SUPPORTED = "Megatron-Bridge 0.6 (run with 0.6.2)"


def _names(module: str, names: str, reason: str) -> list[Name]:
    found = names.split()
    return [Name(f"{_TRAINING}.{module}", name, reason, _SUPPORTED) for name in found]


(ENTRY,) = _names("pretrain", "_pretrain", "begins a run, for pretrain() and finetune() alike")
FINISH, CLEANUP = _names(
    "pretrain",
    "_finish_train _cleanup_after_pretrain_failure",
    "ends it, with process groups alive",
)
SCHEDULES = [
    *_names("train", "get_forward_backward_func", "the plan's M"),
    *_names("eval", "get_forward_backward_func", "the plan's M"),
]
(LOG,) = _names("train", "training_log", "the step log")
(SAVE,) = _names("train", "save_checkpoint_and_time", "no watchdog ends the process within")
CALLED = _names(
    "checkpointing",
    "maybe_save_dataloader_state maybe_load_dataloader_state",
    "nothing is replaced: they call the iterator, which saves and restores the data's state",
)

_SMALLEST_COUNT = 1e-30
"""See `megatron.forward_step.loss_func`."""


def install_entry(make_run: Callable[[Any], Any]) -> None:
    """Have Bridge's `pretrain()` make a run for each configuration that has one.

    Args:
        make_run: returns the run for Bridge's `GlobalState`, or None.
    """
    module = importlib.import_module(ENTRY.module)
    if getattr(getattr(module, ENTRY.name, None), "is_odb_entry", False):
        return

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _pretrain(state: Any, *args: Any, **kwargs: Any) -> Any:
            run = make_run(state)
            if run is None:
                return original(state, *args, **kwargs)
            replaced = Replacements()
            ends = {
                FINISH: lambda: run.__exit__(None, None, None),
                CLEANUP: lambda: run.__exit__(*sys.exc_info()),
            }
            with run:
                try:
                    for name, end in ends.items():
                        replaced.replace(name, functools.partial(_after, end))
                    return original(state, *args, **kwargs)
                finally:
                    replaced.undo()

        _pretrain.is_odb_entry = True  # type: ignore[attr-defined]
        return _pretrain

    Replacements().replace(ENTRY, wrap)


class BridgeHooks(Hooks):
    """Installs and removes the replacements; see `megatron.hooks.Hooks`."""

    def __init__(self, run: OdbRun, *, state: Any, plans_shapes: bool = False) -> None:
        super().__init__(run, packed=True, plans_shapes=plans_shapes)
        self._state = state

    def install(self) -> None:
        """Replace the names."""
        for name in SCHEDULES:
            self.replace(name, self._wrap_get_forward_backward_func)
        for name in CALLED:
            self.replace(name, lambda original: original)
        self.replace(LOG, self._wrap_training_log)
        self.replace(SAVE, self._wrap_save)

    def _wrap_get_forward_backward_func(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Besides M: a step or an evaluation without a loss token reports 0, not 0 / 0."""

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = original(*args, **kwargs)

            def forward_backward(**arguments: Any) -> Any:
                reports = schedule(**arguments)
                if not arguments.get("collect_non_loss_data", False):
                    _avoid_zero_counts(reports)
                return reports

            return forward_backward

        return super()._wrap_get_forward_backward_func(get_forward_backward_func)

    def _wrap_training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            values = signature.bind(*args, **kwargs).arguments
            result = original(*args, **kwargs)
            self._run.on_logged({**values, "iteration": self._state.train_state.step})
            return result

        return training_log

    def _wrap_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint_and_time(*args: Any, **kwargs: Any) -> Any:
            with self._run.saving():
                return original(*args, **kwargs)

        return save_checkpoint_and_time


def _avoid_zero_counts(reports: Any) -> None:
    """Raise counts of (sum of losses, loss tokens) to 1e-30, which leaves real ones as they are."""
    for report in reports or ():
        for value in report.values():
            if value.numel() == 2:
                value.view(-1)[1].clamp_(min=_SMALLEST_COUNT)


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(then)
    def both(*args: Any, **kwargs: Any) -> Any:
        try:
            first()
        finally:
            result = then(*args, **kwargs)
        return result

    return both
