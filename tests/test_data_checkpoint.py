"""Data state beside a checkpoint: replicas as threads save and resume it; what is refused."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_data import Records, rules, single_stream
from test_step_loader import BUDGET, LENIENT, _config, _read_feed, _results, _steps

from odb_megatron.data.finished_step import Progress
from odb_megatron.data.source_counts import SourceCounts, added_counts
from odb_megatron.data.step_feed import StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.megatron import data_state
from odb_megatron.megatron.data_checkpoint import DataCheckpoint, loaded_folder, saving_folder
from odb_megatron.megatron.data_identity import changed_files, check_same_samples, data_identity
from odb_megatron.megatron.data_state import (
    Digest,
    decode_state,
    encode_state,
    read_file,
    staged_path,
    state_path,
    write_file,
)
from odb_megatron.megatron.resume import resume_data
from odb_megatron.plan.policy import ExchangeMode, PolicyName
from odb_megatron.testing.replicas import ThreadExchange, run_in_threads, thread_exchanges

TOTAL = 60
STEPS = 3
LENGTHS = [1 + 11 * p % 30 for p in range(TOTAL)]

Run = tuple[list[list[int]], dict[str, Any] | None]


def megatron_args(folder: Path, **changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "iteration": STEPS,
        "finetune": False,
        "skip_train": False,
        "rank": 0,
        "load": str(folder),
        "save": str(folder),
        "consumed_train_samples": 0,
        "non_persistent_ckpt_type": None,
        "non_persistent_global_ckpt_dir": None,
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
    }
    return argparse.Namespace(**values | changes)


def odb_config(policy: PolicyName, *, strict: bool = True) -> Any:
    return argparse.Namespace(policy=policy, resume_strict=strict)


class Changed(Records):
    """Records of files that have changed."""

    def fingerprint(self) -> str:
        return "another"


def stream_of(lengths: Any) -> SampleStream:
    records = lengths if isinstance(lengths, Records) else Records(lengths)
    limits: dict[str, Any] = {"context": BUDGET, "token_budget": BUDGET}
    return single_stream(records, sample_rules=rules(**limits | LENIENT))


def loader_of(
    end: ThreadExchange,
    policy: PolicyName,
    lengths: Any = LENGTHS,
    *,
    num_workers: int = 0,
    **changes: Any,
) -> StepLoader:
    config = _config(
        policy=policy,
        total=TOTAL,
        num_replicas=end.num_replicas,
        window=10,
        max_delay_steps=2,
        **changes,
    )
    return StepLoader(stream_of(lengths), config, exchange=end, num_workers=num_workers)


def ids(loader: StepLoader, most: int | None = None) -> list[list[int]]:
    """Positions of this replica, by step."""
    return [_positions(step) for step in _steps(loader, most=most)]


def _positions(step: Any) -> list[int]:
    return [p for micro_batch in step.header.micro_batches for p in micro_batch]


def staged(folder: Path, replica: int) -> Path:
    return Path(staged_path(str(folder), iteration=STEPS, replica=replica))


class Saved:
    """A run of `num_replicas` stopped after STEPS steps, its files and what the checkpoint says."""

    def __init__(
        self, folder: Path, *, num_replicas: int = 2, policy: str = "cost", **options: Any
    ) -> None:
        self.folder, self.policy, self.options = folder, PolicyName(policy), options
        self.counts: dict[int, SourceCounts] = {}  # of the resumed run's replicas, at its end
        self.steps, digests, consumed = zip(*self._threads(num_replicas, self._save), strict=True)
        assert len(set(digests)) == 1
        self.digest: str = digests[0]
        self.consumed: int = consumed[0]

    @property
    def rest(self) -> list[list[list[int]]]:
        """What each replica emits after the stop when there is none, by step."""
        whole = self._threads(
            len(self.steps), lambda e: ids(loader_of(e, self.policy, **self.options))
        )
        assert [steps[:STEPS] for steps in whole] == list(self.steps)
        return [steps[STEPS:] for steps in whole]

    def _threads(self, num: int, function: Callable[[ThreadExchange], Any]) -> list[Any]:
        return _results(run_in_threads(function, thread_exchanges(num)))

    def _save(self, exchange: ThreadExchange) -> tuple[list[list[int]], str, int]:
        loader = loader_of(exchange, self.policy, **self.options)
        feed = StepFeed(loader)
        steps = [_positions(step) for step in islice(_read_feed(feed), STEPS)]
        state: Any = feed.state_dict()
        args = megatron_args(self.folder, consumed_train_samples=state["consumed"])
        saving = DataCheckpoint(args, exchange=exchange, channel=None)  # type: ignore[arg-type]
        saving.watch(feed, identity=data_identity(args, loader.stream))
        saving.note_trained()
        next(feed.iterators[0])  # a step that is handed out and not trained is not in the state
        saving.stage(STEPS, tokens_so_far=7, is_persistent=True)
        assert staged(self.folder, exchange.replica).exists()
        exchange.exchange(b"all are staged")
        saving.publish(STEPS, is_persistent=True)
        return steps, args.odb_data_state, state["consumed"]

    def path(self, replica: int) -> Path:
        return Path(state_path(str(self.folder), iteration=STEPS, replica=replica))

    def change(self, replica: int, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a file, and the digest along with it."""
        state = json.loads(self.path(replica).read_text())
        change(state)
        self.write(replica, encode_state(state))

    def write(self, replica: int, data: bytes) -> None:
        self.path(replica).write_bytes(data)
        count = Digest.parse(self.digest).num_replicas
        files = [self.path(r).read_bytes() for r in range(count)]
        self.digest = str(Digest.of([hashlib.sha256(file).digest() for file in files]))

    def resume(
        self,
        num_replicas: int = 2,
        *,
        policy: PolicyName | None = None,
        strict: bool = True,
        lengths: Any = LENGTHS,
        saved: str | None = "",
        **changes: Any,
    ) -> list[Any]:
        """Return each replica's steps and state, or the error it raised."""
        chosen = policy or self.policy
        values = {"consumed_train_samples": self.consumed, **changes}

        def go(exchange: ThreadExchange) -> Run:
            consumed = self.consumed
            loader = loader_of(exchange, chosen, lengths, **self.options)
            if chosen is PolicyName.SAMPLES:
                config = loader.config
                loader = StepLoader(loader.stream, config, exchange=exchange, consumed=consumed)
            found = resume_data(
                megatron_args(self.folder, rank=exchange.replica, **values),
                odb_config(chosen, strict=strict),
                loader,
                exchange=exchange,  # type: ignore[arg-type]
                saved=self.digest if saved == "" else saved,
            )
            rest = ids(loader)
            (self.counts[exchange.replica],) = loader.progress().source_counts
            return rest, found

        return run_in_threads(go, thread_exchanges(num_replicas))

    def refused(self, num_replicas: int = 2, **how: Any) -> list[str]:
        """Return the error of each replica; all must refuse."""
        found = self.resume(num_replicas, **how)
        assert all(isinstance(error, ValueError) for error in found), found
        return [str(error) for error in found]


