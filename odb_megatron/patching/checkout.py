"""Which Megatron-LM a checkout is, whether it is patched, and the change of one file in it.

Must not change a file whose content is not known, nor a tree with changes of somebody else's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from odb_megatron.patching.insert_patch import InsertPatch, blob_id, read_patch

__all__ = ["Checkout", "VersionPatch", "examine", "known_patches"]

_SCRIPT = "pretrain_gpt.py"
_WITHOUT_PATCH = (
    f"run it without a patch, 'python -m odb_megatron.run {_SCRIPT} --odb ...', which does not "
    "depend on the script's text"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPatch:
    """The patch of one upstream version.

    Attributes:
        name: upstream tag, or main and the commit: the folder in `patches/`.
        text: the patch as it is in the folder.
        patch: what it says.
    """

    name: str
    text: str
    patch: InsertPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A checkout whose script is known.

    Attributes:
        root: its folder.
        version: megatron-core's, as the checkout says.
        version_patch: the patch of its script.
        is_patched: whether the script has the lines.
        changed: tracked files that differ from the last commit, the patched script aside; None
            where nothing can tell.
        unseen: why nothing can tell; empty where git can.
    """

    root: Path
    version: str
    version_patch: VersionPatch
    is_patched: bool
    changed: tuple[str, ...] | None
    unseen: str = ""

    @property
    def foreign(self) -> str:
        """What does not fit where the script is another version's than the tree; else empty."""
        own = [known.name for known in known_patches() if _is_of(known.name, self.version)]
        name = self.version_patch.name
        if name in own or (not own and not _is_release(name)):
            return ""
        known = f", whose script is known as {' and '.join(own)}" if own else ""
        return (
            f"{self.script.name} is the one of {name}, and the tree around it is megatron-core "
            f"{self.version}{known}: they may not fit together"
        )

    @property
    def script(self) -> Path:
        """The file that the patch is for."""
        return self.root / self.version_patch.patch.path

    def apply(self) -> None:
        """Insert the lines; does nothing where they are.

        Raises:
            ValueError: the tree has other changes.
        """
        if self.is_patched:
            return
        self.require_clean()
        _replace(self.script, self.version_patch.patch.apply(self.script.read_bytes()))

    def revert(self) -> None:
        """Remove the lines; does nothing where there are none."""
        if self.is_patched:
            _replace(self.script, self.version_patch.patch.revert(self.script.read_bytes()))

    def require_clean(self) -> None:
        """Check that no tracked file has changes.

        Raises:
            ValueError: some have, or git is needed to tell.
        """
        if self.changed is None and _in_work_tree(self.root):
            raise ValueError(
                f"{self.unseen}: expected to find out whether {self.root} has uncommitted changes; "
                f"put git on PATH, or {_WITHOUT_PATCH}"
            )
        if self.changed:
            raise ValueError(
                f"{self.root} has uncommitted changes ({_list(self.changed)}); expected a clean "
                f"tree, so that 'git diff' shows the patch alone: commit or stash them, or "
                f"{_WITHOUT_PATCH}"
            )


def known_patches() -> tuple[VersionPatch, ...]:
    """Return the patches that come with this package, by name."""
    folder = resources.files("odb_megatron.patching") / "patches"
    found = []
    for version in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if version.is_dir():
            text = (version / _SCRIPT.replace(".py", ".patch")).read_text(encoding="utf-8")
            found.append(VersionPatch(name=version.name, text=text, patch=read_patch(text)))
    return tuple(found)


def examine(root: Path) -> Checkout:
    """Find out what a folder is.

    Raises:
        ValueError: it is no Megatron-LM checkout, or its script is not known.
    """
    script, info = root / _SCRIPT, root / "megatron" / "core" / "package_info.py"
    for path in (script, info):
        if not path.is_file():
            raise ValueError(
                f"{root} has no {path.relative_to(root)}: expected a Megatron-LM checkout (with "
                "pip's megatron-core alone, train with 'odb-megatron pretrain')"
            )
    version = _read_version(info)
    changed, unseen = _changed_files(root)
    found = blob_id(script.read_bytes())
    patches = known_patches()
    for known in patches:
        if found in (known.patch.before, known.patch.after):
            is_patched = found == known.patch.after
            return Checkout(
                root=root,
                version=version,
                version_patch=known,
                is_patched=is_patched,
                changed=_others(changed, script.name) if is_patched else changed,
                unseen=unseen,
            )
    if changed is not None and _SCRIPT in changed:
        raise ValueError(
            f"{_SCRIPT} of megatron-core {version} in {root} has uncommitted changes, and lines "
            f"can only be put into (or taken out of) a script that is known to the last byte: "
            f"'git -C {root} checkout -- {_SCRIPT}' drops them; or {_WITHOUT_PATCH}"
        )
    names = ", ".join(known.name for known in patches)
    raise ValueError(
        f"{_SCRIPT} of megatron-core {version} in {root} (blob {found[:12]}) is not one that is "
        f"known; there are patches for {names}: {_WITHOUT_PATCH}"
    )


def _read_version(info: Path) -> str:
    """Return the version that a package_info.py says, without running it."""
    text = info.read_text(encoding="utf-8")
    numbers = [
        re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")
    ]
    before = re.search(r"^PRE_RELEASE = ['\"](.*)['\"]", text, re.MULTILINE)
    if None in numbers:
        return "of an unknown version"
    return ".".join(number[1] for number in numbers if number) + (before[1] if before else "")


def _is_release(name: str) -> bool:
    return name.startswith("core_v")


def _is_of(name: str, version: str) -> bool:
    """Whether a patch is for a release with the first two numbers of a version."""
    return (
        _is_release(name) and name.removeprefix("core_v").split(".")[:2] == version.split(".")[:2]
    )


def _in_work_tree(root: Path) -> bool:
    """Whether a folder looks to be in a git work tree, which is told without git."""
    path = root.resolve()
    return any((folder / ".git").exists() for folder in (path, *path.parents))


def _changed_files(root: Path) -> tuple[tuple[str, ...] | None, str]:
    """Return tracked files that differ from the last commit, or None and why nothing can tell.

    Raises:
        ValueError: git cannot tell.
    """
    command = ["git", "-C", str(root), "status", "--porcelain", "-z", "--untracked-files=no"]
    try:
        done = subprocess.run(
            [*command, "--no-renames", "--", "."], capture_output=True, text=True, check=False
        )
    except OSError:
        return None, "git was not found, or cannot be run"
    if done.returncode == 0:
        prefix = _prefix(root)
        entries = [entry for entry in done.stdout.split("\0") if entry]
        return tuple(entry[3:].removeprefix(prefix) for entry in entries), ""
    if (root / ".git").exists():
        raise ValueError(f"git cannot say whether {root} is clean: {done.stderr.strip()}")
    return None, "no git work tree"


def _prefix(root: Path) -> str:
    """Return where a folder is in its work tree; git names files from the work tree's root."""
    command = ["git", "-C", str(root), "rev-parse", "--show-prefix"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip("\n")


def _others(changed: tuple[str, ...] | None, name: str) -> tuple[str, ...] | None:
    return None if changed is None else tuple(path for path in changed if path != name)


def _list(names: tuple[str, ...], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _replace(path: Path, content: bytes) -> None:
    """Write a file at once, mode kept; a link stays one."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
