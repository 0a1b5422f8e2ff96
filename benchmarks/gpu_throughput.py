"""Throughput of ODB against padded micro-batches on one GPU, with megatron-core alone.

Trains a GPT in bf16 on made-up tokens whose lengths are a chat mix's or lognormal; data-parallel
replicas are simulated one after the other. Needs torch, numpy, packaging, megatron-core and this
repository, and no network. Must not import any of them before they were found.

    python3 benchmarks/gpu_throughput.py --minutes 8 --json OUT --megatron-wheel WHEEL
    python3 benchmarks/gpu_throughput.py --device cpu --tiny --json OUT
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from pathlib import Path

from flags import output_file, whole
from gpu_packages import HOW_TO_CARRY, MissingPackageError, find_packages

STARTED = time.monotonic()
ARMS = ("standard", "standard_mean", "sorted", "odb")
ROWS = ("chat", "cv1.0", "cv2.0", "cv0.48", "cv0.29")
POSITIONS = ("auto", "rope", "unfused-rope", "learned")
DEFAULTS = {
    "layers": 24,
    "hidden": 1536,
    "heads": 12,
    "ffn_hidden": 4096,
    "vocab": 32768,
    "seq_length": 4096,
    "token_budget": 8192,
    "mean_length": 500,
    "replicas": 4,
    "global_batch_size": 256,
    "min_rounds": 3,
    "rounds": 12,
}
TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "ffn_hidden": 64,
    "vocab": 128,
    "seq_length": 128,
    "token_budget": 256,
    "mean_length": 32,
    "replicas": 2,
    "global_batch_size": 32,
    "min_rounds": 2,
    "rounds": 3,
}
"""Measures nothing: for the tests."""


def main() -> int:
    """Run, measure, report; return the exit code."""
    parser = _parser()
    options = parse(parser)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    # Shapes differ from micro-batch to micro-batch: one arm's blocks would be in another's way.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        find_packages(options.megatron_wheel)
    except MissingPackageError as error:
        print(f"gpu_throughput.py: error: {error}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", module="(megatron|torch)\\.")  # what is not installed
    logging.getLogger("megatron").setLevel(logging.ERROR)
    import torch
    from gpu_rows import Benchmark

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: run it where there is one, or --device cpu")
    try:
        benchmark = Benchmark(options, started=STARTED)
        result = benchmark.run()
    except ValueError as error:
        parser.error(str(error))
    return 0 if passed(result) else 1


def passed(result: dict[str, object]) -> bool:
    """Whether the backend that trained agrees with the reference, and packed with padded."""
    setting, backends, compared = (
        result[name] for name in ("setting", "backends", "packed_against_padded")
    )
    assert isinstance(setting, dict)
    assert isinstance(backends, dict)
    assert isinstance(compared, dict)
    cases = backends[setting["attention"]]["cases"]
    failed = [name for name, case in cases.items() if not case["passed"]]
    if failed or not compared["passed"]:
        print(
            f"FAILED: backend {setting['attention']}, cases {failed or 'none'}; packed against "
            f"padded: {compared}",
            flush=True,
        )
        return False
    return True


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; sizes that are not given are those of the chosen scale."""
    options = parser.parse_args(argv)
    for name, value in (TINY if options.tiny else DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    if options.token_budget < options.seq_length:
        parser.error(
            f"--token-budget {options.token_budget} is below the context of {options.seq_length} "
            "tokens: raise it"
        )
    if options.min_rounds > options.rounds:
        parser.error(f"--min-rounds {options.min_rounds} is above --rounds {options.rounds}")
    if options.global_batch_size % options.replicas:
        parser.error(
            f"--global-batch-size {options.global_batch_size} is no multiple of the "
            f"{options.replicas} replicas"
        )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=HOW_TO_CARRY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=8.0, help="from start to end of the process (default 8)")
    add("--json", type=output_file, help="write the results here, after every round")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: fp32, to try the script")
    add("--tiny", action="store_true", help="tiny model, few rounds: measures nothing")
    add("--megatron-wheel", type=Path, help="megatron-core's wheel; see below")
    add("--attention", default="auto", help="backend of the packed arm, as --odb-attention")
    add("--positions", choices=POSITIONS, default="auto", help="auto: rope if its kernel is here")
    add("--arms", nargs="+", choices=ARMS, default=ARMS, help="default: all")
    add("--rows", nargs="+", choices=ROWS, default=ROWS, help="lengths, in order of importance")
    add("--chat-lengths", type=Path, help="JSON of lengths (chat_lengths.py) for the row chat")
    add("--peak-tflops", type=float, help="of the device, for MFU; known for a few")
    add("--seed", type=whole(0, 2**32 - 1), default=1234)
    meanings = {
        "layers": "transformer layers",
        "hidden": "hidden size",
        "heads": "attention heads",
        "ffn_hidden": "MLP size (SwiGLU)",
        "vocab": "vocabulary",
        "seq_length": "context: longer samples are cut to it",
        "token_budget": "tokens of a micro-batch",
        "mean_length": "mean of the lognormal lengths",
        "replicas": "data-parallel replicas, simulated",
        "global_batch_size": "samples per step",
        "min_rounds": "a row with fewer measured rounds is left out",
        "rounds": "most measured rounds of a row",
    }
    for name, meaning in meanings.items():
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=whole(1), help=f"{meaning} (default {DEFAULTS[name]})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
