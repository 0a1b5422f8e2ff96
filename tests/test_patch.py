"""`odb-megatron patch`: what it recognises, what it refuses, and that it gives back every byte."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.megatron import host_script
from odb_megatron.patching import checkout as checkout_module
from odb_megatron.patching.checkout import VersionPatch, examine, known_patches
from odb_megatron.patching.command import main
from odb_megatron.patching.insert_patch import InsertPatch, blob_id, read_patch

SCRIPT = "pretrain_gpt.py"
BEFORE = "import time\n\nif __name__ == '__main__':\n    args = parse()\n    train(args)\n"
AFTER = BEFORE.replace("    train", "    # added\n    args, train = with_odb(args)\n    train")


def _git(root: Path, *command: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(root), *identity, *command], capture_output=True, text=True, check=True
    )
    return done.stdout


def _diff(folder: Path, before: bytes, after: bytes, *options: str) -> str:
    """What git says is the difference of a script."""
    for side, content in (("a", before), ("b", after)):
        (folder / side).mkdir(exist_ok=True)
        (folder / side / SCRIPT).write_bytes(content)
    return subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", "--full-index", *options, "a", "b"],
        cwd=folder,
        capture_output=True,
        check=False,
    ).stdout.decode()


def _write_tree(root: Path, script: str = BEFORE) -> None:
    (root / "megatron" / "core").mkdir(parents=True)
    (root / SCRIPT).write_text(script)
    info = "MAJOR = 0\nMINOR = 18\nPATCH = 1\nPRE_RELEASE = 'rc2'\n"
    (root / "megatron" / "core" / "package_info.py").write_text(info)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean checkout of a version there is a patch for."""
    text = _diff(tmp_path, BEFORE.encode(), AFTER.encode(), "-U2")
    known = VersionPatch(name="core_v0.18.1", text=text, patch=read_patch(text))
    monkeypatch.setattr(checkout_module, "known_patches", lambda: (known,))
    root = tmp_path / "a checkout"
    _write_tree(root)
    _git(root, "init", "-q")
    _git(root, "add", "-A")
    _git(root, "commit", "-qm", "Upstream")
    return root


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- the patches themselves ------------------------------------------------------------------


def test_the_versions_there_are() -> None:
    names = [known.name for known in known_patches()]
    assert names == ["core_v0.17.1", "core_v0.18.2", "core_v0.19.0", "main_d98e8a64"]


@pytest.mark.parametrize("known", known_patches(), ids=lambda known: known.name)
def test_a_patch_inserts_one_block_that_names_what_there_is(known: VersionPatch) -> None:
    patch = known.patch
    assert (patch.path, len(patch.insertions), patch.num_lines) == (SCRIPT, 1, 5)
    assert patch.before != patch.after
    code = b"".join(patch.insertions[0][1]).decode()
    assert "from odb_megatron.megatron.host_script import with_odb\n" in code
    assert callable(host_script.with_odb)
    compile("if True:\n" + code, known.name, "exec")
    assert all(line[:1] in " +" for line in known.text.splitlines()[5:])


def test_patches_can_be_found_at_the_top_of_the_repository() -> None:
    top = Path(__file__).resolve().parents[1] / "patches"
    for known in known_patches():
        assert (top / known.name / "pretrain_gpt.patch").read_text() == known.text


@given(
    lines=st.lists(st.sampled_from([b"a\n", b"b\n", b"\n"]), min_size=1, max_size=12),
    inserted=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.sampled_from([b"x\n", b"a\n"]), min_size=1)),
        min_size=1,
        max_size=3,
    ),
    last_line_ends=st.booleans(),
)
def test_apply_and_revert_are_inverse(
    lines: list[bytes], inserted: list[tuple[int, list[bytes]]], last_line_ends: bool
) -> None:
    before = b"".join(lines) if last_line_ends else b"".join([*lines, b"end"])
    places = {min(place, len(lines)): tuple(new) for place, new in inserted}
    made = list(lines) if last_line_ends else [*lines, b"end"]
    for place in sorted(places, reverse=True):
        made[place:place] = places[place]
    after = b"".join(made)
    patch = InsertPatch(
        path=SCRIPT,
        before=blob_id(before),
        after=blob_id(after),
        insertions=tuple(sorted(places.items())),
    )
    assert patch.apply(before) == after
    assert patch.revert(after) == before
    with pytest.raises(ValueError, match="the patch is for"):
        patch.apply(after)
    with pytest.raises(ValueError, match="the patch is for"):
        patch.revert(before)


@pytest.mark.parametrize("context", [0, 1, 3])
def test_git_writes_what_is_read(tmp_path: Path, context: int) -> None:
    lines = [b"line %d\n" % number for number in range(40)]
    after = b"".join([b"first\n", *lines[:20], b"x\n", b"y\n", *lines[20:], b"last\n"])
    text = _diff(tmp_path, b"".join(lines), after, f"-U{context}")
    patch = read_patch(text)
    assert [place for place, _ in patch.insertions] == [0, 20, 40]
    assert patch.apply(b"".join(lines)) == after
    path = tmp_path / "a" / SCRIPT
    assert blob_id(path.read_bytes()) == patch.before


