"""What test_attention.py judges: losses, gradients and errors of attention in tiny GPT models.

Runs in a process with the CPU device layer and imports Megatron only inside functions, so that the
pytest process stays without both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

VOCABULARY = 64
CONTEXT = 64
LENGTHS = (5, 1, 12, 7)

MODELS: dict[str, dict[str, Any]] = {
    "rope_gqa": {},
    "learned_absolute": {"position_embedding_type": "learned_absolute"},
    "swiglu_rmsnorm_untied": {
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
    },
    "scaled": {"softmax_scale": 0.5, "apply_query_key_layer_scaling": True},
    "mha": {"num_query_groups": 4},
    "window": {"window_size": (3, 0)},
    "window_in_every_second": {"window_size": (3, 0), "window_attn_skip_freq": 2},
}

REFUSED_BY_BACKEND: dict[str, tuple[str, object]] = {
    "--softmax-type learnable": ("softmax_type", "learnable"),
    "--qk-clip": ("qk_clip", True),
    "--log-max-attention-logit": ("log_max_attention_logit", True),
    "--fp8-dot-product-attention": ("fp8_dot_product_attention", True),
}

REFUSED_BY_SPEC: dict[str, tuple[str, object]] = {
    "--heterogeneous-layers-config-path": ("heterogeneous_block_specs", True),
    "--experimental-attention-variant": ("experimental_attention_variant", "dsa"),
    "--transformer-impl inference_optimized": ("transformer_impl", "inference_optimized"),
}


def measure_all(rank: int) -> dict[str, Any]:
    """Everything, by case."""
    import torch

    torch.manual_seed(0)
    samples = [torch.randint(VOCABULARY, (length,)) for length in LENGTHS]
    found: dict[str, Any] = {}
    for name, options in MODELS.items():
        model = _model(own_attention=False, **options)
        # mcore makes its window on a GPU; the backend's is measured in test_attention_backends
        reference = _model(own_attention="window_size" not in options, **options)
        reference.load_state_dict(model.state_dict())
        alone = _losses_and_gradients(reference, [_alone(sample) for sample in samples])
        layouts = {
            "packed": [_packed(samples)],
            "padded_segments": [_packed(samples, multiple=4)],
            "one_batch": [_batch(samples)],
            "max_seqlen_is_total": [_packed(samples, max_seqlen=sum(LENGTHS))],
        }
        for layout, inputs in layouts.items():
            found[f"{name}/{layout}"] = _difference(_losses_and_gradients(model, inputs), alone)
        if name == "rope_gqa":
            found |= _edges(model, reference, samples)
    found["padding"], found["dropout"] = _padding(), _dropout()
    found["latent"] = _latent(samples)
    found["moe_layers"], found["refused"], found["errors"] = _moe_layers(), _refused(), _errors()
    return found


def _edges(model: Any, reference: Any, samples: list[Any]) -> dict[str, Any]:
    import torch

    ones = [sample[:1] for sample in samples]
    with_empty = [samples[0], samples[0][:0], samples[2]]
    cases = {
        "fills_the_pack": ([samples[2]], [samples[2]]),
        "all_of_length_1": (ones, ones),
        "zero_length_between": (with_empty, [samples[0], samples[2]]),
    }
    found: dict[str, Any] = {
        name: _difference(
            _losses_and_gradients(model, [_packed(packed)]),
            _losses_and_gradients(reference, [_alone(sample) for sample in alone]),
        )
        for name, (packed, alone) in cases.items()
    }
    changed = [(samples[0] + 1) % VOCABULARY, *samples[1:]]
    before = _losses_and_gradients(model, [_packed(samples)])[0]
    after = _losses_and_gradients(model, [_packed(changed)])[0]
    first = LENGTHS[0]
    found["leak"] = {
        "changed": (before[:first] - after[:first]).abs().max().item(),
        "others_equal": torch.equal(before[first:], after[first:]),
    }
    return found


def _config(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
    }
    if options.pop("swiglu", False):
        import torch.nn.functional as F

        options |= {"gated_linear_unit": True, "activation_func": F.silu}
    return TransformerConfig(**(defaults | options))


def _model(*, own_attention: bool = True, **options: Any) -> Any:
    """A tiny fp32 GPT; `own_attention` is mcore's."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from odb_megatron.megatron.attention.registry import select
    from odb_megatron.megatron.attention.spec import layer_spec

    outer = {
        key: options.pop(key)
        for key in ("position_embedding_type", "share_embeddings_and_output_weights")
        if key in options
    }
    config = _config(**options)
    backend = select("auto", device_type="cpu")
    spec = (
        get_gpt_layer_local_spec(normalization=config.normalization)
        if own_attention
        else layer_spec(config, backend=backend)
    )
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=CONTEXT,
        **{
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": True,
            **outer,
        },
    )


