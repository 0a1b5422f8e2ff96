"""Chats with pictures in Megatron's `pretrain()`: packings, parallelisms, exchange, resume.

Every run but the refused ones starts from one checkpoint, whatever its topology.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from image_samples import draw
from megatron_world import WORDS, Megatron, Run
from parallel_runs import MODEL, PP, SP, TP, VPP, assert_equal

pytest.importorskip("megatron.training", reason="needs megatron.training (Python 3.12)")

pytest_plugins = ("megatron_fixtures",)
pytestmark = [pytest.mark.megatron, pytest.mark.slow]

NUM_RECORDS = 24
IMAGES = shlex.split(
    "--position-embedding-type mrope --mrope-section 2 3 3 --odb-image-patch-size 4 "
    "--odb-image-min-pixels 64 --odb-image-max-pixels 768 --vision-layers 1 "
    "--vision-hidden-size 16 --vision-ffn-hidden-size 32 --vision-attention-heads 2"
)
ALL = (*MODEL, *IMAGES, "--odb", "--train-samples", NUM_RECORDS, "--eval-iters", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """A chat file and a tokenizer with the tokens of images."""

    flags: tuple[str, ...]
    path: Path
    records: tuple[dict[str, Any], ...]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Pictures:
    """Conversations with up to three pictures of many sizes; a quarter have none."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("pictures")
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder), local_files_only=True)
    tokenizer.add_tokens(
        ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"], special_tokens=True
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    generator, records = random.Random(4), []
    for at in range(NUM_RECORDS):
        parts: list[dict[str, Any]] = []
        for number in range(generator.choice([0, 1, 1, 1])):
            size = (generator.randint(8, 60), generator.randint(8, 60))
            name = draw(folder / f"{at}-{number}.png", size=size, seed=100 * at + number).name
            parts.append({"type": "image_url", "image_url": {"url": name}})
        words = [generator.choice(WORDS) for _ in range(generator.randint(1, 6))]
        parts.append({"type": "text", "text": " ".join(words)})
        answer = " ".join(generator.choice(WORDS) for _ in range(generator.randint(1, 8)))
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ]
        records.append({"messages": messages})
    path = write(folder / "chat.jsonl", records)
    flags = ("--tokenizer-model", str(folder / "tokenizer"), "--train-data-path", str(path))
    return Pictures(flags=flags, path=path, records=tuple(records))


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def initial(
    megatron: Megatron, pictures: Pictures, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, ...]:
    """All flags, with those of a checkpoint that any topology loads."""
    folder = tmp_path_factory.mktemp("initial")
    save = ("--save", folder, "--save-interval", 100, "--ckpt-format", "torch_dist")
    first = (*ALL, *pictures.flags, "--train-samples", 8, "--odb-token-budget", 128)
    megatron.train(*first, *save, replicas=1, has_images=True)
    load = ("--load", folder, "--ckpt-format", "torch_dist", "--finetune")
    return (*ALL, *pictures.flags, *load, "--no-load-optim", "--no-load-rng")


@pytest.fixture(scope="module")
def alone(megatron: Megatron, initial: tuple[Any, ...]) -> Run:
    """One rank, one sample in each micro-batch but for the shortest."""
    run = train(megatron, initial, "--odb-token-budget", 64, replicas=1)
    assert len(run.steps) == NUM_RECORDS / 8
    return run


def train(megatron: Megatron, initial: tuple[Any, ...], *flags: Any, **case: Any) -> Run:
    return megatron.train(*initial, *flags, has_images=True, **case)


def num_micro_batches(run: Run) -> list[int]:
    return [step.record["num_micro_batches"] for step in run.steps]


def test_loss_does_not_depend_on_the_packing(
    megatron: Megatron, initial: tuple[Any, ...], alone: Run
) -> None:
    packed = train(megatron, initial, "--odb-token-budget", 400, replicas=1)
    assert max(num_micro_batches(packed)) < min(num_micro_batches(alone))
    assert_equal(packed, alone)
    assert packed.losses[-1] < packed.losses[0]
    run = train(megatron, initial, "--odb-token-budget", 128)
    assert sum(step.record["moved"] for step in run.steps) > 0  # with their images
    assert_equal(run, alone)
    padded = ("--odb-token-budget", 256, "--odb-pad-to", "budget")
    assert_equal(train(megatron, initial, *padded, replicas=1), alone)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ((TP,), 2),
        ((TP, SP), 2),
        ((PP,), 2),
        ((VPP,), 2),
        (("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"), 2),
    ],
    ids=["TP", "TP-SP", "PP", "VPP", "sharded"],
)
def test_parallelisms(
    megatron: Megatron,
    initial: tuple[Any, ...],
    alone: Run,
    flags: tuple[str, ...],
    ranks: int,
) -> None:
    words = [word for flag in flags for word in flag.split()]
    run = train(megatron, initial, *words, "--odb-token-budget", 128, replicas=ranks)
    assert_equal(run, alone)
    sends_patches = flags[0] == TP
    record = run.steps[0].record
    assert record["collectives"] == (0 if flags[0].startswith("--use") else 2 + sends_patches)
    if sends_patches:  # a patch has 48 bytes; on a last stage alone they would be for nothing
        assert record["bytes_delivered"] > 4096 + 48 * 100


