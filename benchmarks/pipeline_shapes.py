"""Pipelines that take shapes from the plan, against one process and Megatron's shape messages.

    python benchmarks/pipeline_shapes.py --json build/bench/pipeline_shapes.json

Real `pretrain()` runs as those of `parallel_parity.py`, with evaluations between the steps. A case
runs as it is and with `variable_seq_lengths`, by turns in the same processes; what happens to two
stages of two chunks that send in batches (Megatron refuses them, Bridge has them by default) is in
`with_messages`. Times are a step's (an evaluation's) shortest of all repeats, in the mean of all
but the first: other work on the machine makes them longer, never shorter. With `--batch` it is the
script that the processes run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import run_batch, write_json
from gradient_log import compare_gradients, log_gradients
from parallel_parity import (
    CASES,
    MAX_LOSS_DIFF,
    MAX_REL_GRAD_DIFF,
    Case,
    Planned,
    Runs,
    compare,
)

SCRIPT = Path(__file__).resolve()
EVALUATION = ["--split", "80,20,0", "--eval-iters", "2", "--eval-interval", "3"]
REPEATS = 3
MAX_SLOWER = 1.05
"""For noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """A case of this benchmark: what is run of `parallel_parity`, and what of it is looked at."""

    of: str
    flags: tuple[str, ...] = ()
    crosses: bool = False
    is_evaluation: bool = False


SHAPES = {
    "pp2": Shapes(of="pp2"),
    "pp4": Shapes(of="pp4"),
    "vpp2x2": Shapes(of="vpp2x2"),
    "vpp2x2_batched": Shapes(of="vpp2x2", flags=("--batched-sends",), crosses=True),
    "evaluation": Shapes(of="pp2", is_evaluation=True),
}


@contextlib.contextmanager
def _observed(folder: Path) -> Iterator[None]:
    """Write what this rank saw of evaluations, and how many shapes it has exchanged."""
    import torch
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.training import training

    found: dict[str, Any] = {"shape_messages": 0, "losses": [], "evaluation_s": []}
    originals = P2PCommunicator._communicate_shapes, training.evaluate

    def communicate_shapes(*args: Any, **kwargs: Any) -> Any:
        found["shape_messages"] += 1
        return originals[0](*args, **kwargs)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = originals[1](*args, **kwargs)
        found["evaluation_s"].append(time.perf_counter() - started)
        if result[0]:
            found["losses"].append(float(result[0]["lm loss"]))
        return result

    P2PCommunicator._communicate_shapes, training.evaluate = communicate_shapes, evaluate
    try:
        yield
    finally:
        P2PCommunicator._communicate_shapes, training.evaluate = originals
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{torch.distributed.get_rank()}.json"
        path.write_text(json.dumps(found), encoding="utf-8")


def run_all(file: Path) -> None:
    """Train by each command line of a JSON file."""
    from odb_megatron.megatron import providers, run
    from odb_megatron.megatron.setup import exchange_shapes, parse_and_validate_args
    from odb_megatron.testing.runs_again import forget_run, keep_imports

    class MessagesRun(run.OdbRun):
        _plans_shapes = False

    keep_imports()
    for flags in json.loads(file.read_text(encoding="utf-8")):
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--count-multiple", type=int, default=1)
        parser.add_argument("--gradients", type=Path)
        parser.add_argument("--observed", type=Path)
        parser.add_argument("--messages", action="store_true")
        parser.add_argument("--batched-sends", action="store_true")
        own, sys.argv[1:] = parser.parse_known_args(flags)
        setattr(providers, "count_multiple", lambda _args, at=own.count_multiple: at)  # noqa: B010
        args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"})
        if own.batched_sends:
            args.overlap_p2p_comm = False  # refused as a flag
        if own.messages:
            exchange_shapes(args)
        kind = MessagesRun if own.messages else run.OdbRun
        gradients = log_gradients(own.gradients)
        with gradients, _observed(own.observed), kind(args) as odb:
            odb.pretrain()
        forget_run()


def plan(runs: Runs, folder: Path, name: str, *, messages: bool, repeat: int) -> Planned:
    """The run of a case."""
    shapes = SHAPES[name]
    full = f"{name}-{'messages' if messages else 'plan'}-{repeat}"
    item = runs.case(full, CASES[shapes.of])
    flags = [*item.flags, *EVALUATION, *shapes.flags, "--observed", str(folder / f"{full}-seen")]
    return replace(item, flags=[*flags, "--messages"] if messages else flags)


