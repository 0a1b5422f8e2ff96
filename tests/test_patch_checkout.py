"""Megatron-LM's own pretrain_gpt.py, patched and not, trained on the CPU with ODB and without.

Checkouts are given by MEGATRON_LM_PATH, several separated by colons; each is copied, and not
changed. One script that calls `pretrain()` as pretrain_gpt.py does is run on the installed Megatron
in any case.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron_world import _FLAGS, GLOBAL_BATCH_SIZE, SEQ_LENGTH, ChatFile

pytest_plugins = ["megatron_fixtures"]
pytestmark = [pytest.mark.megatron, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "pretrain_gpt.py"
VARIABLE = "MEGATRON_LM_PATH"
HOW = f"set {VARIABLE} to a Megatron-LM checkout (several separated by colons) to run this"
CHECKOUTS = [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]

_LOSS = re.compile(r"iteration +\d+/ +\d+ \|.*? lm loss: (\S+) \|")
_EVALUATION = re.compile(r"validation loss at (.*?) \| lm loss value: (\S+) \|")
_MOCK = shlex.split("--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --split 90,5,5")

INSTALLED = """
import sys
from functools import partial
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def own_data(sizes):
    raise AssertionError("the script's own data sets")


def own_step(items, model):
    raise AssertionError("the script's own forward step")


def own_flags(parser):
    parser.add_argument("--favourite-colour")
    return parser


if __name__ == "__main__":
    args = parse_and_validate_args(
        extra_args_provider=own_flags, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    print("colour", args.favourite_colour)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, own_data, ModelType.encoder_or_decoder, own_step, store=None)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A launched run."""

    code: int
    output: str

    @property
    def losses(self) -> list[str]:
        """Training losses as printed, then those of evaluations."""
        return [
            *_LOSS.findall(self.output),
            *(loss for _, loss in _EVALUATION.findall(self.output)),
        ]


def _launch(*command: str, cwd: Path) -> Ended:
    launch = ["-m", "odb_megatron.elastic", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "odb_megatron.cpu", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    return Ended(code=done.returncode, output=done.stdout)


@pytest.fixture(scope="module")
def flags(tokenizer_folder: Path) -> list[str]:
    """What every run has."""
    return [
        *_FLAGS,
        *("--distributed-backend", "gloo"),  # which without --odb is not chosen by itself
        *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)),
        *("--global-batch-size", str(GLOBAL_BATCH_SIZE), "--train-samples", "21"),
        *("--eval-iters", "1"),
    ]


@pytest.fixture(scope="module")
def odb(chats: ChatFile, valid_chats: ChatFile, tokenizer_folder: Path) -> list[str]:
    """What runs with ODB have on top."""
    return [
        "--odb",
        *("--train-data-path", chats.path, "--valid-data-path", valid_chats.path),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer_folder)),
    ]


@pytest.fixture(scope="module")
def package_losses(
    flags: list[str], odb: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Losses of the package's own pretrain script, on the installed Megatron."""
    folder = tmp_path_factory.mktemp("package")
    ended = _launch("-m", "odb_megatron.megatron.pretrain", *flags, *odb, cwd=folder)
    assert ended.code == 0, ended.output[-3000:]
    assert len(ended.losses) == 4  # 3 steps and the evaluation at the end
    return ended.losses


@pytest.fixture(scope="module", params=CHECKOUTS or [None], ids=lambda path: path and path.name)
def checkout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a checkout, with the functions that Megatron compiles."""
    if request.param is None:
        pytest.skip(HOW)
    return _copy(request.param.resolve(), tmp_path_factory.mktemp("checkout") / request.param.name)


def _copy(source: Path, to: Path) -> Path:
    if (source / ".git").exists():
        clone = ["git", "clone", "--quiet", "--shared", "--no-checkout", str(source), str(to)]
        subprocess.run(clone, check=True)
        subprocess.run(["git", "-C", str(to), "checkout", "--quiet", "HEAD"], check=True)
    else:
        shutil.copytree(source, to)
    import torch

    include = [sysconfig.get_path("include"), str(Path(torch.__file__).parent / "include")]
    make = ["make", "-C", str(to / "megatron" / "core" / "datasets")]
    make += [f"CPPFLAGS={shlex.join(f'-I{path}' for path in include)}"]  # torch brings pybind11
    make += [f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"]
    subprocess.run(make, check=True, capture_output=True)
    return to


def _git_apply(checkout: Path, patch: Path, *options: str) -> bool:
    command = ["git", "apply", *options, str(patch)]
    return subprocess.run(command, cwd=checkout, capture_output=True, check=False).returncode == 0


def _patch(checkout: Path) -> Path | None:
    """The patch that fits a checkout, if one does."""
    found = sorted((ROOT / "patches").glob("*/*.patch"))
    return next((patch for patch in found if _git_apply(checkout, patch, "--check")), None)


def test_it_trains_unpatched(
    checkout: Path, flags: list[str], odb: list[str], package_losses: list[str]
) -> None:
    ended = _launch("-m", "odb_megatron.run", SCRIPT, *flags, *odb, cwd=checkout)
    assert ended.code == 0, ended.output[-3000:]
    assert ended.losses == package_losses
    assert "odb: in place of pretrain_gpt.py's own data sets" in ended.output
    assert "21 samples (21 of 21 requested)" in ended.output


def test_it_trains_in_pipeline_stages(checkout: Path, flags: list[str], odb: list[str]) -> None:
    """The script's `get_embedding_ranks` builds a configuration of its own from the arguments."""
    own = ["--pipeline-model-parallel-size", "2", "--num-layers", "2"]
    ended = _launch("-m", "odb_megatron.run", SCRIPT, *flags, *odb, *own, cwd=checkout)
    assert ended.code == 0, ended.output[-3000:]
    assert "21 samples (21 of 21 requested)" in ended.output


