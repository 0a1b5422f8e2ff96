"""Real `pretrain()` runs: every sample once, counters that add up, LR, FLOPs, losses, masks.

The expectations are counted by hand from the data and the step logs. Nothing here looks inside the
planner.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_world import GLOBAL_BATCH_SIZE, SEQ_LENGTH, ChatFile, Megatron, Run, write_chats

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

NUM_SAMPLES = 41  # five steps of 8 and one of 1, in which a replica idles; odd, too
WARMUP = 10


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def run(megatron: Megatron, data_flags: tuple[str, ...], saved: Path) -> Run:
    """A run of 41 samples, with a save every second step."""
    return megatron.train(
        *("--odb", "--train-samples", NUM_SAMPLES, *data_flags),
        *("--lr-warmup-samples", WARMUP, "--log-progress", "--ckpt-format", "torch"),
        *("--save", saved, "--save-interval", 2, "--log-throughput"),
    )


def test_each_sample_is_emitted_exactly_once(run: Run) -> None:
    assert NUM_SAMPLES % GLOBAL_BATCH_SIZE
    assert NUM_SAMPLES % 2
    assert len(set(run.all_ids)) == len(run.all_ids) == NUM_SAMPLES
    assert {name.partition("@")[2] for name in run.all_ids} == {"0"}


def test_consumed_samples_and_batch_size_are_those_of_each_step(run: Run) -> None:
    consumed = 0
    for step, line in zip(run.steps, run.lines, strict=True):
        assert line.iteration == step.iteration
        assert line.global_batch_size == len(step.all_ids) == step.record["samples"]
        consumed += len(step.all_ids)
        assert line.consumed == consumed == step.record["consumed_samples"]
    assert consumed == NUM_SAMPLES
    assert "samples (41 of 41 requested)" in run.summary
    assert "not reached" not in run.summary


def test_the_loop_ends_with_the_last_sample(run: Run, saved: Path) -> None:
    last = len(run.steps)
    for replica in run.replicas:
        assert replica.final["train_iters"] == last
        assert replica.final["consumed_train_samples"] == NUM_SAMPLES
    assert run.lines[-1].train_iters == last
    assert run.evaluations == [
        (f"iteration {last} on validation set", pytest.approx(run.losses[-1], abs=2.0))
    ]
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert (saved / f"iter_{last:07d}" / "mp_rank_00").is_dir()


def test_learning_rate_is_the_schedulers_at_the_consumed_samples(run: Run) -> None:
    expected = [_learning_rate(step.record["consumed_samples"]) for step in run.steps]
    for replica in run.replicas:
        assert list(replica.learning_rates.values()) == pytest.approx(expected, rel=1e-9)
    assert expected[-1] == pytest.approx(1e-3)
    assert len(set(expected)) == len(expected)


def test_flops_count_real_tokens(run: Run, chats: ChatFile) -> None:
    """Megatron asks for them twice in an iteration, for the total and for its log line."""
    for replica in run.replicas:
        assert len(replica.flops) == 2 * len(run.steps)
        for step, *calls in zip(run.steps, replica.flops[::2], replica.flops[1::2], strict=True):
            tokens, squared, _ = chats.sums(step.all_ids)
            assert calls == [(len(step.all_ids), tokens, squared)] * 2


def test_a_replica_idles_in_the_last_step(run: Run) -> None:
    last = run.steps[-1]
    assert sorted(len(ids) for ids in last.ids) == [0, 1]
    assert last.record["idle"] == 1


def test_samples_move_to_even_out_the_replicas(run: Run) -> None:
    moved = sum(step.record["moved"] for step in run.steps)
    assert moved > 0
    assert sum(step.record["bytes_moved"] for step in run.steps) > 32 * moved
    assert all(step.record["balance"] > 0.8 for step in run.steps[:-1])
    assert f"  samples moved       {moved} of {NUM_SAMPLES} " in run.summary


def test_tokens_of_steps_are_real(run: Run, chats: ChatFile) -> None:
    for step in run.steps:
        tokens, _, loss_tokens = chats.sums(step.all_ids)
        assert (step.record["tokens"], step.record["loss_tokens"]) == (tokens, loss_tokens)


def test_every_replica_runs_m_micro_batches(run: Run) -> None:
    for replica in run.replicas:
        planned = {record["iteration"]: record["num_micro_batches"] for record in replica.steps}
        assert replica.forwards == planned
        for record in replica.steps:
            assert len(record["ids"]) == record["num_micro_batches"]
            assert all(sum(lengths) <= SEQ_LENGTH for lengths in record["lengths"])


def test_losses_are_logged_alike_and_fall(run: Run) -> None:
    losses = run.losses
    first, second = losses[0], losses[1]
    printed = [first, (first + second) / 2, *losses[2:]]  # Megatron's second line averages two
    assert [line.loss for line in run.lines] == pytest.approx(printed, rel=1e-5)
    assert all(line.skipped == line.nan == 0 for line in run.lines)
    assert losses[-1] < losses[0] - 0.5


def test_two_epochs(megatron: Megatron, data_flags: tuple[str, ...], chats: ChatFile) -> None:
    run = megatron.train("--odb", "--odb-epochs", 2, *data_flags)
    wanted = Counter(f"0:{record}@{epoch}" for record in range(len(chats)) for epoch in (0, 1))
    assert Counter(run.all_ids) == wanted
    epochs = [[int(name[-1]) for name in step.all_ids] for step in run.steps]
    assert all(max(one) <= min(next_) for one, next_ in pairwise(epochs))
    assert run.replicas[0].learning_rates[len(run.steps)] == pytest.approx(1e-3)


def test_length_in_iterations_is_iterations_of_the_batch_size(
    megatron: Megatron, data_flags: tuple[str, ...]
) -> None:
    run = megatron.train("--odb", "--train-iters", 5, *data_flags)
    assert len(set(run.all_ids)) == 5 * GLOBAL_BATCH_SIZE
    assert run.replicas[0].learning_rates[5] == pytest.approx(1e-3)
    assert len(run.steps) == 5


def test_fewer_samples_than_a_batch(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    run = megatron.train("--odb", "--train-samples", 1, *data_flags)
    assert [step.all_ids for step in run.steps] == [run.all_ids]
    assert run.lines[0].global_batch_size == len(run.all_ids) == 1
    assert len(run.evaluations) == 1


def test_m_changes_every_step(megatron: Megatron) -> None:
    """GBS 8 and a budget of 64, the lengths laid out in the stream's own order."""
    by_m = {1: [15] * 8, 2: [31] * 8, 3: [60] * 4 + [30] * 4, 4: [60] * 8}
    wanted = [4, 2, 1, 3, 4]
    lengths = [length for m in wanted for length in by_m[m]]
    items = _in_order([_item(length) for length in lengths], seed=1234)
    run = megatron.train("--odb", "--train-samples", 40, "--eval-iters", 0, items=items)
    for replica in run.replicas:
        assert list(replica.forwards.values()) == wanted


