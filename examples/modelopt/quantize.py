"""Calibrates and quantizes the GPT of --load on packed micro-batches, and writes it to --save.

--train-samples says how many samples calibrate: the first of those that training on the same data
with the same seed would see. Data-loader workers import this module again, so it imports neither
torch nor Megatron before it runs. See docs/models.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the name of a configuration in modelopt.torch.quantization."""
    from odb_megatron.megatron.modelopt.run import add_modelopt_arguments

    parser.add_argument("--modelopt-quant-cfg", default="INT8_DEFAULT_CFG")
    return add_modelopt_arguments(parser)


def check(args: argparse.Namespace) -> None:
    """Check the flags, and have weights alone loaded.

    Raises:
        ValueError: flags that cannot be used.
    """
    from odb_megatron.megatron.modelopt.checkpoint import is_converted, require_checkpoint
    from odb_megatron.megatron.modelopt.run import refuse_unsupported
    from odb_megatron.megatron.setup import total_samples
    from odb_megatron.megatron.topology import padding_multiple

    refuse_unsupported(args)
    if not args.load or not args.save or Path(args.load).resolve() == Path(args.save).resolve():
        raise ValueError("quantizing reads a model and writes another: give --load and --save")
    if is_converted(require_checkpoint(args)):
        raise ValueError(f"--load {args.load} is quantized already: give what it was made of")
    if not args.odb or args.odb_pad_to or padding_multiple(args) > 1:
        raise ValueError(
            "padding would count in the quantizers' ranges: calibrate with --odb, and without "
            "--odb-pad-to, --context-parallel-size and --sequence-parallel"
        )
    if total_samples(args) < args.global_batch_size:
        raise ValueError(
            f"--train-samples {total_samples(args)} is below --global-batch-size "
            f"{args.global_batch_size}, so that a replica may get none: raise it"
        )
    args.iteration, args.finetune, args.eval_iters = 0, True, 0
    args.no_load_optim = args.no_load_rng = args.no_save_optim = args.no_save_rng = True


def forward(models: list[Any], items: Iterator[Any], run: Any, _model: Any, *, length: int) -> None:
    """Run all steps forward; idle micro-batches, whose tokens are padding, are left out."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from odb_megatron.megatron.pipeline import planned_shapes

    is_final = False
    while not is_final:
        header = next(items)
        batches = zip(header.sizes, [next(items) for _ in header.sizes], strict=True)
        used = [(tokens, item) for tokens, item in batches if not item.is_idle]
        is_final = header.totals.is_final
        if used:
            arguments = {
                "forward_step_func": run.forward_step,
                "data_iterator": iter([item for _, item in used]),
                "model": models,
                "num_microbatches": len(used),
                "seq_length": length,
                "micro_batch_size": 1,
                "forward_only": True,
            }
            with torch.no_grad(), planned_shapes(arguments, [tokens for tokens, _ in used]):
                get_forward_backward_func()(**arguments)


def main() -> None:
    """Quantize as the command line says."""
    from odb_megatron.errors import usage_errors
    from odb_megatron.megatron.run import OdbRun
    from odb_megatron.megatron.setup import parse_and_validate_args, total_samples

    defaults = {"tokenizer_type": "HuggingFaceTokenizer", "save_interval": 1}
    args = parse_and_validate_args(defaults, add_arguments)
    with usage_errors():
        check(args)
        import modelopt.torch.quantization as mtq

        config = getattr(mtq, args.modelopt_quant_cfg, None)
        if config is None:
            raise ValueError(f"ModelOpt has no configuration {args.modelopt_quant_cfg!r}")
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.core.utils import unwrap_model
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import get_model

    from odb_megatron.megatron.modelopt.checkpoint import saving_state

    with OdbRun(args) as run, saving_state():
        initialize_megatron()
        get_rerun_state_machine().set_mode(RerunMode.DISABLED)
        models = get_model(run.model_provider, wrap_with_ddp=False)
        load_checkpoint(models, None, None)
        items, *_ = run.datasets_provider([total_samples(args), 0, 0])
        model = unwrap_model(models[0]).eval()
        # ModelOpt takes the largest range of all replicas.
        mtq.quantize(model, config, partial(forward, models, items, run, length=args.seq_length))
        save_checkpoint(0, models, None, None, 0, release=True)


if __name__ == "__main__":
    main()
