"""Every way a run of `pretrain()` ends while steps are made ahead: no hang, no thread left."""

from __future__ import annotations

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
        (Fault(iteration=2, kind="exit"), 1, f"RuntimeError: {LEFT}"),
        (Fault(iteration=2, kind="exit", training=False), 2, f"RuntimeError: {LEFT}"),
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


def test_nothing_grows_over_epochs(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    """Threads, files and processes; the first quarter is not judged."""
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
