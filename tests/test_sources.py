"""`odb_megatron.data.sources`: from a file or a user's dataset to samples, and what is refused."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic_data import Letters, Records, rules

from odb_megatron.data.chat import ChatFormatError, ChatRenderer
from odb_megatron.data.sample import BadRecordError, Sample, Skipped, SkipReason
from odb_megatron.data.sources import (
    ChatSource,
    IndexedSource,
    MapSource,
    SampleSource,
    count_records,
    open_source,
)
from odb_megatron.data.workers import limited
from odb_megatron.plan.padding import OverlongPolicy

INCONSISTENT = "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}"
LAYOUTS = {
    "messages": {"messages": [{"role": "user", "content": "hi"},
                              {"role": "assistant", "content": "yo"}]},
    "conversations": {"conversations": [{"from": "human", "value": "hi"},
                                        {"from": "gpt", "value": "yo"}]},
    "instances": {"instruction": "hi", "instances": [{"input": "", "output": "yo"}]},
    "instruction": {"instruction": "hi", "input": "", "output": "yo"},
    "pair": {"question": "hi", "answer": "yo"},
}  # fmt: skip
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"


def _write_jsonl(path: Path, records: Sequence[object]) -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _chat_source(path: str, *, template: str | None = None, **policies: Any) -> ChatSource:
    limits = {"context": 512, "token_budget": 512}
    return ChatSource(
        path, rules=rules(**limits | policies), renderer=ChatRenderer(Letters(template))
    )


def _sample(source: SampleSource, index: int, *, number: int = 0) -> Sample:
    sample = source.sample(index, source=number)
    assert isinstance(sample, Sample)
    return sample


def _text(sample: Sample) -> str:
    """The whole text: all tokens and the last label."""
    return Letters.decode([*sample.tokens.tolist(), int(sample.labels[-1])])


def _learnt(sample: Sample) -> str:
    return Letters.decode(sample.labels[sample.loss_mask > 0].tolist())


# --- chat and text files ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chat_layouts(tmp_path: Path, layout: str) -> None:
    source = _chat_source(_write_jsonl(tmp_path / "a.jsonl", [LAYOUTS[layout]]))
    sample = _sample(source, 0, number=3)
    assert (_text(sample), _learnt(sample), sample.source) == (CHAT, "yo<|im_end|>", 3)
    assert sample.labels[:-1].tolist() == sample.tokens[1:].tolist()


def test_bad_records_by_policy(tmp_path: Path) -> None:
    records = ["", {"text": "good"}, '{"text": ', {"other": 1}, "", [1], {"text": "fine"}]
    path = _write_jsonl(tmp_path / "a.jsonl", records)
    strict, lenient = _chat_source(path), _chat_source(path, skip_bad=True)
    assert len(strict) == 5  # blank lines are no records
    assert _text(_sample(strict, 0)) == "good$"
    assert _text(_sample(lenient, 4)) == "fine$"
    reasons = {1: (3, "is not valid JSON"), 2: (4, "other"), 3: (6, "is a JSON list")}
    for index, (line, reason) in reasons.items():
        with pytest.raises(BadRecordError, match=rf"^{path}:{line}: .*{reason}") as caught:
            strict.sample(index, source=1)
        assert (caught.value.path, caught.value.line) == (path, line)
        skipped = lenient.sample(index, source=1)
        assert skipped == Skipped(reason=SkipReason.BAD_RECORD, message=str(caught.value), source=1)


@pytest.mark.parametrize("skips", [False, True])
def test_a_chat_template_error_is_never_skipped(tmp_path: Path, skips: bool) -> None:
    path = _write_jsonl(tmp_path / "a.jsonl", ["", LAYOUTS["messages"]])
    source = _chat_source(path, template=INCONSISTENT, skip_bad=skips)
    with pytest.raises(ChatFormatError, match=rf"^{path}:2: .*generation"):
        source.sample(0, source=0)


# --- Megatron's binary files -----------------------------------------------------------------


@pytest.fixture(scope="module")
def write_indexed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Sequence[Sequence[Sequence[int]]]], str]:
    """Write documents of sequences with Megatron's builder; return the prefix."""
    module = pytest.importorskip("megatron.core.datasets.indexed_dataset")

    def write(documents: Sequence[Sequence[Sequence[int]]], dtype: Any = np.int32) -> str:
        prefix = str(tmp_path_factory.mktemp("indexed") / "data")
        builder = module.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for document in documents:
            for sequence in document:
                builder.add_item(torch.tensor(sequence, dtype=torch.int64))
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
        return prefix

    return write


DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [], [[7]], [[8, 9, 10]]]


@pytest.mark.parametrize("mmap", [True, False])
def test_a_document_is_a_sample(write_indexed: Any, mmap: bool) -> None:
    source = IndexedSource(write_indexed(DOCUMENTS), rules=rules(), mmap=mmap)
    assert len(source) == 5
    for index, document in enumerate(DOCUMENTS):
        ids = [token for sequence in document for token in sequence]
        if len(ids) < 2:
            with pytest.raises(BadRecordError, match=rf"data:{index + 1}: {len(ids)} token\(s\)"):
                source.sample(index, source=0)
            continue
        sample = _sample(source, index, number=index)
        assert sample.tokens.tolist() == ids[:-1]
        assert sample.labels.tolist() == ids[1:]
        assert sample.loss_mask.tolist() == [1.0] * (len(ids) - 1)
        assert (sample.source, sample.tokens.dtype) == (index, np.dtype(np.int64))
    for dtype in (np.uint16, np.int64):
        source = IndexedSource(write_indexed([[[60000, 2, 65535]]], dtype), rules=rules())
        assert _sample(source, 0).labels.tolist() == [2, 65535]


def test_documents_left_out_by_policy(write_indexed: Any) -> None:
    lenient = rules(context=2, skip_bad=True, overlong=OverlongPolicy.DROP)
    source = IndexedSource(write_indexed(DOCUMENTS), rules=lenient)
    items = [source.sample(index, source=0) for index in range(5)]
    reasons = [item.reason if isinstance(item, Skipped) else len(item) for item in items]
    assert reasons == [SkipReason.OVERLONG, 1, SkipReason.BAD_RECORD, SkipReason.BAD_RECORD, 2]


def _cut(path: str, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Megatron's __del__
def test_an_index_cut_anywhere_is_refused(write_indexed: Any) -> None:
    """Megatron raises AssertionError, struct.error or ValueError, depending on where."""
    prefix = write_indexed(DOCUMENTS)
    size = os.path.getsize(f"{prefix}.idx")
    for length in range(size - 1, -1, -1):
        _cut(f"{prefix}.idx", length)
        with pytest.raises(
            ValueError, match=rf"^{prefix}.idx and .bin are no readable Megatron dataset \(.+\): wr"
        ):
            IndexedSource(prefix, rules=rules())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("at", "value", "seen"),
    [
        (0, b"X", "bad header"),
        (9, b"\2", "bad version"),
        (17, b"\x63", "99 is not a valid DType"),
        (17, b"\x06", "tokens are of type float..; expected integers"),
        (18, struct.pack("<Q", 1 << 63), "OverflowError"),
        (18, struct.pack("<q", -1), "OverflowError"),
        (26, struct.pack("<Q", 1 << 60), "ValueError"),
        (26, struct.pack("<Q", 0), "Error"),
        (34, struct.pack("<i", -5), "sequence 0 at byte 0 with -5 tokens"),
        (34, struct.pack("<i", 2**31 - 1), "with 2147483647 tokens, and the .bin file 40 bytes"),
        (54, struct.pack("<q", -8), "sequence 0 at byte -8 with 3 tokens"),
        (54, struct.pack("<q", 2**62), "at byte 4611686018427387904 with 3"),
        (94, struct.pack("<q", 1), "its documents are not sequences 0 to 5"),
        (110, struct.pack("<q", 9), "its documents are not sequences 0 to 5"),
    ],
)
def test_a_damaged_index_is_refused(write_indexed: Any, at: int, value: bytes, seen: str) -> None:
    prefix = write_indexed(DOCUMENTS)
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(at)
        file.write(value)
    with pytest.raises(ValueError, match=rf"no readable Megatron dataset \(.*({seen})"):
        IndexedSource(prefix, rules=rules())


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(("cut", "text"), [(1, "bytes: damaged, or"), (40, "bin file is empty")])
def test_tokens_cut_short_are_refused(write_indexed: Any, mmap: bool, cut: int, text: str) -> None:
    """Without mmap Megatron would hand out uninitialised memory as tokens; whatever the policy."""
    prefix = write_indexed(DOCUMENTS)
    _cut(f"{prefix}.bin", os.path.getsize(f"{prefix}.bin") - cut)
    with pytest.raises(ValueError, match=f"{prefix}.*{text}"):
        IndexedSource(prefix, rules=rules(skip_bad=True), mmap=mmap)


