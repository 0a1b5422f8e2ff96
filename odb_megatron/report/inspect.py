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
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from odb_megatron import __version__
from odb_megatron.output_files import check_output, write_json, write_output
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
from odb_megatron.report.page import need_pages
from odb_megatron.report.schedules import (
    ATTENTION_SHARE,
    FIXED_SHARE,
    POLICIES,
    Schedule,
    Setting,
    Stream,
    Times,
    measure,
    shares_model,
)
from odb_megatron.report.simulate import above_zero, whole

__all__ = [
    "BASE",
    "EXAMPLE_FLAGS",
    "METHODS",
    "ODB",
    "RIVALS",
    "Inspection",
    "Kept",
    "Run",
    "advise",
]
__all__ += ["cut_offs", "example_data", "inspect", "keep", "logits_memory", "main", "parse"]
__all__ += ["parse_shape", "run_method"]

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

_SHAPE = (
    "layers=32,hidden=4096,heads=32[,groups=8][,ffn=14336][,kv_channels=128][,vocab=128256]"
    "[,mlp=gated|plain]"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odb-megatron inspect",
        description="Look at a data set before training on it: lengths, bad records, what padding "
        "costs, how even and how fast steps would be, how much memory logits take, and which flags "
        "to use. Reads with the training's own reader and plans with its own planner; runs no "
        "model. docs/reports.md says what each figure means. Without DATA: what 'make train' "
        "prepared in this folder, with its flags.",
        allow_abbrev=False,
    )
    count: dict[str, Any] = {"type": whole(1), "metavar": "N"}
    natural: dict[str, Any] = {"type": whole(0), "metavar": "N"}
    add = parser.add_argument_group("data").add_argument
    data = "chat or text files (.jsonl, .json), Megatron .bin/.idx prefixes, or WEIGHT PATH pairs, "
    add("data", nargs="*", metavar="DATA", help=data + "as --data-path of the training")
    add("--lengths", metavar="FILE", help=f"in place of DATA: {LENGTHS}; needs numpy alone")
    add("--tokenizer", metavar="T", help="its folder, for text")
    template = "of its chat template, as --odb-template-args"
    add("--template-args", "--odb-template-args", metavar="JSON", help=template)
    show = (
        "print the first N records token by token with what is learnt, and nothing else; --json: "
    )
    add("--show", default=0, help=f"{show}one object per record", **count)
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
    add("--model-shape", metavar="SHAPE", help=f"{_SHAPE}: its FLOPs are the cost model")
    cost = (
        "linear=1,quadratic=2.5e-5,overhead=400 in place of FLOPs, as --odb-cost of the training "
    )
    cost += "takes it and 'odb-megatron trace --fit-cost' prints it"
    add("--cost", metavar="COST", help=cost)
    for name, what in (
        ("tp", "tensor-parallel size"),
        ("cp", "context-parallel size"),
        ("pp", "pipeline stages"),
        ("vpp", "virtual chunks per stage"),
    ):
        add(f"--{name}", default=1, help=what, **count)
    add("--sequence-parallel", action="store_true")
    add("--vocab-divisible-by", help="default 128", **count)
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="write the figures; '-' for stdout")
    add("--html", metavar="FILE.html", help="write a page that needs no network")
    add("--no-advice", action="store_true", help="skip the trials of settings")
    limit = "advise no budget whose logits peak above this"
    add("--max-logits-gib", type=above_zero, metavar="G", help=limit)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options for `inspect`; a SystemExit for arguments that do not parse."""
    return _parser().parse_args(argv)


def _fill_in(options: argparse.Namespace) -> None:
    """Give options their defaults, those of `make train` where no data is named."""
    given, defaults = options.lengths, _DEFAULTS
    if options.data and given is not None:
        raise ValueError(f"DATA {' '.join(options.data)} and --lengths {given}: name one of them")
    if not options.data and given is None:
        data, tokenizer = example_data()
        options.data = [data]
        defaults = {**_DEFAULTS, **EXAMPLE_FLAGS, "tokenizer": tokenizer}
    text, shape = "has lengths, no text", options.model_shape or ""
    for name, is_idle, why in (
        ("tokenizer", given, f"--lengths {given} {text}"),
        ("template_args", given, f"--lengths {given} {text}"),
        ("show", given, f"--lengths {given} {text}"),
        ("split", given, f"--lengths {given} is the training split already"),
        ("workers", given, f"--lengths {given} is read in one process"),
        (
            "vocab_divisible_by",
            given and "vocab=" not in shape,
            "--lengths has no vocabulary; give vocab=N in --model-shape",
        ),
        ("max_logits_gib", options.no_advice, "it limits the budgets that are advised"),
    ):
        value = getattr(options, name)
        if is_idle and value not in (None, 0):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {value!r} would do nothing: {why}; drop it")
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

    paths, weights = tuple(options.data), tuple[float, ...]()
    if len(paths) % 2 == 0:  # as Megatron's --data-path
        try:
            paths, weights = paths[1::2], tuple(map(float, paths[::2]))
        except ValueError:
            paths = tuple(options.data)
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights of a blend must be above 0 and finite, got {options.data[::2]}")
    try:
        shares = [float(part) for part in options.split.split(",")]
    except ValueError:
        shares = []
    is_good = 1 <= len(shares) <= 3 and all(0 <= part < math.inf for part in shares)
    if not is_good or not shares[0]:
        raise ValueError(
            f"--split {options.split!r} is not understood; expected shares of training, validation "
            "and test, as 98,1,1"
        )
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
        split=(0.0, shares[0] / sum(shares)),
        seed=options.seed,
        max_samples=min(limits, default=0),
        num_workers=len(os.sched_getaffinity(0)) if options.workers is None else options.workers,
    )


def parse_shape(text: str) -> ModelShape:
    """Return the model's sizes.

    Args:
        text: as `_SHAPE`; what is left out has Megatron's default.

    Raises:
        ValueError: something else.
    """

    def refused(what: str) -> ValueError:
        return ValueError(f"--model-shape {text!r}: {what}; expected {_SHAPE}")

    values: dict[str, int] = {}
    known = ("layers", "hidden", "heads", "groups", "ffn", "kv_channels", "vocab")
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "mlp" and value in ("gated", "plain"):
            value = str(1 + (value == "gated"))
        elif name not in known or not value.isdecimal() or not int(value):
            raise refused(f"{part.strip()!r} is not understood")
        if name in values:
            raise refused(f"it gives {name} twice")
        values[name] = int(value)
    if missing := [name for name in known[:3] if name not in values]:
        raise refused(f"it lacks {', '.join(missing)}")
    heads, hidden, is_gated = values["heads"], values["hidden"], values.get("mlp") == 2
    if "kv_channels" not in values and hidden % heads:
        raise refused(f"{heads} heads do not divide hidden {hidden}: give kv_channels")
    if heads % values.get("groups", heads):
        raise refused(f"{values['groups']} groups do not divide {heads} heads")
    size = values.get("kv_channels", hidden // heads)
    # Megatron's own default of --ffn-hidden-size (arguments.py, 0.19.2).
    ffn = values.get("ffn", int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden)
    if not ffn:
        raise refused(f"hidden {hidden} is too small for the default of ffn: give it")
    return ModelShape(
        num_layers=values["layers"],
        hidden=hidden,
        ffn_hidden=ffn,
        query=heads * size,
        key_value=values.get("groups", heads) * size,
        vocab=values.get("vocab", 0),
        gated_mlp=is_gated,
    )


# --- what training would do ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Lengths after the overlong policy.

    Attributes:
        positions: padded to the multiple, int64; 0 where nothing is left of a position.
        num_tokens: before that padding.
        counts: by name, samples cut, tokens lost, samples left out, samples that run alone.
    """

    positions: Integers
    num_tokens: int
    counts: Mapping[str, int]