@pytest.fixture
def cost(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def everything(saved: Saved, results: list[Any]) -> list[int]:
    runs = [steps for steps, _ in _results(results)]
    return sorted(p for run in [*saved.steps, *runs] for step in run for p in step)


@pytest.mark.parametrize("policy", ["samples", "cost"])
def test_the_same_replicas_go_on(tmp_path: Path, policy: str) -> None:
    saved = Saved(tmp_path, policy=policy)
    results = _results(saved.resume())
    assert [steps for steps, _ in results] == saved.rest
    assert [state["tokens_so_far"] for _, state in results] == [7, 7]
    assert not (tmp_path / "odb-staged").exists()


@pytest.mark.parametrize("policy", ["samples", "cost"])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 2), (1, 3)])
def test_other_replicas_go_on(tmp_path: Path, policy: str, before: int, after: int) -> None:
    saved = Saved(tmp_path, num_replicas=before, policy=policy)
    assert everything(saved, saved.resume(after)) == list(range(TOTAL))


@pytest.mark.parametrize("policy", ["samples", "cost"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2), (3, 2), (1, 3)])
def test_counts_of_sources_go_on(tmp_path: Path, policy: str, before: int, after: int) -> None:
    """Each replica goes on with its own, or with those of some of the saved run's."""
    saved = Saved(tmp_path, num_replicas=before, policy=policy)
    _results(saved.resume(after))
    total = added_counts([[counts.state_dict()] for counts in saved.counts.values()])
    (end,) = thread_exchanges(1)
    alone = loader_of(end, saved.policy)
    ids(alone)
    assert total == list(alone.progress().source_counts)
    assert (total[0].samples, total[0].tokens) == (TOTAL, sum(LENGTHS))
    if before == after:
        for replica, steps in enumerate(saved.rest):
            num_before = sum(map(len, saved.steps[replica]))
            assert saved.counts[replica].samples == num_before + sum(map(len, steps))


