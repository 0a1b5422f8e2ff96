"""Arguments of `odb-megatron inspect`: their parser, their defaults, and what they ask for.

Must not read data. Imports what needs numpy only after the arguments are parsed, so that `--help`
is instant.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from odb_megatron.output_files import check_output

if TYPE_CHECKING:
    from odb_megatron.inspection.reading import DataRequest
    from odb_megatron.inspection.setting import TrainingSetting
    from odb_megatron.plan.cost import CostPrices

__all__ = [
    "EXAMPLE_FLAGS",
    "check_outputs",
    "data_request",
    "example_data",
    "fill_in",
    "make_parser",
    "refuse",
    "training_setting",
]

_DEFAULT_SAMPLES = 100_000
_DESCRIPTION = """\
Look at a data set before training on it: lengths, bad records, what padding costs, how even and how
fast steps would be, how much memory logits take, and which flags to use. Reads with the training's
own reader and plans with its own planner; runs no model. docs/inspect.md says what each figure
means. Without DATA: what 'make train' prepared in this folder, with its flags.
"""

_DEFAULTS: dict[str, object] = {
    "token_budget": 8192,
    "dp": 8,
    "overlong": "error",
    "split": "100,0,0",
    "vocab_divisible_by": 128,
}

EXAMPLE_FLAGS: dict[str, object] = {
    "seq_length": 2048,
    "token_budget": 4096,
    "dp": 2,
    "global_batch_size": 32,
    "overlong": "truncate",
    "split": "98,1,1",
    "vocab_divisible_by": 64,
    "model_shape": "layers=4,hidden=128,heads=4,groups=2,ffn=384,mlp=gated",
}
"""What `make train` runs (`examples/train_chat.py`): defaults of an inspection without data."""

_VOCAB_SIZE = 4096


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odb-megatron inspect",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "data",
        nargs="*",
        metavar="DATA",
        help="chat or text files (.jsonl, .json), Megatron .bin/.idx prefixes, or WEIGHT PATH "
        "pairs, as --data-path of the training",
    )
    data.add_argument(
        "--lengths",
        metavar="FILE",
        help="lengths in place of DATA: .npy, .json[#key], text with one per line, or "
        "lognormal:mean=500,cv=1.0,max=8192; needs numpy alone",
    )
    data.add_argument("--tokenizer", metavar="T", help="its folder, for text")
    data.add_argument(
        "--template-args",
        "--odb-template-args",
        metavar="JSON",
        help="of its chat template, as --odb-template-args",
    )
    data.add_argument(
        "--show",
        type=_count,
        default=0,
        metavar="N",
        help="print the first N records token by token with what is learnt, and nothing else; "
        "--json: one object per record",
    )
    data.add_argument("--split", metavar="A,B,C", help="as of the training (default 100,0,0)")
    data.add_argument(
        "--max-samples",
        type=_whole,
        default=_DEFAULT_SAMPLES,
        metavar="N",
        help=f"records read, a random sample; 0 for all (default {_DEFAULT_SAMPLES})",
    )
    data.add_argument("--workers", type=_whole, metavar="N", help="processes (default: all cores)")
    run = parser.add_argument_group("training (values of its flags)")
    run.add_argument("--token-budget", type=int, metavar="B", help="default 8192")
    run.add_argument("--seq-length", type=int, metavar="L", help="default: the token budget")
    run.add_argument("--dp", type=int, metavar="N", help="data-parallel replicas (default 8)")
    run.add_argument("--global-batch-size", type=int, metavar="G", help="default 16 per replica")
    run.add_argument(
        "--overlong", choices=("error", "truncate", "drop", "solo"), help="default error"
    )
    run.add_argument(
        "--train-samples", type=_count, default=0, metavar="N", help="default: one epoch"
    )
    run.add_argument("--seed", type=_whole, default=1234, help="default 1234, as Megatron's")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model-shape",
        metavar="SHAPE",
        help="layers=32,hidden=4096,heads=32[,groups=8][,ffn=14336][,kv_channels=128]"
        "[,vocab=128256][,mlp=gated|plain]: its FLOPs are the cost model",
    )
    model.add_argument(
        "--cost",
        metavar="COST",
        help="linear=1,quadratic=2.5e-5,overhead=400 in place of FLOPs, as --odb-cost of the "
        "training takes it and 'odb-megatron trace --fit-cost' prints it",
    )
    for name, what in (
        ("tp", "tensor-parallel size"),
        ("cp", "context-parallel size"),
        ("pp", "pipeline stages"),
        ("vpp", "virtual chunks per stage"),
    ):
        model.add_argument(f"--{name}", type=int, default=1, metavar="N", help=what)
    model.add_argument("--sequence-parallel", action="store_true")
    model.add_argument("--vocab-divisible-by", type=int, metavar="N", help="default 128")
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write the figures; '-' for stdout")
    output.add_argument("--plot", metavar="FILE.png", help="write the charts")
    output.add_argument("--html", metavar="FILE.html", help="write a page that needs no network")
    output.add_argument("--no-advice", action="store_true", help="skip the trials of settings")
    output.add_argument(
        "--max-logits-gib",
        type=_above_zero,
        metavar="G",
        help="advise no budget whose logits peak above this",
    )
    return parser


def fill_in(options: argparse.Namespace) -> None:
    """Give options their defaults: those of `make train` where no data is named."""
    if not options.data and options.lengths is None:
        data, tokenizer = example_data()
        options.data = [data]
        defaults = {**EXAMPLE_FLAGS, "tokenizer": tokenizer}
    elif options.data and options.lengths is not None:
        raise ValueError(
            f"DATA {' '.join(options.data)} and --lengths {options.lengths}: name one of them"
        )
    else:
        defaults = {}
    _refuse_idle(options)
    defaults = {**_DEFAULTS, **defaults}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.seq_length is None:
        options.seq_length = options.token_budget


def example_data(cache: str = ".cache") -> tuple[str, str]:
    """Return the data file and the tokenizer folder that `make train` prepared here.

    Raises:
        ValueError: they are not there.
    """
    data = os.path.join(cache, "chitchat.jsonl")
    if os.path.isfile(data):
        from odb_megatron.data.records import open_records

        name = f"{open_records(data).fingerprint()} {_VOCAB_SIZE}"
        folder = os.path.join(cache, f"tokenizer-{hashlib.sha256(name.encode()).hexdigest()[:12]}")
        if os.path.isdir(folder):
            return data, folder
    raise ValueError(
        f"no DATA was named, and the default, {data} with its tokenizer, is not here: run 'make "
        "train' in a checkout first and inspect from there, or name your data and --tokenizer"
    )


def training_setting(options: argparse.Namespace) -> TrainingSetting:
    from odb_megatron.inspection.setting import TrainingSetting, parse_shape
    from odb_megatron.plan.padding import OverlongPolicy

    for name in ("dp", "vocab_divisible_by"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least 1, got {getattr(options, name)}")
    batch = options.global_batch_size
    return TrainingSetting(
        seq_length=options.seq_length,
        token_budget=options.token_budget,
        dp=options.dp,
        global_batch_size=16 * options.dp if batch is None else batch,
        overlong=OverlongPolicy(options.overlong),
        tp=options.tp,
        cp=options.cp,
        pp=options.pp,
        vpp=options.vpp,
        sequence_parallel=options.sequence_parallel,
        shape=None if options.model_shape is None else parse_shape(options.model_shape),
        prices=_prices(options.cost),
        seed=options.seed,
    )


def data_request(options: argparse.Namespace) -> DataRequest:
    """Return what is to be read.

    Raises:
        ValueError: weights or a split that cannot be.
    """
    from odb_megatron.data.chat_record import template_arguments
    from odb_megatron.inspection.reading import DataRequest

    paths, weights = _blend(options.data)
    try:
        template_args = template_arguments(options.template_args or "{}")
    except ValueError as error:
        raise ValueError(f"--template-args {options.template_args!r}: {error}") from error
    limits = [limit for limit in (options.max_samples, options.train_samples) if limit]
    return DataRequest(
        paths=paths,
        weights=weights,
        tokenizer=options.tokenizer,
        template_args=template_args,
        split=_split(options.split),
        seed=options.seed,
        max_samples=min(limits, default=0),
        num_workers=len(os.sched_getaffinity(0)) if options.workers is None else options.workers,
    )


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse before anything is read what cannot be written after it, or would lose a file."""
    from odb_megatron.pages.needs import require

    given = [*options.data, *([] if options.lengths is None else [options.lengths])]
    taken = {os.path.realpath(path.partition("#")[0]): f"the data {path}" for path in given}
    for flag in ("json", "plot", "html"):
        value = getattr(options, flag)
        if value is None or (flag == "json" and value == "-"):
            continue
        check_output(f"--{flag}", value)
        place = os.path.realpath(value)
        if place in taken:
            raise ValueError(f"--{flag} {value} would overwrite {taken[place]}: name another file")
        taken[place] = f"what --{flag} {value} writes"
    if options.plot is not None:
        if not options.plot.endswith(".png"):
            raise ValueError(f"--plot {options.plot}: expected a name that ends in .png")
        require("matplotlib", purpose="--plot")
    if options.html is not None:
        require("matplotlib", purpose="--html")
        require("jinja2", purpose="--html")


