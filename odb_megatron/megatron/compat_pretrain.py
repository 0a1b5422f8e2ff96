"""How `pretrain()` is called, which every Megatron version wants in another way.

Must not parse or change arguments: they come from `setup.read_args`. Which form a version has is
told by its functions' parameters, never by its number.

| form | `pretrain()` takes |
|---|---|
| `PARSES` (0.16, 0.17) | no configuration; it parses the command line itself |
| `MODEL_PROVIDER` (0.18) | a configuration container, and a function that builds the model |
| `MODEL_CONFIG` (0.19) | a configuration container that says how the model is built |
"""

from __future__ import annotations

import argparse
import enum
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "GptModel",
    "PretrainForm",
    "already_parsed",
    "gpt_model_provider",
    "mtp_block_spec",
    "pretrain_form",
    "pretrain_gpt",
]


class PretrainForm(enum.Enum):
    """What a `pretrain()` takes besides data and forward step; see the module's table."""

    PARSES = "parses"
    MODEL_PROVIDER = "model provider"
    MODEL_CONFIG = "model configuration"


@dataclass(slots=True)
class GptModel:
    """What is built where Megatron has no `GPTModelConfig`; the two fields have its names.

    Attributes:
        transformer: the transformer's configuration, which all chunks of a virtual pipeline share.
        transformer_layer_spec: called with this object and `vp_stage`; returns the layers' spec.
    """

    transformer: Any
    transformer_layer_spec: Callable[..., Any] | None = None


def pretrain_form(pretrain: Callable[..., Any] | None = None) -> PretrainForm:
    """Return the form of a `pretrain()`; of the installed Megatron's where none is given.

    Raises:
        ValueError: a form that is not known here.
    """
    if pretrain is None:
        from megatron.training import training

        pretrain = training.pretrain
    stands_for = getattr(getattr(pretrain, "__self__", None), "original", pretrain)
    names = list(inspect.signature(stands_for).parameters)
    first = "train_valid_test_dataset_provider"
    if names[:4] == [first, "model_provider", "model_type", "forward_step_func"]:
        return PretrainForm.PARSES
    if names[:5] == ["cfg_container", first, "model_provider", "model_type", "forward_step_func"]:
        return PretrainForm.MODEL_PROVIDER
    if names[:4] == ["cfg_container", first, "model_type", "forward_step_func"]:
        return PretrainForm.MODEL_CONFIG
    raise ValueError(
        f"this Megatron's pretrain() takes ({', '.join(names[:5])}, ...), which is not a form that "
        "this odb_megatron knows: use megatron-core 0.17 to 0.19"
    )


def pretrain_gpt(
    args: argparse.Namespace,
    *,
    prepare_model: Callable[[Any], None],
    datasets_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    model_class: Callable[..., Any] | None = None,
) -> None:
    """Pretrain a GPT as pretrain_gpt.py of the installed version does.

    Args:
        args: from `setup.read_args`, which has set Megatron's globals.
        prepare_model: sets the layer spec of a `GPTModelConfig` or `GptModel`, and changes its
            transformer's configuration.
        datasets_provider: as upstream.
        forward_step: as upstream.
        model_class: takes the keyword arguments of `GPTModel`, which it stands for; None for that.
    """
    from megatron.core.enums import ModelType
    from megatron.training import training

    pretrain, model_type = training.pretrain, ModelType.encoder_or_decoder
    form = pretrain_form(pretrain)
    if form is PretrainForm.MODEL_CONFIG:
        from megatron.training import argument_utils

        model_config = argument_utils.gpt_config_from_args(args)
        prepare_model(model_config)
        container = argument_utils.pretrain_cfg_container_from_args(args, model_config)
        with _built_by(model_class):
            pretrain(container, datasets_provider, model_type, forward_step)
        return
    provider = gpt_model_provider(args, prepare_model, model_class=model_class)
    positional = [datasets_provider, provider, model_type, forward_step]
    if form is PretrainForm.MODEL_PROVIDER:
        from megatron.training import argument_utils

        positional.insert(0, argument_utils.pretrain_cfg_container_from_args(args))
    with already_parsed(args) if form is PretrainForm.PARSES else nullcontext():
        pretrain(*positional)


