"""`make bench`: what it makes of parts that run, fail or never end, and how its page looks."""

from __future__ import annotations

import importlib
import json
import math
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.browser import Browser, browser, page_problems

__all__ = ["browser"]

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
_WRITE = "import json,sys; json.dump({'x': 3.5, 'flag': True}, open(sys.argv[-1], 'w'))"


def _module(name: str) -> ModuleType:
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


BENCH = _module("bench")
GOALS = (
    {"what": "x", "read": ["x"], "least": 3},
    {"what": "flag", "read": ["flag"], "is": True},
    {"what": "other", "read": ["nothing", 0], "most": 1},
    {"what": "reported", "read": ["x"]},
)


def _part(code: str, name: str = "part", goals: tuple[Any, ...] = GOALS, **values: Any) -> Any:
    command = f"-c {shlex.quote(code)}"
    return BENCH.Part(name=name, title="A part?", command=command, goals=goals, **values)


@pytest.mark.parametrize(
    ("limit", "value", "text", "met"),
    [
        ({"least": 0.97}, 0.97, "at least 0.97", True),
        ({"least": 0.97}, math.nan, "at least 0.97", False),
        ({"most": 1e-5}, 1e-5, "at most 1e-05", True),
        ({"most": 8}, 9, "at most 8", False),
        ({"is": True}, True, "yes", True),
        ({"is": 0}, 1, "0", False),
        ({"least": 1}, None, "at least 1", False),
        ({}, 5, "", None),
    ],
)
def test_goals(limit: dict[str, Any], value: Any, text: str, met: bool | None) -> None:
    found = BENCH.judge({"what": "w", "read": ["a", -1], **limit}, {"a": [9, value]})
    assert (found["goal"], found["is_met"]) == (text, met)


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
        (_WRITE, "ran", [True, True, False, None]),
        (f"{_WRITE}; sys.exit(1)", "ran; exit code 1", [True, True, False, None]),
        ("raise SystemExit('broken')", "failed: exit code 1, it wrote no result", [False] * 3),
        (
            "import sys; open(sys.argv[-1], 'w').write('{')",
            "failed: exit code 0, its result cannot be read",
            [False] * 3,
        ),
        ("import time; time.sleep(60)", "ended after 1 s, its time limit", [False] * 3),
    ],
)
def test_a_part(code: str, status: str, met: list[Any], tmp_path: Path) -> None:
    (tmp_path / "part.json").write_text('{"x": 9, "flag": true}')  # of an earlier run
    found = BENCH.run_part(
        _part(code, timeout_s=1.0 if "sleep" in code else 60.0), tmp_path, full=False
    )
    assert found["status"].startswith(status)
    assert [goal["is_met"] for goal in found["goals"]][: len(met)] == met
    if "broken" in code:
        assert found["output"] == ["broken"]


def test_what_a_part_leaves_running_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    code = f"import subprocess,sys; subprocess.Popen([sys.executable, '-c', {child!r}]); {_WRITE}"
    BENCH.run_part(_part(code), tmp_path, full=False)
    importlib.import_module("time").sleep(2.5)
    assert not mark.exists()


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts not asked for keep their result; those that cannot run say why."""
    parts = (
        _part(_WRITE, "one", GOALS[:2]),
        _part(_WRITE, "two", needs="no-such-program"),
        _part(_WRITE, "three", is_full_only=True),
    )
    monkeypatch.setattr(BENCH, "PARTS", parts)
    assert BENCH.main(["--out", str(tmp_path), "--no-page"]) == 0
    output = capsys.readouterr().out
    assert "[1/3] one: A part?" in output
    assert "not run: no-such-program is not installed" in output
    assert "not run: takes too long; --full runs it" in output
    assert "3 parts; failed: none; 0 goals missed" in output
    first = json.loads((tmp_path / "bench.json").read_text())
    assert BENCH.main(["--out", str(tmp_path), "--no-page", "--only", "three"]) == 0
    assert BENCH.main(["--out", str(tmp_path), "--no-page", "--minutes", "0"]) == 0
    assert "not run: the time is used up" in capsys.readouterr().out
    second = json.loads((tmp_path / "bench.json").read_text())
    assert second["parts"]["one"] == first["parts"]["one"]
    assert list(second["parts"]) == ["one", "two", "three"]
    assert second["machine"]["cores"] >= 1
    assert second["parts"]["one"]["commit"] == second["commit"]


def test_names_and_commands_of_the_parts() -> None:
    """Flags are known to the scripts, and every script that measures is a part."""
    parts = BENCH.PARTS
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        assert part.goals, f"{part.name} is held against nothing"
        for full in (False, True):
            script, *flags = part.words(full=full)
            text = (BENCHMARKS.parent / script).read_text() if script != "-m" else ""
            for flag in (word for word in flags if text and word.startswith("--")):
                assert flag in text, f"{part.name}: {script} has no {flag}"
    named = {Path(part.words(full=False)[0]).stem for part in parts}
    for path in sorted(BENCHMARKS.glob("*.py")):
        is_script = "if __name__ ==" in path.read_text() and "add_argument" in path.read_text()
        if is_script and path.stem not in ("bench", "replay_steps", "sorted_padded"):
            assert path.stem in named, f"{path.name} is in no part of make bench"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (0.99473, "0.9947"),
        (1.43e-6, "1.43e-06"),
        (4644640, "4,644,640"),
        (123456.7, "123,457"),
        ("a, b", "a, b"),
    ],
)
def test_values(value: Any, text: str) -> None:
    assert BENCH.shown(value) == text


def _report(tmp_path: Path) -> dict[str, Any]:
    """A report with both charts, a part that failed and one that was not run."""
    policies = ("odb", "odb-reference", "dp-balanced", "ffd", "sorted-bucketed")
    rows = [
        {
            "name": f"step/dp8/share1/cv{spread}",
            "policies": {
                name: {"steady": {"fraction_of_bound": 0.99 - 0.03 * number * (1 + at)}}
                for number, name in enumerate(policies)
            },
        }
        for at, spread in enumerate(("0.29", "0.48", "1.0", "2.0"))
    ]
    ratio = {"mean": 1.7, "ci95": [1.5, 1.9]}
    variants = {
        name: {
            "samples_per_s": 10.0 + at,
            "speedup_vs_standard": ratio,
            "padding_fraction": 0.1 * at,
        }
        for at, name in enumerate(("standard", "standard_mean", "sorted", "odb"))
    }
    good = BENCH.run_part(_part(_WRITE), tmp_path, full=False)
    bad = BENCH.run_part(_part("raise SystemExit('broken')"), tmp_path, full=False)
    return {
        "version": 1,
        "commit": "0123456789ab",
        "machine": BENCH.machine(),
        "seconds": 3.0,
        "parts": {
            "simulate_stream": good | {"name": "simulate_stream", "result": {"rows": rows}},
            "train_throughput": good
            | {"name": "train_throughput", "result": {"variants": variants}},
            "part": bad,
            "quality": BENCH._not_run(BENCH.PARTS[-1], "takes too long; --full runs it"),
        },
    }


def test_the_page_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pages)")
    pytest.importorskip("jinja2", reason="jinja2 is not installed (the extra pages)")
    path = tmp_path / "bench.html"
    BENCH.write_bench_page(path, _report(tmp_path))
    assert page_problems(browser, path) == []
    text = path.read_text(encoding="utf-8")
    for expected in (
        "at least 3",
        "missed",
        "broken",
        "takes too long; --full runs it",
        "0123456789ab",
    ):
        assert expected in text
