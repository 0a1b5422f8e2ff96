"""Calibrates a model's quantizers on ODB's micro-batches, through Megatron's own schedule.

Must not train. Quantizers see real samples only: idle micro-batches are left out here, and padding
is not asked for (`stages`). Runs under tensor and pipeline parallelism as a step of training does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.nn import TensorQuantizer

from odb_megatron.data.feed import StepHeader
from odb_megatron.data.thd import MicroBatchLayout
from odb_megatron.megatron.forward_step import packed_batch

__all__ = ["Calibrated", "CalibrationLoop", "quantization_config", "quantize"]

_SUFFIX = "_CFG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What a calibration has seen, on one replica.

    Attributes:
        steps: steps run.
        samples: samples of all replicas.
        tokens: tokens of all replicas, before padding.
        micro_batches: micro-batches that this replica ran.
        left_out: idle micro-batches that it did not run.
        loss: Σ token losses / Σ loss tokens of this replica, before quantization; None where
            another pipeline stage has it.
    """

    steps: int
    samples: int
    tokens: int
    micro_batches: int
    left_out: int
    loss: float | None


class CalibrationLoop:
    """A `forward_loop` for `mtq.quantize` and its kin: all steps of an iterator, forward only.

    Idle micro-batches are left out. Replicas of a dense model do not meet in a forward pass, so
    each runs as many micro-batches as it has samples for; all ranks of a replica run the same.

    Args:
        models: model chunks as Megatron built them, wrappers included; ModelOpt's own argument, the
            model inside, is the same one.
        items: step headers and micro-batches of one split, as `OdbRun.datasets_provider` returns.
        seq_length: `--seq-length`.

    Attributes:
        result: what the last run has seen.
    """

    def __init__(self, models: Sequence[Any], items: Iterator[Any], *, seq_length: int) -> None:
        self._models = list(models)
        self._items = items
        self._seq_length = seq_length
        self.result: Calibrated | None = None

    def __call__(self, _model: Any = None) -> None:
        """Run it.

        Raises:
            RuntimeError: called again: a data stream is not there twice.
            ValueError: this replica had no sample, so its quantizers would stay without a range.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from odb_megatron.megatron.pipeline import planned_shapes

        if self.result is not None:
            raise RuntimeError(
                "the calibration samples have been used up by the first pass, and this ModelOpt "
                "algorithm asks for a second one: choose one that calibrates once, such as max"
            )
        schedule = get_forward_backward_func()
        steps = samples = tokens = run = left_out = 0
        reports: list[torch.Tensor] = []
        is_final = False
        while not is_final:
            header = next(self._items)
            assert isinstance(header, StepHeader), f"expected a step header, got {header!r}"
            totals = header.totals
            batches = [next(self._items) for _ in range(totals.num_micro_batches)]
            used = [item for item in batches if not item.is_idle]
            if used:
                arguments: dict[str, Any] = {
                    "forward_step_func": _forward_step,
                    "data_iterator": iter(used),
                    "model": self._models,
                    "num_microbatches": len(used),
                    "seq_length": self._seq_length,
                    "micro_batch_size": 1,
                    "forward_only": True,
                }
                pairs = zip(header.lengths, batches, strict=True)
                lengths = [length for length, item in pairs if not item.is_idle]
                with torch.no_grad(), planned_shapes(arguments, lengths):
                    found = schedule(**arguments)
                reports += [report["lm loss"] for report in found]
            steps, samples = steps + 1, samples + totals.num_samples
            tokens, run = tokens + totals.num_tokens, run + len(used)
            left_out += len(batches) - len(used)
            is_final = totals.is_final
        loss, count = torch.stack(reports).sum(dim=0).tolist() if reports else (0.0, 0.0)
        self.result = Calibrated(
            steps=steps,
            samples=samples,
            tokens=tokens,
            micro_batches=run,
            left_out=left_out,
            loss=loss / count if count else None,
        )
        if not run:
            raise ValueError(
                "this replica got no sample to calibrate with, so its quantizers have no range: "
                "raise --train-samples to a multiple of --global-batch-size"
            )


def quantization_config(name: str) -> dict[str, Any]:
    """Return one of ModelOpt's configurations, to change at will.

    Args:
        name: such as INT8_DEFAULT_CFG or FP8_DEFAULT_CFG.

    Raises:
        ValueError: ModelOpt has none of this name.
    """
    found = getattr(mtq, name, None) if name.endswith(_SUFFIX) else None
    if found is None:
        names = sorted(each for each in dir(mtq) if each.endswith(_SUFFIX))
        raise ValueError(f"ModelOpt has no configuration {name!r}; it has {', '.join(names)}")
    config: dict[str, Any] = copy.deepcopy(found)
    return config


def quantize(
    models: Sequence[Any], config: dict[str, Any], *, forward_loop: Callable[[Any], None]
) -> Any:
    """Quantize the model inside the wrappers, in place; every rank calls it.

    ModelOpt takes the largest range of all replicas, and of tensor-parallel ranks where they share
    one.

    Args:
        models: one model chunk, wrappers included.
        config: see `quantization_config`.
        forward_loop: a `CalibrationLoop`.

    Returns:
        The quantized model.

    Raises:
        ValueError: a configuration with which a token's result depends on what else is in the
            micro-batch.
    """
    from megatron.core.utils import unwrap_model

    (chunk,) = models
    model = unwrap_model(chunk)
    was_training = model.training
    model.eval()
    mtq.quantize(model, config, forward_loop)
    model.train(was_training)
    shared = [
        name
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and _spans_tokens(module)
    ]
    if shared:
        raise ValueError(
            f"{len(shared)} quantizers ({shared[0]}, ...) take their range from all tokens of a "
            "micro-batch anew each time, so the loss would depend on how samples are packed: use a "
            "configuration with calibrated or per-token ranges, such as INT8_DEFAULT_CFG, "
            "FP8_DEFAULT_CFG or FP8_PER_CHANNEL_PER_TOKEN_CFG"
        )
    return model


def _spans_tokens(quantizer: TensorQuantizer) -> bool:
    if not quantizer.is_enabled or not getattr(quantizer, "_dynamic", False):
        return False
    return quantizer.axis is None and not quantizer.block_sizes


def _forward_step(items: Iterator[MicroBatchLayout], model: Any) -> tuple[torch.Tensor, Any]:
    batch = packed_batch(next(items))
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
    )
    return output, partial(_sums, batch.loss_mask)


def _sums(
    loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    assert loss_mask is not None, "the last pipeline stage has the loss mask"
    loss = (output.view(-1).float() * loss_mask.view(-1)).sum()
    count = loss_mask.sum()
    return loss, count.to(torch.int), {"lm loss": torch.stack([loss, count])}
