"""Writes every parameter's gradient in every step, and compares two runs parameter by parameter.

A rank writes the shards that Megatron's own checkpoints would have of it (`sharded_state_dict`,
with the gradient in place of the parameter), which say where they lie in the whole. So runs of
any two topologies compare. Written after the reduction over replicas and the division by the loss
tokens, before clipping. Routers' expert biases, which the step has moved by then, are written
alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["compare_gradients", "log_gradients"]

Array = npt.NDArray[np.float32]
Name = tuple[str, tuple[int, ...]]
"""A parameter: its key in checkpoints, and the layer or expert of one that is stacked there."""


@contextmanager
def log_gradients(folder: Path) -> Iterator[None]:
    """Have `pretrain()` write gradients into `folder` as `step-rank.npz`."""
    from megatron.training import training

    original = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        step = optimizer.step
        count = 0

        def logged_step() -> Any:
            nonlocal count
            _write(folder, model, step=count)
            count += 1
            return step()

        optimizer.step = logged_step
        return model, optimizer, scheduler

    folder.mkdir(parents=True, exist_ok=True)
    training.setup_model_and_optimizer = setup_model_and_optimizer
    try:
        yield
    finally:
        training.setup_model_and_optimizer = original


def compare_gradients(found: Path, reference: Path) -> tuple[float, str]:
    """Return the largest relative difference of a parameter's gradient in any step, and whose.

    That is ||g - reference|| / ||reference||, and 0 where both are 0. Of a shard that several ranks
    have, the one farthest off counts.

    Raises:
        ValueError: the runs have other steps or parameters, or shards do not cover a parameter.
    """
    steps = _steps(found)
    if not steps or steps != _steps(reference):
        raise ValueError(f"steps with gradients: {steps} in {found}, others in {reference}")
    worst, whose = 0.0, ""
    for step in steps:
        expected = _whole(_read(reference, step))
        shards = _read(found, step)
        if (names := {shard.name for shard in shards}) != set(expected):
            raise ValueError(
                f"step {step}: parameters in one run only: {sorted(names ^ set(expected))}"
            )
        _whole(shards)  # they cover it
        errors: dict[Name, dict[tuple[int, ...], float]] = {}
        for shard in shards:
            error = float(np.square(shard.values - expected[shard.name][shard.place]).sum())
            parts = errors.setdefault(shard.name, {})
            parts[shard.offset] = max(parts.get(shard.offset, 0.0), error)
        for name, parts in errors.items():
            error, size = np.sqrt(sum(parts.values())), np.linalg.norm(expected[name].ravel())
            relative = float(error / size) if size else float("inf" if error else 0)
            if not relative <= worst:  # also where it is NaN
                worst, whose = relative, f"{name[0]}{list(name[1]) or ''}, step {step + 1}"
    return worst, whose


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    name: Name
    shape: tuple[int, ...]  # of the whole parameter
    offset: tuple[int, ...]
    values: npt.NDArray[np.float64]

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.offset, self.values.shape, strict=True)
        )


def _steps(folder: Path) -> list[int]:
    return sorted({int(path.stem.split("-")[0]) for path in folder.glob("*.npz")})


def _read(folder: Path, step: int) -> list[_Shard]:
    shards = []
    for path in sorted(folder.glob(f"{step}-*.npz")):
        with np.load(path) as file:
            for index, (key, shape, offset, stacked) in enumerate(json.loads(str(file["where"]))):
                shards.append(
                    _Shard(
                        name=(key, tuple(offset[:stacked])),
                        shape=tuple(shape[stacked:]),
                        offset=tuple(offset[stacked:]),
                        values=file[str(index)].astype(np.float64),
                    )
                )
    return shards


def _whole(shards: Sequence[_Shard]) -> dict[Name, npt.NDArray[np.float64]]:
    made: dict[Name, npt.NDArray[np.float64]] = {}
    for shard in shards:
        whole = made.setdefault(shard.name, np.full(shard.shape, np.nan))
        if whole.shape != shard.shape:
            raise ValueError(f"{shard.name} has the shapes {whole.shape} and {shard.shape}")
        whole[shard.place] = shard.values
    if missing := [name for name, whole in made.items() if np.isnan(whole).any()]:
        raise ValueError(f"NaN, or shards that do not cover them: {sorted(missing)}")
    return made


def _write(folder: Path, model: Sequence[Any], *, step: int) -> None:
    import torch

    where: list[tuple[str, tuple[int, ...], tuple[int, ...], int]] = []
    arrays: dict[str, Any] = {}
    for chunk in model:
        _gather_parts(chunk)
        for shard in _sharded_gradients(chunk):
            assert shard.flattened_range is None, "shards of whole axes"
            arrays[str(len(where))] = shard.data.float().numpy()
            where.append(
                (shard.key, shard.global_shape, shard.global_offset, shard.prepend_axis_num)
            )
    path = folder / f"{step}-{torch.distributed.get_rank()}.npz"
    np.savez(path, where=np.array(json.dumps(where)), **arrays)


def _gather_parts(chunk: Any) -> None:
    """Complete the gradient buffers of a distributed optimizer (it reads its own part only)."""
    import torch

    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            parts = list(bucket.grad_data.chunk(ranks.size()))
            own = parts[ranks.rank()].clone()
            torch.distributed.all_gather(parts, own, group=ranks)


def _sharded_gradients(chunk: Any) -> list[Any]:
    """Return the `ShardedTensor`s of a model chunk's parameters, holding copies of their gradients.

    And those of expert biases, which hold themselves.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    parameters = [item for item in chunk.parameters() if item.requires_grad]
    originals = [item.data for item in parameters]
    for item in parameters:
        item.data = item.main_grad
    found, num_values = [], 0
    try:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
        apply_factories(state)
        places = {item.data.untyped_storage().data_ptr() for item in parameters}
        for shard in nested_values(state):
            if not isinstance(shard, ShardedTensor) or shard.data is None:
                continue
            is_gradient = shard.data.untyped_storage().data_ptr() in places
            if is_gradient or shard.key.endswith("expert_bias"):
                shard.data = shard.data.detach().clone()  # the state dictionary has the parameter
                found.append(shard)
                num_values += shard.data.numel() if is_gradient else 0
    finally:
        for item, original in zip(parameters, originals, strict=True):
            item.data = original
    expected = sum(item.numel() for item in parameters)
    assert num_values == expected, f"{num_values} of {expected} gradient values have a shard"
    return found
