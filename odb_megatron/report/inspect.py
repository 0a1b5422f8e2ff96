"""`odb-megatron inspect`: what a training would do with a data set, before it is run.

Reads with the training's own reader and plans with its own planner; trains nothing. docs/reports.md
says what each figure means.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_megatron import __version__
from odb_megatron.command import Report, new_parser, run_command, whole
from odb_megatron.plan.cost import CostCoefficients, CostModel, ModelShape
from odb_megatron.plan.padding import OverlongPolicy, budget_length, length_multiple
from odb_megatron.plan.pipeline import Pipeline
from odb_megatron.report.lengths import (
    LENGTHS,
    DataRequest,
    Reading,
    read_data,
    read_lengths,
    show_records,
)
from odb_megatron.report.schedules import (
    ATTENTION_SHARE,
    FIXED_SHARE,
    POLICIES,
    Schedule,
    Setting,
    Stream,
    Times,
    load_figures,
    measure,
    shares_model,
)

__all__ = ["BASE", "EXAMPLE_FLAGS", "METHODS", "ODB", "RIVALS", "Inspection", "Run", "advise"]
__all__ += ["example_data", "inspect", "keep", "logits_memory", "main", "parse", "parse_shape"]
__all__ += ["run_method"]

Integers = npt.NDArray[np.int64]

ODB, ADVISED, BASE = "odb", "advised", "standard-safe"
METHODS = {
    BASE: "the fastest fixed batch whose worst case fits the budget, padded",
    "sorted-bucketed": "32 buckets of like lengths, known beforehand; padded",
    "dp-balanced": "Megatron's dp_balanced: each global batch packed by next fit",
    ODB: "ODB",
    ADVISED: "ODB with the token budget advised",
}
RIVALS = tuple(METHODS)[:3]
MAX_PLANNED, MAX_TRIED = 1 << 16, 8192
TOLERANCE = 0.02  # of the rate, by which a smaller budget may be slower
BUDGET_FACTORS = (1, 2, 3, 4, 6, 8)
FEW_MICRO_BATCHES, POOR_BALANCE = 2, 0.95

# --- arguments -------------------------------------------------------------------------------

DEFAULT_SAMPLES = 100_000
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

_SIZES = ("layers", "hidden", "heads", "groups", "ffn", "kv_channels", "vocab")
_SHAPE = (
    "layers=32,hidden=4096,heads=32[,groups=8][,ffn=14336][,kv_channels=128][,vocab=128256]"
    "[,mlp=gated|plain]"
)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "inspect",
        "Look at a data set before training on it: lengths, bad records, what padding costs, how "
        "even and how fast steps would be, how much memory logits take, and which flags to use. "
        "Reads with the training's own reader and plans with its own planner; runs no model. "
        "docs/reports.md says what each figure means. Without DATA: what 'make train' prepared in "
        "this folder, with its flags.",
    )
    count: dict[str, Any] = {"type": whole(1), "metavar": "N"}
    natural: dict[str, Any] = {"type": whole(0), "metavar": "N"}
    page = "write a page that needs no network; needs pip install 'odb-megatron[pages]'"
    parser.add_argument("--html", metavar="FILE.html", help=page)
    parser.add_argument("--no-advice", action="store_true", help="skip the trials of settings")
    limit = "advise no budget whose logits peak above this"
    parser.add_argument("--max-logits-gib", type=_typed(_above_zero), metavar="G", help=limit)
    add = parser.add_argument_group("data").add_argument
    data = "chat or text files (.jsonl, .json), Megatron .bin/.idx prefixes, or WEIGHT PATH pairs, "
    add("data", nargs="*", metavar="DATA", help=data + "as --data-path of the training")
    add("--lengths", metavar="FILE", help=f"in place of DATA: {LENGTHS}; needs numpy alone")
    add("--tokenizer", metavar="T", help="its folder, for text")
    template = "of its chat template, as --odb-template-args"
    add("--template-args", "--odb-template-args", metavar="JSON", help=template)
    show = "print the first N records token by token with what is learnt, and nothing else; --json:"
    add("--show", default=0, help=f"{show} one object per record", **count)
    add("--split", metavar="A,B,C", help="as of the training (default 100,0,0)")
    samples = f"records read, a random sample; 0 for all (default {DEFAULT_SAMPLES})"
    add("--max-samples", default=DEFAULT_SAMPLES, help=samples, **natural)
    add("--workers", help="processes (default: all cores)", **natural)
    add = parser.add_argument_group("training (values of its flags)").add_argument
    add("--token-budget", help="default 8192", **count)
    add("--seq-length", help="default: the token budget", **count)
    add("--dp", help="data-parallel replicas (default 8)", **count)
    add("--global-batch-size", help="default 16 per replica", **count)
    add("--overlong", choices=[one.value for one in OverlongPolicy], help="default error")
    add("--train-samples", default=0, help="default: one epoch", **count)
    add("--seed", default=1234, help="default 1234, as Megatron's", **natural)
    add = parser.add_argument_group("model").add_argument
    add(
        "--model-shape",
        type=_typed(parse_shape),
        metavar="SHAPE",
        help=f"{_SHAPE}: its FLOPs are the cost model",
    )
    cost = "in place of FLOPs, as --odb-cost takes it and 'odb-megatron trace --fit-cost' prints it"
    prices = _typed(CostCoefficients.parse)
    add("--cost", type=prices, metavar="linear=1,quadratic=2.5e-5,overhead=400", help=cost)
    add("--tp", default=1, help="tensor-parallel size", **count)
    add("--cp", default=1, help="context-parallel size", **count)
    add("--pp", default=1, help="pipeline stages", **count)
    add("--vpp", default=1, help="virtual chunks per stage", **count)
    add("--sequence-parallel", action="store_true")
    add("--vocab-divisible-by", help="default 128", **count)
    return parser


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argparse type whose errors are those of a parser that raises ValueError."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _above_zero(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError(f"{text!r} is not a finite number above 0")
    return float(text)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options for `inspect`; a SystemExit for arguments that do not parse."""
    return _parser().parse_args(argv)


