"""The metrics of a run for Prometheus: a server on a port, a file for node_exporter, or both.

Must not know Megatron, and must not end a run: after the start a failure is a warning, once.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from odb_megatron.report.series import SERIES, series_of
from odb_megatron.report.step_record import StepRecord

__all__ = ["Metrics", "require_metrics"]

_TOTALS = {
    "steps": "optimizer steps trained by this process",
    "samples": "samples trained since this process started (all)",
    "tokens": "tokens before padding trained since this process started (all)",
    "left_out": "samples skipped, bad or overlong (all)",
    "wait_seconds": "seconds the trainer waited for data",
    "seconds": "seconds in steps",
}

_TEXTS = {series.name: series.text for series in SERIES} | {
    "iteration": "iteration of the last step",
    "loss": "mean loss per loss token of the last step (all)",
}


def require_metrics(*, port: int | None, host: str, file: str | None) -> None:
    """Check that metrics can be served and written; leaves nothing behind.

    Raises:
        ValueError: the package is missing, the port cannot be listened on, or the file's folder
            cannot be written.
    """
    _package()
    if port is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen()
        except OSError as error:
            raise _unusable_port(host, port, error) from error
    if file is not None:
        try:
            if os.path.isdir(file):
                raise IsADirectoryError(f"{file} is a folder")
            with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(file))):
                pass
        except OSError as error:
            raise _unusable_file(file, error) from error


class Metrics:
    """Gauges of the last step (`odb_...`) and totals of the run (`odb_..._total`).

    Args:
        port: to serve on; None for none.
        host: address to listen on.
        file: to write after each step; None for none.

    Raises:
        ValueError: see `require_metrics`.
    """

    def __init__(self, *, port: int | None, host: str, file: str | None) -> None:
        package = _package()
        self._file = file
        self._has_warned = False
        self._write_text = package.write_to_textfile
        self._registry = package.CollectorRegistry()
        self._collector = _Collector()
        self._registry.register(self._collector)
        self._server: Any = None
        self._thread: Any = None
        if port is not None:
            try:
                self._server, self._thread = package.start_http_server(
                    port, addr=host, registry=self._registry
                )
            except OSError as error:
                raise _unusable_port(host, port, error) from error
        if file is not None:
            try:
                self._write_text(file, self._registry)
            except OSError as error:
                self.close()
                raise _unusable_file(file, error) from error

    def step(self, record: StepRecord) -> None:
        """Tell of a step."""
        self._collector.add(record)
        if self._file is None:
            return
        try:
            self._write_text(self._file, self._registry)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                print(
                    f"odb: warning: the metrics file {self._file} cannot be written any more "
                    f"({error}); the run goes on",
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        """End the server and its thread; the file keeps the last step. Harmless when repeated."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()


class _Collector:
    """What is known at the time of a scrape, which comes from another thread."""

    def __init__(self) -> None:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self._gauge, self._counter = GaugeMetricFamily, CounterMetricFamily
        self._known: tuple[dict[str, float], dict[str, float]] = ({}, dict.fromkeys(_TOTALS, 0.0))

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        values = series_of(record) | {"iteration": record.iteration}
        if record.loss is not None:
            values["loss"] = record.loss
        added = (1, record.samples, record.tokens, record.left_out, record.wait_s, record.step_s)
        _, before = self._known
        totals = {name: before[name] + value for name, value in zip(_TOTALS, added, strict=True)}
        self._known = (values, totals)  # at once: a scrape sees one step or the other

    def collect(self) -> Iterator[Any]:
        """Called by the package."""
        values, totals = self._known
        for name, value in values.items():
            yield self._gauge("odb_" + name.replace("-", "_"), _TEXTS[name], value=value)
        for name, value in totals.items():
            yield self._counter(f"odb_run_{name}", _TOTALS[name], value=value)


def _package() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise ValueError(
            "--odb-metrics-port and --odb-metrics-file need the package prometheus_client: "
            "pip install 'odb-megatron[metrics]', or drop them"
        ) from error
    return prometheus_client


def _unusable_port(host: str, port: int, error: OSError) -> ValueError:
    return ValueError(
        f"--odb-metrics-port {port} cannot be listened on at {host} ({error}): give a free port, "
        "or an address of this machine with --odb-metrics-host"
    )


def _unusable_file(file: str, error: OSError) -> ValueError:
    return ValueError(
        f"--odb-metrics-file {file} cannot be written ({error}): give a file in a folder that can"
    )
