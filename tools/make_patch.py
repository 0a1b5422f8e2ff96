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

ABOUT = "    # --odb switches on online dynamic batching; without it both names stay as imported.\n"
IMPORT = "    from odb_megatron.megatron.pretrain import with_odb\n\n"
PARSE = "    args = parse_and_validate_args(\n"
CALL = "    pretrain, parse_and_validate_args = with_odb(pretrain, parse_and_validate_args)\n\n"


def main(checkout: Path, name: str) -> None:
    """Insert the lines into the script of HEAD and write the difference."""
    before = subprocess.run(
        ["git", "-C", str(checkout), "show", f"HEAD:{SCRIPT}"], capture_output=True, check=True
    ).stdout.decode()
    if before.count(PARSE) != 1:
        raise SystemExit(f"{SCRIPT} has {PARSE.strip()!r} {before.count(PARSE)} times, not once")
    after = before.replace(PARSE, ABOUT + IMPORT + CALL + PARSE)
    with tempfile.TemporaryDirectory() as folder:
        for side, text in (("a", before), ("b", after)):
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
