"""The settings: flags, defaults, refusals, and the line that reproduces a run."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from odb_megatron.data.sample import LossPer
from odb_megatron.megatron.config import SETTINGS, OdbConfig, add_odb_arguments
from odb_megatron.plan.cost import COST_UNIT, CostCoefficients, CostModel
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
    assert _config("--odb") == OdbConfig(
        enabled=True,
        token_budget=128,
        pad_to=(),
        share_long=1,
        cost=None,
        max_patches=0,
        sync=Sync.STEP,
        template_args={},
        overlong=OverlongPolicy.ERROR,
        loss_per=None,
        batch_size=10,
        epochs=None,
        log_dir=None,
        context=128,
        max_bad_records=0,
        timeout_s=600.0,
        dry_run=False,
    )


EVERYTHING = (
    "--odb --odb-token-budget 512 --odb-overlong truncate --odb-max-bad-records 7 --odb-epochs 2 "
    "--odb-pad-to 300 100 --odb-cost linear=2.5,quadratic=3e-7,overhead=800,patch=9 "
    "--odb-max-patches 4096 --odb-template-args '{\"enable_thinking\": false}' "
    "--odb-loss-per sample --odb-timeout-s 90"
)


def test_everything_given() -> None:
    config = _config(f"{EVERYTHING} --odb-log-dir logs")
    assert (config.token_budget, config.epochs, config.max_patches) == (512, 2, 4096)
    assert (config.loss_per, config.count_scale) == (LossPer.SAMPLE, 1 << 20)
    assert (config.overlong, config.log_dir) == (OverlongPolicy.TRUNCATE, "logs")
    assert config.cost == CostCoefficients(linear=2.5, quadratic=3e-7, overhead=800, patch=9)
    assert config.template_args == {"enable_thinking": False}
    assert (config.pad_to, config.timeout_s, config.warn_s) == ((100, 300, 512), 90, 22.5)
    assert _config("--odb").warn_s == 60
    assert _config(f"{EVERYTHING} --odb-dry-run --odb-log-dir logs").log_dir is None


@pytest.mark.parametrize("flags", ["--odb", EVERYTHING, "--odb --odb-pad-to budget"])
def test_the_printed_flags_reproduce_the_configuration(flags: str) -> None:
    config = _config(flags)
    assert _config(config.describe()) == config


def test_replicas_that_meet_in_every_micro_batch() -> None:
    args = _parse("--odb")
    args.expert_model_parallel_size = 2
    assert OdbConfig.from_args(args).sync is Sync.MICROBATCH


def test_micro_batches_of_one_length_and_of_a_few() -> None:
    config = _config("--odb --odb-token-budget 130 --odb-pad-to budget")
    assert [config.micro_batch_length(multiple) for multiple in (1, 4, 128)] == [130, 128, 128]
    assert config.size_rule(4).sizes == (128,)
    assert _config("--odb").micro_batch_length(4) == 0
    config = _config("--odb --odb-token-budget 130 --odb-pad-to 64 32")
    assert config.size_rule(4).sizes == (32, 64, 128)
    assert config.micro_batch_length(4) == 0  # stages have to tell each other the next one


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--odb-token-budget 9", "--odb-token-budget would do nothing without --odb: add --odb"),
        (
            "--odb-epochs 1 --odb-timeout-s 3",
            "--odb-epochs, --odb-timeout-s would do nothing without --odb: add --odb, or drop them",
        ),
        ("--odb --odb-token-budget 0", "--odb-token-budget must be at least 1, got 0"),
        ("--odb --odb-max-bad-records -1", "--odb-max-bad-records must be at least 0, got -1"),
        ("--odb --odb-timeout-s inf", "--odb-timeout-s must be above 0 seconds, got inf"),
        ("--odb --odb-pad-to 0 64", "--odb-pad-to 0 64: each must be a token count of at least 1"),
        ("--odb --odb-pad-to large", "--odb-pad-to large: each must be a token count"),
        ("--odb --odb-pad-to 129", "--odb-pad-to 129 must not be above the token budget 128"),
        ("--odb --odb-template-args '[1]'", "--odb-template-args '.1.': .*expected an object"),
        ("--odb --odb-cost linear=0", "--odb-cost 'linear=0': linear must be above 0"),
        ("--odb --odb-cost ''", "--odb-cost '' gives ; expected KEY=NUMBER"),
        ("--odb --odb-loss-per turn", "--odb-loss-per is 'turn': expected sample, token"),
        ("--odb --odb-epochs some", "--odb-epochs is 'some': expected a whole number"),
        ("--odb --odb-epochs 0 --odb-max-patches 0", "epochs must .*\n--odb-max-patches must"),
    ],
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(flags)


@pytest.mark.parametrize("flags", ["", "--odb-overlong drop --odb-max-bad-records 9"])
def test_the_padded_baseline_has_the_record_policies(flags: str) -> None:
    config = _config(flags)
    assert not config.enabled
    rules = config.sample_rules(multiple=1)
    assert (rules.context, rules.token_budget) == (128, 128)
    assert (rules.overlong is OverlongPolicy.DROP) == bool(flags)
    assert rules.skip_bad == bool(flags)


@pytest.mark.parametrize("budget", [64, 128, 4096])
def test_the_budget_limits_packed_samples(budget: int) -> None:
    rules = _config(f"--odb --odb-token-budget {budget}").sample_rules(multiple=16)
    assert (rules.context, rules.token_budget, rules.multiple) == (128, budget, 16)


def test_flags_help_and_table() -> None:
    parser = add_odb_arguments(argparse.ArgumentParser())
    actions = [action for action in parser._actions if action.dest.startswith("odb")]
    assert len(actions) == len(SETTINGS) <= 14
    assert "online dynamic batching" in parser.format_help()
    root = Path(__file__).parents[1]
    page = (root / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for action in actions:
        text, _, default = str(action.help).partition(" Default: ")
        value = " ".join([action.option_strings[0], *_value(action)]).replace("|", "\\|")
        row = f"| `{value}` | {default.removesuffix('.')} | {text} |"
        assert row in page.splitlines(), f"docs/quickstart.md should have the line\n{row}"


def _value(action: argparse.Action) -> list[str]:
    """What follows a flag."""
    if action.nargs == 0:
        return []
    name = str(action.metavar or "|".join(map(str, action.choices or ())))
    return [name, f"[{name} ...]"] if action.nargs == "+" else [name]


SHAPE = argparse.Namespace(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    group_query_attention=True,
    kv_channels=4,
    padded_vocab_size=64,
    swiglu=True,
)


def test_the_cost_follows_from_the_models_shape() -> None:
    found = _config("--odb --odb-token-budget 1000").cost_model(SHAPE)
    linear = 2 * (2 * (8 * (2 * 16 + 2 * 8) + 3 * 8 * 16) + 8 * 64)
    assert found.quadratic == round((2 * 2 * 16 << 32) / linear)
    assert (found.fixed, found.per_patch) == (50 * COST_UNIT, 0)


def test_or_the_cost_is_given() -> None:
    config = _config("--odb --odb-cost linear=4,quadratic=1,overhead=32,patch=8")
    expected = CostModel.from_ratios(quadratic=0.25, fixed_tokens=8, patch_tokens=2)
    assert config.cost_model(argparse.Namespace()) == expected


def test_a_model_is_written_with_few_digits_and_read_back() -> None:
    model = CostModel.from_ratios(quadratic=0.0001234567, fixed_tokens=204.8, patch_tokens=3)
    prices = CostCoefficients.of(model)
    assert CostCoefficients.parse(str(prices)) == prices
    assert prices.model() == model
    exact = CostCoefficients.of(
        CostModel.from_ratios(quadratic=1e-4, fixed_tokens=204.8, patch_tokens=3)
    )
    assert str(exact) == "linear=1.0,quadratic=0.0001,overhead=204.8,patch=3.0"


def test_the_unit_cancels() -> None:
    one = CostCoefficients.parse("linear=0.5, quadratic=0.25, overhead=8, patch=2").model()
    assert one == CostCoefficients(linear=1, quadratic=0.5, overhead=16, patch=4).model()
    assert CostCoefficients.parse("linear=7").model() == CostModel()
