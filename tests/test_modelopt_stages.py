"""The scripts of examples/modelopt on a CPU: quantize, train (with a teacher), resume, export.

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
PADDED = (
    "--odb-pad-to",
    "budget",
)
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

    def quantized_in_torch(self) -> Path:
        """A model quantized in format torch, of one trained in it."""
        form = ("--ckpt-format", "torch")
        return self.quantized(INT8, *form, of=self.trained("float-torch", *form))

    def quantized(self, config: str, *flags: Any, of: Path | None = None) -> Path:
        """Quantize a trained model; return the folder of the checkpoint."""
        of = of or self.trained("float")
        folder = self.folder / "-".join((of.name, config, *flags)).replace("/", "_")
        if not folder.exists():
            run = self.calibrated(folder, config, *flags, of=of)
            assert "calibrated on 16 samples, " in run.replicas[-1].output
        return folder

    def calibrated(self, folder: Path, config: str, *flags: Any, of: Path) -> Run:
        """As `quantized`, return the run."""
        given = ("--train-samples", "16", "--load", of, "--save", folder)
        return self("quantize", *ODB, *given, "--modelopt-quant-cfg", config, *flags)


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
    padded = stages("train", *start)
    wide = stages("train", *WIDE, *start)
    plain = stages("", *ODB, "--load", stages.trained("float"), "--finetune")
    assert falls(packed)
    assert packed.losses[0] == pytest.approx(padded.losses[0], abs=1e-4)
    assert close(packed, padded)
    assert close(packed, wide)
    counts = [[step.record["num_micro_batches"] for step in run.steps] for run in (packed, wide)]
    assert max(counts[0]) > 1 == max(counts[1]), "the budgets must pack differently"
    assert abs(packed.losses[0] - plain.losses[0]) > 1e-5, "nothing was quantized"
    assert abs(packed.losses[0] - plain.losses[0]) < 0.05


def test_ranges_do_not_depend_on_packing(stages: Stages) -> None:
    """The largest value of all tokens is the same, whatever micro-batch each is in."""
    start = ("--train-samples", "8", "--lr-decay-samples", "8", "--finetune", "--load")
    first = stages("train", *ODB, *start, stages.quantized(INT8))
    other = stages.folder / "other"
    wide = ("--odb-token-budget", "512", "--global-batch-size", "16")
    stages.calibrated(other, INT8, *wide, of=stages.trained("float"))
    assert close(first, stages("train", *ODB, *start, other), tolerance=1e-6)


def test_idle_micro_batches_are_left_out(stages: Stages) -> None:
    """17 samples: in the last step one replica has none, and runs none."""
    folder = stages.folder / "uneven"
    flags = ("--train-samples", "17")
    run = stages.calibrated(folder, INT8, *flags, of=stages.trained("float"))
    said = [_calibration(outcome.output) for outcome in run.replicas]
    assert "calibrated on 17 samples" in said[-1]
    assert "left out 1 idle ones" in said[-1]


def _calibration(output: str) -> str:
    return "".join(line for line in output.splitlines() if ": calibrated on " in line)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_resume(stages: Stages, form: str) -> None:
    folder = stages.folder / f"resumed-{form}"
    flags = (*ODB, "--ckpt-format", form, "--save", folder, "--save-interval", "2")
    of = stages.trained(f"float-{form}", "--ckpt-format", form)
    load = stages.quantized(INT8, "--ckpt-format", form, of=of)
    whole = stages("train", *flags, "--load", load, "--finetune")
    resumed = stages("train", *flags, "--load", folder, "--ckpt-step", "2")
    assert resumed.losses == whole.losses[2:]
    assert [step.ids for step in resumed.steps] == [step.ids for step in whole.steps[2:]]
    assert "model restored from the checkpoint" in resumed.replicas[0].output


def test_the_format_is_that_of_the_files(stages: Stages) -> None:
    """As Megatron goes by them, `--ckpt-format` says how to save."""
    load = stages.quantized_in_torch()
    given = stages("train", *ODB, "--load", load, "--finetune", "--ckpt-format", "torch")
    other = stages("train", *ODB, "--load", load, "--finetune", "--ckpt-format", "torch_dist")
    assert "model restored from the checkpoint" in other.replicas[0].output
    assert other.losses == given.losses


def test_pipeline(stages: Stages) -> None:
    """Quantized and trained in two stages, or trained by replicas after that."""
    of = stages.trained("teacher", *BIG)
    start = ("--finetune", "--load", stages.quantized(INT8, *BIG, *PIPELINE, of=of), *BIG)
    staged = stages("train", *ODB, *start, *PIPELINE)
    assert close(staged, stages("train", *ODB, *start))
    assert close(staged, stages("train", *start))


def test_tensor_parallel(stages: Stages) -> None:
    flags = (*ODB, "--finetune", "--load")
    replicated = stages("train", *flags, stages.quantized(FP8))
    assert close(stages("train", *flags, stages.quantized(FP8), *SEQUENCE), replicated)
    own = stages("train", *flags, stages.quantized(INT8, *TENSOR), *TENSOR)
    assert close(own, stages("train", *flags, stages.quantized(INT8)))


def test_ranges_of_channels_stay_with_their_tensor_parallel_size(stages: Stages) -> None:
    said = stages.refused("train", *ODB, "--load", stages.quantized(INT8), *TENSOR)
    assert "was quantized with --tensor-model-parallel-size 1, and this run has 2" in said


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


def test_a_quantized_student_resumes(stages: Stages, taught: tuple[Any, ...]) -> None:
    """The teacher's weights are in no checkpoint of the student's."""
    folder = stages.folder / "quantized-student"
    flags = (*ODB, *taught, "--save", folder, "--save-interval", "2")
    whole = stages("train", *flags, "--load", stages.quantized(INT8), "--finetune")
    assert falls(whole)
    resumed = stages("train", *flags, "--load", folder, "--ckpt-step", "2")
    assert resumed.losses == whole.losses[2:]
    assert "restored from the checkpoint and student of" in resumed.replicas[0].output
    alone = stages("train", *ODB, "--load", folder, "--finetune")
    assert falls(alone)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_student_starts_in_its_own_folder(
    stages: Stages, taught: tuple[Any, ...], form: str
) -> None:
    """Which holds nothing at first; a plain script takes it when it has been exported."""
    folder = stages.folder / f"student-{form}"
    own = ("--load", folder, "--save", folder, "--save-interval", "4", "--ckpt-format", form)
    assert falls(stages("train", *ODB, *taught, *own))
    errors = stages._megatron.refused(*stages._data, *ODB, "--load", folder)
    assert all("is a model that ModelOpt has converted" in error for error in errors)
    plain = stages.folder / f"plain-{form}"
    stages("export", "--load", folder, "--save", plain, "--ckpt-format", form)
    assert falls(stages("", *ODB, "--load", plain, "--finetune", "--ckpt-format", form))


# --- export ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [(), ("--modelopt-fold-weights",)])
def test_export(stages: Stages, fold: tuple[str, ...]) -> None:
    """A plain script loads it, and `prune.py` or a distillation as a teacher can."""
    import yaml

    folder = stages.folder / f"plain{len(fold)}"
    run = stages("export", "--load", stages.quantized(INT8), "--save", folder, *fold)
    assert "model restored from the checkpoint" in run.replicas[0].output
    assert not (folder / "release" / "modelopt_state").exists()
    shape = yaml.safe_load((folder / "model_config.yaml").read_text())
    assert (shape["num_layers"], shape["hidden_size"], shape["swiglu"]) == (1, 32, True)
    exported = stages("", *ODB, "--load", folder, "--finetune")
    plain = stages("", *ODB, "--load", stages.trained("float"), "--finetune")
    if fold:
        assert 1e-6 < abs(exported.losses[0] - plain.losses[0]) < 0.05
    else:
        assert exported.losses == plain.losses
    student = stages("train", *ODB, "--modelopt-teacher", folder)
    assert falls(student)


# --- the page --------------------------------------------------------------------------------

SMALLER = {"512": "16", "64000": "32", "16384": "96", "500": "2"}


def test_the_commands_of_the_page(
    megatron: Megatron, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    """One after the other, each with smaller numbers; `$FLAGS` gives them no length."""
    page = README.parent / "docs" / "modelopt.md"
    programs = []
    for words in commands(page):
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
    assert programs[0] == "odb_megatron.megatron.pretrain"
    assert programs[1:] == ["quantize", "train", "export", "train"]
    assert (tmp_path / "plain" / "model_config.yaml").is_file()
    assert (tmp_path / "student" / "latest_checkpointed_iteration.txt").read_text() == "4"


# --- refusals --------------------------------------------------------------------------------

TORCH = "is a model that ModelOpt has converted, and this script would load its weights"

REFUSED: tuple[tuple[str, Callable[[Stages], tuple[Any, ...]], str], ...] = (
    ("train", lambda s: (*ODB, "--load", s.trained("float")), "nothing for ModelOpt to do"),
    (
        "",
        lambda s: (*ODB, "--load", s.quantized(INT8)),
        "is a model that ModelOpt has converted, and this script would load its weights alone",
    ),
    ("", lambda s: (*ODB, "--load", s.quantized_in_torch(), "--ckpt-format", "torch"), TORCH),
    ("", lambda s: (*ODB, "--load", s.quantized_in_torch()), TORCH),
    (
        "quantize",
        lambda s: (*ODB, "--load", s.folder / "typo", "--save", s.folder / "x"),
        "typo is no folder, and the model would have random weights: give the folder that --save",
    ),
    (
        "quantize",
        lambda s: (*ODB, "--load", s.folder, "--save", s.folder / "x"),
        "holds no checkpoint (no latest_checkpointed_iteration.txt), and the model would have",
    ),
    (
        "quantize",
        lambda s: (
            *(*ODB, "--load", s.trained("float"), "--save", s.folder / "x"),
            *("--ckpt-step", "3"),
        ),
        "holds no iter_0000003, which --ckpt-step names; it holds iter_0000004: give one that",
    ),
    (
        "export",
        lambda s: ("--load", s.folder / "typo", "--save", s.folder / "x"),
        "typo is no folder, and the model would have random weights",
    ),
    (
        "train",
        lambda s: (*ODB, "--load", s.folder / "typo"),
        "--load {folder}/typo is no folder, and the model would have random weights",
    ),
    (
        "train",
        lambda s: (
            *(*ODB, "--modelopt-teacher", s.trained("teacher", *BIG)),
            *("--load", s.folder / "typo", "--finetune"),
        ),
        "--load {folder}/typo is no folder, and the model would have random weights",
    ),
    (
        "train",
        lambda s: (
            *(*ODB, "--modelopt-teacher", s.trained("teacher", *BIG)),
            *("--pretrained-checkpoint", s.folder / "typo"),
        ),
        "--pretrained-checkpoint {folder}/typo is no folder, and the model would have random",
    ),
    (
        "train",
        lambda s: (*ODB, "--modelopt-teacher", s.folder / "typo"),
        "--modelopt-teacher {folder}/typo is no folder, and the model would have random weights",
    ),
    (
        "quantize",
        lambda s: (*ODB, "--load", s.quantized(INT8), "--save", s.folder / "twice"),
        "is quantized already",
    ),
    (
        "quantize",
        lambda s: ("--load", s.trained("float"), "--save", s.folder / "x"),
        "calibration runs on packed micro-batches: add --odb",
    ),
    (
        "quantize",
        lambda s: (*ODB, "--load", s.trained("float")),
        "this stage reads a model and writes another: give --save DIR",
    ),
    (
        "quantize",
        lambda s: (*ODB, "--load", s.trained("float"), "--save", s.trained("float")),
        "give --save another folder",
    ),
    (
        "quantize",
        lambda s: (
            *(*ODB, "--load", s.trained("float"), "--save", s.folder / "x"),
            *("--train-samples", "7"),
        ),
        "--train-samples 7 is below --global-batch-size 8",
    ),
    (
        "quantize",
        lambda s: (*ODB, "--load", s.trained("float"), "--save", s.folder / "x", *PADDED),
        "padding would count in the quantizers' ranges",
    ),
    (
        "train",
        lambda s: (*ODB, "--modelopt-teacher", s.folder),
        "holds no checkpoint",
    ),
    (
        "train",
        lambda s: (*ODB, "--modelopt-teacher", s.quantized(INT8)),
        "is a model that ModelOpt has converted: give the one it was made of",
    ),
    (
        "train",
        lambda s: (*ODB, "--modelopt-teacher", s.trained("teacher", *BIG), *TENSOR[:2]),
        "the teacher's vocabulary has 320 entries after padding, the student's 384",
    ),
)


@pytest.mark.parametrize(
    ("stage", "flags", "message"), REFUSED, ids=[row[2][:40] for row in REFUSED]
)
def test_refused(
    stages: Stages, stage: str, flags: Callable[[Stages], tuple[Any, ...]], message: str
) -> None:
    """In one line, before a step is run."""
    given = flags(stages)
    message = message.replace("{folder}", str(stages.folder))
    if stage:
        assert message in stages.refused(stage, *given)
    else:
        errors = stages._megatron.refused(*stages._data, *given)
        assert all(message in error for error in errors)