def refuse(message: str, parser: argparse.ArgumentParser) -> NoReturn:
    """End the command with one line; a planner's flags become this command's.

    Args:
        message: what is wrong, what was expected, the hint.
        parser: of the command.
    """
    for flag in parser._option_string_actions:
        name = re.escape(flag.removeprefix("--"))
        message = re.sub(rf"--odb-{name}(?![\w-])", flag, message)
    parser.exit(2, f"{parser.prog}: error: {message}\n")


def _refuse_idle(options: argparse.Namespace) -> None:
    """Refuse flags that would do nothing."""
    if options.lengths is not None:
        for name, why in (
            ("tokenizer", "has lengths, no text"),
            ("template_args", "has lengths, no text"),
            ("show", "has lengths, no text"),
            ("split", "is the training split already"),
            ("workers", "is read in one process"),
        ):
            value = getattr(options, name)
            if value not in (None, 0):
                flag = name.replace("_", "-")
                raise ValueError(
                    f"--{flag} {value!r} would do nothing: --lengths {options.lengths} {why}; "
                    "drop it"
                )
        if options.vocab_divisible_by is not None and "vocab=" not in (options.model_shape or ""):
            raise ValueError(
                f"--vocab-divisible-by {options.vocab_divisible_by} would do nothing: --lengths "
                "has no vocabulary; give vocab=N in --model-shape, or drop it"
            )
    if options.no_advice and options.max_logits_gib is not None:
        raise ValueError(
            f"--max-logits-gib {options.max_logits_gib:g} would do nothing: it limits the budgets "
            "that are advised; drop it or --no-advice"
        )


def _prices(text: str | None) -> CostPrices | None:
    from odb_megatron.plan.cost import CostPrices

    try:
        return None if text is None else CostPrices.parse(text)
    except ValueError as error:
        raise ValueError(f"--cost {text!r}: {error}") from error


def _blend(data: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return paths and weights, as Megatron's `--data-path` has them."""
    if len(data) % 2 == 0:
        try:
            weights = tuple(float(text) for text in data[::2])
        except ValueError:
            return tuple(data), ()
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights of a blend must be above 0 and finite, got {data[::2]}")
        return tuple(data[1::2]), weights
    return tuple(data), ()


def _split(text: str) -> tuple[float, float]:
    """Return the training split's bounds, normalized as Megatron does."""
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    is_good = 1 <= len(parts) <= 3 and all(0 <= part < math.inf for part in parts)
    if not is_good or not parts[0]:
        raise ValueError(
            f"--split {text!r} is not understood; expected shares of training, validation and "
            "test, as 98,1,1"
        )
    return 0.0, parts[0] / sum(parts)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value