def test_a_patch_that_removes_is_refused(tmp_path: Path) -> None:
    text = _diff(tmp_path, b"a\nb\n", b"a\n")
    with pytest.raises(ValueError, match="only insertions are allowed in a patch, found '-b'"):
        read_patch(text)


def test_a_patch_without_blob_ids_is_refused(tmp_path: Path) -> None:
    text = _diff(tmp_path, b"a\n", b"a\nb\n", "--no-full-index")
    with pytest.raises(ValueError, match="git diff --full-index"):
        read_patch(text)


def test_blob_id_is_gits(tree: Path) -> None:
    assert blob_id(BEFORE.encode()) == _git(tree, "rev-parse", f"HEAD:{SCRIPT}").strip()


# --- the command -----------------------------------------------------------------------------


def test_check_apply_revert(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = f"{SCRIPT} of core_v0.18.1 (megatron-core 0.18.1rc2)"
    script = tree / SCRIPT
    script.chmod(0o755)
    _git(tree, "commit", "-qam", "Mode")
    for arguments, printed, content in (
        ((), "can be patched; --apply inserts 2 lines", BEFORE),
        (("--check",), "can be patched; --apply inserts 2 lines", BEFORE),
        (("--apply",), "is patched: 2 lines inserted", AFTER),
        (("--apply",), "has the patch already", AFTER),
        (("--check",), "is patched; --revert removes 2 lines", AFTER),
        (("--revert",), "is as before: 2 lines removed", BEFORE),
        (("--revert",), "has no patch", BEFORE),
    ):
        assert _run(capsys, tree, *arguments) == (0, f"{what} {printed}\n", "")
        assert script.read_text() == content
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert _git(tree, "status", "--porcelain") == ""


def test_diff_is_what_git_apply_takes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = _run(capsys, tree, "--diff")
    assert code == 0
    assert (tree / SCRIPT).read_text() == BEFORE
    (tree.parent / "a.patch").write_text(text)
    _git(tree, "apply", str(tree.parent / "a.patch"))
    assert (tree / SCRIPT).read_text() == AFTER
    assert "is patched; --revert" in _run(capsys, tree)[1]


def test_a_committed_patch_is_one(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tree), "--apply"])
    _git(tree, "commit", "-qam", "ODB")
    assert "has the patch already" in _run(capsys, tree, "--apply")[1].splitlines()[-1]
    assert _run(capsys, tree, "--revert")[0] == 0
    assert (tree / SCRIPT).read_text() == BEFORE


