"""Variance of a step's gradient, planned steps against random steps of the same sizes.

Must not train what it measures: the weights are those of a short warm-up and stay fixed. Gradients
of all samples of one real Megatron GPT are taken once, each reduced by a count sketch (random
signs, random buckets: inner products, and so variances, are kept in expectation); the gradient of
any step is then a sum over its samples, divided by their loss tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from intervals import difference_interval

from odb_megatron.data.chat_template import ChatRenderer
from odb_megatron.data.preprocess import BadRecordPolicy, SampleRules
from odb_megatron.data.sample import Sample
from odb_megatron.data.sources import open_source
from odb_megatron.data.tokenizer import load_tokenizer
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.policy import PolicyName
from odb_megatron.testing.gloo import run_replicas
from odb_megatron.testing.worlds import World

__all__ = ["Setting", "measure_gradients", "variance_against_random"]

Floats = npt.NDArray[np.float64]

_BUCKETS = 4096
_WARM_UP_STEPS = 40
_WARM_UP_BATCH = 16
_RANDOM_PARTITIONS = 100  # for each order
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    Attributes:
        path: chat file.
        tokenizer: folder of its tokenizer.
        context: longest sample, in tokens; longer ones are cut. The token budget is twice that.
        num_samples: samples, evenly spaced over the file.
        batch: samples per step.
        hidden: hidden size of the model.
        num_layers: its layers.
        replicas: data-parallel sizes to plan for.
        orders: shuffled orders of the stream, each planned anew.
    """

    path: str
    tokenizer: str
    context: int
    num_samples: int
    batch: int
    hidden: int = 64
    num_layers: int = 2
    replicas: tuple[int, ...] = (2, 8)
    orders: int = 10


def measure_gradients(setting: Setting) -> dict[str, Any]:
    """Measure every planned composition; rows by policy and number of replicas."""
    (found,) = run_replicas(
        _sketches, 1, setting, timeout_s=_TIMEOUT_S, device_layer=True, model_parallel={}
    )
    sketches, lengths, loss_tokens = found
    rows = {}
    for policy in PolicyName:
        for replicas in setting.replicas:
            if replicas > setting.batch:
                continue
            ratios = [
                variance_against_random(
                    sketches,
                    loss_tokens,
                    _plan(setting, lengths, policy=policy, replicas=replicas, seed=seed),
                    seed=seed,
                )
                for seed in range(setting.orders)
            ]
            rows[f"{policy.value}, {replicas} replicas"] = {
                "ratio": difference_interval(ratios).as_json(),
                "ratios": ratios,
            }
    return {"rows": rows, "setting": asdict(setting), "random_partitions": _RANDOM_PARTITIONS}


def variance_against_random(
    sketches: Floats, loss_tokens: Floats, steps: Sequence[Sequence[int]], *, seed: int
) -> float:
    """Return the variance of the steps' gradients over that of random steps, 1 for no difference.

    Each step counts with its number of samples: the smaller a step, the larger its variance.

    Args:
        sketches: gradient of each sample's summed token losses, float64 [samples, buckets].
        loss_tokens: loss tokens of each sample, float64 [samples].
        steps: samples of each step; together each sample once.
        seed: of the random partitions into steps of the same sizes.
    """
    sizes = [len(step) for step in steps]
    order = np.array([sample for step in steps for sample in step])
    generator = np.random.RandomState(seed)
    own = _variance(sketches, loss_tokens, order, sizes)
    others = [
        _variance(sketches, loss_tokens, generator.permutation(order), sizes)
        for _ in range(_RANDOM_PARTITIONS)
    ]
    return own / float(np.mean(others))


def _variance(sketches: Floats, loss_tokens: Floats, order: Any, sizes: Sequence[int]) -> float:
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    sums = np.add.reduceat(sketches[order], starts, axis=0)
    tokens = np.add.reduceat(loss_tokens[order], starts)
    whole = sums.sum(axis=0) / tokens.sum()
    squares = np.square(sums / tokens[:, None] - whole).sum(axis=1)
    return float((squares * np.array(sizes)).mean())


