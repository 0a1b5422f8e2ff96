"""A GPT on megatron-core alone that trains packed and padded micro-batches, replica by replica.

One process stands for all data-parallel replicas: it runs their micro-batches one after the other
into the same gradient buffers, so that an optimizer step is that of the whole group. Only the
reduction between them is missing.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import PAD_TOKEN, MicroBatch, layout
from odb_megatron.data.wire import assemble
from odb_megatron.megatron.attention import Attention, absent, select
from odb_megatron.megatron.forward_step import Batch, packed_batch, padded_batch
from odb_megatron.megatron.run_report import Clock, CudaClock, WallClock
from odb_megatron.plan.cost import ModelShape

__all__ = ["Item", "Step", "Trainer", "attention_ms", "choose_attention", "shape_of"]
__all__ += ["start_device"]

Item = MicroBatch | dict[str, torch.Tensor]
"""A packed micro-batch, or a padded one as `forward_step.padded_batch` takes it."""

_BACKWARD = 3  # forward and backward pass cost three forward passes


class CpuClock(WallClock):
    """CPU time of this process: the wall clock would measure what else the cores do."""

    def mark(self) -> float:
        return time.process_time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measured step.

    Attributes:
        replica_s: seconds of each replica's micro-batches, forward and backward.
        optimizer_s: finishing the gradients and the optimizer's step.
        samples: their number.
        tokens: theirs, padding not counted.
        computed: tokens with padding.
        flops: of the tokens, forward and backward, padding not counted.
        loss: mean loss.
        peak_bytes: most device memory; 0 on the CPU.
    """

    replica_s: tuple[float, ...]
    optimizer_s: float
    samples: int
    tokens: int
    computed: int
    flops: float
    loss: float
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Of the step: the slowest replica, then the optimizer."""
        return max(self.replica_s) + self.optimizer_s


def start_device(device: str, *, seed: int) -> None:
    """Start torch.distributed and Megatron's groups in this one process."""
    if device == "cpu":
        from odb_megatron.testing import cpu_device

        cpu_device.activate()
        torch.set_num_threads(1)  # so that CPU time is time
    else:
        torch.cuda.set_device(0)
    path = os.path.join(tempfile.mkdtemp(prefix="odb-gpu-"), "store")  # needs no network
    store = torch.distributed.FileStore(path, 1)  # type: ignore[attr-defined]
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(seed)


def choose_attention(impl: str, backend: str, device: str) -> Attention:
    """Choose as a run would; `auto` takes Transformer Engine's layers where they can run.

    Where local layers have no flash-attn, torch runs them, which says so.
    """
    if impl == "auto":
        has_te = device == "cuda" and not absent()["te"]
        impl = "transformer_engine" if has_te else "local"
    args = Namespace(
        transformer_impl=impl,
        attention_backend=SimpleNamespace(name=backend),
        bf16=device == "cuda",
        attention_dropout=0.0,
    )
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    try:
        return select(args, device_type=device, capability=capability)
    except ValueError as error:
        if backend != "auto" or impl != "local":
            raise
        return Attention(name="torch", reason=str(error))


def shape_of(options: Namespace) -> ModelShape:
    """What FLOPs follow from."""
    return ModelShape(
        num_layers=options.layers,
        hidden=options.hidden,
        ffn_hidden=options.ffn_hidden,
        query=options.hidden,
        key_value=options.hidden,
        vocab=options.vocab,
        gated_mlp=True,
    )


