"""Real runs in which a rank dies or is interrupted, or something takes long; one start for each."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
from test_benchmarks import module

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

FAULTS = module("faults")


def _run(kind: str, **options: Any) -> Any:
    flags = ("--num-workers", "1", *options.pop("flags", ()))
    return FAULTS.run_fault(kind, flags=flags, **options)


@pytest.mark.parametrize(
    ("flag", "victim"),
    [
        (None, 0),  # a source rank, which also hosts the rendezvous store
        ("--pipeline-model-parallel-size", 1),
    ],
)
def test_a_survivor_ends_while_its_trainer_is_in_a_call_that_never_returns(
    flag: str | None, victim: int
) -> None:
    flags = () if flag is None else (flag, "2")
    run = _run("device_call", victim=victim, flags=flags, environment={"GRACE_S": "1"})
    survivor = 1 - victim
    assert run.exit_codes[victim] == -signal.SIGKILL, run.outputs[victim][-3000:]
    assert run.exit_codes[survivor] == 75, run.outputs[survivor][-3000:]
    (last,) = [line for line in run.outputs[survivor].splitlines() if " is ended: " in line]
    assert re.search(rf"odb: rank {survivor} .* is ended: rank {victim} \(.*\) is gone", last)
    assert "The trainer was in watched (fault_script.py:" in last
    assert ("it hosted the rendezvous store" in last) == (victim == 0)
    assert (run.orphans, run.shm_left) == (0, 0)


@pytest.mark.parametrize("name", ["slow_evaluation_and_save", "leaves_in_step"])
def test_a_case_of_the_benchmark(name: str) -> None:
    found = FAULTS.measure(name)
    assert found["passed"], found


def test_an_interrupt_from_the_terminal_reaches_all_ranks() -> None:
    run = _run("waits", victim=1, send=((signal.SIGINT, 0.0),), to_all=True)
    assert run.exit_codes == (130, 130), run.outputs[0][-3000:] + run.outputs[1][-3000:]
    for rank in range(2):
        assert run.outputs[rank].strip().endswith(f"odb: rank {rank} was interrupted")
        assert "Traceback" not in run.outputs[rank]
    assert (run.orphans, run.shm_left) == (0, 0)
