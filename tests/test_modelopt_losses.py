"""Distillation's loss as a sum over tokens, and what the ModelOpt stages refuse.

One process, no training. Needs nvidia-modelopt: `make test-modelopt`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("modelopt") is None:
    pytest.skip(
        "nvidia-modelopt is not installed here: make test-modelopt builds an environment with it",
        allow_module_level=True,
    )

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

NUM_TOKENS, VOCAB = 24, 7


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """No process groups: a sum over tensor-parallel ranks is what it is."""
    from odb_megatron.testing import cpu_device

    if not torch.cuda.is_available():
        cpu_device.activate()
    from odb_megatron.megatron.modelopt import distillation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "reduce_from_tensor_model_parallel_region", lambda loss: loss)
        yield


class Criteria:
    """ModelOpt's criteria on synthetic logits and hidden states of 24 tokens."""

    def __init__(self) -> None:
        from modelopt.torch.distill.plugins import megatron as host

        config = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False)
        self.logits_loss = host.LogitsKLLoss(config)
        self.hidden_loss = host.HiddenStateCosineLoss(config)
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        # [s, b, h], as Megatron's layers give them
        self.logits = normal(NUM_TOKENS, 1, VOCAB)
        self.taught = normal(NUM_TOKENS, 1, VOCAB)
        self.hidden = normal(NUM_TOKENS, 1, 5)
        self.taught_hidden = normal(NUM_TOKENS, 1, 5)
        self.lm = normal(1, NUM_TOKENS).abs()
        self.mask = (torch.arange(NUM_TOKENS)[None] % 5 != 0).float()

    def gradient(self, balancer: Any, parts: list[slice]) -> tuple[float, torch.Tensor]:
        """Return loss and gradient of a step whose micro-batches are these tokens."""
        from modelopt.torch.distill.loss_balancers import STUDENT_LOSS_KEY

        from odb_megatron.megatron.modelopt.distillation import _masked_sum

        scale = torch.ones(NUM_TOKENS, dtype=torch.float64, requires_grad=True)
        total = torch.zeros(())
        for part in parts:
            mask, factor = self.mask[:, part], scale[part, None, None]
            logits = self.logits_loss(self.logits[part] * factor, self.taught[part])
            # a translation, since the cosine does not see a scale
            moved = self.hidden[part] + factor
            hidden = self.hidden_loss(moved, self.taught_hidden[part])
            losses = {
                STUDENT_LOSS_KEY: _masked_sum(mask, self.lm[:, part] * scale[part]),
                "LogitsKLLoss_0": _masked_sum(mask, logits),
                "HiddenStateCosineLoss_1": _masked_sum(mask, hidden),
            }
            total = total + balancer(losses)["kd_loss"]
        (found,) = torch.autograd.grad(total, scale)
        return float(total), found


@pytest.fixture(scope="module")
def criteria() -> Criteria:
    return Criteria()


@settings(max_examples=25)
@given(cuts=st.sets(st.integers(1, NUM_TOKENS - 1)))
def test_a_step_does_not_depend_on_its_micro_batches(criteria: Criteria, cuts: set[int]) -> None:
    from odb_megatron.megatron.modelopt.distillation import PerTokenBalancer

    balancer = PerTokenBalancer(lm=1.0, logits=0.5, intermediate=2.0)
    whole, expected = criteria.gradient(balancer, [slice(0, NUM_TOKENS)])
    ends = [0, *sorted(cuts), NUM_TOKENS]
    parts = [slice(start, end) for start, end in itertools.pairwise(ends)]
    total, found = criteria.gradient(balancer, parts)
    assert total == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().max() > 0.1


def test_without_loss_tokens_nothing_is_nan(criteria: Criteria) -> None:
    from odb_megatron.megatron.modelopt.distillation import PerTokenBalancer

    (masked,) = [at for at in range(3) if not criteria.mask[0, at]]
    balancer = PerTokenBalancer(lm=1.0)
    loss, gradient = criteria.gradient(balancer, [slice(masked, masked + 1)])
    assert loss == 0
    assert not gradient.any()


def test_reported_names_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from odb_megatron.megatron.modelopt import distillation
    from odb_megatron.megatron.modelopt.distillation import PerTokenBalancer

    monkeypatch.setattr(distillation, "validate_loss", lambda loss: None)
    monkeypatch.setattr(distillation, "unwrap_model", lambda model: model)
    mask, output = torch.tensor([[1.0, 0, 1]]), torch.tensor([[4.0, 5, 6]])

    class Student:
        training = True
        loss_balancer = PerTokenBalancer()

        def compute_kd_loss(self, *, student_loss: Any, loss_reduction_fn: Any) -> Any:
            assert student_loss == 10
            logits = loss_reduction_fn((torch.tensor([[1.0, 7, 2]]), False, False))
            return self.loss_balancer({"student_loss": student_loss, "LogitsKLLoss_0": logits})

    loss, count, report = distillation.distillation_loss(Student(), mask, output)
    assert (loss, count, count.dtype) == (3, 2, torch.int)
    parts = ["total loss", "logits distillation loss", "intermediate distillation loss"]
    assert list(report) == parts
    assert [report[name].tolist() for name in parts] == [[3, 2], [3, 2], [0, 2]]
    Student.training = False
    loss, _, report = distillation.distillation_loss(Student(), mask, output)
    assert loss == 10
    assert report["lm loss"].tolist() == [10, 2]
    _, count, report = distillation.distillation_loss(
        type("Idle", (), {**vars(Student), "compute_kd_loss": lambda self, **_: _nothing()})(),
        torch.zeros(1, 3),
        output,
    )
    assert count == 0
    assert report["lm loss"][1] > 0, "Megatron divides by it"


