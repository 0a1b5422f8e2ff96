"""How a pretrain script gets ODB: the package's own, and what stands in for another's imports.

    torchrun --nproc-per-node 8 -m odb_megatron.megatron.pretrain --odb --odb-token-budget 16384 \
        --data-path chat.jsonl ...

Imports Megatron and torch only when it runs: data-loader workers import the main module again.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["FLAG", "HostScript", "main", "pretrain_gpt", "wants_odb", "with_odb"]

FLAG = "--odb"

_DATA, _STEP = "train_valid_test_dataset_provider", "forward_step_func"
_MODEL, _CONFIG = "model_provider", "cfg_container"
_READ = (_DATA, _STEP, _MODEL, _CONFIG)
_PASSED_ON = ("model_type", "store", "get_embedding_ranks", "get_position_embedding_ranks")
"""Arguments of `pretrain()` that ODB leaves to the script."""

_GPT_CONFIG = "megatron.training.models.gpt.GPTModelConfig"
_GPT_BUILDER = "gpt_builders.gpt_builder"
_HINT = (
    "use pretrain_gpt.py of a Megatron-LM checkout, or train with "
    "'odb-megatron pretrain' (python -m odb_megatron.megatron.pretrain)"
)
_MODELOPT = " (a ModelOpt model's losses come from its own forward step)"
_HYBRID = (
    " (the layers of a hybrid model are Transformer Engine's and Mamba's, for which this version "
    "has no packed attention and state)"
)
_OTHER_MODELS = {"modelopt": _MODELOPT, "hybrid": _HYBRID, "mamba": _HYBRID}

Function = Callable[..., Any]


def pretrain_gpt(
    *, datasets: Callable[[Sequence[int | None]], Sequence[Any]] | None = None
) -> None:
    """Pretrain or fine-tune a GPT as `sys.argv` says; without `--odb` in padded micro-batches.

    Args:
        datasets: your own datasets instead of `--data-path`, as `OdbRun` takes them.

    Raises:
        SystemExit: flags that cannot be used (2), `--help`, or Megatron's own exits.
    """
    from odb_megatron.errors import usage_errors
    from odb_megatron.megatron.versions import megatron_version

    with usage_errors():
        megatron_version()
    from odb_megatron.megatron.run import OdbRun
    from odb_megatron.megatron.setup import parse_and_validate_args, require_paths

    args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"})
    require_paths(args, has_datasets=datasets is not None)
    with OdbRun(args, datasets=datasets) as run:
        run.pretrain()


def main() -> None:
    """Run `pretrain_gpt` on the data that the flags name."""
    pretrain_gpt()


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


def with_odb(pretrain: Function, parse_and_validate_args: Function) -> tuple[Function, Function]:
    """Return what a pretrain script calls in place of its two imports, as `sys.argv` asks for.

    Both as they are without `--odb`. (`--help` never gets here: Megatron's in-process restart
    parses the command line first, and prints the flags that it knows.)

    Args:
        pretrain: `megatron.training.pretrain`.
        parse_and_validate_args: of `megatron.training.arguments`.

    Raises:
        SystemExit: ODB's flags without `--odb` (2).
    """
    from odb_megatron.errors import usage_errors

    with usage_errors():
        asked = wants_odb(sys.argv[1:])
    if not asked:
        return pretrain, parse_and_validate_args
    script = HostScript(pretrain)
    return script.pretrain, script.parse_and_validate_args


class HostScript:
    """A script's parsing and training with ODB.

    The script goes on as it is written: it parses, builds its configuration and calls `pretrain()`.
    In that call its data sets and forward step are replaced. A call in a form that
    is not known here is an error.

    Args:
        pretrain: Megatron's own.
    """

    def __init__(self, pretrain: Function) -> None:
        self._original = pretrain
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
                    f"are misspelt: {_HINT}"
                )
        self._args = parse_and_validate_args(args_defaults, extra_args_provider)
        return self._args

    def pretrain(self, *args: Any, **kwargs: Any) -> Any:
        """Call Megatron's `pretrain()` with ODB's data sets and forward step.

        Raises:
            SystemExit: a call that ODB cannot stand in for, or flags that cannot be used (2).
        """
        from odb_megatron.errors import usage_errors

        with usage_errors():
            call = _bind(self._original, args, kwargs)
            _refuse_unknown(call.arguments)
            if self._args is None:
                raise ValueError(
                    f"{FLAG}: this script called pretrain() and has not called "
                    f"megatron.training.arguments.parse_and_validate_args before: {_HINT}"
                )
        from odb_megatron.megatron.run import OdbRun
        from odb_megatron.megatron.setup import require_paths

        require_paths(self._args)
        with OdbRun(self._args) as run:
            call.arguments[_DATA] = run.datasets_provider
            call.arguments[_STEP] = run.forward_step
            if self._args.rank == 0:
                name = os.path.basename(sys.argv[0])
                print(f"odb: in place of {name}'s own data sets and forward step")
            return self._original(*call.args, **call.kwargs)


def _bind(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """Bind a call to a `pretrain()`, whose arguments have one meaning by name in every version."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    if not {*_READ, "model_type"} <= set(names):
        raise ValueError(
            f"this Megatron's pretrain() takes ({', '.join(names[:5])}, ...), which is not a form "
            "that this odb_megatron knows: use megatron-core 0.18 to 0.19 or main"
        )
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{FLAG}: pretrain() was called with other arguments: {error}") from None


def _refuse_unknown(given: dict[str, Any]) -> None:
    """Check that a call of `pretrain()` trains a GPT and holds nothing that ODB would drop.

    Raises:
        ValueError: it does not.
    """
    model, provider = getattr(given[_CONFIG], "model", None), given.get(_MODEL)
    for name, value in given.items():
        is_given = value is not None and value is not False
        if name == _MODEL and model is None:
            continue
        if is_given and (name == _MODEL or name not in (*_READ, *_PASSED_ON)):
            raise ValueError(
                f"{FLAG}: pretrain() was called with {name}, which ODB would drop: {_HINT}"
            )
    if provider is None:
        expected = _GPT_CONFIG
        found = "no model configuration" if model is None else _name(type(model))
    else:
        expected = _GPT_BUILDER
        found = _name(next(iter(getattr(provider, "args", ())), provider))  # partial(_, builder)
    if found != expected:
        why = next((text for part, text in _OTHER_MODELS.items() if part in found.lower()), "")
        raise ValueError(
            f"{FLAG}: pretrain() was called with {found}, expected {expected}{why}: {_HINT}"
        )


def _name(value: Any) -> str:
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}"


if __name__ == "__main__":
    main()
