"""The calls of attention kernels that this package makes, as their packages declare them.

Must not import the packages. Recorded from their sources (public repositories, tags named below);
`tests/test_kernel_signatures.py` holds them against the installed package or the source where there
is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter

__all__ = ["SIGNATURES", "KernelSignature"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSignature:
    """One function of a package.

    Attributes:
        repository: owner/name.
        tag: where it was read.
        path: file in the repository.
        function: its name there, `Class.method` for a method.
        module: where an installed package has it.
        required: arguments without a default, in order.
        optional: those with one, in order.
        keyword_only: those behind a bare star.
    """

    repository: str
    tag: str
    path: str
    function: str
    module: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()

    def signature(self) -> inspect.Signature:
        """Return it for `bind`, defaults None."""
        kind = Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature(
            [
                *(Parameter(name, kind) for name in self.required),
                *(Parameter(name, kind, default=None) for name in self.optional),
                *(
                    Parameter(name, Parameter.KEYWORD_ONLY, default=None)
                    for name in self.keyword_only
                ),
            ]
        )


_FLASH = "Dao-AILab/flash-attention"
_TE = "NVIDIA/TransformerEngine"
_DPA = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"
_DPA_MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
_DPA_REQUIRED = ("query_layer", "key_layer", "value_layer")
_DPA_CU_SEQLENS = (
    *("attention_mask", "qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"),
    *("cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "attn_mask_type", "window_size"),
)
_DPA_BIAS = (
    *("checkpoint_core_attention", "core_attention_bias_type", "core_attention_bias"),
    *("alibi_slopes", "fast_zero_fill", "inference_params", "pad_between_seqs", "fp8_output"),
)
_FLASH_REQUIRED = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
)

SIGNATURES: Mapping[str, KernelSignature] = {
    "flash": KernelSignature(
        repository=_FLASH,
        tag="v2.8.3",
        path="flash_attn/flash_attn_interface.py",
        function="flash_attn_varlen_func",
        module="flash_attn",
        required=_FLASH_REQUIRED,
        optional=(
            *("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"),
            *("deterministic", "return_attn_probs", "block_table"),
        ),
    ),
    "flash3": KernelSignature(
        repository=_FLASH,
        tag="0251105a",
        path="hopper/flash_attn_interface.py",
        function="flash_attn_varlen_func",
        module="flash_attn_interface",
        required=_FLASH_REQUIRED,
        optional=(
            *("seqused_q", "seqused_k", "softmax_scale", "causal", "qv", "q_descale", "k_descale"),
            *("v_descale", "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa"),
            *("deterministic", "sm_margin", "return_attn_probs"),
        ),
    ),
    "flash4": KernelSignature(
        repository=_FLASH,
        tag="0251105a",
        path="flash_attn/cute/interface.py",
        function="flash_attn_varlen_func",
        module="flash_attn.cute",
        required=("q", "k", "v"),
        optional=(
            *("qv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
            *("min_seqlen_k", "seqused_q", "seqused_k", "gather_kv_indices", "page_table"),
            *("softmax_scale", "causal", "window_size", "learnable_sink", "softcap", "num_splits"),
            *("pack_gqa", "deterministic", "score_mod", "score_mod_bwd", "mask_mod"),
            *("block_sparse_tensors", "aux_tensors", "aux_scalars", "return_lse"),
            *("scheduler_metadata", "seqlen_k_per_split", "disable_scheduler_metadata"),
        ),
    ),
    "torch": KernelSignature(
        repository="pytorch/pytorch",
        tag="v2.13.0",
        path="torch/nn/attention/varlen.py",
        function="varlen_attn",
        module="torch.nn.attention.varlen",
        required=("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
        keyword_only=(
            *("return_aux", "scale", "window_size", "enable_gqa", "seqused_k", "block_table"),
            "num_splits",
        ),
    ),
    "te": KernelSignature(
        repository=_TE,
        tag="v2.9",
        path=_DPA,
        function="DotProductAttention.forward",
        module=_DPA_MODULE,
        required=_DPA_REQUIRED,
        optional=(*_DPA_CU_SEQLENS, *_DPA_BIAS),
    ),
    "te 2.18": KernelSignature(
        repository=_TE,
        tag="v2.18",
        path=_DPA,
        function="DotProductAttention.forward",
        module=_DPA_MODULE,
        required=_DPA_REQUIRED,
        optional=(
            *(*_DPA_CU_SEQLENS, "bottom_right_diagonal", *_DPA_BIAS),
            *("num_splits", "score_mod", "score_mod_bprop", "score_mod_tensors"),
            "score_mod_bprop_tensors",
        ),
    ),
}
"""By backend; for Transformer Engine the oldest that is supported and a newer one."""
