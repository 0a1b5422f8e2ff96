"""`odb_megatron.data.fetch_limit`: a sample that takes too long is named where it hangs."""

from __future__ import annotations

import signal
import threading
import time
import traceback

import pytest

from odb_megatron.data.fetch_limit import FetchTimeoutError, limited


def _hang() -> None:
    time.sleep(600)


def test_what_hangs_is_interrupted_and_named() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with (
        pytest.raises(FetchTimeoutError) as caught,
        limited(0.05, what=lambda: "record 4"),
    ):
        _hang()
    assert str(caught.value).startswith("record 4 took longer than 0.05 s")
    trace = "".join(traceback.format_exception(caught.value))
    assert "_hang" in trace
    assert signal.getsignal(signal.SIGALRM) == before


def test_what_is_in_time_is_left_alone() -> None:
    with limited(0.2, what=lambda: "it"):
        pass
    time.sleep(0.3)  # no alarm comes later
    with pytest.raises(KeyError), limited(0.2, what=lambda: "it"):
        raise KeyError
    time.sleep(0.3)


def test_another_thread_has_no_limit() -> None:
    found: list[str] = []

    def run() -> None:
        with limited(0.01, what=lambda: "it"):
            time.sleep(0.1)
            found.append("done")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["done"]
