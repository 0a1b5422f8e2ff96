"""Saving and resuming by Megatron's own flags: the run goes on as if it had not been stopped."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from megatron_world import Megatron, Run
from parallel_runs import is_017

from odb_megatron.cli import main
from odb_megatron.report.run_log import read_run

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

POLICIES = ("samples", "cost")
STOP = 3
FLAGS = ("--train-samples", 45, "--ckpt-format", "torch")


@pytest.fixture(scope="module")
def whole(megatron: Megatron, data_flags: tuple[str, ...]) -> dict[str, Run]:
    """Uninterrupted runs."""
    return {
        policy: megatron.train("--odb", "--odb-policy", policy, *FLAGS, *data_flags)
        for policy in POLICIES
    }


@pytest.fixture(scope="module")
def stopped(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Run]]:
    """Runs that exited after three steps, and their checkpoints."""
    found = {}
    for name in (*POLICIES, "padded"):
        folder = tmp_path_factory.mktemp(name)
        odb = () if name == "padded" else ("--odb", "--odb-policy", name)
        flags = (*odb, *FLAGS, *data_flags, "--exit-interval", STOP)
        found[name] = (folder, megatron.train(*flags, *_saving(folder)))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_stop_and_resume(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    stopped: dict[str, tuple[Path, Run]],
    policy: str,
) -> None:
    folder, first = stopped[policy]
    assert all(replica.exited for replica in first.replicas)
    consumed = first.steps[-1].record["consumed_samples"]
    assert f"not reached         {45 - consumed} requested samples" in first.summary
    rest = megatron.train(
        *("--odb", "--odb-policy", policy, *FLAGS, *data_flags, "--load", folder),
        *("--num-workers", 1, "--log-progress", *_saving(folder)),
    )
    uninterrupted = whole[policy]
    _assert_continues(first, rest, uninterrupted)
    last = len(uninterrupted.steps)
    assert rest.replicas[0].final["train_iters"] == last
    assert rest.evaluations == uninterrupted.evaluations
    assert len(rest.evaluations) == 1
    tokens = [sum(step.record["tokens"] for step in uninterrupted.steps)]
    if is_017():  # its save after the loop is not logged
        tokens = []
    assert [replica.progress_tokens for replica in rest.replicas] == [tokens, tokens]
    assert "(45 of 45 requested)" in rest.summary
    again = megatron.train(
        "--odb", "--odb-policy", policy, *FLAGS, *data_flags, "--load", folder, *_saving(folder)
    )
    assert again.steps == []
    assert "no optimizer step was run" in again.replicas[0].output
    assert [where for where, _ in again.evaluations] == [f"iteration {last} on validation set"]


def test_torch_dist_checkpoints(
    megatron: Megatron, data_flags: tuple[str, ...], whole: dict[str, Run], tmp_path: Path
) -> None:
    flags = ("--odb", "--odb-policy", "cost", *FLAGS, "--ckpt-format", "torch_dist", *data_flags)
    first = megatron.train(*flags, "--exit-interval", STOP, *_saving(tmp_path))
    rest = megatron.train(*flags, "--load", tmp_path)
    _assert_continues(first, rest, whole["cost"])


def test_a_padded_run_goes_on_packed(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    stopped: dict[str, tuple[Path, Run]],
) -> None:
    folder, first = stopped["padded"]
    rest = megatron.train("--odb", *FLAGS, *data_flags, "--load", folder)
    assert "odb: no data state in the checkpoint of iteration 3" in rest.replicas[0].output
    _assert_continues(first, rest, whole["samples"], within=1e-5)


def test_samples_goes_on_without_its_data_state(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    stopped: dict[str, tuple[Path, Run]],
    tmp_path: Path,
) -> None:
    folder, first = stopped["samples"]
    copy = _copied(folder, tmp_path, drop=(0, 1))
    rest = megatron.train("--odb", *FLAGS, *data_flags, "--load", copy)
    assert (
        "odb: warning: the data state is gone from the checkpoint of iteration 3; the data goes on "
        "at sample 24" in rest.replicas[0].output
    )
    _assert_continues(first, rest, whole["samples"])


@pytest.mark.parametrize("gone", [0, 1])
def test_a_part_of_the_data_state_is_refused(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    stopped: dict[str, tuple[Path, Run]],
    tmp_path: Path,
    gone: int,
) -> None:
    copy = _copied(stopped["cost"][0], tmp_path, drop=(gone,))
    errors = megatron.refused("--odb", "--odb-policy", "cost", *FLAGS, *data_flags, "--load", copy)
    for error in errors:
        assert f"replica-{gone:05d}.json" in error
        assert "ValueError" in error


def test_cost_without_its_data_state_is_refused_unless_told(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    stopped: dict[str, tuple[Path, Run]],
    tmp_path: Path,
) -> None:
    copy = _copied(stopped["cost"][0], tmp_path, drop=(0, 1))
    flags = ("--odb", "--odb-policy", "cost", *FLAGS, *data_flags, "--load", copy)
    for error in megatron.refused(*flags):
        assert "and those of all other replicas are missing, and the checkpoint was saved" in error
    rest = megatron.train(*flags, "--no-odb-resume-strict")
    assert "the data state is gone from the checkpoint of iteration 3" in rest.replicas[0].output
    assert rest.steps[-1].record["consumed_samples"] == 45


def test_files_of_another_save_are_refused(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    stopped: dict[str, tuple[Path, Run]],
    tmp_path: Path,
) -> None:
    copy = _copied(stopped["cost"][0], tmp_path, drop=())
    path = copy / f"iter_{STOP:07d}" / "odb" / "replica-00001.json"
    path.write_text(path.read_text() + " ")
    for error in megatron.refused(
        "--odb", "--odb-policy", "cost", *FLAGS, *data_flags, "--load", copy
    ):
        assert "are not those that the checkpoint was saved with (digest 2:" in error


def test_a_killed_job_goes_on(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kill -9` of all processes in the middle of a step; a checkpoint after every second one."""
    killed_in = random.SystemRandom().randint(3, 6)
    last_saved = 2 if killed_in < 5 else 4
    flags = ("--odb", "--odb-policy", "cost", *FLAGS, *data_flags)
    saving = ("--save", tmp_path, "--save-interval", 2)
    lost = megatron.killed(*flags, *saving, killed_in=killed_in)
    assert [step.iteration for step in lost] == list(range(1, killed_in))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last_saved)
    log = megatron.log_folder
    rest = megatron.train(*flags, "--load", tmp_path, "--odb-log-dir", log)
    assert "  sources since the start, before the resume too:" in rest.summary
    assert _source_lines(rest) == _source_lines(whole["cost"])
    steps = whole["cost"].steps
    for resumed, expected in ((lost, steps[: killed_in - 1]), (rest.steps, steps[last_saved:])):
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
    megatron: Megatron, data_flags: tuple[str, ...], whole: dict[str, Run], tmp_path: Path
) -> None:
    flags = ("--odb", "--odb-policy", "cost", *FLAGS, *data_flags)
    saving = (*_saving(tmp_path), "--exit-signal-handler")
    first = megatron.train(*flags, *saving, terminated_in=STOP)
    assert all(replica.exited for replica in first.replicas)
    _assert_continues(first, megatron.train(*flags, "--load", tmp_path), whole["cost"])