def test_replicas_do_not_change_the_losses(megatron: Megatron, data_flags: tuple[str, ...]) -> None:
    flags = ("--odb", "--train-samples", NUM_SAMPLES, *data_flags)
    alone = megatron.train(*flags, replicas=1)
    both = megatron.train(*flags)
    assert [step.all_ids for step in alone.steps] == [step.all_ids for step in both.steps]
    assert alone.losses == pytest.approx(both.losses, abs=1e-5)
    assert alone.evaluations[0][1] == pytest.approx(both.evaluations[0][1], abs=1e-5)


def test_a_batch_without_loss_tokens(megatron: Megatron, tokenizer_folder: Path) -> None:
    """Step 2 of 4 and the evaluation are cut to questions, and half of step 3."""
    long, short = ("red " * 70, "blue"), ("one two", "three")
    order = _stream_order(16, seed=1234)
    cut = {*order[4:8], *order[9:12:2]}
    records = [long if record in cut else short for record in range(16)]
    data = write_chats(tokenizer_folder, name="masked", records=records)
    questions = write_chats(tokenizer_folder, name="masked_valid", records=[long] * 8)
    flags = (
        *("--odb", "--train-samples", 16, "--global-batch-size", 4, "--eval-iters", 2),
        *("--odb-overlong", "truncate", "--train-data-path", data.path),
        *("--valid-data-path", questions.path),
    )
    run = megatron.run(*flags)
    for replica in run.replicas:
        assert "none of the 8 samples evaluated has a loss token" in replica.error
    assert [step.record["loss_tokens"] for step in run.steps] == [8, 0, 4, 8]
    assert [step.record["loss"] == 0.0 for step in run.steps] == [False, True, False, False]
    assert run.steps[1].record["grad_norm"] == 0.0
    assert all(math.isfinite(loss) for loss in run.losses)
    assert all(line.skipped == line.nan == 0 for line in run.lines)
    assert run.evaluations == [("iteration 4 on validation set", 0.0)]
    assert "truncated: 6" in run.summary
    alone = megatron.run(*flags, replicas=1)
    assert alone.losses == pytest.approx(run.losses, abs=1e-5)
    nothing = ("--train-data-path", questions.path, "--valid-data-path", data.path)
    for error in megatron.refused(*flags, *nothing, "--train-samples", 8):
        assert "nothing was learnt: none of the 8 samples trained has a loss token" in error


