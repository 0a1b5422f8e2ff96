"""`odb_megatron.megatron.data_checkpoint`: what a checkpoint holds of the data, and going on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_data import Records, single_stream

pytest.importorskip("megatron.core")

from odb_megatron.data.loop import Progress
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.megatron.data_checkpoint import DataCheckpoint, DataState, restore, together
from odb_megatron.megatron.data_identity import data_identity
from odb_megatron.plan.record import PlanConfig
from odb_megatron.testing.replicas import ThreadChannel, run_in_threads, thread_channels

STRICT: Any = SimpleNamespace(resume_strict=True)
LENIENT: Any = SimpleNamespace(resume_strict=False)


def _args(**changes: Any) -> argparse.Namespace:
    values = {
        "rank": 0,
        "iteration": 2,
        "consumed_train_samples": 8,
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
        "odb_data_state": None,
    }
    return argparse.Namespace(**values | changes)


class _Named(Records):
    """Records that say which they are."""

    def __init__(self, lengths: Sequence[int], name: str) -> None:
        super().__init__(lengths)
        self._name = name

    def fingerprint(self) -> str:
        return self._name


def _stream(size: int = 12, name: str = "first") -> SampleStream:
    return single_stream(_Named([3] * size, name))


def _loader(stream: SampleStream, channel: Any, *, consumed: int = 0) -> StepLoader:
    config = PlanConfig(
        total=len(stream), global_batch_size=4, num_replicas=channel.num_replicas, token_budget=16
    )
    return StepLoader(stream, config, channel=channel, consumed=consumed)


def _saved(**changes: Any) -> str:
    values: dict[str, Any] = {
        "data": data_identity(_args(), _stream()),
        "consumed": 8,
        "num_bad": 3,
        "tokens_so_far": 99,
        "sources": [],
    }
    return DataState(**values | changes).to_text()


def _restored(text: str | None, *, stream: SampleStream | None = None, config: Any = STRICT) -> Any:
    (channel,) = thread_channels(1)
    loader = _loader(stream or _stream(), channel)
    return restore(_args(), config, loader, group=channel, text=text), loader


def test_what_is_saved_goes_on_at_any_number_of_replicas() -> None:
    (channel,) = thread_channels(1)
    loader = _loader(_stream(), channel)
    for _ in range(2):
        step = loader.make_step()
        assert step is not None
    feed = SimpleNamespace(progress=step.progress)
    args = _args()
    checkpoint = DataCheckpoint(args, group=channel, channel=None)
    checkpoint.watch(feed, identity=data_identity(args, loader.stream))
    checkpoint.save(tokens_so_far=24)
    state = DataState.parse(args.odb_data_state)
    assert (state.consumed, state.num_bad, state.tokens_so_far) == (8, 0, 24)

    def go_on(own: ThreadChannel) -> tuple[int, int]:
        other = _loader(_stream(), own)
        found = restore(args, STRICT, other, group=own, text=args.odb_data_state)
        assert found == state
        made = other.make_step()
        assert made is not None
        assert other.make_step() is None
        return other.progress.consumed, made.progress.consumed

    assert run_in_threads(go_on, thread_channels(4)) == [(12, 12)] * 4


def test_a_step_that_was_handed_out_and_not_trained_is_not_saved() -> None:
    args = _args(consumed_train_samples=4)
    feed = SimpleNamespace(progress=Progress(consumed=4))
    checkpoint = DataCheckpoint(args, group=SimpleNamespace(replica=0), channel=None)
    checkpoint.watch(feed, identity={})
    checkpoint.note_trained()
    feed.progress = Progress(consumed=8)
    assert checkpoint.state(tokens_so_far=0).consumed == 4


def test_other_ranks_of_the_replica_get_the_same_text() -> None:
    args = _args()
    channel = SimpleNamespace(
        header=lambda data=None: b"the source rank's" if data is None else data
    )
    DataCheckpoint(args, group=None, channel=channel).save(tokens_so_far=0)
    assert args.odb_data_state == "the source rank's"


def test_iterators_states_of_all_replicas_are_saved() -> None:
    def save(channel: ThreadChannel) -> str:
        args = _args()
        source = {"has_state": channel.replica == 0, "next": "x" * channel.replica}
        feed = SimpleNamespace(progress=Progress(consumed=8, source=source))
        checkpoint = DataCheckpoint(args, group=channel, channel=None)
        checkpoint.watch(feed, identity={})
        checkpoint.save(tokens_so_far=0)
        return str(args.odb_data_state)

    one, other = run_in_threads(save, thread_channels(2))
    assert isinstance(one, str), one
    assert one == other
    assert [state["next"] for state in DataState.parse(one).sources] == ["", "x"]


def test_without_a_state_the_data_goes_on_at_the_consumed_samples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, _ = _restored(None)
    assert found is None
    assert "the data goes on at sample 8 of the stream" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "7", '{"version": 1}', _saved(version=2), _saved(consumed=-1),
     _saved(num_bad=True), _saved(data=[]), _saved(data={}), _saved(sources={}), "[" * 100_000,
     _saved(data={"blend": [0, ""], "sources": 1, "tokenizer": ""})],
)  # fmt: skip
def test_a_damaged_state_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="data state is .*(damaged|restore it)"):
        _restored(text)


def test_other_data_or_another_step_is_refused() -> None:
    with pytest.raises(ValueError, match="saved with other data .records of .*12 then, 13 now"):
        _restored(_saved(), stream=_stream(13))
    with pytest.raises(ValueError, match="saved after 4 samples, the checkpoint after 8"):
        _restored(_saved(consumed=4))
    with pytest.raises(ValueError, match=r"data changed .*first then, other now"):
        _restored(_saved(), stream=_stream(name="other"))


def test_changed_files_are_a_warning_without_strict_resume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, loader = _restored(_saved(), stream=_stream(name="other"), config=LENIENT)
    assert found.tokens_so_far == 99
    assert (loader.progress.consumed, loader.progress.num_bad) == (8, 3)
    assert "WARNING: data changed since the checkpoint was saved" in capsys.readouterr().out


def test_what_one_replica_refuses_all_refuse() -> None:
    def check(channel: ThreadChannel) -> str:
        def refuse() -> str:
            if channel.replica == 1:
                raise ValueError("its file is gone")
            return "fine"

        with pytest.raises(ValueError, match="its file is gone") as caught:
            together(channel, refuse)
        assert together(channel, lambda: "fine") == "fine"
        return str(caught.value)

    found = run_in_threads(check, thread_channels(2))
    assert found == ["replica 1 cannot resume its data: its file is gone", "its file is gone"]


def test_the_text_is_plain_json() -> None:
    assert json.loads(_saved())["version"] == 1