def _fill_in(options: argparse.Namespace) -> None:
    """Give options their defaults, those of `make train` where no data is named."""
    defaults, idle = _DEFAULTS, []
    if options.lengths is not None:
        if options.data:
            raise ValueError(
                f"DATA {' '.join(options.data)} and --lengths {options.lengths}: name one of them"
            )
        idle = ["tokenizer", "template_args", "show", "split", "workers"]
        idle += ["vocab_divisible_by"] * (not (options.model_shape and options.model_shape.vocab))
    elif not options.data:
        data, tokenizer = example_data()
        options.data = [data]
        shape = parse_shape(str(EXAMPLE_FLAGS["model_shape"]))
        defaults = {**_DEFAULTS, **EXAMPLE_FLAGS, "tokenizer": tokenizer, "model_shape": shape}
    for name in idle + ["max_logits_gib"] * options.no_advice:
        if getattr(options, name) not in (None, 0):
            why = "--no-advice tries no budget"
            if options.lengths is not None:
                why = f"--lengths {options.lengths} has no text, split or vocabulary"
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(options, name)!r} would do nothing: {why}; "
                "drop it"
            )
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    options.seq_length = options.seq_length or options.token_budget
    options.global_batch_size = options.global_batch_size or 16 * options.dp


def example_data(cache: str = ".cache") -> tuple[str, str]:
    """Return the data file and the tokenizer folder that `make train` prepared here.

    Raises:
        ValueError: they are not there.
    """
    data = os.path.join(cache, "chitchat.jsonl")
    if os.path.isfile(data):
        from odb_megatron.data.records import open_records

        name = f"{open_records(data).fingerprint()} 4096"  # entries of its tokenizer
        folder = os.path.join(cache, f"tokenizer-{hashlib.sha256(name.encode()).hexdigest()[:12]}")
        if os.path.isdir(folder):
            return data, folder
    raise ValueError(
        f"no DATA was named, and the default, {data} with its tokenizer, is not here: run 'make "
        "train' in a checkout first and inspect from there, or name your data and --tokenizer"
    )


