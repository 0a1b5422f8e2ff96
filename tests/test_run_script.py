"""`python -m odb_megatron.run` and `with_odb`: a pretrain script of somebody else's, switched on.

Most run on a made-up `megatron.training` with one `pretrain()` of each form; what the real ones do
is in test_patch_checkout.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from odb_megatron.megatron import host_script
from odb_megatron.megatron.compat_pretrain import PretrainForm, pretrain_form
from odb_megatron.megatron.host_script import HostScript, wants_odb, with_odb

ROOT = Path(__file__).resolve().parents[1]

TRAINING = """
def pretrain(
    cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, store=None
):
    raise AssertionError("nothing should train")
"""
SCRIPT = """
import sys
from megatron.training import pretrain
print(__name__, __file__, sys.argv, sys.path[0], sorted(m for m in sys.modules if m[:4] == "odb_"))
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
    script = _checkout(tmp_path, SCRIPT)
    flags = ["--lr", "1e-3", "--help"]
    alone = _python(str(script), *flags, cwd=tmp_path)
    run = _python("-m", "odb_megatron.run", str(script), *flags, cwd=tmp_path)
    assert alone[0] == run[0] == 0, run
    seen = run[1].partition(" [")
    assert seen[0] == alone[1].partition(" [")[0]  # __main__ and its file
    words, modules = run[1].rstrip().rsplit(" [", 1)
    assert words == alone[1].rstrip().rsplit(" [", 1)[0]
    assert "odb_megatron.megatron.setup" not in modules, "nothing of ODB was made ready"


def test_what_the_script_ends_with_is_kept(tmp_path: Path) -> None:
    script = _checkout(tmp_path, "import sys; sys.exit(7)")
    assert _python("-m", "odb_megatron.run", str(script))[0] == 7


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "usage: python -m odb_megatron.run SCRIPT"),
        (["--odb", "train.py"], "usage: python -m odb_megatron.run SCRIPT"),
        (["nowhere.py", "--odb"], "no such script: nowhere.py"),
        (["train.py", "--odb-cost", "linear=1"], "--odb-cost would do nothing without --odb"),
        (["train.py", "--odb"], "train.py ended without a call of megatron.training.pretrain()"),
    ],
)
def test_refused_in_one_line(tmp_path: Path, arguments: list[str], text: str) -> None:
    _checkout(tmp_path, "import megatron.training")
    code, _, error = _python("-m", "odb_megatron.run", *arguments, cwd=tmp_path)
    assert code == 2, error
    assert error.startswith("odb: error: ")
    assert text in error
    assert len(error.splitlines()) == 1


def test_a_call_that_is_not_known_ends_before_training(tmp_path: Path) -> None:
    script = _checkout(
        tmp_path, "from megatron.training import pretrain\npretrain(None, None, None)\n"
    )
    code, _, error = _python("-m", "odb_megatron.run", str(script), "--odb", cwd=tmp_path)
    assert code == 2
    assert error.startswith(
        "odb: error: --odb: pretrain() was called with other arguments: missing"
    )


def test_another_megatron_than_the_scripts_is_refused(tmp_path: Path) -> None:
    """As under a launcher that imported Megatron before."""
    script = _checkout(tmp_path / "own", SCRIPT)
    _checkout(tmp_path / "other", SCRIPT)
    code = f"""
import sys
import megatron.training
from odb_megatron.run import main
main([{str(script)!r}, "--odb"])
"""
    status, _, error = _python("-c", code, path=str(tmp_path / "other"), cwd=tmp_path)
    assert status == 2
    assert f"megatron.training was imported from {tmp_path}/other/megatron/training" in error
    assert f"put {tmp_path}/own first on PYTHONPATH" in error


def test_no_megatron_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    code = (
        "import sys\n"
        "sys.modules['megatron'] = None\n"
        "from odb_megatron.run import main\n"
        "main(['train.py', '--odb'])\n"
    )
    status, _, error = _python("-c", code, cwd=tmp_path)
    assert status == 2
    assert "megatron.training cannot be imported" in error


