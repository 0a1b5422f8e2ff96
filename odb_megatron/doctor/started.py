"""What a command line starts: how many processes, which script, with which flags.

Reads torchrun, `odb-megatron launch` and `pretrain`, `python` with a script or a module, and srun
or sbatch before them. Pure: must not look at files, and must not interpret the script's own flags.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from odb_megatron.launch import planned_command

__all__ = ["Started", "read_command"]

_ELASTIC = ("torch.distributed.run", "torch.distributed.launch", "odb_megatron.comm.elastic")
_OWN = ("odb_megatron", "odb_megatron.cli")
_RUN, _CPU = "odb_megatron.run", "odb_megatron.testing.run_script"

_NO_VALUE = {
    *("--standalone", "--no-python", "--run-path", "--use-env", "--disable-monitored-barrier"),
    *("--virtual-local-rank",),
}
"""Options of torchrun without a value; `-m` is looked at apart."""

_PYTHON_VALUES = {"-W", "-X", "--check-hash-based-pycs"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SKIPPED = ("env", "nohup", "exec", "time", "command")

_EXPECTED = (
    "torchrun, odb-megatron launch or pretrain, or python with a script or -m module, also behind "
    "srun or sbatch"
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
        environment: assignments before the command.
        is_job: a job script, which sets up network and checkpoints by itself.
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
    environment: Mapping[str, str] = field(default_factory=dict)
    is_job: bool = False

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


def read_command(words: Sequence[str]) -> Started:
    """Read a command line, split into words as a shell does.

    Raises:
        ValueError: it starts nothing that is known here.
        SystemExit: options of `odb-megatron launch` or `pretrain` that do not parse (2).
    """
    rest, environment = list(words), dict[str, str]()
    while rest and (_ASSIGNMENT.match(rest[0]) or os.path.basename(rest[0]) in _SKIPPED):
        name, is_assigned, value = rest.pop(0).partition("=")
        if is_assigned:
            environment[name] = value
    name = os.path.basename(rest[0]) if rest else ""
    if name in ("srun", "sbatch"):
        found = _slurm(name, rest[1:])
    else:
        found = _program(rest)
    return replace(found, environment={**environment, **found.environment})


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
    place = 0
    while place < len(words) and words[place].startswith("-"):
        word = words[place]
        if word == "-m" and place + 1 < len(words):
            return _module(words[place + 1], words[place + 2 :])
        if word == "-c" or word == "-":
            break
        place += 2 if word in _PYTHON_VALUES else 1
    if place >= len(words) or words[place].startswith("-"):
        raise ValueError(f"python {' '.join(words[:3])}: expected a script or -m module")
    return _script(words[place], words[place + 1 :])


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
    options, place, is_module = dict[str, str](), 0, False
    while place < len(words) and words[place].startswith("-"):
        name, is_given, value = words[place].partition("=")
        name = name.replace("_", "-")
        place += 1
        if name in ("-m", "--module"):
            is_module = True
        elif name not in _NO_VALUE:
            if not is_given and place < len(words):
                value = words[place]
                place += 1
            options[name] = value
        elif name == "--no-python":
            raise ValueError(f"torchrun --no-python starts no Python script; expected {_EXPECTED}")
    rest = list(words[place:])
    if not rest:
        raise ValueError("torchrun: expected a script behind its options")
    found = _target(["-m", *rest] if is_module else rest)
    return replace(
        found,
        by="torchrun",
        nodes=_nodes(options.get("--nnodes", "1")),
        processes=_processes(options.get("--nproc-per-node", "1")),
    )


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


# --- Slurm -----------------------------------------------------------------------------------

_SLURM = {
    "-N": "nodes",
    "--nodes": "nodes",
    "-n": "tasks",
    "--ntasks": "tasks",
    "--ntasks-per-node": "tasks_per_node",
    "--gpus-per-node": "gpus",
    "--gres": "gpus",
    "-G": "gpus_all",
    "--gpus": "gpus_all",
}


def _slurm(name: str, words: Sequence[str]) -> Started:
    place, numbers = 0, dict[str, int]()
    while place < len(words) and not _starts(words[place]):
        option, is_given, value = words[place].partition("=")
        place += 1
        if option in _SLURM:
            if not is_given and place < len(words):
                value = words[place]
                place += 1
            digits = re.findall(r"\d+", value.rpartition(":")[2])
            numbers[_SLURM[option]] = int(digits[-1]) if digits else 1
    rest = words[place:]
    if not rest:
        raise ValueError(f"{name} {' '.join(words[:3])}: nothing that it starts was found in it")
    nodes = numbers.get("nodes", 1)
    if name == "sbatch" or rest[0].endswith(".sbatch"):
        return Started(
            by="sbatch",
            nodes=nodes,
            processes=numbers.get("tasks_per_node", numbers.get("gpus", 0)),
            script=rest[0],
            flags=tuple(rest[1:]),
            is_job=True,
        )
    found = read_command(rest)
    if found.by == "python":  # a task is a rank
        tasks = numbers.get("tasks_per_node") or -(-numbers.get("tasks", nodes) // nodes)
        return replace(found, by="srun", nodes=nodes, processes=tasks)
    return replace(found, nodes=max(nodes, found.nodes))


def _starts(word: str) -> bool:
    name = os.path.basename(word)
    known = name in ("torchrun", "odb-megatron", "env") or bool(_ASSIGNMENT.match(word))
    return known or name.startswith("python") or name.endswith((".py", ".sbatch", ".sh"))
