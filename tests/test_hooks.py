"""What ODB replaces in Megatron: every name is there, does what it is for, and is put back."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_reads import host_reads

pytest.importorskip("megatron.training")

from odb_megatron.data.thd import layout
from odb_megatron.data.wire import StepHeader
from odb_megatron.megatron import hooks as module
from odb_megatron.megatron.forward_step import RouterMask
from odb_megatron.megatron.hooks import (
    CORRECTED,
    REPLACED,
    Hooks,
    Name,
    Replacements,
    StepCalculator,
)
from odb_megatron.plan.padding import SizeRule
from odb_megatron.plan.record import StepTotals

pytestmark = pytest.mark.megatron

TOTALS = StepTotals(
    **dict.fromkeys([one.name for one in fields(StepTotals)], 0)
    | {"num_micro_batches": 3, "num_replicas": 1, "is_final": False}
)


def _now() -> dict[str, Any]:
    return {
        one.name: functools.reduce(
            getattr, one.name.split("."), importlib.import_module(one.module)
        )
        for one in (*REPLACED.values(), *CORRECTED.values())
    }


@pytest.mark.parametrize(
    ("packed", "experts", "changed"),
    [
        (False, False, {"get_forward_backward_func", "training_log", "compile_helpers"}),
        (True, False, {"save_checkpoint"}),
        (True, True, {name for name in CORRECTED if "." in name or "tokens" in name}),
    ],
)
def test_names_are_replaced_and_put_back(packed: bool, experts: bool, changed: set[str]) -> None:
    before = _now()
    hooks = Hooks(SimpleNamespace(), packed=packed, has_experts=experts)  # type: ignore[arg-type]
    hooks.install()
    now = _now()
    hooks.undo()
    found = {name for name in now if now[name] is not before[name]}
    assert found >= changed
    assert ("save_checkpoint" in found) is packed
    assert _now() == before
    hooks.undo()


def test_a_name_that_is_gone_is_said() -> None:
    gone = Name("megatron.training.training", "train_faster", "speed")
    text = r"train_faster, which odb_megatron replaces \(speed\): use megatron-core 0.18 to 0.19"
    with pytest.raises(ValueError, match=text):
        Replacements().replace(gone, lambda original: original)


class _Listener:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_schedule(self, *, training: bool) -> None:
        self.told.append(("schedule", training))

    def on_header(self, header: StepHeader, *, training: bool) -> None:
        self.told.append(("header", header.totals.num_micro_batches, training))

    def on_trained(self) -> None:
        self.told.append(("trained",))

    def on_logged(self, values: dict[str, Any]) -> None:
        self.told.append(("logged", values))


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_schedule_runs_the_headers_m(virtual: bool, forward_only: bool) -> None:
    listener, seen = _Listener(), []
    hooks = Hooks(listener, packed=True)  # type: ignore[arg-type]
    header = StepHeader(totals=TOTALS, positions=((1,),) * 3)
    chunks = [iter([header, 0, 1, 2]) for _ in range(1 + virtual)]

    def schedule(**arguments: Any) -> str:
        seen.append(arguments)
        return "losses"

    get = hooks._wrap_get_forward_backward_func(lambda *_, **__: schedule)
    result = get()(
        data_iterator=chunks if virtual else chunks[0],
        num_microbatches=8,
        seq_length=64,
        forward_only=forward_only,
    )
    assert result == "losses"
    assert seen[0]["num_microbatches"] == 3
    assert [next(chunk) for chunk in chunks] == [0] * len(chunks)
    expected: list[Any] = [("schedule", not forward_only), ("header", 3, not forward_only)]
    assert listener.told == expected + [("trained",)] * (not forward_only)


def test_what_a_schedule_cannot_take() -> None:
    hooks = Hooks(_Listener(), packed=True)  # type: ignore[arg-type]
    schedule = hooks._wrap_get_forward_backward_func(lambda: None)()
    with pytest.raises(ValueError, match="process_non_loss_data_func, .*: leave it out"):
        schedule(data_iterator=iter([]), forward_only=True, collect_non_loss_data=True)
    with pytest.raises(AssertionError, match="expected a step header, got 7"):
        schedule(data_iterator=iter([7]), num_microbatches=4)


def test_a_log_line_has_the_flops_of_the_mean_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron divides them by the mean time of the interval's steps; a replay counts once."""
    listener, seen = _Listener(), []
    monkeypatch.setattr("megatron.training.get_args", lambda: SimpleNamespace(log_interval=2))

    def training_log(
        loss_dict: Any,
        iteration: int,
        seqlen_squared_sum_in_batch: float = 0,
        total_real_tokens_in_batch: float = 0,
    ) -> str:
        seen.append((total_real_tokens_in_batch, seqlen_squared_sum_in_batch))
        return "flag"

    hooks = Hooks(listener, packed=True)  # type: ignore[arg-type]
    log = hooks._wrap_training_log(training_log)
    schedule = hooks._wrap_get_forward_backward_func(lambda: lambda **_: None)()
    for call, (tokens, squared) in enumerate([(100, 2600), (100, 2600), (20, 400), (60, 900)]):
        totals = replace(TOTALS, num_tokens=tokens, num_squared_tokens=squared)
        schedule(data_iterator=iter([StepHeader(totals=totals, positions=((1,),)), 0]))
        if call:  # the first one is replayed
            assert log({}, iteration=call) == "flag"
    assert seen == [(100, 2600), ((100 + 20) / 2, (2600 + 400) / 2), (60, 900)]
    assert [told[1]["iteration"] for told in listener.told if told[0] == "logged"] == [1, 2, 3]


