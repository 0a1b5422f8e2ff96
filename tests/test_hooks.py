"""What ODB replaces in `megatron.training.training`: called as before, told, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_counters import _totals

from odb_megatron.data.feed import StepHeader
from odb_megatron.megatron import hooks as hooks_module
from odb_megatron.megatron.hooks import Hooks

PADDED = {"get_forward_backward_func", "training_log", "evaluate_and_print_results"}
PACKED = PADDED | {
    "save_checkpoint",
    "check_checkpoint_args",
    "compute_throughputs_and_append_to_progress_log",
    "num_floating_point_operations",
}


class _Listener:
    def __init__(self, tokens: int | None = None, *, is_timing: bool = False) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.tokens = tokens
        self.is_timing = is_timing

    def on_schedule(self, *, training: bool) -> None:
        self.told.append(("schedule", training))

    def on_header(self, header: StepHeader, *, training: bool) -> None:
        self.told.append(("header", header.totals.num_micro_batches, training))

    def wants_backward(self) -> bool:
        return self.is_timing

    def on_backward(self) -> None:
        self.told.append(("backward",))

    def on_logged(self, values: dict[str, Any]) -> None:
        self.told.append(("logged", values))

    def saving(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def on_saving(self) -> None:
        self.told.append(("saving",))

    def on_loaded(self, checkpoint_args: Any) -> None:
        self.told.append(("loaded", checkpoint_args))

    def tokens_so_far(self) -> int | None:
        return self.tokens


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for megatron.training.training; what its functions got is in `calls`."""
    calls: list[Any] = []

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., str]:
        calls.append(("func", args, kwargs))

        def schedule(**arguments: Any) -> str:
            calls.append(("schedule", arguments))
            return "losses"

        return schedule

    def training_log(loss_dict: Any, iteration: int, seen: Any = None) -> str:
        calls.append(("log", loss_dict, iteration, seen))
        return "flag"

    def save_checkpoint(
        iteration: int,
        model: Any,
        *,
        extra: Any = None,
        non_persistent_ckpt: bool = False,
        train_data_iterator: Any = None,
    ) -> None:
        del non_persistent_ckpt
        assert train_data_iterator is None, "the rerun machine would pickle a step"
        calls.append(("save", iteration, model, extra))
        if model == "broken":
            raise OSError("disk full")

    def check_checkpoint_args(checkpoint_args: Any, skip_args: Any = None) -> None:
        calls.append(("check", checkpoint_args, skip_args))

    def compute_throughputs_and_append_to_progress_log(iteration: int, flops: float) -> None:
        args = module.args
        calls.append(("progress", iteration, args.consumed_train_samples * args.seq_length))
        if flops < 0:
            raise OSError("disk full")

    def train_step(forward_backward_func: Any, *, iteration: int | None = None) -> str:
        calls.append(("step", iteration))
        return "trained"

    def evaluate_and_print_results(prefix: str, forward: Any, data_iterator: Any) -> str:
        calls.append(("evaluate", prefix, module.args.eval_iters))
        return "done"

    module = SimpleNamespace(
        calls=calls,
        args=SimpleNamespace(
            consumed_train_samples=10,
            seq_length=64,
            eval_iters=5,
            full_validation=False,
            log_interval=2,
        ),
        get_forward_backward_func=get_forward_backward_func,
        training_log=training_log,
        save_checkpoint=save_checkpoint,
        check_checkpoint_args=check_checkpoint_args,
        compute_throughputs_and_append_to_progress_log=(
            compute_throughputs_and_append_to_progress_log
        ),
        evaluate_and_print_results=evaluate_and_print_results,
        train_step=train_step,
        update_seqlen_stats_from_cu_seqlens=None,
        num_floating_point_operations=lambda args, batch_size: (args.seq_length, batch_size),
    )
    monkeypatch.setattr(hooks_module, "_training_module", lambda: module)
    monkeypatch.setattr(hooks_module, "_checkpointing_module", lambda: module)
    monkeypatch.setattr(hooks_module, "_megatron_args", lambda: module.args)
    return module


def _functions(module: SimpleNamespace) -> dict[str, Any]:
    return {name: getattr(module, name) for name in PACKED}


def _items(num_micro_batches: int) -> Iterator[Any]:
    header = StepHeader(totals=_totals(8), micro_batches=((1,),) * num_micro_batches)
    yield header
    yield from range(num_micro_batches)