def test_what_was_replaced_is_put_back(tmp_path: Path) -> None:
    script = _checkout(tmp_path, "from megatron.training import pretrain\n")
    code = f"""
from odb_megatron.run import main
import megatron.training as training, megatron.training.arguments as arguments
before = training.pretrain, training.training.pretrain, arguments.parse_and_validate_args
try:
    main([{str(script)!r}, "--odb"])
except SystemExit as end:
    print(end.code, before == (
        training.pretrain, training.training.pretrain, arguments.parse_and_validate_args
    ))
"""
    assert _python("-c", code, path=str(tmp_path), cwd=tmp_path)[1] == "2 True\n"


# --- what a patched script calls -------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], False),
        (["--lr", "1"], False),
        (["--odb"], True),
        (["--odb", "--odb-cost", "linear=1"], True),
        (["--odbx"], False),
    ],
)
def test_wants_odb(flags: list[str], wanted: bool) -> None:
    assert wants_odb(flags) is wanted


@pytest.mark.parametrize("flag", ["--odb-cost", "--odb-cost=linear=1", "--odb-max-patches"])
def test_flags_without_odb_are_refused(flag: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{flag.partition('=')[0]} would do nothing without --odb"
    ):
        wants_odb(["--lr", "1", flag, "linear=1"])


def test_with_odb_gives_back_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--lr", "1"])
    assert with_odb(_config_form, _parse) == (_config_form, _parse)
    assert with_odb(_parsing_form) == (_parsing_form, None)


def test_with_odb_replaces_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--lr", "1", "--odb"])
    pretrain, parse = with_odb(_config_form, _parse)
    assert isinstance(pretrain.__self__, HostScript)  # type: ignore[attr-defined]
    assert parse is not None
    assert parse.__self__ is pretrain.__self__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "patch", sorted((ROOT / "patches").glob("*/*.patch")), ids=lambda patch: patch.parent.name
)
def test_a_patch_inserts_what_there_is(patch: Path, tmp_path: Path) -> None:
    lines = [line for line in patch.read_text().splitlines() if line[:1] in " +"][1:]
    kept = [line[1:] for line in lines if line[0] == " "]
    assert len(lines) - len(kept) == 5
    assert "\n-" not in patch.read_text().replace("\n--- ", "")
    code = "\n".join(line[1:] for line in lines if line[0] == "+")
    compile(f"if True:\n{code}", str(patch), "exec")
    assert "from odb_megatron.megatron.host_script import with_odb" in code
    (tmp_path / "pretrain_gpt.py").write_text("\n".join(kept) + "\n")
    subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=tmp_path, check=True)
    assert code in (tmp_path / "pretrain_gpt.py").read_text()


def test_with_odb_leaves_what_was_replaced_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a patched script that `odb_megatron.run` runs."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--odb"])
    first = with_odb(_config_form, _parse)
    assert with_odb(*first) == first
    assert pretrain_form(first[0]) is PretrainForm.MODEL_CONFIG
    older = with_odb(_parsing_form)
    assert with_odb(older[0]) == (older[0], None)


def test_with_odb_refuses_flags_that_do_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--odb-cost", "linear=1"])
    with pytest.raises(SystemExit) as ended:
        with_odb(_config_form, _parse)
    assert ended.value.code == 2
    assert "--odb-cost would do nothing without --odb" in capsys.readouterr().err


# --- the call of pretrain() ------------------------------------------------------------------

CALLS: list[dict[str, Any]] = []
ARGS = Namespace(rank=0)


def _parse() -> None:
    raise AssertionError("the script's own parser")


def _config_form(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    model_provider: Any = None,
    non_loss_data_func: Any = None,
    store: Any = None,
    get_embedding_ranks: Any = None,
    skip_model_parallel_init: bool = False,
) -> str:
    CALLS.append(locals())
    return "trained"


