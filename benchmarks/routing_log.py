"""Writes to which experts every token goes, and lets another run go the same way where scores tie.

Two runs round differently: where a token's k-th and next score are as close as that, they choose
other experts, and one token's share of an expert's gradient (some per cent) differs. So a run that
is compared with another takes the other's choice for tokens whose margin is below `MAX_MARGIN`,
and what it would have chosen by itself is in its log. A token is named by its step, sample, place
in it, and layer, whatever the topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_MARGIN", "compare_routing", "log_routing"]

MAX_MARGIN = 1e-6
"""Between the scores of the last expert that is chosen and the first that is not."""

ForwardStep = Callable[..., Any]
Name = tuple[int, int, int, int]
"""Step, sample, place, layer."""


@contextmanager
def log_routing(
    folder: Path, forward_step: ForwardStep, *, like: Path | None
) -> Iterator[ForwardStep]:
    """Yield a forward step whose tokens' experts are written into `folder`.

    Args:
        folder: gets a file of each rank.
        forward_step: the run's.
        like: folder of another run, whose choice is taken where scores tie.
    """
    from megatron.core.transformer.moe import router as module
    from megatron.training import get_args

    log = _Log(None if like is None else _read(like))
    original = module.TopKRouter.routing
    choose, score = (
        module.topk_routing_with_score_function,
        module.compute_routing_scores_for_aux_loss,
    )

    def step(data_iterator: Any, model: Any, *rest: Any) -> Any:
        log.item, log.step = next(data_iterator), get_args().curr_iteration
        return forward_step(iter([log.item]), model, *rest)

    def routing(self: Any, *args: Any, **named: Any) -> Any:
        log.layer = self.layer_number
        return original(self, *args, **named)

    def scores_for_aux_loss(logits: Any, topk: int, *args: Any, **named: Any) -> Any:
        """Megatron chooses experts for the auxiliary loss anew."""
        chosen, scores = score(logits, topk, *args, **named)
        for row, experts in log.taken.items():
            chosen[row] = False
            chosen[row, list(experts)] = True
        return chosen, scores

    module.TopKRouter.routing = routing
    module.topk_routing_with_score_function = lambda *args, **named: choose(
        *args, **{**named, "router_replay": log}
    )
    module.compute_routing_scores_for_aux_loss = scores_for_aux_loss
    try:
        yield step
    finally:
        module.TopKRouter.routing = original
        module.topk_routing_with_score_function = choose
        module.compute_routing_scores_for_aux_loss = score
    log.write(folder)


class _Log:
    """Stands for Megatron's `RouterReplay`.

    Args:
        like: the experts of another run, and their margin.

    Attributes:
        item: micro-batch that is run.
        step: whose it is.
        layer: whose router asks.
        taken: experts that the last router took from the other run, by row.
    """

    def __init__(self, like: dict[Name, tuple[tuple[int, ...], float]] | None) -> None:
        self._like = like or {}
        self._parts: list[npt.NDArray[np.float64]] = []
        self.item: Any = None
        self.step = self.layer = 0
        self.taken: dict[int, tuple[int, ...]] = {}

    def get_replay_topk(
        self, scores: Any, topk: int, num_groups: Any, group_topk: Any, compute: Callable[..., Any]
    ) -> Any:
        import torch

        values, experts = compute(scores, topk, num_groups, group_topk)
        ranked = scores.detach().double().topk(topk + 1, dim=1).values
        margins = (ranked[:, topk - 1] - ranked[:, topk]).numpy()
        own = experts.sort(dim=1).values.numpy()
        names = self._names(len(scores))
        if torch.is_grad_enabled():
            is_real = names[:, 1] >= 0
            part = np.column_stack((names, own, margins))[is_real]
            self._parts.append(part)
        self.taken = {}
        for row in np.flatnonzero((margins < MAX_MARGIN) & (names[:, 1] >= 0)).tolist():
            wanted, _ = self._like.get(tuple(names[row].tolist()), (None, 0.0))
            if wanted is not None and wanted != tuple(own[row].tolist()):
                self.taken[row] = wanted
        if self.taken:
            experts = experts.clone()
            for row, wanted in self.taken.items():
                experts[row] = torch.tensor(wanted)
            values = scores.gather(1, experts)
        return values, experts

    def write(self, folder: Path) -> None:
        """Write this rank's file."""
        import torch

        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{torch.distributed.get_rank()}.npy", np.concatenate(self._parts))

    def _names(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return the name of each of this rank's tokens [tokens, 4]; padding has sample -1."""
        from megatron.core import parallel_state as mpu

        item = self.item
        padded = item.cu_seqlens_padded.diff().numpy() // mpu.get_context_parallel_world_size()
        real = item.cu_seqlens.diff().numpy()
        at = np.repeat(np.arange(len(padded)), padded)
        places = item.position_ids.view(-1).numpy()
        samples = np.full(len(padded), -1)
        samples[: len(item.positions)] = item.positions
        names = np.column_stack(
            (
                np.full(len(at), self.step),
                np.where(places < real[at], samples[at], -1),
                places,
                np.full(len(at), self.layer),
            )
        )
        if len(names) > num_tokens:  # sequence parallelism
            names = np.split(names, len(names) // num_tokens)[mpu.get_tensor_model_parallel_rank()]
        return names


def compare_routing(found: Path, reference: Path) -> dict[str, Any]:
    """Say where two runs chose other experts.

    Returns:
        `routed_tokens`: of all layers and steps. `routed_otherwise`: those whose experts differ,
        with the margin in both runs. `max_margin_diff`: the largest difference of a margin between
        the runs, which is how far rounding goes.
    """
    one, other = _read(found), _read(reference)
    if one.keys() != other.keys():
        raise ValueError(f"{len(one.keys() ^ other.keys())} tokens were routed in one run only")
    otherwise = [
        {
            **dict(zip(("step", "sample", "place", "layer"), name, strict=True)),
            "experts": [list(experts), list(other[name][0])],
            "margins": [margin, other[name][1]],
        }
        for name, (experts, margin) in sorted(one.items())
        if experts != other[name][0]
    ]
    differences = [
        abs(margin - other[name][1])
        for name, (experts, margin) in one.items()
        if experts == other[name][0]
    ]
    return {
        "routed_tokens": len(one),
        "routed_otherwise": otherwise,
        "max_margin_diff": max(differences),
    }


def _read(folder: Path) -> dict[Name, tuple[tuple[int, ...], float]]:
    found: dict[Name, tuple[tuple[int, ...], float]] = {}
    for path in sorted(folder.glob("*.npy")):
        for *row, margin in np.load(path).tolist():
            step, sample, place, layer, *experts = map(int, row)
            found[step, sample, place, layer] = tuple(experts), margin
    if not found:
        raise ValueError(f"no token was routed in {folder}")
    return found
