"""What a command line starts: how many processes, which script, with which flags.

Reads torchrun, `odb-megatron launch` and `pretrain`, `python` with a script or a module, and srun,
sbatch or wrappers before them. Pure: must not look at files, and must not interpret the script's
own flags.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from odb_megatron.doctor.option_words import Options, split_options
from odb_megatron.doctor.slurm_words import Tasks, read_slurm
from odb_megatron.doctor.wrapper_words import unwrap
from odb_megatron.launch import planned_command

__all__ = ["JobOptions", "Started", "read_command"]

_ELASTIC = ("torch.distributed.run", "torch.distributed.launch", "odb_megatron.elastic")
_OWN = ("odb_megatron", "odb_megatron.cli")
_RUN, _CPU = "odb_megatron.run", "odb_megatron.testing.run_script"
_BRIDGE = "odb_megatron.bridge.run_recipe"
_OF_BRIDGE = (
    "overrides of a recipe of Megatron-Bridge: python -m odb_megatron.bridge.run_recipe ... "
    "--dry-run checks them"
)

_TORCHRUN = Options(
    values=frozenset(
        [
            "--nnodes",
            "--nproc-per-node",
            "--rdzv-backend",
            "--rdzv-endpoint",
            "--rdzv-id",
            "--rdzv-conf",
            "--max-restarts",
            "--monitor-interval",
            "--start-method",
            "--event-log-handler",
            "--role",
            "--log-dir",
            "-r",
            "--redirects",
            "-t",
            "--tee",
            "--local-ranks-filter",
            "--duplicate-stdout-filters",
            "--duplicate-stderr-filters",
            "--node-rank",
            "--master-addr",
            "--master-port",
            "--local-addr",
            "--logs-specs",
            "--numa-binding",
            "--signals-to-handle",
            "--shutdown-timeout",
            "--log-line-prefix-template",
        ]
    ),
    flags=frozenset(
        [
            "-m",
            "--module",
            "--standalone",
            "--run-path",
            "--use-env",
            "--disable-monitored-barrier",
            "--virtual-local-rank",
        ]
    ),
    refused={
        "--no-python": "it starts no Python script",
        **dict.fromkeys(("-h", "--help"), "it starts nothing"),
    },
)

_PYTHON = Options(
    values=frozenset(("-W", "-X", "-m", "--check-hash-based-pycs")),
    flags=frozenset(f"-{letter}" for letter in "bBdEiIOPqsSuvx"),
    last=frozenset(("-m",)),
    refused={
        "-c": "expected a script or -m module",
        **dict.fromkeys(("-h", "-?", "--help", "-V", "--version"), "it starts nothing"),
    },
)

_OWN_JOBS = ("odb_pretrain.sbatch", "odb_pretrain_srun.sbatch", "odb_pretrain_container.sbatch")

_EXPECTED = (
    "torchrun, odb-megatron launch or pretrain, or python with a script or -m module, also behind "
    "srun, sbatch, assignments, env, timeout, nohup, numactl or uv run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a command line starts.

    Attributes:
        by: what starts the processes: `torchrun`, `srun`, `python`.
        nodes: number of nodes.
        processes: on each of them; 0 for one per GPU (`--nproc-per-node gpu`).
        script: path, or a module's name.
        is_module: which of the two.
        via: `odb_megatron.run` where that runs the script.
        flags: the script's.
        on_cpu: under the CPU device layer.
        python: the interpreter that is named; empty for torchrun's own.
        environment: assignments before the command; None for a variable that is taken away.
        is_job: a job script, which sets up network and checkpoints by itself.
        unchecked: why its flags are none of Megatron's; empty where they are.
    """

    by: str = "python"
    nodes: int = 1
    processes: int = 1
    script: str = ""
    is_module: bool = False
    via: str = ""
    flags: tuple[str, ...] = ()
    on_cpu: bool = False
    python: str = ""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    is_job: bool = False
    unchecked: str = ""

    def in_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return what it sees of an environment."""
        merged = {**environment, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}

    def __str__(self) -> str:
        """For a reader."""
        each = f"{self.processes or 'one per GPU'} on each" if self.nodes > 1 else self.processes
        what = f"-m {self.script}" if self.is_module else self.script
        via = f" by {self.via}" if self.via else ""
        where = f"; on {self.nodes} nodes" if self.nodes > 1 else ""
        return (
            f"{self.by} starts {what}{via}{', on the CPU' if self.on_cpu else ''}; processes: "
            f"{each or 'one per GPU'}{where}"
        )


JobOptions = Callable[[str], Sequence[str]]
"""From a job script's path: the words of its own `#SBATCH` lines."""


def read_command(words: Sequence[str], *, job_options: JobOptions = lambda _: ()) -> Started:
    """Read a command line, split into words as a shell does.

    Args:
        words: of the command.
        job_options: looks into a job script; by default none is looked into.

    Raises:
        ValueError: it starts nothing that is known here.
        SystemExit: options of `odb-megatron launch` or `pretrain` that do not parse (2).
    """
    found = unwrap(words)
    name = os.path.basename(found.words[0]) if found.words else ""
    if name in ("srun", "sbatch"):
        started = _slurm(name, found.words[1:], job_options)
    else:
        started = _program(found.words)
    return replace(started, environment={**found.environment, **started.environment})