def test_a_resumed_run_goes_on(
    megatron: Megatron,
    pictures: Pictures,
    initial: tuple[Any, ...],
    alone: Run,
    tmp_path: Path,
) -> None:
    flags = (*initial, "--odb-token-budget", 128, "--save", tmp_path, "--save-interval", 2)
    train(megatron, flags, "--exit-interval", 2)
    own = (*ALL, *pictures.flags, "--odb-token-budget", 128, "--load", tmp_path)
    run = train(megatron, own, "--ckpt-format", "torch_dist")
    assert [step.iteration for step in run.steps] == [3]
    assert run.losses == pytest.approx(alone.losses[2:], abs=1e-5)


def test_the_patch_cap_holds(megatron: Megatron, initial: tuple[Any, ...], alone: Run) -> None:
    flags = ("--odb-token-budget", 400, "--odb-max-patches", 40)
    run = train(megatron, initial, *flags, replicas=1)
    assert_equal(run, alone)
    free = train(megatron, initial, "--odb-token-budget", 400, replicas=1)
    assert sum(num_micro_batches(run)) > sum(num_micro_batches(free))
    held, unheld = (
        [list(step.record["patches"]) for step in of.steps if step.record["patches"]]
        for of in (run, free)
    )
    assert sum(map(sum, held)) == sum(map(sum, unheld)) > 0
    for step in run.steps:
        record = step.record
        assert len(record["patches"]) == len(record["lengths"])
        alone_in_it = [len(lengths) == 1 for lengths in record["lengths"]]
        assert all(
            count <= 40 or one for count, one in zip(record["patches"], alone_in_it, strict=True)
        )
    assert max(map(max, unheld)) > max(map(max, held)) > 0
    output, most = run.replicas[0].output, max(map(max, held))
    assert f"  patches             at most {most} in a micro-batch (--odb-max-patches 40)" in output
    (line,) = (line for line in output.splitlines() if line.startswith("odb: reproduce with"))
    assert "--odb-max-patches 40 " in line
    assert f" {' '.join(word for word in IMAGES[6:12])} --seed" in line
    assert re.search("cost model .*,patch=", run.replicas[0].output)


def test_a_picture_that_is_missing_is_a_bad_record(
    megatron: Megatron, pictures: Pictures, tmp_path: Path
) -> None:
    lost = {"type": "image", "path": "gone.png"}
    messages = [{"role": "user", "content": [lost]}, {"role": "assistant", "content": "yes"}]
    records = [*pictures.records[:8], {"messages": messages}]
    path = write(pictures.path.with_name("lost.jsonl"), records)
    flags = (*ALL, *pictures.flags, "--train-data-path", path, "--train-samples", 9)
    budget = ("--odb-token-budget", 128)
    errors = megatron.refused(*flags, *budget, replicas=1, has_images=True)
    assert "lost.jsonl:9: the picture 'gone.png' in" in errors[0]
    skipped = megatron.train(
        *flags, *budget, "--odb-max-bad-records", 99, replicas=1, has_images=True
    )
    assert len(skipped.all_ids) == 8


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            "--position-embedding-type learned_absolute --context-parallel-size 2",
            ("has no place for images", "size above 1 is not supported with images"),
        ),
        ("--mrope-section 1 1 1", ("--mrope-section sums to 3; expected .* 8",)),
        (
            "--position-embedding-type rope --mtp-num-layers 1",
            ("multi-token prediction embeds shifted tokens by itself",),
        ),
        ("--odb-image-merge 0", ("0 x 0 to a token",)),
        ("--vision-attention-heads 3", ("hidden size 16 with 3 heads",)),
    ],
)
def test_refused(
    megatron: Megatron, pictures: Pictures, flags: str, messages: tuple[str, ...]
) -> None:
    given = (*ALL, *pictures.flags, "--odb-token-budget", 128, *flags.split())
    replicas = 2 if "context" in flags else 1
    error = megatron.refused(*given, replicas=replicas, has_images=True)[0]
    assert all(re.search(one, error) for one in messages), error
