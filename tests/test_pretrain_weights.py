"""Loss weights in `pretrain()`: every step against a plain PyTorch loop over the same samples."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from megatron_world import WORDS, Megatron, Run
from parallel_runs import EXPERTS, MODEL

pytest_plugins = ["megatron_fixtures"]
pytestmark = pytest.mark.megatron

NUM_STEPS, BATCH = 3, 8
TRAIN = ("--train-samples", NUM_STEPS * BATCH, "--odb-overlong", "truncate")
PACKED = ("--odb", "--odb-token-budget", 64)

Item = dict[str, Any]


def items(*weights: float, seed: int = 0, count: int = BATCH) -> list[Item]:
    """Samples of three turns each, whose weights are drawn from those given; never all 0."""
    random_ = random.Random(seed)
    found = []
    for _ in range(count):
        turns = [random_.randrange(1, 20) for _ in range(3)]
        ids = [random_.randrange(1, 256) for _ in range(sum(turns) + 1)]
        drawn = [random_.choice(weights) for _ in turns[1:]] + [max(weights)]
        mask = [weight for weight, length in zip(drawn, turns, strict=True) for _ in range(length)]
        found.append({"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask})
    return found


WEIGHED = items(0, 0.3, 1, 2.5)


@pytest.mark.parametrize("packed", [PACKED, ("--micro-batch-size", 2)], ids=["packed", "padded"])
@pytest.mark.parametrize("per", ["token", "sample"])
def test_gradients_are_those_of_a_plain_loop(
    megatron: Megatron, per: str, packed: tuple[Any, ...]
) -> None:
    """Two replicas with several micro-batches each."""
    run = megatron.train(
        *(*packed, *TRAIN, "--odb-loss-per", per, "--eval-iters", 1),
        items=(WEIGHED, items(0, 0.7, 1, seed=1), None),
        compared_with=per,
    )
    assert min(len(one.record["lengths"]) for one in run.steps) > 1
    _assert_plain(run)
    weight = sum(sum(item["loss_mask"]) for item in WEIGHED) if per == "token" else BATCH
    tokens = sum(weight > 0 for item in WEIGHED for weight in item["loss_mask"])
    for step in run.steps:
        assert step.record["loss_weight"] == pytest.approx(weight, rel=1e-6)
        assert step.record["loss_tokens"] == tokens


@pytest.mark.parametrize("weights", [(0, 1), (0, 1, 2)])
def test_whole_weights_need_no_flag(megatron: Megatron, weights: tuple[int, ...]) -> None:
    run = megatron.train(
        *(*PACKED, *TRAIN, "--eval-iters", 0),
        items=(items(*weights), None, None),
        compared_with="token",
    )
    _assert_plain(run)


def test_evaluation_is_that_of_the_padded_baseline(megatron: Megatron) -> None:
    data = (WEIGHED, items(0, 0.7, 1, seed=1, count=20), None)
    flags = (*TRAIN, "--odb-loss-per", "sample", "--eval-iters", 2, "--eval-interval", 2)
    runs = [megatron.train(*flags, *form, items=data) for form in (PACKED, ())]
    packed, padded = ([loss for _, loss in run.evaluations] for run in runs)
    assert len(packed) == 2
    assert packed == pytest.approx(padded, abs=1e-5)


@pytest.mark.parametrize(
    "model", [f"{EXPERTS} --moe-z-loss-coeff 0.01", "--mtp-num-layers 1"], ids=["experts", "mtp"]
)
def test_other_losses_do_not_depend_on_the_scale(megatron: Megatron, model: str) -> None:
    """Nor on weights that are all the same: only their ratios count."""
    norms = []
    for weights, flags in (((0, 1), ()), ((0, 0.25), ("--odb-loss-per", "token"))):
        run = megatron.train(
            *(*MODEL, *PACKED, *TRAIN, *flags, "--eval-iters", 0, *shlex.split(model)),
            items=(items(*weights), None, None),
        )
        norms.append([step.record["grad_norm"] for step in run.steps])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_fractions_without_a_flag_are_refused(megatron: Megatron) -> None:
    errors = megatron.refused(
        *(*PACKED, *TRAIN, "--odb-max-bad-records", 99, "--eval-iters", 0),
        items=(items(0.5), None, None),
    )
    for error in errors:
        assert "a weight of 0.5: Megatron counts tokens in whole numbers" in error
        assert "--odb-loss-per token or --odb-loss-per sample" in error


def _assert_plain(run: Run) -> None:
    assert len(run.steps) == NUM_STEPS
    for outcome in run.replicas:
        losses = [loss for loss, _ in outcome.plain]
        assert losses == pytest.approx(run.losses, abs=1e-5)
        assert max(error for _, error in outcome.plain) < 1e-5


def test_weights_of_turns_come_from_the_chat_file(megatron: Megatron, tmp_path: Path) -> None:
    """The same samples as the user's own items give the same losses."""
    from odb_megatron.data.chat import ChatRenderer
    from odb_megatron.data.chat_record import parse_record
    from odb_megatron.data.tokenizer import load_tokenizer

    random_ = random.Random(3)
    records = []
    for _ in range(BATCH):
        texts = [" ".join(random_.choices(WORDS, k=random_.randrange(1, 9))) for _ in range(4)]
        roles = ("user", "assistant", "user", "assistant")
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        turns[1]["loss"] = random_.choice((False, 0.25, 2.5))
        records.append({"messages": turns})
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    renderer = ChatRenderer(load_tokenizer(megatron.tokenizer))
    rendered = [renderer.render(parse_record(record)) for record in records]
    data = [
        {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": weights[1:]}
        for ids, weights in rendered
    ]
    assert {float(weight) for item in data for weight in item["loss_mask"]} == {0, 0.25, 1, 2.5}
    flags = (*PACKED, *TRAIN, "--odb-loss-per", "token", "--eval-iters", 0)
    own = megatron.train(*flags, items=(data, None, None))
    read = megatron.train(*flags, "--train-data-path", str(chats))
    assert sorted(own.losses) == pytest.approx(sorted(read.losses), abs=1e-6)