def test_flops_where_megatron_knows_one_length_for_all(training: SimpleNamespace) -> None:
    """As in 0.17: the step's lengths are given to its function as one length."""
    del training.update_seqlen_stats_from_cu_seqlens
    original = training.num_floating_point_operations
    hooks = Hooks(_Listener(), packed=True)
    hooks.install()
    assert training.num_floating_point_operations(training.args, 8) == (64, 8)  # before a step
    totals = replace(_totals(8), num_tokens=100, num_squared_tokens=2600)
    header = StepHeader(totals=totals, micro_batches=((1,),))
    training.get_forward_backward_func()(data_iterator=iter([header, 0]), model="model")
    length, count = training.num_floating_point_operations(training.args, 8)
    assert (length, length * count) == (26, pytest.approx(100))
    assert training.args.seq_length == 64
    hooks.remove()
    assert training.num_floating_point_operations is original


@pytest.mark.parametrize("knows_lengths", [True, False])
def test_a_log_line_has_the_flops_of_the_mean_step(
    training: SimpleNamespace, knows_lengths: bool
) -> None:
    """Megatron divides them by the mean time of the interval's steps; a replay counts once."""
    if not knows_lengths:
        del training.update_seqlen_stats_from_cu_seqlens
    seen: list[Any] = []

    def flops(args: Any, batch_size: Any, **options: Any) -> float:
        tokens = options.get("total_real_tokens_in_batch", batch_size * args.seq_length)
        return float(
            3 * tokens
            + 7 * options.get("seqlen_squared_sum_in_batch", batch_size * args.seq_length**2)
        )

    def training_log(loss_dict: Any, iteration: int) -> None:
        own = {"total_real_tokens_in_batch": 1, "seqlen_squared_sum_in_batch": 1}
        options = own if knows_lengths else {}
        seen.append(training.num_floating_point_operations(training.args, 8, **options))

    training.num_floating_point_operations, training.training_log = flops, training_log
    hooks = Hooks(_Listener(), packed=True)
    hooks.install()
    lengths = [(100, 2600), (100, 2600), (20, 400), (60, 900)]
    for call, (tokens, squared) in enumerate(lengths):
        step = max(0, call - 1)  # the first one is replayed
        totals = replace(_totals(8), num_tokens=tokens, num_squared_tokens=squared, step=step)
        header = StepHeader(totals=totals, micro_batches=((1,),))
        training.get_forward_backward_func()(data_iterator=iter([header, 0]), model="model")
        if call:
            training.training_log({}, iteration=step + 1)
    hooks.remove()
    mean = [(100, 2600), ((100 + 20) / 2, (2600 + 400) / 2), (60, 900)]
    assert seen == [pytest.approx(3 * tokens + 7 * squared) for tokens, squared in mean]


@pytest.mark.parametrize(("packed", "names"), [(True, PACKED), (False, PADDED)])
def test_install_and_remove(training: SimpleNamespace, packed: bool, names: set[str]) -> None:
    before = _functions(training)
    hooks = Hooks(_Listener(), packed=packed)
    hooks.install()
    now = _functions(training)
    assert {name for name in now if now[name] is not before[name]} == names
    hooks.remove()
    assert _functions(training) == before
    hooks.remove()
    assert _functions(training) == before


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_schedule_runs_the_headers_m(
    training: SimpleNamespace, virtual: bool, forward_only: bool
) -> None:
    listener = _Listener()
    Hooks(listener, packed=True).install()
    iterator = _items(3)
    schedule = training.get_forward_backward_func(1, group="all")
    data_iterator = [iterator, _items(3)] if virtual else iterator
    result = schedule(
        data_iterator=data_iterator, num_microbatches=4, forward_only=forward_only, model="m"
    )
    assert result == "losses"
    assert training.calls[0] == ("func", (1,), {"group": "all"})
    arguments = training.calls[1][1]
    assert (arguments["num_microbatches"], arguments["model"]) == (3, "m")
    assert list(iterator) == [0, 1, 2]
    assert listener.told == [("schedule", not forward_only), ("header", 3, not forward_only)]


