"""The `--odb-*` flags: defaults, refusals, and the line that reproduces a run."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from odb_megatron.comm.watchdog import OnPeerFailure
from odb_megatron.data.preprocess import BadRecordPolicy, LossPer
from odb_megatron.megatron.arguments import add_odb_arguments
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.plan.cost import CostPrices
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.record import Sync


def _parse(text: str) -> argparse.Namespace:
    parser = add_odb_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(shlex.split(text))
    args.seq_length, args.global_batch_size = 128, 10
    args.distributed_timeout_minutes = 10
    return args


def _config(text: str) -> OdbConfig:
    return OdbConfig.from_args(_parse(text))


def test_defaults() -> None:
    config = _config("--odb")
    assert config == OdbConfig(
        enabled=True,
        token_budget=128,
        pad_to_budget=False,
        shape_buckets=(),
        cost=None,
        max_patches=0,
        sync=Sync.STEP,
        template_args={},
        overlong=OverlongPolicy.ERROR,
        loss_per=None,
        batch_size=10,
        bad_record=BadRecordPolicy.ERROR,
        resume_strict=True,
        epochs=None,
        attention="auto",
        log_dir=None,
        log_ids=False,
        context=128,
        plan_ahead=2,
        max_bad_records=0,
        warmup_worst_case=False,
        timeout_s=600.0,
        stall_warn_s=60.0,
        dry_run=False,
        on_peer_failure=OnPeerFailure.EXIT,
    )


def test_template_arguments() -> None:
    config = _config("--odb --odb-template-args '{\"enable_thinking\": false}'")
    assert config.template_args == {"enable_thinking": False}
    assert """--odb-template-args '{"enable_thinking": false}'""" in config.describe()
    for text, reason in (("[1]", "of type list; expected a JSON object"), ("{", "not valid JSON")):
        with pytest.raises(ValueError, match=f"--odb-template-args .*{reason}"):
            _config(f"--odb --odb-template-args '{text}'")


def test_everything_given() -> None:
    config = _config(
        "--odb --odb-token-budget 512 --odb-overlong solo --odb-bad-record skip --odb-epochs 2 "
        "--odb-loss-per sample "
        "--odb-attention cpu --odb-log-dir logs --odb-max-patches 4096 --odb-plan-ahead 0 "
        "--odb-cost linear=2.5,quadratic=0.001,overhead=800,patch=9 --odb-max-bad-records 7 "
        "--odb-log-ids"
    )
    assert config.log_ids
    assert (config.loss_per, config.count_scale) == (LossPer.SAMPLE, 1 << 20)
    assert "--odb-loss-per sample" in config.describe()
    assert config.max_bad_records == 7
    assert "--odb-max-bad-records 7" in config.describe()
    assert (config.token_budget, config.plan_ahead, config.epochs) == (512, 0, 2)
    assert (config.overlong, config.bad_record) == (OverlongPolicy.SOLO, BadRecordPolicy.SKIP)
    assert (config.attention, config.log_dir) == ("cpu", "logs")
    assert config.cost == CostPrices(linear=2.5, quadratic=0.001, overhead=800, patch=9)
    assert config.max_patches == 4096


def test_replicas_that_meet_in_every_micro_batch() -> None:
    args = _parse("--odb")
    args.expert_model_parallel_size = 2
    assert OdbConfig.from_args(args).sync is Sync.MICROBATCH


def test_micro_batches_of_one_length() -> None:
    config = _config("--odb --odb-token-budget 130 --odb-pad-to-budget")
    assert [config.micro_batch_length(multiple) for multiple in (1, 4, 128)] == [130, 128, 128]
    assert "--odb-token-budget 130" in config.describe()
    assert "--odb-pad-to-budget" in config.describe()
    assert _config("--odb").micro_batch_length(4) == 0
    assert config.size_rule(4).sizes == (128,)
    assert (config.sizes, _config("--odb").sizes) == ((130,), ())


def test_micro_batches_of_a_few_lengths() -> None:
    config = _config("--odb --odb-token-budget 130 --odb-shape-buckets 64 32 130")
    assert config.shape_buckets == (32, 64, 130)
    assert config.size_rule(4).sizes == (32, 64, 128)
    assert "--odb-shape-buckets 32 64 130" in config.describe()
    assert config.micro_batch_length(4) == 0  # stages have to tell each other the next one


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--odb-pad-to-budget", "--odb-pad-to-budget would do nothing without --odb"),
        ("--odb-log-ids", "--odb-log-ids would do nothing without --odb-log-dir"),
        ("--odb-shape-buckets 9", "--odb-shape-buckets would do nothing without --odb"),
        ("--odb --odb-shape-buckets 9 --odb-pad-to-budget", "one size and .* a few: keep one"),
        ("--odb --odb-shape-buckets 0 64", "must be between 1 and the token budget 128"),
        ("--odb --odb-shape-buckets 129", "buckets 129 must be between 1 and the token budget 128"),
        ("--odb-token-budget 9", "--odb-token-budget would do nothing without --odb"),
        ("--odb-plan-ahead 0", "--odb-plan-ahead would do nothing without --odb"),
        ("--odb-max-bad-records 9", "--odb-max-bad-records would do nothing without --odb"),
        (
            "--odb --odb-max-bad-records 9",
            "--odb-max-bad-records would do nothing with --odb-bad-record error",
        ),
        ("--odb --odb-max-bad-records 0", "--odb-max-bad-records must be at least 1, got 0"),
        ("--odb-timeout-s 9", "--odb-timeout-s would do nothing without --odb"),
        ("--odb-stall-warn-s 9", "--odb-stall-warn-s would do nothing without --odb"),
        (
            "--odb-warmup-worst-case",
            "--odb-warmup-worst-case would do nothing without --odb",
        ),
        ("--odb-on-peer-failure exit", "--odb-on-peer-failure would do nothing without --odb"),
        ("--odb --odb-timeout-s 0", "--odb-timeout-s must be above 0 seconds, got 0"),
        ("--odb --odb-stall-warn-s inf", "--odb-stall-warn-s must be above 0 seconds, got inf"),
        ("--odb --odb-plan-ahead -1", "--odb-plan-ahead must not be negative, got -1"),
        (
            "--odb-epochs 1 --odb-plan-ahead 3",
            "--odb-epochs, --odb-plan-ahead would do nothing without --odb: add --odb, or drop th",
        ),
        ("--odb-cost linear=1", "--odb-cost would do nothing without --odb"),
        ("--odb-max-patches 9", "--odb-max-patches would do nothing without --odb"),
        ("--odb --odb-max-patches 0", "--odb-max-patches must be at least 1, got 0"),
        (
            "--odb --odb-cost overhead=100",
            "'overhead=100' gives overhead; .* linear is needed",
        ),
        ("--odb --odb-cost linear=0", "--odb-cost 'linear=0': linear must be above 0"),
        ("--odb --odb-cost linear=-1", "linear must be a number of at least 0, got -1"),
        ("--odb --odb-cost linear=1,patch=nan", "patch must be a number of at least 0, got nan"),
        (
            "--odb --odb-cost linear=much",
            "'linear=much': could not convert string to",
        ),
        (
            "--odb --odb-cost linear=1,linear=2",
            "gives linear, linear; .* each at most once",
        ),
        (
            "--odb --odb-cost linear=1,square=2",
            "gives linear, square; expected KEY=NUMBER, .* of linear, quadratic, overhead, patch",
        ),
        ("--odb --odb-cost auto", "--odb-cost 'auto' gives auto; expected KEY=NUMBER"),
        ("--odb --odb-cost ''", "--odb-cost '' gives ; expected KEY=NUMBER"),
        ("--odb --odb-token-budget 0", "--odb-token-budget must be at least 1, got 0"),
        ("--odb --odb-epochs 0", "--odb-epochs must be at least 1, got 0"),
    ],
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(flags)


@pytest.mark.parametrize(
    "flags",
    [
        *(
            "--odb-loss-per turn",
            "--odb-overlong cut",
            "--odb-bad-record warn",
            "--odb-budget 9",
            "--odb-plan-ahead some",
        ),
        *("--odb-policy cost", "--odb-exchange auto", "--odb-cost-linear 1"),  # of older versions
    ],
)
def test_unknown_words_and_flags(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(flags)
    assert flags.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["", "--odb-overlong drop --odb-bad-record skip"])
def test_the_padded_baseline_has_the_record_policies(flags: str) -> None:
    config = _config(flags)
    assert not config.enabled
    rules = config.sample_rules(multiple=1)
    assert (rules.context, rules.token_budget) == (128, 128)
    assert (rules.overlong is OverlongPolicy.DROP) == bool(flags)
    assert (rules.bad_record is BadRecordPolicy.SKIP) == bool(flags)


@pytest.mark.parametrize("budget", [64, 128, 4096])
def test_the_budget_limits_packed_samples(budget: int) -> None:
    rules = _config(f"--odb --odb-token-budget {budget}").sample_rules(multiple=16)
    assert (rules.context, rules.token_budget, rules.multiple) == (128, budget, 16)


@pytest.mark.parametrize(
    "flags",
    [
        "--odb",
        "--odb --odb-epochs 3 --odb-overlong truncate",
        "--odb --odb-token-budget 777",
        "--odb --odb-bad-record skip --odb-attention cpu",
        "--odb --odb-max-patches 77",
        "--odb --odb-cost linear=1",
        "--odb --odb-cost overhead=12.34567890123,linear=0.1,quadratic=3e-7",
        "--odb --odb-plan-ahead 5",
        "--odb --odb-warmup-worst-case",
        "--odb --odb-timeout-s 90 --odb-stall-warn-s 5 --odb-on-peer-failure report",
    ],
)
def test_the_printed_flags_reproduce_the_configuration(flags: str) -> None:
    config = _config(flags)
    assert _config(config.describe()) == config


def test_every_flag_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = add_odb_arguments(argparse.ArgumentParser())
    actions = [action for action in parser._actions if action.dest.startswith("odb")]
    assert len(actions) == 22
    assert all(action.help for action in actions)
    parser.print_help()
    assert "online dynamic batching" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"odb_epochs": 0}, "--odb-epochs must be at least 1, got 0"),
        ({"train_samples": -4}, "--train-samples must be at least 1, got -4"),
        ({"train_iters": 0}, "--train-iters must be at least 1, got 0"),
        ({}, "--odb-epochs"),
        ({"train_samples": 4, "train_iters": 4}, "--train-samples"),
    ],
)
def test_the_length_is_checked_before_it_is_used(values: dict[str, int], text: str) -> None:
    pytest.importorskip("megatron.core")
    from odb_megatron.megatron.setup import _check_length

    nothing = {"odb_epochs": None, "train_samples": None, "train_iters": None}
    _check_length(argparse.Namespace(**{**nothing, "train_samples": 4}))
    given = {**nothing, **values}
    with pytest.raises(ValueError, match=text):
        _check_length(argparse.Namespace(**given))


@pytest.mark.parametrize("name", ["missing", "missing/tokenizer.json"])
def test_a_missing_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    pytest.importorskip("megatron.core")
    from odb_megatron.megatron.setup import _resolve_tokenizer

    args = argparse.Namespace(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(tmp_path / name),
        data_cache_path=None,
    )
    with pytest.raises(ValueError, match=f"--tokenizer-model .*{name} does not exist"):
        _resolve_tokenizer(args)


def test_resuming_is_strict_unless_told() -> None:
    assert _config("--odb --odb-resume-strict").resume_strict
    assert "resume-strict" not in _config("--odb").describe()
    lenient = _config("--odb --no-odb-resume-strict")
    assert not lenient.resume_strict
    assert " --no-odb-resume-strict" in lenient.describe()
    for flag in ("--odb-resume-strict", "--no-odb-resume-strict"):
        with pytest.raises(ValueError, match="--odb-resume-strict would do nothing without --odb"):
            _config(flag)
