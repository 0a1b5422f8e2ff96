"""Attention of Megatron's local layers in its GPTModel: packed samples against the same ones alone.

The reference is mcore's own DotProductAttention, one sample at a time. All is measured in one
process with the CPU device layer, and judged here.
"""

from __future__ import annotations

from typing import Any

import pytest

from odb_megatron.testing.gloo import run_replicas

TOLERANCE = 1e-5
VOCABULARY = 64
LENGTHS = (5, 1, 12, 7)

MODELS: dict[str, dict[str, Any]] = {
    "rope_gqa": {},
    "scaled": {"softmax_scale": 0.5, "apply_query_key_layer_scaling": True},
    "window_in_every_second": {"window_size": (3, 0), "window_attn_skip_freq": 2},
    "latent": {"multi_latent_attention": True},
}
NOT_MCORES = {"window_in_every_second", "latent"}
"""What mcore's own attention does not do on a CPU; these are compared with packs of one sample."""

CASES = {
    "packed": (LENGTHS, 1, None),
    "padded_segments": (LENGTHS, 4, None),
    "max_seqlen_is_total": (LENGTHS, 1, sum(LENGTHS)),
    "all_of_length_1": ((1, 1, 1), 1, None),
    "zero_length_between": ((5, 0, 7), 1, None),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    (found,) = run_replicas(_measure, 1, timeout_s=120, device_layer=True, model_parallel={})
    return dict(found)


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_every_gradient_as_alone(measured: dict[str, Any], model: str) -> None:
    for case in [*CASES, "one_batch"]:
        result = measured[model, case]
        assert result["num_parameters"] >= 15
        assert result["loss"] <= TOLERANCE, case
        assert result["gradient"] <= TOLERANCE, (case, result["worst"])
    assert measured[model, "packed"]["smallest_gradient"] > 0


def test_no_sample_sees_another(measured: dict[str, Any]) -> None:
    """Changing sample 1's tokens leaves every bit of the others' losses."""
    assert measured["leak"]["changed"] > 0.01
    assert measured["leak"]["others_equal"]


def test_dropout_follows_megatrons_generator(measured: dict[str, Any]) -> None:
    assert measured["dropout"] == {
        "same_state_equal": True,
        "next_state_equal": False,
        "equal_to_evaluation": False,
        "evaluation_repeats": True,
    }


def test_every_local_layer_has_it_while_it_is_installed(measured: dict[str, Any]) -> None:
    """Dense and expert layers, and those of multi-token prediction."""
    assert measured["layers"] == ["TorchAttention"] * 3
    assert measured["layers_after"] == ["DotProductAttention"] * 3


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallelism_as_in_one_piece(size: int) -> None:
    """Each rank computes both: its chunks with the group, and the whole pack alone."""
    groups = {"context_parallel_size": size}
    for found in run_replicas(
        _measure_chunks, size, size, timeout_s=200, device_layer=True, model_parallel=groups
    ):
        assert found["output"] < 1e-6
        assert found["gradient"] < 1e-5
        assert found["largest"] > 0.1  # guard: there were gradients
        assert "for packed samples only" in found["refused"]


def _measure(rank: int) -> dict[Any, Any]:
    import torch

    torch.manual_seed(0)
    found: dict[Any, Any] = {}
    for name, options in MODELS.items():
        model = _model(packs=True, **options)
        reference = _model(packs=name in NOT_MCORES, **options)
        reference.load_state_dict(model.state_dict())
        make = _pack if name in NOT_MCORES else _row
        for case, (lengths, multiple, longest) in CASES.items():
            samples = [torch.randint(VOCABULARY, (length,)) for length in lengths]
            alone = _train(reference, [make([sample]) for sample in samples if len(sample)])
            packed = _pack(samples, multiple=multiple, max_seqlen=longest)
            found[name, case] = _difference(_train(model, [packed]), alone)
            if case == "packed":
                found[name, "one_batch"] = _difference(_train(model, [_row(samples)]), alone)
        if name == "rope_gqa":
            found["leak"] = _leak(model)
    found["dropout"], layers = _dropout(), _layers
    found["layers"], found["layers_after"] = layers(packs=True), layers(packs=False)
    return found


def _leak(model: Any) -> dict[str, Any]:
    import torch

    samples = [torch.randint(VOCABULARY, (length,)) for length in LENGTHS]
    before = _train(model, [_pack(samples)])[0]
    after = _train(model, [_pack([(samples[0] + 1) % VOCABULARY, *samples[1:]])])[0]
    first = LENGTHS[0]
    return {
        "changed": (before[:first] - after[:first]).abs().max().item(),
        "others_equal": torch.equal(before[first:], after[first:]),
    }


def _config(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    shape: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
    }
    if options.get("multi_latent_attention"):
        shape |= {
            "num_query_groups": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 8,
            "rope_type": "rope",
            "normalization": "RMSNorm",
        }
        return MLATransformerConfig(**(shape | options))
    return TransformerConfig(**(shape | options))


def _spec(config: Any, *, packs: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from odb_megatron.megatron.attention import Attention

    undo = Attention(name="torch" if packs else "other", reason="").install()
    try:
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
    finally:
        undo()


def _model(*, packs: bool, **options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    config = _config(**options)
    rope = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": True}
    return GPTModel(config, _spec(config, packs=packs), VOCABULARY, 64, **rope)


def _layers(*, packs: bool) -> list[str]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config = _config(num_moe_experts=2, moe_layer_freq=[1, 0], mtp_num_layers=1)
    block = _spec(config, packs=packs)
    predicted = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    layers = [*block.layer_specs, predicted.layer_specs[0].submodules.mtp_model_layer]
    return [each.submodules.self_attention.submodules.core_attention.__name__ for each in layers]


def _row(samples: list[Any]) -> dict[str, Any]:
    """Right-padded batch [b, s]; padding holds token 3."""
    import torch

    longest = max(len(sample) for sample in samples)
    tokens = torch.full((len(samples), longest), 3)
    keep = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)], keep[row, : len(sample)] = sample, True
    positions = torch.arange(longest).expand(len(samples), -1)
    mask = torch.ones(1, 1, longest, longest, dtype=torch.bool).triu(1)
    return {"tokens": tokens, "positions": positions, "keep": keep, "mask": mask, "packed": None}


def _pack(
    samples: list[Any], *, multiple: int = 1, max_seqlen: int | None = None
) -> dict[str, Any]:
    """One pack [1, t]; each sample padded to a multiple with token 3."""
    import torch

    padded = [-(-len(sample) // multiple) * multiple for sample in samples]
    tokens = torch.full((1, sum(padded)), 3)
    keep = torch.zeros(1, sum(padded), dtype=torch.bool)
    start = 0
    for sample, room in zip(samples, padded, strict=True):
        tokens[0, start : start + len(sample)] = sample
        keep[0, start : start + len(sample)] = True
        start += room
    positions = torch.cat([torch.arange(room) for room in padded])[None]
    packed = _params(padded, max_seqlen or max(padded))
    return {"tokens": tokens, "positions": positions, "keep": keep, "mask": None, "packed": packed}


def _params(lengths: list[int], longest: int) -> Any:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _train(model: Any, inputs: list[dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """Token losses of the kept positions, in order, and the gradients of their sum."""
    import torch

    model.zero_grad(set_to_none=True)
    losses = []
    for each in inputs:
        loss = model(
            each["tokens"],
            each["positions"],
            each["mask"],
            labels=(each["tokens"] * 7 + 1) % VOCABULARY,
            packed_seq_params=each["packed"],
        )[each["keep"]]
        loss.sum().backward()
        losses.append(loss.detach())
    return torch.cat(losses), {n: value.grad.clone() for n, value in model.named_parameters()}


def _difference(got: tuple[Any, Any], expected: tuple[Any, Any]) -> dict[str, Any]:
    """Largest difference of a token loss; largest one of a gradient, relative to its largest."""
    scales = {name: grad.abs().max().item() for name, grad in expected[1].items()}
    relative = {
        name: (got[1][name] - grad).abs().max().item() / max(scales[name], 1e-3)
        for name, grad in expected[1].items()
    }
    worst = max(relative, key=lambda name: relative[name])
    return {
        "loss": (got[0] - expected[0]).abs().max().item(),
        "gradient": relative[worst],
        "worst": worst,
        "num_parameters": len(relative),
        "smallest_gradient": min(scales.values()),
    }


def _attention(**options: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from odb_megatron.megatron.packed_attention import TorchAttention

    return TorchAttention(_config(**options), 1, AttnMaskType.causal, "self")


def _dropout() -> dict[str, Any]:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tensors = [torch.randn(8, heads, 8) for heads in (4, 2, 2)]
    attention = _attention(attention_dropout=0.5)

    def run() -> Any:
        return attention(*tensors, None, packed_seq_params=_params([3, 5], 5))

    states = get_cuda_rng_tracker().get_states()
    first, second = run(), run()
    get_cuda_rng_tracker().set_states(states)
    again = run()
    attention.eval()
    return {
        "same_state_equal": torch.equal(first, again),
        "next_state_equal": torch.equal(first, second),
        "equal_to_evaluation": torch.equal(first, run()),
        "evaluation_repeats": torch.equal(run(), run()),
    }


def _measure_chunks(rank: int, size: int) -> dict[str, Any]:
    import torch

    from odb_megatron.data.thd import chunk_indices

    found = {"output": 0.0, "gradient": 0.0, "largest": 0.0}
    for lengths in ([2, 1], [1, 1, 4, 0], [1]):
        lengths = [2 * size * length for length in lengths]
        packed = _params(lengths, max(lengths))
        torch.manual_seed(0)
        whole = [torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        weights = torch.randn(sum(lengths), 32)
        offsets = packed.cu_seqlens_q.numpy()
        index = torch.from_numpy(chunk_indices(offsets, size=size, rank=rank))
        expected = _attention()(*whole, None, packed_seq_params=packed)
        (expected * weights).sum().backward()

        attention = _attention(context_parallel_size=size)
        own = [tensor.detach()[index].requires_grad_() for tensor in whole]
        output = attention(*own, None, packed_seq_params=packed)
        (output * weights[index]).sum().backward()
        pairs = zip(own, whole, strict=True)
        apart = max(float((a.grad - b.grad[index]).abs().max()) for a, b in pairs)
        found["output"] = max(found["output"], float((output - expected[index]).abs().max()))
        found["gradient"] = max(found["gradient"], apart)
        found["largest"] = max(found["largest"], float(whole[0].grad[index].abs().max()))
    try:
        attention(*(torch.randn(4, 1, heads, 8) for heads in (4, 2, 2)), None)
    except ValueError as error:
        return found | {"refused": str(error)}
    return found
