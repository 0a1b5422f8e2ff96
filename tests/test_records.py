"""Records: by line, as a JSON array, and by `datasets`."""

from __future__ import annotations

import csv
import gzip
import json
import multiprocessing
import pickle
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_megatron.data import records as module
from odb_megatron.data.records import Records, has_records, open_records
from odb_megatron.data.sample import BadRecordError

_open = open_records.__wrapped__  # anew each time
DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"


def _file(tmp_path: Path, data: bytes, name: str = "a.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


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
@pytest.mark.parametrize("name", ["a.ndjson", "a.JSON", "a.jsonl.gz", "a.json.gz"])
def test_lines(
    tmp_path: Path, data: bytes, records: list[object], lines: list[int], name: str
) -> None:
    got = _open(_file(tmp_path, data, name))
    assert [r["a"] for r in got] == records
    assert [got.line(i) for i in range(len(got))] == lines
    assert got.path.endswith(name)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_an_array_is_read_record_by_record(tmp_path: Path, name: str) -> None:
    text = (
        '\n [ {"a": "é"},\n\n {"a": NaN} ,3,[{}], {"a": "\\\\"}, '
        '{"a": 1, "a": 1}, {"a": [1, "\\"]"]}]  \n'
    )
    got = _open(_file(tmp_path, text.encode(), name))
    assert len(got) == 7
    assert got[0] == {"a": "é"}
    assert got[4] == {"a": "\\"}
    assert got[6] == got[-1] == {"a": [1, '"]']}
    assert got.line(6) == 7
    for i, reason in [(1, "NaN"), (2, "JSON int"), (3, "JSON list"), (5, "twice")]:
        with pytest.raises(BadRecordError, match=rf"{name}:{i + 1}: .*{reason}"):
            got[i]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a":', "is not valid JSON: Expecting value at column 6. Mend"),
        (b'{"a":1} x', "is not valid JSON: Extra data at column 9"),
        (b'{"a":"\xff"}', "is not UTF-8: 'utf-8' codec can't decode byte 0xff in position 6"),
        (b"\0\0\0", "is not valid JSON"),
        (b"[1]", "is a JSON list; expected an object"),
        (b'"x"', "is a JSON str; expected an object"),
        (b"null", "is a JSON NoneType; expected an object"),
        (b'{"a":NaN}', "holds the number NaN, which is not finite"),
        (b'{"a":-Infinity}', "holds the number -Infinity, which is not finite"),
        (b'{"a":1e999}', "holds the number 1e999, which is not finite"),
        (b'{"a":' + b"1" * 5000 + b"}", "Exceeds the limit"),
        (b'{"a":' + b"[" * 200_000, "is nested too deeply"),
        (b'{"a":"\\ud800"}', "is not UTF-8: 'utf-8' codec can't encode character '\\ud800'"),
        (b"\x0b", "is not valid JSON"),
        (b'{"a":1}\r{"a":2}', "is not valid JSON: Extra data at column 9"),
        (b'{"a":{"b":1,"c":2,"b":3}}', "has the key 'b' twice in one object; keep one"),
    ],
)
def test_a_bad_line_is_an_error_only_when_it_is_read(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = _file(tmp_path, b'{"a":1}\n\n' + line + b'\n{"a":2}\n')
    got = _open(path)
    assert [got[0], got[2]] == [{"a": 1}, {"a": 2}]
    with pytest.raises(BadRecordError) as caught:
        got[1]
    assert str(caught.value).startswith(f"{path}:3: {reason}")
    assert caught.value.line == 3
    assert "--odb-max-bad-records N" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("a.jsonl", b"", "holds no record; expected one JSON object per line"),
        ("a.jsonl", b"\xef\xbb\xbf", "holds no record"),
        ("a.jsonl", b"\n \r\n", "holds no record"),
        ("a.json", b"[ ]", "holds no record"),
        ("a.json.gz", b"", "holds no record"),
        ("a.txt", b"{}", "no data at .*a file ending in .* The folder .* holds a.txt"),
        ("a.json", b'[{"a":1}\n {"a":2}]', "Expecting ',' or '\\]': line 1 column 9 .* repair it"),
        ("a.json", b'[{"a":1},]', "Expecting value: line 1 column 10"),
        ("a.json", b'[{"a":1}', "Expecting ',' or '\\]': line 1 column 9"),
        ("a.json", b'[{"a" 1}]', "Expecting ':' delimiter: line 1 column 7"),
        ("a.json", b"[{}] []", "Extra data: line 1 column 6"),
        ("a.json", b"[" * 200_000, "is no JSON array: maximum recursion"),
        ("a.json", b'["\xff"]', "is no JSON array: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, data: bytes, error: str) -> None:
    path = _file(tmp_path, data, name)
    with pytest.raises(ValueError, match=error) as caught:
        _open(path)
    assert str(path) in str(caught.value)


def test_missing_directory_and_damaged_gzip(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.jsonl does not exist; check the path"):
        _open(str(tmp_path / "no.jsonl"))
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(json.dumps({"a": list(range(9999))}).encode())
    for data in (b"not gzip", whole[:-20], whole[:4], whole[:60] + b"\xff" * 40 + whole[100:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read .*fetch the file again"):
            _open(str(path))


def test_fingerprint(tmp_path: Path) -> None:
    line = b'{"a":1}\n'
    first = _file(tmp_path, line * 30_000)
    digest = _open(first).fingerprint()
    assert _open(_file(tmp_path, line * 30_000, "b.jsonl")).fingerprint() == digest
    assert _open(_file(tmp_path, line * 30_001, "c.jsonl")).fingerprint() != digest
    changed = line * 29_999 + b'{"a":2}\n'
    assert _open(_file(tmp_path, changed, "d.jsonl")).fingerprint() != digest


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
    path = _file(tmp_path_factory.getbasetemp(), data, "random.jsonl")
    lines, numbers = _naive(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", chunk)
        if not lines:
            with pytest.raises(ValueError, match="holds no record"):
                _open(path)
            return
        got = _open(path)
    read = [got._read(int(a), int(b)) for a, b in pairwise(got._index[0])]
    assert [line.rstrip(b" \t\r\n") for line in read] == [line.rstrip(b" \t\r") for line in lines]
    assert [got.line(i) for i in range(len(got))] == numbers


def _read_all(got: Records) -> list[dict[str, object]]:
    return list(got)


@pytest.mark.parametrize("path", DATA.glob("*.json*"), ids=lambda path: path.name)
def test_real_files(path: Path) -> None:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode()
    if path.name == "token_lengths.json":
        return  # one object, no records
    lines = text.split("\n")
    expected = json.loads(text) if text[0] == "[" else [json.loads(x) for x in lines if x.strip()]
    assert list(_open(str(path))) == expected


# --- by `datasets` ---------------------------------------------------------------------------

CALL = {"function": {"name": "f", "arguments": {"x": 1}}}
CHATS: list[dict[str, object]] = [
    {
        "messages": [
            {"role": "user", "content": f"é {number}"},
            {"role": "assistant", "content": "None", "tool_calls": [CALL] * (number % 2)},
            *[{"role": "tool", "content": "NA"}] * (number % 2),
        ],
        "weight": number % 2,
    }
    for number in range(200)
]
TEXTS: list[dict[str, object]] = [
    {"text": f'NA, "é"\t{number}', "title": ["None", ""][number % 2]} for number in range(200)
]


def _write(name: str, records: list[dict[str, object]]) -> None:
    """Write records to a file, in the format of its name."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    Path(name).parent.mkdir(exist_ok=True)
    ending = name.removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]
    lines = "\n".join(json.dumps(record) for record in records).encode()
    if ending == "parquet":
        parquet.write_table(pa.Table.from_pylist(records), name)
    elif ending == "arrow":
        table = pa.Table.from_pylist(records)
        with pa.OSFile(name, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write(table)
    elif ending in ("csv", "tsv"):
        with open(name, "w", newline="") as text:
            writer = csv.DictWriter(text, [*records[0]], delimiter=",\t"[ending == "tsv"])
            writer.writeheader()
            writer.writerows(records)
    elif ending == "disk":
        datasets.Dataset.from_list(records).save_to_disk(name)
    elif name.endswith(".zst"):
        pytest.importorskip("zstandard")
        with pa.output_stream(name, compression="zstd") as stream:
            stream.write(lines)
    else:
        data = json.dumps(records, indent=1).encode() if ending == "json" else lines
        _file(Path(), data, name)


@pytest.mark.parametrize(
    ("files", "path", "part"),
    [
        (["a.jsonl"], "a.jsonl", slice(None)),
        (["a.ndjson"], "a.ndjson", slice(None)),
        (["a.jsonl.gz"], "a.jsonl.gz", slice(None)),
        (["a.json"], "a.json", slice(None)),
        (["a.json.gz"], "a.json.gz", slice(None)),
        (["a.jsonl.zst"], "a.jsonl.zst", slice(None)),
        (["a.parquet"], "a.parquet", slice(None)),
        (["a.arrow"], "a.arrow", slice(None)),
        (["a.disk"], "a.disk", slice(None)),
        (["d/a.parquet"], "d", slice(None)),
        (["a.ndjson", "b.jsonl"], "[a]*.ndjson", slice(None)),
        (["a[1].jsonl"], "a[1].jsonl", slice(None)),
        (["a.jsonl"], "a.jsonl:train[:1%]", slice(2)),
        (["a.parquet"], "a.parquet:train[10:20]", slice(10, 20)),
        (["a.disk"], "a.disk:train[-5%:]", slice(190, None)),
        (["d/train.parquet", "d/test.parquet"], "d:test", slice(None)),
    ],
)
def test_every_format_gives_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], path: str, part: slice
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in files:
        _write(name, CHATS)
    got = _open(path, "cache")
    assert list(got) == CHATS[part]
    assert got[-1] == got[len(got) - 1]
    copy = pickle.loads(pickle.dumps(got))
    assert list(copy) == CHATS[part]
    assert copy.fingerprint() == got.fingerprint() == _open(path, "other").fingerprint()
    assert got.folder == str(tmp_path / {"d": "d", "a.disk": "a.disk"}.get(path.split(":")[0], ""))


@pytest.mark.parametrize("path", ["a.csv", "a.tsv", "d", "d/*.tsv", "a.csv:train"])
def test_texts_of_a_csv_file_stay_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "a.tsv", "d/a.tsv"):
        _write(name, TEXTS)
    assert list(_open(path, "cache")) == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_other_processes_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(name, CHATS)
    got = _open(name, "cache")
    assert got[0] == CHATS[0]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(_read_all, (got,)) == CHATS


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("a.parquet", "a.parquet does not exist; .* The folder . holds a.txt, d, p.idx"),
        ("x/*.csv", r"x/\*.csv does not exist; .* The folder . holds a.txt, d"),
        ("a.txt", "no data at 'a.txt': expected a file ending in .* holds a.txt, d"),
        ("p", r"no data at 'p': .* \(missing: p.bin\)"),
        ("d/nothing", r"no data at 'd/nothing': .* The folder d holds a.csv, a.parquet"),
        ("d:nothing", "d:nothing cannot be read by datasets"),
        ("d/a.parquet", "d/a.parquet cannot be read by datasets .Arrow.*: Parquet magic bytes"),
        ("d/*", "it holds files of 2 kinds, d/a.csv, d/a.parquet"),
        ("z", "z cannot be read by datasets .*it holds no file of a kind that is read"),
    ],
)
def test_what_is_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, error: str
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    for folder in ("d", "z"):
        (tmp_path / folder).mkdir()
    for name in ("a.txt", "d/a.csv", "d/a.parquet", "p.idx"):
        Path(name).write_text("text\n1\n" * 9)
    with pytest.raises(ValueError, match=error):
        _open(path, "cache")


def test_without_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, b"", "a.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'odb-megatron\[files\]'"):
        _open(path)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:train[:1%]", ("org/name", None, "train[:1%]")),
        ("org/name:a-b.1:train+test[5:]", ("org/name", "a-b.1", "train+test[5:]")),
    ],
)
def test_a_name_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, path: str, asked: tuple[str, str | None, str]
) -> None:
    datasets = pytest.importorskip("datasets")
    found = []

    def load(name: str, config: str | None, *, split: str, cache_dir: str) -> object:
        found.append((name, config, split))
        raise ConnectionError(f"no way from {cache_dir} to the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert has_records(path)
    with pytest.raises(
        ValueError, match=r"org/name.* by datasets \(ConnectionError: no way from c"
    ):
        _open(path, "c")
    assert found == [asked]
