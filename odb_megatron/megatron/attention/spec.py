"""Megatron's own GPT layer specs, with a backend's core attention in every layer.

Must not change specs that others hold: each call builds a new one. Must not read Megatron's
arguments; what it needs is in the transformer's configuration.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from odb_megatron.megatron.attention.registry import AttentionBackend

__all__ = ["layer_spec", "prediction_spec"]


def layer_spec(
    config: TransformerConfig, *, backend: AttentionBackend, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Build the decoder's spec as Megatron does, with the backend's attention.

    The backend says whether layers are local ones or Transformer Engine's; start-up holds that
    against `--transformer-impl`.

    The choice between block and layer spec is that of `default_layer_spec`
    (megatron/training/models/gpt.py 0.19.2; gpt_builders.py 0.18.2): a block spec of
    this pipeline stage's layers for mixtures of experts, one layer's spec otherwise. Model-parallel
    state must be initialised for the former.

    Args:
        config: the transformer's configuration.
        backend: from `registry.select`.
        vp_stage: virtual pipeline stage, if there is one.

    Returns:
        What `GPTModel(transformer_layer_spec=...)` takes.

    Raises:
        ValueError: heterogeneous or experimental attention, or the inference implementation: their
            specs have another shape.
        RuntimeError: the installed Megatron builds a spec of a shape not known here.
    """
    _refuse_other_shapes(config)
    has_te_layers = backend.limits.layers == "transformer_engine"
    spec: Any
    if config.num_moe_experts is not None:
        spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=has_te_layers,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
        layers = spec.layer_specs
    elif has_te_layers:
        spec = _transformer_engine_spec(config)
        layers = [spec]
    else:
        spec = get_gpt_layer_local_spec(
            multi_latent_attention=config.multi_latent_attention,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            use_kitchen=config.use_kitchen,
            use_kitchen_attention=config.use_kitchen_attention,
            kitchen_attention_backend=config.kitchen_attention_backend,
        )
        layers = [spec]
    core_attention = backend.load()
    for layer in layers:
        _self_attention_of(layer).core_attention = core_attention
    built: ModuleSpec | TransformerBlockSubmodules = spec
    return built


def prediction_spec(
    config: TransformerConfig, *, backend: AttentionBackend, vp_stage: int | None = None
) -> Any:
    """Build the spec of multi-token prediction, None without it.

    As `mtp_block_spec` does (megatron/training/models/gpt.py, 0.19.2; gpt_builders.py 0.18.2), of
    Megatron's own layer.

    Args:
        config: the transformer's configuration.
        backend: from `registry.select`.
        vp_stage: virtual pipeline stage, if there is one.
    """
    if config.mtp_num_layers is None:
        return None
    has_te_layers = backend.limits.layers == "transformer_engine"
    layers = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=has_te_layers,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    _self_attention_of(layers[-1]).core_attention = backend.load()
    return get_gpt_mtp_block_spec(
        config, layers[-1], use_transformer_engine=has_te_layers, vp_stage=vp_stage
    )


def _refuse_other_shapes(config: TransformerConfig) -> None:
    asked = [
        (config.heterogeneous_block_specs, "--heterogeneous-layers-config-path"),
        (
            getattr(config, "experimental_attention_variant", None) is not None,
            "--experimental-attention-variant",
        ),
        (
            config.transformer_impl == "inference_optimized",
            "--transformer-impl inference_optimized",
        ),
        (config.use_kitchen and config.use_kitchen_attention, "--use-kitchen-attention"),
    ]
    for is_asked, flag in asked:
        if is_asked:
            raise ValueError(
                f"{flag} builds its own attention, which does not take packed samples from this "
                "package: drop the flag"
            )


def _transformer_engine_spec(config: TransformerConfig) -> Any:
    """One layer's spec, with the options that this Megatron's function knows (0.18.2 to 0.19.2)."""
    options = {
        "multi_latent_attention": config.multi_latent_attention,
        "qk_layernorm": config.qk_layernorm,
        "qk_l2_norm": config.qk_l2_norm,
        "use_te_activation_func": config.use_te_activation_func,
        "mla_down_proj_fusion": getattr(config, "mla_down_proj_fusion", False),
        "use_grouped_gemm_for_dense_mlp": getattr(config, "use_grouped_gemm_for_dense_mlp", False),
    }
    given = {name: value for name, value in options.items() if value}
    return get_gpt_layer_with_transformer_engine_spec(**given)


def _self_attention_of(layer: Any) -> Any:
    """The self-attention submodules of one layer's spec."""
    self_attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
    submodules = getattr(self_attention, "submodules", None)
    if not isinstance(submodules, (SelfAttentionSubmodules, MLASelfAttentionSubmodules)):
        raise RuntimeError(
            "this Megatron's layer spec has no SelfAttentionSubmodules where 0.18 and 0.19 "
            f"have them (layer {type(layer).__name__}, self_attention {self_attention!r}): use "
            "one of those"
        )
    return submodules
