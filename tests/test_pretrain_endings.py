"""Every way a run of `pretrain()` ends while steps are made ahead: no hang, no thread left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from megatron_run import Fault
from megatron_world import LEFT, Megatron, Run

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

SAMPLES = ("--train-samples", 45)
EVALUATING = ("--eval-interval", 2, "--eval-iters", 3)


def _flags(*flags: object) -> tuple[object, ...]:
    return ("--odb", *SAMPLES, *flags)


def _rested(run: Run) -> None:
    """Nothing is left, and the same step was the last everywhere."""
    assert [replica.threads for replica in run.replicas] == [0] * len(run.replicas)
    assert len({len(replica.steps) for replica in run.replicas}) == 1


@pytest.fixture(scope="module")
def whole(megatron: Megatron, data_flags: tuple[str, ...]) -> Run:
    """An uninterrupted run."""
    return megatron.train(*_flags(*EVALUATING), *data_flags)


def test_the_end_of_the_data(whole: Run) -> None:
    _rested(whole)
    records = [replica.steps for replica in whole.replicas]
    assert all(record["wait_s"] >= 0 for steps in records for record in steps)
    assert "data path           planner waited" in whole.summary
    assert max(record["queue_bytes"] for steps in records for record in steps) > 0


@pytest.mark.parametrize(
    ("fault", "num_steps", "error"),
    [
        (None, 3, ""),
        (Fault(iteration=2, kind="late"), 2, ""),
        (Fault(iteration=2, kind="late", training=False), 2, ""),
        (Fault(iteration=2, kind="raise"), 1, "ValueError: no luck in iteration 2"),
        (Fault(iteration=2, kind="raise", training=False), 2, "ValueError: no luck in iteration 2"),
        (Fault(iteration=2, kind="exit"), 1, f"RuntimeError: {LEFT}"),
        (Fault(iteration=2, kind="exit", training=False), 2, f"RuntimeError: {LEFT}"),
        (Fault(iteration=2, kind="exit 3"), 1, "SystemExit: 3"),
        (Fault(iteration=2, kind="exit 3", training=False), 2, "SystemExit: 3"),
    ],
)
def test_an_end_before_that(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: Run,
    fault: Fault | None,
    num_steps: int,
    error: str,
) -> None:
    """An exit interval, an exit duration, an error, an exit: in a step or in an evaluation."""
    exits = ("--exit-interval", 3, "--exit-duration-in-mins", 1000)
    flags = (*_flags(*EVALUATING, *exits), *data_flags)
    run = megatron.run(*flags, fault=fault)
    for replica in run.replicas:
        assert replica.error == error, replica.trace
        assert replica.exited == (not error)
        assert replica.restored
    _rested(run)
    assert run.losses == whole.losses[:num_steps]


def test_replicas_of_several_ranks_end_together(
    megatron: Megatron, data_flags: tuple[str, ...]
) -> None:
    pipeline = ("--pipeline-model-parallel-size", 2, "--num-layers", 2)
    run = megatron.train(*_flags(*pipeline, "--exit-interval", 3), *data_flags)
    assert [replica.threads for replica in run.replicas] == [0, 0]
    assert {record["collectives"] for record in run.replicas[0].steps} == {2}
    assert {record["reports"] for record in run.replicas[0].steps} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "exit 3"])
def test_one_trainer_that_leaves_ends_all_processes(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path, kind: str
) -> None:
    """In processes of their own: the other one waits in a collective for it."""
    line = megatron.command_line(*_flags(), *data_flags)
    script = tmp_path / "one_leaves.py"
    script.write_text(_ONE_LEAVES, encoding="utf-8")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    processes = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), kind, *line],
                env={**os.environ, **place, **world, "PYTHONPATH": paths},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=150)[0])
    except subprocess.TimeoutExpired:
        for process in processes:
            process.send_signal(signal.SIGUSR1)  # where each thread is
        time.sleep(1)
        for process in processes:
            process.kill()
        pytest.fail("\n".join(process.communicate()[0][-5000:] for process in processes))
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == (1 if kind == "raise" else 3), outputs[1][-3000:]
    assert processes[0].returncode not in (0, None), outputs[0][-3000:]
    assert "no luck in iteration 2" in outputs[1] or kind != "raise"


_ONE_LEAVES = """
import faulthandler, os, signal, sys
faulthandler.register(signal.SIGUSR1)
from odb_megatron.testing import cpu_device
cpu_device.activate()
from megatron_run import Case, Fault, Outcome, _pretrain

if __name__ == "__main__":
    kind, rank = sys.argv[1], int(os.environ["RANK"])
    fault = Fault(iteration=2, kind=kind) if rank == 1 else None
    case = Case(flags=tuple(sys.argv[2:]), fault=fault)
    sys.argv = ["pretrain_gpt_odb.py", *case.flags]
    _pretrain(case, Outcome())
"""


def test_nothing_grows_over_epochs(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    """As `benchmarks/long_run.py`, on few samples; the first quarter is not judged."""
    flags = ("--odb", "--odb-epochs", 10, "--num-workers", 1)
    run = megatron.train(*flags, *data_flags, "--eval-interval", 5)
    for replica in run.replicas:
        steps = len(replica.usage)
        assert steps == len(run.steps) >= 10 * 7
        for seen in zip(*replica.usage, strict=True):
            assert max(seen[3 * steps // 4 :]) <= max(seen[steps // 4 : 3 * steps // 4])
        assert all(min(seen) > 0 for seen in zip(*replica.usage[steps // 4 :], strict=True))
        children = [counted[2] for counted in replica.usage]
        assert 1 <= min(children[steps // 4 :]) <= max(children) <= 4
