"""The pretrain script of `parallel_parity.py` and `pipeline_shapes.py`: runs say what they did.

    torchrun -m odb_megatron.cpu benchmarks/parity_script.py --gradients FOLDER --odb ...

- `--gradients FOLDER`: every parameter's gradient in every step.
- `--routing FOLDER`: the experts of every token; those of `--like FOLDER` where scores tie.
- `--replay LOG_DIR`: trains, in one process, the very micro-batches of another run's step log: the
  first of each replica, then the second of each, and so on, idle ones too. With `--together` the
  global auxiliary loss is that of replicas.
- `--count-multiple N`: M is a multiple of N, so that a single replica idles too.
- `--observed FOLDER`: evaluations, and how many shapes pipeline stages have sent each other;
  `--messages` has them send shapes as Megatron does, `--batched-sends` has them send in batches.
- `--batch FILE`, alone: once for each command line of a JSON file, in the same processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import router
from megatron.training import get_args, training
from parallel_parity import MAX_MARGIN, Token, read_routing

from odb_megatron.data.loop import StepLoop
from odb_megatron.megatron import providers
from odb_megatron.megatron.run import OdbRun
from odb_megatron.megatron.setup import exchange_shapes, parse_and_validate_args
from odb_megatron.plan.step_planner import StepPlan
from odb_megatron.report.steps import LoggedStep, read_run
from odb_megatron.testing.runs_again import forget_run, keep_imports

ForwardStep = Callable[..., Any]


def main() -> None:
    """Train by one command line, or by each of a file."""
    keep_imports()
    runs = [sys.argv[1:]]
    if sys.argv[1:2] == ["--batch"]:
        runs = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    for flags in runs:
        sys.argv[1:] = flags
        print(Path(__file__).name, *flags, flush=True)
        with ExitStack() as stack:
            train(stack)
        forget_run()


def train(stack: ExitStack) -> None:
    """Train by the command line; what is replaced for it is put back as the stack is closed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("gradients", "routing", "like", "replay", "observed"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("together", "messages", "batched-sends"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--count-multiple", type=int)
    own, sys.argv[1:] = parser.parse_known_args()

    def replace(owner: Any, name: str, made: Any) -> None:
        stack.enter_context(mock.patch.object(owner, name, made))

    num_together = 1
    if own.count_multiple is not None:
        replace(providers, "count_multiple", lambda _args: own.count_multiple)
    if own.replay is not None:
        steps = read_run(str(own.replay)).steps
        num_together = len(steps[0].records) if own.together else 1
        replace(StepLoop, "_planned", replaying(steps))
    if own.gradients is not None:
        replace(training, "setup_model_and_optimizer", writing_gradients(own.gradients))
    if own.observed is not None:
        seen = Seen()
        replace(P2PCommunicator, "_communicate_shapes", seen.counting_shapes())
        replace(training, "evaluate", seen.timing_evaluations())
    args = parse_and_validate_args({"tokenizer_type": "HuggingFaceTokenizer"})
    if own.batched_sends:
        args.overlap_p2p_comm = False  # refused as a flag
    if own.messages:
        exchange_shapes(args)
        replace(OdbRun, "_plans_shapes", False)
    odb = stack.enter_context(OdbRun(args))
    forward_step: ForwardStep = odb.forward_step
    routes = None
    if own.routing is not None:
        routes = Routes({} if own.like is None else read_routing(own.like))
        forward_step = routes.watching(forward_step, replace)
    if num_together > 1:
        forward_step = running_together(forward_step, num_together, replace)
    odb.pretrain(forward_step=forward_step)
    if routes is not None:
        np.save(_own_file(own.routing, "npy"), np.concatenate(routes.rows))
    if own.observed is not None:
        _own_file(own.observed, "json").write_text(json.dumps(vars(seen)), encoding="utf-8")


def _own_file(folder: Path, suffix: str, prefix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{prefix}{torch.distributed.get_rank()}.{suffix}"


# --- micro-batches of another run ------------------------------------------------------------


def replaying(steps: Sequence[LoggedStep]) -> Callable[..., StepPlan]:
    """Return what plans in place of `StepLoop._planned`: one replica, by the log of several."""

    def planned(loop: Any, table: Any, _least: int) -> StepPlan:
        indices = {}
        for index, slot in enumerate(table["slot"].tolist()):
            where = loop._reader._stream.locate(loop._held[slot][0])
            indices[f"{where.source}:{where.record}@{where.epoch}"] = index
        records = steps[loop._step].records
        rows = zip(*(record.ids for record in records.values()), strict=True)
        row = tuple(tuple(indices[name] for name in ids) for one in rows for ids in one)
        return StepPlan(
            num_micro_batches=len(row),
            micro_batches=(row,),
            shares={},
            loads=((0,) * len(row),),
            overhead=0,
        )

    return planned


def running_together(step: ForwardStep, count: int, replace: Callable[..., None]) -> ForwardStep:
    """Return a forward step that takes each `count` micro-batches in a row as run at one time.

    Megatron defines the global auxiliary loss over the micro-batches that replicas run at the same
    time: the share of tokens per expert is that of all of them. One process runs them one after the
    other, so it first runs all of them without gradients to count, and hands the counts to the runs
    with gradients. Nothing of what ODB corrects in routers is used.
    """
    route = router.TopKRouter.routing
    apply_loss = router.TopKRouter._apply_global_aux_loss
    counts: dict[Any, Any] = {}  # by router: tokens per expert of the micro-batches together
    before: dict[Any, Any] = {}  # by router: what was added up over the step's earlier ones
    waiting: deque[Any] = deque()

    def routing(self: Any, logits: Any, padding_mask: Any = None) -> Any:
        if not torch.is_grad_enabled():
            chosen, _ = router.compute_routing_scores_for_aux_loss(
                logits.view(-1, logits.shape[-1]),
                self.topk,
                self.score_function,
                padding_mask=None if padding_mask is None else padding_mask.reshape(-1),
            )
            counts[self] = counts.get(self, 0) + chosen.sum(dim=0)
        return route(self, logits, padding_mask=padding_mask)

    def apply_global_aux_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(waiting) == count - 1:
            before[self] = self.global_tokens_per_expert.clone(), self.ga_steps.clone()
        self.global_tokens_per_expert.copy_(before[self][0])
        self.ga_steps.copy_(before[self][1])
        total = counts[self].sum() / self.topk
        found = counts[self], total / count, total
        name = "get_tokens_per_expert_and_token_count"
        with mock.patch.object(router, name, return_value=found):
            return apply_loss(self, *args, **kwargs)

    def together(data_iterator: Any, model: Any, *rest: Any) -> Any:
        if not waiting:
            counts.clear()
            waiting.extend(next(data_iterator) for _ in range(count))
            with torch.no_grad():
                for item in waiting:
                    step(iter([item]), model, *rest)
        return step(iter([waiting.popleft()]), model, *rest)

    replace(router.TopKRouter, "routing", routing)
    replace(router.TopKRouter, "_apply_global_aux_loss", apply_global_aux_loss)
    return together


# --- gradients -------------------------------------------------------------------------------


def writing_gradients(folder: Path) -> Callable[..., Any]:
    """Return a `setup_model_and_optimizer` whose optimizer writes all gradients before each step.

    A rank writes the shards that Megatron's own checkpoints would have of it (`sharded_state_dict`,
    with the gradient in place of the parameter), which say where they lie in the whole. So runs of
    any two topologies compare. Written after the reduction over replicas and the division by the
    loss tokens, before clipping. Routers' expert biases, which the step has moved by then, alike.
    """
    original = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        step, count = optimizer.step, iter(range(1 << 30))

        def logged_step() -> Any:
            shards = [shard for chunk in model for shard in _gradient_shards(chunk)]
            where = [
                (one.key, one.global_shape, one.global_offset, one.prepend_axis_num)
                for one in shards
            ]
            values = {str(at): one.data.float().numpy() for at, one in enumerate(shards)}
            path = _own_file(folder, "npz", f"{next(count)}-")
            np.savez(path, where=np.array(json.dumps(where)), **values)
            return step()

        optimizer.step = logged_step
        return model, optimizer, scheduler

    return setup_model_and_optimizer


def _gradient_shards(chunk: Any) -> list[Any]:
    """Return the `ShardedTensor`s of a model chunk's parameters, holding copies of their gradients.

    And those of expert biases, which hold themselves.
    """
    if chunk.ddp_config.use_distributed_optimizer:  # which reads its own part of the buffers only
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                parts = list(bucket.grad_data.chunk(ranks.size()))
                own = parts[ranks.rank()].clone()
                torch.distributed.all_gather(parts, own, group=ranks)
    parameters = [item for item in chunk.parameters() if item.requires_grad]
    originals = [item.data for item in parameters]
    for item in parameters:
        item.data = item.main_grad
    found, num_values = [], 0
    try:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
        apply_factories(state)
        places = {item.data.untyped_storage().data_ptr() for item in parameters}
        for shard in nested_values(state):
            if not isinstance(shard, ShardedTensor) or shard.data is None:
                continue
            is_gradient = shard.data.untyped_storage().data_ptr() in places
            if is_gradient or shard.key.endswith("expert_bias"):
                assert shard.flattened_range is None, "shards of whole axes"
                shard.data = shard.data.detach().clone()  # the state dictionary has the parameter
                found.append(shard)
                num_values += shard.data.numel() if is_gradient else 0
    finally:
        for item, original in zip(parameters, originals, strict=True):
            item.data = original
    expected = sum(item.numel() for item in parameters)
    assert num_values == expected, f"{num_values} of {expected} gradient values have a shard"
    return found


# --- the experts of tokens -------------------------------------------------------------------


class Routes:
    """Which experts tokens go to; stands for Megatron's `RouterReplay`.

    Two runs round differently: where a token's k-th and next score are as close as that, they
    choose other experts, and one token's share of an expert's gradient (some per cent) differs. So
    a run takes the other's choice for tokens whose margin is below `MAX_MARGIN`, and what it would
    have chosen by itself is in its rows.

    Args:
        like: the experts of another run.

    Attributes:
        rows: arrays of step, sample, place in it, layer, experts and margin.
    """

    def __init__(self, like: Mapping[Token, tuple[tuple[int, ...], float]]) -> None:
        self._like = like
        self._item: Any = None  # micro-batch that is run
        self._step = self._layer = 0  # whose it is, whose router asks
        self._taken: dict[int, tuple[int, ...]] = {}  # by row: what the last router took
        self.rows: list[npt.NDArray[np.float64]] = []

    def watching(self, step: ForwardStep, replace: Callable[..., None]) -> ForwardStep:
        """Return a forward step in which routers ask here."""
        route, choose = router.TopKRouter.routing, router.topk_routing_with_score_function
        score = router.compute_routing_scores_for_aux_loss

        def watched(data_iterator: Any, model: Any, *rest: Any) -> Any:
            self._item, self._step = next(data_iterator), get_args().curr_iteration
            return step(iter([self._item]), model, *rest)

        def routing(own: Any, *args: Any, **named: Any) -> Any:
            self._layer = own.layer_number
            return route(own, *args, **named)

        def choosing(*args: Any, **named: Any) -> Any:
            return choose(*args, **{**named, "router_replay": self})

        def scores_for_aux_loss(logits: Any, topk: int, *args: Any, **named: Any) -> Any:
            """Megatron chooses experts for the auxiliary loss anew."""
            chosen, scores = score(logits, topk, *args, **named)
            for row, experts in self._taken.items():
                chosen[row] = False
                chosen[row, list(experts)] = True
            return chosen, scores

        replace(router.TopKRouter, "routing", routing)
        replace(router, "topk_routing_with_score_function", choosing)
        replace(router, "compute_routing_scores_for_aux_loss", scores_for_aux_loss)
        return watched

    def get_replay_topk(
        self, scores: Any, topk: int, num_groups: Any, group_topk: Any, compute: Callable[..., Any]
    ) -> Any:
        """Return the scores and experts of tokens, as `RouterReplay`."""
        values, experts = compute(scores, topk, num_groups, group_topk)
        ranked = scores.detach().double().topk(topk + 1, dim=1).values
        margins = (ranked[:, topk - 1] - ranked[:, topk]).numpy()
        own = experts.sort(dim=1).values.numpy()
        names = self._names(len(scores))
        is_real = names[:, 1] >= 0
        if torch.is_grad_enabled():
            self.rows.append(np.column_stack((names, own, margins))[is_real])
        self._taken = {}
        for row in np.flatnonzero((margins < MAX_MARGIN) & is_real).tolist():
            wanted, _ = self._like.get(tuple(names[row].tolist()), (None, 0.0))
            if wanted is not None and wanted != tuple(own[row].tolist()):
                self._taken[row] = wanted
        if self._taken:
            experts = experts.clone()
            for row, wanted in self._taken.items():
                experts[row] = torch.tensor(wanted)
            values = scores.gather(1, experts)
        return values, experts

    def _names(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return the name of each of this rank's tokens [tokens, 4]; padding has sample -1."""
        item = self._item
        padded = item.cu_seqlens_padded.diff().numpy() // mpu.get_context_parallel_world_size()
        real, samples = item.cu_seqlens.diff().numpy(), np.full(len(padded), -1)
        samples[: len(item.positions)] = item.positions
        at, places = np.repeat(np.arange(len(padded)), padded), item.position_ids.view(-1).numpy()
        names = np.empty((len(at), 4), dtype=np.int64)
        names[:, 0], names[:, 3] = self._step, self._layer
        names[:, 1], names[:, 2] = np.where(places < real[at], samples[at], -1), places
        if len(names) > num_tokens:  # sequence parallelism
            names = np.split(names, len(names) // num_tokens)[mpu.get_tensor_model_parallel_rank()]
        return names


# --- pipelines -------------------------------------------------------------------------------


class Seen:
    """What a rank saw of evaluations, and how many shapes it has exchanged."""

    def __init__(self) -> None:
        self.shape_messages = 0
        self.losses: list[float] = []
        self.evaluation_s: list[float] = []

    def counting_shapes(self) -> Callable[..., Any]:
        """Return a `P2PCommunicator._communicate_shapes`."""
        original = P2PCommunicator._communicate_shapes

        def communicate_shapes(*args: Any, **kwargs: Any) -> Any:
            self.shape_messages += 1
            return original(*args, **kwargs)

        return communicate_shapes

    def timing_evaluations(self) -> Callable[..., Any]:
        """Return a `training.evaluate`."""
        original = training.evaluate

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = original(*args, **kwargs)
            self.evaluation_s.append(time.perf_counter() - started)
            if result[0]:
                self.losses.append(float(result[0]["lm loss"]))
            return result

        return evaluate


if __name__ == "__main__":
    main()
