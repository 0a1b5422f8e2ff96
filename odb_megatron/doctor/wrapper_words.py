"""Programs that start another one in the same place: `env`, `timeout`, `nohup`, `uv run`.

Pure. Must not go through one that changes what is started, or where, in a way that does not show
here (`bash -c`, `mpirun`, a container): those are for the reader to leave out.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass

from odb_megatron.doctor.option_words import Options, split_options

__all__ = ["ASSIGNMENT", "Unwrapped", "unwrap"]

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwrapped:
    """A command without what is put before it.

    Attributes:
        words: of the command.
        environment: assignments before it; None for a variable that is taken away.
    """

    words: tuple[str, ...]
    environment: dict[str, str | None]


def unwrap(words: Sequence[str]) -> Unwrapped:
    """Take assignments and known wrappers away, as many as there are.

    Raises:
        ValueError: options of a wrapper that cannot be read.
    """
    rest, environment = list(words), dict[str, str | None]()
    while rest:
        name = os.path.basename(rest[0])
        if ASSIGNMENT.match(rest[0]):
            key, _, value = rest.pop(0).partition("=")
            environment[key] = value
        elif name == "uv" and rest[1:2] == ["run"]:
            found, rest = split_options("uv run", rest[2:], _UV)
            if any(option in ("-m", "--module") for option, _ in found):
                rest = ["python", "-m", *rest]
        elif name in _WRAPPERS:
            options, num_operands = _WRAPPERS[name]
            found, rest = split_options(name, rest[1:], options)
            if name == "env":
                environment |= {key: None for option, key in found if option in _UNSET}
            rest = rest[num_operands:]
        else:
            break
    return Unwrapped(words=tuple(rest), environment=environment)


_UNSET = ("-u", "--unset")
_FOLDER = "paths go by that folder: run doctor there, without it"
_OTHER = "give the command that it starts alone"


def _options(
    values: str = "", *, flags: str = "", attached: str = "", refused: dict[str, str] | None = None
) -> Options:
    return Options(
        values=frozenset(values.split()),
        flags=frozenset(flags.split()),
        attached=frozenset(attached.split()),
        refused=refused,
    )


_WRAPPERS = {
    "env": (
        _options(
            "-u --unset",
            flags="-v --debug -0 --null",
            attached="--block-signal --default-signal --ignore-signal",
            refused={
                **dict.fromkeys(("-C", "--chdir"), _FOLDER),
                **dict.fromkeys(("-S", "--split-string"), _OTHER),
                **dict.fromkeys(
                    ("-i", "--ignore-environment"), "run odb-megatron doctor itself behind it"
                ),
            },
        ),
        0,
    ),
    "nohup": (_options(), 0),
    "exec": (_options("-a", flags="-c -l"), 0),
    "time": (_options("-f --format -o --output", flags="-p -v -a -q"), 0),
    "command": (_options(flags="-p"), 0),
    "nice": (_options("-n --adjustment"), 0),
    "ionice": (_options("-c --class -n --classdata", flags="-t --ignore"), 0),
    "setsid": (_options(flags="-c --ctty -f --fork -w --wait"), 0),
    "stdbuf": (_options("-i --input -o --output -e --error"), 0),
    "taskset": (
        _options(
            flags="-c --cpu-list -a --all-tasks", refused=dict.fromkeys(("-p", "--pid"), _OTHER)
        ),
        1,
    ),
    "timeout": (
        _options(
            "-k --kill-after -s --signal", flags="--foreground --preserve-status -v --verbose -f -p"
        ),
        1,
    ),
    "numactl": (
        _options(
            "-i --interleave -w --weighted-interleave -N --cpunodebind --cpubind -C --physcpubind "
            "-m --membind -p --preferred -P --preferred-many",
            flags="-l --localalloc -a --all -b --balancing",
        ),
        0,
    ),
}
"""Options, and the number of words between them and the command, by name."""

_UV = _options(
    "--extra --no-extra --group --no-group --only-group --with --with-editable --with-requirements "
    "-w -p --python --env-file --package --cache-dir --index --index-url --extra-index-url "
    "--default-index --config-file --link-mode",
    flags="--all-extras --all-groups --all-packages --no-dev --dev --only-dev --no-editable "
    "--exact --isolated --active --no-sync --locked --frozen --no-env-file --no-project "
    "--no-config -m --module -s --script --offline -n --no-cache -q --quiet -v --verbose "
    "--native-tls --no-progress --no-default-groups --managed-python --no-managed-python "
    "--no-python-downloads --no-index --refresh -U --upgrade --compile-bytecode",
    refused=dict.fromkeys(("--directory", "--project"), _FOLDER),
)