def test_beside_other_flags_of_megatrons(
    megatron: Megatron, data_flags: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    """Logging, timing, recomputation, checks: they see whole batch sizes and change no loss."""
    other = megatron.train(
        *("--odb", "--train-samples", NUM_SAMPLES, *data_flags),
        *("--lr-warmup-samples", WARMUP, "--log-interval", 2, "--tensorboard-dir", tmp_path),
        *("--log-timers-to-tensorboard", "--timing-log-level", 2, "--log-params-norm"),
        *("--log-num-zeros-in-grad", "--recompute-granularity", "full", "--manual-gc"),
        *("--recompute-method", "uniform", "--recompute-num-layers", 1, "--log-straggler"),
        *("--check-for-spiky-loss", "--check-weight-hash-across-dp-replicas-interval", 2),
        "--disable-gloo-process-groups",
    )
    assert other.losses == pytest.approx(run.losses, abs=1e-6)
    assert [step.all_ids for step in other.steps] == [step.all_ids for step in run.steps]
    assert [line.iteration for line in other.lines[1:]] == [2, 4, 6][: len(other.steps) // 2]
    assert list(tmp_path.glob("events.out.tfevents*"))


def _learning_rate(consumed: int) -> float:
    """Megatron's linear warm-up and cosine decay, in samples."""
    if consumed <= WARMUP:
        return 1e-2 * consumed / WARMUP
    done = (consumed - WARMUP) / (NUM_SAMPLES - WARMUP)
    return 1e-3 + 9e-3 * (1 + math.cos(math.pi * done)) / 2


def _stream_order(size: int, *, seed: int) -> list[int]:
    """Record at each position of the first epoch."""
    return np.random.RandomState([seed, 0]).permutation(size).tolist()


def _in_order(items: list[Any], *, seed: int) -> tuple[list[Any], None, None]:
    """A training set whose stream gives `items` in this order."""
    placed: list[Any] = [None] * len(items)
    for item, record in zip(items, _stream_order(len(items), seed=seed), strict=True):
        placed[record] = item
    return placed, None, None


def _item(length: int) -> dict[str, Any]:
    tokens = (np.arange(length + 1) * 7) % 250
    return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": np.ones(length)}
