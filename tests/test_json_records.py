"""Tests of `odb_megatron.data.json_records`."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.data import json_records
from odb_megatron.data.json_records import JsonRecords, _line_index
from odb_megatron.data.sample import BadRecordError

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"


def _file(tmp_path: Path, data: bytes, name: str = "a.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize(
    ("data", "records", "lines"),
    [
        (b'{"a":1}\n{"a":2}\n', [1, 2], [1, 2]),
        (b'{"a":1}\n{"a":2}', [1, 2], [1, 2]),
        (b'{"a":1}\r\n\r\n{"a":2}\r\n', [1, 2], [1, 3]),
        (b'\n \t\n{"a":1}\n\n\n  {"a":2}  \n \n', [1, 2], [3, 6]),
        (b'\xef\xbb\xbf{"a":1}\n', [1], [1]),
        (b'\xef\xbb\xbf\n{"a":1}', [1], [2]),
        ('{"a":"é\u2028😀"}\n'.encode(), ["é\u2028😀"], [1]),
        (b'{"a":"\\ud83d\\ude00"}\n', ["😀"], [1]),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.JSON", "a.jsonl.gz", "a.json.gz"])
def test_lines(
    tmp_path: Path, data: bytes, records: list[object], lines: list[int], name: str
) -> None:
    got = JsonRecords(_file(tmp_path, data, name))
    assert [r["a"] for r in got] == records
    assert [got.line(i) for i in range(len(got))] == lines
    assert got.path.endswith(name)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_an_array_is_read_record_by_record(tmp_path: Path, name: str) -> None:
    text = (
        '\n [ {"a": "é"},\n\n {"a": NaN} ,3,[{}], {"a": "\\\\"}, {"a" 1}, {"a": [1, "\\"]"]}]  \n'
    )
    got = JsonRecords(_file(tmp_path, text.encode(), name))
    assert len(got) == 7
    assert got[0] == {"a": "é"}
    assert got[4] == {"a": "\\"}
    assert got[6] == got[-1] == {"a": [1, '"]']}
    assert got.line(6) == 7
    for i, reason in [(1, "NaN"), (2, "JSON int"), (3, "JSON list"), (5, "not valid JSON")]:
        with pytest.raises(BadRecordError, match=rf"{name}:{i + 1}: .*{reason}"):
            got[i]


def test_a_jsonl_file_of_lists_stays_jsonl(tmp_path: Path) -> None:
    got = JsonRecords(_file(tmp_path, b"[1]\n[2]\n"))
    assert len(got) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a":', "is not valid JSON: Expecting value at column 6. Mend"),
        (b'{"a":1} x', "is not valid JSON: Extra data at column 9"),
        (b'{"a":"\xff"}', "is not UTF-8: byte 0xff at column 7"),
        (b"\0\0\0", "holds a NUL byte at column 1 "),
        (b"[1]", "is a JSON list; expected an object"),
        (b'"x"', "is a JSON str; expected an object"),
        (b"null", "is a JSON NoneType; expected an object"),
        (b'{"a":NaN}', "holds NaN, which is not JSON"),
        (b'{"a":-Infinity}', "holds -Infinity, which is not JSON"),
        (b'{"a":1e999}', "holds the number 1e999, which is too large"),
        (b'{"a":' + b"1" * 5000 + b"}", "holds a number that cannot be read: Exceeds the limit"),
        (b'{"a":' + b"[" * 200_000, "is nested too deeply"),
        (b'{"a":"\\ud800"}', "holds half of a"),
        (b"\x0b", "is not valid JSON"),
        (b'{"a":1}\r{"a":2}', "is not valid JSON: Extra data at column 9 (do its lines end in CR "),
        (b'{"a":{"b":1,"c":2,"b":3}}', "has the key 'b' twice in one object; keep one of them"),
    ],
)
def test_a_bad_line_is_an_error_only_when_it_is_read(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = _file(tmp_path, b'{"a":1}\n\n' + line + b'\n{"a":2}\n')
    got = JsonRecords(path)
    assert [got[0], got[2]] == [{"a": 1}, {"a": 2}]
    with pytest.raises(BadRecordError) as caught:
        got[1]
    assert str(caught.value).startswith(f"{path}:3: {reason}")
    assert caught.value.line == 3
    assert "--odb-bad-record skip" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("a.jsonl", b"", "holds no record; expected one JSON object per line"),
        ("a.jsonl", b"\xef\xbb\xbf", "holds no record"),
        ("a.jsonl", b"\n \r\n", "holds no record"),
        ("a.json", b"[ ]", "holds no record"),
        ("a.json.gz", b"", "holds no record"),
        ("a.txt", b"{}", "has none of the endings .jsonl, .json"),
        ("a.json", b'[{"a":1}\n {"a":2}]', "expecting ',' or '\\]' at line 2, byte 2; mend"),
        ("a.json", b'[{"a":1},]', "expecting a value at line 1, byte 10"),
        ("a.json", b'[{"a":1}', "ends inside the array: expecting ',' or '\\]' at line 1, byte 9"),
        ("a.json", b'[{"a":1},', "ends inside the array"),
        ("a.json", b'[{"a":1}}', "expecting ',' or '\\]' at line 1, byte 9"),
        ("a.json", b'[3 {"a":1}]', "expecting ',' or '\\]' at line 1, byte 3"),
        ("a.json", b'[{"a":1} 3]', "expecting ',' or '\\]' at line 1, byte 10"),
        ("a.json", b"[,]", "expecting a value at line 1, byte 2"),
        ("a.json", b'["a\\\\\\"]', "ends inside a string: expecting .* at line 1, byte 9"),
        ("a.json", b"[{}] []", "there is text after the array at line 1, byte 6"),
        ("a.json", b"[" * 200_000, "ends inside an element"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, data: bytes, error: str) -> None:
    path = _file(tmp_path, data, name)
    with pytest.raises(ValueError, match=error) as caught:
        JsonRecords(path)
    assert str(path) in str(caught.value)


def test_missing_directory_and_damaged_gzip(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.jsonl does not exist; check the path"):
        JsonRecords(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match="is a directory; name a file in it"):
        JsonRecords(tmp_path)
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(json.dumps({"a": list(range(9999))}).encode())
    for data in (b"not gzip", whole[:-20], whole[:4], whole[:60] + b"\xff" * 40 + whole[100:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read .*fetch the file again"):
            JsonRecords(path)


def test_indices(tmp_path: Path) -> None:
    got = JsonRecords(_file(tmp_path, b'{"a":0}\n{"a":1}\n{"a":2}'))
    assert got[-1] == {"a": 2}
    assert got[np.int64(1)] == {"a": 1}
    assert got[1:] == [{"a": 1}, {"a": 2}]
    for index in (3, -4):
        with pytest.raises(IndexError, match="which holds 3"):
            got[index]


def test_fingerprint(tmp_path: Path) -> None:
    line = b'{"a":1}\n'
    first = _file(tmp_path, line * 30_000)
    digest = JsonRecords(first).fingerprint()
    assert JsonRecords(_file(tmp_path, line * 30_000, "b.jsonl")).fingerprint() == digest
    assert JsonRecords(_file(tmp_path, line * 30_001, "c.jsonl")).fingerprint() != digest
    changed = line * 29_999 + b'{"a":2}\n'
    assert JsonRecords(_file(tmp_path, changed, "d.jsonl")).fingerprint() != digest


def _naive(data: bytes) -> tuple[list[bytes], list[int]]:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    kept = [(line, i + 1) for i, line in enumerate(lines) if line.strip(b" \t\r")]
    return [line for line, _ in kept], [i for _, i in kept]


@settings(deadline=None, max_examples=300)
@given(
    data=st.lists(
        st.sampled_from([b"\n", b"\r\n", b" ", b"\t", b"x", b"{}", b"\0", b"\xef\xbb\xbf", b"\xff"])
        | st.binary(max_size=6),
        max_size=30,
    ).map(b"".join),
    chunk=st.integers(1, 9),
)
def test_index_equals_a_naive_splitter(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.jsonl"
    path.write_bytes(data)
    lines, numbers = _naive(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_records, "_CHUNK_BYTES", chunk)
        if not lines:
            with pytest.raises(ValueError, match="holds no record"):
                JsonRecords(path)
            return
        got = JsonRecords(path)
    read = [got._read(int(a), int(b)) for a, b in zip(got._starts, got._ends, strict=True)]
    assert read == lines
    assert [got.line(i) for i in range(len(got))] == numbers


def test_indexing_does_not_hold_the_file(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    line = b'{"a":"' + b"x" * 9000 + b'"}\n'
    with path.open("wb") as file:
        for _ in range(100):
            file.write(line * 100)
    tracemalloc.start()
    got = JsonRecords(path)
    assert got[9999]["a"] == "x" * 9000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(got) == 10_000
    assert path.stat().st_size > 85e6
    assert peak < 50e6
    with path.open("rb", buffering=0) as file:
        assert _line_index(file, 0)[0].size == 10_000


def _read_all(got: JsonRecords) -> list[dict[str, object]]:
    return list(got)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz"])
def test_pickled_copies_leave_file_and_bytes_behind(tmp_path: Path, name: str) -> None:
    data = b"[" + b",".join(b'{"a":%d}' % i for i in range(5000)) + b"]"
    if name == "a.jsonl":
        data = b"\n".join(b'{"a":%d}' % i for i in range(5000))
    got = JsonRecords(_file(tmp_path, data, name))
    assert got[7] == {"a": 7}
    copy = pickle.loads(pickle.dumps(got))
    assert copy._bytes is None
    assert _read_all(copy) == _read_all(got)


def test_other_processes_read_the_same(tmp_path: Path) -> None:
    got = JsonRecords(_file(tmp_path, b'{"a":1}\n\n{"a":2}\n'))
    here = _read_all(got)
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(_read_all, (got,)) == here


def test_a_file_that_changes_in_use_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, b'{"a":1}\n{"a":2}\n')
    got, fresh = JsonRecords(path), JsonRecords(path)
    assert got[1] == {"a": 2}
    path.write_bytes(b'{"a":1}\n')
    for copy in (got, fresh, pickle.loads(pickle.dumps(got))):
        with pytest.raises(RuntimeError, match="changed while in use: it had 16 bytes"):
            copy[1]


@pytest.mark.parametrize(
    ("name", "num_records"),
    [
        ("HumanEval.jsonl.gz", 164),
        ("glaive_toolcall_en_demo.json", 300),
        ("gsm8k_test.jsonl", 1319),
        ("longchat_5_topics.jsonl", 50),
        ("longchat_10_topics.jsonl", 50),
        ("oasst_en_100_tree.jsonl", 100),
        ("self_instruct_seed_tasks.jsonl", 175),
    ],
)
def test_real_files(name: str, num_records: int) -> None:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"shared data file {name} is not here")
    got = JsonRecords(path)
    data = path.read_bytes()
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
    lines = text.split("\n")
    expected = json.loads(text) if text[0] == "[" else [json.loads(x) for x in lines if x.strip()]
    assert list(got) == expected
    assert len(got) == num_records
