"""`odb_megatron.megatron.kernel_rules` and the multiples that FP8 asks for."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.kernel_rules import graphed_modules, kernel_messages
from odb_megatron.megatron.topology import padding_multiple
from odb_megatron.plan.padding import padded_length

TE = {"transformer_impl": "transformer_engine", "fp8": "hybrid"}
MLP = {"cuda_graph_modules": ["mlp"]}
GRAPHS = {"cuda_graph_impl": "transformer_engine", "odb_pad_to": ["budget"]}


def _args(**values: Any) -> argparse.Namespace:
    from odb_megatron.megatron.config import add_odb_arguments

    args = add_odb_arguments(argparse.ArgumentParser()).parse_args(["--odb"])
    defaults = {"seq_length": 128, "global_batch_size": 8, "apply_rope_fusion": True}
    for name, value in {**defaults, **values}.items():
        setattr(args, name, value)
    return args


def _messages(**values: Any) -> list[str]:
    args = _args(**values)
    return kernel_messages(args, OdbConfig.from_args(args))


@pytest.mark.parametrize(
    "values",
    [
        {},
        TE,
        {**TE, "fp8_recipe": "mxfp8"},
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": "local", "odb_pad_to": ["budget"]},
        {**GRAPHS, **MLP},
        {**GRAPHS, "cuda_graph_scope": "mlp"},
        {**GRAPHS, **MLP, "seq_length": 96, "odb_token_budget": 96},
        {
            **{"cuda_graph_impl": "local", "odb_pad_to": ["budget"], **MLP},
            "apply_rope_fusion": False,
        },
    ],
)
def test_what_fits(values: dict[str, Any]) -> None:
    assert _messages(**values) == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"fp4": "e2m1"}, "no FP4 in this version: use --fp8-format or --bf16"),
        ({"fp8": "e4m3"}, "use --transformer-impl transformer_engine"),
        ({**TE, "fp8_recipe": "custom"}, "--fp8-recipe custom does not say"),
        ({"cuda_graph_impl": "local"}, "add --odb-pad-to budget"),
        ({"cuda_graph_impl": "transformer_engine", **MLP}, "add --odb-pad-to budget"),
        ({"cuda_graph_impl": "full_iteration"}, "replays a whole step"),
        (
            {**GRAPHS, "cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
            "--cuda-graph-scope full_iteration",
        ),
        ({"enable_cuda_graph": True}, "use --cuda-graph-impl local or transformer_engine"),
        ({"external_cuda_graph": True}, "use --cuda-graph-impl local or transformer_engine"),
        (GRAPHS, "leave attention out with --cuda-graph-modules mlp"),
        ({**GRAPHS, "cuda_graph_modules": ["mlp", "attn"]}, "leave attention out"),
        ({**GRAPHS, **MLP, "odb_token_budget": 256}, "captures --seq-length 128 tokens, and"),
        ({**GRAPHS, **MLP, "pipeline_model_parallel_size": 2}, "use --cuda-graph-impl local"),
        (
            {**GRAPHS, "cuda_graph_impl": "local", "apply_rope_fusion": False},
            "drop --no-rope-fusion",
        ),
    ],
)
def test_what_is_refused(values: dict[str, Any], text: str) -> None:
    (message,) = _messages(**values)
    assert text in message


@pytest.mark.parametrize(
    ("values", "multiple"),
    [
        ({}, 1),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, 32),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "fp8": "hybrid"}, 32),
        ({"tensor_model_parallel_size": 2, "fp8": "hybrid"}, 16),
        ({"context_parallel_size": 4, "fp8": "hybrid", "fp8_recipe": "mxfp8"}, 128),
        ({"context_parallel_size": 2}, 4),
    ],
)
def test_the_multiple_of_every_flag_together(values: dict[str, Any], multiple: int) -> None:
    assert padding_multiple(argparse.Namespace(**values)) == multiple


@pytest.mark.parametrize(
    ("recipe", "size", "padded"), [("delayed", 16, 11488), ("mxfp8", 32, 11520)]
)
def test_a_rank_s_share_in_fp8(recipe: str, size: int, padded: int) -> None:
    """pitfalls.md, FP8 shapes: 11486 tokens, TP 2, sequence parallel."""
    args = argparse.Namespace(
        tensor_model_parallel_size=2, sequence_parallel=True, fp8="hybrid", fp8_recipe=recipe
    )
    assert padded_length(11486, padding_multiple(args)) == padded
    assert padded // 2 % size == 0


def test_megatrons_own_multiples() -> None:
    fp8_utils = pytest.importorskip("megatron.core.fp8_utils")
    from megatron.core.enums import Fp8Recipe

    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        args = argparse.Namespace(fp8="hybrid", fp8_recipe=recipe)
        assert padding_multiple(args) == fp8_utils.get_fp8_align_size(Fp8Recipe[recipe])


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