def keep(
    positions: Integers,
    policy: OverlongPolicy,
    *,
    seq_length: int,
    token_budget: int,
    multiple: int,
) -> Kept:
    """Apply the overlong policy.

    Args:
        positions: tokens of the sample at each position, int64; 0 for none.
        policy: for samples above `seq_length` or `token_budget`.
        seq_length: most tokens of a sample.
        token_budget: most tokens of a micro-batch.
        multiple: that samples are padded to.

    Raises:
        ValueError: samples are too long and the policy does not allow it, or nothing is left.
    """
    limit = min(seq_length, token_budget)
    longest = budget_length(limit, multiple)
    if not longest:
        raise ValueError(
            f"no sample fits: the limit {limit} is below {multiple}, to a multiple of which "
            "samples are padded: raise --seq-length and --token-budget"
        )
    too_long, lengths = positions > longest, positions[positions > 0]
    num, beyond = int(too_long.sum()), int((lengths > budget_length(seq_length, multiple)).sum())
    about = f"(the longest of {len(lengths)} has {int(lengths.max())})"
    if policy is OverlongPolicy.SOLO and beyond:
        raise ValueError(
            f"{beyond} samples are longer than --seq-length {seq_length} {about}, which --overlong "
            "solo does not allow: raise --seq-length, or pass --overlong truncate or drop"
        )
    if policy is OverlongPolicy.ERROR and num:
        raise ValueError(
            f"{num} of {len(lengths)} samples are longer than {limit} tokens, the smaller of "
            f"--seq-length {seq_length} and --token-budget {token_budget} {about}; training would "
            "stop at the first: pass --overlong truncate, drop or solo, or raise both"
        )
    if policy is OverlongPolicy.DROP and num == len(lengths):
        raise ValueError(
            f"all {num} samples are longer than {limit} tokens and --overlong drop leaves them "
            "out: raise --seq-length and --token-budget, or pass --overlong truncate"
        )
    kept = positions
    if policy is OverlongPolicy.TRUNCATE:
        kept = np.minimum(positions, longest)
    elif policy is OverlongPolicy.DROP:
        kept = np.where(too_long, 0, positions)
    is_cut, is_dropped = policy is OverlongPolicy.TRUNCATE, policy is OverlongPolicy.DROP
    counts = {
        "num_truncated": num * is_cut,
        "num_cut_tokens": int(lengths.sum() - kept.sum()) * is_cut,
        "num_dropped": num * is_dropped,
        "num_solo": num * (policy is OverlongPolicy.SOLO),
    }
    return Kept(
        positions=-(-kept // multiple) * multiple, num_tokens=int(kept.sum()), counts=counts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
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
    tokens, computed = float(times.tokens.sum()), int(times.computed.sum())
    balances = times.balance_step if setting.sync == "step" else times.balance_microbatch
    spent = times.pipeline * setting.pipeline.stages
    counts = schedule.counts
    figures = {
        "token_budget": setting.token_budget,
        "padding_fraction": 1 - tokens / computed,
        "fill": tokens / (len(schedule.sizes) * setting.token_budget),
        "balance": float(balances.mean()),
        "mean_M": float(counts.mean()),
        "min_M": int(counts.min()),
        "max_M": int(counts.max()),
        "samples_per_step": int(np.count_nonzero(stream.lengths)) / len(schedule),
        "over_budget": int(times.over_budget.sum()),
        "rate": float(times.work.sum()) / (float(spent.sum()) * setting.num_replicas),
        "bytes_moved_per_step": float(times.bytes_moved.mean()),
    }
    return Run(figures=figures, schedule=schedule, times=times, stream=stream, setting=setting)


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
    lengths = _with_samples(positions[: max(MAX_TRIED, 2 * setting.global_batch_size)])
    stream = Stream.of_epochs(lengths, epochs=1, cost=setting.cost, seed=setting.seed)

    def attempt(budget: int) -> dict[str, Any]:
        found = run_method(ODB, stream, replace(setting, token_budget=budget)).figures
        names = ("token_budget", "rate", "balance", "fill", "mean_M", "bytes_moved_per_step")
        peak = None if peak_gib is None else peak_gib(budget)
        return {**{name: found[name] for name in names}, "logits_peak_gib": peak}

    least = max(seq_length, int(lengths.max()))
    share = float(lengths.mean()) * setting.global_batch_size / setting.num_replicas
    asked = attempt(setting.token_budget)
    trials = []
    for budget in sorted({*(least * factor for factor in BUDGET_FACTORS), setting.token_budget}):
        if budget > 2 * share and budget not in (least, setting.token_budget):
            continue  # no step could fill half of it
        if peak_gib is not None and max_gib is not None and peak_gib(budget) > max_gib:
            continue
        trials.append(asked if budget == setting.token_budget else attempt(budget))
    if not trials:
        raise ValueError(
            f"--max-logits-gib {max_gib:g} is below what the logits of any budget from {least} "
            "tokens need: raise it, raise --tp, or lower --seq-length"
        )
    best = max(trial["rate"] for trial in trials)
    advised = next(trial for trial in trials if trial["rate"] >= best * (1 - TOLERANCE))
    rates = ", ".join(f"{trial['token_budget']}: {trial['rate']:.3f}" for trial in trials)
    gain = advised["rate"] / asked["rate"]
    reason = f"the smallest within {TOLERANCE:.0%} of the fastest (rate by budget: {rates})"
    if peak_gib is not None:
        reason += f"; its logits peak at {advised['logits_peak_gib']:.2f} GiB"
    if advised is not asked:
        reason += f"; {gain - 1:+.1%} against the {setting.token_budget} asked for"
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


def _with_samples(positions: Integers) -> Integers:
    if not positions.any():
        raise ValueError(
            f"the first {len(positions)} records are all bad or dropped, so that no step would "
            "train: mend the data, or raise --train-samples or --max-samples"
        )
    return positions


def cut_offs(lengths: Integers, *, limit: int) -> list[dict[str, float | int]]:
    """Return what cutting samples at some lengths costs: at powers of two, and at the limit."""
    powers = [1 << bits for bits in range(5, 40) if 1 << bits < lengths.max()]
    found = []
    for at in sorted({*powers[-5:], limit}):
        over = lengths[lengths > at]
        tokens = (int(over.sum()) - at * len(over)) / int(lengths.sum())
        found.append({"at": at, "samples": len(over) / len(lengths), "tokens": tokens})
    return found


# --- the inspection --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
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
    overlong, shape = OverlongPolicy(options.overlong), None
    if options.model_shape is not None:
        shape = parse_shape(options.model_shape)
    try:
        prices = None if options.cost is None else CostCoefficients.parse(options.cost)
    except ValueError as error:
        raise ValueError(f"--cost {options.cost!r}: {error}") from error
    multiple = length_multiple(
        context_parallel_size=options.cp,
        sequence_parallel_size=options.tp if options.sequence_parallel else 1,
    )
    sizes = {"seq_length": options.seq_length, "token_budget": options.token_budget}
    limit = min(sizes.values())
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
    kept = keep(reading.positions, overlong, multiple=multiple, **sizes)
    lengths = kept.positions[kept.positions > 0]
    cost, origin = _cost(prices, shape, lengths, options.token_budget)
    setting = Setting(
        num_replicas=options.dp,
        token_budget=options.token_budget,
        global_batch_size=options.global_batch_size,
        cost=cost,
        sync="microbatch" if options.pp > 1 else "step",
        pipeline=Pipeline(stages=options.pp, chunks=options.vpp),
        seed=options.seed,
    )
    part = _with_samples(kept.positions[: max(MAX_PLANNED, 2 * setting.global_batch_size)])
    stream = Stream.of_epochs(part, epochs=1, cost=cost, seed=setting.seed)
    runs = {name: run_method(name, stream, setting) for name in (*RIVALS, ODB)}

    def logits(budget: int) -> dict[str, Any]:
        return logits_memory(budget, vocab, tp=options.tp, cp=options.cp)

    advice, budget = None, setting.token_budget
    if not options.no_advice:
        advice, budget = advise(
            kept.positions,
            setting,
            seq_length=options.seq_length,
            peak_gib=(lambda budget: float(logits(budget)["peak_gib"])) if vocab else None,
            max_gib=options.max_logits_gib,
        )
    if budget != setting.token_budget:
        runs[ADVISED] = run_method(ODB, stream, replace(setting, token_budget=budget))
    planned = ADVISED if ADVISED in runs else ODB
    larger = max(budget, setting.token_budget)
    fixed = run_method(BASE, stream, replace(setting, token_budget=larger))
    epoch_samples = options.train_samples or reading.num_records

    def method(name: str, run: Run) -> dict[str, Any]:
        steps = math.ceil(epoch_samples * len(run.schedule) / len(stream))
        return {"description": METHODS[name], "steps_per_epoch": steps, **run.figures}

    rates = {name: run.figures["rate"] for name, run in runs.items()}
    own, context = reading.lengths, options.seq_length * len(kept.positions)
    flags = ("dp", "global_batch_size", "tp", "cp", "pp", "vpp", "sequence_parallel", "seed")
    about = ("name", "num_records", "num_read", "num_bad", "read_s", "num_workers")
    values = {
        "data": {"bad": list(reading.bad), **{name: getattr(reading, name) for name in about}},
        "lengths": {
            "count": len(own),
            "num_tokens": int(own.sum()),
            "mean": float(own.mean()),
            "median": float(np.median(own)),
            "p95": float(np.quantile(own, 0.95)),
            "max": int(own.max()),
            "cv": float(own.std() / own.mean()),
            "cut_offs": cut_offs(own, limit=limit),
        },
        "overlong": {"policy": overlong.value, "limit": limit, **kept.counts},
        "setting": {
            **sizes,
            **{name: getattr(options, name) for name in flags},
            "model_shape": None if shape is None else asdict(shape),
            "cost": origin,
        },
        "padding": {
            "num_tokens": kept.num_tokens,
            "context_padded": 1 - kept.num_tokens / context,
            "avoided": 1 - int(lengths.sum()) / context,
            "rounding": 1 - kept.num_tokens / int(lengths.sum()),
        },
        "prediction": {
            "num_samples": len(stream),
            "epoch_samples": epoch_samples,
            "methods": {name: method(name, run) for name, run in runs.items()},
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
    return Inspection(
        values=values,
        lengths=own,
        runs=runs,
        fixed=fixed,
        planned=planned,
        is_run=bool(options.train_samples),
    )


def _read(options: argparse.Namespace) -> Reading:
    if options.lengths is not None:
        prefix = "" if ":" in options.lengths else "file:"
        values = read_lengths(prefix + options.lengths)
        num = len(values)
        reading = Reading(name=options.lengths, positions=values, num_records=num, num_read=num)
        wanted = {"first": options.train_samples, "most": options.max_samples}
        return reading.part(seed=options.seed, **wanted)
    from tqdm import tqdm

    is_quiet = not sys.stderr.isatty()
    with tqdm(unit="record", desc="reading", file=sys.stderr, disable=is_quiet) as bar:

        def start(total: int) -> Callable[[int], None]:
            bar.reset(total)
            return lambda num: bar.update(num) and None

        return read_data(_request(options), start=start)


def _cost(
    prices: CostCoefficients | None, shape: ModelShape | None, lengths: Integers, token_budget: int
) -> tuple[CostModel, str]:
    """Return the cost model, as measured, of the shape, or of typical shares; and its origin."""
    overhead = f"{FIXED_SHARE:.0%} of a full micro-batch as the overhead of each"
    if prices is not None:
        return prices.model(), "the prices given"
    if shape is not None:
        fixed = FIXED_SHARE * token_budget
        found = CostModel.from_ratios(quadratic=shape.quadratic_ratio, fixed_tokens=fixed)
        return found, f"FLOPs of the model's shape, {overhead}"
    return shares_model(lengths, token_budget=token_budget), (
        f"assumed: attention is {ATTENTION_SHARE:.0%} of the cost of all samples, {overhead} "
        "(--model-shape gives your model's)"
    )


# --- the command -----------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Inspect, print, write.

    Raises:
        SystemExit: arguments that do not parse or cannot be used (2), or `--help` (0).
    """
    parser = _parser()
    options = parser.parse_args(argv)
    text_to = sys.stderr if options.json == "-" else sys.stdout
    try:
        _check_outputs(options)
        if options.show:
            _show(options, text_to)
            return 0
        from odb_megatron.report.inspect_page import as_text, write_inspection

        found = inspect(options)
        print(as_text(found), file=text_to)
        write_json(options.json, found.values)
        if options.html is not None:
            write_inspection(options.html, found, f"odb-megatron inspect {shlex.join(argv)}")
    except BrokenPipeError:
        raise  # the reader of the output has left: no argument is to blame
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except RuntimeError as error:  # of the reader: a file or template, not a record, is to blame
        parser.exit(2, f"{parser.prog}: error: training would stop: {error}\n")
    return 0


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse before anything is read what cannot be written after it, or would lose a file."""
    given = [*options.data, *([] if options.lengths is None else [options.lengths])]
    taken = {os.path.realpath(path.partition("#")[0]): f"the data {path}" for path in given}
    for flag, value in (("--json", options.json), ("--html", options.html)):
        if value is None or (flag, value) == ("--json", "-"):
            continue
        check_output(flag, value)
        place = os.path.realpath(value)
        if place in taken:
            raise ValueError(f"{flag} {value} would overwrite {taken[place]}: name another file")
        taken[place] = f"what {flag} {value} writes"
    if options.html is not None:
        need_pages("--html")


def _show(options: argparse.Namespace, text_to: TextIO) -> None:
    """Print records token by token, and write one object for each."""
    from odb_megatron.data.sample import as_lines

    _fill_in(options)
    objects = []
    for place, shown in show_records(_request(options), options.show):
        learnt = sum(map(bool, shown["loss"]))
        print(f"{place}: {len(shown['ids'])} tokens, {learnt} learnt (+)", file=text_to)
        print(f"template: {shown['template']}", file=text_to)
        print("\n".join(as_lines(shown, colour=text_to.isatty())), file=text_to)
        objects.append(json.dumps(shown, ensure_ascii=False) + "\n")
    if options.json == "-":
        sys.stdout.write("".join(objects))
    elif options.json:
        write_output("--json", options.json, "".join(objects))