def _config(options: Namespace, device: str) -> TransformerConfig:
    """Fusions that are compiled when first used are off: lengths change."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        ffn_hidden_size=options.ffn_hidden,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=_has_fused_rope(device),
    )


def _has_fused_rope(device: str) -> bool:
    """Without it RoPE takes packed samples one by one in every layer, so positions are learned."""
    return device == "cuda" and rope_utils.fused_apply_rotary_pos_emb_thd is not None


class Trainer:
    """The model, its optimizer and a clock (RMSNorm, SwiGLU, untied embeddings, no recomputation).

    Args:
        options: sizes, from the command line.
        attention: from `choose_attention`.
        lengths: tokens of the sample at each stream position.
    """

    def __init__(self, options: Namespace, attention: Attention, lengths: Sequence[int]) -> None:
        device = options.device
        self.clock: Clock = CudaClock() if device == "cuda" else CpuClock()
        self.lengths = lengths
        self._options, self._shape = options, shape_of(options)
        config = _config(options, device)
        undo = attention.install()
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=(
                gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
                if attention.name == "te"
                else gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
            ),
            vocab_size=options.vocab,
            max_sequence_length=options.seq_length,
            position_embedding_type="rope" if _has_fused_rope(device) else "learned_absolute",
            share_embeddings_and_output_weights=False,
        )
        undo()
        model.to(torch.cuda.current_device())
        if config.bf16:
            model = Float16Module(config, model)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self._model = DistributedDataParallel(config, ddp_config, model)
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                clip_grad=1.0,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
            ),
            [self._model],
            use_gloo_process_groups=False,
        )
        self._schedule = get_forward_backward_func()
        self.num_parameters = sum(each.numel() for each in self._model.parameters())

    def train(self, step: Sequence[Sequence[Sequence[int]]], *, is_padded: bool) -> Step:
        """Train `step[replica][m]`, stream positions each, replica after replica.

        Waits for the device before each replica, so that no start hides behind another's end.

        Raises:
            RuntimeError: the loss is not a number.
        """
        items = [[self.item(batch, is_padded=is_padded) for batch in part] for part in step]
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        marks, sums = [], []
        for part in items:
            torch.cuda.synchronize()
            start = self.clock.mark()
            sums.append(self._run(iter(part), len(part), forward_only=False))
            marks.append((start, self.clock.mark()))
        torch.cuda.synchronize()
        total = torch.stack(sums).sum(dim=0)
        start = self.clock.mark()
        finalize_model_grads([self._model], total[1].to(torch.int))
        self._optimizer.step()
        end = self.clock.mark()
        torch.cuda.synchronize()
        loss = float(total[0] / total[1].clamp(min=1.0))
        if not np.isfinite(loss):
            raise RuntimeError(f"the loss of a step is {loss}: its times mean nothing")
        own = [[self.lengths[at] for at in batch] for part in step for batch in part]
        linear, quadratic = self._shape.linear_flops(), self._shape.quadratic_flops()
        flops = sum(linear * length + quadratic * length**2 for one in own for length in one)
        padded = [max(one) * len(one) if one and is_padded else sum(one) or 1 for one in own]
        return Step(
            replica_s=tuple(self.clock.elapsed_s(*pair) for pair in marks),
            optimizer_s=self.clock.elapsed_s(start, end),
            samples=sum(map(len, own)),
            tokens=sum(map(sum, own)),
            computed=sum(padded),
            flops=float(_BACKWARD * flops),
            loss=loss,
            peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        )

    def loss(self, batches: Sequence[Sequence[int]], *, is_padded: bool) -> float:
        """Mean loss of some micro-batches, without training."""
        items = [self.item(batch, is_padded=is_padded) for batch in batches]
        with torch.no_grad():
            sums = self._run(iter(items), len(items), forward_only=True)
        return float(sums[0] / sums[1].clamp(min=1.0))

    def item(self, positions: Sequence[int], *, is_padded: bool) -> Item:
        """Make a micro-batch of random tokens with the stream's lengths, on the CPU."""
        samples = [self._sample(position) for position in positions]
        if not is_padded:
            return assemble(samples, positions=positions) if samples else assemble([], positions=[])
        width = max(map(len, samples))
        tokens = np.full((len(samples), width), PAD_TOKEN, dtype=np.int64)
        labels, loss_mask = tokens.copy(), np.zeros(tokens.shape, dtype=np.float32)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample)] = sample.tokens
            labels[row, : len(sample)] = sample.labels
            loss_mask[row, : len(sample)] = sample.loss_mask
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.arange(width).repeat(len(samples), 1),
            "length": torch.tensor([len(sample) for sample in samples]),
        }

    def _sample(self, position: int) -> Sample:
        random = np.random.default_rng([self._options.seed, position])
        tokens = random.integers(0, self._options.vocab, self.lengths[position] + 1)
        mask = np.ones(len(tokens) - 1, dtype=np.float32)
        return Sample(tokens=tokens[:-1], labels=tokens[1:], loss_mask=mask)

    def _run(self, items: Iterator[Item], count: int, *, forward_only: bool) -> torch.Tensor:
        reports: list[torch.Tensor] = self._schedule(
            forward_step_func=_forward_step,
            data_iterator=items,
            model=[self._model],
            num_microbatches=count,
            seq_length=self._options.seq_length,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return torch.stack(reports).sum(dim=0)


def _forward_step(items: Iterator[Item], model: Any) -> tuple[torch.Tensor, Any]:
    item = next(items)
    batch: Batch = padded_batch(item) if isinstance(item, dict) else packed_batch(item)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
    )
    return output, partial(_loss, batch.loss_mask)


def _loss(
    loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three values, so that the schedule does not divide by the number of micro-batches."""
    assert loss_mask is not None, "there is one pipeline stage"
    loss = (output.view(-1).float() * loss_mask.view(-1)).sum()
    count = loss_mask.sum()
    return loss, count.to(torch.int), torch.stack([loss.detach(), count])


def attention_ms(name: str, options: Namespace, lengths: Sequence[int], clock: Clock) -> float:
    """Time one layer's attention over a pack, forward and backward: the median of five."""
    from megatron.core.transformer.enums import AttnMaskType

    if name == "te":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention as attention
    else:
        from odb_megatron.megatron.packed_attention import CLASSES

        attention = CLASSES[name]
    config = _config(options, options.device)
    device = torch.device(torch.cuda.current_device())
    shape = (sum(lengths), options.heads, options.hidden // options.heads)
    inputs = [
        torch.randn(shape, device=device, dtype=config.params_dtype, requires_grad=True)
        for _ in range(3)
    ]
    where = packed_batch(layout(lengths, positions=range(len(lengths)))).packed_seq_params
    module = attention(config, 1, AttnMaskType.causal, "self")
    marks = []
    for _ in range(6):
        torch.cuda.synchronize()
        marks.append(clock.mark())
        out = module(*inputs, None, AttnMaskType.causal, packed_seq_params=where)
        out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    marks.append(clock.mark())
    return float(np.median([clock.elapsed_s(*pair) for pair in pairwise(marks[1:])]) * 1e3)
