"""A GPT on megatron-core alone that trains packed and padded micro-batches, replica by replica.

Must not choose what is trained or keep results. One process stands for all data-parallel replicas:
it runs their micro-batches one after the other into the same gradient buffers, so that an optimizer
step is that of the whole group. What is missing is the reduction between them.
"""

from __future__ import annotations

import atexit
import enum
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from odb_megatron.data.thd import MicroBatch
from odb_megatron.megatron.attention.registry import AttentionBackend
from odb_megatron.megatron.attention.spec import layer_spec
from odb_megatron.megatron.forward_step import Batch, packed_batch, padded_batch
from odb_megatron.megatron.run_report import Clock, CudaClock, WallClock
from odb_megatron.plan.cost import ModelShape

__all__ = [
    "CpuClock",
    "Item",
    "ModelSize",
    "Positions",
    "Trainer",
    "attention_config",
    "parameter_dtype",
    "start_device",
    "switch_attention",
]


class CpuClock(WallClock):
    """CPU time of this process: the wall clock would measure what else the cores do."""

    def mark(self) -> float:
        return time.process_time()


class Positions(enum.Enum):
    """How the model knows positions.

    ROPE: rotary, by Transformer Engine's kernel. UNFUSED_ROPE: rotary, by megatron-core's own code,
    which treats packed samples one after the other in every layer (`_apply_rotary_pos_emb_thd`,
    rope_utils.py, 0.19.2): tens of small kernels per sample, which padded batches do not have.
    LEARNED: an embedding, the same work for every arm.
    """

    ROPE = "rope"
    UNFUSED_ROPE = "unfused-rope"
    LEARNED = "learned"

    @classmethod
    def choose(cls, name: str, device_type: str) -> Positions:
        """Return the kind of that name; `auto` takes `ROPE` where its kernel can run.

        Raises:
            ValueError: the kernel is asked for and is not there.
        """
        if name not in ("auto", cls.ROPE.value):
            return cls(name)
        if device_type == "cuda" and rope_utils.fused_apply_rotary_pos_emb_thd is not None:
            return cls.ROPE
        if name == "auto":
            return cls.LEARNED
        raise ValueError(
            f"--positions rope needs Transformer Engine's kernel on cuda, which is not here "
            f"(device {device_type}): pass learned or unfused-rope"
        )


