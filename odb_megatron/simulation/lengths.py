"""Sample lengths for a simulation: drawn from a distribution, read from a file, or tokenized.

Knows nothing of policies. Data files go through `odb_megatron.data`, imported only then.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from odb_megatron.data.chat_template import ChatRenderer

__all__ = ["FORMS", "SampleLengths", "read_lengths"]

Integers = npt.NDArray[np.int64]

FORMS = (
    "lognormal:mean=500,cv=1.0,max=8192[,n=131072][,seed=0], file:PATH.npy, file:PATH.json[#key], "
    "or a data file (JSON or JSONL, or a Megatron .bin/.idx prefix)"
)

_LOGNORMAL = "lognormal:"
_FILE = "file:"
_DEFAULTS: dict[str, float] = {"n": 131072, "seed": 0}
_REQUIRED = ("mean", "cv", "max")
_MOST_REASON = 200  # characters of another library's error


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLengths:
    """Tokens of each sample of an epoch, in the order in which the first epoch reads them.

    Attributes:
        values: int64, at least one, all at least 1.
        num_truncated: samples cut to the token budget (data files).
        num_left_out: records that are no sample (data files).
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


_LIMITS = {
    "mean": (1, 1e9), "cv": (0, 100.0), "max": (1, 1e9), "n": (1, 1e9), "seed": (0, 2**32 - 1),
}  # fmt: skip


def read_lengths(
    spec: str,
    *,
    token_budget: int,
    longest: int = 0,
    tokenizer: str | None = None,
    seed: int = 0,
) -> SampleLengths:
    """Return the lengths that a specification names.

    Lengths from files are put in random order, since files are often sorted.

    Args:
        spec: one of `FORMS`.
        token_budget: of a micro-batch.
        longest: longer samples of a data file are cut to it; elsewhere they are an error; 0 for
            the token budget.
        tokenizer: folder of a tokenizer, for JSON and JSONL data files.
        seed: of the random order.

    Raises:
        ValueError: the specification is not understood, or what it names cannot be used.
    """
    longest = longest or token_budget
    if tokenizer is not None and spec.startswith((_LOGNORMAL, _FILE)):
        raise ValueError(
            f"--tokenizer {tokenizer!r} would do nothing: --lengths {spec!r} has lengths, no text; "
            "drop it"
        )
    if spec.startswith(_LOGNORMAL):
        found = SampleLengths(values=_lognormal(spec))
    elif spec.startswith(_FILE):
        found = SampleLengths(values=_shuffled(_from_file(spec), seed))
    elif ":" in spec.split(os.sep)[0] and not os.path.exists(spec):
        raise ValueError(f"--lengths {spec!r} is not understood: expected {FORMS}")
    else:
        found = _from_data(spec, longest=longest, tokenizer=tokenizer, seed=seed)
    if found.values.max() > longest:
        raise ValueError(
            f"--lengths {spec!r} has a sample of {found.values.max()} tokens; the token budget is "
            f"{token_budget}: raise --token-budget or --share-long, or leave such samples out"
        )
    return found


def _lognormal(spec: str) -> Integers:
    values = dict(_DEFAULTS)
    for part in spec.removeprefix(_LOGNORMAL).split(","):
        name, equals, text = part.partition("=")
        if not equals or name not in (*_REQUIRED, *_DEFAULTS):
            raise ValueError(
                f"--lengths {spec!r}: {part!r} is not understood; expected NAME=NUMBER with mean, "
                "cv, max, n or seed"
            )
        try:
            values[name] = int(text) if name in ("max", "n", "seed") else float(text)
        except ValueError:
            kind = "a whole number" if name in ("max", "n", "seed") else "a number"
            raise ValueError(f"--lengths {spec!r}: {name}={text} is not {kind}") from None
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise ValueError(f"--lengths {spec!r} lacks {', '.join(missing)}: expected {FORMS}")
    for name, (least, most) in _LIMITS.items():
        if not least <= values[name] <= most:
            raise ValueError(
                f"--lengths {spec!r}: {name}={values[name]:g} must be from {least} to {most:g}"
            )
    sigma2 = math.log(1 + values["cv"] ** 2)
    drawn = np.random.RandomState(int(values["seed"])).lognormal(
        math.log(values["mean"]) - sigma2 / 2, math.sqrt(sigma2), size=int(values["n"])
    )
    lengths: Integers = np.clip(np.round(drawn), 1, values["max"]).astype(np.int64)
    return lengths


def _from_file(spec: str) -> Integers:
    path, _, key = spec.removeprefix(_FILE).partition("#")
    if not os.path.isfile(path):
        raise ValueError(f"--lengths {spec!r}: there is no file {path!r}")
    if path.endswith(".npy"):
        if key:
            raise ValueError(f"--lengths {spec!r}: a .npy file has no key; leave out '#{key}'")
        try:
            found: Any = np.load(path, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"--lengths {spec!r}: not a readable .npy file ({error})") from error
    elif path.endswith(".json"):
        found = _from_json(path, key, spec)
    else:
        raise ValueError(f"--lengths {spec!r}: expected a file ending in .npy or .json")
    return _checked(found, spec)


