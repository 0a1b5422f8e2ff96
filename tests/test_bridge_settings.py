"""Settings of `dataset.odb` and the words of messages, without Bridge."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from odb_megatron.bridge.batches import TrainBatches, as_batch
from odb_megatron.bridge.hooks import require_names
from odb_megatron.bridge.settings import OdbSettings, described, flag_values, in_bridge_words
from odb_megatron.data.thd import assemble_idle, layout
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.plan.padding import SizeRule


def test_every_setting_is_a_flag_or_names_data() -> None:
    names = {field.name for field in fields(OdbSettings)}
    assert {name for name in names if f"odb_{name}" not in flag_values(OdbSettings())} == {
        "data_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "split",
        "order",
    }


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({}, "odb", True),
        ({}, "odb_token_budget", None),
        ({"token_budget": 96}, "odb_token_budget", 96),
        ({"token_budget": "96"}, "odb_token_budget", 96),  # as an override may have it
        ({"pad_to": "budget"}, "odb_pad_to", ["budget"]),
        ({"pad_to": [32, 64]}, "odb_pad_to", ["32", "64"]),
        ({"log_dir": "a b"}, "odb_log_dir", "a b"),
        ({"dry_run": True}, "odb_dry_run", True),
        ({"dry_run": False}, "odb_dry_run", False),
        ({"cost": "linear=0.5,patch=2"}, "odb_cost", "linear=0.5,patch=2"),
    ],
)
def test_values(settings: dict[str, object], name: str, value: object) -> None:
    assert flag_values(OdbSettings(**settings))[name] == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("token_budgt", "there is no dataset.odb.token_budgt: did you mean dataset.odb.token_budg"),
        ("overlonk", "did you mean dataset.odb.overlong?"),
        ("nothing", "there is no dataset.odb.nothing: the settings are token_budget, "),
    ],
)
def test_attribute_that_is_no_setting(name: str, text: str) -> None:
    settings = OdbSettings()
    with pytest.raises(AttributeError) as refused:
        setattr(settings, name, 1)
    assert text in str(refused.value)
    settings.token_budget = 128
    assert copy.deepcopy(settings) == OdbSettings(token_budget=128)


def test_described() -> None:
    settings = OdbSettings(token_budget=96, dry_run=True, data_path=["0.5", "a", "0.5", "b"])
    assert described(settings) == (
        "dataset.odb.token_budget=96 dataset.odb.dry_run=true dataset.odb.data_path=[0.5,a,0.5,b]"
    )
    prices = OdbSettings(cost="linear=1,patch=2")
    assert described(prices) == """'dataset.odb.cost="linear=1,patch=2"'"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--odb-token-budget 8", "dataset.odb.token_budget 8"),
        ("--odb needs --micro-batch-size 1:", "dataset.odb needs train.micro_batch_size 1:"),
        ("or anew (--finetune)", "or anew (checkpoint.finetune=true)"),
        ("--unknown-flag stays", "--unknown-flag stays"),
    ],
)
def test_words(text: str, words: str) -> None:
    assert in_bridge_words(text) == words


def test_layout_reaches_ranks_without_tokens() -> None:
    batch = as_batch(layout([3, 5], positions=[0, 1], rule=SizeRule(multiple=4)))
    assert [name for name in batch if batch[name] is None] == [
        *("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    ]
    assert batch["cu_seqlens_q"].tolist() == [0, 3, 8]
    assert batch["cu_seqlens_q_padded"].tolist() == [0, 4, 12]
    assert int(batch["max_seqlen_q"]) == 8
    assert batch["cu_seqlens_q"].dtype == torch.int32


@pytest.mark.parametrize(
    ("item", "real"),
    [
        (assemble_idle(rule=SizeRule(multiple=4)), [0, 4]),
        (assemble_idle(rule=SizeRule(sizes=(16,), multiple=4)), [0, 16]),
        (layout([3], positions=[0], rule=SizeRule(sizes=(16,), multiple=4)), [0, 3, 15]),
    ],
)
def test_no_segment_is_empty(item: object, real: list[int]) -> None:
    assert as_batch(item)["cu_seqlens_q"].tolist() == real  # type: ignore[arg-type]


def test_state_of_another_loader_is_refused() -> None:
    batches = TrainBatches(
        iter(()), on_batch=print, save=lambda: "text", restore=lambda _text: None
    )
    assert batches.save_state() == {"odb": "text"}
    with pytest.raises(ValueError, match="which ODB did not write"):
        batches.restore_state({"samples_seen": 3})


def test_defaults_are_those_of_the_flags() -> None:
    import argparse

    args = argparse.Namespace(**flag_values(OdbSettings()), seq_length=64, global_batch_size=8)
    config = OdbConfig.from_args(args)
    assert (config.token_budget, config.enabled) == (64, True)


def test_another_bridge_is_refused() -> None:
    there = SimpleNamespace(_pretrain=1, _finish_train=1, _cleanup_after_pretrain_failure=1)
    with pytest.raises(ValueError, match=r"has no megatron\.bridge\.training\.train\.get_forward"):
        require_names(lambda module: there if module == "pretrain" else SimpleNamespace())


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is not None, reason="Megatron-Bridge is installed"
)
def test_without_bridge() -> None:
    with pytest.raises(ImportError, match="needs megatron-bridge 0.6 or newer, and there is no"):
        from odb_megatron.bridge import enable  # noqa: F401