@pytest.mark.parametrize(("length", "sent"), [(0, 64), (48, 48)])
def test_stages_send_micro_batches_of_one_length(
    training: SimpleNamespace, length: int, sent: int
) -> None:
    Hooks(_Listener(), packed=True, micro_batch_length=length).install()
    schedule = training.get_forward_backward_func()
    schedule(data_iterator=_items(3), num_microbatches=4, model="m", seq_length=64)
    assert training.calls[1][1]["seq_length"] == sent


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("is_timing", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_the_backward_passes_is_told(
    training: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    forward_only: bool,
    is_timing: bool,
    fails: bool,
) -> None:
    """Right before Megatron's own reduction, which gets its arguments and is put back."""
    listener = _Listener(is_timing=is_timing)

    def reduce(*args: Any, **kwargs: Any) -> str:
        listener.told.append(("reduce", args, kwargs))
        return "reduced"

    config = SimpleNamespace(finalize_model_grads_func=reduce)

    def get_forward_backward_func() -> Callable[..., Any]:
        def schedule(**arguments: Any) -> Any:
            result = config.finalize_model_grads_func([1], 2, force=True)
            if fails:
                raise OSError("in the schedule")
            return result

        return schedule

    monkeypatch.setattr(training, "get_forward_backward_func", get_forward_backward_func)
    Hooks(listener, packed=True).install()
    schedule = training.get_forward_backward_func()
    arguments = {
        "data_iterator": _items(1),
        "model": [SimpleNamespace(config=config)],
        "forward_only": forward_only,
    }
    if fails:
        with pytest.raises(OSError, match="in the schedule"):
            schedule(**arguments)
    else:
        assert schedule(**arguments) == "reduced"
    expected = [("backward",)] if is_timing and not forward_only else []
    assert listener.told[2:] == [*expected, ("reduce", ([1], 2), {"force": True})]
    assert config.finalize_model_grads_func is reduce


def test_a_padded_schedule_keeps_megatrons_count(training: SimpleNamespace) -> None:
    listener = _Listener()
    Hooks(listener, packed=False).install()
    iterator = iter([1, 2])
    training.get_forward_backward_func()(data_iterator=iterator, num_microbatches=4)
    assert training.calls[1] == (
        "schedule",
        {"data_iterator": iterator, "num_microbatches": 4},
    )
    assert listener.told == [("schedule", True)]


def test_a_function_of_non_loss_data_is_refused(training: SimpleNamespace) -> None:
    Hooks(_Listener(), packed=True).install()
    schedule = training.get_forward_backward_func()
    with pytest.raises(ValueError, match="process_non_loss_data_func, .*: leave it out"):
        schedule(data_iterator=iter([]), forward_only=True, collect_non_loss_data=True)


def test_what_is_no_header_is_a_defect(training: SimpleNamespace) -> None:
    Hooks(_Listener(), packed=True).install()
    with pytest.raises(AssertionError, match="expected a step header, got 7"):
        training.get_forward_backward_func()(data_iterator=iter([7]), num_microbatches=4)


def test_log_is_told_after_megatrons_own(training: SimpleNamespace) -> None:
    listener = _Listener()
    Hooks(listener, packed=True).install()
    assert training.training_log({"lm loss": 1.0}, 3, seen="x") == "flag"
    assert training.calls == [("log", {"lm loss": 1.0}, 3, "x")]
    assert listener.told == [
        ("logged", {"loss_dict": {"lm loss": 1.0}, "iteration": 3, "seen": "x"})
    ]


def test_a_save_is_told_before_it_begins(training: SimpleNamespace) -> None:
    listener = _Listener()
    Hooks(listener, packed=True).install()
    training.save_checkpoint(6, "model", extra=1, train_data_iterator=[1])
    with pytest.raises(OSError, match="disk full"):
        training.save_checkpoint(7, "broken", non_persistent_ckpt=True)
    assert training.calls == [("save", 6, "model", 1), ("save", 7, "broken", None)]
    assert listener.told == [("saving",), ("saving",)]


def test_a_loaded_checkpoints_arguments_are_told(training: SimpleNamespace) -> None:
    listener = _Listener()
    Hooks(listener, packed=True).install()
    training.check_checkpoint_args("its arguments", skip_args={"num_layers"})
    assert listener.told == [("loaded", "its arguments")]
    assert training.calls == [("check", "its arguments", {"num_layers"})]


@pytest.mark.parametrize(("tokens", "written"), [(123, 123), (0, 0), (None, 640)])
def test_progress_counts_real_tokens(
    training: SimpleNamespace, tokens: int | None, written: int
) -> None:
    Hooks(_Listener(tokens), packed=True).install()
    training.compute_throughputs_and_append_to_progress_log(2, 1.0)
    with pytest.raises(OSError, match="disk full"):
        training.compute_throughputs_and_append_to_progress_log(3, -1.0)
    assert training.calls == [("progress", 2, written), ("progress", 3, written)]
    assert (training.args.consumed_train_samples, training.args.seq_length) == (10, 64)


@pytest.mark.parametrize(("full", "given"), [(False, 5), (True, [5])])
def test_full_validation_gets_its_count_as_a_list(
    training: SimpleNamespace, full: bool, given: Any
) -> None:
    """Megatron 0.19.2 takes element 0 of what it made of the count, and fails on an int."""
    Hooks(_Listener(), packed=True).install()
    training.args.full_validation = full
    assert training.evaluate_and_print_results("here", None, data_iterator=iter(())) == "done"
    assert training.calls == [("evaluate", "here", given)]
    assert training.args.eval_iters == 5
