"""`odb-megatron simulate`: what each way to form steps costs on given sample lengths.

Imports numpy and the planner only after the arguments are parsed, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from odb_megatron import __version__
from odb_megatron.output_files import check_output, write_output
from odb_megatron.simulation.names import POLICY_NAMES, select_names

if TYPE_CHECKING:
    from odb_megatron.simulation.lengths import SampleLengths
    from odb_megatron.simulation.setting import Setting, Stream

__all__ = ["main", "parse", "simulate"]

_DEFAULT_COUNT = 8
_EXCHANGES = ("none", "tokens", "auto")
_DESCRIPTION = """\
Compare ways to form the steps of data-parallel training on the lengths of samples alone: the real
planners (samples, cost), padded and packed rivals, an ideal with global knowledge (lpt-window),
and the bound. No model runs; time is a cost model's. docs/simulator.md says what each figure means.
"""


def main(argv: Sequence[str]) -> int:
    """Simulate, print one table, write the JSON.

    Args:
        argv: arguments behind `odb-megatron simulate`.

    Raises:
        SystemExit: arguments that do not parse or cannot be used (2), or `--help` (0).
    """
    parser = _parser()
    options = parser.parse_args(argv)
    table = sys.stderr if options.json == "-" else sys.stdout
    try:
        if options.json not in (None, "-"):
            check_output("--json", options.json)
        report, text = simulate(options)
    except ValueError as error:
        parser.error(_with_own_flags(str(error), parser))
    print(text, file=table)
    if options.json == "-":
        json.dump(report, sys.stdout, indent=1)
        print()
    elif options.json:
        try:
            write_output("--json", options.json, json.dumps(report, indent=1) + "\n")
        except ValueError as error:
            parser.error(str(error))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options for `simulate`; a SystemExit for arguments that do not parse."""
    return _parser().parse_args(argv)


