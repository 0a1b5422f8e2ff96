"""`python -m odb_megatron.run` and `with_odb`: a pretrain script of somebody else's, switched on.

What real scripts do with it is in test_patch_checkout.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from odb_megatron.megatron.pretrain import HostScript, with_odb

ROOT = Path(__file__).resolve().parents[1]

TRAINING = """
def pretrain(
    cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func,
    model_provider=None, store=None
):
    raise AssertionError("nothing should train")
"""


def _checkout(root: Path, script: str) -> Path:
    """A folder that looks like a checkout to an import."""
    package = root / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from megatron.training.training import pretrain\n")
    (package / "training.py").write_text(TRAINING)
    (package / "arguments.py").write_text("def parse_and_validate_args(): pass\n")
    (root / "train.py").write_text(script)
    return root / "train.py"


def _python(*command: str, path: str = "", cwd: Path | None = None) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=cwd,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


# --- the runner ------------------------------------------------------------------------------


def test_without_the_flag_a_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    script = _checkout(
        tmp_path,
        "import sys\nprint(__name__, __file__, sys.argv, sys.path[0])\n"
        "assert 'odb_megatron.megatron.setup' not in sys.modules\nsys.exit(7)\n",
    )
    flags = ["--lr", "1e-3", "--help"]
    alone = _python(str(script), *flags, cwd=tmp_path)
    assert _python("-m", "odb_megatron.run", str(script), *flags, cwd=tmp_path) == alone
    assert alone[0] == 7


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--odb", "train.py"], "usage: python -m odb_megatron.run SCRIPT"),
        (["nowhere.py", "--odb"], "no such script: nowhere.py"),
        (["train.py", "--odb-cost", "linear=1"], "--odb-cost would do nothing without --odb"),
        (
            ["train.py", "--odb"],
            "train.py does not import parse_and_validate_args and pretrain and",
        ),
    ],
)
def test_refused_in_one_line(tmp_path: Path, arguments: list[str], text: str) -> None:
    _checkout(tmp_path, "import megatron.training")
    code, _, error = _python("-m", "odb_megatron.run", *arguments, cwd=tmp_path)
    assert code == 2, error
    assert error.startswith("odb: error: ")
    assert text in error
    assert len(error.splitlines()) == 1


def test_the_lines_of_a_patch_are_put_into_a_script(tmp_path: Path) -> None:
    """Which is the main module, as data-loader workers look for it."""
    script = _checkout(
        tmp_path,
        "import sys\nfrom megatron.training import pretrain\n"
        "from megatron.training.arguments import parse_and_validate_args\n"
        "if __name__ == '__main__':\n    print(sys.modules['__main__'].pretrain.__self__)\n"
        "    pretrain(None, None, None)\n",
    )
    (tmp_path / "megatron" / "core").mkdir()
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("__version__ = '0.19.2'\n")
    status, output, error = _python("-m", "odb_megatron.run", str(script), "--odb", cwd=tmp_path)
    assert status == 2
    assert "HostScript" in output
    assert "pretrain() was called with other arguments: missing" in error


@pytest.mark.megatron
def test_another_megatron_than_the_scripts_is_refused(tmp_path: Path) -> None:
    """As under a launcher that imported Megatron before."""
    script = _checkout(tmp_path / "own", "")
    _checkout(tmp_path / "other", "")
    code = f"import megatron.training; from odb_megatron.run import main; main([{str(script)!r}, "
    status, _, error = _python("-c", f"{code}'--odb'])", path=str(tmp_path / "other"), cwd=tmp_path)
    assert status == 2
    assert f"megatron.training was imported from {tmp_path}/other/megatron/training" in error
    assert f"put {tmp_path}/own first on PYTHONPATH" in error


# --- what a patched script calls -------------------------------------------------------------


def test_with_odb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--lr", "1"])
    assert with_odb(_of_019, _parse) == (_of_019, _parse)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--lr", "1", "--odb"])
    pretrain, parse = with_odb(_of_019, _parse)
    assert isinstance(pretrain.__self__, HostScript)  # type: ignore[attr-defined]
    assert parse.__self__ is pretrain.__self__  # type: ignore[attr-defined]
    for flag in ("--odb-cost", "--odb-cost=linear=1", "--no-odb-dry-run"):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--odbx", flag, "linear=1"])
        with pytest.raises(SystemExit):
            with_odb(_of_019, _parse)
        text = f"{flag.partition('=')[0]} would do nothing without --odb"
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "patch", sorted((ROOT / "patches").glob("*/*.patch")), ids=lambda patch: patch.parent.name
)
def test_a_patch_inserts_five_lines(patch: Path, tmp_path: Path) -> None:
    lines = [line for line in patch.read_text().splitlines() if line[:1] in " +"][1:]
    kept = [line[1:] for line in lines if line[0] == " "]
    code = "\n".join(line[1:] for line in lines if line[0] == "+")
    assert len(lines) - len(kept) == 5
    compile(f"if True:\n{code}", str(patch), "exec")
    assert "from odb_megatron.megatron.pretrain import with_odb" in code
    (tmp_path / "pretrain_gpt.py").write_text("\n".join(kept) + "\n")
    subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=tmp_path, check=True)
    assert code in (tmp_path / "pretrain_gpt.py").read_text()


# --- the call of pretrain() ------------------------------------------------------------------


def _parse() -> None:
    raise AssertionError("the script's own parser")


def _of_019(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    model_provider: Any = None,
    non_loss_data_func: Any = None,
    store: Any = None,
    skip_model_parallel_init: bool = False,
) -> str:
    return "trained"


def _of_018(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    store: Any = None,
) -> str:
    return "trained"


def _other(config: Any, model: Any) -> None:
    raise AssertionError("not known")


def _named(name: str, kind: Any) -> Any:
    module, kind.__qualname__ = name.rsplit(".", 1)
    kind.__module__ = module
    return kind


GPT = _named("megatron.training.models.gpt.GPTModelConfig", type("GPT", (), {}))
HYBRID = _named("megatron.training.models.hybrid.HybridModelConfig", type("Hybrid", (), {}))
MODELOPT = _named("megatron.training.models.gpt.ModelOptModelConfig", type("Opt", (), {}))
HYBRID_BUILDER = _named("hybrid_builders.hybrid_builder", lambda: None)
GPT_BUILDER = _named("gpt_builders.gpt_builder", lambda: None)


def _with(model: Any, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (Namespace(model=model), "data", "type", "step"), more


@pytest.mark.parametrize(
    ("pretrain", "call", "text"),
    [
        (_of_019, ((), {}), "pretrain() was called with other arguments: missing a required"),
        (_other, ((1, 2), {}), "this Megatron's pretrain() takes (config, model, ...)"),
        (_of_019, _with(GPT(), model_provider=print), "was called with model_provider, which ODB"),
        (_of_019, _with(GPT(), non_loss_data_func=print), "with non_loss_data_func, which ODB"),
        (_of_019, _with(GPT(), skip_model_parallel_init=True), "skip_model_parallel_init, which"),
        (_of_019, _with(None), "was called with no model configuration, expected megatron."),
        (
            _of_019,
            _with(HYBRID()),
            "hybrid.HybridModelConfig, expected megatron.training.models.gpt.GPTModelConfig "
            "(the layers of a hybrid model are",
        ),
        (_of_019, _with(MODELOPT()), "(a ModelOpt model's losses come from"),
        (
            _of_018,
            (("c", "d", partial(print, HYBRID_BUILDER), "t", "s"), {}),
            "hybrid_builders.hybrid_builder, expected gpt_builders.gpt_builder (the layers of",
        ),
        # What these two are asked for next is that the script has parsed: their models will do.
        (_of_018, (("c", "d", partial(print, GPT_BUILDER), "t", "s"), {}), "has not called"),
        (  # dev
            _of_019,
            _with(None, model_provider=partial(print, GPT_BUILDER)),
            "has not called megatron.training.arguments.parse_and_validate_args before",
        ),
        (_of_019, _with(GPT(), store="s"), "has not called"),
    ],
)
def test_a_call_that_odb_cannot_stand_in_for(
    capsys: pytest.CaptureFixture[str], pretrain: Any, call: Any, text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        HostScript(pretrain).pretrain(*call[0], **call[1])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1


def test_a_script_that_ignores_unknown_flags_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        HostScript(_of_019).parse_and_validate_args(ignore_unknown_args=True)
    assert "ignores flags that it does not know" in capsys.readouterr().err
