"""What arguments ask of an attention backend."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from odb_megatron.megatron.attention.needs import Feature, graphed_modules, need_of

MLP = {"cuda_graph_modules": ["mlp"]}


@pytest.mark.parametrize(
    ("values", "modules"),
    [
        ({}, ()),
        ({"cuda_graph_scope": "full"}, ()),
        ({"cuda_graph_modules": "attn,mlp"}, ("attn", "mlp")),
        ({"cuda_graph_modules": [], "cuda_graph_scope": None}, ()),
    ],
)
def test_what_is_put_into_graphs(values: dict[str, Any], modules: tuple[str, ...]) -> None:
    assert graphed_modules(argparse.Namespace(**values)) == modules


def test_enums_of_modules() -> None:
    enums = pytest.importorskip("megatron.core.transformer.enums")
    scope = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
    assert graphed_modules(argparse.Namespace(cuda_graph_modules=[scope.attn])) == ("attn",)


@pytest.mark.parametrize(
    ("values", "features"),
    [
        ({}, set()),
        ({"attention_dropout": 0.1}, {Feature.DROPOUT}),
        ({"window_size": (128, 0)}, {Feature.WINDOW}),
        ({"softmax_type": "learnable"}, {Feature.SINK}),
        ({"qk_clip": True}, {Feature.MAX_LOGIT}),
        ({"log_max_attention_logit": True}, {Feature.MAX_LOGIT}),
        ({"deterministic_mode": True}, {Feature.DETERMINISTIC}),
        ({"context_parallel_size": 2}, {Feature.CONTEXT_PARALLEL}),
        ({"cuda_graph_impl": "local"}, {Feature.GRAPHS}),
        ({"cuda_graph_impl": "local", **MLP}, set()),
    ],
)
def test_features_that_arguments_ask_for(values: dict[str, Any], features: set[Feature]) -> None:
    assert need_of(argparse.Namespace(**values)).features == features


def test_numbers_that_arguments_ask_for() -> None:
    need = need_of(argparse.Namespace(bf16=True, kv_channels=96), capability=(9, 0))
    assert (need.dtype, need.head_size, need.layers) == ("bfloat16", 96, "local")
    assert need.capability == (9, 0)
    latent = argparse.Namespace(
        multi_latent_attention=True,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        fp16=True,
        transformer_impl="transformer_engine",
    )
    need = need_of(latent)
    assert (need.dtype, need.head_size, need.layers) == ("float16", 192, "transformer_engine")