def _request(options: argparse.Namespace) -> DataRequest:
    from odb_megatron.data.chat_record import template_arguments

    paths, weights = options.data, list[float]()
    if len(paths) % 2 == 0:
        with suppress(ValueError):  # as Megatron's --data-path
            weights = [float(word) for word in paths[::2]]
            paths = paths[1::2]
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights of a blend must be above 0 and finite, got {options.data[::2]}")
    shares = [math.nan]
    with suppress(ValueError):
        shares = [float(part) for part in options.split.split(",")]
    if len(shares) > 3 or not 0 < shares[0] <= sum(shares) < math.inf:
        raise ValueError(
            f"--split {options.split!r} is not understood; expected shares of training, validation "
            "and test, as 98,1,1"
        )
    try:
        template_args = template_arguments(options.template_args or "{}")
    except ValueError as error:
        raise ValueError(f"--template-args {options.template_args!r}: {error}") from error
    return DataRequest(
        paths=tuple(paths),
        weights=tuple(weights),
        tokenizer=options.tokenizer,
        template_args=template_args,
        share=shares[0] / sum(shares),
        seed=options.seed,
        max_samples=_most(options),
        num_workers=len(os.sched_getaffinity(0)) if options.workers is None else options.workers,
    )


def _most(options: argparse.Namespace) -> int:
    """Return how many samples are read; 0 for all."""
    return min(filter(None, (options.max_samples, options.train_samples)), default=0)


