"""The names of Bridge that ODB replaces during a run, and the one that begins it.

Each replacement wraps the original and is undone by `BridgeHooks.undo`; `install_entry` stays,
and leaves runs alone whose configuration never had ODB. Of `megatron.bridge.training` 0.6.2:

| name | why |
|---|---|
| `pretrain._pretrain` | begins a run, for `pretrain()` and `finetune()` alike |
| `pretrain._finish_train`, `_cleanup_after_pretrain_failure` | end it, with process groups alive |
| `train.get_forward_backward_func`, `eval.get_forward_backward_func` | the plan's M |
| `train.training_log` | the step log |
| `train.save_checkpoint_and_time` | no watchdog ends the process within |
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from odb_megatron.megatron.hooks import Hooks
from odb_megatron.megatron.run import OdbRun

__all__ = ["BridgeHooks", "install_entry", "require_names"]

_NAMES = {
    "pretrain": ("_pretrain", "_finish_train", "_cleanup_after_pretrain_failure"),
    "train": (
        "get_forward_backward_func",
        "training_log",
        "save_checkpoint_and_time",
    ),
    "eval": ("get_forward_backward_func",),
    "checkpointing": ("maybe_save_dataloader_state", "maybe_load_dataloader_state"),
}
"""What is replaced, or called through the iterator; all of it is there from 0.6.0 on."""

_SMALLEST_COUNT = 1e-30
"""See `megatron.forward_step.loss_func`."""


def require_names(find: Callable[[str], Any] | None = None) -> None:
    """Check that Bridge has what is replaced in it.

    Args:
        find: returns a module of `megatron.bridge.training`; for tests.

    Raises:
        ValueError: with what is missing.
    """
    find = find or _module
    missing = [
        f"megatron.bridge.training.{module}.{name}"
        for module, names in _NAMES.items()
        for name in names
        if not hasattr(find(module), name)
    ]
    if missing:
        raise ValueError(
            f"this Megatron-Bridge has no {', '.join(missing)}: odb_megatron was written for 0.6 "
            "and run with 0.6.2; use that"
        )


def install_entry(make_run: Callable[[Any], Any]) -> None:
    """Have Bridge's `pretrain()` make a run for each configuration that has one.

    Args:
        make_run: returns the run for Bridge's `GlobalState`, or None.
    """
    module = _module("pretrain")
    if getattr(module._pretrain, "is_odb_entry", False):
        return
    original = module._pretrain

    @functools.wraps(original)
    def _pretrain(state: Any, *args: Any, **kwargs: Any) -> Any:
        run = make_run(state)
        if run is None:
            return original(state, *args, **kwargs)
        names = {
            "_finish_train": lambda: run.__exit__(None, None, None),
            "_cleanup_after_pretrain_failure": lambda: run.__exit__(*sys.exc_info()),
        }
        originals = {name: getattr(module, name) for name in names}
        with run:
            try:
                for name, end in names.items():
                    setattr(module, name, _after(end, originals[name]))
                return original(state, *args, **kwargs)
            finally:
                for name, function in originals.items():
                    setattr(module, name, function)

    _pretrain.is_odb_entry = True  # type: ignore[attr-defined]
    module._pretrain = _pretrain


class BridgeHooks(Hooks):
    """Installs and removes the replacements; see `megatron.hooks.Hooks`."""

    def __init__(self, run: OdbRun, *, state: Any, plans_shapes: bool = False) -> None:
        super().__init__(run, packed=True, plans_shapes=plans_shapes)
        self._state = state

    def install(self) -> None:
        """Replace the names."""
        train, evaluation = _module("train"), _module("eval")
        for module in (train, evaluation):
            wrap = self._wrap_get_forward_backward_func
            self.replace_in(module, "get_forward_backward_func", wrap)
        self.replace_in(train, "training_log", self._wrap_training_log)
        self.replace_in(train, "save_checkpoint_and_time", self._wrap_save)

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


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron.bridge.training.{name}")