def _nothing() -> dict[str, torch.Tensor]:
    return dict.fromkeys(("kd_loss", "logits_loss", "intermediate_loss"), torch.zeros(()))


@pytest.mark.parametrize("text", ["- a list\n", "temperature: 2\n", "a: [\n"])
def test_configuration_files_that_are_none(tmp_path: Path, text: str) -> None:
    from odb_megatron.megatron.modelopt.distillation import distillation_config

    path = tmp_path / "kd.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="give the fields of ModelOpt's DistillationConfig"):
        distillation_config(str(path), student=None, teacher=None)


def test_ranges_over_all_tokens_are_refused() -> None:
    """Per-token and calibrated ranges are not."""
    import modelopt.torch.quantization as mtq

    from odb_megatron.megatron.modelopt.checkpoint import _refuse_ranges_of_tokens

    def quantized(config: Any) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        return mtq.quantize(model, config, lambda model: model(torch.randn(4, 8)))

    for name in ("INT8_DEFAULT_CFG", "FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG"):
        _refuse_ranges_of_tokens(quantized(getattr(mtq, name)))
    dynamic = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {
                "quantizer_name": "*input_quantizer",
                "cfg": {"num_bits": 8, "axis": None, "type": "dynamic"},
            },
        ],
        "algorithm": "max",
    }
    with pytest.raises(ValueError, match=r"1 quantizers \(0.input_quantizer, ...\) take their"):
        _refuse_ranges_of_tokens(quantized(dynamic))


@pytest.mark.parametrize(
    ("changes", "is_taught", "message"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, False, "not know virtual pipeline stages"),
        ({"ckpt_format": "torch"}, False, "--ckpt-format torch does not keep ModelOpt's state"),
        ({"num_experts": 4}, False, "drop --num-experts"),
        ({"mtp_num_layers": 1}, False, "drop --mtp-num-layers"),
        ({"modelopt_kd_cfg": "a.yaml"}, False, "--modelopt-kd-cfg would do nothing"),
        ({"manual_gc": True}, True, "drop --manual-gc"),
        ({"tp_comm_overlap": True}, True, "does not work with --tp-comm-overlap"),
    ],
)
def test_refusals(changes: dict[str, Any], is_taught: bool, message: str) -> None:
    from odb_megatron.megatron.modelopt.run import refuse_unsupported

    usable = {
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "ckpt_format": "torch_dist",
    }
    refuse_unsupported(argparse.Namespace(**usable))
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(argparse.Namespace(**{**usable, **changes}), is_taught=is_taught)


def test_the_folder_that_is_loaded(tmp_path: Path) -> None:
    from odb_megatron.megatron.modelopt.checkpoint import (
        checkpoint_folder,
        refuse_converted,
        require_checkpoint,
    )

    def of(load: Path | None, **values: Any) -> argparse.Namespace:
        return argparse.Namespace(load=load, **{"pretrained_checkpoint": None, **values})

    pretrained = tmp_path / "pretrained"
    pretrained.mkdir()
    (pretrained / "latest_checkpointed_iteration.txt").write_text("release\n")
    trained = tmp_path / "trained"
    (trained / "iter_0000012" / "modelopt_state").mkdir(parents=True)
    assert checkpoint_folder(of(None)) is None
    assert checkpoint_folder(of(trained)) is None, "without a tracker it is no checkpoint"
    both = of(trained, pretrained_checkpoint=pretrained)
    assert checkpoint_folder(both) == pretrained / "release"
    (trained / "latest_checkpointed_iteration.txt").write_text("12")
    assert checkpoint_folder(both) == trained / "iter_0000012" == require_checkpoint(both)
    assert checkpoint_folder(of(trained, ckpt_step=4)) == trained / "iter_0000004"
    assert checkpoint_folder(of(pretrained, ckpt_step=4)) == pretrained / "release", "Megatron's"
    assert checkpoint_folder(of(tmp_path / "no", ckpt_step=4)) == tmp_path / "no" / "iter_0000004"
    with pytest.raises(ValueError, match="holds no iter_0000004, and the model would have random"):
        require_checkpoint(of(trained, ckpt_step=4))
    with pytest.raises(ValueError, match=r"--load \S+/typo holds no checkpoint \(no latest_check"):
        require_checkpoint(of(tmp_path / "typo"))
    with pytest.raises(ValueError, match="--pretrained-checkpoint .* holds no checkpoint"):
        require_checkpoint(of(None, pretrained_checkpoint=tmp_path / "typo"))
    refuse_converted(of(trained, modelopt_kd_cfg=None))
    refuse_converted(of(pretrained))
    with pytest.raises(ValueError, match="is a model that ModelOpt has converted, and this script"):
        refuse_converted(of(trained))