def parse_shape(text: str) -> ModelShape:
    """Return the model's sizes.

    Args:
        text: as `_SHAPE`; what is left out has Megatron's default.

    Raises:
        ValueError: something else.
    """
    parts = [part.strip().partition("=") for part in text.split(",")]
    given = {name: value for name, _, value in parts}
    try:
        is_gated = {"gated": True, "plain": False}[given.pop("mlp", "plain")]
        sizes = {name: int(value) for name, value in given.items()}
        if len({name for name, _, _ in parts}) < len(parts) or sizes.keys() - {*_SIZES}:
            raise ValueError(f"known are {', '.join(_SIZES)} and mlp, each once")
        layers, hidden, heads = (sizes[name] for name in _SIZES[:3])
        groups, size = sizes.get("groups", heads), sizes.get("kv_channels", hidden // heads)
        # Megatron's own default of --ffn-hidden-size (arguments.py, 0.19.2).
        ffn = sizes.get("ffn", int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden)
        if min(ffn, *sizes.values()) < 1:
            raise ValueError("sizes are at least 1")
        if heads % groups or (hidden % heads and "kv_channels" not in sizes):
            raise ValueError("groups divide heads, and heads hidden unless kv_channels is given")
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{text!r} cannot be used ({error}): expected {_SHAPE}") from error
    return ModelShape(
        num_layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        query=heads * size,
        key_value=groups * size,
        vocab=sizes.get("vocab", 0),
        gated_mlp=is_gated,
    )


# --- what training would do ------------------------------------------------------------------


def keep(
    positions: Integers, policy: OverlongPolicy, *, seq_length: int, token_budget: int,
    multiple: int,
) -> tuple[Integers, dict[str, int]]:  # fmt: skip
    """Apply the overlong policy; return the lengths that are kept, and counts for the JSON.

    Args:
        positions: tokens of the sample at each position, int64; 0 for none.
        policy: for samples above `seq_length` or `token_budget`.
        seq_length: most tokens of a sample.
        token_budget: most tokens of a micro-batch.
        multiple: that samples are padded to.

    Raises:
        ValueError: samples are too long and the policy does not allow it, or nothing is left.
    """
    longest = budget_length(min(seq_length, token_budget), multiple)
    num = int((positions > longest).sum())
    refused = {
        OverlongPolicy.ERROR: num,
        OverlongPolicy.SOLO: int((positions > budget_length(seq_length, multiple)).sum()),
        OverlongPolicy.DROP: num * (num == np.count_nonzero(positions)),
    }.get(policy, 0)
    if refused or not longest:
        raise ValueError(
            f"{refused} of {np.count_nonzero(positions)} samples are too long for --overlong "
            f"{policy.value}: the longest has {positions.max()} tokens, --seq-length is "
            f"{seq_length} and --token-budget {token_budget}, a multiple of {multiple} of which "
            "fits. Training would stop at the first, or have none: raise both, or pass --overlong "
            "truncate, drop or solo"
        )
    kept, counts = positions, dict.fromkeys(("num_truncated", "num_cut_tokens", "num_dropped"), 0)
    if policy is OverlongPolicy.TRUNCATE:
        kept = np.minimum(positions, longest)
        counts |= {"num_truncated": num, "num_cut_tokens": int((positions - kept).sum())}
    elif policy is OverlongPolicy.DROP:
        kept = np.where(positions > longest, 0, positions)
        counts["num_dropped"] = num
    return kept, {**counts, "num_solo": num * (policy is OverlongPolicy.SOLO)}


@dataclass(frozen=True, slots=True)
class Run:
    """One way to form steps, over the whole simulated run; `figures` are as in the JSON."""

    figures: dict[str, Any]
    schedule: Schedule
    times: Times
    stream: Stream
    setting: Setting


def run_method(name: str, stream: Stream, setting: Setting) -> Run:
    """Run and score one of the simulator's policies."""
    schedule = POLICIES[name](stream, setting)
    times = measure(schedule, stream, setting)
    balances = times.balance_step if setting.sync == "step" else times.balance_microbatch
    spent = float(times.pipeline.sum()) * setting.pipeline.stages * setting.num_replicas
    figures = {
        "token_budget": setting.token_budget,
        **load_figures(times, setting),
        "balance": float(balances.mean()),
        "min_M": int(times.counts.min()),
        "max_M": int(times.counts.max()),
        "samples_per_step": np.count_nonzero(stream.lengths) / len(schedule),
        "rate": float(times.work.sum()) / spent,
    }
    return Run(figures, schedule, times, stream, setting)


def logits_memory(token_budget: int, vocab: int, *, tp: int = 1, cp: int = 1) -> dict[str, Any]:
    """Return the memory of one micro-batch's logits on the last pipeline stage.

    The output layer gives logits in bfloat16; `VocabParallelCrossEntropy` (megatron-core 0.19.2)
    makes a float32 copy, overwrites it with the softmax and keeps it for the backward pass. So the
    peak is 6 bytes each. Transformer Engine's fusion (`pytorch/triton/cross_entropy.py`) writes the
    gradient over the logits up to 2.17.1 and into a float32 tensor from 2.18 on.
    """
    num = -(-token_budget // cp) * -(-vocab // tp)
    return {
        "vocab": vocab,
        "tensor_parallel": tp,
        "context_parallel": cp,
        "num_logits": num,
        "logits_gib": 2 * num / (1 << 30),
        "peak_gib": 6 * num / (1 << 30),
        "note": "bfloat16 logits and the float32 copy of Megatron's loss, which its fusion native "
        "keeps. Its fusion te (refused by the arguments of Megatron 0.19) overwrites the logits up "
        "to Transformer Engine 2.17 and so needs no copy; from 2.18 its float32 gradient takes the "
        "same place. Computed from the sources, not measured.",
    }


def advise(
    positions: Integers,
    setting: Setting,
    *,
    seq_length: int,
    peak_gib: Callable[[int], float] | None = None,
    max_gib: float | None = None,
) -> tuple[dict[str, Any], int]:
    """Try budgets and choose the smallest within `TOLERANCE` of the fastest.

    Args:
        positions: lengths as kept and padded, in the order of the training; 0 for none.
        setting: what the user asked for; the cost model is the same for every budget.
        seq_length: most tokens of a sample.
        peak_gib: peak memory of the logits at a budget; None where the vocabulary is not known.
        max_gib: budgets whose logits need more are not advised.

    Returns:
        The advice as in the JSON, and the budget.

    Raises:
        ValueError: no sample, or no budget is within `max_gib`.
    """
    stream = _stream(positions, setting, MAX_TRIED)
    lengths, given = stream.lengths, setting.token_budget

    def attempt(budget: int) -> dict[str, Any]:
        found = run_method(ODB, stream, replace(setting, token_budget=budget)).figures
        names = ("token_budget", "rate", "balance", "fill", "mean_M", "bytes_moved_per_step")
        peak = None if peak_gib is None else peak_gib(budget)
        return {**{name: found[name] for name in names}, "logits_peak_gib": peak}

    least = max(seq_length, int(lengths.max()))
    share = float(lengths.mean()) * setting.global_batch_size / setting.num_replicas
    asked = attempt(given)
    trials = [
        asked if budget == given else attempt(budget)
        for budget in sorted({*(least * factor for factor in BUDGET_FACTORS), given})
        if (budget <= 2 * share or budget in (least, given))  # else no step could fill half of it
        and (peak_gib is None or max_gib is None or peak_gib(budget) <= max_gib)
    ]
    if not trials:
        raise ValueError(
            f"--max-logits-gib {max_gib:g} is below what the logits of any budget from {least} "
            "tokens need: raise it, raise --tp, or lower --seq-length"
        )
    best = max(trial["rate"] for trial in trials)
    advised = next(trial for trial in trials if trial["rate"] >= best * (1 - TOLERANCE))
    gain = advised["rate"] / asked["rate"]
    reason = f"the smallest within {TOLERANCE:.0%} of the fastest"
    if advised is not asked:
        reason += f"; {gain - 1:+.1%} against the {given} asked for"
    warnings = []
    if setting.global_batch_size < setting.num_replicas:
        warnings.append(
            f"--global-batch-size {setting.global_batch_size} is below the {setting.num_replicas} "
            "replicas: in every step some of them idle"
        )
    elif advised["mean_M"] < FEW_MICRO_BATCHES and advised["balance"] < POOR_BALANCE:
        warnings.append(
            f"a step has {advised['mean_M']:.1f} micro-batches and balance "
            f"{advised['balance']:.3f}: so few are hard to balance; a larger --global-batch-size "
            "helps more than any flag here"
        )
    return {
        "flags": f"--odb-token-budget {advised['token_budget']}",
        "num_samples": len(stream),
        "gain": gain,
        "reason": reason,
        "warnings": warnings,
        "trials": trials,
    }, advised["token_budget"]


def _stream(positions: Integers, setting: Setting, most: int) -> Stream:
    """Return the first positions; two global batches at least."""
    lengths = positions[: max(most, 2 * setting.global_batch_size)]
    if not lengths.any():
        raise ValueError(
            f"the first {len(lengths)} records are all bad or dropped, so that no step would "
            "train: mend the data, or raise --train-samples or --max-samples"
        )
    return Stream.of_epochs(lengths, epochs=1, cost=setting.cost, seed=setting.seed)


def _cut_offs(lengths: Integers, limit: int) -> list[dict[str, float | int]]:
    """Return what cutting samples at some lengths costs: at powers of two, and at the limit."""
    powers = [1 << bits for bits in range(5, 40) if 1 << bits < lengths.max()]
    return [
        {
            "at": at,
            "samples": np.count_nonzero(lengths > at) / len(lengths),
            "tokens": int((lengths - at).clip(min=0).sum()) / int(lengths.sum()),
        }
        for at in sorted({*powers[-5:], limit})
    ]


# --- the inspection --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inspection:
    """All that was found.

    Attributes:
        values: the JSON; docs/reports.md lists its keys.
        lengths: of good records, uncut.
        runs: by method.
        fixed: the fixed batch with the larger of the token budgets given and advised.
        planned: the method that matters most, `advised` where that is another budget.
        is_run: whether the run's length was given; only positions that it takes are read then.
    """

    values: dict[str, Any]
    lengths: Integers
    runs: Mapping[str, Run]
    fixed: Run
    planned: str
    is_run: bool


def inspect(options: argparse.Namespace) -> Inspection:
    """Read, plan, advise.

    Args:
        options: of `parse`; defaults are filled in.

    Raises:
        ValueError: an argument or the data cannot be used; says which, and the hint.
    """
    _fill_in(options)
    shape: ModelShape | None = options.model_shape
    multiple = length_multiple(
        context_parallel_size=options.cp,
        sequence_parallel_size=options.tp if options.sequence_parallel else 1,
    )
    sizes = {"seq_length": options.seq_length, "token_budget": options.token_budget}
    reading = _read(options)
    vocab = (shape.vocab if shape is not None else 0) or reading.vocab_size
    vocab = -(-vocab // (unit := options.vocab_divisible_by * options.tp)) * unit  # as Megatron
    if options.max_logits_gib is not None and not vocab:
        raise ValueError(
            f"--max-logits-gib {options.max_logits_gib:g} cannot be kept to: the vocabulary is not "
            "known; give vocab=N in --model-shape"
        )
    if shape is not None:
        shape = replace(shape, vocab=vocab)
    policy = OverlongPolicy(options.overlong)
    kept, counts = keep(reading.positions, policy, multiple=multiple, **sizes)
    padded = -(-kept // multiple) * multiple
    cost, origin = _cost(options, shape, padded[padded > 0])
    setting = Setting(
        num_replicas=options.dp,
        token_budget=options.token_budget,
        global_batch_size=options.global_batch_size,
        cost=cost,
        sync="microbatch" if options.pp > 1 else "step",
        pipeline=Pipeline(stages=options.pp, chunks=options.vpp),
        seed=options.seed,
    )
    stream = _stream(padded, setting, MAX_PLANNED)
    runs = {name: run_method(name, stream, setting) for name in (*RIVALS, ODB)}

    def logits(budget: int) -> dict[str, Any]:
        return logits_memory(budget, vocab, tp=options.tp, cp=options.cp)

    advice, budget = None, setting.token_budget
    if not options.no_advice:
        advice, budget = advise(
            padded,
            setting,
            seq_length=options.seq_length,
            peak_gib=(lambda budget: float(logits(budget)["peak_gib"])) if vocab else None,
            max_gib=options.max_logits_gib,
        )
    planned = ODB if budget == setting.token_budget else ADVISED
    if planned == ADVISED:
        runs[ADVISED] = run_method(ODB, stream, replace(setting, token_budget=budget))
    larger = max(budget, setting.token_budget)
    fixed = run_method(BASE, stream, replace(setting, token_budget=larger))
    epoch_samples = options.train_samples or reading.about["num_records"]
    rates = {name: run.figures["rate"] for name, run in runs.items()}
    own, context = reading.positions[reading.positions > 0], options.seq_length * len(kept)
    num_tokens = int(kept.sum())
    flags = ("dp", "global_batch_size", "tp", "cp", "pp", "vpp", "sequence_parallel", "seed")
    values = {
        "data": reading.about,
        "lengths": {
            "count": len(own),
            "num_tokens": int(own.sum()),
            "mean": float(own.mean()),
            "median": float(np.median(own)),
            "p95": float(np.quantile(own, 0.95)),
            "max": int(own.max()),
            "cv": float(own.std() / own.mean()),
            "cut_offs": _cut_offs(own, min(sizes.values())),
        },
        "overlong": {"policy": policy.value, "limit": min(sizes.values()), **counts},
        "setting": {
            **sizes,
            **{name: getattr(options, name) for name in flags},
            "model_shape": None if shape is None else asdict(shape),
            "cost": origin,
        },
        "padding": {
            "num_tokens": num_tokens,
            "context_padded": 1 - num_tokens / context,
            "avoided": 1 - int(padded.sum()) / context,
            "rounding": 1 - num_tokens / int(padded.sum()),
        },
        "prediction": {
            "num_samples": len(stream),
            "epoch_samples": epoch_samples,
            "methods": {
                name: {
                    "description": METHODS[name],
                    "steps_per_epoch": math.ceil(epoch_samples * len(run.schedule) / len(stream)),
                    **run.figures,
                }
                for name, run in runs.items()
            },
            "speedup": {
                name: {rival: rates[name] / rates[rival] for rival in RIVALS}
                for name in runs
                if name not in RIVALS
            },
            "fair_speedup": {
                "method": planned,
                "token_budget": budget,
                "fixed_token_budget": larger,
                "value": rates[planned] / fixed.figures["rate"],
            },
        },
        "logits": logits(options.token_budget) if vocab else None,
        "advice": advice,
        "versions": {
            "odb_megatron": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    return Inspection(values, own, runs, fixed, planned, bool(options.train_samples))


def _read(options: argparse.Namespace) -> Reading:
    if options.lengths is None:
        return read_data(_request(options))
    prefix = "" if ":" in options.lengths else "file:"
    values = read_lengths(prefix + options.lengths)
    about = {"bad": [], "name": options.lengths, "num_records": len(values), "num_bad": 0}
    positions = values[: _most(options) or None]  # they are in random order
    about |= {"num_read": len(positions), "read_s": None, "num_workers": 0}
    return Reading(positions=positions, about=about)


def _cost(
    options: argparse.Namespace, shape: ModelShape | None, lengths: Integers
) -> tuple[CostModel, str]:
    """Return the cost model, as measured, of the shape, or of typical shares; and its origin."""
    overhead = f"{FIXED_SHARE:.0%} of a full micro-batch as the overhead of each"
    if options.cost is not None:
        return options.cost.model(), "the prices given"
    if shape is not None:
        fixed = FIXED_SHARE * options.token_budget
        found = CostModel.from_ratios(quadratic=shape.quadratic_ratio, fixed_tokens=fixed)
        return found, f"FLOPs of the model's shape, {overhead}"
    return shares_model(lengths, token_budget=options.token_budget), (
        f"assumed: attention is {ATTENTION_SHARE:.0%} of the cost of all samples, {overhead} "
        "(--model-shape gives your model's)"
    )


# --- the command -----------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Inspect, print, write."""

    def work(options: argparse.Namespace) -> Report:
        if options.show:
            return _shown(options)
        from odb_megatron.report.inspect_page import as_text, write_inspection

        found = inspect(options)
        command = f"odb-megatron inspect {shlex.join(argv)}"
        return Report(
            values=found.values,
            text=as_text(found),
            write_page=lambda path: write_inspection(path, found, command),
        )

    return run_command(_parser(), argv, work)


def _shown(options: argparse.Namespace) -> Report:
    """Return records token by token, and an object for each."""
    from odb_megatron.data.sample import as_lines

    _fill_in(options)
    lines, objects = [], ""
    text_to = sys.stderr if options.json == "-" else sys.stdout
    for place, shown in show_records(_request(options), options.show):
        learnt = sum(map(bool, shown["loss"]))
        lines.append(f"{place}: {len(shown['ids'])} tokens, {learnt} learnt (+)")
        lines.append(f"template: {shown['template']}")
        lines += as_lines(shown, colour=text_to.isatty())
        objects += json.dumps(shown, ensure_ascii=False) + "\n"
    return Report(values=objects, text="\n".join(lines))
