"""The scripts of examples/modelopt on a CPU: quantize, train (with a teacher), resume.

Each is compared with the padded run of the same samples, with other packings and with other
layouts of ranks. Needs nvidia-modelopt: `make test-modelopt`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("modelopt") is None:
    pytest.skip(
        "nvidia-modelopt is not installed here: make test-modelopt builds an environment with it",
        allow_module_level=True,
    )

from megatron_world import Megatron, Run
from readme import README, commands

pytest_plugins = ["megatron_fixtures"]
pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

LENGTH = ("--train-samples", "32", "--lr-decay-samples", "32", "--eval-iters", "0")
ODB = ("--odb", "--odb-token-budget", "96")
WIDE = ("--odb", "--odb-token-budget", "256")
INT8, FP8 = "INT8_DEFAULT_CFG", "FP8_DEFAULT_CFG"
BIG = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--ffn-hidden-size", "128"),
)
TENSOR = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "32")
"""The vocabulary is padded to the same size as with one rank."""
SEQUENCE = (*TENSOR, "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2", "--num-layers", "2")


class Stages:
    """Calls the stages with the tests' data."""

    def __init__(self, megatron: Megatron, data: tuple[str, ...], folder: Path) -> None:
        self._megatron, self._data, self.folder = megatron, (*data, *LENGTH), folder

    def __call__(self, stage: str, *flags: Any) -> Run:
        """Run a stage (empty: a plain `pretrain()`) that must end well."""
        return self._megatron.train(*self._data, *flags, stage=stage)

    def refused(self, stage: str, *flags: Any) -> str:
        """Run a stage that must end with exit code 2 on all ranks; return what it prints."""
        run = self._megatron.run(*self._data, *flags, stage=stage)
        assert {outcome.error for outcome in run.replicas} == {"SystemExit: 2"}, run
        assert all(outcome.restored for outcome in run.replicas)
        assert not any("building " in outcome.output for outcome in run.replicas)
        return "".join(outcome.output for outcome in run.replicas)

    def trained(self, name: str, *flags: Any) -> Path:
        """Train four steps without ModelOpt; return the folder of the checkpoint."""
        folder = self.folder / name
        if not folder.exists():
            self("", *ODB, *flags, "--save", folder, "--save-interval", "100")
        return folder

    def quantized(self, config: str, *flags: Any, of: Path | None = None) -> Path:
        """Quantize a trained model; return the folder of the checkpoint."""
        of = of or self.trained("float")
        folder = self.folder / "-".join((of.name, config, *flags)).replace("/", "_")
        if not folder.exists():
            given = (*ODB, "--train-samples", "16", *flags, "--load", of, "--save", folder)
            self("quantize", *given, "--modelopt-quant-cfg", config)
        return folder


