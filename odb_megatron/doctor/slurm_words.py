"""What srun and sbatch start, and in how many tasks: their options, read as they read them.

Pure. Options are those of Slurm 22.05 (srun(1), sbatch(1)), newer ones that are known, and those of
the plugin pyxis. Must not read files: a job script's own `#SBATCH` lines are handed in as options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from odb_megatron.doctor.option_words import Options, split_options

__all__ = ["Tasks", "read_slurm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """What Slurm starts.

    Attributes:
        words: of the program.
        nodes: number of nodes; of a range the most. 1 where nothing says it.
        per_node: tasks on each of them; 0 where nothing says it.
        gpus: of each node; 0 where nothing says it.
        environment: assignments of `--export`.
    """

    words: tuple[str, ...]
    nodes: int = 1
    per_node: int = 0
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def read_slurm(name: str, words: Sequence[str]) -> Tasks:
    """Read what is behind `srun` or `sbatch`.

    Raises:
        ValueError: options that cannot be read, or nothing that is started.
    """
    found, rest = split_options(name, words, _OPTIONS[name])
    if not rest:
        told = " ".join(words[:3])
        raise ValueError(f"{name} {told}: nothing that it starts was found in it")
    given, environment = dict[str, str](), dict[str, str]()
    for option, value in found:
        given[_MEANT.get(option, option)] = value
        if option == "--export":
            pairs = (part.partition("=") for part in value.split(","))
            environment |= {key: text for key, is_given, text in pairs if is_given}
    tasks, each = (_number(name, "tasks", given), _number(name, "tasks per node", given))
    nodes = _number(name, "nodes", given)
    if not nodes:
        nodes = -(-tasks // each) if tasks and each else 1
    gpus = _gpus(given.get("gpus per node", "")) or _gres(given.get("--gres", ""))
    return Tasks(
        words=tuple(rest),
        nodes=nodes,
        per_node=-(-tasks // nodes) if tasks else each,
        gpus=gpus or -(-_gpus(given.get("gpus", "")) // nodes),
        environment=environment,
    )


_MEANT = {
    **dict.fromkeys(("-N", "--nodes"), "nodes"),
    **dict.fromkeys(("-n", "--ntasks"), "tasks"),
    **dict.fromkeys(("-G", "--gpus"), "gpus"),
    "--ntasks-per-node": "tasks per node",
    "--gpus-per-node": "gpus per node",
}


def _number(name: str, what: str, given: Mapping[str, str]) -> int:
    text = given.get(what)
    if text is None:
        return 0
    match = re.fullmatch(r"(\d+)(?:-(\d+))?" if what == "nodes" else r"(\d+)", text)
    number = int(match[match.lastindex or 1]) if match else 0
    if not number:
        raise ValueError(f"{name}: {text!r} is no number of {what}")
    return number


def _gpus(text: str) -> int:
    """Return N of `N` or `TYPE:N`; 0 for anything else."""
    last = text.rpartition(":")[2]
    return int(last) if last.isdecimal() else 0


def _gres(text: str) -> int:
    """Return the GPUs of `--gres gpu[:TYPE][:N][,...]`; 1 where N is left out."""
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        if part.split(":")[0] == "gpu":
            return _gpus(part) or 1
    return 0


# --- options ---------------------------------------------------------------------------------

_ALONE = "with it no program is started: leave it out"
_FOLDER = "paths go by that folder: run doctor there, without it"

_COMMON_VALUES = """
-A --account --acctg-freq --bb --bbf -b --begin --cluster-constraint -M --clusters --comment -C
--constraint --container --container-id -S --core-spec --cores-per-socket --cpu-bind --cpu-freq
--cpus-per-gpu -c --cpus-per-task --deadline --delay-boot -d --dependency -e --error -x --exclude
--export -B --extra-node-info --gid --gpu-bind --gpu-freq -G --gpus --gpus-per-node
--gpus-per-socket --gpus-per-task --gres --gres-flags --hint -i --input -J --job-name -L --licenses
--mail-type --mail-user --mcs-label --mem --mem-bind --mem-per-cpu --mem-per-gpu --mincpus --network
-F --nodefile -w --nodelist -N --nodes -n --ntasks --ntasks-per-core --ntasks-per-gpu
--ntasks-per-node --ntasks-per-socket --open-mode -o --output -p --partition --power --prefer
--priority --profile -q --qos --reservation --segment --signal --sockets-per-node --switches
--thread-spec --threads-per-core -t --time --time-min --tmp --tres-bind --tres-per-task --uid
--wckey -m --distribution
--container-image --container-mounts --container-workdir --container-name --container-save
--container-env
"""
_COMMON_FLAGS = """
--contiguous -H --hold -O --overcommit -Q --quiet --reboot --spread-job --use-min-nodes -v --verbose
--container-mount-home --no-container-mount-home --container-remap-root --no-container-remap-root
--container-entrypoint --no-container-entrypoint --container-writable --container-readonly
--container-entrypoint-log
"""
_COMMON_ATTACHED = "--exclusive --nice -k --no-kill --oom-kill-step --propagate -s --oversubscribe"
_COMMON_REFUSED = {
    **dict.fromkeys(("-h", "--help", "--usage", "-V", "--version", "--test-only"), _ALONE),
    **dict.fromkeys(("-D", "--chdir"), _FOLDER),
}

_OPTIONS = {
    "srun": Options(
        values=frozenset(
            f"""{_COMMON_VALUES} --accel-bind --bcast-exclude --epilog --het-group --jobid --mpi
            --msg-timeout --prolog -r --relative --slurmd-debug --task-epilog --task-prolog -T
            --threads --treewidth -W --wait""".split()
        ),
        flags=frozenset(
            f"""{_COMMON_FLAGS} -X --disable-status -E --preserve-env --exact --external-launcher
            --interactive -l --label -Z --no-allocate --overlap --pty --quit-on-interrupt -u
            --unbuffered --whole --stepmgr""".split()
        ),
        attached=frozenset(
            f"""{_COMMON_ATTACHED} --bcast --compress -I --immediate -K --kill-on-bad-exit
            --resv-ports --send-libs --x11""".split()
        ),
        refused={
            **_COMMON_REFUSED,
            "--multi-prog": "tasks start different programs: give one of them alone",
        },
        has_plugins=True,
    ),
    "sbatch": Options(
        values=frozenset(
            f"""{_COMMON_VALUES} -a --array --batch --export-file --kill-on-invalid-dep
            --wait-all-nodes""".split()
        ),
        flags=frozenset(
            f"""{_COMMON_FLAGS} --ignore-pbs --no-requeue --requeue --parsable -W --wait
            --stepmgr""".split()
        ),
        attached=frozenset(f"{_COMMON_ATTACHED} --get-user-env".split()),
        refused={**_COMMON_REFUSED, "--wrap": "give the command in it alone, without sbatch"},
        has_plugins=True,
    ),
}