@pytest.mark.parametrize("after", [2, 3])
def test_with_workers_and_samples_handed_over(tmp_path: Path, after: int) -> None:
    saved = Saved(tmp_path, num_workers=2, exchange=ExchangeMode.TOKENS)
    results = saved.resume(after)
    assert everything(saved, results) == list(range(TOTAL))
    if after == 2:
        assert [steps for steps, _ in _results(results)] == saved.rest


@pytest.mark.parametrize("num_staged", [1, 2])
def test_files_that_a_kill_left_staged_are_found(cost: Saved, num_staged: int) -> None:
    """The tracker was updated, and some or all leaders did not get to move their file."""
    for replica in range(num_staged):
        staged(cost.folder, replica).parent.mkdir(parents=True, exist_ok=True)
        cost.path(replica).rename(staged(cost.folder, replica))
    assert [steps for steps, _ in _results(cost.resume())] == cost.rest


@pytest.mark.parametrize("after", [2, 3, 1])
def test_a_run_that_goes_on_moves_its_staged_files(tmp_path: Path, after: int) -> None:
    saved = Saved(tmp_path)
    for replica in range(2):
        staged(tmp_path, replica).parent.mkdir(parents=True, exist_ok=True)
        saved.path(replica).rename(staged(tmp_path, replica))
    elsewhere = str(tmp_path / "another run")
    for save in (None, elsewhere):
        _results(saved.resume(after, save=save))
        assert all(staged(tmp_path, replica).exists() for replica in range(2))
    _results(saved.resume(after, save=str(tmp_path)))
    assert not (tmp_path / "odb-staged").exists()
    assert all(saved.path(replica).exists() for replica in range(2))
    assert not Path(elsewhere).exists()
    _results(saved.resume(after, save=str(tmp_path)))


def test_a_save_removes_what_an_interrupted_one_left(tmp_path: Path) -> None:
    """Not where there is a checkpoint, nor of later iterations, nor what is no data state."""
    others = {
        1: ["replica-00000.json", "replica-00003.json", "replica-00004.json.part"],
        2: ["replica-00000.json", "notes.txt"],
        4: ["replica-00000.json"],
    }
    top = staged(tmp_path, 0).parent.parent
    for iteration, names in others.items():
        for name in names:
            write_file(str(top / f"{iteration:07d}" / name), b"{}")
    write_file(str(top / "mine"), b"")
    write_file(staged_path(str(tmp_path), iteration=0, replica=0), b"{}")
    (tmp_path / "iter_0000000").mkdir()
    Saved(tmp_path)  # saves iteration 3
    left = sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())
    assert left == [
        "0000000/replica-00000.json",
        "0000002/notes.txt",
        "0000004/replica-00000.json",
        "mine",
    ]


def test_files_staged_for_a_save_that_did_not_end_are_left_alone(cost: Saved) -> None:
    for replica in range(2):
        write_file(str(staged(cost.folder, replica)), b"{}")
    assert [steps for steps, _ in _results(cost.resume())] == cost.rest


