"""`odb-megatron doctor [--json FILE] [-- COMMAND ...]`: gathers facts, checks them, tells.

Must not decide what is right: the checks are those of `packages`, `quirks`, `kernels`, `host`,
`network` and `command_line`, imported after the arguments are parsed, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from odb_megatron.output_files import check_output, write_output

if TYPE_CHECKING:
    from odb_megatron.doctor.command_facts import CommandFacts
    from odb_megatron.doctor.finding import Finding
    from odb_megatron.doctor.host import HostFacts
    from odb_megatron.doctor.kernels import KernelFacts
    from odb_megatron.doctor.network import NetworkFacts
    from odb_megatron.doctor.packages import PackageFacts
    from odb_megatron.doctor.started import Started

__all__ = ["Facts", "check", "gather", "main"]

_USAGE = "%(prog)s [options] [-- COMMAND ...]"
_DESCRIPTION = """\
Look at this machine, and at a command line without starting it, for what would fail or slow a run.
Exit code: 0 all well, or warnings only; 1 a failure; 2 arguments that cannot be used.
"""
_EPILOG = """\
example: odb-megatron doctor -- torchrun --nproc-per-node 8 -m odb_megatron.run pretrain_gpt.py
--odb --data-path chats.jsonl ...
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that checks go by.

    Attributes:
        packages: what is installed.
        kernels: devices and attention backends.
        host: limits of this machine.
        network: its interfaces.
        command: the command line; None where none was given.
    """

    packages: PackageFacts
    kernels: KernelFacts
    host: HostFacts
    network: NetworkFacts
    command: CommandFacts | None = None


def main(argv: Sequence[str]) -> int:
    """Check, print what was found, write the JSON.

    Args:
        argv: arguments behind `odb-megatron doctor`.

    Returns:
        1 where there is a failure, else 0.

    Raises:
        SystemExit: arguments, or a command, that cannot be read (2), or `--help` (0).
    """
    argv = list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    parser = _parser()
    options, unknown = parser.parse_known_args(argv[:end])
    if unknown:
        parser.error(f"unrecognized: {' '.join(unknown)} (a command to check comes behind --)")
    words = argv[end + 1 :]
    if options.json not in (None, "-"):
        try:
            check_output("--json", options.json)
        except ValueError as error:
            parser.error(str(error))
    from odb_megatron.doctor.command_facts import job_options
    from odb_megatron.doctor.finding import as_json, exit_code, render
    from odb_megatron.doctor.kernels import run_backends
    from odb_megatron.doctor.started import read_command

    started = None
    if end < len(argv):
        try:
            started = read_command(words, job_options=job_options)
        except ValueError as error:
            parser.error(str(error))
    facts = gather(os.environ, started=started, num_records=options.records)
    findings = check(facts)
    if options.kernels:
        findings += run_backends(os.environ)
    told = sys.stderr if options.json == "-" else sys.stdout
    print(render(findings), file=told)
    report = {"command": words, **as_json(findings)}
    if options.json == "-":
        print(json.dumps(report, indent=1))
    elif options.json:
        try:
            write_output("--json", options.json, json.dumps(report, indent=1) + "\n")
        except ValueError as error:
            parser.error(str(error))
    return exit_code(findings)


def gather(
    environment: Mapping[str, str], *, started: Started | None = None, num_records: int = 2000
) -> Facts:
    """Look at this machine and, where there is one, at a command line.

    Args:
        environment: of the run.
        started: what the command starts.
        num_records: most records of a file that are read, besides its largest.
    """
    from odb_megatron.doctor.command_facts import gather_command
    from odb_megatron.doctor.host import gather_host
    from odb_megatron.doctor.kernels import gather_kernels
    from odb_megatron.doctor.network import gather_network
    from odb_megatron.doctor.packages import gather_packages

    environment = started.in_environment(environment) if started else dict(environment)
    path = [os.getcwd()] if started is not None else []  # as python -m has it
    if started is not None and not started.is_module:
        path = [str(Path(started.script).absolute().parent)]
    packages = gather_packages(path)
    has_torch = "torch" in packages.versions
    kernels = gather_kernels(environment, has_torch=has_torch)
    command = None
    if started is not None:
        missing = [] if kernels.torch else ["torch"]
        missing += [] if packages.megatron.has_training else ["megatron.training"]
        command = gather_command(
            started,
            environment,
            num_gpus=_num_gpus(kernels),
            num_records=num_records,
            missing=" and ".join(missing),
        )
    return Facts(
        packages=packages,
        kernels=kernels,
        host=gather_host(),
        network=gather_network(environment),
        command=command,
    )


def check(facts: Facts) -> list[Finding]:
    """Return what all checks found; a function of the facts alone."""
    from odb_megatron.doctor.command_line import check_command
    from odb_megatron.doctor.host import check_host
    from odb_megatron.doctor.kernels import check_kernels
    from odb_megatron.doctor.network import check_network
    from odb_megatron.doctor.packages import check_packages
    from odb_megatron.doctor.quirks import check_quirks

    command, num_gpus = facts.command, _num_gpus(facts.kernels)
    started = command.started if command else None
    on_gpu = bool(num_gpus) if started is None else not started.on_cpu
    found = check_packages(
        facts.packages, on_gpu=on_gpu, needs_training=not (command and command.unchecked)
    )
    version = _version(facts.packages)
    if version:
        found += check_quirks(version, started.flags if started else None)
    found += check_kernels(facts.kernels, on_gpu=on_gpu)
    found += check_host(facts.host, command.load if command else None)
    found += check_network(facts.network, num_nodes=_num_nodes(started))
    if command is not None:
        found += check_command(command, num_gpus=num_gpus)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odb-megatron doctor",
        description=_DESCRIPTION,
        usage=_USAGE,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", metavar="FILE", default=None, help="write what was found; - for standard output"
    )
    parser.add_argument(
        "--records",
        type=_positive,
        default=2000,
        metavar="N",
        help="read up to N records of each data file, spread over it, and the 64 largest by bytes "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="also run each attention backend that can run here, against a float64 reference",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _num_gpus(kernels: KernelFacts) -> int:
    return len(kernels.torch.devices) if kernels.torch else 0


def _num_nodes(started: Started | None) -> int | None:
    """Return the nodes of a run; 1 where a job script chooses the interfaces by itself."""
    if started is None:
        return None
    return 1 if started.is_job else started.nodes


def _version(packages: PackageFacts) -> tuple[int, ...]:
    text = packages.megatron.version
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal()) if text else ()