def mtp_block_spec(config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
    """Return the spec of multi-token prediction, None without it; gpt_builders.py 0.17.1, 0.18.2.

    Where Megatron has a function of this name (megatron/training/models/gpt.py, 0.19.2), that one
    is used.

    Args:
        config: has `transformer`, the transformer's configuration.
        transformer_layer_spec: not needed: what is built is Megatron's own layer.
        vp_stage: virtual pipeline stage, if there is one.
    """
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )

    del transformer_layer_spec
    transformer = config.transformer
    if transformer.mtp_num_layers is None:
        return None
    layers = get_gpt_decoder_layer_specs(
        transformer,
        use_transformer_engine=False,
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return get_gpt_mtp_block_spec(
        transformer, layers[-1], use_transformer_engine=False, vp_stage=vp_stage
    )


def gpt_model_provider(
    args: argparse.Namespace,
    prepare_model: Callable[[Any], None],
    *,
    model_class: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a model provider that builds as gpt_builders.py does (0.17.1, 0.18.2).

    Args:
        args: from `setup.read_args`.
        prepare_model: see `pretrain_gpt`.
        model_class: see `pretrain_gpt`.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.training.arguments import core_transformer_config_from_args

    model = GptModel(transformer=core_transformer_config_from_args(args))
    prepare_model(model)
    _keep_what_is_sent(model.transformer)
    make_spec = model.transformer_layer_spec or _decoder_spec

    def model_provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        assert config is None, "given where a second model is built, which is refused"
        spec = make_spec(model, vp_stage=vp_stage)
        return (model_class or GPTModel)(
            config=model.transformer,
            transformer_layer_spec=spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            mtp_block_spec=mtp_block_spec(model, spec, vp_stage=vp_stage),
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )

    return model_provider


def _decoder_spec(model: GptModel, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = model.transformer
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )


@contextmanager
def _built_by(model_class: Callable[..., Any] | None) -> Iterator[None]:
    """Let `GPTModelBuilder` build another class, which it does not offer (gpt.py 252, 0.19.2)."""
    if model_class is None:
        yield
        return
    from megatron.training.models import gpt

    original, gpt.GPTModel = gpt.GPTModel, model_class
    try:
        yield
    finally:
        gpt.GPTModel = original


def _keep_what_is_sent(transformer: Any) -> None:
    """Leave a stage's output in memory, which 0.17 frees while it is still being sent.

    That is in its interleaved schedule with overlapped sends, which needs one length for all
    micro-batches; 0.18.2 waits (schedules.py 1592, 1719).
    """
    overlaps = transformer.overlap_p2p_comm and not transformer.variable_seq_lengths
    is_interleaved = transformer.virtual_pipeline_model_parallel_size is not None
    if is_interleaved and overlaps and pretrain_form() is PretrainForm.PARSES:
        transformer.deallocate_pipeline_outputs = False


@contextmanager
def already_parsed(args: argparse.Namespace) -> Iterator[None]:
    """Have `initialize_megatron` take these arguments, whose globals are set (0.17.1).

    It parses, validates and sets them by four functions of its module, in this order. The folder of
    the progress log is made, which it opens on rank 0 (utils.py 467; 0.18.2 makes it).
    """
    from megatron.training import initialize

    if args.log_progress and args.save and args.rank == 0:
        Path(args.save).mkdir(parents=True, exist_ok=True)

    def parse_args(*_args: Any, **_options: Any) -> argparse.Namespace:
        return args

    def nothing(*_args: Any, **_options: Any) -> None:
        return None

    replacements = {
        "parse_args": parse_args,
        "load_args_from_checkpoint": nothing,
        "validate_args": nothing,
        "set_global_variables": nothing,
    }
    originals = {name: getattr(initialize, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(initialize, name, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(initialize, name, original)
