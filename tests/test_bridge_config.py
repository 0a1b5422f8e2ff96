"""Overrides, overlays and refusals of `odb_megatron.bridge`, on Bridge's own configuration."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("megatron") is None or not importlib.util.find_spec("megatron.bridge"):
    pytest.skip(
        "megatron-bridge is not installed here: make test-bridge builds an environment with it",
        allow_module_level=True,
    )

from bridge_run import Bridge
from megatron_world import WORDS, ChatFile
from readme import README, command

pytest_plugins = ["megatron_fixtures", "bridge_fixtures"]
pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

OVERLAY = Path(__file__).parent.parent / "examples" / "nemo" / "odb.yaml"
DRY_RUN = """
import sys
from odb_megatron.testing import bridge_cpu
bridge_cpu.activate()
from odb_megatron.bridge import run_recipe
run_recipe.main(sys.argv[1:])
"""
SHORT = ("train.train_iters=2", "validation.eval_iters=0")


def test_one_override(bridge: Bridge, chats: ChatFile) -> None:
    """The one-line override of the README: the recipe's data, a budget."""
    run = bridge.train(
        *SHORT,
        "dataset.odb.token_budget=96",
        f"dataset.blend=[[{chats.path}],null]",
        own_data=False,
    )
    assert [record["samples"] for record in run.records] == [8, 8]
    assert f"dataset.odb over {chats.path}" in run.output


def test_the_command_of_the_readme(chats: ChatFile, tmp_path: Path) -> None:
    """Up to where training would start."""
    words = command("odb_megatron.bridge.run_recipe", "torchrun")
    script = words[words.index("-m") :]
    shutil.copy(chats.path, tmp_path / "chats.jsonl")
    done = subprocess.run(
        [sys.executable, "-c", DRY_RUN, *script[2:], "--dry-run"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(README.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [line for line in done.stdout.splitlines() if line.startswith("odb: ")]
    assert len(printed) == 1
    assert printed[0].startswith("odb: set model.calculate_per_token_loss=True (was False), train.")


def test_overlay_of_the_examples(bridge: Bridge) -> None:
    run = bridge.train(*SHORT, "dataset.odb.token_budget=96", options=("--config", str(OVERLAY)))
    assert (
        "odb: reproduce with dataset.odb.token_budget=96 dataset.odb.overlong=truncate "
        "dataset.odb.max_bad_records=100 "
    ) in run.output
    assert [record["samples"] for record in run.records] == [8, 8]


def test_enable(bridge: Bridge, chats: ChatFile) -> None:
    """The Python form; Bridge's own overrides reach the settings afterwards."""
    run = bridge.train(
        *SHORT,
        settings={"token_budget": 4096, "data_path": chats.path, "split": "90,10,0"},
        after=["dataset.odb.token_budget=96"],
    )
    assert {rank.dataset for rank in run.ranks} == {"OdbDatasetConfig"}
    assert "dataset.odb.token_budget=96" in run.output
    assert [record["samples"] for record in run.records] == [8, 8]


def test_data_set_of_a_fine_tuning_recipe(bridge: Bridge, tmp_path: Path) -> None:
    """Bridge's own text SFT data set: its templates and its loss masks."""
    generator = random.Random(3)
    for name in ("training", "validation"):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for _ in range(24):
                texts = [generator.choices(WORDS, k=generator.randint(1, 12)) for _ in range(2)]
                record = dict(zip(("input", "output"), map(" ".join, texts), strict=True))
                file.write(json.dumps(record) + "\n")
    run = bridge.train(
        "dataset.odb.token_budget=96",
        "train.train_iters=3",
        "validation.eval_interval=100",
        f"dataset.dataset_root={tmp_path}",
        recipe="tiny_sft_config",
        options=("--mode", "pretrain"),
        own_data=False,
    )
    assert "dataset.odb over the recipe's GPTSFTDatasetConfig" in run.output
    ids = [name for step in run.ids for name in step]
    assert sorted(ids) == sorted(f"0:{record}@0" for record in range(24))  # one pass
    lines = [json.loads(line) for line in (tmp_path / "training.jsonl").open()]
    for record, step in zip(run.records, run.ids, strict=True):
        texts = [lines[int(name.split(":")[1].split("@")[0])] for name in step]
        assert 0 < record["loss_tokens"] < record["tokens"]
        words = sum(len(f"{text['input']} {text['output']}".split()) for text in texts)
        assert record["tokens"] >= words
    assert "validation loss at iteration 3 on validation set" in run.ranks[-1].output


OWN_DATA = {"own_data": False}
REFUSED: list[tuple[dict[str, object], str]] = [
    *(
        ({"overrides": [override]}, text)
        for override, text in (
            ("dataset.odb.token_budgt=96", "did you mean dataset.odb.token_budget?"),
            ("dataset.odb.nothing=1", "is no dataset.odb.nothing: the settings are token_budget, "),
            ("dataset.odb.token_budget=many", "token_budget is 'many': expected a whole"),
            ("dataset.odb.dry_run=1", "dataset.odb.dry_run is 1: give true or false"),
            ("dataset.odb.order=batch", "dataset.odb.order is 'batch': give single"),
            ("dataset.nothing=1", "the configuration has no dataset.nothing"),
            ("dataset.odb.pad_to=[1", "dataset.odb.pad_to=[1: "),
            ("~dataset", "~dataset: Bridge keeps what is not named"),
            ("dataset=null", "in this recipe and cannot be None: change dataset.KEY"),
            ("+dataset._target_=somewhere.Nothing", "_target_ would make another object of a"),
            ("dataset.odb.train_data_path=/nope.jsonl", "/nope.jsonl does not exist"),
            ("model.num_moe_experts=4", "routers of a mixture of experts no padding mask"),
        )
    ),
    *(
        ({"overlay": overlay}, text)
        for overlay, text in (
            ("dataset:\n  nothing: 1\n", "the configuration has no dataset.nothing"),
            ("dataset:\n  odb: 16384\n", "dataset.odb a int; expected 'external' and OdbSettings"),
            ("- 1\n", "holds no mapping"),
            ("dataset:\n  _target_: somewhere.Nothing\n", "_target_ would make another object"),
            ("model:\n  num_layers:\n    one: 1\n", "no model.num_layers.one"),
        )
    ),
    *(
        ({"options": options.split()}, text)
        for options, text in (
            ("--recipe llama32_1b_sft", "did you mean llama32_1b_sft_config"),
            ("--step bridge_recipe:nothing", "bridge_recipe has no function nothing"),
            ("--config /no/such.yaml", "the overlay /no/such.yaml cannot be read"),
            ("--nothing", "there is no option --nothing"),
            ("nothing", "an override has the form KEY=VALUE, got 'nothing'"),
        )
    ),
    *(
        ({"recipe": recipe, "overrides": overrides, **OWN_DATA}, text)
        for recipe, overrides, text in (
            ("tiny_pretrain_config", [], "the recipe trains on mock data"),
            (
                "tiny_sft_config",
                ["dataset.enable_offline_packing=true"],
                "dataset.odb and dataset.enable_offline_packing: both pack",
            ),
            ("tiny_packed_config", [], "dataset.odb and dataset.enable_in_batch_packing: both"),
            (
                "tiny_packed_config",
                ["dataset.enable_in_batch_packing=false"],
                "dataset.odb does not read DirectHFSFTDatasetConfig in this version",
            ),
        )
    ),
]


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=[text[:50] for _, text in REFUSED])
def test_what_cannot_be_used(
    bridge: Bridge, tmp_path: Path, given: dict[str, Any], text: str
) -> None:
    options = ["--dry-run", "--mode", "pretrain", *given.pop("options", [])]
    if overlay := given.pop("overlay", ""):
        (tmp_path / "overlay.yaml").write_text(overlay)
        options += ["--config", str(tmp_path / "overlay.yaml")]
    assert text in bridge.refused(*given.pop("overrides", []), options=options, **given)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.mtp_num_layers=1"], "drop model.mtp_num_layers"),
        (
            ["validation.full_validation=true"],
            "Bridge does not read it",
        ),
        (["train.decrease_batch_size_if_needed=true"], "drop train.decrease_batch_size_if_needed"),
        (["checkpoint.non_persistent_ckpt_type=local"], "checkpoint.non_persistent_ckpt_type"),
        (["dataset.eod_mask_loss=true"], "drop dataset.eod_mask_loss"),
        (["train.train_iters=0"], "SystemExit: 2"),
        (["dataset.odb.data_path=x.jsonl"], "dataset.odb.data_path is for all splits, and"),
        (["dataset.odb.token_budget=32"], "dataset.odb.token_budget 32 is below model.seq_length"),
        (["validation.eval_micro_batch_size=2", "train.global_batch_size=8"], ""),
    ],
)
def test_configuration_that_cannot_be_used(bridge: Bridge, overrides: list[str], text: str) -> None:
    if text:
        assert text in bridge.refused(*SHORT, *overrides)
    else:
        assert (
            "validation.eval_micro_batch_size=1 (was 2)" in bridge.train(*SHORT, *overrides).output
        )