@pytest.mark.parametrize(("when", "loaded"), [("before", 2), ("after", 4)])
def test_a_stop_between_data_state_and_model(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    tmp_path: Path,
    when: str,
    loaded: int,
) -> None:
    flags = ("--odb", "--odb-policy", "cost", *FLAGS, *data_flags)
    saving = ("--save", tmp_path, "--save-interval", 2)
    errors = megatron.refused(*flags, *saving, save_fails=(when, 4))
    assert errors == [f"OSError: stopped {when} the save"] * 2
    staged = tmp_path / "odb-staged" / "0000004"
    assert sorted(path.name for path in staged.iterdir()) == [
        "replica-00000.json",
        "replica-00001.json",
    ]
    assert not (tmp_path / "iter_0000004" / "odb").exists()
    rest = megatron.train(*flags, "--load", tmp_path, "--save", tmp_path, "--save-interval", 5)
    assert [step.iteration for step in rest.steps] == list(range(loaded + 1, 7))
    assert [step.ids for step in rest.steps] == [s.ids for s in whole["cost"].steps[loaded:]]
    assert not staged.parent.exists()
    assert (tmp_path / "iter_0000004" / "odb").exists() == (when == "after")


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
    """Megatron runs step 4 again and exits; it saves first where the loss is NaN again.

    0.17 saves whatever the second loss is.
    """
    loaded = 3 if is_017() else loaded
    flags = ("--odb", "--odb-policy", "cost", "--train-samples", 45, *data_flags)
    flags += ("--ckpt-format", "torch_dist", *shlex.split(topology))
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


@pytest.mark.parametrize(
    "how",
    [
        ("--async-save",),
        ("--non-persistent-save-interval", 1, "--non-persistent-ckpt-type", "global"),
    ],
)
def test_asynchronous_and_non_persistent_saves(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    tmp_path: Path,
    how: tuple[Any, ...],
) -> None:
    flags = ("--odb", "--odb-policy", "cost", *FLAGS, *data_flags, "--ckpt-format", "torch_dist")
    first = megatron.train(*flags, *how, "--exit-interval", STOP, *_saving(tmp_path))
    assert "Overwriting old incomplete" not in first.replicas[0].output
    rest = megatron.train(*flags, *how[-2:], "--load", tmp_path)
    _assert_continues(first, rest, whole["cost"])
    assert list(tmp_path.rglob("odb-staged")) == []


def test_a_padded_run_goes_on_with_cost(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    stopped: dict[str, tuple[Path, Run]],
) -> None:
    folder, first = stopped["padded"]
    rest = megatron.train("--odb", "--odb-policy", "cost", *FLAGS, *data_flags, "--load", folder)
    assert sorted(first.all_ids + rest.all_ids) == whole["samples"].all_ids