def seen(folder: Path, item: Planned) -> list[dict[str, Any]]:
    """What each rank of a run has written."""
    paths = [folder / f"{item.name}-seen" / f"{rank}.json" for rank in range(item.num_processes)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def start(items: Sequence[Planned], *, timeout_s: float = 600.0) -> None:
    """Run them one after the other in the same processes."""
    run_batch(
        [item.flags for item in items],
        script=SCRIPT,
        num_processes=items[0].num_processes,
        timeout_s=timeout_s,
    )


def measure(runs: Runs, folder: Path, name: str, alone: Planned) -> dict[str, Any]:
    """Run a case with and without messages, and compare it with one process."""
    shapes = SHAPES[name]
    planned = [plan(runs, folder, name, messages=False, repeat=at) for at in range(REPEATS)]
    messages = [plan(runs, folder, name, messages=True, repeat=at) for at in range(REPEATS)]
    pairs = zip(planned, messages, strict=True)
    start(planned if shapes.crosses else [one for pair in pairs for one in pair])
    item = planned[0]
    steps, ranks = runs.steps(item), seen(folder, item)
    result = compare(steps, runs.steps(alone))
    (losses, expected) = ranks[-1]["losses"], seen(folder, alone)[-1]["losses"]
    loss_diff = result["max_abs_loss_diff"]
    if shapes.is_evaluation:
        loss_diff = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    found = {
        "shape_messages": sum(rank["shape_messages"] for rank in ranks),
        "padding_tokens": sum(one.computed_tokens - one.tokens - one.idle for one in steps[0]),
        "max_abs_loss_diff": loss_diff,
        "max_rel_grad_diff": compare_gradients(item.gradients, alone.gradients)[0],
        "ids_equal": result["ids_equal"],
        "m_values": result["m_values"],
        "step_s": _seconds(runs, folder, planned, evaluation=shapes.is_evaluation),
    }
    if not shapes.crosses:
        count = sum(rank["shape_messages"] for rank in seen(folder, messages[0]))
        seconds = _seconds(runs, folder, messages, evaluation=shapes.is_evaluation)
        return found | {
            "with_messages": f"{count} shape messages in {len(steps[0])} steps and evaluations",
            "step_s_with_messages": seconds,
        }
    try:
        start(messages[:1], timeout_s=120.0)
        outcome = "trains"
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        told = [line for line in lines if "Error: " in line]
        outcome = told[-1][-300:] if told else lines[0]
    return found | {"with_messages": outcome, "step_s_with_messages": None}


def _seconds(runs: Runs, folder: Path, items: Sequence[Planned], *, evaluation: bool) -> float:
    took = [
        seen(folder, item)[-1]["evaluation_s"]
        if evaluation
        else [one.step_s for one in runs.steps(item)[0]]
        for item in items
    ]
    shortest = [min(values) for values in zip(*took, strict=True)]
    return float(statistics.mean(shortest[1:]))


def find_problems(name: str, result: dict[str, Any]) -> list[str]:
    """What makes a case fail, in words."""
    limits = {"shape_messages": 0, "padding_tokens": 0, "max_abs_loss_diff": MAX_LOSS_DIFF}
    limits |= {"max_rel_grad_diff": MAX_REL_GRAD_DIFF}
    if result["step_s_with_messages"] is not None:
        limits["step_s"] = MAX_SLOWER * result["step_s_with_messages"]
    problems = [
        f"{name}: {key} is {result[key]:.3g}; the limit is {limit:.3g}"
        for key, limit in limits.items()
        if not result[key] <= limit
    ]
    if not result["ids_equal"]:
        problems.append(f"{name}: another order of samples than one process")
    return problems


def main() -> int:
    """Run, compare, report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--cases", default=",".join(SHAPES), help="comma-separated names")
    parser.add_argument("--seed", type=int, default=50, help="of model and data order")
    parser.add_argument("--data", default="chitchat", help="chitchat (default), chat-mix or a file")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="odb-shapes-") as name:
        folder = Path(name)
        runs = Runs(folder, options)
        alone = runs.case("one-process", Case())
        observed = ["--observed", str(folder / "one-process-seen")]
        alone = replace(alone, flags=[*alone.flags, *EVALUATION, *observed])
        checkpoint = runs.checkpoint("dense")
        start([replace(checkpoint, flags=[*checkpoint.flags, *observed]), alone])
        for case in options.cases.split(","):
            results[case] = measure(runs, folder, case, alone)
            problems += find_problems(case, results[case])
            print(f"{case}: {results[case]}", flush=True)
    write_json(options.json, {"cases": results, "problems": problems})
    for problem in problems:
        print(f"FAILED: {problem}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--batch"]:
        run_all(Path(sys.argv[2]))
    else:
        sys.exit(main())
