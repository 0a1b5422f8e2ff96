"""`odb-megatron doctor -- COMMAND`: flags by Megatron's own parser and rules, real data's lengths.

All cases go through one process, since importing Megatron takes seconds; two through the command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from megatron_world import _FLAGS, ChatFile, chat_file
from readme import QUICKSTART, command
from test_doctor import KERNELS

from odb_megatron.doctor import kernels
from odb_megatron.doctor.command import main
from odb_megatron.doctor.command_facts import FlagFacts, Request, facts_of

pytest_plugins = ["megatron_fixtures"]
pytestmark = [pytest.mark.megatron, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]

DRIVER = """
import json, os, sys, tempfile
from dataclasses import asdict
from odb_megatron.doctor.command_facts import Request
from odb_megatron.doctor.flag_facts import examine

found, (cases, out, documents) = {}, sys.argv[1:]  # which examine replaces
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

builder = IndexedDatasetBuilder(f"{documents}.bin")
for length in (5, 40, 17):
    builder.add_document(torch.arange(length), [length])
builder.finalize(f"{documents}.idx")
for name, case in json.load(open(cases)).items():
    os.environ.update(WORLD_SIZE=str(case["world"]), RANK="0", LOCAL_RANK="0")
    request = Request(**{**case["request"], "flags": tuple(case["request"]["flags"])})
    with tempfile.TemporaryDirectory() as cache:
        found[name] = asdict(examine(request, cache=cache))
