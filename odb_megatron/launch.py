"""`odb-megatron launch` and `pretrain`: start a script in N processes by torch's elastic launcher.

Must not import torch or Megatron (so that `--help` is instant) and must not interpret the script's
arguments. With `--device cpu` each process gets the CPU device layer before the script runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from odb_megatron.elastic import PARENT

__all__ = ["build_command", "build_environment", "main", "planned_command", "pretrain"]

_RUNNER = "odb_megatron.testing.run_script"
_ELASTIC = "odb_megatron.elastic"
_PRETRAIN = "odb_megatron.megatron.pretrain"

MISSING = 1
"""Exit code where a package is missing that a run needs."""

# Options of torchrun that say where the rendezvous is: they exclude --standalone.
_RENDEZVOUS = ("--nnodes", "--rdzv", "--master", "--node-rank", "--standalone")


def main(argv: Sequence[str]) -> int:
    """Launch a script and wait for it.

    SIGTERM and SIGINT are passed to torch's launcher, which ends its workers (SIGTERM, then SIGKILL
    after 30 s). Where a rank fails, the reason it left is printed last, and once.

    Args:
        argv: arguments behind `odb-megatron launch`.

    Returns:
        The exit code of the rank that failed first (2 for flags that cannot be used), else 0; 128 +
        signal number if a signal ended it or the launcher.

    Raises:
        SystemExit: arguments that do not parse (2), or `--help` (0).
    """
    options = _parse(argv)
    return _launch(options, options.script, needs=("torch",))


def planned_command(name: str, argv: Sequence[str]) -> list[str]:
    """Return the launcher's command line that `launch` or `pretrain` would run.

    Args:
        name: the command's.
        argv: arguments behind it.

    Raises:
        SystemExit: arguments that do not parse (2), or `--help` (0).
    """
    options, script = _parse_pretrain(argv) if name == "pretrain" else (_parse(argv), None)
    return _command(options, script or options.script)


def pretrain(argv: Sequence[str]) -> int:
    """Launch the package's own pretrain script and wait for it, as `main` does.

    Args:
        argv: arguments behind `odb-megatron pretrain`: those of `launch`, at any place, and the
            script's.

    Returns:
        As `main`.

    Raises:
        SystemExit: arguments that do not parse (2), or `--help` (0).
    """
    return _launch(*_parse_pretrain(argv), needs=("torch", "megatron.training"))


def _parse_pretrain(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the script with its arguments."""
    parser = _parser(
        "pretrain",
        description="Pretrain or fine-tune a GPT with Megatron, in N processes. Flags that are not "
        "listed here are Megatron's and ODB's: 'odb-megatron pretrain --device cpu -- --help' "
        "lists them (without --device cpu where there is a GPU).",
        usage="%(prog)s [options] [--] [FLAGS...]",
    )
    argv = list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    options, flags = parser.parse_known_args(argv[:end])
    return options, ["-m", _PRETRAIN, *flags, *argv[end + 1 :]]


def _launch(options: argparse.Namespace, script: Sequence[str], *, needs: Sequence[str]) -> int:
    missing = [name for name in needs if not _is_there(name)]
    if missing:
        print(
            f"odb-megatron: {' and '.join(missing)} not found by {sys.executable}: "
            "pip install 'odb-megatron[megatron]' on Python 3.12 or later, or put a Megatron-LM "
            "checkout on PYTHONPATH; 'odb-megatron doctor' looks at the whole machine",
            file=sys.stderr,
        )
        return MISSING
    command = _command(options, script)
    environment = build_environment(
        os.environ, device=options.device, num_processes=options.nproc_per_node
    )
    return _run(command, environment)


def _command(options: argparse.Namespace, script: Sequence[str]) -> list[str]:
    return build_command(
        script,
        device=options.device,
        num_processes=options.nproc_per_node,
        torchrun_args=shlex.split(options.torchrun_args),
    )


