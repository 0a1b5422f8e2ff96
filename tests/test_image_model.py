"""The example's tower and GPT for images, packed against one by one."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from image_samples import image_sample

from odb_megatron.data.images import mrope_positions
from odb_megatron.data.thd import MicroBatch
from odb_megatron.data.wire import assemble
from odb_megatron.plan.padding import SizeRule
from odb_megatron.testing.gloo import run_replicas

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
sys.path.append(str(Path(__file__).parents[1] / "examples" / "multimodal"))

from image_gpt import VisionShape, VisionTower

SHAPE = VisionShape(
    num_layers=2, hidden=16, ffn_hidden=24, num_heads=2, patch_width=12, merge=2, output=32
)
LAYOUTS: tuple[tuple[Any, ...], ...] = (
    (3, (4, 6), 5),
    (7,),
    ((2, 2), 1, (6, 2), 2, (2, 8), 3),
    (1, (8, 8), 9),
)


def _config(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        mrope_section=[2, 3, 3],
        **options,
    )


def _model() -> Any:
    from image_gpt import ImageGPT
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from odb_megatron.testing.bridge_cpu import local_layers

    model_parallel_cuda_manual_seed(3)
    config = _config()
    return ImageGPT(
        vision=SHAPE,
        config=config,
        transformer_layer_spec=local_layers(config),
        vocab_size=320,
        max_sequence_length=128,
        position_embedding_type="mrope",
        share_embeddings_and_output_weights=True,
    )


def _losses(model: Any, item: MicroBatch) -> Any:
    from odb_megatron.megatron.image_run import image_batch

    batch = image_batch(item, is_mrope=True)
    losses = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
        **batch.model_inputs,
    )
    return losses[0] * item.loss_mask[0]


def _gradients(model: Any, items: list[MicroBatch]) -> tuple[list[Any], dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    losses = []
    for item in items:
        own = _losses(model, item)
        own.sum().backward()
        losses.append(own.detach())
    return losses, {name: weight.grad for name, weight in model.named_parameters()}


def measure(_rank: int) -> dict[str, Any]:
    """Differences between a pack and its samples alone, and what else is to be seen there."""
    model = _model()
    samples = [image_sample(one, seed=at) for at, one in enumerate(LAYOUTS)]
    found: dict[str, Any] = {}
    alone = [assemble([sample], positions=[at]) for at, sample in enumerate(samples)]
    losses, expected = _gradients(model, alone)
    rules = {"packed": SizeRule(multiple=8), "total": SizeRule(multiple=4, sizes=(160,))}
    for name, rule in rules.items():
        item = assemble(samples, positions=range(4), rule=rule)
        (got,), gradients = _gradients(model, [item])
        parts = [
            got[start : start + len(sample)]
            for sample, start in zip(samples, item.cu_seqlens_padded.tolist(), strict=False)
        ]
        found[name] = (
            max(float((a - b).abs().max()) for a, b in zip(parts, losses, strict=True)),
            max(
                float((gradients[key] - value).abs().max() / value.abs().max().clamp(min=1e-3))
                for key, value in expected.items()
            ),
        )
    found["vision gradient"] = float(expected["vision.embedding.weight"].abs().max())
    found["names"] = sorted(expected)

    changed = [*samples]
    pixels = samples[2].images.pixel_values.copy()  # type: ignore[union-attr]
    pixels[:8] = 255 - pixels[:8]
    other = image_sample(LAYOUTS[2], seed=2)
    other.images.pixel_values[:] = pixels  # type: ignore[union-attr,index]
    changed[2] = other
    before, after = (
        _losses(model, assemble(one, positions=range(4))) for one in (samples, changed)
    )
    moved = (before - after).abs() > 0
    at = assemble(samples, positions=range(4)).cu_seqlens.tolist()
    found["moved"] = [bool(moved[start:end].any()) for start, end in pairwise(at)]

    for name, item in (
        ("idle", assemble([], positions=[], rule=SizeRule(multiple=8))),
        ("text", assemble([samples[1]], positions=[0])),
    ):
        _, gradients = _gradients(model, [item])
        own = {key: value for key, value in gradients.items() if key.startswith("vision.")}
        found[name] = [
            all(value is not None and not value.any() for value in own.values()),
            all(value is not None for value in gradients.values()),
        ]
    packed = assemble(samples, positions=range(4), rule=SizeRule(multiple=8))
    running = packed.position_ids.expand(3, 1, -1)
    positions = mrope_positions(packed.cu_seqlens_padded, packed.images)
    found["positions differ"] = not torch.equal(running, positions)
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    (found,) = run_replicas(measure, 1, timeout_s=300, device_layer=True, model_parallel={})
    return dict(found)


@pytest.mark.parametrize("name", ["packed", "total"])
def test_packed_equals_alone(results: dict[str, Any], name: str) -> None:
    losses, gradients = results[name]
    assert losses < 1e-5
    assert gradients < 1e-5
    assert results["vision gradient"] > 1e-4
    assert results["positions differ"]
    assert "vision.layers.1.qkv.weight" in results["names"]


def test_a_picture_moves_its_own_sample_alone(results: dict[str, Any]) -> None:
    assert results["moved"] == [False, False, True, False]


@pytest.mark.parametrize("name", ["idle", "text"])
def test_the_tower_has_gradients_without_pictures(results: dict[str, Any], name: str) -> None:
    assert results[name] == [True, True]


def test_the_tower() -> None:
    tower = VisionTower(replace(SHAPE, init_std=0.3))
    again = VisionTower(replace(SHAPE, init_std=0.3))
    assert all(
        torch.equal(a, b) for a, b in zip(tower.parameters(), again.parameters(), strict=True)
    )
    grid = torch.tensor([[1, 4, 6], [2, 2, 2]])
    pixels = torch.randint(0, 256, (32, 12), dtype=torch.uint8)
    both = tower(pixels, grid)
    assert both.shape == (8, 32)
    first, second = tower(pixels[:24], grid[:1]), tower(pixels[24:], grid[1:])
    assert torch.allclose(both, torch.cat((first, second)), rtol=1e-5, atol=1e-5)
    turned = tower(pixels[:24], torch.tensor([[1, 6, 4]]))
    assert (first - turned).abs().max() > 1e-3  # positions count
    assert tower(pixels / 255, grid).shape == (8, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 18}, "hidden size 18 with 2 heads; expected heads of equal size"),
        ({"num_heads": 0}, "sizes must be at least 1"),
        ({"num_layers": -1}, "sizes must be at least 1"),
    ],
)
def test_sizes_are_checked(changes: dict[str, int], message: str) -> None:
    values = {
        **{"num_layers": 1, "hidden": 16, "ffn_hidden": 8, "num_heads": 2},
        **{"patch_width": 12, "merge": 2, "output": 8},
    }
    with pytest.raises(ValueError, match=message):
        VisionShape(**{**values, **changes})


def test_flops_are_those_of_the_tower() -> None:
    """As torch counts them, in an image of 16 patches."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    tower = VisionTower(SHAPE)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        tower(torch.zeros(16, 12, dtype=torch.uint8), torch.tensor([[1, 4, 4]]))
    assert SHAPE.flops_per_patch(num_patches=16) * 16 == counter.get_total_flops()