def _from_json(path: str, key: str, spec: str) -> object:
    try:
        with open(path, encoding="utf-8") as file:
            found: object = json.load(file)
    except (ValueError, OSError) as error:
        raise ValueError(f"--lengths {spec!r}: not a readable JSON file ({error})") from error
    for part in key.split("/") if key else ():
        if not isinstance(found, dict) or part not in found:
            raise ValueError(
                f"--lengths {spec!r}: the file has no key {part!r} there; {_keys(found)}"
            )
        found = found[part]
    if isinstance(found, dict):
        raise ValueError(
            f"--lengths {spec!r} names an object: append '{'/' if key else '#'}KEY'; {_keys(found)}"
        )
    return found


def _keys(found: object) -> str:
    if isinstance(found, dict):
        return f"its keys are {', '.join(map(str, found))}"
    return f"it is a {type(found).__name__}"


def _checked(found: object, spec: str) -> Integers:
    try:
        values = np.asarray(found)
    except ValueError:
        values = np.array("ragged")
    if values.ndim == 1 and not len(values):
        raise ValueError(f"--lengths {spec!r} is an empty list: there must be a sample")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(
            f"--lengths {spec!r}: expected a list of whole numbers, got {values.dtype} of shape "
            f"{values.shape}"
        )
    if int(values.min()) < 1:
        at = int(values.argmin())
        raise ValueError(f"--lengths {spec!r}: length {values[at]} at index {at} is below 1")
    if int(values.max()) > _LIMITS["max"][1]:
        at = int(values.argmax())
        raise ValueError(
            f"--lengths {spec!r}: length {values[at]} at index {at} is above {_LIMITS['max'][1]:g}"
        )
    return values.astype(np.int64)


def _from_data(path: str, *, longest: int, tokenizer: str | None, seed: int) -> SampleLengths:
    from odb_megatron.data.preprocess import SampleRules
    from odb_megatron.data.sample import BadRecordError, Sample
    from odb_megatron.data.sources import open_source
    from odb_megatron.plan.padding import OverlongPolicy

    rules = SampleRules(
        context=longest,
        token_budget=longest,
        overlong=OverlongPolicy.TRUNCATE,
    )
    source = open_source(path, rules=rules, renderer=_renderer(path, tokenizer))
    lengths, num_truncated, num_left_out, first = [], 0, 0, ""
    for index in range(len(source)):
        try:
            sample = source.sample(index, source=0)
        except BadRecordError as error:
            num_left_out += 1
            first = first or f"line {error.line}: {error.reason}"
            continue
        assert isinstance(sample, Sample), "what is too long is cut"
        lengths.append(len(sample))
        num_truncated += sample.truncated > 0
    if not lengths:
        raise ValueError(
            f"--lengths {path!r} has {num_left_out} records and none that can be used; the first: "
            f"{first}"
        )
    return SampleLengths(
        values=_shuffled(np.array(lengths, dtype=np.int64), seed),
        num_truncated=num_truncated,
        num_left_out=num_left_out,
    )


def _renderer(path: str, tokenizer: str | None) -> ChatRenderer | None:
    """Return what tokenizes a JSON or JSONL file; None for other data, which has tokens."""
    from odb_megatron.data.json_records import is_json_path

    if not is_json_path(path):
        if tokenizer is not None:
            raise ValueError(
                f"--tokenizer {tokenizer!r} would do nothing: --lengths {path!r} is no JSON or "
                "JSONL file; drop it"
            )
        return None
    if not os.path.isfile(path):
        raise ValueError(f"--lengths {path!r}: there is no such file; expected {FORMS}")
    if tokenizer is None:
        raise ValueError(f"--lengths {path!r} needs a tokenizer: pass --tokenizer FOLDER")
    from odb_megatron.data.chat_template import ChatRenderer
    from odb_megatron.data.tokenizer import load_tokenizer, tokenizer_folder

    try:
        if not os.path.isdir(tokenizer):
            raise ValueError(f"{tokenizer} is no folder on this machine")
        return ChatRenderer(load_tokenizer(tokenizer_folder(tokenizer, tokenizer)))
    except Exception as error:  # transformers raises whatever its parsers do
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())
        reason = reason if len(reason) <= _MOST_REASON else f"{reason[:_MOST_REASON]}..."
        raise ValueError(
            f"--tokenizer {tokenizer!r} cannot be loaded ({reason}): name the folder of a Hugging "
            "Face tokenizer (tokenizer.json and tokenizer_config.json)"
        ) from error


def _shuffled(values: Integers, seed: int) -> Integers:
    return np.random.default_rng([seed, 0]).permutation(values)
