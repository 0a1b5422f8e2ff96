"""Throughput of ODB against its rivals on one GPU, with megatron-core alone.

Trains a GPT in bf16 on random tokens whose lengths are a chat mix's or lognormal; data-parallel
replicas are simulated one after the other. Needs torch, numpy, packaging, tqdm, megatron-core (also
unpacked, on PYTHONPATH) and this repository, and no network.

    python3 benchmarks/gpu_throughput.py --minutes 8 --json OUT
    python3 benchmarks/gpu_throughput.py --device cpu --tiny --json OUT
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import output_file, rate_ratio_interval, whole

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from odb_megatron.plan.cost import CostModel
from odb_megatron.report.lengths import length_summary, read_lengths
from odb_megatron.report.schedules import (
    Schedule,
    Setting,
    Stream,
    dp_balanced,
    odb,
    sorted_buckets,
    standard_safe,
)

STARTED = time.monotonic()
_END_S = 3.0  # kept for the end of the process
_SPARE_STEPS = 4  # whose samples a schedule may leave over

ARMS = {
    "standard": standard_safe,
    "sorted": sorted_buckets,
    "dp_balanced": dp_balanced,
    "odb": odb,
}
"""Padded so that the worst case fits the budget; padded, all lengths known beforehand (an oracle);
packed by next fit, as Megatron's scheduler of that name; ODB's planner."""

SPREADS = {"cv1.0": 1.0, "cv2.0": 2.0, "cv0.48": 0.48, "cv0.29": 0.29}
ROWS = ("chat", *SPREADS)

CHAT_QUANTILES = (
    21, 40, 55, 74, 95, 109, 124, 137, 152, 166, 181, 203, 218, 234, 254, 274, 297, 313, 331, 355,
    392, 419, 447, 498, 553, 631, 728, 809, 1087, 1565, 2824, 5352, 11547,
)  # fmt: skip
"""Quantiles 0/32 to 32/32 of the chat mix (benchmarks/README.md) in tokens of Qwen's vocabulary."""

PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4, "GH200": 989.4, "A100": 312.0}
"""Dense bf16, from the vendor's data sheets (SXM parts), by a part of the device's name."""

SIZES = {  # name: (default, with --tiny, which measures nothing, meaning)
    "layers": (24, 2, "transformer layers"),
    "hidden": (1536, 32, "hidden size"),
    "heads": (12, 2, "attention heads"),
    "ffn_hidden": (4096, 64, "MLP size (SwiGLU)"),
    "vocab": (32768, 128, "vocabulary"),
    "seq_length": (4096, 128, "context: longer samples are cut to it"),
    "token_budget": (8192, 256, "tokens of a micro-batch"),
    "mean_length": (500, 32, "mean of the lognormal lengths"),
    "replicas": (4, 2, "data-parallel replicas, simulated"),
    "global_batch_size": (256, 32, "samples per step"),
    "rounds": (12, 2, "most measured rounds of a row"),
}


