"""What differs between Megatron versions: each difference by hand, and what is installed."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from odb_megatron.megatron import compat_metrics, compat_pretrain
from odb_megatron.megatron.compat import MAX_VERSION, check_version
from odb_megatron.megatron.compat_pretrain import PretrainForm, pretrain_form

ROOT = Path(__file__).resolve().parents[1]

FORMS = {
    (0, 17): PretrainForm.PARSES,
    (0, 18): PretrainForm.MODEL_PROVIDER,
    (0, 19): PretrainForm.MODEL_CONFIG,
}


def of_017(
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Any = None,
) -> None: ...


def of_018(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
) -> None: ...


def of_019(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    model_provider: Any = None,
) -> None: ...


def of_no_version(model: Any, data: Any) -> None: ...


@pytest.mark.parametrize(
    ("pretrain", "form"), zip((of_017, of_018, of_019), FORMS.values(), strict=True)
)
def test_the_form_follows_from_the_parameters(
    pretrain: Callable[..., Any], form: PretrainForm
) -> None:
    assert pretrain_form(pretrain) is form


def test_an_unknown_form() -> None:
    with pytest.raises(ValueError, match=r"takes \(model, data, \.\.\.\), which is not a form"):
        pretrain_form(of_no_version)


@pytest.mark.megatron
def test_the_form_of_what_is_installed() -> None:
    from odb_megatron.megatron.compat import megatron_version

    assert pretrain_form() is FORMS[megatron_version()[:2]]
    assert MAX_VERSION in FORMS


@pytest.mark.parametrize(
    ("text", "version"), [("0.16.1", (0, 16, 1)), ("0.19.2", (0, 19, 2)), ("0.20.0rc0", (0, 20, 0))]
)
def test_supported_versions(text: str, version: tuple[int, ...]) -> None:
    assert check_version(text) == version


def test_a_version_that_is_too_old() -> None:
    with pytest.raises(ValueError, match="megatron-core 0.15.3 is not supported; .* 0.16 to 0.19"):
        check_version("0.15.3")


NAMES = ("parse_args", "load_args_from_checkpoint", "validate_args", "set_global_variables")


def test_arguments_are_parsed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What 0.17's `initialize_megatron` calls returns what was parsed before, and does nothing."""
    initialize = ModuleType("megatron.training.initialize")
    originals = {name: object() for name in NAMES}
    for name, original in originals.items():
        setattr(initialize, name, original)
    training = ModuleType("megatron.training")
    setattr(training, "initialize", initialize)  # noqa: B010  # a module made up here
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.initialize", initialize)
    folder = tmp_path / "a" / "b"
    args = argparse.Namespace(log_progress=True, save=str(folder), rank=0)
    found: Any = initialize
    with suppress(KeyError), compat_pretrain.already_parsed(args):
        assert found.parse_args(None, False) is args
        assert found.load_args_from_checkpoint(args) is None
        assert found.validate_args(args, {}) is None
        assert found.set_global_variables(args) is None
        raise KeyError
    assert {name: getattr(initialize, name) for name in NAMES} == originals
    assert folder.is_dir()


def test_no_folder_is_made_where_none_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    initialize = ModuleType("megatron.training.initialize")
    for name in NAMES:
        setattr(initialize, name, None)
    training = ModuleType("megatron.training")
    setattr(training, "initialize", initialize)  # noqa: B010
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.initialize", initialize)
    folder = tmp_path / "a"
    for changed in ({"rank": 1}, {"log_progress": False}, {"save": None}):
        values = {"log_progress": True, "save": str(folder), "rank": 0, **changed}
        with compat_pretrain.already_parsed(argparse.Namespace(**values)):
            pass
    assert not folder.exists()


def test_router_losses_of_017_are_logged_per_micro_batch() -> None:
    scales: list[float] = []

    def track_moe_metrics(loss_scale: float, iteration: int) -> None:
        scales.append(loss_scale)

    module = SimpleNamespace(track_moe_metrics=track_moe_metrics)
    with compat_metrics.logged_per_micro_batch(module, 4):
        module.track_moe_metrics(loss_scale=1 / 3, iteration=1)
    module.track_moe_metrics(loss_scale=1 / 3, iteration=1)
    assert scales == [1 / 4, 1 / 3]


def test_flops_of_real_lengths_from_one_length_for_all() -> None:
    def flops(args: Any, batch_size: float) -> float:
        return float(batch_size * args.seq_length * (700 + 3 * args.seq_length))

    args, lengths = argparse.Namespace(seq_length=4096), [5, 100, 12, 333]
    found = compat_metrics.flops_of_real_tokens(
        flops, args, num_tokens=sum(lengths), num_squared=sum(n * n for n in lengths)
    )
    assert found == pytest.approx(sum(n * (700 + 3 * n) for n in lengths))
    assert args.seq_length == 4096
    assert compat_metrics.flops_of_real_tokens(flops, args, num_tokens=0, num_squared=0) == 0


@pytest.mark.megatron
def test_metrics_are_put_back() -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import training

    owner, name = compat_metrics._router_losses()
    routers, predictions = getattr(owner, name), MTPLossLoggingHelper.tracker
    lengths = [getattr(training, name, None) for name in compat_metrics._LENGTHS]
    with suppress(KeyError), compat_metrics.metrics_kept():
        getattr(owner, name)["z_loss"] = object()
        MTPLossLoggingHelper.tracker["values"] = object()
        if hasattr(training, "_seqlen_stats_active"):
            training._seqlen_stats_active = True
        raise KeyError
    assert getattr(owner, name) is routers
    assert "z_loss" not in routers
    assert MTPLossLoggingHelper.tracker is predictions
    assert "values" not in predictions
    assert [getattr(training, name, None) for name in compat_metrics._LENGTHS] == lengths


def test_lengths_are_forgotten_where_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    training = SimpleNamespace(_seqlen_stats_in_iteration=3, _seqlen_stats_active=True)
    module = ModuleType("megatron.training")
    setattr(module, "training", training)  # noqa: B010
    monkeypatch.setitem(sys.modules, "megatron.training", module)
    compat_metrics.forget_metrics()
    assert training == SimpleNamespace(_seqlen_stats_in_iteration=None, _seqlen_stats_active=False)
    setattr(module, "training", SimpleNamespace())  # noqa: B010  # 0.17 has neither
    compat_metrics.forget_metrics()
    assert vars(module.training) == {}


def test_the_package_is_written_for_python_310() -> None:
    """Syntax alone; `make test-matrix` runs it on 3.11."""
    paths = sorted((ROOT / "odb_megatron").rglob("*.py"))
    assert len(paths) > 100
    for path in paths:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))
