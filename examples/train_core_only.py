"""Train a GPT with ODB on megatron-core alone: a small loop over `get_forward_backward_func`.

For loops of your own. Data, plans and packed attention are those of pretrain_gpt_odb.py;
checkpoints and evaluation are left out. One line is printed per step: its samples, M and the loss.

    torchrun --nproc-per-node 2 examples/train_core_only.py --data-path chat.jsonl \
        --tokenizer-model /path/to/hf-tokenizer --train-samples 512

Without a GPU put `-m odb_megatron.cpu` before the script.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.utils import Split
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.megatron_dataset import (
    SampleDatasetConfig,
    build_datasets,
    stream_from_dataset,
)
from odb_megatron.data.order import build_order
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.tokenizer import load_tokenizer
from odb_megatron.data.wire import StepHeader
from odb_megatron.errors import usage_errors
from odb_megatron.megatron.attention import Attention
from odb_megatron.megatron.config import OdbConfig, add_odb_arguments
from odb_megatron.megatron.forward_step import packed_batch
from odb_megatron.megatron.pipeline import planned_shapes
from odb_megatron.megatron.providers import build_loader, source_group
from odb_megatron.megatron.replica import ReplicaData, replica_ranks
from odb_megatron.megatron.topology import padding_multiple
from odb_megatron.megatron.validation import refuse_unsupported

LEFT_OUT = ("epochs", "log_dir", "dry_run")
"""Flags of ODB's for what this loop does not have."""


def main() -> None:
    """Train."""
    args = parse_args()
    start_processes(args)
    with usage_errors():
        config = OdbConfig.from_args(args)
        tokenizer = load_tokenizer(args.tokenizer_model)
        args.padded_vocab_size = -(-len(tokenizer) // 128) * 128
        refuse_unsupported(args, config)
    model = build_model(args, config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=1.0, weight_decay=0.01), [model]
    )
    replica = build_data(args, config, ChatRenderer(tokenizer))
    try:
        train(args, model, optimizer, replica)
    finally:
        replica.close(timeout_s=60.0)
    torch.distributed.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """Parse the command line; names are Megatron's, so the package's functions read them."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data-path", required=True, help="JSON or JSONL chat or text file")
    parser.add_argument("--tokenizer-model", required=True, help="HF folder")
    parser.add_argument("--train-samples", type=int, default=256)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--num-workers", type=int, default=0, help="data-loader workers")
    for name in ("tensor", "pipeline"):
        parser.add_argument(f"--{name}-model-parallel-size", type=int, default=1)
    args = add_odb_arguments(parser).parse_args()
    for name in LEFT_OUT:
        if getattr(args, f"odb_{name}") not in (None, False):
            parser.error(f"this loop does not have --odb-{name.replace('_', '-')}: drop it")
    args.odb = True
    fixed = {
        "calculate_per_token_loss": True,
        "micro_batch_size": 1,
        "dataloader_type": "single",
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "group_query_attention": False,
        "ffn_hidden_size": 4 * args.hidden_size,
        "kv_channels": args.hidden_size // args.num_attention_heads,
        "swiglu": True,
        "consumed_train_samples": 0,
        "distributed_timeout_minutes": 10,
    }
    vars(args).update(fixed)
    return args


def start_processes(args: argparse.Namespace) -> None:
    """Start torch.distributed and Megatron's groups, and seed the model."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    minutes = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=minutes)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
    )
    args.rank, args.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    args.data_parallel_size = mpu.get_data_parallel_world_size()
    model_parallel_cuda_manual_seed(args.seed)


def build_model(args: argparse.Namespace, config: OdbConfig) -> DistributedDataParallel:
    """Build this pipeline stage of a GPT whose attention takes packed samples."""
    transformer = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        # Σ token losses / Σ loss tokens over the whole step, whatever M is.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    Attention(name="torch", reason="in float32, on any device").install()
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    model.to(torch.cuda.current_device())
    return DistributedDataParallel(transformer, DistributedDataParallelConfig(), model)


def build_data(args: argparse.Namespace, config: OdbConfig, renderer: ChatRenderer) -> ReplicaData:
    """Build the training data; every rank calls it, and the first of each replica reads."""
    place = replica_ranks(args, rank=args.rank)
    rules = config.sample_rules(multiple=padding_multiple(args))
    (dataset, *_) = build_datasets(
        SampleDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            blend=([args.data_path], None),
            split="1,0,0",
            rules=rules,
            renderer=renderer,
        ),
        num_samples=[args.train_samples, 0, 0],
        is_built_on_rank=lambda: place.is_source,
    )
    group = source_group(args, name="train")

    def make_loaders() -> list[StepLoader | None]:
        order = build_order(
            args.dataloader_type,
            total=args.train_samples,
            num_replicas=args.data_parallel_size,
            data_sharding=True,
        )
        stream = stream_from_dataset(dataset, num_samples=args.train_samples, order=order)
        loader = build_loader(args, config, stream, split=Split.train, group=group)
        return [loader, None, None]

    replica = ReplicaData(args, place)
    replica.build(make_loaders)
    return replica


def train(
    args: argparse.Namespace, model: DistributedDataParallel, optimizer: Any, replica: ReplicaData
) -> None:
    """Run all steps: each is a header, which says M, and M micro-batches."""
    items = replica.iterators(0)[0]
    assert items is not None, "the train split has data"
    schedule = get_forward_backward_func()
    is_final = False
    while not is_final:
        header = next(items)
        assert isinstance(header, StepHeader)
        totals = header.totals
        model.zero_grad_buffer()
        optimizer.zero_grad()
        arguments = {
            "forward_step_func": forward_step,
            "data_iterator": items,
            "model": [model],
            "num_microbatches": totals.num_micro_batches,
            "seq_length": args.seq_length,
            "micro_batch_size": 1,
            "forward_only": False,
        }
        with planned_shapes(arguments, header.sizes):
            reports = schedule(**arguments)
        optimizer.step()
        if mpu.is_pipeline_last_stage():
            loss = mean_loss(reports)
            if mpu.get_data_parallel_rank() == mpu.get_tensor_model_parallel_rank() == 0:
                print(
                    f"step {totals.step} | samples {totals.num_consumed} | "
                    f"M {totals.num_micro_batches} | loss {loss:.6f}",
                    flush=True,
                )
        is_final = totals.is_final


def forward_step(items: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch forward."""
    batch = packed_batch(next(items))
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
    )
    return output, partial(loss_func, batch.loss_mask)


def loss_func(
    loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of weighted token losses, sum of weights, and both to report.

    Three values: with two the schedule would divide by the number of micro-batches.
    """
    assert loss_mask is not None, "the last pipeline stage has it"
    loss = (output.view(-1).float() * loss_mask.view(-1)).sum()
    count = loss_mask.sum()
    return loss, count.round().to(torch.int), torch.stack([loss.detach(), count])


def mean_loss(reports: list[torch.Tensor]) -> float:
    """Σ token losses / Σ loss tokens of a step, over micro-batches and replicas."""
    sums = torch.stack(reports).sum(dim=0)
    torch.distributed.all_reduce(sums, group=mpu.get_data_parallel_group())
    return float(sums[0] / sums[1].clamp(min=1.0))


if __name__ == "__main__":
    main()