def test_a_link_stays_a_link(tree: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    _write_tree(linked)
    (linked / SCRIPT).unlink()
    (linked / SCRIPT).symlink_to(tree / SCRIPT)
    assert main([str(linked), "--apply"]) == 0
    assert (linked / SCRIPT).is_symlink()
    assert (tree / SCRIPT).read_text() == AFTER


def test_a_folder_without_git(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpacked = tmp_path / "unpacked"
    _write_tree(unpacked)
    assert examine(unpacked).changed is None
    assert "(no git work tree: only this file was compared)" in _run(capsys, unpacked)[1]
    code, printed, error = _run(capsys, unpacked, "--apply")
    assert (code, error) == (0, "")
    assert "2 lines inserted (no git work tree: only this file was compared)\n" in printed
    assert (unpacked / SCRIPT).read_text() == AFTER


def test_without_the_git_command(
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A work tree is not touched, whether it has changes or not; a folder without git can be."""
    unpacked = tmp_path / "unpacked"
    _write_tree(unpacked)
    main([str(tree), "--apply"])
    capsys.readouterr()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert examine(tree).changed is None
    assert _run(capsys, tree, "--check")[0] == 0  # patched
    assert _run(capsys, tree, "--revert")[0] == 0
    _change_other(tree)
    for action in ("--check", "--apply"):
        code, printed, error = _run(capsys, tree, action)
        assert (code, printed) == (1, "")
        assert error.startswith("odb-megatron patch: git was not found, or cannot be run: ")
        assert "put git on PATH, or run it without a patch" in error
        assert (tree / SCRIPT).read_text() == BEFORE
    code, printed, _ = _run(capsys, unpacked, "--apply")
    assert code == 0
    assert "(git was not found, or cannot be run: only this file was compared)" in printed


@pytest.mark.parametrize(
    ("names", "script", "text"),
    [
        (["core_v0.18.1"], "core_v0.18.1", ""),
        (["core_v0.17.1"], "core_v0.17.1", "is the one of core_v0.17.1"),
        (["main_d98e8a64", "core_v0.17.1"], "main_d98e8a64", ""),
        (
            ["main_d98e8a64", "core_v0.18.2"],
            "main_d98e8a64",
            "megatron-core 0.18.1rc2, whose script is known as core_v0.18.2",
        ),
    ],
)
def test_a_script_in_a_tree_of_another_version_is_told_of(
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    names: list[str],
    script: str,
    text: str,
) -> None:
    (known,) = checkout_module.known_patches()
    others = read_patch(_diff(tree.parent, b"a\n", b"a\nb\n"))
    patches = tuple(
        VersionPatch(name=name, text="", patch=known.patch if name == script else others)
        for name in names
    )
    monkeypatch.setattr(checkout_module, "known_patches", lambda: patches)
    code, printed, error = _run(capsys, tree, "--apply")
    assert code == 0
    assert "2 lines inserted" in printed
    assert text in error
    assert bool(error) is bool(text)


def test_a_checkout_inside_another_repository(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what is inside the folder counts."""
    outer = tmp_path / "outer"
    _write_tree(outer / "third party" / "Megatron-LM")
    (outer / "own.py").write_text("1\n")
    _git(outer, "init", "-q")
    _git(outer, "add", "-A")
    _git(outer, "commit", "-qm", "All")
    (outer / "own.py").write_text("2\n")
    inner = outer / "third party" / "Megatron-LM"
    assert _run(capsys, inner, "--apply")[0] == 0
    assert _run(capsys, inner, "--check")[1].endswith("is patched; --revert removes 2 lines\n")
    info = inner / "megatron" / "core" / "package_info.py"
    info.write_text(info.read_text() + "# mine\n")
    assert examine(inner).changed == ("megatron/core/package_info.py",)


def _change_other(tree: Path) -> None:
    info = tree / "megatron" / "core" / "package_info.py"
    info.write_text(info.read_text() + "# mine\n")


def _stage_other(tree: Path) -> None:
    (tree / "new.py").write_text("1\n")
    _git(tree, "add", "new.py")


def _change_script(tree: Path) -> None:
    (tree / SCRIPT).write_text(BEFORE + "# mine\n")


def _edit_patched(tree: Path) -> None:
    (tree / SCRIPT).write_text(AFTER + "# mine\n")


def _commit_another(tree: Path) -> None:
    _change_script(tree)
    _git(tree, "commit", "-qam", "Next")


def _remove_info(tree: Path) -> None:
    (tree / "megatron" / "core" / "package_info.py").unlink()


def _break_git(tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text("nonsense\n")


@pytest.mark.parametrize("action", ["--check", "--apply"])
@pytest.mark.parametrize(
    ("spoil", "texts"),
    [
        (
            _change_other,
            ("has uncommitted changes (megatron/core/package_info.py)", "commit or stash"),
        ),
        (_stage_other, ("has uncommitted changes (new.py)", "python -m odb_megatron.run")),
        (_change_script, ("has uncommitted changes", "checkout -- pretrain_gpt.py' drops them")),
        (_edit_patched, ("has uncommitted changes", "known to the last byte")),
        (
            _commit_another,
            (
                "pretrain_gpt.py of megatron-core 0.18.1rc2 in",
                "is not one that is known; there are patches for core_v0.18.1: run it without",
            ),
        ),
        (_remove_info, ("has no megatron/core/package_info.py", "'odb-megatron pretrain'")),
        (_break_git, ("git cannot say whether",)),
    ],
)
def test_refused(
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    texts: tuple[str, ...],
    action: str,
) -> None:
    spoil(tree)
    content = (tree / SCRIPT).read_bytes()
    code, printed, error = _run(capsys, tree, action)
    assert (code, printed) == (1, "")
    assert error.startswith("odb-megatron patch: ")
    assert len(error.splitlines()) == 1
    for text in texts:
        assert text in error
    assert (tree / SCRIPT).read_bytes() == content


def test_a_patched_tree_with_other_changes_can_be_reverted(tree: Path) -> None:
    main([str(tree), "--apply"])
    _change_other(tree)
    assert main([str(tree), "--revert"]) == 0
    assert (tree / SCRIPT).read_text() == BEFORE


def test_many_changes_are_cut_short(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        (tree / f"{number}.py").write_text("1\n")
    _git(tree, "add", "-A")
    assert "(0.py, 1.py, 2.py, 3.py, 4.py and 3 more)" in _run(capsys, tree)[2]


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        "nowhere has no pretrain_gpt.py: expected a Megatron-LM checkout"
        in (_run(capsys, tmp_path / "nowhere")[2])
    )


def test_a_version_that_cannot_be_read(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "megatron" / "core" / "package_info.py").write_text("VERSION = 1\n")
    _git(tree, "commit", "-qam", "Other")
    assert "(megatron-core of an unknown version)" in _run(capsys, tree)[1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree.chmod(0o555)
    try:
        assert _run(capsys, tree, "--apply")[0] == 1
    finally:
        tree.chmod(0o755)
    assert (tree / SCRIPT).read_text() == BEFORE


@pytest.mark.parametrize("arguments", [[], ["--apply", "--revert", "x"], ["x", "--undo"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