def test_a_run_without_a_data_state(cost: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    assert [_results(cost.resume(iteration=0))[0][1]] == [None]
    assert [_results(cost.resume(finetune=True))[0][1]] == [None]
    assert [_results(cost.resume(iteration=2, saved=None))[0][1]] == [None]
    assert capsys.readouterr().out == (
        f"odb: no data state in the checkpoint of iteration 2; the data goes on at sample "
        f"{cost.consumed} of the stream\n"
    )


def test_all_files_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for policy in ("cost", "samples"):
        saved = Saved(tmp_path / policy, policy=policy)
        for replica in range(2):
            saved.path(replica).unlink()
        if policy == "cost":
            for error in saved.refused():
                assert "and those of all other replicas are missing" in error
                assert "or pass --no-odb-resume-strict to go on without what the" in error
        _results(saved.resume(strict=False))
        output = capsys.readouterr().out
        assert "odb: warning: the data state is gone from the checkpoint of iteration 3" in output
        assert ("are lost, others come twice" in output) == (policy == "cost")


@pytest.mark.parametrize("after", [2, 3])
def test_a_missing_file(cost: Saved, after: int) -> None:
    cost.path(1).unlink()
    for error in cost.refused(after):
        assert f"data state {cost.path(1)} is missing and those of other replicas are not" in error


@pytest.mark.parametrize("after", [2, 3])
def test_a_file_of_another_save(cost: Saved, after: int) -> None:
    state = json.loads(cost.path(1).read_text())
    state["tokens_so_far"] += 1
    cost.path(1).write_bytes(encode_state(state))
    for error in cost.refused(after):
        assert "are not those that the checkpoint was saved with (digest 2:" in error
        assert f"expected {cost.digest}): files of another save are among them" in error


def test_files_that_the_checkpoint_does_not_know(cost: Saved) -> None:
    for error in cost.refused(saved=None):
        assert "exists, but its checkpoint was saved without one or by an older version" in error


@pytest.mark.parametrize(
    "text", ["", "2", "2:00", *(f"{count}:{'0' * 32}" for count in ("x", "123456", "²"))]
)
def test_what_the_checkpoint_says_is_nothing_known(cost: Saved, text: str) -> None:
    with pytest.raises(ValueError, match="expected COUNT:DIGEST: it was written by another"):
        Digest.parse(text)
    if text:
        assert all("expected COUNT:DIGEST" in error for error in cost.refused(saved=text))


@pytest.mark.parametrize("after", [2, 3])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s["planner"].update(version=3), "saved with version=3, this run has 4"),
        (lambda s: s["planner"].update(step="7"), "has step '7'; expected an integer"),
        (lambda s: s["planner"]["window"].pop(), ""),
        (lambda s: s.update(tokens_so_far=-1), "has a damaged tokens_so_far entry"),
        (lambda s: s.update(tokens_so_far="1"), "has a damaged tokens_so_far entry"),
        (lambda s: s["bad_records"].update(num=-1), "bad_records is {'num': -1, 'positions': []}"),
        (lambda s: s["source_counts"].pop(), "source_counts is []; expected the counts of 1 sour"),
        (
            lambda s: s["source_counts"][0].update(tokens=-1),
            "; expected the counts of 1 sources",
        ),
        (lambda s: s["source_counts"][0].pop("solo"), "; expected the counts of 1 sources"),
        (
            lambda s: s["source_counts"][0].update(first_message="x" * 1025),
            "; expected the counts of 1 sources",
        ),
        (lambda s: s.pop("source_counts"), "it was written by another version of odb_megatron"),
        (lambda s: s["data"].pop("sources"), "has a damaged data entry"),
        (lambda s: s["data"].update(sources=[1]), "has a damaged data.sources[0] entry"),
        (lambda s: s["data"]["sources"][0].pop("seed"), "has a damaged data.sources[0] entry"),
        (
            lambda s: s["data"]["sources"][0].update(path=1),
            "has a damaged data.sources[0].path entry",
        ),
        (lambda s: s["data"].update(blend=[1 << 40, ""]), "has a damaged data.blend entry"),
        (lambda s: s["data"].update(blend=""), "has a damaged data.blend entry"),
        (lambda s: s["data"].update(tokenizer=None), "has a damaged data.tokenizer entry"),
        (lambda s: s.pop("planner"), "it was written by another version of odb_megatron"),
    ],
)
def test_a_damaged_file_with_its_digest(
    cost: Saved, after: int, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    """All replicas refuse, also those whose own file is sound, and name the file."""
    cost.change(0, change)
    if not text and after == 2:
        return  # a window row that is gone shows where all are looked at
    errors = cost.refused(after)
    assert all((text or "a position is lost or came twice") in error for error in errors), errors
    if after == 2:
        assert errors[1].startswith("replica 0 cannot resume its data: ")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not JSON"),
        (b'{"planner": {"ver', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"data": NaN}', "NaN is no number"),
        (b'{"data": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[1]", "holds list; expected"),
        (b'{"data": 1}', "holds ['data']; expected ['bad_records', 'data', 'planner', 'source"),
    ],
)
def test_garbage(cost: Saved, data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match="data state a.json "):
        decode_state(data, "a.json")
    cost.write(1, data)
    errors = cost.refused()
    assert all(text in error and str(cost.path(1)) in error for error in errors), errors