Item = MicroBatch | dict[str, torch.Tensor]
"""A packed micro-batch, or a padded one as `forward_step.padded_batch` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of the GPT (RMSNorm, SwiGLU, untied embeddings, no dropout, no recomputation)."""

    num_layers: int
    hidden: int
    num_heads: int
    ffn_hidden: int
    vocab: int
    context: int
    positions: Positions

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads or self.hidden // self.num_heads % 8:
            raise ValueError(
                f"hidden size {self.hidden} over {self.num_heads} heads is no multiple of 8: "
                "change --hidden or --heads"
            )

    @property
    def shape(self) -> ModelShape:
        """What its FLOPs follow from."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden=self.hidden,
            ffn_hidden=self.ffn_hidden,
            query=self.hidden,
            key_value=self.hidden,
            vocab=self.vocab,
            gated_mlp=True,
        )


_POSITION_EMBEDDINGS = {
    Positions.ROPE: "rope",
    Positions.UNFUSED_ROPE: "rope",
    Positions.LEARNED: "learned_absolute",
}


def parameter_dtype(device_type: str) -> torch.dtype:
    """What parameters and activations are held in."""
    return torch.bfloat16 if device_type == "cuda" else torch.float32


def start_device(device_type: str, *, seed: int) -> None:
    """Start torch.distributed and Megatron's groups in this one process, and seed the model.

    `cpu` puts the CPU device layer in place; CUDA must be hidden then.
    """
    if device_type == "cpu":
        from odb_megatron.testing import cpu_device

        cpu_device.activate()
        torch.set_num_threads(1)  # so that CPU time is time
    else:
        torch.cuda.set_device(0)
    folder = tempfile.mkdtemp(prefix="odb-gpu-throughput-")  # needs no network, not even loopback
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.distributed.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=torch.distributed.FileStore(  # type: ignore[attr-defined]
            os.path.join(folder, "store"), 1
        ),
        rank=0,
        world_size=1,
    )
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(seed)


def attention_config(size: ModelSize, device_type: str) -> TransformerConfig:
    """Return the transformer's configuration; nothing in it needs a package beside megatron-core.

    Fusions that are compiled when first used are left off: they would be compiled anew for lengths
    that change.
    """
    dtype = parameter_dtype(device_type)
    return TransformerConfig(
        num_layers=size.num_layers,
        hidden_size=size.hidden,
        num_attention_heads=size.num_heads,
        ffn_hidden_size=size.ffn_hidden,
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
        apply_rope_fusion=size.positions is Positions.ROPE,
    )


def switch_attention(packed: Any, padded: type[Any]) -> type[torch.nn.Module]:
    """Return a core attention that runs packed samples by one class and padded ones by another.

    Neither has parameters that the other's model lacks, so one model serves both.

    Args:
        packed: what the backend's layer spec has as core attention.
        padded: class for padded micro-batches.
    """

    class SwitchedAttention(torch.nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.packed = packed(**options)
            self.padded = self.packed if packed is padded else padded(**options)

        def forward(self, *inputs: Any, packed_seq_params: Any = None, **options: Any) -> Any:
            chosen = self.padded if packed_seq_params is None else self.packed
            return chosen(*inputs, packed_seq_params=packed_seq_params, **options)

    return SwitchedAttention


class Trainer:
    """The model, its optimizer and a clock.

    Args:
        size: of the model.
        device_type: `"cuda"` or `"cpu"`, after `start_device`.
        packed: attention backend of packed micro-batches.
        padded: attention backend of padded ones.
    """

    def __init__(
        self,
        size: ModelSize,
        *,
        device_type: str,
        packed: AttentionBackend,
        padded: AttentionBackend,
    ) -> None:
        self.clock: Clock = CudaClock() if device_type == "cuda" else CpuClock()
        self.size = size
        self._config = attention_config(size, device_type)
        spec: Any = layer_spec(self._config, backend=packed)
        submodules = spec.submodules.self_attention.submodules
        submodules.core_attention = switch_attention(submodules.core_attention, padded.load())
        model: Any = GPTModel(
            config=self._config,
            transformer_layer_spec=spec,
            vocab_size=size.vocab,
            max_sequence_length=size.context,
            position_embedding_type=_POSITION_EMBEDDINGS[size.positions],
            share_embeddings_and_output_weights=False,
        )
        model.to(torch.cuda.current_device())
        if self._config.bf16:
            model = Float16Module(self._config, model)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self._model = DistributedDataParallel(self._config, ddp_config, model)
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                clip_grad=1.0,
                bf16=self._config.bf16,
                params_dtype=self._config.params_dtype,
            ),
            [self._model],
            use_gloo_process_groups=False,
        )
        self._schedule = get_forward_backward_func()
        self.num_parameters = sum(each.numel() for each in self._model.parameters())

    def begin_step(self) -> None:
        """Clear the gradients."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def run_replica(self, items: Sequence[Item]) -> tuple[list[Any], torch.Tensor]:
        """Run one replica's micro-batches forward and backward.

        Waits for the device first, so that no replica's start hides behind another's end.

        Returns:
            A mark of the clock at the start of each and one at the end, and the sums of losses and
            loss tokens on the device.
        """
        torch.cuda.synchronize()
        marks: list[Any] = []
        reports = self._run(self._marked(items, marks), len(items), forward_only=False)
        marks.append(self.clock.mark())
        return marks, reports

    def end_step(self, sums: torch.Tensor) -> tuple[list[Any], float]:
        """Divide the gradients by all replicas' loss tokens and step the optimizer.

        Args:
            sums: of losses and loss tokens, of all replicas.

        Returns:
            Two marks of the clock, and the mean loss; waits for the device.
        """
        torch.cuda.synchronize()
        marks = [self.clock.mark()]
        finalize_model_grads([self._model], sums[1].to(torch.int))
        self._optimizer.step()
        marks.append(self.clock.mark())
        torch.cuda.synchronize()
        return marks, float(sums[0] / sums[1].clamp(min=1.0))

    def loss(self, items: Sequence[Item]) -> float:
        """Mean loss of some micro-batches, without training."""
        with torch.no_grad():
            sums = self._run(iter(items), len(items), forward_only=True)
        return float(sums[0] / sums[1].clamp(min=1.0))

    def _marked(self, items: Sequence[Item], marks: list[Any]) -> Iterator[Item]:
        for item in items:
            marks.append(self.clock.mark())
            yield item

    def _run(self, items: Iterator[Item], count: int, *, forward_only: bool) -> torch.Tensor:
        reports: list[torch.Tensor] = self._schedule(
            forward_step_func=_forward_step,
            data_iterator=items,
            model=[self._model],
            num_microbatches=count,
            seq_length=self.size.context,
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
