"""Pipelines that take shapes from the plan, against one process and Megatron's shape messages.

    python benchmarks/pipeline_shapes.py --json build/bench/pipeline_shapes.json

Real `pretrain()` runs as those of `parallel_parity.py`, with evaluations between the steps. A case
runs as it is and with `variable_seq_lengths`, by turns in the same processes; what happens to two
stages of two chunks that send in batches (Megatron refuses them, Bridge has them by default) is in
`with_messages`. Times are a step's (an evaluation's) shortest of all repeats, in the mean of all
but the first: other work on the machine makes them longer, never shorter.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import parser_of, run_batch, write_json
from parallel_parity import (
    CASES,
    MAX_LOSS_DIFF,
    MAX_REL_GRAD_DIFF,
    SCRIPT,
    Case,
    Planned,
    Runs,
)

EVALUATION = ("--split", "80,20,0", "--eval-iters", "2", "--eval-interval", "3")
REPEATS = 3
MAX_SLOWER = 1.05
"""For noise."""

SHAPES = {"pp2": "pp2", "pp4": "pp4", "vpp2x2": "vpp2x2"}
SHAPES |= {"vpp2x2_batched": "vpp2x2", "evaluation": "pp2"}
"""Cases, and what is run of `parallel_parity`."""


def plan(runs: Runs, name: str, case: Case, *flags: str) -> Planned:
    """A run with evaluations, which are observed."""
    return runs.case(
        name, case, *EVALUATION, *flags, "--observed", str(runs.folder / f"{name}-seen")
    )


def seen(runs: Runs, item: Planned) -> list[dict[str, Any]]:
    """What each rank of a run has written."""
    folder = runs.folder / f"{item.name}-seen"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(item.num_processes)]


def start(items: Sequence[Planned], *, timeout_s: float = 600.0) -> None:
    """Run them one after the other in the same processes."""
    flags, count = [item.flags for item in items], items[0].num_processes
    run_batch(flags, script=SCRIPT, num_processes=count, timeout_s=timeout_s)


def measure(runs: Runs, name: str, alone: Planned) -> dict[str, Any]:
    """Run a case with and without messages, and compare it with one process."""
    case, crosses, is_evaluation = CASES[SHAPES[name]], "batched" in name, name == "evaluation"
    own = ("--batched-sends",) if crosses else ()
    planned = [plan(runs, f"{name}-plan-{at}", case, *own) for at in range(REPEATS)]
    messages = [
        plan(runs, f"{name}-messages-{at}", case, *own, "--messages") for at in range(REPEATS)
    ]
    pairs = zip(planned, messages, strict=True)
    start(planned if crosses else [one for pair in pairs for one in pair])

    def seconds(items: Sequence[Planned]) -> float:
        took = [
            seen(runs, item)[-1]["evaluation_s"]
            if is_evaluation
            else [one.step_s for one in runs.steps(item)[0]]
            for item in items
        ]
        return float(statistics.mean([min(values) for values in zip(*took, strict=True)][1:]))

    item, steps, ranks = planned[0], runs.steps(planned[0])[0], seen(runs, planned[0])
    result = runs.compare(item, alone)
    if is_evaluation:
        losses = zip(ranks[-1]["losses"], seen(runs, alone)[-1]["losses"], strict=True)
        result["max_abs_loss_diff"] = max(abs(a - b) for a, b in losses)
    kept = ("max_abs_loss_diff", "max_rel_grad_diff", "ids_equal", "m_values")
    found = {
        "shape_messages": sum(rank["shape_messages"] for rank in ranks),
        "padding_tokens": sum(one.computed_tokens - one.tokens - one.idle for one in steps),
        **{key: result[key] for key in kept},
        "step_s": seconds(planned),
    }
    if not crosses:
        count = sum(rank["shape_messages"] for rank in seen(runs, messages[0]))
        return found | {
            "with_messages": f"{count} shape messages in {len(steps)} steps and evaluations",
            "step_s_with_messages": seconds(messages),
        }
    try:
        start(messages[:1], timeout_s=120.0)
        outcome = "trains"
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        outcome = [lines[0], *(line for line in lines if "Error: " in line)][-1][-300:]
    return found | {"with_messages": outcome, "step_s_with_messages": None}


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
    parser = parser_of(__doc__)
    parser.add_argument("--cases", default=",".join(SHAPES), help="comma-separated names")
    parser.add_argument("--seed", type=int, default=50, help="of model and data order")
    parser.add_argument("--data", default="chitchat", help="chitchat (default), chat-mix or a file")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="odb-shapes-") as name:
        runs = Runs(Path(name), options)
        alone = plan(runs, "one-process", Case())
        start([runs.checkpoint("dense"), alone])
        for case in options.cases.split(","):
            results[case] = measure(runs, case, alone)
            problems += find_problems(case, results[case])
            print(f"{case}: {results[case]}", flush=True)
    write_json(options.json, {"cases": results, "problems": problems})
    for problem in problems:
        print(f"FAILED: {problem}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
