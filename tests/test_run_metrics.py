"""What runs of `pretrain()` write of their steps: logs and `odb/...` series."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_world import ChatFile, Megatron
from parallel_runs import TP

from odb_megatron.report.live import series_of
from odb_megatron.report.steps import RunLog, read_run

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

Scalars = dict[str, dict[int, float]]


def _scalars(folder: Path) -> Scalars:
    """Every scalar of a folder of TensorBoard event files, by name and iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def _log(megatron: Megatron) -> RunLog:
    return read_run(str(megatron.folder / f"log{megatron._num_runs}"))


@pytest.fixture(scope="module")
def data_parallel(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunLog, Scalars]:
    """Two replicas, the second of which has the writers: log and series."""
    folder = tmp_path_factory.mktemp("metrics")
    odb = ("--odb", "--odb-cost", "linear=1,overhead=9", "--odb-token-budget", 96)
    megatron.train(
        *(*odb, "--train-samples", 24),
        *(*data_flags, "--tensorboard-dir", folder / "events", "--tensorboard-log-interval", 2),
    )
    return _log(megatron), _scalars(folder / "events")


def test_the_log_has_each_replica(data_parallel: tuple[RunLog, Scalars], chats: ChatFile) -> None:
    run, _ = data_parallel
    assert run.notes == ()
    (header,) = run.headers
    assert (header.batches, header.num_replicas, header.token_budget) == ("odb", 2, 96)
    assert "--odb-cost linear=1.0,overhead=9.0" in header.flags
    assert sum(step.first.samples for step in run.steps) == 24
    for step in run.steps:
        first = step.first
        assert sorted(step.records) == [0, 1]
        records = step.records.values()
        assert sum(n for r in records for batch in r.lengths for n in batch) == first.tokens
        assert sum(sum(r.widths) for r in records) == first.computed_tokens
        costs = [sum(r.costs) for r in records]
        assert sum(costs) / 2 / max(costs) == pytest.approx(first.balance, rel=1e-4)
        for record in records:
            assert len(record.micro_batch_s) == record.num_micro_batches == len(record.ids)
            assert 0 < sum(record.micro_batch_s) <= record.step_s
            assert record.plan_s > 0
            assert record.queue_steps >= 0


def test_the_last_rank_writes_series(data_parallel: tuple[RunLog, Scalars]) -> None:
    run, scalars = data_parallel
    written = {name for name in scalars if name.startswith("odb/")}
    assert written >= {
        f"odb/{name}"
        for name in ("micro-batches", "tokens", "fill", "padding", "balance", "wait-seconds")
    }
    assert written <= {f"odb/{name}" for step in run.steps for name in series_of(step.first)}
    for step in run.steps:
        for name, value in series_of(step.records[1]).items():
            found = scalars[f"odb/{name}"]
            if step.iteration % 2:
                assert step.iteration not in found
            else:
                assert found[step.iteration] == pytest.approx(value, rel=1e-6)
    assert len(run.steps) >= 2


def test_a_rank_that_does_not_lead_writes_series(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Under tensor parallelism the writers are on the last rank; the first is the source rank."""
    megatron.train(
        *("--odb", "--train-samples", 16, *data_flags, *TP.split()),
        *("--tensorboard-dir", tmp_path, "--tensorboard-log-interval", 1),
    )
    run, scalars = _log(megatron), _scalars(tmp_path)
    own = {"wait-seconds", "step-seconds", "tokens-per-second", "peak-memory-bytes"}
    own |= {"queue-steps", "queue-bytes"}
    for step in run.steps:
        for name, value in series_of(step.records[0]).items():
            found = scalars[f"odb/{name}"][step.iteration]
            if name in own:
                assert found >= 0
            else:
                assert found == pytest.approx(value, rel=1e-6), name
    assert any(record.plan_s for record in [run.steps[0].first])


def test_the_padded_baseline_is_logged_and_written(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    megatron.train(
        *("--train-samples", 16, *data_flags),
        *("--tensorboard-dir", tmp_path, "--tensorboard-log-interval", 1),
    )
    run, scalars = _log(megatron), _scalars(tmp_path)
    assert run.headers[0].batches == "padded"
    assert "odb/fill" not in scalars
    for step in run.steps:
        record = step.records[1]
        assert scalars["odb/tokens"][step.iteration] == record.tokens
        padding = 1 - record.tokens / record.computed_tokens
        assert scalars["odb/padding"][step.iteration] == pytest.approx(padding, rel=1e-5)


def test_what_the_plan_does_is_told(megatron: Megatron) -> None:
    """Own data sets with patches: seven of 24 samples have more than a micro-batch may hold."""
    over = 7
    items = [
        {
            "tokens": list(range(1, 2 + at)),
            "labels": list(range(2, 3 + at)),
            "loss_mask": [1] * (1 + at),
            "num_patches": 9 if at < over else at % 4,
        }
        for at in range(24)
    ]
    prices = "linear=2.0,quadratic=0.001,overhead=70.0,patch=0.5"
    run = megatron.train(
        *("--odb", "--odb-max-patches", 8, "--odb-cost", prices, "--train-samples", 24),
        *("--split", "100,0,0", "--eval-iters", 0),
        items=(items, None, None),
    )
    output = run.replicas[0].output
    (line,) = (line for line in output.splitlines() if "odb: reproduce with" in line)
    assert f"--odb-cost {prices} --odb-max-patches 8" in line
    assert "odb: replicas are balanced in each step: replicas meet once per optimizer" in output
    assert f"odb: cost model --odb-cost {prices} (as given)\n" in output
    assert f"; over the budget or patch cap, alone: {over}\n" in run.summary
    assert f"  cost model          --odb-cost {prices} (as given)\n" in run.summary
    moved = sum(step.record["moved"] for step in run.steps)
    assert moved > 0
    assert f"  samples moved       {moved} of 24 (" in run.summary
    for replica in run.replicas:
        for record in replica.steps:
            for lengths in record["lengths"]:
                assert len(lengths) == 1 or min(lengths) > over
