"""The planner's table: `odb-megatron simulate` over lengths, topologies and rivals, with targets.

    python benchmarks/simulate_table.py --json OUT

One row after the other in this process; OUT is written after each, so a run that was stopped is
still of use. Exit code 1 if a target is missed. Lengths are lognormal, mean 500, at most 8192;
budget 8192; 5 % overhead per micro-batch; M = 8 but in the rows `small`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from common import parser_of, whole, write_json

from odb_megatron.report.simulate import parse, select_names, simulate

SPREADS = ("0.29", "0.48", "1.0", "2.0")
POLICIES = "standard-safe,sorted-bucketed,odb-reference,dp-balanced,ffd,odb"
TARGETS = {
    ("step", 8, 1): (0.994, 0.994, 0.994, 0.994),
    ("step", 64, 1): (0.994, 0.994, 0.994, 0.994),
    ("microbatch", 8, 1): (0.993, 0.993, 0.948, 0.93),
    ("microbatch", 64, 1): (0.992, 0.993, 0.78, 0.92),
    ("microbatch", 8, 64): (0.993, 0.993, 0.985, 0.965),
    ("microbatch", 64, 64): (0.99, 0.99, 0.98, 0.955),
}
SMALL = ((64, 512, 0.93), (256, 2048, 0.92))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One simulation, and the least `fraction_of_bound` expected of `odb` in its steady steps.

    Attributes:
        name: what `--only` matches.
        flags: of `odb-megatron simulate`.
        target: the least figure.
        is_best: whether every rival must be below it.
    """

    name: str
    flags: tuple[str, ...]
    target: float
    is_best: bool = True


def rows() -> list[Row]:
    """Return all rows, the quick ones first."""
    found = []
    for (sync, dp, share), targets in TARGETS.items():
        for cv, target in zip(SPREADS, targets, strict=True):
            name = f"{sync}/dp{dp}/share{share}/cv{cv}"
            flags = _flags(cv, dp=dp, sync=sync, share=share)
            found.append(Row(name=name, flags=flags, target=target))
    for dp, batch, target in SMALL:
        flags = (*_flags("1.0", dp=dp, sync="microbatch", share=64), "--global-batch-size")
        name = f"small/dp{dp}/gbs{batch}/cv1.0"
        found.append(Row(name=name, flags=(*flags, str(batch)), target=target))
    # Blocks of 64 replicas plan for themselves; a rival over all of them has no such limit.
    flags = _flags("1.0", dp=1024, sync="step", share=1, num=1 << 19)
    found.append(Row(name="blocks/dp1024/cv1.0", flags=flags, target=0.95, is_best=False))
    return found


def main() -> int:
    """Run the rows asked for; return 1 if a target was missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="rows like 'step/dp8/*'")
    parser.add_argument("--policy", default=POLICIES, metavar="P[,P...]", help="others than usual")
    parser.add_argument(
        "--seed", type=whole(0, 2**32 - 1), default=0, help="of the lengths and all else"
    )
    args = parser.parse_args()
    try:
        select_names(args.policy)
    except ValueError as error:
        parser.error(str(error))
    chosen = [row for row in rows() if fnmatch(row.name, args.only)]
    if not chosen:
        parser.error(f"--only {args.only!r} matches no row; rows are like {rows()[0].name}")
    results: list[dict[str, Any]] = []
    for row in chosen:
        flags = [*row.flags, "--seed", str(args.seed), "--policy", args.policy]
        flags[1] += f",seed={args.seed}"
        started = time.monotonic()
        report, _ = simulate(parse(flags))
        result = judge(row, report) | {"seconds": round(time.monotonic() - started, 1)}
        results.append(result)
        print(summary(result), flush=True)
        write_json(args.json, {"rows": results})
    missed = [result["name"] for result in results if result["missed"]]
    print(f"{len(results)} rows, {len(missed)} with a target missed: {', '.join(missed) or '-'}")
    return 1 if missed else 0


def judge(row: Row, report: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the result: the report, and what of it missed a target."""
    figures = {name: found["steady"] for name, found in report["policies"].items()}
    missed: list[str] = []
    own = figures.get("odb")
    if own is not None:
        if own["fraction_of_bound"] < row.target:
            missed.append(f"{own['fraction_of_bound']:.4f} < {row.target}")
        if own["over_budget"]:
            missed.append(f"{own['over_budget']} micro-batches over the budget")
        for name, other in figures.items():
            value = 0.0 if other is None else other["fraction_of_bound"]
            if row.is_best and name not in ("odb", "bound") and value >= own["fraction_of_bound"]:
                missed.append(f"{name} is better")
    return {"name": row.name, "target": row.target, "missed": missed, **report}


def summary(result: dict[str, Any]) -> str:
    """Return one line: the figure of each policy, and more of `odb`."""
    cells = []
    for name, found in result["policies"].items():
        if found["steady"] is not None:
            cells.append(f"{name} {found['steady']['fraction_of_bound']:.4f}")
    own = result["policies"].get("odb", {}).get("steady")
    if own:
        cells.append(f"[M {own['mean_M']:.2f} fill {own['fill']:.3f}]")
    verdict = "MISSED " + "; ".join(result["missed"]) if result["missed"] else ""
    return f"{result['name']:30s} {result['seconds']:6.1f} s  {'  '.join(cells)}  {verdict}"


def _flags(cv: str, *, dp: int, sync: str, share: int, num: int = 131072) -> tuple[str, ...]:
    spec = f"lognormal:mean=500,cv={cv},max=8192,n={num}"
    topology = ("--dp", str(dp), "--sync", sync)
    return ("--lengths", spec, *topology, *(("--share-long", str(share)) if share > 1 else ()))


if __name__ == "__main__":
    sys.exit(main())