with open(out, "w") as file:
    json.dump(found, file)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the cases read."""

    chats: ChatFile
    many: ChatFile
    bad: Path
    documents: Path
    tokenizer: Path


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, chats: ChatFile
) -> Files:
    folder = tmp_path_factory.mktemp("doctor")
    bad = folder / "bad.jsonl"
    lines = Path(chats.path).read_text().splitlines()
    bad.write_text("\n".join([*lines[:3], '{"messages": []}', *lines[3:5], "nonsense"]) + "\n")
    alone = folder / "alone"
    alone.mkdir()
    (alone / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    many = chat_file(tokenizer_folder, name="many", num_records=400, seed=3, longest=200)
    return Files(chats=chats, many=many, bad=bad, documents=folder / "documents", tokenizer=alone)


def flags_for(tokenizer: Path, *more: str, length: int = 64) -> tuple[str, ...]:
    """A run that is right; flags given again win."""
    size = ("--seq-length", str(length), "--max-position-embeddings", "256")
    return (
        *_FLAGS,
        *size,
        *("--global-batch-size", "8", "--train-samples", "32", "--eval-iters", "1"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)),
        *("--split", "90,10,0", "--odb", *more),
    )


@pytest.fixture(scope="module")
def found(
    files: Files, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, FlagFacts]:
    """What was found in each case."""
    chats = ("--data-path", files.chats.path)

    def case(
        *more: str, world: int = 2, without: str = "", num_records: int = 2000, length: int = 64
    ) -> dict[str, Any]:
        flags = tuple(
            flag for flag in flags_for(tokenizer_folder, *more, length=length) if flag != without
        )
        request = Request(script="x", flags=flags, on_cpu=True, num_records=num_records)
        return {"world": world, "request": asdict(request)}

    tensor_parallel = ("--tensor-model-parallel-size", "2")
    tensorboard = tmp_path_factory.mktemp("boards") / "board"
    cases = {
        "good": case(*chats, "--tensorboard-dir", str(tensorboard), world=1),
        "no per-token loss": case(*chats, without="--calculate-per-token-loss"),
        "misspelt": case(*chats, "--odb-overlon", "drop"),
        "bad value": case(*chats, "--odb-overlong", "best"),
        "budget": case(*chats, "--odb-token-budget", "40"),
        "overlong": case(*chats, length=40),
        "help": case("--help"),
        "parallel": case(*chats, *tensor_parallel, "--sequence-parallel", world=4),
        "world": case(*chats, *tensor_parallel, world=3),
        "some": case("--data-path", files.many.path, num_records=10),
        "bad records": case("--data-path", str(files.bad)),
        "gone": case("--data-path", "gone.jsonl"),
        "own data": case(),
        "documents": case(
            *("--data-path", str(files.documents), "--tokenizer-type", "NullTokenizer"),
            *("--vocab-size", "64"),
        ),
        "several": case(
            *(*chats, "--odb-cost", "patch=8", "--odb-max-bad-records", "3"),
            *("--odb-plan-ahead", "-1"),
            without="--calculate-per-token-loss",
        ),
        "baseline": case(*chats, without="--odb"),
        "bare tokenizer": case(
            *chats, "--tokenizer-model", str(files.tokenizer / "tokenizer.json")
        ),
    }  # fmt: skip
    cases["bare"] = {
        "world": 2,
        "request": asdict(Request(script="x", flags=("--odb",), on_cpu=True)),
    }
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [
            *(sys.executable, "-c", DRIVER, str(folder / "cases.json")),
            *(str(folder / "found.json"), str(files.documents)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not tensorboard.exists(), "a writer was started"
    assert [path.name for path in files.tokenizer.iterdir()] == ["tokenizer.json"]
    read: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return {name: facts_of(values) for name, values in read.items()}


def test_flags_that_fit(found: dict[str, FlagFacts], files: Files) -> None:
    good = found["good"]
    assert (good.problems, good.unknown, good.backend_problem) == ((), "", "")
    assert good.backend.startswith("cpu: ")
    assert good.described.startswith("--odb --odb-token-budget 64")
    assert (good.has_odb, good.uses_nccl, good.replicas, good.limit) == (True, False, 1, 64)
    (data,) = good.data
    assert (data.num_records, data.num_read) == (61, 61)
    assert data.longest == max(files.chats.lengths)
    assert files.chats.lengths[data.longest_at - 1] == data.longest
    assert (data.num_overlong, data.num_bad, data.error) == (0, 0, "")


def test_a_bare_tokenizer_file_is_read_and_left_alone(found: dict[str, FlagFacts]) -> None:
    assert found["bare tokenizer"].problems == ()
    assert found["bare tokenizer"].data[0].longest > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no per-token loss", "--odb needs --calculate-per-token-loss"),
        ("bad value", "invalid choice: 'best'"),
        ("budget", "--odb-token-budget 40 is below --seq-length 64"),
        ("help", "the flags ask for help"),
        ("world", "Megatron refuses the flags: world size (3)"),
    ],
)
def test_what_is_refused(found: dict[str, FlagFacts], name: str, words: str) -> None:
    (problem,) = found[name].problems
    assert words in problem


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "bare",
            [
                "the run has no length: give --train-samples N",
                "--odb needs --calculate-per-token-loss",
                "--odb needs --micro-batch-size 1",
            ],
        ),
        (
            "several",
            [
                "--odb-max-bad-records would do nothing with --odb-bad-record error",
                "--odb-plan-ahead must not be negative, got -1",
                "--odb-cost patch=8: linear is missing",
                "--odb needs --calculate-per-token-loss",
            ],
        ),
    ],
)
def test_refusals_do_not_hide_each_other(
    found: dict[str, FlagFacts], name: str, words: list[str]
) -> None:
    problems = found[name].problems
    assert len(problems) == len(words), problems
    for problem, word in zip(problems, words, strict=True):
        assert word in problem


def test_unknown_flags_do_not_hide_the_rest(found: dict[str, FlagFacts]) -> None:
    facts = found["misspelt"]
    assert "did you mean --odb-overlong?" in facts.unknown
    assert facts.problems == ()
    assert facts.data[0].num_read == 61


@pytest.mark.parametrize("name", ["budget", "overlong"])
def test_samples_above_the_limit(found: dict[str, FlagFacts], files: Files, name: str) -> None:
    facts = found[name]
    expected = sum(length > 40 for length in files.chats.lengths)
    assert expected > 0
    assert (facts.limit, facts.data[0].num_overlong) == (40, expected)


def test_parallelism(found: dict[str, FlagFacts]) -> None:
    facts = found["parallel"]
    assert (facts.problems, facts.replicas, facts.model_parallel) == ((), 2, 2)
    assert facts.multiple == 2


def test_of_many_records_the_longest_is_found(found: dict[str, FlagFacts], files: Files) -> None:
    (data,) = found["some"].data
    assert data.num_records == 400
    assert 64 <= data.num_read <= 74
    assert data.longest == max(files.many.lengths) > 100


def test_bad_records(found: dict[str, FlagFacts], files: Files) -> None:
    (data,) = found["bad records"].data
    assert (data.num_records, data.num_bad) == (7, 2)
    assert f"{files.bad}:4: " in data.first_bad


def test_data_that_is_not_there(found: dict[str, FlagFacts]) -> None:
    assert "gone.jsonl does not exist" in found["gone"].data[0].error
    assert found["own data"].data == ()


def test_megatron_documents(found: dict[str, FlagFacts]) -> None:
    facts = found["documents"]
    assert facts.problems == ()
    (data,) = facts.data
    assert (data.longest, data.longest_at, data.num_read) == (39, 2, 3)


def test_padded_baseline(found: dict[str, FlagFacts]) -> None:
    facts = found["baseline"]
    assert (facts.problems, facts.has_odb, facts.described) == ((), False, "")
    assert facts.batch_tokens == 64
    assert found["good"].batch_tokens == 0


# --- the whole command -----------------------------------------------------------------------


def test_the_command_of_the_quickstart(
    chats: ChatFile,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that is ready: the training of the same page, behind what the page shows of it."""
    shutil.copy(chats.path, tmp_path / "chats.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = command("odb-megatron", "doctor", page=QUICKSTART)
    begin = words[words.index("--") + 1 :]
    training = command("odb-megatron", "pretrain", "--odb-log-dir", page=QUICKSTART)
    assert training[: len(begin)] == begin
    rest = [
        str(tokenizer_folder) if word == "/path/to/hf-tokenizer" else word
        for word in training[len(begin) :]
    ]
    code = main([*words[2:], *rest])
    output = capsys.readouterr().out
    assert code == 0, output
    assert "failure" not in output.splitlines()[-1]
    told = " ".join(output.split())
    assert "command odb-megatron pretrain starts -m odb_megatron.megatron.pretrain" in told
    assert f"is the longest with {max(chats.lengths)} tokens" in told
    assert not (tmp_path / "logs").exists()


def test_a_run_that_is_not(
    chats: ChatFile,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kernels, "gather_kernels", lambda *_args, **_how: KERNELS)
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("")
    flags = flags_for(tokenizer_folder, "--data-path", chats.path, "--mine", length=40)
    flags = tuple(flag for flag in flags if flag != "--calculate-per-token-loss")
    out = tmp_path / "found.json"
    words = ["torchrun", "--nproc-per-node", "2", str(script), *flags]
    assert main(["--json", str(out), "--", *words]) == 1
    capsys.readouterr()
    found = json.loads(out.read_text())["checks"]
    failures = {one["subject"]: one for one in found if one["status"] == "failure"}
    assert set(failures) >= {"script", "flags", "data"}
    assert failures["flags"]["way_out"] == "add --calculate-per-token-loss"
    assert "--odb-overlong truncate" in failures["data"]["way_out"]
    (unknown,) = [one for one in found if "--mine" in one["seen"]]
    assert unknown["status"] == "warning", "it may be the script's own"