def _plan(
    setting: Setting, lengths: Sequence[int], *, policy: PolicyName, replicas: int, seed: int
) -> list[list[int]]:
    """Return the samples of each step, of a stream in an order of its own."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    config = PlanConfig(
        policy=policy,
        total=len(lengths),
        global_batch_size=setting.batch,
        num_replicas=replicas,
        token_budget=2 * setting.context,
        window=4 * -(-setting.batch // replicas),
        cost=CostModel.from_ratios(quadratic=0.3 / 0.7 / 500, fixed_tokens=0.1 * setting.context),
    )
    steps = World(config=config, lengths=[lengths[sample] for sample in order]).run()
    return [
        [order[p] for plan in plans for micro_batch in plan.micro_batches for p in micro_batch]
        for plans in steps
    ]


def _sketches(rank: int, setting: Setting) -> tuple[Floats, list[int], Floats]:
    """Return each sample's gradient sketch, length and loss tokens (in a process of its own)."""
    import torch

    assert rank == 0
    torch.manual_seed(0)
    samples = _samples(setting)
    model = _model(setting)
    _warm_up(model, samples)
    parameters = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in parameters)
    generator = torch.Generator().manual_seed(1)
    buckets = torch.randint(_BUCKETS, (size,), generator=generator)
    signs = 2.0 * torch.randint(2, (size,), generator=generator) - 1.0
    sketches = np.zeros((len(samples), _BUCKETS))
    for row, sample in enumerate(samples):
        model.zero_grad()
        _loss(model, [sample]).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in parameters]).double()
        sketch = torch.zeros(_BUCKETS, dtype=torch.float64)
        sketches[row] = sketch.index_add_(0, buckets, gradient * signs).numpy()
    lengths = [len(sample) for sample in samples]
    return sketches, lengths, np.array([float(sample.num_loss_tokens) for sample in samples])


def _samples(setting: Setting) -> list[Sample]:
    rules = SampleRules(
        context=setting.context,
        token_budget=2 * setting.context,
        multiple=1,
        overlong=OverlongPolicy.TRUNCATE,
        bad_record=BadRecordPolicy.SKIP,
    )
    renderer = ChatRenderer(load_tokenizer(setting.tokenizer))
    source = open_source(setting.path, rules=rules, renderer=renderer)
    stride = max(1, len(source) // setting.num_samples)
    found = [source.sample(index, source=0) for index in range(0, len(source), stride)]
    return [item for item in found if isinstance(item, Sample)][: setting.num_samples]


def _model(setting: Setting) -> Any:
    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from odb_megatron.megatron.attention.registry import select
    from odb_megatron.megatron.attention.spec import layer_spec

    config = TransformerConfig(
        num_layers=setting.num_layers,
        hidden_size=setting.hidden,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
    )
    return GPTModel(
        config,
        layer_spec(config, backend=select("auto", device_type="cpu")),
        vocab_size=-(-load_tokenizer(setting.tokenizer).vocab_size // 64) * 64,
        max_sequence_length=setting.context,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )


def _warm_up(model: Any, samples: Sequence[Sample]) -> None:
    import torch

    generator = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(_WARM_UP_STEPS):
        batch = generator.sample(list(samples), min(_WARM_UP_BATCH, len(samples)))
        optimizer.zero_grad()
        loss = _loss(model, batch) / sum(sample.num_loss_tokens for sample in batch)
        loss.backward()
        optimizer.step()


def _loss(model: Any, samples: Sequence[Sample]) -> Any:
    """Return the sum of token losses of the samples, packed."""
    from odb_megatron.data.thd import assemble
    from odb_megatron.megatron.forward_step import packed_batch

    item = assemble(samples, positions=range(len(samples)))
    batch = packed_batch(item)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
    )
    return (output.view(-1) * item.loss_mask.view(-1)).sum()
