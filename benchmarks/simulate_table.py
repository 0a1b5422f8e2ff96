"""The planner's table: `odb-megatron simulate` over lengths, topologies and rivals, with targets.

    python benchmarks/simulate_table.py --json OUT

One row after the other in this process; OUT is written after each, so a run that was stopped is
still of use. Exit code 1 if a target is missed. Lengths are lognormal, mean 500, at most 8192;
budget 8192; 5 % fixed price; M = 8 but in the rows `small`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from flags import output_file, whole

from odb_megatron.simulation.command import parse, simulate
from odb_megatron.simulation.names import select_names

NUM_SAMPLES = 131072
SPREADS = ("0.29", "0.48", "1.0", "2.0")
RIVALS = "standard,sorted,sorted-bucketed,sorted-aligned,odb-reference,dp-balanced,ffd"
OURS = "samples,cost,lpt-window,bound-online"
BEATEN = ("odb-reference", "dp-balanced", "ffd", "sorted", "sorted-bucketed")
STREAM_TARGETS = (0.99, 0.99, 0.99, 0.985)
EPOCH_TARGETS = (0.99, 0.99, 0.985, 0.98)
LONG_EPOCH_TARGETS = (0.99, 0.99, 0.98, 0.96)
ALIGNED_TARGETS = (0.97, 0.97, 0.97, 0.94)
SMALL_TARGET = 0.97
COMPOSITION_KEYS = ("ks_ratio", "long_sample_weight", "outlier_share_p99_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One simulation and what is expected of the policy `cost` in it.

    Attributes:
        name: what `--only` matches.
        flags: of `odb-megatron simulate`.
        part: which figures count, `whole` or `steady`.
        key: the figure with a target.
        target: the least value of it; None for a row that is reported only.
        policies: those that must reach it.
    """

    name: str
    flags: tuple[str, ...]
    part: str
    key: str = "fraction_of_bound"
    target: float | None = None
    policies: tuple[str, ...] = ("cost",)


def rows() -> list[Row]:
    """Return all rows, the quick ones first."""
    found = []
    for dp in (8, 64):
        for window in (1024, 256):
            for cv, target in zip(SPREADS, STREAM_TARGETS, strict=True):
                flags = _flags(cv, NUM_SAMPLES, dp=dp, window=window, epochs=3)
                name = f"stream/dp{dp}/w{window}/cv{cv}"
                found.append(Row(name=name, flags=flags, part="steady", target=target))
    for window in (1024, 256):
        for cv, target in zip(SPREADS, EPOCH_TARGETS, strict=True):
            flags = _flags(cv, NUM_SAMPLES, dp=8, window=window)
            name = f"epoch/dp8/w{window}/cv{cv}"
            found.append(Row(name=name, flags=flags, part="whole", target=target))
    for cv, target in zip(SPREADS, LONG_EPOCH_TARGETS, strict=True):
        flags = _flags(cv, 1 << 19, dp=64, window=256)
        found.append(Row(name=f"epoch/dp64/w256/cv{cv}", flags=flags, part="whole", target=target))
    for dp in (8, 64):
        for cv, target in zip(SPREADS, ALIGNED_TARGETS, strict=True):
            flags = (*_flags(cv, NUM_SAMPLES, dp=dp, window=1024, epochs=3), "--sync", "microbatch")
            found.append(
                Row(
                    name=f"microbatch/dp{dp}/w1024/cv{cv}",
                    flags=flags,
                    part="steady",
                    key="fraction_of_reachable",
                    target=target,
                )
            )
    for dp in (8, 64):
        for batch in (256, 512, 2048):
            for cv in SPREADS:
                flags = _flags(cv, NUM_SAMPLES, dp=dp, window=256)
                flags = (*flags, "--global-batch-size", str(batch))
                for exchange in ("none", "auto"):
                    found.append(
                        Row(
                            name=f"small/dp{dp}/gbs{batch}/cv{cv}/{exchange}",
                            flags=(*flags, "--exchange", exchange),
                            part="steady",
                            key="fraction_of_reachable",
                            target=SMALL_TARGET if exchange == "auto" else None,
                            policies=("samples", "cost"),
                        )
                    )
    flags = _flags("1.0", 1 << 21, dp=1024, window=256)
    found.append(Row(name="epoch/dp1024/w256/cv1.0", flags=flags, part="whole", target=0.97))
    return found


