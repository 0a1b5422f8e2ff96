"""A patch that only inserts lines into one file whose content is known to the last byte.

Pure: reads and writes no file. Must not apply to a content other than the one it was made for: both
contents are known by git's blob ids, which the patch carries (`git diff --full-index`).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

__all__ = ["InsertPatch", "blob_id", "read_patch"]

_INDEX = re.compile(r"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})( \d+)?$")
_FILE = re.compile(r"^\+\+\+ b/(\S+)$")
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertPatch:
    """Lines to insert into one file.

    Attributes:
        path: of the file, in the checkout.
        before: blob id of the file without the lines.
        after: blob id of the file with them.
        insertions: (number of the file's own lines before them, the lines), in order.
    """

    path: str
    before: str
    after: str
    insertions: tuple[tuple[int, tuple[bytes, ...]], ...]

    @property
    def num_lines(self) -> int:
        """How many lines are inserted."""
        return sum(len(lines) for _, lines in self.insertions)

    def apply(self, content: bytes) -> bytes:
        """Return the content with the lines.

        Raises:
            ValueError: it is not the content this patch is for.
        """
        _require(content, self.before)
        lines = content.splitlines(keepends=True)
        for position, inserted in reversed(self.insertions):
            lines[position:position] = inserted
        made = b"".join(lines)
        assert blob_id(made) == self.after, f"the patch of {self.path} is broken"
        return made

    def revert(self, content: bytes) -> bytes:
        """Return the content without the lines, as it was before `apply` to the byte.

        Raises:
            ValueError: it is not the content this patch made.
        """
        _require(content, self.after)
        lines = content.splitlines(keepends=True)
        for position, inserted in self.insertions:
            del lines[position : position + len(inserted)]
        made = b"".join(lines)
        assert blob_id(made) == self.before, f"the patch of {self.path} is broken"
        return made


def blob_id(content: bytes) -> str:
    """Return the id that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def read_patch(text: str) -> InsertPatch:
    """Read a unified diff of one file.

    Raises:
        ValueError: it removes lines, or has no full blob ids.
    """
    index = file = None
    insertions: list[tuple[int, list[bytes]]] = []
    position: int | None = None  # of the file's own lines, within a hunk
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\n")
        if (hunk := _HUNK.match(bare)) is not None:
            position = int(hunk[1]) - (hunk[2] != "0")  # of no line: the one before
        elif position is None:
            index, file = _INDEX.match(bare) or index, _FILE.match(bare) or file
        elif line.startswith(" "):
            position += 1
        elif line.startswith("+"):
            if not insertions or insertions[-1][0] != position:
                insertions.append((position, []))
            insertions[-1][1].append(line[1:].encode())
        else:
            raise ValueError(f"only insertions are allowed in a patch, found {bare!r}")
    if index is None or file is None or not insertions:
        raise ValueError("not a patch of one file made by git diff --full-index")
    return InsertPatch(
        path=file[1],
        before=index[1],
        after=index[2],
        insertions=tuple((at, tuple(lines)) for at, lines in insertions),
    )


def _require(content: bytes, expected: str) -> None:
    found = blob_id(content)
    if found != expected:
        raise ValueError(f"this is blob {found}, the patch is for {expected}")
