"""`odb-megatron trace` and `odb-megatron compare`: what the step logs of runs say.

Must not interpret: reads arguments, writes what `trace_page` makes of the logs.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_megatron.output_files import check_output, write_output
from odb_megatron.pages.needs import require

if TYPE_CHECKING:
    from odb_megatron.pages import Page

__all__ = ["compare", "trace"]

_STEPS = re.compile(r"(\d*):(\d*)")


def trace(argv: Sequence[str]) -> int:
    """Show one run.

    Args:
        argv: arguments behind `odb-megatron trace`.

    Raises:
        SystemExit: arguments or logs that cannot be used (2), or `--help` (0).
    """
    parser = _parser(
        "trace",
        "Show a run from its step logs (--odb-log-dir): a summary, and with --html a page with "
        "the timeline of replicas and micro-batches, balance, fill, waits, and the samples of a "
        "step.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder given to --odb-log-dir")
    parser.add_argument(
        "--fit-cost",
        action="store_true",
        help="fit the cost model to the times of the run's micro-batches, and print its flag, "
        "--odb-cost",
    )
    options = parser.parse_args(argv)
    steps = _check(parser, options)
    from odb_megatron.report.cost_fit import fit_cost
    from odb_megatron.report.run_figures import RunFigures
    from odb_megatron.report.steps import read_run
    from odb_megatron.report.trace_page import run_values, summary_lines, trace_page

    try:
        run = read_run(options.run, steps=steps)
        figures = RunFigures.of(run)
        if options.html:
            title = f"Run {_name(options.run)}"
            _write(options.html, trace_page(run, title=title, command=_command("trace", argv)))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    values, lines = run_values(run, figures), summary_lines(run, figures)
    refused = ""
    if options.fit_cost:
        try:
            fit = fit_cost(run)
            values["cost_fit"] = asdict(fit)
            lines += fit.lines()
        except ValueError as error:
            refused = str(error)
    _tell(parser, options, values, lines)
    if refused:
        parser.error(refused)
    return 0


def compare(argv: Sequence[str]) -> int:
    """Show two runs and what differs.

    Args:
        argv: arguments behind `odb-megatron compare`.

    Raises:
        SystemExit: arguments or logs that cannot be used (2), or `--help` (0).
    """
    parser = _parser(
        "compare",
        "Lay two runs over each other, from their step logs (--odb-log-dir), and print what "
        "differs.",
    )
    parser.add_argument("runs", metavar="RUN", nargs=2, help="the folder given to --odb-log-dir")
    options = parser.parse_args(argv)
    steps = _check(parser, options)
    if Path(options.runs[0]).resolve() == Path(options.runs[1]).resolve():
        parser.error(f"{options.runs[0]} and {options.runs[1]} are one folder: name two runs")
    from odb_megatron.report.run_figures import RunFigures
    from odb_megatron.report.steps import read_run
    from odb_megatron.report.trace_page import compare_page, compare_rows, run_values

    names = [_name(run) for run in options.runs]
    if names[0] == names[1]:
        names = list(options.runs)
    try:
        runs = [read_run(run, steps=steps) for run in options.runs]
        figures = [RunFigures.of(run) for run in runs]
        if options.html:
            named = list(zip(names, runs, strict=True))
            _write(options.html, compare_page(named, command=_command("compare", argv)))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rows = compare_rows(*figures)
    values = {
        "runs": dict(zip(names, map(run_values, runs, figures), strict=True)),
        "differences": [
            dict(zip(("figure", "a", "b", "difference"), row, strict=True)) for row in rows
        ],
    }
    lines = [f"{'':<30}{'A':>16}{'B':>16}{'difference':>14}"]
    lines += [f"{label:<30}{a:>16}{b:>16}{change:>14}" for label, a, b, change in rows]
    lines += [f"A: {names[0]}", f"B: {names[1]}"]
    lines += [f"note: {n}: {note}" for n, run in zip("AB", runs, strict=True) for note in run.notes]
    _tell(parser, options, values, lines)
    return 0


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"odb-megatron {name}", description=description)
    parser.add_argument(
        "--html", metavar="FILE", help="write a page; needs pip install 'odb-megatron[pages]'"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write all figures of each step; - is standard output, the text then goes to "
        "standard error",
    )
    parser.add_argument(
        "--steps",
        metavar="A:B",
        help="only iterations A to B, both included; A: or :B leaves an end open",
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[int, int] | None:
    for flag, value in (("--html", options.html), ("--json", options.json)):
        if value is None or value == "-":
            continue
        try:
            check_output(flag, value)
            if value == options.html:
                require("matplotlib", purpose=flag)
                require("jinja2", purpose=flag)
        except ValueError as error:
            parser.error(str(error))
    if options.html == "-":
        parser.error("--html - : a page goes to a file: name one")
    if options.steps is None:
        return None
    found = _STEPS.fullmatch(options.steps)
    first = int(found[1] or 1) if found else 1
    last = int(found[2] or sys.maxsize) if found else 0
    if found is None or options.steps == ":" or first > last:
        parser.error(
            f"--steps {options.steps}: give the first and the last iteration, like 100:200"
        )
    return first, last


def _name(folder: str) -> str:
    return Path(folder).resolve().name or folder


def _command(name: str, argv: Sequence[str]) -> str:
    return f"odb-megatron {name} {shlex.join(argv)}"


def _write(path: str, page: Page) -> None:
    from odb_megatron.pages import write_page

    write_page(Path(path), page)


def _tell(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    values: dict[str, Any],
    lines: Sequence[str],
) -> None:
    print("\n".join(lines), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        json.dump(values, sys.stdout, indent=1)
        print()
    elif options.json:
        try:
            write_output("--json", options.json, json.dumps(values, indent=1) + "\n")
        except ValueError as error:
            parser.error(str(error))
