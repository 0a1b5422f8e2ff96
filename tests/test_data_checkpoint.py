"""The data's state among Megatron's arguments: replicas as threads save and resume it; refusals."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from iterables import MakeLines, Stateless
from synthetic_data import (
    Records,
    in_threads,
    lenient_stream,
    metadata_of,
    step_config,
    steps_of,
)
from test_item_stream import config_of, stream_of

from odb_megatron.data.feed import StepFeed
from odb_megatron.data.iterable import IterableShards
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.wire import StepHeader
from odb_megatron.megatron import checkpoint as module
from odb_megatron.megatron.checkpoint import DataCheckpoint, DataState, data_identity, restore
from odb_megatron.testing.replicas import ThreadChannel, run_in_threads, thread_channels

TOTAL, STEPS = 60, 3
LENGTHS = [11 * at % 34 for at in range(TOTAL)]  # some are bad, some too long

MakeLoader = Callable[[ThreadChannel], StepLoader]


def megatron_args(**changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "iteration": STEPS,
        "rank": 0,
        "consumed_train_samples": 0,
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
    }
    return argparse.Namespace(**values | changes)


def map_style(
    channel: ThreadChannel, *, kind: type[Records] = Records, lengths: Any = LENGTHS
) -> StepLoader:
    stream = lenient_stream(lengths, kind=kind)
    config = step_config(total=TOTAL, global_batch_size=12, num_replicas=channel.num_replicas)
    return StepLoader(stream, config, channel=channel)


def iterable(channel: ThreadChannel, *, passes: int = 1, **more: Any) -> StepLoader:
    """Shards of 40 and 20 items."""
    made = MakeLines(LENGTHS, [at % 3 % 2 for at in range(TOTAL)], **more)
    stream = stream_of(IterableShards(make=made), passes=passes)
    config = config_of(global_batch_size=12, num_replicas=channel.num_replicas)
    return StepLoader(stream, config, channel=channel)


def ids_of(steps: list[Any]) -> list[list[int]]:
    return [[at for row in metadata_of(step).positions for at in row] for step in steps]


def saved(make: MakeLoader, *, num_replicas: int = 2, most: int = STEPS) -> str:
    """Train so many steps and save; what is made ahead, or handed out only, is not in."""
    groups = thread_channels(num_replicas)

    def go(channel: ThreadChannel) -> str:
        feed = StepFeed(make(channel), plan_ahead=2)
        loader, args = feed._loader, megatron_args()
        assert loader is not None
        checkpoint = DataCheckpoint(args, group=groups[channel.replica], channel=None)
        checkpoint.watch(feed, identity=data_identity(args, loader.stream))
        num_steps = 0
        for item in feed.iterators[0]:
            if isinstance(item, StepHeader):
                num_steps += 1
                if num_steps > most:
                    break
                args.consumed_train_samples += item.totals.num_consumed
                checkpoint.note_trained()
        checkpoint.save()
        assert feed.close(timeout_s=60)
        return str(args.odb_data_state)

    texts = in_threads(go, num_replicas)
    assert len(set(texts)) == 1
    return texts[0]


def resumed(
    make: MakeLoader,
    text: str | None,
    *,
    num_replicas: int = 2,
    **changes: Any,
) -> list[Any]:
    """Return by replica what each emits from there on, and if from a state; or its error."""
    consumed = 0 if text is None else json.loads(text)["consumed"]

    def go(channel: ThreadChannel) -> tuple[list[list[int]], bool]:
        loader = make(channel)
        values = {"consumed_train_samples": consumed, "rank": channel.replica}
        args = megatron_args(**values | changes)
        had_state = restore(args, loader, group=channel, text=text)
        return ids_of(steps_of(loader)), had_state

    return run_in_threads(go, thread_channels(num_replicas))


def refused(make: MakeLoader, text: str | None, **how: Any) -> list[str]:
    """Return the error of each replica; all must refuse."""
    found = resumed(make, text, **how)
    assert all(isinstance(error, ValueError) for error in found), found
    return [str(error) for error in found]


def changed(text: str, change: Callable[[dict[str, Any]], Any]) -> str:
    state = json.loads(text)
    change(state)
    return json.dumps(state)


# --- going on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [map_style, iterable])
def test_the_same_replicas_go_on(make: MakeLoader) -> None:
    whole = in_threads(lambda channel: ids_of(steps_of(make(channel))))
    text = saved(make)
    assert resumed(make, text) == [(rest[STEPS:], True) for rest in whole]
    assert (json.loads(text)["consumed"], json.loads(text)["num_bad"] > 0) == (36, True)
    assert len(json.loads(text)["sources"]) == (2 if make is iterable else 0)


def test_other_replicas_go_on_with_the_same_samples() -> None:
    whole = in_threads(lambda channel: ids_of(steps_of(map_style(channel))))
    steps = [sorted(sum(step, [])) for step in zip(*whole, strict=True)][STEPS:]  # noqa: RUF017
    text = saved(map_style)
    for num in (1, 3, 4):
        found = [ids for ids, _ in resumed(map_style, text, num_replicas=num)]
        assert [sorted(sum(step, [])) for step in zip(*found, strict=True)] == steps  # noqa: RUF017
    for then, now in ((2, 4), (1, 2)):
        for error in refused(iterable, saved(iterable, num_replicas=then), num_replicas=now):
            assert f"with {then} of them: resume with that data-parallel size, not {now}" in error


@pytest.mark.parametrize(("then", "now"), [(2, 3), (1, 2), (3, 1)])
def test_other_replicas_go_on_with_the_rest_of_an_iterable(then: int, now: int) -> None:
    def make(channel: ThreadChannel) -> StepLoader:
        made = MakeLines(LENGTHS, [at % 6 for at in range(TOTAL)])
        stream = stream_of(IterableShards(make=made, total_parts=6))
        config = config_of(global_batch_size=12, num_replicas=channel.num_replicas)
        return StepLoader(stream, config, channel=channel)

    first = in_threads(lambda channel: ids_of(steps_of(make(channel)))[:STEPS], then)
    found = resumed(make, saved(make, num_replicas=then), num_replicas=now)
    rest = [ids for ids, _ in found]
    assert [len(ids) for ids in rest] == [2] * now
    num_trained = sum(len(step) for ids in (*first, *rest) for step in ids)
    assert num_trained == sum(0 < length <= 64 for length in LENGTHS)


def test_an_iterable_at_its_end_has_no_further_step() -> None:
    text = saved(iterable, most=99)
    assert [ids for ids, _ in resumed(iterable, text)] == [[], []]
    more = [ids for ids, _ in resumed(lambda channel: iterable(channel, passes=2), text)]
    assert sum(len(step) for ids in more for step in ids) == sum(0 < n <= 64 for n in LENGTHS)


def test_a_checkpoint_without_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    found = resumed(map_style, None, consumed_train_samples=24)
    assert [had_state for _, had_state in found] == [False, False]
    assert capsys.readouterr().out == (
        "odb: no data state in the checkpoint of iteration 3; the data goes on at sample 24 of the "
        "stream\n"
    )
    for error in refused(iterable, None):
        assert "an iterable source cannot be continued without" in error


def test_an_iterable_without_a_state_of_its_own_is_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def make(channel: ThreadChannel) -> StepLoader:
        return iterable(channel, kind=Stateless)

    text = saved(make)
    assert capsys.readouterr().out.count("has no state of its own") == 1
    assert all("had no state of its own" in error for error in refused(make, text))


def test_the_other_ranks_of_a_replica_get_the_same_text() -> None:
    class Channel:
        sent = b""

        def header(self, data: bytes | None = None) -> bytes:
            Channel.sent = data or Channel.sent
            return Channel.sent

    source, other = megatron_args(), megatron_args()
    (group,) = thread_channels(1)
    first = DataCheckpoint(source, group=group, channel=Channel())
    first.watch(StepFeed(map_style(group)), identity={})
    first.save()
    rank = DataCheckpoint(other, group=None, channel=Channel())
    rank.note_trained()
    rank.save()
    assert other.odb_data_state == source.odb_data_state
    assert DataState.parse(other.odb_data_state).consumed == 0


# --- what is refused --------------------------------------------------------------------------

TEXT = DataState(
    data=data_identity(megatron_args(), lenient_stream(LENGTHS)),
    consumed=36,
    num_bad=sum(LENGTHS[lenient_stream(LENGTHS).locate(at).record] == 0 for at in range(36)),
).to_text()


def test_the_text_is_what_a_run_saves() -> None:
    assert saved(map_style) == TEXT


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.update(version=9), "was written by another version of odb_megatron"),
        (lambda s: s.update(consumed=99), "saved after 99 samples, the checkpoint after 36: one"),
        (lambda s: s["data"].pop("blend"), "data state is damaged (KeyError: 'blend')"),
        (lambda s: s["data"].update(blend=7), "data state is damaged (TypeError"),
        (lambda s: s["data"].update(sources="x"), "data state is damaged (TypeError"),
        (lambda s: s["data"]["sources"][0].pop("seed"), "data state is damaged (KeyError: 'seed')"),
        (lambda s: s["data"].update(sources=[]), "0 sources then, 1 now"),
        (lambda s: s["data"]["sources"][0].update(num_records=61), "records of synthetic: 61 then"),
        (
            lambda s: s["data"]["sources"][0].update(seed=5, ends=[1, 1]),
            "(seed of synthetic: 5 then, 7 now), so",
        ),
        (
            lambda s: s["data"]["sources"][0].update(ends=[1, 1]),
            "(split of synthetic, by its first and last record: 1 and 1 then, ",
        ),
    ],
)
def test_a_state_that_does_not_fit(change: Callable[[dict[str, Any]], Any], text: str) -> None:
    state = changed(TEXT, change)
    for error in refused(map_style, state, consumed_train_samples=36):
        assert text in error
        assert "restore" in error


class Changed(Records):
    """Records of files that have changed."""

    def fingerprint(self) -> str:
        return "another"


def test_files_that_have_changed() -> None:
    """On one replica alone too; the others name it."""

    def one_changed(channel: ThreadChannel) -> StepLoader:
        return map_style(channel, kind=Changed if channel.replica else Records)

    own, other = reversed(refused(one_changed, TEXT))
    assert "data changed since the checkpoint was saved (" in own
    assert "start the data anew from its weights (--finetune)" in own
    assert other == f"replica 1 cannot resume its data: {own}"


def test_another_number_of_sources_and_another_blend() -> None:
    part = {"path": "a", "fingerprint": "f", "num_records": 3, "seed": 1, "ends": [0, 2]}
    one = {"sources": [part], "blend": [4, "aa"], "tokenizer": "t"}
    same = module._require_same_data
    same(one, {**one, "blend": [2, "cc"]})  # a shorter run: nothing to compare
    parts = [{**part, "path": str(number), "fingerprint": "g" * 20} for number in range(5)]
    many = {**one, "sources": [part] * 5}
    for then, now, text in (
        (one, {**one, "sources": [part, part]}, "1 sources then, 2 now"),
        (one, {**one, "blend": [4, "bb"]}, "the weights of the blend have changed"),
        (one, {**one, "tokenizer": "u"}, r"saved \(tokenizer: t then, u now\)"),
        (
            many,
            {**many, "sources": parts, "tokenizer": "u"},
            r"saved \(fingerprint of 0: f then, gggggggggggg now; fingerprint of 1: .* and 3 more",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            same(then, now)


def test_the_tokenizer_is_told_by_its_files(tmp_path: Path) -> None:
    stream = lenient_stream(LENGTHS)

    def tokenizer(folder: Path) -> str:
        args = megatron_args(tokenizer_type="HF", tokenizer_model=str(folder))
        return str(data_identity(args, stream)["tokenizer"])

    names = []
    for text in ("a", "b"):
        folder = tmp_path / text
        folder.mkdir()
        (folder / "tokenizer.json").write_text(text)
        names.append(tokenizer(folder))
    (tmp_path / "b" / "tokenizer.json").write_text("a")
    assert names[0] != names[1]
    assert tokenizer(tmp_path / "b") == names[0]
    assert tokenizer(Path("org/name")) == "HF org/name"
    assert data_identity(megatron_args(), stream)["tokenizer"] == "NullTokenizer"
