"""Samples that several replicas train together, through Megatron's GPTModel.

The reference is the same samples alone on one replica, with the static group.
"""

from __future__ import annotations

from typing import Any

import pytest

from odb_megatron.testing.gloo import run_replicas

pytestmark = pytest.mark.megatron

VOCABULARY = 64
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "yarn": {"position_embedding_type": "yarn"},
    "recomputed": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "experts": {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": False,
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01, "moe_token_dispatcher_type": "alltoall",
    },
}  # fmt: skip
MODELS["recomputed_experts"] = MODELS["recomputed"] | MODELS["experts"]

COLUMNS = (
    # (width, lengths of the samples) of each replica's group, of each micro-batch index
    ((2, (40, 4)), (1, (12, 8)), (1, (20,))),
    ((4, (72, 16)),),
    ((1, (4,)), (1, (8, 4)), (2, (44,))),
)


@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (2, 1), (1, 2)])
def test_loss_and_gradients_as_alone(context: int, tensor: int) -> None:
    groups = {"context_parallel_size": context, "tensor_model_parallel_size": tensor}
    for found in run_replicas(
        _measure,
        4 * context * tensor,
        groups,
        timeout_s=120,
        device_layer=True,
        model_parallel=groups,
    ):
        for name, result in found.items():
            assert result["loss"] < 1e-5, name
            assert result["checked"] < 1e-5 < 1e-2 < result["unmended"], name
            assert result["gradient"] < 1e-4, (name, result["worst"])


def _measure(rank: int, groups: dict[str, int]) -> dict[str, Any]:
    from odb_megatron.megatron import hooks

    rotates = {"_apply_rotary_pos_emb_thd": hooks._rotated_at_once}
    for name, wrap in (hooks._ROUTERS | rotates).items():
        hooks.Replacements().replace(hooks.CORRECTED[name], wrap)
    return {name: _compare(options, groups) for name, options in MODELS.items()}


def _compare(options: dict[str, Any], groups: dict[str, int]) -> dict[str, Any]:
    from datetime import timedelta

    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    from odb_megatron.megatron.sharing import SharedGroups, largest_difference

    collection = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(3)
    model = _model(options, groups)
    modules = list(model.modules())
    shared = SharedGroups(collection, range(4), timeout=timedelta(seconds=30), modules=modules)
    context, replica = collection.cp.size(), collection.dp.rank()
    generator = torch.Generator().manual_seed(7)
    samples = [
        [(width, [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths])
         for width, lengths in column]
        for column in COLUMNS
    ]  # fmt: skip
    shared.make({width for column in COLUMNS for width, _ in column})
    multiple = groups["tensor_model_parallel_size"]
    checked = largest_difference(modules, shared, multiple=multiple)
    results = {}
    for is_shared in (True, False):
        model.zero_grad(set_to_none=True)
        outputs = []
        for column in samples:
            at = 0
            for width, parts in column:
                members = range(at, at + width)
                at += width
                if (replica not in members) if is_shared else (replica != members[0]):
                    continue
                group = shared.of(width if is_shared else 1)
                outputs.append(_forward(model, parts, group, len(parts) and sum(map(len, parts))))
        sum(outputs, torch.zeros(())).backward()
        loss = sum((one.detach() for one in outputs), torch.zeros(()))
        torch.distributed.all_reduce(loss, group=collection.dp_cp)
        gradients = {}
        for name, value in model.named_parameters():
            grad = torch.zeros_like(value) if value.grad is None else value.grad.clone()
            torch.distributed.all_reduce(grad, group=collection.dp_cp)
            if getattr(value, "sequence_parallel", False):
                torch.distributed.all_reduce(grad, group=collection.tp)
            gradients[name] = grad
        results[is_shared] = (loss, gradients)
    (loss, gradients), (alone, expected) = results[True], results[False]
    worst, at = max(
        ((gradients[name] - grad).abs().max().item() / max(grad.abs().max().item(), 1e-3), name)
        for name, grad in expected.items()
    )
    assert context == groups["context_parallel_size"]
    for module in model.modules():
        module._forward_pre_hooks.clear()
    return {
        "loss": abs(1 - (loss / alone).item()),
        "gradient": worst,
        "worst": at,
        "checked": checked,
        "unmended": largest_difference(modules, shared, multiple=multiple),
    }


def _forward(model: Any, samples: list[Any], group: Any, count: int) -> Any:
    """Sum of the losses of this rank's part, as a micro-batch that names its group."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from odb_megatron.data.thd import chunk_indices

    size = group.size()
    lengths = [-(-len(sample) // (2 * size * 2)) * 2 * size * 2 for sample in samples]
    tokens = torch.cat(
        [torch.nn.functional.pad(s, (0, n - len(s))) for s, n in zip(samples, lengths, strict=True)]
    )[None]
    keep = torch.cat([torch.arange(n) < len(s) for s, n in zip(samples, lengths, strict=True)])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if size > 1:
        index = torch.from_numpy(chunk_indices(offsets.numpy(), size=size, rank=group.rank()))
        tokens, keep, positions = tokens[:, index], keep[index], positions[:, index]
    loss = model(
        tokens,
        positions,
        None,
        labels=(tokens * 7 + 1) % VOCABULARY,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            cp_group=group,
            local_cp_size=size,
        ),
        **({"padding_mask": ~keep[None]} if model.config.num_moe_experts else {}),
    )
    return (loss[0] * keep).sum()


def _model(options: dict[str, Any], groups: dict[str, int]) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    from odb_megatron.megatron import packed_attention

    options = dict(options)
    position = options.pop("position_embedding_type", "rope")
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        add_bias_linear=False,
        sequence_parallel=groups["tensor_model_parallel_size"] > 1,
        **groups,
        **options,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = packed_attention.TorchAttention
    if position == "yarn":
        named = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 32}
        named |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
        named["correction_range_round_to_int"] = True
        for name, value in named.items():  # as Megatron-Bridge sets them
            setattr(config, f"yarn_{name}", value)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=128,
        position_embedding_type=position,
    )
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.3)
    return model