def build_command(
    script: Sequence[str], *, device: str, num_processes: int, torchrun_args: Sequence[str] = ()
) -> list[str]:
    """The launcher's command line.

    Args:
        script: the script's path, or `-m` and a module, then its arguments.
        device: `"cpu"` runs the script under the CPU device layer, `"auto"` as it is.
        num_processes: processes on this node.
        torchrun_args: further options of torchrun; `--standalone` is left out where
            they say where the rendezvous is.

    Returns:
        The arguments, the Python interpreter first.
    """
    elsewhere = any(arg.replace("_", "-").startswith(_RENDEZVOUS) for arg in torchrun_args)
    return [
        sys.executable,
        "-m",
        _ELASTIC,
        *([] if elsewhere else ["--standalone"]),
        f"--nproc-per-node={num_processes}",
        *torchrun_args,
        *(["-m", _RUNNER] if device == "cpu" else []),
        *script,
    ]


def build_environment(
    environment: Mapping[str, str], *, device: str, num_processes: int
) -> dict[str, str]:
    """The launcher's environment: on the CPU, cores are shared between the processes.

    GPUs are not hidden: where there is one, the device layer refuses to start and says so.

    Args:
        environment: the one to start from.
        device: `"cpu"` or `"auto"`.
        num_processes: processes on this node.

    Returns:
        A copy, with `OMP_NUM_THREADS` = cores // processes (at least 1) for `"cpu"` unless set.
    """
    built = dict(environment)
    if device == "cpu":
        built.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_processes)))
    return built


def _is_there(module: str) -> bool:
    """Whether the launched processes find a module; they look in the current folder first."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False
    finally:
        sys.path.pop(0)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser(
        "launch",
        description="Start SCRIPT, or a module, in N processes by torch's elastic launcher.",
        usage="%(prog)s [options] [--] (SCRIPT | -m MODULE) [ARGS...]",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE [ARGS...]",
        help="a module to run as a script, and its arguments",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS...]",
        help="the script and its arguments",
    )
    options = parser.parse_args(list(argv))
    if options.script[:1] == ["--"]:
        options.script = options.script[1:]
    if options.module:
        options.script = ["-m", *options.module]
    elif not options.script:
        parser.error("no SCRIPT was named: odb-megatron launch --nproc-per-node 2 train.py ...")
    elif options.script[0] == "-m" and len(options.script) == 1:
        parser.error(
            "no MODULE was named: odb-megatron launch --nproc-per-node 2 -- -m a.module ..."
        )
    elif options.script[0] != "-m" and options.script[0].startswith("-"):
        parser.error(f"SCRIPT expected, got {options.script[0]}: its options come after it")
    return options


def _parser(command: str, *, description: str, usage: str) -> argparse.ArgumentParser:
    """Return a parser of what both commands take."""
    parser = argparse.ArgumentParser(
        prog=f"odb-megatron {command}", description=description, usage=usage, allow_abbrev=False
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto",
        help="auto: run the script as it is (default); cpu: Megatron on CPU with gloo, for tests "
        "and demos; refused where torch sees a GPU",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=_positive,
        default=1,
        metavar="N",
        help="processes on this node (default 1)",
    )
    parser.add_argument(
        "--torchrun-args",
        default="",
        metavar="'...'",
        help="further options of torchrun, in one string: --torchrun-args='--nnodes=2 ...'",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command; return its exit code.

    SIGTERM, SIGINT and a terminal's SIGHUP (unless `nohup` ignores it) are passed on to it; the end
    of this process, whatever its cause, shows in a pipe: see `elastic.PARENT`.
    """
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    watched, held = os.pipe()
    try:
        # A session of its own: ctrl-C then reaches the launcher once, passed on by us.
        process = subprocess.Popen(
            command,
            env={**environment, PARENT: str(watched)},
            pass_fds=[watched],
            start_new_session=True,
        )
        for number in early:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(watched)
        os.close(held)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
