"""Flags that cannot be used: one message, exit code 2."""

from __future__ import annotations

import argparse

import pytest

from odb_megatron.errors import raise_usage_errors, usage_errors
from odb_megatron.megatron.config import add_odb_arguments


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            "--odb-epchs=3 --odb-tokn-budget 4",
            r"did you mean --odb-epochs and --odb-token-budget\? \(--help lists all flags\)",
        ),
        ("--zebra", r"unrecognized arguments: --zebra: --help lists all flags$"),
        ("--odb-epochs", r"argument --odb-epochs: expected one argument"),
    ],
)
def test_wrong_flags_raise(flags: str, text: str) -> None:
    parser = add_odb_arguments(argparse.ArgumentParser(allow_abbrev=False))
    raise_usage_errors(parser)
    with pytest.raises(ValueError, match=text):
        parser.parse_args(flags.split())


def _raise(statement: str, path: str) -> None:
    """Run a statement whose code lies in a file at a path."""
    exec(compile(statement, path, "exec"), {})


HOST = "/x/site-packages/megatron/training/arguments.py"
WHERE = "(megatron/training/arguments.py 1)"


@pytest.mark.parametrize(
    ("statement", "path", "text"),
    [
        ("raise ValueError('--a 1: use 2')", "a.py", "--a 1: use 2"),
        ("assert False, 'not so'", HOST, f"Megatron refuses the flags: not so {WHERE}"),
        ("raise RuntimeError", HOST, f"Megatron refuses the flags:  {WHERE}"),
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
        _raise(statement, path)
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
        _raise(statement, path)