def main() -> int:
    """Run, measure, report; return the exit code."""
    parser = _parser()
    options = parse(parser)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    # Shapes differ from micro-batch to micro-batch: one arm's blocks would be in another's way.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    warnings.filterwarnings("ignore", module="(megatron|torch)\\.")  # what is not installed
    logging.getLogger("megatron").setLevel(logging.ERROR)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: run it where there is one, or --device cpu")
    try:
        result = run(options)
    except ValueError as error:
        parser.error(str(error))
    torch.distributed.destroy_process_group()
    return (
        0
        if result["packed_against_padded"]["passed"]
        and all(one["ok"] for one in result["backends"].values())
        else 1
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run rows until the minutes are used up; the file is written after every round."""
    import torch
    from gpu_model import Trainer, choose_attention, shape_of, start_device

    from odb_megatron.megatron.versions import megatron_version

    lengths = {row: row_lengths(row, options) for row in options.rows}
    start_device(options.device, seed=options.seed)
    chosen = choose_attention(options.transformer_impl, options.attention_backend, options.device)
    trainer = Trainer(options, chosen, [])
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    peaks = [tflops for part, tflops in PEAK_TFLOPS.items() if part in name]
    peak = options.peak_tflops or (peaks[0] if peaks else None)
    result: dict[str, Any] = {"complete": False, "rows": [], "left_out": {}}
    result["setting"] = {
        **{key: getattr(options, key) for key in (*SIZES, "minutes", "seed")},
        "device": name,
        "peak_tflops": peak,
        "num_parameters": trainer.num_parameters,
        "attention": chosen.name,
        "attention_reason": chosen.reason,
        "torch": torch.__version__,
        "megatron_core": ".".join(map(str, megatron_version())),
        "command": sys.argv,
        "not_timed": "gradient reduction between replicas, reading and tokenizing, planning, "
        "sending samples to other replicas",
    }
    print(f"{name}, {trainer.num_parameters / 1e9:.3f} billion parameters, {chosen}", flush=True)
    check(trainer, options, lengths[options.rows[0]], result)
    save(options, result)
    cost = CostModel.from_ratios(  # as without --odb-cost
        quadratic=shape_of(options).quadratic_ratio, fixed_tokens=0.05 * options.token_budget
    )
    for at, row in enumerate(options.rows):
        left_s = 60 * options.minutes - (time.monotonic() - STARTED) - _END_S
        row_s = left_s / (len(options.rows) - at)
        measure(trainer, row, lengths[row], cost, options, result, until=time.monotonic() + row_s)
    result["complete"] = True
    save(options, result)
    return result


def check(
    trainer: Any,
    options: argparse.Namespace,
    lengths: npt.NDArray[np.int64],
    result: dict[str, Any],
) -> None:
    """Hold every kernel to the reference, time it, and packed samples to padded in the model."""
    import torch
    from gpu_model import attention_ms

    from odb_megatron.megatron.attention import absent
    from odb_megatron.testing.backends import report

    values = trainer.lengths = lengths.tolist()
    full = next(n for n in range(1, len(values)) if sum(values[: n + 1]) > options.token_budget)
    backends = result["backends"] = {name: report(name) for name in absent()}
    for name, one in backends.items():
        if one["checked"] == "ran":
            try:
                one["attention_ms"] = attention_ms(name, options, values[:full], trainer.clock)
            except Exception as error:  # whatever a kernel's package raises
                one["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(f"kernel {name}: {one}", flush=True)
    most = options.token_budget // options.seq_length
    few = [tuple(range(at, at + most)) for at in range(0, 8, most)]
    packed, padded = (trainer.loss(few, is_padded=is_padded) for is_padded in (False, True))
    limit = 2e-2 if torch.cuda.is_available() else 1e-5
    passed = abs(packed - padded) <= limit
    found = {"packed": packed, "padded": padded, "limit": limit, "passed": passed}
    result["packed_against_padded"] = found
    print(f"loss packed against padded: {found}", flush=True)


def measure(
    trainer: Any,
    row: str,
    lengths: npt.NDArray[np.int64],
    cost: CostModel,
    options: argparse.Namespace,
    result: dict[str, Any],
    *,
    until: float,
) -> None:
    """Run the arms side by side: a round is a step of each, the first one is warm-up.

    Each round begins with another arm. A round that not all arms have finished does not count.
    """
    import torch

    setting = Setting(
        num_replicas=options.replicas,
        token_budget=options.token_budget,
        global_batch_size=options.global_batch_size,
        cost=cost,
        seed=options.seed,
    )
    stream = Stream.of_epochs(lengths, epochs=1, cost=cost, seed=options.seed)
    schedules: dict[str, Schedule] = {name: ARMS[name](stream, setting) for name in options.arms}
    trainer.lengths = stream.lengths.tolist()
    steps: dict[str, list[Any]] = {name: [] for name in schedules}
    failed: dict[str, str] = {}
    found: dict[str, Any] = {"name": row, "lengths": length_summary(lengths), "rounds": 0}
    longest_s = 0.0
    for round_ in range(1 + options.rounds):
        started, done = time.monotonic(), {}
        if started + 1.15 * longest_s > until:
            break
        first = round_ % len(schedules)
        for name in [*schedules][first:] + [*schedules][:first]:
            if name in failed:
                continue
            step = schedules[name].steps[round_]
            try:
                done[name] = trainer.train(step, is_padded=schedules[name].is_padded)
            except torch.OutOfMemoryError as error:
                failed[name] = str(error).split(". ")[0]
            if name in failed:  # outside the handler: it holds the frames
                gc.collect()
                torch.cuda.empty_cache()
        longest_s = max(longest_s, time.monotonic() - started)
        if round_:
            for name, one in done.items():
                steps[name].append(one)
            found |= {"rounds": round_, **summary(steps, failed, options, result["setting"])}
    if not found["rounds"]:
        result["left_out"][row] = f"a round took {longest_s:.0f} s, and there was no time for two"
        return
    result["rows"].append(found)
    save(options, result)
    print(json.dumps(found, indent=1), flush=True)


def summary(
    steps: Mapping[str, Sequence[Any]],
    failed: Mapping[str, str],
    options: argparse.Namespace,
    setting: Mapping[str, Any],
) -> dict[str, Any]:
    """Return each arm's figures, and ratios of tokens per second with a jackknife's interval."""
    arms: dict[str, Any] = {name: {"out_of_memory": why} for name, why in failed.items()}
    peak = setting["peak_tflops"]
    rates = {}
    for name, own in steps.items():
        if name in failed or not own:
            continue
        seconds, tokens = sum(step.seconds for step in own), sum(step.tokens for step in own)
        rates[name] = [(float(step.tokens), step.seconds) for step in own]
        device_flops = seconds * options.replicas * (peak or 0) * 1e12
        arms[name] = {
            "tokens_per_s": tokens / seconds,
            "samples_per_s": sum(step.samples for step in own) / seconds,
            "mfu": sum(step.flops for step in own) / device_flops if peak else None,
            "padding_fraction": 1 - tokens / sum(step.computed for step in own),
            "balance_measured": float(
                np.mean([np.mean(step.replica_s) / max(step.replica_s) for step in own])
            ),
            "step_s": seconds / len(own),
            "optimizer_s": sum(step.optimizer_s for step in own) / len(own),
            "peak_memory_bytes": max(step.peak_bytes for step in own) or None,
            "num_steps": len(own),
            "first_loss": own[0].loss,
            "last_loss": own[-1].loss,
        }
    ratios = {
        f"odb_over_{name}": rate_ratio_interval(rates["odb"], rates[name]).as_json()
        for name in rates
        if name != "odb" and "odb" in rates
    }
    return {"arms": arms, "ratios": ratios}


def row_lengths(row: str, options: argparse.Namespace) -> npt.NDArray[np.int64]:
    """Draw a row's lengths, cut to the context.

    Raises:
        ValueError: a file that cannot be used.
    """
    count = options.global_batch_size * (1 + options.rounds + _SPARE_STEPS)
    random = np.random.default_rng([options.seed, 7])
    values: npt.NDArray[np.int64]
    if row in SPREADS:
        spec = f"lognormal:mean={options.mean_length},cv={SPREADS[row]},max={options.seq_length}"
        values = read_lengths(f"{spec},n={count},seed={options.seed}")
    elif options.chat_lengths is not None:
        spec = f"file:{options.chat_lengths}#lengths"
        values = np.resize(read_lengths(spec), count)
    else:
        places = random.random(count) * (len(CHAT_QUANTILES) - 1)
        drawn = np.interp(places, np.arange(len(CHAT_QUANTILES)), CHAT_QUANTILES)
        values = np.rint(drawn).astype(np.int64)
    cut: npt.NDArray[np.int64] = np.minimum(values, options.seq_length)
    return cut


def save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the results so far, all or nothing."""
    result["seconds"] = time.monotonic() - STARTED
    if options.json is not None:
        part = options.json.with_name(f"{options.json.name}.part{os.getpid()}")
        part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        part.replace(options.json)


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; sizes that are not given are those of the chosen scale."""
    options = parser.parse_args(argv)
    for name, values in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.tiny])
    for is_wrong, text in (
        (not options.minutes > 0, f"--minutes must be above 0, got {options.minutes:g}"),
        (
            options.token_budget < options.seq_length,
            f"--token-budget {options.token_budget} is below the context of "
            f"{options.seq_length} tokens: raise it",
        ),
        (
            options.global_batch_size % options.replicas > 0,
            f"--global-batch-size {options.global_batch_size} is no multiple of the "
            f"{options.replicas} replicas",
        ),
        (
            options.hidden % (8 * options.heads) > 0,
            f"--hidden {options.hidden} over {options.heads} heads is no multiple of 8",
        ),
    ):
        if is_wrong:
            parser.error(text)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--minutes", type=float, default=8.0, help="from start to end of the process (default 8)")
    add("--json", type=output_file, help="write the results here, after every row")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: fp32, to try the script")
    add("--tiny", action="store_true", help="tiny model, few rounds: measures nothing")
    impls = ("auto", "local", "transformer_engine")
    add("--transformer-impl", choices=impls, default="auto", help="layers, as Megatron's flag")
    kernels = ("auto", "flash", "fused", "unfused")
    add("--attention-backend", choices=kernels, default="auto", help="as Megatron's flag")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    add("--rows", nargs="+", choices=ROWS, default=ROWS, help="lengths, in order of importance")
    add("--chat-lengths", type=Path, help="JSON of lengths (chat_lengths.py) for the row chat")
    add("--peak-tflops", type=float, help="of the device, for MFU; known for a few")
    add("--seed", type=whole(0, 2**32 - 1), default=1234)
    for name, (default, _, meaning) in SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=whole(1), help=f"{meaning} (default {default})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
