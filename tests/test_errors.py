"""Flags that cannot be used: one message, exit code 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from odb_megatron.errors import raise_usage_errors, usage_errors
from odb_megatron.megatron.config import add_odb_arguments


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--odb-epchs=3", "--odb-tokn-budget", "4"],
            r"did you mean --odb-epochs and --odb-token-budget\? \(--help lists all flags\)",
        ),
        (["--zebra"], r"unrecognized arguments: --zebra: --help lists all flags$"),
        (["--odb-epochs"], r"argument --odb-epochs: expected one argument"),
    ],
)
def test_wrong_flags_raise(flags: list[str], text: str) -> None:
    parser = add_odb_arguments(argparse.ArgumentParser(allow_abbrev=False))
    raise_usage_errors(parser)
    with pytest.raises(ValueError, match=text):
        parser.parse_args(flags)


def _of_the_host(statement: str, path: str) -> Callable[[], None]:
    """Return a function whose code lies in a file at a path."""
    space: dict[str, Callable[[], None]] = {}
    exec(compile(f"def f():\n    {statement}", path, "exec"), space)
    return space["f"]


HOST = "/x/site-packages/megatron/training/arguments.py"


@pytest.mark.parametrize(
    ("statement", "path", "text"),
    [
        ("raise ValueError('--a 1: use 2')", __file__, "--a 1: use 2"),
        (
            "assert False, 'a must divide b'",
            HOST,
            "Megatron refuses the flags: a must divide b (megatron/training/arguments.py 2)",
        ),
        (
            "raise RuntimeError",
            HOST,
            "Megatron refuses the flags:  (megatron/training/arguments.py 2)",
        ),
    ],
)
def test_the_process_ends(
    statement: str,
    path: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit) as ended, usage_errors():
        _of_the_host(statement, path)()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"odb: error: {text}\n"


@pytest.mark.parametrize(
    ("statement", "path"),
    [
        ("assert 1 == 2, 'our bug'", "/x/site-packages/odb_megatron/megatron/setup.py"),
        ("raise RuntimeError('disk')", "/x/site-packages/torch/a.py"),
        ("raise ValueError", "/x/odb_megatron/plan/planner.py"),
        ("raise KeyError('name')", HOST),
    ],
)
def test_other_errors_keep_their_traceback(statement: str, path: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, ValueError, KeyError)), usage_errors():
        _of_the_host(statement, path)()