def simulate(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the report, and the table to print.

    Args:
        options: as parsed by the command line.

    Raises:
        ValueError: an argument cannot be used; says which, and the way out.
    """
    names = select_names(options.policy)
    from odb_megatron.simulation.compare import compare
    from odb_megatron.simulation.lengths import read_lengths
    from odb_megatron.simulation.setting import Stream
    from odb_megatron.simulation.table import render_table

    lengths = read_lengths(
        options.lengths,
        token_budget=options.token_budget,
        tokenizer=options.tokenizer,
        seed=options.seed,
    )
    setting = _setting(options, lengths)
    stream = Stream.of_epochs(
        lengths.values, epochs=options.epochs, cost=setting.cost, seed=options.seed
    )
    found = compare(names, stream, setting, progress=_say)
    report = {
        "policies": found.policies,
        "left_out": found.left_out,
        "config": _config(options, setting),
        "lengths": lengths.summary(),
        "versions": _versions(),
    }
    lines = [_headline(options, setting, lengths), render_table(found.policies)]
    lines += _warnings(options, setting, stream, found.policies)
    lines += [f"{name} is left out: {reason}" for name, reason in found.left_out.items()]
    lines += [
        f"{name}: {figures['exchange']}"
        for name, figures in found.policies.items()
        if figures.get("exchange")
    ]
    return report, "\n".join(lines)


def _setting(options: argparse.Namespace, lengths: SampleLengths) -> Setting:
    from odb_megatron.plan.batch_size import batch_size_for
    from odb_megatron.plan.policy import BalanceScope, ExchangeMode
    from odb_megatron.simulation.setting import CostShares, Setting

    shares = CostShares(attention=options.attention_share, fixed=options.fixed_cost)
    for flag, value in (("--dp", options.dp), ("--token-budget", options.token_budget)):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    cost = shares.model(lengths.values, token_budget=options.token_budget)
    batch = options.global_batch_size
    if batch is None:
        batch = batch_size_for(
            _DEFAULT_COUNT,
            lengths.values,
            cost=cost,
            token_budget=options.token_budget,
            num_replicas=options.dp,
        )
    scope = BalanceScope(options.sync or ("microbatch" if options.pp > 1 else "step"))
    return Setting(
        num_replicas=options.dp,
        token_budget=options.token_budget,
        window=options.window,
        global_batch_size=batch,
        cost=cost,
        sync=scope,
        num_stages=options.pp,
        num_chunks=options.vpp,
        max_delay_steps=options.max_delay_steps,
        exchange=ExchangeMode(options.exchange),
        seed=options.seed,
    )


def _config(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    chosen = {key: value for key, value in vars(options).items() if key != "json"}
    return {
        **chosen,
        "sync": setting.sync.value,
        "global_batch_size": setting.global_batch_size,
        "cost_quadratic": setting.cost.quadratic,
        "cost_fixed": setting.cost.fixed,
    }


def _versions() -> dict[str, str | None]:
    import numpy

    from odb_megatron.simulation.rivals.reference import reference_version

    return {
        "odb_megatron": __version__,
        "online_dynamic_batching": reference_version(),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def _headline(options: argparse.Namespace, setting: Setting, lengths: SampleLengths) -> str:
    about = lengths.summary()
    how = "" if options.global_batch_size is not None else f" (what M = {_DEFAULT_COUNT} holds)"
    cut = ""
    if lengths.num_truncated or lengths.num_left_out:
        cut = f", {lengths.num_truncated} cut, {lengths.num_left_out} left out"
    return (
        f"{about['num_samples']} samples, mean {about['mean']:.1f}, CV {about['cv']:.2f}, longest "
        f"{about['max']}{cut}; {options.epochs} epoch(s); {setting.num_replicas} replicas, window "
        f"{setting.window}, token budget {setting.token_budget}, global batch size "
        f"{setting.global_batch_size}{how}, sync {setting.sync.value}"
    )


def _warnings(
    options: argparse.Namespace, setting: Setting, stream: Stream, policies: Mapping[str, Any]
) -> list[str]:
    """Return what the figures should not be read without."""
    from odb_megatron.plan.batch_size import batch_size_warning
    from odb_megatron.plan.policy import PolicyName

    found = []
    for name in PolicyName:
        if name.value in policies:
            warning = batch_size_warning(
                name,
                setting.exchange,
                global_batch_size=setting.global_batch_size,
                num_replicas=setting.num_replicas,
            )
            found += [_with_own_flags(warning, _parser())] if warning else []
    if not any(figures.get("steady") for name, figures in policies.items() if name != "bound"):
        depth = 2 * setting.window * setting.num_replicas
        found.append(
            f"no steady steps: {len(stream)} samples, and the first and last windows of "
            f"{setting.num_replicas} replicas are {depth}: give more samples or --epochs, or lower "
            "--window"
        )
    return [f"warning: {text}" for text in found]


def _with_own_flags(text: str, parser: argparse.ArgumentParser) -> str:
    """Return a planner's message with this command's flags in place of the training script's."""
    for flag in sorted(parser._option_string_actions, key=len, reverse=True):
        text = text.replace(f"--odb-{flag.removeprefix('--')}", flag)
    return text


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _say(name: str) -> None:
    if sys.stderr.isatty():
        print(f"... {name}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odb-megatron simulate",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--lengths",
        required=True,
        metavar="SPEC",
        help="lognormal:mean=500,cv=1.0,max=8192[,n=131072][,seed=0], file:PATH.npy, "
        "file:PATH.json[#key], or a data file",
    )
    add("--tokenizer", metavar="FOLDER", help="tokenizer of a JSON or JSONL data file")
    add("--dp", type=int, default=8, metavar="N", help="replicas (default 8)")
    add(
        "--token-budget", type=int, default=8192, metavar="B", help="per micro-batch (default 8192)"
    )
    add("--window", type=int, default=1024, metavar="W", help="samples per replica (default 1024)")
    add("--epochs", type=int, default=1, metavar="E", help="one stream of E epochs (default 1)")
    add(
        "--policy",
        default="all",
        metavar="P[,P...]",
        help=f"all (default), or of {', '.join(POLICY_NAMES)}",
    )
    add(
        "--sync",
        choices=("step", "microbatch"),
        help="where replicas wait for each other (default step; with --pp microbatch)",
    )
    add(
        "--global-batch-size",
        type=int,
        metavar="G",
        help=f"samples per step (default: what {_DEFAULT_COUNT} micro-batches hold)",
    )
    add(
        "--fixed-cost",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="price of a micro-batch, as a share of a full one's cost (default 0.05)",
    )
    add(
        "--attention-share",
        type=float,
        default=0.3,
        metavar="SHARE",
        help="of attention in the cost of a sample of mean length (default 0.3)",
    )
    add("--exchange", choices=_EXCHANGES, default="none", help="of samples (default none)")
    add("--max-delay-steps", type=int, default=8, metavar="K", help="beyond FIFO (default 8)")
    add("--pp", type=int, default=1, metavar="P", help="pipeline stages: adds the 1F1B figures")
    add("--vpp", type=int, default=1, metavar="V", help="virtual chunks per stage (with --pp)")
    add("--seed", type=_whole, default=0, help="of epochs' orders and comparisons (default 0)")
    add("--json", metavar="OUT", help="write the figures as JSON; '-' for stdout")
    return parser