@pytest.mark.parametrize(
    ("settings", "after", "text"),
    [
        ({"tokens": 1}, [], "there is no dataset.odb.tokens: the settings are token_budget, "),
        ({}, ["dataset.dataloader_type=batch"], "drop the override that changes them"),
        ({}, ["train.micro_batch_size=2"], "dataset.odb needs train.micro_batch_size 1"),
    ],
)
def test_enable_refuses(
    bridge: Bridge, chats: ChatFile, settings: dict[str, object], after: list[str], text: str
) -> None:
    given = {"data_path": chats.path, **settings}
    assert text in bridge.refused(*SHORT, settings=given, after=after)


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("cfg.dataset = cfg.dataset.recipe", "assignment to cfg.dataset replaced it"),
        (
            "import copy; cfg.dataset = copy.deepcopy(cfg.dataset.recipe)",
            "UnusableError: the dataset is a GPTDatasetConfig, not ODB's",
        ),
        ("cfg.dataset.odb.token_budgt = 128", "did you mean dataset.odb.token_budget?"),
        ("cfg.dataset.token_budget = 128", "set cfg.dataset.odb.token_budget"),
    ],
)
def test_change_after_enable_that_cannot_be_used(
    bridge: Bridge, chats: ChatFile, statement: str, text: str
) -> None:
    settings = {"token_budget": 96, "data_path": chats.path}
    assert text in bridge.refused(*SHORT, settings=settings, statement=statement)
