"""Saving and resuming by Megatron's own flags: the run goes on as if it had not been stopped."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from megatron_world import Megatron, Run

from odb_megatron.cli import main
from odb_megatron.report.steps import read_run

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

STOP = 3
PADDED = ("--train-samples", 45, "--ckpt-format", "torch")
FLAGS = ("--odb", *PADDED)


@pytest.fixture(scope="module")
def whole(megatron: Megatron, data_flags: tuple[str, ...]) -> Run:
    """An uninterrupted run."""
    return megatron.train(*FLAGS, *data_flags)


@pytest.fixture(scope="module")
def stopped(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Run]]:
    """Runs that exited after three steps, and their checkpoints."""
    found = {}
    for name, flags in (("packed", FLAGS), ("padded", PADDED)):
        folder = tmp_path_factory.mktemp(name)
        run = megatron.train(*flags, *data_flags, "--exit-interval", STOP, *_saving(folder))
        found[name] = (folder, run)
    return found


def test_stop_and_resume(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: Run,
    stopped: dict[str, tuple[Path, Run]],
    tmp_path: Path,
) -> None:
    folder, first = stopped["packed"]
    assert all(replica.exited for replica in first.replicas)
    assert "not reached         21 requested samples" in first.summary
    flags = (*FLAGS, *data_flags)
    workers = ("--num-workers", 1, "--log-progress")
    rest = megatron.train(*flags, "--load", folder, *workers, *_saving(tmp_path))
    _assert_continues(whole, first, rest)
    last = len(whole.steps)
    assert rest.replicas[0].final["train_iters"] == last
    assert rest.evaluations == whole.evaluations
    assert len(rest.evaluations) == 1
    assert "(45 of 45 requested)" in rest.summary
    again = megatron.train(*flags, "--load", tmp_path)
    assert again.steps == []
    assert "no optimizer step was run" in again.replicas[0].output
    assert [where for where, _ in again.evaluations] == [f"iteration {last} on validation set"]


def test_another_number_of_replicas(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: Run,
    stopped: dict[str, tuple[Path, Run]],
    tmp_path: Path,
) -> None:
    """2, then 1, then 2 replicas: the same samples in every step."""
    folder, first = stopped["packed"]
    flags = (*FLAGS, *data_flags, "--load")
    stop = (*_saving(tmp_path), "--exit-interval", STOP + 1)
    middle = megatron.train(*flags, folder, *stop, replicas=1)
    last = megatron.train(*flags, tmp_path)
    assert len(middle.steps) == 1
    _assert_continues(whole, first, middle, last, within=1e-5)


def test_torch_dist_checkpoints(
    megatron: Megatron, data_flags: tuple[str, ...], whole: Run, tmp_path: Path
) -> None:
    """Asynchronous and of global non-persistent type, too."""
    kinds: tuple[tuple[Any, ...], ...] = (
        (),
        ("--async-save",),
        ("--non-persistent-save-interval", 1, "--non-persistent-ckpt-type", "global"),
    )
    for number, how in enumerate(kinds):
        flags = (*FLAGS, *data_flags, "--ckpt-format", "torch_dist")
        saving = _saving(tmp_path / str(number))
        first = megatron.train(*flags, *how, "--exit-interval", STOP, *saving)
        rest = megatron.train(*flags, *how[-2:], "--load", saving[1])
        _assert_continues(whole, first, rest)


def test_a_padded_run_goes_on_packed(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: Run,
    stopped: dict[str, tuple[Path, Run]],
) -> None:
    folder, first = stopped["padded"]
    rest = megatron.train(*FLAGS, *data_flags, "--load", folder)
    assert "odb: no data state in the checkpoint of iteration 3" in rest.replicas[0].output
    _assert_continues(whole, first, rest, within=1e-5)


def test_a_killed_job_goes_on(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kill -9` of all processes in the middle of a step; a checkpoint after every second one."""
    killed_in = random.SystemRandom().randint(3, 6)
    last_saved = 2 if killed_in < 5 else 4
    shown = max(last_saved, killed_in - 2)  # a step is shown with the next one, or at a save
    flags = (*FLAGS, *data_flags)
    saving = ("--save", tmp_path, "--save-interval", 2)
    lost = megatron.killed(*flags, *saving, killed_in=killed_in)
    assert [step.iteration for step in lost] == list(range(1, shown + 1))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last_saved)
    log = megatron.log_folder
    rest = megatron.train(*flags, "--load", tmp_path, "--odb-log-dir", log)
    assert "  sources since the resume:" in rest.summary
    steps = whole.steps
    for resumed, expected in ((lost, steps[:shown]), (rest.steps, steps[last_saved:])):
        assert [step.ids for step in resumed] == [step.ids for step in expected]
        losses = [step.loss for step in expected]
        assert [step.loss for step in resumed] == pytest.approx(losses, abs=1e-6)
    run = read_run(str(log))
    assert [header.iteration for header in run.headers] == [0, last_saved]
    assert [step.iteration for step in run.steps] == [step.iteration for step in steps]
    assert [step.part for step in run.steps] == [int(s.iteration > last_saved) for s in steps]
    for logged, step in zip(run.steps, steps, strict=True):
        ids = [sorted(name for batch in logged.records[at].ids for name in batch) for at in (0, 1)]
        assert ids == [sorted(own) for own in step.ids]
    assert main(["trace", str(log), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["samples"] == 45


def test_a_signal_saves_before_the_exit(
    megatron: Megatron, data_flags: tuple[str, ...], whole: Run, tmp_path: Path
) -> None:
    flags = (*FLAGS, *data_flags)
    saving = (*_saving(tmp_path), "--exit-signal-handler")
    first = megatron.train(*flags, *saving, terminated_in=STOP)
    assert all(replica.exited for replica in first.replicas)
    _assert_continues(whole, first, megatron.train(*flags, "--load", tmp_path))


@pytest.mark.parametrize("topology", ["", "--num-layers 2 --pipeline-model-parallel-size 2"])
@pytest.mark.parametrize(("how", "loaded"), [("once", 2), ("always", 3)])
def test_a_step_whose_loss_was_nan_is_replayed(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    tmp_path: Path,
    topology: str,
    how: str,
    loaded: int,
) -> None:
    """Megatron runs step 4 again and exits; it saves first where the loss is NaN again."""
    flags = (*FLAGS, *data_flags, "--ckpt-format", "torch_dist", *shlex.split(topology))
    saving = ("--save", tmp_path, "--save-interval", 2)
    whole = megatron.train(*flags)
    run = megatron.run(*flags, *saving, nan_in=(how, 4))
    assert [replica.error[:11] for replica in run.replicas] == ["SystemExit:"] * 2
    count = whole.steps[3].record["num_micro_batches"]
    assert [replica.forwards[4] for replica in run.replicas] == [2 * count] * 2
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(loaded)
    rest = megatron.train(*flags, "--load", tmp_path, "--rerun-mode", "disabled")
    for steps, expected in ((run.steps, whole.steps[:3]), (rest.steps, whole.steps[loaded:])):
        assert [step.ids for step in steps] == [step.ids for step in expected]
        for step, other in zip(steps, expected, strict=True):
            for name in ("num_micro_batches", "consumed_samples"):
                assert step.record[name] == other.record[name]
            assert step.loss == pytest.approx(other.loss, abs=1e-6)


def test_other_data_is_refused(
    megatron: Megatron, data_flags: tuple[str, ...], stopped: dict[str, tuple[Path, Run]]
) -> None:
    flags = (*FLAGS, *data_flags, "--load", stopped["packed"][0], "--seed", 99)
    for error in megatron.refused(*flags):
        assert "was saved with other data (seed of " in error
        assert "1234 then, 99 now" in error


def test_finetune_starts_the_data_anew(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: Run,
    stopped: dict[str, tuple[Path, Run]],
) -> None:
    run = megatron.train(*FLAGS, *data_flags, "--load", stopped["packed"][0], "--finetune")
    assert [step.all_ids for step in run.steps] == [step.all_ids for step in whole.steps]
    assert run.losses[0] < whole.losses[0] - 0.3  # the weights are those loaded


def _saving(folder: Path) -> tuple[Any, ...]:
    return "--save", folder, "--save-interval", 100


def _assert_continues(whole: Run, *parts: Run, within: float = 1e-6) -> None:
    """The parts are what `whole` is, step by step."""
    steps = [step for part in parts for step in part.steps]
    assert len(parts[0].steps) == STOP < len(whole.steps)
    assert [step.iteration for step in steps] == [step.iteration for step in whole.steps]
    assert [step.all_ids for step in steps] == [step.all_ids for step in whole.steps]
    assert [step.loss for step in steps] == pytest.approx(whole.losses, abs=within)
    rates = {}
    for part in parts:
        rates |= part.replicas[0].learning_rates
    assert rates == pytest.approx(whole.replicas[0].learning_rates)
