"""Evaluation inside `pretrain()`: the same samples and the same loss, however they are packed."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_world import ChatFile, Megatron, Run

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

TRAIN = ("--train-samples", 24, "--eval-interval", 1)
BATCH = 8


@pytest.fixture(scope="module")
def runs(megatron: Megatron, chats: ChatFile, valid_chats: ChatFile) -> dict[str, Run]:
    """The same weights at every evaluation: packed twice, and padded."""
    flags = ("--train-data-path", chats.path, "--valid-data-path", valid_chats.path)
    flags += (*TRAIN, "--eval-iters", 2)
    return {
        "budget 64": megatron.train("--odb", *flags),
        "budget 160": megatron.train("--odb", "--odb-token-budget", 160, *flags),
        "padded": megatron.train(*flags),
        "2 valid batches": megatron.train("--odb", "--eval-global-batch-size", 4, *flags),
    }


@pytest.mark.parametrize("other", ["budget 160", "padded"])
def test_same_ids_and_loss(runs: dict[str, Run], other: str) -> None:
    packed, compared = runs["budget 64"], runs[other]
    assert compared.losses == pytest.approx(packed.losses, abs=1e-5)
    assert _positions(compared) == _positions(packed)
    assert [where for where, _ in compared.evaluations] == [w for w, _ in packed.evaluations]
    losses = [loss for _, loss in packed.evaluations]
    assert [loss for _, loss in compared.evaluations] == pytest.approx(losses, abs=1e-5)
    assert len(losses) == 4
    assert len(set(losses)) > 1
    counts = [len(runs[name].replicas[0].eval_ids) for name in ("budget 64", "budget 160")]
    assert counts[1] < counts[0]  # packed differently


@pytest.mark.parametrize("name", ["budget 64", "budget 160", "padded"])
def test_ids_are_the_next_of_the_stream(runs: dict[str, Run], name: str) -> None:
    """Megatron's evaluations go on through the validation stream; it has 19 records."""
    run = runs[name]
    evaluations = len(run.evaluations)
    assert evaluations == len(run.steps) + 1
    assert _positions(run) == list(range(evaluations * 2 * BATCH))
    assert run.replicas[0].final["consumed_valid_samples"] == evaluations * 2 * BATCH


def test_evaluation_batch_size(runs: dict[str, Run]) -> None:
    run = runs["2 valid batches"]
    assert _positions(run) == list(range(4 * 2 * 4))
    assert run.replicas[0].final["consumed_valid_samples"] == 32


def test_resume_goes_on_in_the_validation_stream(
    megatron: Megatron, chats: ChatFile, valid_chats: ChatFile, runs: dict[str, Run], tmp_path: Path
) -> None:
    flags = ("--odb", "--train-data-path", chats.path, "--valid-data-path", valid_chats.path)
    flags += (*TRAIN, "--eval-iters", 2, "--ckpt-format", "torch")
    saving = ("--save", tmp_path, "--save-interval", 100)
    first = megatron.train(*flags, *saving, "--exit-interval", 2)
    rest = megatron.train(*flags, "--load", tmp_path)
    assert first.evaluations + rest.evaluations == runs["budget 64"].evaluations
    only = megatron.train(*flags, "--load", tmp_path, "--skip-train")
    assert _positions(only) == list(range(2 * BATCH))
    padded = megatron.train(*flags[1:], "--load", tmp_path, "--skip-train")
    assert _positions(padded) == _positions(only)
    assert only.evaluations[0][1] == pytest.approx(padded.evaluations[0][1], abs=1e-5)
    assert only.evaluations[0][1] != pytest.approx(first.evaluations[0][1], abs=1e-3)
    assert only.steps == []
    assert "no optimizer step was run" in only.replicas[0].output


@pytest.mark.parametrize("odb", [("--odb",), ()])
def test_no_evaluation(megatron: Megatron, chats: ChatFile, odb: tuple[str, ...]) -> None:
    run = megatron.train(
        *(*odb, "--train-data-path", chats.path, "--train-samples", 16, "--eval-iters", 0)
    )
    assert len(run.all_ids) == 16
    assert run.evaluations == []


@pytest.mark.parametrize("odb", [("--odb",), ()])
def test_evaluation_without_data_is_refused(
    megatron: Megatron, chats: ChatFile, odb: tuple[str, ...]
) -> None:
    """Megatron would train first and then fail in its first evaluation."""
    flags = (*odb, "--train-data-path", chats.path, "--train-samples", 16, "--eval-iters", 1)
    errors = megatron.refused(*flags)
    assert errors[0] == errors[1]
    assert "--eval-iters 0" in errors[0]
    assert "--valid-data-path" in errors[0]


def _positions(run: Run) -> list[int]:
    return sorted(position for replica in run.evaluated for position in replica)