def _provider_form(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    store: Any = None,
) -> str:
    CALLS.append(locals())
    return "trained"


def _parsing_form(
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    extra_args_provider: Any = None,
    args_defaults: Any = None,
    store: Any = None,
) -> str:
    CALLS.append(locals())
    return "trained"


def _other_form(config: Any, model: Any) -> None:
    raise AssertionError("not known")


class GPTModelConfig:
    pass


class HybridModelConfig:
    pass


class ModelOptModelConfig(GPTModelConfig):
    pass


GPTModelConfig.__module__ = ModelOptModelConfig.__module__ = "megatron.training.models.gpt"
HybridModelConfig.__module__ = "megatron.training.models.hybrid"


def gpt_builder() -> None:
    """Stands for the checkout's."""


def hybrid_builder() -> None:
    """Stands for the checkout's."""


gpt_builder.__module__, hybrid_builder.__module__ = "gpt_builders", "hybrid_builders"


class _Run:
    """Stands for `OdbRun`."""

    datasets_provider, forward_step = "ODB's data sets", "ODB's forward step"
    prepared: list[Any]

    def __init__(self, args: Namespace) -> None:
        assert args is ARGS
        self.prepared = []

    def prepare_model(self, config: Any) -> None:
        self.prepared.append(config)

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Stand-ins for what needs Megatron; returns what was parsed with."""
    seen: list[tuple[Any, Any]] = []
    CALLS.clear()
    modules = {
        "paths": SimpleNamespace(require_paths=lambda args: None),
        "run": SimpleNamespace(OdbRun=_Run),
        "setup": SimpleNamespace(
            parse_and_validate_args=lambda *given: (seen.append(given), ARGS)[1]
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"odb_megatron.megatron.{name}", module)
    monkeypatch.setattr(host_script, "already_parsed", _Run)
    monkeypatch.setattr(
        host_script, "gpt_model_provider", lambda args, prepare: ("ODB's model", args, prepare)
    )
    return seen


def test_the_configuration_is_prepared_and_the_rest_passed_on(
    parsed: list[tuple[Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    script = HostScript(_config_form)
    assert script.parse_and_validate_args("extra", args_defaults={"a": 1}) is ARGS  # type: ignore[arg-type]
    config = Namespace(model=GPTModelConfig())
    assert script.pretrain(config, "data", "type", "step", store="s", get_embedding_ranks="f") == (
        "trained"
    )
    assert parsed == [({"a": 1}, "extra")]
    (call,) = CALLS
    assert call["train_valid_test_dataset_provider"] == "ODB's data sets"
    assert call["forward_step_func"] == "ODB's forward step"
    assert (call["cfg_container"], call["model_type"]) == (config, "type")
    assert (call["store"], call["get_embedding_ranks"]) == ("s", "f")
    assert "own data sets, forward step and layer spec" in capsys.readouterr().out
    assert script.has_trained


def test_a_model_provider_is_replaced(parsed: list[tuple[Any, Any]]) -> None:
    script = HostScript(_provider_form)
    script.parse_and_validate_args()
    own = partial(lambda builder: None, gpt_builder)
    script.pretrain("config", "data", own, "type", forward_step_func="step", store=None)
    assert CALLS[0]["model_provider"][:2] == ("ODB's model", ARGS)
    assert CALLS[0]["forward_step_func"] == "ODB's forward step"


def test_a_pretrain_that_parses_gets_what_was_parsed(parsed: list[tuple[Any, Any]]) -> None:
    script = HostScript(_parsing_form)
    own = partial(lambda builder: None, gpt_builder)
    extra: Callable[[Any], Any] = lambda parser: parser  # noqa: E731
    script.pretrain("data", own, "type", "step", extra_args_provider=extra, args_defaults={"a": 1})
    assert parsed == [({"a": 1}, extra)]
    assert CALLS[0]["model_provider"][:2] == ("ODB's model", ARGS)
    assert CALLS[0]["train_valid_test_dataset_provider"] == "ODB's data sets"


@pytest.mark.parametrize("pretrain", [_config_form, _provider_form, _parsing_form])
def test_a_script_that_gives_odbs_data_sets_itself_is_left_as_it_is(
    parsed: list[tuple[Any, Any]], pretrain: Callable[..., Any]
) -> None:
    def provider() -> None:
        raise AssertionError("called by Megatron only")

    provider.__module__ = "odb_megatron.megatron.run"
    names = list(signature(pretrain).parameters)
    given = {name: name for name in names if name != "skip_model_parallel_init"}
    given["train_valid_test_dataset_provider"] = provider  # type: ignore[assignment]
    script = HostScript(pretrain)
    assert script.pretrain(**given) == "trained"
    assert script.has_trained
    assert {name: CALLS[0][name] for name in given} == given
    assert parsed == []


def test_the_data_sets_of_a_run_are_known_by_their_module() -> None:
    run = importlib.util.find_spec(host_script._RUN)
    assert run is not None
    assert "def _make_provider" in Path(str(run.origin)).read_text()


def _config(model: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (Namespace(model=model), "data", "type", "step"), {}


@pytest.mark.parametrize(
    ("pretrain", "call", "text"),
    [
        (_config_form, ((), {}), "pretrain() was called with other arguments: missing a required"),
        (_other_form, ((1, 2), {}), "this Megatron's pretrain() takes (config, model, ...)"),
        (
            _config_form,
            ((Namespace(model=GPTModelConfig()), "d", "t", "s", "own model"), {}),
            "was called with model_provider, which ODB would drop",
        ),
        (
            _config_form,
            ((Namespace(model=GPTModelConfig()), "d", "t", "s"), {"non_loss_data_func": print}),
            "was called with non_loss_data_func, which ODB would drop",
        ),
        (
            _config_form,
            (
                (Namespace(model=GPTModelConfig()), "d", "t", "s"),
                {"skip_model_parallel_init": True},
            ),
            "was called with skip_model_parallel_init, which ODB would drop",
        ),
        (_config_form, _config(None), "was called with no model configuration, expected megatron."),
        (
            _config_form,
            _config(HybridModelConfig()),
            "hybrid.HybridModelConfig, expected megatron.training.models.gpt.GPTModelConfig "
            "(the layers of a hybrid model are",
        ),
        (_config_form, _config(ModelOptModelConfig()), "(a ModelOpt model's losses come from"),
        (
            _provider_form,
            (("c", "d", partial(print, hybrid_builder), "t", "s"), {}),
            "hybrid_builders.hybrid_builder, expected gpt_builders.gpt_builder (the layers of",
        ),
        (
            _parsing_form,
            (("d", _parse, "t", "s"), {}),
            "_parse, expected gpt_builders.gpt_builder: use pretrain_gpt.py of a Megatron-LM",
        ),
    ],
)
def test_a_call_that_odb_cannot_stand_in_for(
    parsed: list[tuple[Any, Any]],
    capsys: pytest.CaptureFixture[str],
    pretrain: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    text: str,
) -> None:
    script = HostScript(pretrain)
    script.parse_and_validate_args()
    with pytest.raises(SystemExit) as ended:
        script.pretrain(*call[0], **call[1])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1
    assert CALLS == []


def test_a_script_that_parses_by_itself_is_refused(
    parsed: list[tuple[Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        HostScript(_config_form).pretrain(Namespace(model=GPTModelConfig()), "d", "t", "s")
    assert "has not called megatron.training.arguments.parse_and_validate_args" in (
        capsys.readouterr().err
    )


def test_a_script_that_ignores_unknown_flags_is_refused(
    parsed: list[tuple[Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        HostScript(_config_form).parse_and_validate_args(ignore_unknown_args=True)
    assert "ignores flags that it does not know" in capsys.readouterr().err
    assert parsed == []
