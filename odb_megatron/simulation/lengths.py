"""Sample lengths for a simulation: drawn from a distribution, read from a file, or tokenized."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FORMS", "SampleLengths", "read_lengths"]

Integers = npt.NDArray[np.int64]

FORMS = (
    "lognormal:mean=500,cv=1.0,max=8192[,n=131072][,seed=0], file:PATH.npy, file:PATH.json[#key], "
    "or a data file (JSON or JSONL, or a Megatron .bin/.idx prefix)"
)
LOGNORMAL, FILE = "lognormal:", "file:"
MAX_LENGTH = 10**9
LIMITS: dict[str, tuple[float, float]] = {
    "mean": (1, MAX_LENGTH), "cv": (0, 100), "max": (1, MAX_LENGTH), "n": (1, 1e9),
    "seed": (0, 2**32 - 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLengths:
    """Tokens of each sample of an epoch, in the order in which the first epoch reads them.

    Attributes:
        values: int64, at least one, all at least 1.
        num_truncated: samples of a data file that were cut.
        num_left_out: records of a data file that are no sample.
    """

    values: Integers
    num_truncated: int = 0
    num_left_out: int = 0

    def summary(self) -> dict[str, float | int]:
        """Return what describes the lengths in a report."""
        values = self.values
        return {
            "num_samples": len(values),
            "num_tokens": int(values.sum()),
            "mean": float(values.mean()),
            "cv": float(values.std() / values.mean()),
            "median": float(np.median(values)),
            "p99": float(np.quantile(values, 0.99)),
            "max": int(values.max()),
            "num_truncated": self.num_truncated,
            "num_left_out": self.num_left_out,
        }


def read_lengths(
    spec: str,
    *,
    token_budget: int,
    max_share: int = 1,
    tokenizer: str | None = None,
    seed: int = 0,
) -> SampleLengths:
    """Return the lengths that a specification names, those of files in random order.

    Args:
        spec: one of `FORMS`.
        token_budget: times `max_share` it is the most tokens of a sample; those of a data file are
            cut to it, elsewhere longer ones are an error.
        max_share: most replicas that share a sample.
        tokenizer: folder of a tokenizer, for JSON and JSONL data files.
        seed: of the random order.

    Raises:
        ValueError: the specification is not understood, or what it names cannot be used.
    """
    is_data = not spec.startswith((LOGNORMAL, FILE))
    if tokenizer is not None and not is_data:
        raise ValueError(
            f"--tokenizer {tokenizer!r} would do nothing: --lengths {spec!r} has lengths, no text; "
            "drop it"
        )
    longest = token_budget * max_share
    if is_data:
        if ":" in spec.split(os.sep)[0] and not os.path.exists(spec):
            raise ValueError(f"--lengths {spec!r} is not understood: expected {FORMS}")
        return _from_data(spec, longest=longest, tokenizer=tokenizer, seed=seed)
    values = _lognormal(spec) if spec.startswith(LOGNORMAL) else _from_file(spec)
    for name, at, is_wrong in (
        ("below 1", int(values.argmin()), values.min() < 1),
        (f"above {MAX_LENGTH}", int(values.argmax()), values.max() > MAX_LENGTH),
    ):
        if is_wrong:
            raise ValueError(f"--lengths {spec!r}: length {values[at]} at index {at} is {name}")
    if values.max() > longest:
        raise ValueError(
            f"--lengths {spec!r} has a sample of {values.max()} tokens; the token budget is "
            f"{token_budget}: raise --token-budget or --share-long, or leave such samples out"
        )
    if spec.startswith(FILE):  # often sorted
        values = np.random.default_rng([seed, 0]).permutation(values)
    return SampleLengths(values=values.astype(np.int64))


def _lognormal(spec: str) -> Integers:
    values: dict[str, float] = {"n": 131072, "seed": 0}
    for part in spec.removeprefix(LOGNORMAL).split(","):
        name, _, text = part.partition("=")
        try:
            values[name] = float(text) if name in ("mean", "cv") else int(text)
            least, most = LIMITS[name]
        except (KeyError, ValueError):
            raise ValueError(
                f"--lengths {spec!r}: {part!r} is not understood; expected NAME=NUMBER with mean, "
                "cv, max, n or seed, whole numbers but for mean and cv"
            ) from None
        if not least <= values[name] <= most:
            raise ValueError(f"--lengths {spec!r}: {part} must be from {least} to {most:g}")
    missing = [name for name in LIMITS if name not in values]
    if missing:
        raise ValueError(f"--lengths {spec!r} lacks {', '.join(missing)}: expected {FORMS}")
    sigma2 = math.log(1 + values["cv"] ** 2)
    drawn = np.random.RandomState(int(values["seed"])).lognormal(
        math.log(values["mean"]) - sigma2 / 2, math.sqrt(sigma2), size=int(values["n"])
    )
    lengths: Integers = np.clip(np.round(drawn), 1, values["max"]).astype(np.int64)
    return lengths


def _from_file(spec: str) -> Integers:
    path, _, key = spec.removeprefix(FILE).partition("#")
    if not path.endswith((".npy", ".json")) or (key and path.endswith(".npy")):
        raise ValueError(f"--lengths {spec!r}: expected file:PATH.npy or file:PATH.json[#key]")
    found: Any
    try:
        if path.endswith(".npy"):
            found = np.load(path, allow_pickle=False)
        else:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"--lengths {spec!r} cannot be read ({error})") from error
    for part in key.split("/") if key else ():
        found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, dict):
        raise ValueError(f"--lengths {spec!r} names an object with the keys {', '.join(found)}")
    try:
        values = np.asarray(found)
    except ValueError:  # ragged
        values = np.array("")
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
        raise ValueError(f"--lengths {spec!r}: expected a list of whole numbers, at least one")
    return values


def _from_data(path: str, *, longest: int, tokenizer: str | None, seed: int) -> SampleLengths:
    from odb_megatron.inspection.reading import DataRequest, read_data

    request = DataRequest(paths=(path,), tokenizer=tokenizer, seed=seed)
    found = read_data(request, start=lambda _: lambda _: None)
    return SampleLengths(
        values=np.minimum(found.lengths, longest),
        num_truncated=int((found.lengths > longest).sum()),
        num_left_out=found.num_bad,
    )