def test_wheels_are_not_compiled_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"helpers_cpp{module.EXTENSION_SUFFIXES[0]}").touch()
    monkeypatch.setattr(module.inspect, "getfile", lambda _: str(tmp_path / "utils.py"))
    calls: list[int] = []
    compile_helpers = module._compiled_once(lambda: calls.append(1))
    compile_helpers()
    assert calls == []
    (tmp_path / "Makefile").touch()
    compile_helpers()
    assert calls == [1]


# --- the counter -----------------------------------------------------------------------------


@dataclass
class _Base:
    """Megatron's constant calculator, as far as the loop uses it."""

    count: int
    updates: list[tuple[Any, ...]] = field(default_factory=list)

    def get(self) -> int:
        return self.count

    def update(self, consumed: int, consistency_check: bool, verbose: bool = False) -> None:
        self.updates.append((consumed, consistency_check, verbose))

    def get_current_global_batch_size(self) -> int:
        return 8


@pytest.mark.parametrize("replicas", [1, 2, 3, 7, 64, 4096])
@pytest.mark.parametrize("samples", [1, 7, 8, 4097, 10**9])
def test_every_product_megatron_forms_is_the_sample_count(samples: int, replicas: int) -> None:
    """The orders of train_step, training_log and train; what it adds up is divided by M."""
    calculator = StepCalculator(_Base(4), num_replicas=replicas)
    calculator.begin_step(replace(TOTALS, num_consumed=samples))
    count: Any = calculator.get()
    products = [count * 1 * replicas * 1, 1 * replicas * 1 * count, replicas * 1 * count]
    assert products == [samples] * 3
    assert all(type(product) is int for product in products)
    assert count == Fraction(samples, replicas)
    assert 1 / count == pytest.approx(1 / 3)


def test_the_base_value_shows_between_steps() -> None:
    """So the loop's check for a count that decreases or grows sees a constant."""
    base = _Base(4)
    calculator = StepCalculator(base, num_replicas=2)
    assert calculator.get() == 4
    for samples in (9, 5):
        calculator.begin_step(replace(TOTALS, num_consumed=samples))
        assert 2 * calculator.get() == samples
        calculator.update(samples, consistency_check=False, verbose=True)
        assert calculator.get() == 4
        calculator.update(samples, consistency_check=True)
        assert calculator.get() == 4
    assert base.updates[:2] == [(9, False, True), (9, True, False)]
    assert calculator.get_current_global_batch_size() == 8


# --- routers ---------------------------------------------------------------------------------


@pytest.fixture
def mended() -> Any:
    hooks = Hooks(_Listener(), packed=True, has_experts=True)  # type: ignore[arg-type]
    hooks.install()
    yield hooks
    hooks.undo()