@pytest.fixture(scope="module")
def stages(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Stages:
    return Stages(megatron, data_flags, tmp_path_factory.mktemp("modelopt"))


@pytest.fixture(scope="module")
def taught(stages: Stages) -> tuple[Any, ...]:
    """Flags of a teacher of two layers, twice as wide as the student."""
    return ("--modelopt-teacher", stages.trained("teacher", *BIG))


def close(run: Run, other: Run, *, tolerance: float = 1e-4) -> bool:
    """Whether two runs have the same losses, over the same samples."""
    assert [step.all_ids for step in run.steps] == [step.all_ids for step in other.steps]
    assert len(run.losses) == len(other.losses) > 0
    return run.losses == pytest.approx(other.losses, abs=tolerance)


def falls(run: Run) -> bool:
    """Whether the loss does."""
    return run.losses[-1] < run.losses[0]


# --- quantization ----------------------------------------------------------------------------


@pytest.mark.parametrize("config", [INT8, FP8])
def test_quantized_training(stages: Stages, config: str) -> None:
    start = ("--load", stages.quantized(config), "--finetune")
    packed = stages("train", *ODB, *start)
    plain = stages("", *ODB, "--load", stages.trained("float"), "--finetune")
    assert falls(packed)
    assert close(packed, stages("train", *start))
    assert close(packed, stages("train", *WIDE, *start))
    assert 1e-6 < abs(packed.losses[0] - plain.losses[0]) < 0.05  # quantizers do something


def test_ranges_do_not_depend_on_the_packing(stages: Stages) -> None:
    """17 samples: in the last step one replica has none, and runs no idle micro-batch."""
    start = ("--train-samples", "8", "--lr-decay-samples", "8", "--finetune", "--load")
    number = ("--train-samples", "17")
    wide = (*number, "--odb-token-budget", "512", "--global-batch-size", "16")
    first = stages("train", *ODB, *start, stages.quantized(INT8, *number))
    other = stages("train", *ODB, *start, stages.quantized(INT8, *wide))
    assert close(first, other, tolerance=1e-6)


def test_resume(stages: Stages) -> None:
    folder = stages.folder / "resumed"
    flags = (*ODB, "--save", folder, "--save-interval", "2")
    whole = stages("train", *flags, "--load", stages.quantized(INT8), "--finetune")
    resumed = stages("train", *flags, "--load", folder, "--ckpt-step", "2")
    assert resumed.losses == whole.losses[2:]
    assert [step.ids for step in resumed.steps] == [step.ids for step in whole.steps[2:]]
    assert "model restored from the checkpoint" in resumed.replicas[0].output


def test_layouts(stages: Stages) -> None:
    """Quantized and trained in two pipeline stages or by replicas; other tensor-parallel sizes."""
    of = stages.trained("teacher", *BIG)
    start = ("--finetune", "--load", stages.quantized(INT8, *BIG, *PIPELINE, of=of), *BIG)
    staged = stages("train", *ODB, *start, *PIPELINE)
    assert close(staged, stages("train", *ODB, *start))
    flags = (*ODB, "--finetune", "--load")
    replicated = stages("train", *flags, stages.quantized(FP8))
    assert close(stages("train", *flags, stages.quantized(FP8), *SEQUENCE), replicated)
    own = stages("train", *flags, stages.quantized(INT8, *TENSOR), *TENSOR)
    assert close(own, stages("train", *flags, stages.quantized(INT8)))


# --- distillation ----------------------------------------------------------------------------

KD = """
skip_lm_loss: false
kd_loss_scale: 0.5
logit_kl_temperature: 2.0
intermediate_layer_pairs: [["decoder.final_layernorm", "decoder.final_layernorm", "mse"]]
"""


def test_distillation(stages: Stages, taught: tuple[Any, ...]) -> None:
    packed = stages("train", *ODB, *taught)
    assert falls(packed)
    assert close(packed, stages("train", *taught))
    assert close(packed, stages("train", *WIDE, *taught))
    assert "| total loss: " in packed.replicas[-1].output
    assert "| lm loss: " not in packed.replicas[-1].output


def test_distillation_of_hidden_states(stages: Stages, taught: tuple[Any, ...]) -> None:
    """With the labels' loss beside it, which ModelOpt's own balancer scales by ratios."""
    path = stages.folder / "kd.yaml"
    path.write_text(KD)
    flags = (*taught, "--modelopt-kd-cfg", path, "--modelopt-intermediate-weight", "0.1")
    packed = stages("train", *ODB, *flags)
    padded = stages("train", *flags)
    assert falls(packed)
    assert close(packed, padded)
    norms = [[step.record["grad_norm"] for step in run.steps] for run in (packed, padded)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    for name in ("lm loss", "total loss", "intermediate distillation loss"):
        assert f"| {name}: " in packed.replicas[-1].output


def test_distillation_in_other_layouts(stages: Stages, taught: tuple[Any, ...]) -> None:
    of = stages.trained("student", "--num-layers", "2")
    start = (*ODB, "--load", of, "--finetune", *taught, "--num-layers", "2")
    replicated = stages("train", *start)
    assert close(stages("train", *start, *SEQUENCE), replicated)
    assert close(stages("train", *start, *PIPELINE), replicated)


def test_evaluation_of_a_student_is_of_the_labels(stages: Stages, taught: tuple[Any, ...]) -> None:
    of = ("--load", stages.trained("float"), "--finetune", "--eval-iters", "1")
    once = ("--train-samples", "8", "--lr-decay-samples", "8", "--lr", "0", "--min-lr", "0")
    student = stages("train", *ODB, *of, *once, *taught)
    plain = stages("", *ODB, *of, *once)
    assert student.evaluations == plain.evaluations
    assert plain.evaluations, "nothing was evaluated"


def test_a_quantized_student_resumes_in_its_own_folder(
    stages: Stages, taught: tuple[Any, ...]
) -> None:
    """The teacher's weights are in no checkpoint of the student's."""
    folder = stages.folder / "quantized-student"
    flags = (*ODB, *taught, "--save", folder, "--save-interval", "2")
    whole = stages("train", *flags, "--load", stages.quantized(INT8), "--finetune")
    assert falls(whole)
    resumed = stages("train", *flags, "--load", folder, "--ckpt-step", "2")
    assert resumed.losses == whole.losses[2:]
    assert "restored from the checkpoint and the student of" in resumed.replicas[0].output
    own = stages.folder / "own-student"
    same = ("--load", own, "--save", own, "--save-interval", "4")
    assert falls(stages("train", *ODB, *taught, *same))  # holds nothing yet


# --- refusals and the page -------------------------------------------------------------------

REFUSED: tuple[tuple[str, Callable[[Stages], tuple[Any, ...]], str], ...] = (
    ("train", lambda s: ("--load", s.trained("float")), "nothing for ModelOpt to do"),
    ("train", lambda s: ("--load", s.folder / "typo"), "and the model would have random weights"),
    (
        "train",
        lambda s: ("--load", s.quantized(INT8), *TENSOR),
        "was quantized with --tensor-model-parallel-size 1, and this run has 2",
    ),
    (
        "train",
        lambda s: ("--modelopt-teacher", s.trained("teacher", *BIG), *TENSOR[:2]),
        "the teacher's vocabulary has 320 entries after padding, the student's 384",
    ),
    ("train", lambda s: ("--modelopt-teacher", s.quantized(INT8)), "give a plain GPT"),
    (
        "quantize",
        lambda s: ("--load", s.quantized(INT8), "--save", s.folder / "twice"),
        "is quantized already",
    ),
    ("quantize", lambda s: ("--load", s.trained("float")), "give --load and --save"),
    (
        "quantize",
        lambda s: (
            *("--load", s.trained("float"), "--save", s.folder / "x"),
            *("--odb-pad-to", "budget"),
        ),
        "padding would count in the quantizers' ranges",
    ),
)


@pytest.mark.parametrize(
    ("stage", "flags", "message"), REFUSED, ids=[row[2][:40] for row in REFUSED]
)
def test_refused(
    stages: Stages, stage: str, flags: Callable[[Stages], tuple[Any, ...]], message: str
) -> None:
    """In one line, before a step is run."""
    assert message in stages.refused(stage, *ODB, *flags(stages))


def test_a_plain_script_refuses_a_converted_model(stages: Stages) -> None:
    errors = stages._megatron.refused(*stages._data, *ODB, "--load", stages.quantized(INT8))
    assert all("is a model that ModelOpt has converted" in error for error in errors)


SMALLER = {"512": "16", "64000": "32", "16384": "96", "500": "2"}


def test_the_commands_of_the_page(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    """One after the other, each with smaller numbers; `$FLAGS` gives them no length."""
    programs = []
    for words in commands(README.parent / "docs" / "models.md"):
        if "$FLAGS" not in words:
            continue
        at = words.index("$FLAGS")
        program, given = words[at - 1], words[at + 1 :]
        folders = {"--load", "--save", "--modelopt-teacher"}
        flags = [
            tmp_path / word if before in folders else SMALLER.get(word, word)
            for before, word in pairwise(["", *given])
        ]
        stage = Path(program).stem if program.endswith(".py") else ""
        programs.append(stage or program)
        megatron.train(*data_flags, "--eval-iters", "0", *flags, stage=stage)
    assert programs == ["odb_megatron.megatron.pretrain", "quantize", "train", "train"]
    assert (tmp_path / "student" / "latest_checkpointed_iteration.txt").read_text() == "4"
