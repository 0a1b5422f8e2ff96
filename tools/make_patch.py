"""Writes the patch of one Megatron-LM version: `tools/make_patch.py CHECKOUT NAME`.

NAME is the upstream tag, or main and the commit. The checkout must be clean and stays so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[1] / "patches"
SCRIPT = "pretrain_gpt.py"

ABOUT = "    # --odb switches on online dynamic batching; without it {} as imported.\n"
IMPORT = "    from odb_megatron.megatron.host_script import with_odb\n\n"
PARSE = "    args = parse_and_validate_args(\n"
TWO_NAMES = (
    "    pretrain, parse_and_validate_args = with_odb(pretrain, parse_and_validate_args)\n\n"
)
PRETRAIN = "    pretrain(\n"
ONE_NAME = "    pretrain, _ = with_odb(pretrain)\n\n"


def main(checkout: Path, name: str) -> None:
    """Insert the lines into the script of HEAD and write the difference."""
    before = subprocess.run(
        ["git", "-C", str(checkout), "show", f"HEAD:{SCRIPT}"], capture_output=True, check=True
    ).stdout.decode()
    has_parse = PARSE in before  # from 0.18
    anchor = PARSE if has_parse else PRETRAIN
    if before.count(anchor) != 1:
        raise SystemExit(f"{SCRIPT} has {anchor.strip()!r} {before.count(anchor)} times, not once")
    lines = ABOUT.format("both names stay" if has_parse else "the name stays")
    lines += IMPORT + (TWO_NAMES if has_parse else ONE_NAME)
    with tempfile.TemporaryDirectory() as folder:
        for side, text in (("a", before), ("b", before.replace(anchor, lines + anchor))):
            (Path(folder) / side).mkdir()
            (Path(folder) / side / SCRIPT).write_text(text)
        diff = subprocess.run(
            ["git", "diff", "--no-index", "--no-prefix", "--full-index", "-U2", "a", "b"],
            cwd=folder,
            capture_output=True,
            check=False,
        ).stdout.decode()
    path = PATCHES / name / SCRIPT.replace(".py", ".patch")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(diff)
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