# --- a user's dataset ------------------------------------------------------------------------

GOOD: dict[str, Any] = {"tokens": [5, 6, 7], "labels": [6, 7, 8], "loss_mask": [0, 1, 1]}


def _map_source(*items: object, **policies: Any) -> MapSource:
    return MapSource(list(items), rules=rules(**policies), name="mine")


@pytest.mark.parametrize(
    "convert",
    [
        list,
        np.array,
        torch.tensor,
        lambda values: np.array(values, dtype=np.uint8),
        lambda values: torch.tensor(values, dtype=torch.int32),
    ],
)
def test_lists_arrays_and_tensors(convert: Callable[[Any], Any]) -> None:
    item = {name: convert(values) for name, values in GOOD.items()} | {"extra": "ignored"}
    sample = _sample(_map_source(item), 0, number=1)
    assert sample.tokens.tolist() == [5, 6, 7]
    assert sample.labels.tolist() == [6, 7, 8]
    assert sample.loss_mask.tolist() == [0.0, 1.0, 1.0]
    dtypes = (sample.tokens.dtype, sample.labels.dtype, sample.loss_mask.dtype)
    assert dtypes == (np.int64, np.int64, np.float32)
    assert sample.source == 1


@pytest.mark.parametrize("patches", [7, np.int32(7), np.array(7), torch.tensor([7])])
def test_patches_are_optional_and_survive_a_cut(patches: object) -> None:
    assert _sample(_map_source(GOOD), 0).num_patches == 0
    item = GOOD | {"num_patches": patches}
    assert _sample(_map_source(item), 0).num_patches == 7
    cut = _sample(_map_source(item, context=2, overlong=OverlongPolicy.TRUNCATE), 0)
    assert (cut.truncated, cut.num_patches) == (1, 7)


BAD_ITEMS: list[tuple[object, str]] = [
    (None, "item is a NoneType; expected a mapping with tokens, labels and loss_mask"),
    ((1, 2), "item is a tuple; expected a mapping"),
    ({"tokens": [1], "labels": [2]}, r"item lacks \['loss_mask'\]; it has \['labels', 'tokens'\]"),
    (GOOD | {"tokens": [5.0, 6.0, 7.0]}, "tokens has dtype float64; expected integers"),
    (GOOD | {"labels": [True, False, True]}, "labels has dtype bool; expected integers"),
    (GOOD | {"tokens": ["a", "b", "c"]}, "tokens has dtype <U1; expected integers"),
    (GOOD | {"tokens": [[5], [6, 7]]}, "inhomogeneous"),
    (GOOD | {"loss_mask": [0, -0.5, 1]}, "loss_mask holds -0.5 at token 1: weights of the loss"),
    (GOOD | {"loss_mask": [0, float("nan"), 1]}, "loss_mask holds nan at token 1"),
    (GOOD | {"loss_mask": [0, 17, 1]}, "a weight of 17; expected at most 16: divide all weights"),
    (GOOD | {"loss_mask": ["0", "1", "1"]}, "loss_mask has dtype <U1; expected numbers"),
    (GOOD | {"loss_mask": None}, "loss_mask has dtype object; expected numbers"),
    (GOOD | {"loss_mask": [{}, 1, 1]}, "loss_mask has dtype object"),
    (GOOD | {"loss_mask": [0, 0, 0]}, "no token to learn from: every label is masked"),
    (GOOD | {"num_patches": -1}, "num_patches must not be negative; got -1"),
    (GOOD | {"num_patches": 1.5}, "num_patches has dtype float64; expected integers"),
    (GOOD | {"num_patches": None}, "num_patches has dtype object; expected integers"),
    (GOOD | {"num_patches": [1, 2]}, "size 1"),
    (GOOD | {"labels": [6, 7]}, r"got shapes \(3,\), \(2,\), \(3,\)"),
    ({name: [] for name in GOOD}, "tokens is empty"),
    ({name: [values] for name, values in GOOD.items()}, r"got shapes \(1, 3\)"),
]