def _program(words: Sequence[str]) -> Started:
    name = os.path.basename(words[0]) if words else ""
    if name == "torchrun":
        return _torchrun(words[1:])
    if name == "odb-megatron":
        return _own(words[1:])
    if name.startswith("python"):
        return replace(_python(words[1:]), python=words[0])
    if name.endswith(".py"):
        return _script(words[0], words[1:])
    raise ValueError(f"{' '.join(words[:3]) or 'no command'}: expected {_EXPECTED}")


def _python(words: Sequence[str]) -> Started:
    found, rest = split_options("python", words, _PYTHON)
    if found and found[-1][0] == "-m":
        return _module(found[-1][1], rest)
    if not rest or rest[0] == "-":
        raise ValueError(f"python {' '.join(words[:3])}: expected a script or -m module")
    return _script(rest[0], rest[1:])


def _module(name: str, flags: Sequence[str]) -> Started:
    if name in _ELASTIC:
        return _torchrun(flags)
    if name in _OWN:
        return _own(flags)
    if name == _RUN:
        if not flags:
            raise ValueError(f"-m {_RUN}: expected the script's path behind it")
        return replace(_script(flags[0], flags[1:]), via=_RUN)
    if name == _CPU:
        return replace(_target(flags), on_cpu=True)
    if name == _BRIDGE:
        return Started(script=name, is_module=True, flags=tuple(flags), unchecked=_OF_BRIDGE)
    return Started(script=name, is_module=True, flags=tuple(flags))


def _script(path: str, flags: Sequence[str]) -> Started:
    return Started(script=path, flags=tuple(flags))


def _target(words: Sequence[str]) -> Started:
    """Read `SCRIPT [ARGS...]` or `-m MODULE [ARGS...]`."""
    if words[:1] == ["-m"] and len(words) > 1:
        return _module(words[1], words[2:])
    if not words or words[0].startswith("-"):
        raise ValueError(f"{' '.join(words[:2]) or 'nothing'}: expected a script or -m module")
    return _script(words[0], words[1:])


def _own(words: Sequence[str]) -> Started:
    name = words[0] if words else ""
    if name not in ("launch", "pretrain"):
        raise ValueError(
            f"odb-megatron {name}: it trains nothing; expected odb-megatron launch or pretrain"
        )
    found = _program(planned_command(name, words[1:]))
    return replace(found, by=f"odb-megatron {name}", python="")


def _torchrun(words: Sequence[str]) -> Started:
    known = [_dashed(word) for word in words]
    found, rest = split_options("torchrun", known, _TORCHRUN)
    rest = list(words[len(words) - len(rest) :])  # with underscores as they were
    options = dict(found)
    if not rest:
        raise ValueError("torchrun: expected a script behind its options")
    is_module = bool({"-m", "--module"} & set(options))
    return replace(
        _target(["-m", *rest] if is_module else rest),
        by="torchrun",
        nodes=_nodes(options.get("--nnodes", "1")),
        processes=_processes(options.get("--nproc-per-node", "1")),
    )


def _dashed(word: str) -> str:
    """Return an option as torchrun takes it: `--nproc_per_node=2` is `--nproc-per-node=2`."""
    name, is_given, value = word.partition("=")
    return f"{name.replace('_', '-')}{is_given}{value}" if word.startswith("--") else word


def _nodes(text: str) -> int:
    """Return the number of nodes; of an elastic `MIN:MAX` the most."""
    last = text.rpartition(":")[2]
    if not last.isdecimal() or int(last) < 1:
        raise ValueError(f"--nnodes {text}: expected a number, or MIN:MAX")
    return int(last)


def _processes(text: str) -> int:
    if text in ("gpu", "auto"):
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--nproc-per-node {text}: expected a number, or gpu")
    return int(text)


def _slurm(name: str, words: Sequence[str], job_options: JobOptions) -> Started:
    tasks = read_slurm(name, words)
    if name == "sbatch":  # the command line's own options win
        return _job(read_slurm(name, [*job_options(tasks.words[0]), *words]))
    found = read_command(tasks.words)
    environment = {**tasks.environment, **found.environment}
    nodes, per_node = max(tasks.nodes, found.nodes), tasks.per_node or 1
    if found.by == "python":  # a task is a rank
        return replace(
            found, by="srun", nodes=tasks.nodes, processes=per_node, environment=environment
        )
    if per_node > 1:
        raise ValueError(
            f"srun starts {per_node} launchers on each node ({found.by}), each with its own ranks: "
            "give srun --ntasks-per-node 1"
        )
    return replace(found, nodes=nodes, environment=environment)


def _job(tasks: Tasks) -> Started:
    script, *flags = tasks.words
    unchecked = ""
    if os.path.basename(script) == "odb_bridge.sbatch":
        unchecked = _OF_BRIDGE
    elif os.path.basename(script) not in _OWN_JOBS and "--odb" not in flags:
        unchecked = (
            "flags of a job script of your own: give the command in it that starts the ranks"
        )
    return Started(
        by="sbatch",
        nodes=tasks.nodes,
        processes=tasks.per_node if tasks.per_node > 1 else tasks.gpus,
        script=script,
        flags=tuple(flags),
        is_job=True,
        unchecked=unchecked,
        environment=tasks.environment,
    )
