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
from typing import Any

__all__ = ["FLAG", "HostScript", "wants_odb", "with_odb"]

FLAG = "--odb"

_PROVIDER = "train_valid_test_dataset_provider"
_FORWARD_STEP = "forward_step_func"
_CONFIG = "cfg_container"
_MODEL_PROVIDER = "model_provider"

_PASSED_ON = (
    _CONFIG,
    "model_type",
    "store",
    "get_embedding_ranks",
    "get_position_embedding_ranks",
)
"""Arguments of `pretrain()` that ODB leaves to the script."""

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
        Both as they are without `--odb`; `--help` lists ODB's flags too.

    Raises:
        SystemExit: ODB's flags without `--odb` (2).
    """
    from odb_megatron.megatron.usage import usage_errors

    flags = sys.argv[1:]
    with usage_errors():
        asked = wants_odb(flags) or bool({"-h", "--help"} & set(flags))
    if not asked:
        return pretrain, parse_and_validate_args
    script = HostScript(pretrain)
    return script.pretrain, script.parse_and_validate_args


class HostScript:
    """A script's parsing and training with ODB.

    Args:
        pretrain: Megatron's own.

    Attributes:
        has_trained: whether `pretrain` was called.
    """

    def __init__(self, pretrain: Function) -> None:
        self.has_trained = False
        self._pretrain = pretrain
        self._args: argparse.Namespace | None = None

    def parse_and_validate_args(
        self,
        extra_args_provider: Function | None = None,
        ignore_unknown_args: bool = False,
        args_defaults: dict[str, Any] | None = None,
    ) -> argparse.Namespace:
        """Parse as Megatron does, ODB's flags among its own.

        Raises:
            SystemExit: flags that cannot be used (2), or `--help` (0).
        """
        from odb_megatron.megatron.setup import parse_and_validate_args
        from odb_megatron.megatron.usage import usage_errors

        with usage_errors():
            if ignore_unknown_args:
                raise ValueError(
                    f"this script ignores flags that it does not know, and so {FLAG}'s when they "
                    f"are misspelt: {_WAY_OUT}"
                )
        self._args = parse_and_validate_args(args_defaults, extra_args_provider)
        return self._args

    def pretrain(self, *args: Any, **kwargs: Any) -> Any:
        """Call Megatron's `pretrain()` with ODB's data sets and forward step.

        Raises:
            SystemExit: a call that ODB cannot stand in for (2).
        """
        from odb_megatron.megatron.usage import usage_errors

        self.has_trained = True
        with usage_errors():
            call, model_config = self._read(args, kwargs)
        assert self._args is not None, "read above"

        from odb_megatron.megatron.run import OdbRun

        with OdbRun(self._args) as run:
            run.prepare_model(model_config)
            call.arguments[_PROVIDER] = run.datasets_provider
            call.arguments[_FORWARD_STEP] = run.forward_step
            if self._args.rank == 0:
                name = os.path.basename(sys.argv[0])
                print(f"odb: in place of {name}'s own data sets, forward step and layer spec")
            return self._pretrain(*call.args, **call.kwargs)

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[inspect.BoundArguments, Any]:
        """Return the call by argument name, and its model's configuration.

        Raises:
            ValueError: a form of call that is not known here.
        """
        if self._args is None:
            raise ValueError(
                f"{FLAG}: this script called pretrain() and has not called "
                f"megatron.training.arguments.parse_and_validate_args before: {_WAY_OUT}"
            )
        call = _bind(self._pretrain, args, kwargs)
        expected = {_PROVIDER, _FORWARD_STEP, _CONFIG}
        if missing := expected - set(call.arguments):
            raise ValueError(
                f"{FLAG}: pretrain() was called without {', '.join(sorted(missing))}: {_WAY_OUT}"
            )
        for name, value in call.arguments.items():
            is_given = value is not None and value is not False
            if is_given and name not in (_PROVIDER, _FORWARD_STEP, *_PASSED_ON):
                raise ValueError(f"{FLAG} cannot stand in for {_describe(name)}: {_WAY_OUT}")
        model = getattr(call.arguments[_CONFIG], "model", None)
        _require_gpt(model)
        return call, model


def _bind(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    try:
        return inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{FLAG}: pretrain() was called with other arguments: {error}") from None


def _describe(name: str) -> str:
    if name == _MODEL_PROVIDER:
        return "a script that builds its own model (pretrain(model_provider=...))"
    return f"a script that passes {name} to pretrain()"


def _require_gpt(model: Any) -> None:
    """Refuse models other than Megatron's GPT."""
    kind = type(model)
    name = f"{kind.__module__}.{kind.__name__}"
    if name == "megatron.training.models.gpt.GPTModelConfig":
        return
    seen = "no model configuration" if model is None else name
    reason = _OTHER_MODELS.get(kind.__name__, "it is for GPT models")
    raise ValueError(f"{FLAG}: pretrain() was called with {seen}, and {reason}: {_WAY_OUT}")


_OTHER_MODELS = {
    "HybridModelConfig": "the layers of a hybrid model are Transformer Engine's and Mamba's, for "
    "which this version has no packed attention or state",
    "ModelOptModelConfig": "the losses of a ModelOpt model come from its own forward step",
    "ModelOptHybridModelConfig": "the losses of a ModelOpt model come from its own forward step",
}