def test_padding_does_not_count_in_the_expert_bias(mended: Hooks) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    router: Any = SimpleNamespace(
        enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2, dtype=torch.int64)
    )
    routing_map = torch.tensor([[True, False], [False, True], [True, False]])
    mask = torch.tensor([False, False, True])
    TopKRouter._apply_expert_bias(router, routing_map, padding_mask=mask)
    TopKRouter._apply_expert_bias(router, routing_map)
    assert router.local_tokens_per_expert.tolist() == [3, 2]


def test_load_balancing_weighs_the_tokens_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with the same three real tokens; Megatron's own count takes them for six."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, router

    def all_reduce(tensor: torch.Tensor, *, group: Any) -> None:
        tensor.mul_(group.size())

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(moe_utils, "reduce_from_tensor_model_parallel_region", mappings._reduce)
    routing_map = torch.tensor(
        [[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0]]
    ).bool()  # one is padding
    asked: dict[str, Any] = {"reduce_group": SimpleNamespace(size=lambda: 2), "topk": 2}

    def counts(*, with_padding_mask: bool) -> tuple[list[int], float, float]:
        per_expert, own, total = router.get_tokens_per_expert_and_token_count(
            routing_map=routing_map, with_padding_mask=with_padding_mask, **asked
        )
        return per_expert.tolist(), float(own), float(total)

    assert counts(with_padding_mask=True) == ([4, 4, 4], 6, 6)  # else it need not be mended
    replaced, name = Replacements(), "get_tokens_per_expert_and_token_count"
    replaced.replace(CORRECTED[name], module._ROUTERS[name])
    try:
        assert counts(with_padding_mask=True) == ([4, 4, 4], 3, 6)
        assert counts(with_padding_mask=False) == ([4, 4, 4], 4, 8)
    finally:
        replaced.undo()


@pytest.mark.parametrize(("tokens", "weight", "scale"), [(0, 0, 3.0), (8, 8, 3.0), (8, 64, 24.0)])
def test_router_losses_are_weighed_as_what_they_are_divided_by(
    mended: Hooks, tokens: int, weight: int, scale: float
) -> None:
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

    mended._totals = replace(TOTALS, num_loss_tokens=tokens, loss_weight=weight)
    try:
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(3.0))
        assert MoEAuxLossAutoScaler.main_loss_backward_scale == scale
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.mark.parametrize("is_of_the_pack", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rotation_as_megatrons_without_waiting_for_the_device(
    size: int, is_of_the_pack: bool
) -> None:
    """By itself Megatron reads the lengths on the host, in every layer."""
    from megatron.core.models.common.embeddings import rope_utils

    lengths = torch.tensor([0, *(2 * size * length for length in (3, 1, 7))])
    offsets = lengths.cumsum(0, dtype=torch.int32)
    total = int(offsets[-1])
    freqs = torch.randn(total if is_of_the_pack else 64, 1, 1, 8)
    original = rope_utils._apply_rotary_pos_emb_thd
    rotate = module._rotated_at_once(original)
    for rank in range(size):
        t = torch.randn(total // size, 2, 12)
        group = SimpleNamespace(size=lambda: size, rank=lambda own=rank: own)
        for options in ({}, {"mscale": 0.5}, {"rotary_interleaved": True}):
            with host_reads() as reads:
                expected = original(t, offsets, freqs, cp_group=group, **options)
            assert reads  # guard: they are seen
            with host_reads() as reads:
                found = rotate(t, offsets, freqs, cp_group=group, **options)
            assert torch.equal(found, expected)
            assert reads == []


def test_which_part_of_the_mask_a_stage_gets() -> None:
    """The first stage cuts it for sequence parallelism by itself."""
    item = layout((3, 5), positions=(0, 1), rule=SizeRule(multiple=4))  # 000100000111
    part = RouterMask(sequence_size=2, sequence_rank=1)
    assert part.build(item, is_first_stage=True).shape == (1, 12)
    assert part.build(item, is_first_stage=False).tolist() == [[False] * 3 + [True] * 3]
    assert RouterMask().build(item, is_first_stage=False).shape == (1, 12)
