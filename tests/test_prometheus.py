"""`odb_megatron.report.prometheus`, scraped over HTTP, and the `odb/...` series of a step."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_run_log import RECORD

from odb_megatron.megatron.series_writers import SeriesWriters
from odb_megatron.report.prometheus import Metrics, require_metrics
from odb_megatron.report.series import SERIES, series_of

LOCAL = "127.0.0.1"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])


def _needs_package() -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'odb-megatron[metrics]'")


def _scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{LOCAL}:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.partition(" ") for line in lines)
        if not name.startswith("#")
    }  # fmt: skip


def test_a_run_is_scraped_over_http(port: int, tmp_path: Path) -> None:
    _needs_package()
    before = threading.active_count()
    path = tmp_path / "odb.prom"
    metrics = Metrics(port=port, host=LOCAL, file=str(path))
    try:
        found = _scrape(port)
        assert found["odb_run_steps_total"] == 0
        assert "odb_fill" not in found  # not known yet, so not there
        metrics.step(RECORD)
        metrics.step(replace(RECORD, iteration=2, fill=0.5, loss=None, wait_s=0.5))
        found = _scrape(port)
    finally:
        metrics.close()
    assert found["odb_fill"] == 0.5
    assert found["odb_iteration"] == 2
    assert found["odb_micro_batches"] == 2
    assert found["odb_tokens_per_second"] == 600
    assert found["odb_padding"] == pytest.approx(1 - 300 / 320)
    assert found["odb_run_tokens_total"] == 600
    assert found["odb_run_wait_seconds_total"] == 0.75
    assert "odb_loss" not in found
    assert "odb_fill 0.5" in path.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["odb.prom"]
    assert threading.active_count() == before
    metrics.close()
    with pytest.raises(OSError, match="refused"):
        _scrape(port)


def test_every_series_has_a_text_and_is_in_order() -> None:
    everything = series_of(replace(RECORD, reserved_memory_bytes=1))
    assert list(everything) == [series.name for series in SERIES]
    padded = replace(RECORD, fill=None, balance=None, computed_tokens=0, step_s=0.0)
    assert {"samples", "tokens", "left-out"} <= set(series_of(padded))
    assert not {"fill", "balance", "padding", "idle", "queue-steps"} & set(series_of(padded))


def test_what_cannot_be_used_is_refused(port: int, tmp_path: Path) -> None:
    _needs_package()
    require_metrics(port=port, host=LOCAL, file=str(tmp_path / "odb.prom"))
    assert list(tmp_path.iterdir()) == []
    with socket.socket() as taken:
        taken.bind((LOCAL, port))
        taken.listen()
        for make in (require_metrics, Metrics):
            with pytest.raises(
                ValueError, match=rf"--odb-metrics-port {port} cannot be listened on at .*Address"
            ):
                make(port=port, host=LOCAL, file=None)
    with pytest.raises(ValueError, match=r"at 192.0.2.7 \(.*with --odb-metrics-host"):
        require_metrics(port=port, host="192.0.2.7", file=None)
    for file in (tmp_path, tmp_path / "nope" / "odb.prom"):
        for make in (require_metrics, Metrics):
            with pytest.raises(ValueError, match=r"--odb-metrics-file .* cannot be written \("):
                make(port=None, host=LOCAL, file=str(file))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for make in (require_metrics, Metrics):
        with pytest.raises(ValueError, match=r"pip install 'odb-megatron\[metrics\]', or drop"):
            make(port=1, host=LOCAL, file=None)


def test_a_file_that_cannot_be_written_any_more_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _needs_package()
    metrics = Metrics(port=None, host=LOCAL, file=str(tmp_path / "odb.prom"))

    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    metrics.step(RECORD)
    metrics.step(RECORD)
    said = capsys.readouterr().err
    assert said.count("cannot be written any more") == 1
    assert "the run goes on" in said


class _Writer:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))


def test_series_are_written_at_the_hosts_interval() -> None:
    writer = _Writer()
    writers = SeriesWriters(writer, None, interval=2)
    assert writers
    for iteration in (1, 2, 3, 4):
        writers.step(replace(RECORD, iteration=iteration))
    assert {step for *_, step in writer.seen} == {2, 4}
    assert ("odb/fill", 0.75, 2) in writer.seen
    nothing = SeriesWriters(None, None, interval=0)
    assert not nothing
    nothing.step(RECORD)


class _Wandb:
    """What Megatron hands out is the module: `log(data, step)` is all that is called of it.

    The package itself is not run here: it is no dependency, starts a service process even offline,
    and its file's format is its own.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int | None]] = []

    def log(self, data: dict[str, float], step: int | None = None, commit: bool = True) -> None:
        self.seen.append((data, step))


def test_all_series_of_a_step_are_one_call_of_wandb() -> None:
    wandb = _Wandb()
    writers = SeriesWriters(None, wandb, interval=2)
    assert writers
    for iteration in (1, 2, 3, 4):
        writers.step(replace(RECORD, iteration=iteration))
    assert [step for _, step in wandb.seen] == [2, 4]
    expected = series_of(replace(RECORD, iteration=2))
    assert wandb.seen[0][0] == {f"odb/{name}": value for name, value in expected.items()}
    assert wandb.seen[0][0]["odb/fill"] == 0.75
