"""Megatron's own schedules with the plan's communicator, on chunks of one linear layer.

A chunk refuses an input of another micro-batch's shape, and its output depends on which one it was,
so that a tensor in another's place changes gradients. They are compared with those of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from odb_megatron.testing.gloo import ReplicaError, run_replicas

pytestmark = pytest.mark.megatron

HIDDEN = 4


class Case(NamedTuple):
    """One call of a schedule; `group` 0 for the number of stages."""

    num_micro_batches: int
    chunks: int = 1
    group: int = 0
    overlap: bool = False
    flush: bool = False
    forward_only: bool = False
    equal: bool = False
    messages: bool = False  # Megatron's own exchange


class Found(NamedTuple):
    """What a rank saw: gradients of its chunks, and counts of what is not for free."""

    gradients: list[list[float]]
    losses: list[float]
    counts: dict[str, int]


CASES = {
    2: [
        Case(1),
        Case(5),
        Case(5, messages=True),
        Case(5, forward_only=True),
        *(Case(m, chunks=2, overlap=o) for m in (2, 4, 6) for o in (False, True)),
        Case(5, chunks=2, group=3),
        Case(7, chunks=3, group=4, overlap=True),
        Case(4, chunks=2, overlap=True, flush=True),
        Case(4, chunks=2, equal=True),
        *(Case(4, chunks=2, overlap=o, forward_only=True) for o in (False, True)),
    ],
    4: [
        Case(2),
        Case(7),
        Case(7, forward_only=True),
        *(Case(m, chunks=2, overlap=o) for m in (4, 8) for o in (False, True)),
        Case(9, chunks=2, group=5),
        Case(14, chunks=2, group=5, overlap=True),
        Case(8, chunks=2, overlap=True, flush=True),
        Case(8, chunks=2, forward_only=True),
    ],
}


def _lengths(case: Case) -> list[int]:
    return [3 if case.equal else 3 + 2 * (5 * at % 7) for at in range(case.num_micro_batches)]


class _Chunk(torch.nn.Module):
    """Stage `at` of all chunks of all ranks."""

    def __init__(self, at: int, config: Any, lengths: list[int]) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.at, self.config, self.lengths = at, config, lengths
        self.model_type = ModelType.encoder_or_decoder
        weight = torch.randn((HIDDEN, HIDDEN), generator=torch.Generator().manual_seed(at))
        self.weight = torch.nn.Parameter(weight / 2)
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self, at: int) -> torch.Tensor:
        shape = (self.lengths[at], 1, HIDDEN)
        hidden = torch.ones(shape) if self.at == 0 else self.given
        assert hidden is not None
        assert hidden.shape == shape, f"got {list(hidden.shape)} for {list(shape)}"
        return torch.tanh(hidden @ self.weight) * (1 + 0.1 * at) + 0.01 * at


def _step(items: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
    at = next(items)
    return model(at), lambda out: (out.sum(), torch.tensor(out.shape[0]), {"loss": out.sum()})


def _config(case: Case, stages: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=stages * case.chunks,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        microbatch_group_size_per_vp_stage=case.group or stages,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=case.overlap,
        batch_p2p_comm=not case.overlap,
        overlap_p2p_comm_warmup_flush=case.flush,
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=True,
        variable_seq_lengths=case.messages,
        moe_token_dispatcher_type="alltoall" if case.messages else "allgather",
    )


@contextlib.contextmanager
def _counted(counts: dict[str, int]) -> Iterator[None]:
    """Count what Megatron's exchange needs, while a schedule runs."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*args, **kwargs)

        return call

    places = {
        "shapes": (P2PCommunicator, "_communicate_shapes"),
        "synchronize": (torch.cuda, "synchronize"),
        "tolist": (torch.Tensor, "tolist"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, (owner, attribute) in places.items():
            patch.setattr(owner, attribute, counted(name, getattr(owner, attribute)))
        yield


def _run(rank: int, stages: int, cases: list[Case]) -> list[Found]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from odb_megatron.megatron.pipeline import planned_shapes

    parallel_state.initialize_model_parallel(1, stages)
    found = []
    for case in cases:
        lengths, config = _lengths(case), _config(case, stages)
        chunks = [_Chunk(at * stages + rank, config, lengths) for at in range(case.chunks)]
        items = [iter(range(case.num_micro_batches)) for _ in chunks]
        schedule = schedules.forward_backward_pipelining_without_interleaving
        if case.chunks > 1:
            schedule = schedules.forward_backward_pipelining_with_interleaving
        arguments: dict[str, Any] = {
            "forward_step_func": _step,
            "data_iterator": items if case.chunks > 1 else items[0],
            "model": chunks if case.chunks > 1 else chunks[0],
            "num_microbatches": case.num_micro_batches,
            "seq_length": 99,
            "micro_batch_size": 1,
            "forward_only": case.forward_only,
        }
        plan = contextlib.nullcontext() if case.messages else planned_shapes(arguments, lengths)
        counts: dict[str, int] = {}
        with plan, _counted(counts):
            reports = schedule(**arguments)
        gradients = [] if case.forward_only else [one.weight.grad for one in chunks]
        found.append(
            Found(
                [gradient.flatten().tolist() for gradient in gradients if gradient is not None],
                [report["loss"].item() for report in reports],
                counts,
            )
        )
    return found


def _alone(case: Case, stages: int) -> tuple[list[list[float]], list[float]]:
    """Gradients of all chunks in their order, and losses, without a pipeline."""
    config, lengths = SimpleNamespace(), _lengths(case)
    chunks = [_Chunk(at, config, lengths) for at in range(stages * case.chunks)]
    losses = []
    for at in range(case.num_micro_batches):
        for chunk in chunks:
            out = chunk(at)
            if chunk is not chunks[-1]:
                chunks[chunk.at + 1].set_input_tensor(out)
        out.sum().backward()
        losses.append(out.sum().item())
    return [chunk.weight.grad.flatten().tolist() for chunk in chunks], losses  # type: ignore[union-attr]


@pytest.mark.parametrize("stages", CASES)
def test_what_schedules_receive(stages: int) -> None:
    cases = CASES[stages]
    ranks = run_replicas(_run, stages, stages, cases, timeout_s=120, device_layer=True)
    for at, case in enumerate(cases):
        gradients, losses = _alone(case, stages)
        for rank in range(stages):
            found = ranks[rank][at]
            if case.messages:  # the counts can be other than 0
                assert found.counts["synchronize"] >= found.counts["shapes"] > 5
                assert found.counts["tolist"] == 5
            else:
                assert found.counts == {}, case
            expected = [] if case.forward_only else gradients[rank::stages]
            for one, other in zip(found.gradients, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-4, abs=1e-4), (case, rank)
        assert ranks[-1][at].losses == pytest.approx(losses, rel=1e-5), case


def test_messages_cross_between_two_stages_of_two_chunks() -> None:
    """Megatron-LM#5271, in the installed version."""
    with pytest.raises(ReplicaError, match=r"got \[\d+, 1, 4\] for \[\d+, 1, 4\]"):
        run_replicas(
            _run, 2, 2, [Case(4, chunks=2, messages=True)], timeout_s=60, device_layer=True
        )


def _run_with_other_table(rank: int, problem: str) -> None:
    from odb_megatron.megatron import pipeline

    original = pipeline.get_schedule_table

    def table(num_micro_batches: int, chunks: int, group: int) -> list[tuple[int, int]]:
        found = original(num_micro_batches, chunks, group)
        return {"fewer": found[:-1], "more": [*found, found[-1]], "order": found[::-1]}[problem]

    pipeline.get_schedule_table = table
    _run(rank, 2, [Case(4)])


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("fewer", "would (send|receive) .* one tensor more than a schedule of 4 micro-batches"),
        ("order", r"sent \[\d+, 1, 4\] to the (next|previous) stage; the plan has \["),
    ],
)
def test_a_schedule_that_does_not_fit_the_table(problem: str, message: str) -> None:
    with pytest.raises(ReplicaError, match=message):
        run_replicas(_run_with_other_table, 2, problem, timeout_s=60, device_layer=True)