def test_a_huge_file(cost: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_state, "MAX_STATE_BYTES", 100)
    assert all("is larger than 100 bytes: it is none" in error for error in cost.refused())
    monkeypatch.setattr(data_state, "MAX_STATE_BYTES", cost.path(0).stat().st_size)
    assert read_file(str(cost.path(0))) == cost.path(0).read_bytes()
    assert read_file("/nowhere") is None


@pytest.mark.parametrize(("saved", "loaded"), [("cost", "samples"), ("samples", "cost")])
@pytest.mark.parametrize("after", [2, 3])
def test_another_policy(tmp_path: Path, saved: str, loaded: str, after: int) -> None:
    for error in Saved(tmp_path, policy=saved).refused(after, policy=PolicyName(loaded)):
        assert f"data state was saved with policy={saved}, this run has {loaded}: resume" in error


def test_a_checkpoint_of_another_step(cost: Saved) -> None:
    for error in cost.refused(consumed_train_samples=99):
        assert f"was saved after {cost.consumed} samples, the checkpoint after 99: restore" in error


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda part: part.update(num_records=61), "records of data: 61 then, 60 now"),
        (lambda part: part.update(seed=5), "seed of data: 5 then, "),
        (lambda part: part.update(ends=[1, 1]), "split of data: [1, 1] then, "),
    ],
)
def test_other_data(
    cost: Saved, strict: bool, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    for replica in range(2):
        cost.change(replica, lambda state: change(state["data"]["sources"][0]))
    for error in cost.refused(strict=strict):
        assert "the data state was saved with other data (" in error
        assert text.split(" of ", maxsplit=1)[1].split(": ", maxsplit=1)[1] in error
        assert "so samples would be lost or repeated: restore files, their order" in error


def test_another_number_of_sources_and_another_blend() -> None:
    part = {"path": "a", "fingerprint": "f", "num_records": 3, "seed": 1, "ends": [0, 2]}
    one = {"sources": [part], "blend": [4, "aa"], "tokenizer": "t"}
    with pytest.raises(ValueError, match="1 sources then, 2 now"):
        check_same_samples(one, {**one, "sources": [part, part]})
    with pytest.raises(ValueError, match="the weights of the blend have changed"):
        check_same_samples(one, {**one, "blend": [4, "bb"]})
    check_same_samples(one, {**one, "blend": [2, "cc"]})  # a shorter run: nothing to compare
    parts = [{**part, "path": str(number), "fingerprint": "g" * 20} for number in range(5)]
    many = {**one, "sources": [part] * 5}
    text = changed_files(many, {**many, "sources": parts, "tokenizer": "u"})
    assert text.startswith("0 (fingerprint f then, gggggggggggg now); 1 (")
    assert text.endswith(" and 3 more")
    assert changed_files(one, {**one, "tokenizer": "u"}) == "tokenizer (t then, u now)"


@pytest.mark.parametrize("after", [2, 3])
def test_changed_files(cost: Saved, after: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As many records, one of which no longer emits anything: what is left is emitted once."""
    state = json.loads(cost.path(0).read_text())
    skipped = state["planner"]["window"][0][0]
    lengths = list(LENGTHS)
    lengths[stream_of(LENGTHS).locate(skipped).record] = 0
    for error in cost.refused(after, lengths=Changed(lengths)):
        assert "data changed since the checkpoint was saved: " in error
        assert "pass --no-odb-resume-strict to go on with every record number" in error
    emitted = everything(cost, cost.resume(after, lengths=Changed(lengths), strict=False))
    assert emitted == [p for p in range(TOTAL) if p != skipped]
    assert "odb: WARNING: data changed since the checkpoint was saved: " in capsys.readouterr().out


def test_the_tokenizer_is_told_by_its_files(tmp_path: Path) -> None:
    stream = stream_of(LENGTHS)

    def tokenizer(folder: Path) -> str:
        args = megatron_args(tmp_path, tokenizer_type="HF", tokenizer_model=str(folder))
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
    assert data_identity(megatron_args(tmp_path), stream)["tokenizer"] == "NullTokenizer"


class Source:
    """A feed whose state cannot be told on replica `failing`."""

    def __init__(self, replica: int = 0, failing: int | None = None) -> None:
        self._fails = replica == failing

    @property
    def progress(self) -> Progress:
        if self._fails:
            raise OSError("no space left")
        snapshot = {"consumed": 0, "step": 0, "window": np.zeros((0, 3), dtype=np.int64)}
        return Progress(snapshot=snapshot, source_counts=(), exchange_choice=None, window_bytes=0)


def test_a_replica_that_cannot_write(tmp_path: Path) -> None:
    def save(exchange: ThreadExchange) -> None:
        args = megatron_args(tmp_path)
        saving = DataCheckpoint(args, exchange=exchange, channel=None)  # type: ignore[arg-type]
        saving.watch(Source(exchange.replica, failing=1), identity={})
        saving.stage(4, tokens_so_far=0, is_persistent=True)

    first, second, third = run_in_threads(save, thread_exchanges(3))
    assert isinstance(second, OSError)
    for error in (first, third):
        assert isinstance(error, RuntimeError)
        assert "replica 1 could not write its data state beside " in str(error)


def test_ranks_that_lead_no_replica_get_the_digest_too(tmp_path: Path) -> None:
    class Channel:
        sent = b""

        def header(self, data: bytes | None = None) -> bytes:
            Channel.sent = data or Channel.sent
            return Channel.sent

    leader, other = megatron_args(tmp_path), megatron_args(tmp_path)
    (exchange,) = thread_exchanges(1)
    first = DataCheckpoint(leader, exchange=exchange, channel=Channel())  # type: ignore[arg-type]
    first.watch(Source(), identity={})
    rank = DataCheckpoint(other, exchange=None, channel=Channel())
    for checkpoint in (first, rank):
        checkpoint.note_trained()
        checkpoint.stage(4, tokens_so_far=0, is_persistent=True)
        checkpoint.publish(4, is_persistent=True)
    assert other.odb_data_state == leader.odb_data_state
    assert Digest.parse(other.odb_data_state).num_replicas == 1


def test_a_staged_state_that_another_run_has_taken(tmp_path: Path) -> None:
    (exchange,) = thread_exchanges(1)
    args = megatron_args(tmp_path)
    checkpoint = DataCheckpoint(args, exchange=exchange, channel=None)  # type: ignore[arg-type]
    checkpoint.watch(Source(), identity={})
    checkpoint.note_trained()
    checkpoint.stage(4, tokens_so_far=0, is_persistent=True)
    shutil.rmtree(tmp_path / "odb-staged")
    with pytest.raises(RuntimeError, match=f"is gone: does another run save to {tmp_path} too"):
        checkpoint.publish(4, is_persistent=True)


def test_folders(tmp_path: Path) -> None:
    args = megatron_args(tmp_path)
    own = tmp_path / "non_persistent"
    assert saving_folder(args, is_persistent=True) == loaded_folder(args) == str(tmp_path)
    assert saving_folder(args, is_persistent=False) == str(own)
    args.non_persistent_ckpt_type = "global"
    assert loaded_folder(args) == str(tmp_path)
    for iteration, folder in ((STEPS, own), (STEPS - 1, tmp_path)):
        own.mkdir(exist_ok=True)
        (own / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        assert loaded_folder(args) == str(folder)
    args.non_persistent_global_ckpt_dir = str(tmp_path / "fast")
    assert saving_folder(args, is_persistent=False) == str(tmp_path / "fast")
    assert saving_folder(args, is_persistent=True) == str(tmp_path)