def main() -> int:
    """Run the rows asked for; return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=output_file, required=True, metavar="OUT")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="rows like 'stream/dp8/*'")
    parser.add_argument("--policy", metavar="P[,P...]", help="others than the usual")
    parser.add_argument(
        "--seed", type=whole(0, 2**32 - 1), default=0, help="of the lengths and all else"
    )
    args = parser.parse_args()
    if not any(fnmatch(row.name, args.only) for row in rows()):
        parser.error(f"--only {args.only!r} matches no row; rows are like {rows()[0].name}")
    if args.policy is not None:
        try:
            select_names(args.policy)
        except ValueError as error:
            parser.error(str(error))
    results: list[dict[str, Any]] = []
    for row in rows():
        if not fnmatch(row.name, args.only):
            continue
        flags = [*row.flags, "--seed", str(args.seed)]
        flags[1] += f",seed={args.seed}"
        flags += ["--policy", args.policy or f"{RIVALS},{OURS}"]
        started = time.monotonic()
        report, _ = simulate(parse(flags))
        result = judge(row, report) | {"seconds": round(time.monotonic() - started, 1)}
        results.append(result)
        print(summary(result), flush=True)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"rows": results}, indent=1) + "\n", encoding="utf-8")
    if not results:
        parser.error(f"no row matches {args.only!r}")
    missed = [result["name"] for result in results if result["missed"]]
    print(f"{len(results)} rows, {len(missed)} with a target missed: {', '.join(missed) or '-'}")
    return 1 if missed else 0


def judge(row: Row, report: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the result: the report, and what of it missed a target."""
    policies = report["policies"]
    figures = {name: _part(found, row.part) for name, found in policies.items()}
    missed: list[str] = []
    for policy in row.policies:
        own = figures.get(policy)
        if own is None or row.target is None:
            continue
        if own[row.key] < row.target:
            missed.append(f"{policy}: {row.key} {own[row.key]:.4f} < {row.target}")
        for key in ("padding_fraction", "over_budget"):
            if own[key]:
                missed.append(f"{policy}: {key} {own[key]}")
        if own["max_delay_steps"] > 8:
            missed.append(f"{policy}: max_delay_steps {own['max_delay_steps']}")
        for name in BEATEN if row.key == "fraction_of_bound" else ():
            other = figures.get(name)
            if other is not None and other["fraction_of_bound"] >= own["fraction_of_bound"]:
                missed.append(f"{name} is better")
    return {
        "name": row.name,
        "part": row.part,
        "key": row.key,
        "target": row.target,
        "missed": missed,
        **report,
    }


def summary(result: dict[str, Any]) -> str:
    """Return one line: the figure with the target for each policy, composition of `cost`."""
    cells = []
    own: dict[str, Any] | None = None
    for name, found in result["policies"].items():
        figures = _part(found, result["part"])
        if figures is None:
            continue
        value = figures.get(result["key"])
        cells.append(f"{name} {'-' if value is None else f'{value:.4f}'}")
        own = figures if name == "cost" else own
    if own is not None:
        cells.append(f"[fill {own['fill']:.3f} delay {own['max_delay_steps']}")
        cells += [f"{key.split('_')[0]} {own[key]:.3f}" for key in COMPOSITION_KEYS if own[key]]
        cells[-1] += "]"
    verdict = "MISSED " + "; ".join(result["missed"]) if result["missed"] else ""
    return (
        f"{result['name']:26s} {result['seconds']:6.1f} s  {'  '.join(cells)}  {verdict}".rstrip()
    )


def _part(policy: dict[str, Any], part: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = policy["steady"] if part == "steady" else policy
    return found


def _flags(cv: str, num: int, *, dp: int, window: int, epochs: int = 1) -> tuple[str, ...]:
    spec = f"lognormal:mean=500,cv={cv},max=8192,n={num}"
    numbers = ("--dp", str(dp), "--window", str(window), "--epochs", str(epochs))
    return ("--lengths", spec, *numbers)


if __name__ == "__main__":
    sys.exit(main())
