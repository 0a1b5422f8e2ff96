"""Switches ODB on in Megatron-LM's own pretrain_gpt.py: what stands in for the names it imports.

The script goes on as it is written: it parses, builds its configuration and calls `pretrain()`.
With `--odb` its data sets and forward step are replaced in that call, and the layer spec in the
configuration; without `--odb` nothing is. Must not import Megatron or torch before it is asked to
work, and must not guess: a call in a form that is not known here is an error.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from odb_megatron.megatron.compat_pretrain import (
    PretrainForm,
    already_parsed,
    gpt_model_provider,
    pretrain_form,
)

__all__ = ["FLAG", "HostScript", "wants_odb", "with_odb"]

FLAG = "--odb"

_PROVIDER = "train_valid_test_dataset_provider"
_FORWARD_STEP = "forward_step_func"
_MODEL_PROVIDER = "model_provider"
_CONFIG = "cfg_container"
_EXTRA_ARGS, _DEFAULTS = "extra_args_provider", "args_defaults"

_PASSED_ON = ("model_type", "store", "get_embedding_ranks", "get_position_embedding_ranks")
"""Arguments of `pretrain()` that ODB leaves to the script."""

_RUN = "odb_megatron.megatron.run"
"""Where the data sets come from that a script with ODB in it gives."""

_READ = {
    PretrainForm.PARSES: (_PROVIDER, _FORWARD_STEP, _MODEL_PROVIDER, _EXTRA_ARGS, _DEFAULTS),
    PretrainForm.MODEL_PROVIDER: (_PROVIDER, _FORWARD_STEP, _MODEL_PROVIDER, _CONFIG),
    PretrainForm.MODEL_CONFIG: (_PROVIDER, _FORWARD_STEP, _CONFIG),
}
"""Those that it reads or replaces."""

_GPT_CONFIG = "megatron.training.models.gpt.GPTModelConfig"
_GPT_BUILDER = "gpt_builders.gpt_builder"

_WAY_OUT = (
    "use pretrain_gpt.py of a Megatron-LM checkout, or train with "
    "'odb-megatron pretrain' (python -m odb_megatron.megatron.pretrain)"
)

Function = Callable[..., Any]


def wants_odb(flags: Sequence[str]) -> bool:
    """Whether a command line asks for ODB.

    Raises:
        ValueError: ODB's flags without `--odb`, which would do nothing.
    """
    if FLAG in flags:
        return True
    own = [flag for flag in flags if flag.startswith((f"{FLAG}-", f"--no{FLAG[1:]}-"))]
    if own:
        names = ", ".join(flag.partition("=")[0] for flag in own)
        raise ValueError(f"{names} would do nothing without {FLAG}: add {FLAG}, or drop them")
    return False


def with_odb(
    pretrain: Function, parse_and_validate_args: Function | None = None
) -> tuple[Function, Function | None]:
    """Return what a pretrain script calls in place of its two imports, as `sys.argv` asks for.

    Args:
        pretrain: `megatron.training.pretrain`.
        parse_and_validate_args: of `megatron.training.arguments`; None before Megatron 0.18, whose
            `pretrain()` parses.

    Returns:
        Both as they are without `--odb`, and where `odb_megatron.run` has replaced them already.
        (`--help` never gets here: Megatron's in-process restart
        parses the command line first, and prints the flags that it knows.)

    Raises:
        SystemExit: ODB's flags without `--odb` (2).
    """
    from odb_megatron.errors import usage_errors

    with usage_errors():
        asked = wants_odb(sys.argv[1:])
    if not asked or isinstance(getattr(pretrain, "__self__", None), HostScript):
        return pretrain, parse_and_validate_args
    script = HostScript(pretrain)
    return script.pretrain, script.parse_and_validate_args


class HostScript:
    """A script's parsing and training with ODB.

    Args:
        pretrain: Megatron's own.

    Attributes:
        has_trained: whether `pretrain` was called.
        original: Megatron's own `pretrain()`, whose form this one has.
    """

    def __init__(self, pretrain: Function) -> None:
        self.has_trained = False
        self.original = pretrain
        self._args: argparse.Namespace | None = None

    def parse_and_validate_args(
        self,
        extra_args_provider: Function | None = None,
        ignore_unknown_args: bool = False,
        args_defaults: dict[str, Any] | None = None,
    ) -> argparse.Namespace:
        """Parse as Megatron does, ODB's flags among its own.

        Raises:
            SystemExit: flags that cannot be used (2).
        """
        from odb_megatron.errors import usage_errors
        from odb_megatron.megatron.setup import parse_and_validate_args

        with usage_errors():
            if ignore_unknown_args:
                raise ValueError(
                    f"this script ignores flags that it does not know, and so {FLAG}'s when they "
                    f"are misspelt: {_WAY_OUT}"
                )
        self._args = parse_and_validate_args(args_defaults, extra_args_provider)
        return self._args

    def pretrain(self, *args: Any, **kwargs: Any) -> Any:
        """Call Megatron's `pretrain()` with ODB's data sets, forward step and layer spec.

        A script that gives those itself, as the package's own does, is left as it is.

        Raises:
            SystemExit: a call that ODB cannot stand in for, or flags that cannot be used (2).
        """
        from odb_megatron.errors import usage_errors

        self.has_trained = True
        with usage_errors():
            form = pretrain_form(self.original)
            call = _bind(self.original, args, kwargs)
            given = call.arguments
            if getattr(given[_PROVIDER], "__module__", None) == _RUN:
                return self.original(*args, **kwargs)
            _refuse_unknown(given, form)
        if form is PretrainForm.PARSES:
            self.parse_and_validate_args(given.get(_EXTRA_ARGS), args_defaults=given.get(_DEFAULTS))
        if self._args is None:
            with usage_errors():
                raise ValueError(
                    f"{FLAG}: this script called pretrain() and has not called "
                    f"megatron.training.arguments.parse_and_validate_args before: {_WAY_OUT}"
                )
        return self._train(call, form, self._args)

    def _train(
        self, call: inspect.BoundArguments, form: PretrainForm, args: argparse.Namespace
    ) -> Any:
        from odb_megatron.megatron.paths import require_paths
        from odb_megatron.megatron.run import OdbRun

        require_paths(args)
        with OdbRun(args) as run:
            if form is PretrainForm.MODEL_CONFIG:
                run.prepare_model(call.arguments[_CONFIG].model)
            else:
                provider = gpt_model_provider(args, run.prepare_model)
                call.arguments[_MODEL_PROVIDER] = provider
            call.arguments[_PROVIDER] = run.datasets_provider
            call.arguments[_FORWARD_STEP] = run.forward_step
            if args.rank == 0:
                name = os.path.basename(sys.argv[0])
                print(f"odb: in place of {name}'s own data sets, forward step and layer spec")
            with already_parsed(args) if form is PretrainForm.PARSES else nullcontext():
                return self.original(*call.args, **call.kwargs)


def _bind(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    try:
        return inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{FLAG}: pretrain() was called with other arguments: {error}") from None


def _refuse_unknown(given: dict[str, Any], form: PretrainForm) -> None:
    """Check that a call of `pretrain()` trains a GPT and holds nothing that ODB would drop.

    Raises:
        ValueError: it does not.
    """
    for name, value in given.items():
        is_given = value is not None and value is not False
        if is_given and name not in (*_READ[form], *_PASSED_ON):
            raise ValueError(
                f"{FLAG}: pretrain() was called with {name}, which ODB would drop: {_WAY_OUT}"
            )
    if form is PretrainForm.MODEL_CONFIG:
        model, expected = getattr(given[_CONFIG], "model", None), _GPT_CONFIG
        found = "no model configuration" if model is None else _name(type(model))
    else:
        provider, expected = given[_MODEL_PROVIDER], _GPT_BUILDER
        found = _name(next(iter(getattr(provider, "args", ())), provider))  # partial(_, builder)
    if found != expected:
        why = next((text for part, text in _OTHER_MODELS.items() if part in found.lower()), "")
        raise ValueError(
            f"{FLAG}: pretrain() was called with {found}, expected {expected}{why}: {_WAY_OUT}"
        )


def _name(value: Any) -> str:
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}"


_MODELOPT = " (a ModelOpt model's losses come from its own forward step)"
_HYBRID = (
    " (the layers of a hybrid model are Transformer Engine's and Mamba's, for which this version "
    "has no packed attention and state)"
)
_OTHER_MODELS = {"modelopt": _MODELOPT, "hybrid": _HYBRID, "mamba": _HYBRID}
