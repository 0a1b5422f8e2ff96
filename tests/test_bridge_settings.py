"""Settings of `dataset.odb` and the words of messages, without Bridge."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch

from odb_megatron import errors
from odb_megatron.bridge.run import TrainBatches, as_batch
from odb_megatron.bridge.settings import OdbSettings, described, setting_in_bridge
from odb_megatron.data.sample import BadRecordError, Sample, apply_rules
from odb_megatron.data.thd import layout
from odb_megatron.data.wire import assemble
from odb_megatron.errors import SettingError, flag_of
from odb_megatron.megatron.config import SETTINGS, OdbConfig
from odb_megatron.plan.padding import OverlongError, OverlongPolicy, SizeRule


def test_every_setting_is_a_flag_or_names_data() -> None:
    names = {field.name for field in fields(OdbSettings)}
    assert names - set(SETTINGS) == {
        *("data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "order")
    }
    assert set(SETTINGS) - names == {"enabled", "epochs", "share_long"}


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({}, 64),
        ({"token_budget": 96}, 96),
        ({"token_budget": "96"}, 96),  # as an override may have it
        ({"pad_to": "budget"}, (64,)),
        ({"pad_to": [32, 16]}, (16, 32, 64)),
        ({"pad_to": 32}, (32, 64)),
        ({"log_dir": "a b"}, "a b"),
        ({"dry_run": True}, True),
        ({"dry_run": False}, False),
        ({"timeout_s": 7}, 7.0),
        ({"template_args": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"overlong": "drop"}, OverlongPolicy.DROP),
    ],
)
def test_values(settings: dict[str, object], value: object) -> None:
    config = _config(**settings)
    assert config.enabled
    assert getattr(config, next(iter(settings), "token_budget")) == value


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"token_budget": "many"}, "token-budget is 'many': expected a whole number"),
        ({"overlong": "fifo"}, "overlong is 'fifo': expected error, truncate, drop, solo"),
        ({"dry_run": 1}, "dry-run is 1: give true or false"),
        ({"timeout_s": "long"}, "timeout-s is 'long': expected a number of seconds"),
    ],
)
def test_values_of_a_wrong_type(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _config(**settings)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("token_budgt", "there is no dataset.odb.token_budgt: did you mean dataset.odb.token_budg"),
        ("overlonk", "did you mean dataset.odb.overlong?"),
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
    ("name", "words"),
    [
        ("odb", "dataset.odb"),
        ("odb_token_budget", "dataset.odb.token_budget"),
        ("micro_batch_size", "train.micro_batch_size"),
        ("finetune", "checkpoint.finetune=true"),
        ("not_in_bridge", "--not-in-bridge"),
    ],
)
def test_names(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = SettingError(f"{{{name}}} is {{value}}", value="{7}")
    assert str(error) == f"{flag_of(name)} is {{7}}"
    monkeypatch.setitem(errors._host, "name", setting_in_bridge)
    assert str(pickle.loads(pickle.dumps(error))) == f"{words} is {{7}}"


def _config(**settings: object) -> OdbConfig:
    values = OdbSettings(**settings).as_flags()
    return OdbConfig.from_args(argparse.Namespace(**values, seq_length=64, global_batch_size=8))


def test_layout_reaches_ranks_without_tokens() -> None:
    batch = as_batch(layout([3, 5], positions=[0, 1], rule=SizeRule(multiple=4)))
    assert [name for name in batch if batch[name] is None] == [
        *("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    ]
    assert batch["cu_seqlens_q"].tolist() == batch["cu_seqlens_kv"].tolist() == [0, 4, 12]
    assert int(batch["max_seqlen_q"]) == 8
    assert batch["cu_seqlens_q"].dtype == torch.int32


@pytest.mark.parametrize(
    ("item", "offsets"),
    [
        (assemble([], positions=[], rule=SizeRule(multiple=4)), [0, 4]),
        (assemble([], positions=[], rule=SizeRule(sizes=(16,), multiple=4)), [0, 16]),
        (layout([3], positions=[0], rule=SizeRule(sizes=(16,), multiple=4)), [0, 4, 16]),
    ],
)
def test_no_segment_is_empty(item: object, offsets: list[int]) -> None:
    assert as_batch(item)["cu_seqlens_q"].tolist() == offsets  # type: ignore[arg-type]


def test_state_of_another_loader_is_refused() -> None:
    batches = TrainBatches(iter(()), print, save=lambda: "text", restore=lambda _text: None)
    assert batches.save_state() == {"odb": "text"}
    with pytest.raises(ValueError, match="which ODB did not write"):
        batches.restore_state({"samples_seen": 3})


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is not None, reason="Megatron-Bridge is installed"
)
def test_without_bridge() -> None:
    with pytest.raises(ImportError, match="needs megatron-bridge 0.6 or newer, and there is no"):
        from odb_megatron.bridge import enable  # noqa: F401


def test_errors_of_data_name_the_hosts_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of worker processes, too, which get the rules alone."""
    made = [_config(token_budget=8).sample_rules(multiple=1)]
    monkeypatch.setitem(errors._host, "name", setting_in_bridge)
    made.append(_config(token_budget=8).sample_rules(multiple=1))
    for rules, names in zip(made, ("--odb-overlong", "dataset.odb.overlong"), strict=True):
        rules = pickle.loads(pickle.dumps(rules))
        sample = Sample(tokens=np.ones(9), labels=np.ones(9), loss_mask=np.ones(9))
        with pytest.raises(OverlongError, match=f"a:1: 9 tokens; .*: use {names}"):
            apply_rules(sample, rules, path="a", line=1)
    assert "give dataset.odb.max_bad_records N" in str(BadRecordError("a", 1, "no"))
