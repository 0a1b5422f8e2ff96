"""`make bench`: what it makes of parts that run, fail or never end."""

from __future__ import annotations

import json
import math
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from test_benchmarks import BENCHMARKS, module

BENCH = module("bench")
_WRITE = "import json,sys; json.dump({'x': 3.5, 'flag': True}, open(sys.argv[-1], 'w'))"
GOALS = (
    {"what": "x", "read": ["x"], "least": 3},
    {"what": "flag", "read": ["flag"], "is": True},
    {"what": "other", "read": ["nothing", 0], "most": 1},
    {"what": "reported", "read": ["x"]},
)


def _part(code: str, name: str = "part", **values: Any) -> dict[str, Any]:
    values = {"title": "A part?", "goals": GOALS, **values}
    return {"name": name, "command": f"-c {shlex.quote(code)}", **values}


@pytest.mark.parametrize(
    ("limit", "value", "met"),
    [
        ({"least": 0.97}, 0.97, True),
        ({"least": 0.97}, math.nan, False),
        ({"most": 1e-5}, 1e-5, True),
        ({"most": 8}, 9, False),
        ({"is": True}, True, True),
        ({"is": 0}, 1, False),
        ({"least": 1}, None, False),
        ({}, 5, None),
    ],
)
def test_goals(limit: dict[str, Any], value: Any, met: bool | None) -> None:
    found = BENCH.judge({"what": "w", "read": ["a", -1], **limit}, {"a": [9, value]})
    assert found["is_met"] is met


RESULT = {"rows": [{"n": 8, "x": 1, "ok": True}, {"n": 64, "x": 5, "ok": False}], "of": {"b": 2}}


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["of", "b"], 2),
        (["rows", "n=64", "x"], 5),
        (["max", "rows", "*", "x"], 5),
        (["sum", "rows", "ok=", "x"], 5),
        (["all", "rows", "*", "ok"], False),
        (["len", "of", "!b"], 0),
    ],
)
def test_values_are_found(keys: list[Any], value: Any) -> None:
    assert BENCH.read_value(RESULT, keys) == value


@pytest.mark.parametrize(
    ("code", "status", "met"),
    [
        (f"{_WRITE}; sys.exit(1)", "exit code 1", [True, True, False, None]),
        ("raise SystemExit('broken')", "exit code 1; no result: ", [False] * 3),
        (
            "import sys; open(sys.argv[-1], 'w').write('{')",
            "exit code 0; no result: ",
            [False] * 3,
        ),
        ("import time; time.sleep(60)", "ended after 1 s; no result: ", [False] * 3),
    ],
)
def test_a_part(code: str, status: str, met: list[Any], tmp_path: Path) -> None:
    (tmp_path / "part.json").write_text('{"x": 9, "flag": true}')  # of an earlier run
    limit = 1.0 if "sleep" in code else 60.0
    found = BENCH.run_part(_part(code, timeout_s=limit), tmp_path)
    assert found["status"].startswith(status)
    assert [goal["is_met"] for goal in found["goals"]][: len(met)] == met
    if "broken" in code:
        assert found["output"] == ["broken"]


def test_what_a_part_leaves_running_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1); open({str(mark)!r}, 'w')"
    code = f"import subprocess,sys; subprocess.Popen([sys.executable, '-c', {child!r}]); {_WRITE}"
    BENCH.run_part(_part(code), tmp_path)
    time.sleep(1.5)
    assert not mark.exists()


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts that cannot run say why."""
    parts = [
        _part(_WRITE, "one", goals=GOALS[:2]),
        _part(_WRITE, "two", needs="no-such-program"),
        _part(_WRITE, "three", is_full_only=True),
    ]
    monkeypatch.setattr(BENCH, "PARTS", parts)
    assert BENCH.main(["--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "[1/3] one: A part?" in output
    assert "not run: no-such-program is not installed" in output
    assert "not run: takes too long; --full runs it" in output
    assert "3 parts; failed: none" in output
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [goal["is_met"] for goal in found["parts"]["one"]["goals"]] == [True, True]
    assert found["machine"]["cores"] >= 1
    parts[0]["goals"] = GOALS
    assert BENCH.main(["--out", str(tmp_path), "--only", "one"]) == 1
    assert "missed: one: other: None" in capsys.readouterr().out
    assert BENCH.main(["--out", str(tmp_path), "--minutes", "0", "--only", "one"]) == 0
    assert "not run: the time is used up" in capsys.readouterr().out


def test_names_and_commands_of_the_parts() -> None:
    """Flags are known to the scripts, and every script that measures is a part."""
    parts = BENCH.PARTS
    assert len({part["name"] for part in parts}) == len(parts)
    for part in parts:
        assert part["goals"], f"{part['name']} is held against nothing"
        for full in (False, True):
            script, *flags = BENCH.words_of(part, full=full)
            text = (BENCHMARKS.parent / script).read_text() if script != "-m" else ""
            for flag in (word for word in flags if text and word.startswith("--")):
                assert flag in text, f"{part['name']}: {script} has no {flag}"
    named = {Path(BENCH.words_of(part, full=False)[0]).stem for part in parts}
    for path in sorted(BENCHMARKS.glob("*.py")):
        is_script = "if __name__ ==" in path.read_text() and "add_argument" in path.read_text()
        if is_script and path.stem not in ("bench", "parity_script", "sorted_padded"):
            assert path.stem in named, f"{path.name} is in no part of make bench"