def _latent(samples: list[Any]) -> dict[str, Any]:
    """Multi-latent attention, packed against alone; mcore's own attention does not take it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from odb_megatron.megatron.attention.registry import select
    from odb_megatron.megatron.attention.spec import layer_spec

    of = multi_latent_attention
    if of.HAVE_TE and not isinstance(of.TELinear, type):  # core 0.16 asks isinstance() of a mock
        return {"missing": "this megatron-core has multi-latent attention with TE's layers alone"}
    config = MLATransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        multi_latent_attention=True,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=8,
        rope_type="rope",
        normalization="RMSNorm",
    )
    spec = layer_spec(config, backend=select("cpu", device_type="cpu"))
    model = GPTModel(config, spec, VOCABULARY, CONTEXT, position_embedding_type="rope")
    alone = _losses_and_gradients(model, [_packed([sample]) for sample in samples])
    whole = _losses_and_gradients(model, [_packed(samples, multiple=4)])
    rows = _losses_and_gradients(model, [_alone(sample) for sample in samples])
    difference = _difference(whole, alone)
    return difference | {"unpacked": (rows[0] - alone[0]).abs().max().item()}


def _causal_mask(length: int) -> Any:
    import torch

    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


def _alone(sample: Any) -> dict[str, Any]:
    import torch

    length = len(sample)
    return {
        "tokens": sample[None],
        "positions": torch.arange(length)[None],
        "keep": torch.ones(1, length, dtype=torch.bool),
        "mask": _causal_mask(length),
        "packed": None,
    }


def _batch(samples: list[Any]) -> dict[str, Any]:
    """Right-padded batch [B, S]; padding holds token 3."""
    import torch

    longest = max(len(sample) for sample in samples)
    tokens = torch.full((len(samples), longest), 3)
    keep = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = sample
        keep[row, : len(sample)] = True
    positions = torch.arange(longest).expand(len(samples), -1)
    return {"tokens": tokens, "positions": positions, "keep": keep, "mask": None, "packed": None}


def _packed(
    samples: list[Any], *, multiple: int = 1, max_seqlen: int | None = None
) -> dict[str, Any]:
    """One pack [1, T]; each sample padded to a multiple with token 3."""
    import torch

    lengths = [len(sample) for sample in samples]
    padded = [-(-length // multiple) * multiple for length in lengths]
    tokens = torch.full((1, sum(padded)), 3)
    keep = torch.zeros(1, sum(padded), dtype=torch.bool)
    start = 0
    for sample, room in zip(samples, padded, strict=True):
        tokens[0, start : start + len(sample)] = sample
        keep[0, start : start + len(sample)] = True
        start += room
    positions = torch.cat([torch.arange(room) for room in padded])[None]
    packed = _packed_seq_params(lengths, padded if multiple > 1 else None, max_seqlen)
    return {"tokens": tokens, "positions": positions, "keep": keep, "mask": None, "packed": packed}


def _packed_seq_params(
    lengths: list[int], padded: list[int] | None = None, max_seqlen: int | None = None
) -> Any:
    """With the fields that every Megatron from 0.16 to 0.19 has."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    def cumulative(values: list[int]) -> Any:
        return torch.tensor([0, *values], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    offsets = None if padded is None else cumulative(padded)
    longest = max_seqlen or max(padded or lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative(lengths),
        cu_seqlens_kv=cumulative(lengths),
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _losses_and_gradients(model: Any, inputs: list[dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """Token losses of the kept positions, in order, and the gradients of their sum."""
    import torch

    model.zero_grad(set_to_none=True)
    losses = []
    for each in inputs:
        labels = (each["tokens"] * 7 + 1) % VOCABULARY
        loss = model(
            each["tokens"],
            each["positions"],
            each["mask"],
            labels=labels,
            packed_seq_params=each["packed"],
        )
        kept = loss[each["keep"]]
        kept.sum().backward()
        losses.append(kept.detach())
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    return torch.cat(losses), gradients


def _difference(
    got: tuple[Any, dict[str, Any]], expected: tuple[Any, dict[str, Any]]
) -> dict[str, Any]:
    """Largest difference of a token loss; largest one of a gradient, relative to its largest."""
    loss = (got[0] - expected[0]).abs().max().item()
    scales = {name: grad.abs().max().item() for name, grad in expected[1].items()}
    relative = {
        name: (got[1][name] - grad).abs().max().item() / max(scales[name], 1e-3)
        for name, grad in expected[1].items()
    }
    worst = max(relative, key=lambda name: relative[name])
    return {
        "loss": loss,
        "gradient": relative[worst],
        "worst": worst,
        "num_parameters": len(relative),
        "smallest_gradient": min(scales.values()),
    }


def _attention(**options: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from odb_megatron.megatron.attention.cpu import CpuCoreAttention

    mask_type = options.pop("mask_type", AttnMaskType.causal)
    kind = options.pop("attention_type", "self")
    return CpuCoreAttention(_config(**options), 1, mask_type, kind)


def _padding() -> dict[str, Any]:
    """Samples of 3 and 5 tokens padded to 4 and 10."""
    import torch

    query, key, value = (torch.randn(14, n, 8, requires_grad=True) for n in (4, 2, 2))
    packed = _packed_seq_params([3, 5], [4, 10])
    out = _attention()(query, key, value, None, packed_seq_params=packed)
    real = torch.zeros(14, dtype=torch.bool)
    real[:3] = real[4:9] = True
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    gradients = [grad.abs().amax((1, 2)) for grad in grads]
    return {
        "num_padding": int((~real).sum()),
        "outputs_at_padding": out[~real].abs().max().item(),
        "gradient_at_padding": max(grad[~real].max().item() for grad in gradients),
        "gradient_elsewhere": min(grad[real].max().item() for grad in gradients),
    }


def _dropout() -> dict[str, Any]:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    query, key, value = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    attention = _attention(attention_dropout=0.5)
    packed = _packed_seq_params([3, 5])

    def run() -> Any:
        return attention(query, key, value, None, packed_seq_params=packed)

    states = get_cuda_rng_tracker().get_states()
    first = run()
    second = run()
    get_cuda_rng_tracker().set_states(states)
    again = run()
    attention.eval()
    return {
        "same_state_equal": torch.equal(first, again),
        "next_state_equal": torch.equal(first, second),
        "equal_to_evaluation": torch.equal(first, run()),
        "evaluation_repeats": torch.equal(run(), run()),
    }


def _moe_layers() -> list[str]:
    from odb_megatron.megatron.attention.registry import select
    from odb_megatron.megatron.attention.spec import layer_spec

    config = _config(num_moe_experts=2, moe_layer_freq=[1, 0])
    spec = layer_spec(config, backend=select("cpu", device_type="cpu"))
    return [
        layer.submodules.self_attention.submodules.core_attention.__name__
        for layer in spec.layer_specs
    ]


def _text_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _refused() -> dict[str, str]:
    from megatron.core.transformer.enums import AttnMaskType

    from odb_megatron.megatron.attention.cpu import CpuCoreAttention
    from odb_megatron.megatron.attention.registry import select
    from odb_megatron.megatron.attention.spec import layer_spec

    backend = select("auto", device_type="cpu")
    texts: dict[str, str] = {}
    for flag, (name, value) in (REFUSED_BY_BACKEND | REFUSED_BY_SPEC).items():
        config = _config()
        setattr(config, name, value)
        if flag in REFUSED_BY_SPEC:
            texts[flag] = _text_of(partial(layer_spec, config, backend=backend))
        else:
            build = partial(CpuCoreAttention, config, 1, AttnMaskType.causal, "self")
            texts[flag] = _text_of(build)
    return texts


def _errors() -> dict[str, str]:
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    attention = _attention()
    thd = torch.randn(8, 4, 8)
    sbhd = thd[:, None]
    packed = _packed_seq_params

    def run(tensor: Any = thd, mask: Any = None, key: Any = None, **options: Any) -> str:
        keys = tensor if key is None else key
        return _text_of(lambda: attention(tensor, keys, keys, mask, **options))

    other_layout = packed([8])
    other_layout.qkv_format = "sbhd"
    not_from_0 = packed([8])
    not_from_0.cu_seqlens_q = not_from_0.cu_seqlens_kv = torch.tensor([1, 8])
    other_keys = packed([3, 5])
    other_keys.cu_seqlens_kv = torch.tensor([0, 4, 8])
    documents = _causal_mask(8)
    documents[..., 4:, :4] = True
    return {
        "bias": run(attention_bias=torch.zeros(1), packed_seq_params=packed([8])),
        "mask_type": run(attn_mask_type=AttnMaskType.no_mask, packed_seq_params=packed([8])),
        "padded_mask_type": run(sbhd, attn_mask_type=AttnMaskType.padding_causal),
        "reset_mask": run(sbhd, documents),
        "causal_mask": run(sbhd, _causal_mask(8)),
        "key_value_cache": run(sbhd[:1], key=sbhd),
        "layout": run(packed_seq_params=other_layout),
        "beyond_pack": run(packed_seq_params=packed([9])),
        "short_of_pack": run(packed_seq_params=packed([5])),
        "not_from_0": run(packed_seq_params=not_from_0),
        "overlap": run(packed_seq_params=packed([5, 3], [4, 4])),
        "key_lengths": run(packed_seq_params=other_keys),
        "cross": _text_of(lambda: _attention(attention_type="cross")),
        "constructor_mask": _text_of(lambda: _attention(mask_type=AttnMaskType.padding)),
    }
