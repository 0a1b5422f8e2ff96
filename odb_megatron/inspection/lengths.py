"""What was read of a data set: the lengths of its samples; and lengths that are given as such.

Needs numpy alone. Must not open data files: `reading` does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from odb_megatron.simulation.lengths import read_lengths

__all__ = ["ANY_LENGTH", "Reading", "read_length_file"]

Integers = npt.NDArray[np.int64]

ANY_LENGTH = 1 << 40
"""Above that of any sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read.

    Attributes:
        name: of the data.
        positions: tokens of the sample at each position of the training's first epoch, uncut,
            int64; 0 for a bad record, which the policy `skip` leaves out of its step.
        num_records: records of the training split.
        num_read: how many of them were read.
        num_bad: how many of those training would refuse.
        bad: messages of the first.
        vocab_size: entries of the tokenizer; 0 where there is none.
        read_s: seconds that reading took; None where nothing was tokenized.
        num_workers: processes that read.
    """

    name: str
    positions: Integers
    num_records: int
    num_read: int
    num_bad: int = 0
    bad: tuple[str, ...] = ()
    vocab_size: int = 0
    read_s: float | None = None
    num_workers: int = 0

    @property
    def lengths(self) -> Integers:
        """Tokens of each sample, without the bad records."""
        return self.positions[self.positions > 0]

    def part(self, *, first: int, most: int, seed: int) -> Reading:
        """Return the first positions, and at most so many of those, drawn at random, in order.

        Args:
            first: positions that the run takes; 0 for all.
            most: positions wanted; 0 for all.
            seed: of the draw.
        """
        positions = self.positions[: first or None]
        if 0 < most < len(positions):
            drawn = np.random.default_rng([seed, 4]).choice(len(positions), most, replace=False)
            positions = positions[np.sort(drawn)]
        return replace(self, positions=positions, num_read=len(positions))


def read_length_file(spec: str) -> Reading:
    """Return lengths from a file: `.npy`, `.json[#key]`, text with a number per line; or `SPEC`.

    Args:
        spec: a path, or what `odb-megatron simulate --lengths` takes.

    Raises:
        ValueError: there is no such file, or no lengths in it.
    """
    path = spec.partition("#")[0]
    if os.path.isdir(path):
        raise ValueError(f"--lengths {spec!r} is a folder: name a file in it")
    if ":" not in spec and path.endswith((".npy", ".json")):
        spec = f"file:{spec}"
    elif os.path.isfile(spec):
        return _of_lengths(spec, _text_lengths(spec))
    elif ":" not in spec:
        raise ValueError(
            f"--lengths {spec!r}: there is no such file; expected PATH.npy, PATH.json[#key], a "
            "text file with one whole number per line, or lognormal:mean=500,cv=1.0,max=8192"
        )
    return _of_lengths(spec, read_lengths(spec, token_budget=ANY_LENGTH).values)


def _of_lengths(name: str, values: Integers) -> Reading:
    return Reading(name=name, positions=values, num_records=len(values), num_read=len(values))


def _text_lengths(path: str) -> Integers:
    values = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if not text:
                continue
            if not text.isdecimal() or not 0 < int(text) < ANY_LENGTH:
                raise ValueError(
                    f"--lengths {path}:{number}: {text[:40]!r} is no length; expected one whole "
                    "number of at least 1 per line. Data files are named without --lengths"
                )
            values.append(int(text))
    if not values:
        raise ValueError(f"--lengths {path!r} is empty; expected one whole number per line")
    return np.array(values, dtype=np.int64)