def test_it_trains_patched_and_is_reverted(
    checkout: Path,
    flags: list[str],
    odb: list[str],
    package_losses: list[str],
    tmp_path: Path,
) -> None:
    patch = _patch(checkout)
    if patch is None:
        pytest.skip(f"{checkout.name} is not a version that there is a patch for")
    before = (checkout / SCRIPT).read_bytes()
    assert _git_apply(checkout, patch)
    try:
        ended = _launch(str(checkout / SCRIPT), *flags, *odb, cwd=tmp_path)
        both = _launch("-m", "odb_megatron.run", SCRIPT, *flags, *odb, cwd=checkout)
    finally:
        assert _git_apply(checkout, patch, "-R")
    assert (checkout / SCRIPT).read_bytes() == before
    for run in (ended, both):
        assert run.code == 0, run.output[-3000:]
        assert run.losses == package_losses
        assert run.output.count("odb: in place of pretrain_gpt.py's own data sets") == 1


def test_without_the_flag_it_is_itself(checkout: Path, flags: list[str], tmp_path: Path) -> None:
    """On its own mock data: alone, run by `odb_megatron.run`, and patched."""
    alone = _launch(str(checkout / SCRIPT), *flags, *_MOCK, cwd=tmp_path)
    assert alone.code == 0, alone.output[-3000:]
    assert len(alone.losses) >= 4
    run = _launch("-m", "odb_megatron.run", SCRIPT, *flags, *_MOCK, cwd=checkout)
    assert (run.code, run.losses) == (0, alone.losses)
    assert "odb: " not in run.output
    patch = _patch(checkout)
    if patch is None:
        return
    assert _git_apply(checkout, patch)
    try:
        patched = _launch(str(checkout / SCRIPT), *flags, *_MOCK, cwd=tmp_path)
    finally:
        assert _git_apply(checkout, patch, "-R")
    assert (patched.code, patched.losses) == (0, alone.losses)
    assert "odb: " not in patched.output


@pytest.mark.parametrize(
    "own",
    [
        "--sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank 64",
        "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 64",
    ],
)
def test_megatrons_own_packing_is_refused(
    checkout: Path, flags: list[str], odb: list[str], own: str
) -> None:
    """By name where Megatron has the flag; else it is unknown, as without ODB."""
    flag = own.split()[0]
    text = (checkout / "megatron" / "training" / "arguments.py").read_text()
    ended = _launch(*("-m", "odb_megatron.run", SCRIPT, *flags, *odb, *own.split()), cwd=checkout)
    assert ended.code == 2, ended.output[-3000:]
    last = ended.output[ended.output.rindex("odb: error: ") :]
    if flag in text:
        assert flag in last
        assert "both" in last
        assert "form the micro-batches: drop one" in last
    else:
        assert f"unrecognized arguments: {flag}" in last


def test_a_script_on_the_installed_megatron(
    flags: list[str], odb: list[str], package_losses: list[str], tmp_path: Path
) -> None:
    """Which brings flags of its own."""
    (tmp_path / "train.py").write_text(INSTALLED)
    own = ["--favourite-colour", "green"]
    ended = _launch("-m", "odb_megatron.run", "train.py", *flags, *odb, *own, cwd=tmp_path)
    assert ended.code == 0, ended.output[-3000:]
    assert ended.losses == package_losses
    assert "colour green" in ended.output