@pytest.mark.parametrize(("item", "reason"), BAD_ITEMS, ids=range(len(BAD_ITEMS)))
def test_bad_items_by_policy(item: object, reason: str) -> None:
    with pytest.raises(BadRecordError, match=rf"^mine:2: .*({reason})") as caught:
        _map_source(GOOD, item).sample(1, source=0)
    assert caught.value.trace == ""  # what this package refuses
    lenient = _map_source(GOOD, item, skip_bad=True)
    assert lenient.sample(1, source=4) == Skipped(
        reason=SkipReason.BAD_RECORD, message=str(caught.value), source=4
    )
    assert isinstance(lenient.sample(0, source=4), Sample)


class Broken(Records):
    """Fails in ways of its own; also where what is raised is our own, or it hangs."""

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            return Sample(tokens=np.zeros(2), labels=np.zeros(3), loss_mask=np.ones(3))
        if index == 1:
            time.sleep(600)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("index", "text", "trace"),
    [
        (0, "got shapes", "in __getitem__"),
        (1, "mine:2: record 1 raised FetchTimeoutError", "time.sleep(600)"),
        (2, "mine:3: record 2 raised KeyError: ", "__getitem__"),
    ],
)
def test_a_datasets_own_failure_has_its_traceback(index: int, text: str, trace: str) -> None:
    for skips in (False, True):
        data = Broken([3, 3, 3], failing=2)
        source = MapSource(data, rules=rules(skip_bad=skips), name="mine")
        with limited(0.05, what=lambda: "it"):
            if skips:
                skipped = source.sample(index, source=4)
                assert isinstance(skipped, Skipped)
                assert (skipped.reason, skipped.source) == (SkipReason.BAD_RECORD, 4)
                continue
            with pytest.raises(BadRecordError, match=text) as caught:
                source.sample(index, source=4)
        assert trace in caught.value.trace
        assert "Original traceback:" in str(caught.value)


def test_what_is_no_map_style_dataset() -> None:
    with pytest.raises(ValueError, match="generator is not a map-style dataset: it needs __len__"):
        MapSource((i for i in range(3)), rules=rules())


# --- opening, counting, fingerprints ---------------------------------------------------------


def test_open_source_by_kind(tmp_path: Path, write_indexed: Any) -> None:
    renderer = ChatRenderer(Letters())
    path = _write_jsonl(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "cd"}])
    assert isinstance(open_source(path, rules=rules(), renderer=renderer), ChatSource)
    with pytest.raises(ValueError, match="a.jsonl needs a tokenizer: pass --tokenizer-type Hugg"):
        open_source(path, rules=rules(), renderer=None)
    prefix = write_indexed(DOCUMENTS)
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        source = open_source(name, rules=rules(), renderer=None)
        assert isinstance(source, IndexedSource)
        assert source.path == prefix
    assert count_records(path) == 2
    assert count_records(prefix) == count_records(prefix, mmap=False) == 5


def test_fingerprints_follow_the_content(tmp_path: Path, write_indexed: Any) -> None:
    chats = [
        _chat_source(_write_jsonl(tmp_path / name, [{"text": text}])).fingerprint()
        for name, text in (("a.jsonl", "ab"), ("b.jsonl", "ab"), ("c.jsonl", "ac"))
    ]
    assert chats[0] == chats[1] != chats[2]
    tokens = [
        IndexedSource(write_indexed(documents), rules=rules()).fingerprint()
        for documents in ([[[1, 2]]], [[[1, 2]]], [[[1, 3]]], [[[1], [2]]])
    ]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3
    assert _map_source(GOOD).fingerprint() != _map_source(GOOD, GOOD).fingerprint()

    class Named(Records):
        def fingerprint(self) -> int:
            return sum(self.lengths)