@pytest.mark.parametrize(("saved", "loaded"), [POLICIES, POLICIES[::-1]])
def test_another_policy_is_refused(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    stopped: dict[str, tuple[Path, Run]],
    saved: str,
    loaded: str,
) -> None:
    flags = ("--odb", "--odb-policy", loaded, *FLAGS, *data_flags, "--load", stopped[saved][0])
    expected = (
        f"ValueError: data state was saved with policy={saved}, this run has {loaded}: resume with "
        "the same setting, or start the data anew (--finetune)"
    )
    assert megatron.refused(*flags) == [expected] * 2


def test_samples_resumes_on_another_number_of_replicas(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    stopped: dict[str, tuple[Path, Run]],
) -> None:
    folder, first = stopped["samples"]
    flags = ("--odb", *FLAGS, *data_flags, "--load", folder, "--ckpt-step", STOP)
    rest = megatron.train(*flags, replicas=1)
    assert {step.iteration for step in rest.steps} == {4, 5, 6}
    _assert_continues(first, rest, whole["samples"], within=1e-5)


def test_cost_resumes_on_another_number_of_replicas(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    stopped: dict[str, tuple[Path, Run]],
    tmp_path: Path,
) -> None:
    """2 -> 1 -> 2 replicas: every sample once."""
    folder, first = stopped["cost"]
    flags = ("--odb", "--odb-policy", "cost", *FLAGS, *data_flags)
    stop = ("--ckpt-step", STOP, *_saving(tmp_path), "--exit-interval", STOP + 1)
    middle = megatron.train(*flags, "--load", folder, *stop, replicas=1)
    assert len(middle.steps) == 1
    last = megatron.train(*flags, "--load", tmp_path)
    ids = sorted(first.all_ids + middle.all_ids + last.all_ids)
    assert ids == whole["samples"].all_ids
    assert last.steps[-1].record["consumed_samples"] == 45


@pytest.mark.parametrize("policy", POLICIES)
def test_other_data_is_refused(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    stopped: dict[str, tuple[Path, Run]],
    policy: str,
) -> None:
    flags = ("--odb", "--odb-policy", policy, *FLAGS, *data_flags, "--load", stopped[policy][0])
    for error in megatron.refused(*flags, "--seed", 99):
        assert "was saved with other data (seed of " in error
        assert "1234 then, 99 now" in error


def test_finetune_starts_the_data_anew(
    megatron: Megatron,
    data_flags: tuple[str, ...],
    whole: dict[str, Run],
    stopped: dict[str, tuple[Path, Run]],
) -> None:
    folder, _ = stopped["cost"]
    run = megatron.train("--odb", *FLAGS, *data_flags, "--load", folder, "--finetune")
    assert [step.all_ids for step in run.steps] == [s.all_ids for s in whole["samples"].steps]
    assert run.losses[0] < whole["samples"].losses[0] - 0.3  # the weights are those loaded


@pytest.mark.parametrize("replica", [0, 1])
def test_the_state_is_small_json(stopped: dict[str, tuple[Path, Run]], replica: int) -> None:
    folder, first = stopped["cost"]
    path = folder / "iter_0000003" / "odb" / f"replica-{replica:05d}.json"
    state = json.loads(path.read_text())
    assert state["tokens_so_far"] == sum(step.record["tokens"] for step in first.steps)
    assert state["planner"]["consumed"] == first.steps[-1].record["consumed_samples"]
    assert path.stat().st_size < 3000


def _saving(folder: Path) -> tuple[Any, ...]:
    return "--save", folder, "--save-interval", 100


def _copied(folder: Path, target: Path, *, drop: tuple[int, ...]) -> Path:
    """A copy of a checkpoint folder, without some replicas' data state."""
    copy = target / "copy"
    copy.mkdir()
    (copy / "latest_checkpointed_iteration.txt").write_text(str(STOP))
    (copy / f"iter_{STOP:07d}" / "odb").mkdir(parents=True)
    source = folder / f"iter_{STOP:07d}"
    (copy / source.name / "mp_rank_00").symlink_to(source / "mp_rank_00")
    for replica in range(2):
        name = f"odb/replica-{replica:05d}.json"
        if replica not in drop:
            (copy / source.name / name).write_text((source / name).read_text())
    return copy


def _source_lines(run: Run) -> list[str]:
    """What the summary says of each source."""
    lines = run.summary[run.summary.index("  sources") :].splitlines()[1:]
    return [line for line in lines if " loss tokens; left out: " in line]


def _assert_continues(first: Run, rest: Run, whole: Run, *, within: float = 1e-6) -> None:
    """`first` and then `rest` are what `whole` is, step by step."""
    assert len(first.steps) == STOP < len(whole.steps)
    both = [*first.steps, *rest.steps]
    assert [step.iteration for step in both] == [step.iteration for step in whole.steps]
    assert [step.all_ids for step in both] == [step.all_ids for step in whole.steps]
    assert [step.loss for step in both] == pytest.approx(whole.losses, abs=within)
    rates = {**first.replicas[0].learning_rates, **rest.replicas[0].learning_rates}
    assert rates == pytest.approx(whole.replicas[0].learning_rates)
