"""Lengths of a data set's samples: read by the training's own reader, from a file, or drawn.

What is too long is not judged here. Every record that training would refuse is counted, with the
reader's own message.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from odb_megatron.data.chat import ChatRenderer
    from odb_megatron.data.sources import SampleSource

__all__ = ["LENGTHS", "DataRequest", "Reading", "length_summary", "read_data", "read_lengths"]
__all__ += ["show_records"]

Integers = npt.NDArray[np.int64]

LENGTHS = (
    "lognormal:mean=500,cv=1.0,max=8192[,n=131072][,seed=0], file:PATH.npy, file:PATH.json[#key] "
    "or file:PATH with a whole number per line"
)
MAX_LENGTH = 10**9
NUM_NAMED = 5
"""Bad records that are named."""

_DRAWN = {  # type, least, most
    "mean": (float, 1, MAX_LENGTH), "cv": (float, 0, 100), "max": (int, 1, MAX_LENGTH),
    "n": (int, 1, 10**9), "seed": (int, 0, 2**32 - 1),
}  # fmt: skip
_PIECE = 64  # records that a worker reads at a time
_FEW = 4 * _PIECE  # records below which no worker is started


# --- lengths that are given ------------------------------------------------------------------


def length_summary(values: Integers) -> dict[str, float | int]:
    """Return what describes lengths in a report."""
    return {
        "num_samples": len(values),
        "num_tokens": int(values.sum()),
        "mean": float(values.mean()),
        "cv": float(values.std() / values.mean()),
        "median": float(np.median(values)),
        "p99": float(np.quantile(values, 0.99)),
        "max": int(values.max()),
    }


def read_lengths(spec: str, *, seed: int = 0) -> Integers:
    """Return the lengths that `LENGTHS` names, int64, those of files in random order.

    Raises:
        ValueError: it is not understood, or what it names cannot be used.
    """
    kind, _, rest = spec.partition(":")
    if kind == "lognormal":
        return _drawn(rest, spec)
    if kind != "file":
        raise ValueError(f"--lengths {spec!r} is not understood: expected {LENGTHS}")
    path, _, key = rest.partition("#")
    try:
        found: Any
        if path.endswith(".npy"):
            found = np.load(path, allow_pickle=False)
        else:
            text = Path(path).read_text(encoding="utf-8")
            found = json.loads(text) if path.endswith(".json") else [*map(int, text.split())]
        for part in key.split("/") if key else ():
            found = found.get(part) if isinstance(found, dict) else None
        values = np.asarray(found)
        if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
            raise ValueError("no list of whole numbers, at least one")
        if not 1 <= values.min() <= values.max() <= MAX_LENGTH:
            raise ValueError(f"a length of {values.min()}, or one of {values.max()}")
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"--lengths {spec!r} cannot be read ({error}): expected PATH.npy, PATH.json[#key] or "
            f"text with one whole number per line, each from 1 to {MAX_LENGTH}"
        ) from error
    # Files are often sorted.
    return np.random.default_rng([seed, 0]).permutation(values).astype(np.int64)


def _drawn(text: str, spec: str) -> Integers:
    given: dict[str, Any] = {"n": 131072, "seed": 0}
    try:
        for part in text.split(","):
            name, _, value = part.partition("=")
            kind, least, most = _DRAWN[name]
            given[name] = kind(value)
            if not least <= given[name] <= most:
                raise ValueError(part)
        mean, cv, longest = (given[name] for name in ("mean", "cv", "max"))
    except (KeyError, ValueError) as error:
        limits = ", ".join(f"{name} {least} to {most}" for name, (_, least, most) in _DRAWN.items())
        raise ValueError(
            f"--lengths {spec!r} is not understood ({error}): expected NAME=NUMBER of {limits}, of "
            "which n and seed may be left out; whole ones but for mean and cv"
        ) from None
    sigma2 = math.log(1 + cv**2)
    drawn = np.random.RandomState(given["seed"]).lognormal(
        math.log(mean) - sigma2 / 2, math.sqrt(sigma2), size=given["n"]
    )
    lengths: Integers = np.clip(np.round(drawn), 1, longest).astype(np.int64)
    return lengths


# --- lengths of data -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """What to read.

    Attributes:
        paths: chat or text files, or Megatron prefixes.
        weights: of each path in a blend, as Megatron's `--data-path WEIGHT PATH ...`; empty for
            each record once.
        tokenizer: its folder; None for token data.
        template_args: further variables of its chat template.
        share: of the records that is trained on, from the first on.
        seed: of the order; `--seed` of the training.
        max_samples: records that are read at most, the first of that order; 0 for all.
        num_workers: processes; 0 reads in this one.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...] = ()
    tokenizer: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    seed: int = 1234
    max_samples: int = 0
    num_workers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read of a data set.

    Attributes:
        positions: tokens of the sample at each position of the training's first epoch, uncut,
            int64; 0 for a bad record, which training can leave out of its step.
        about: `data` of the JSON: docs/reports.md says what it holds.
        vocab_size: entries of the tokenizer; 0 where there is none.
    """

    positions: Integers
    about: dict[str, Any]
    vocab_size: int = 0


def read_data(request: DataRequest) -> Reading:
    """Tokenize the records of a data set.

    Raises:
        ValueError: nothing can be read: no such file, no tokenizer, no record, no good record; or
            a worker process ended.
    """
    since = time.monotonic()
    sources, renderer = _sources(request)
    ranges = [range(round(request.share * len(one))) for one in sources]
    num_records = sum(map(len, ranges))
    if not num_records:
        found = ", ".join(f"{one.path} has {len(one)} records" for one in sources)
        raise ValueError(
            f"no record to train on: {found}, and the training split is the first "
            f"{request.share:.3g} of them: name other data, or change --split (100,0,0 takes all)"
        )
    order = _order(ranges, weights=request.weights, seed=request.seed)
    order = order[: request.max_samples or None]
    workers = request.num_workers if request.tokenizer is not None and len(order) > _FEW else 0
    lengths: list[int] = []
    bad: list[tuple[int, int, str]] = []  # source, record, message: in file order when sorted
    pieces = [order[at : at + _PIECE] for at in range(0, len(order), _PIECE)]
    from tqdm import tqdm

    from odb_megatron.data.sample import DataFileError

    try:
        with tqdm(total=len(order), unit="record", desc="reading", disable=None) as bar:
            for own, messages in _measured(sources, pieces, request, workers):
                lengths += own
                bad += messages
                bar.update(len(own))
    except DataFileError as error:  # no record is to blame for it
        raise ValueError(f"training would stop: {error}") from error
    if not any(lengths):
        raise ValueError(
            f"all {len(order)} records that were read are bad; the first: {min(bad)[-1]}. Mend the "
            "data, or name the tokenizer it was written for"
        )
    about = {
        "bad": [message for *_, message in sorted(bad)[:NUM_NAMED]],
        "name": " ".join(request.paths),
        "num_records": num_records,
        "num_read": len(order),
        "num_bad": len(bad),
        "read_s": time.monotonic() - since,
        "num_workers": workers,
    }
    vocab_size = 0 if renderer is None else len(renderer.tokenizer)
    return Reading(positions=np.array(lengths, dtype=np.int64), about=about, vocab_size=vocab_size)


def show_records(request: DataRequest, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return where each of the first records is, and the record token by token.

    Raises:
        ValueError: as `read_data`; or one of the records is bad.
    """
    from odb_megatron.data.chat_record import Conversation
    from odb_megatron.data.sample import Sample, as_object
    from odb_megatron.data.sources import ChatSource

    sources, renderer = _sources(request, skip_bad=False)
    places = [(source, index) for source in sources for index in range(min(count, len(source)))]
    for source, index in places[:count]:
        sample = source.sample(index, source=0)
        assert isinstance(sample, Sample), "any length is read, and bad records are raised"
        decode, origin, line = _as_text, "none: the data are tokens", index + 1
        if renderer is not None and isinstance(source, ChatSource):
            record, line = source.record(index), source.line(index)
            decode, origin = renderer.tokenizer.decode, "none: plain text"
            if isinstance(record, Conversation):
                origin = renderer.template(has_tools=bool(record.tools)).origin
        yield f"{source.path}:{line}", as_object(sample, decode, template=origin)


def _as_text(ids: Sequence[int]) -> list[str]:
    return list(map(str, ids))


def _order(ranges: Sequence[range], *, weights: Sequence[float], seed: int) -> Integers:
    """Return (source, record) in the order of the training's first epoch, int64 [N, 2].

    One source is shuffled as the training shuffles it. Of a blend each is, and they are mixed
    evenly, which is what Megatron's greedy blending comes to but for the last few places.
    """
    from odb_megatron.data.order import PassOrder

    total = sum(map(len, ranges))
    shares = [weight / sum(weights) for weight in weights] or [len(own) / total for own in ranges]
    parts, places = [], []
    for source, (records, share) in enumerate(zip(ranges, shares, strict=True)):
        num = round(share * total) if len(records) else 0
        order = PassOrder(np.arange(len(records)), seed=seed) if num else ()
        parts += [(source, order[place]) for place in range(num)]
        places.append((np.arange(num) + 0.5) / max(1, num))
    mixed: Integers = np.array(parts)[np.argsort(np.concatenate(places), kind="stable")]
    return mixed


def _sources(
    request: DataRequest, *, skip_bad: bool = True
) -> tuple[list[SampleSource], ChatRenderer | None]:
    """Open the data for reading of any length, bad records skipped by default."""
    try:
        from odb_megatron.data.chat import ChatRenderer
        from odb_megatron.data.records import has_records, require_data
        from odb_megatron.data.sample import SampleRules
        from odb_megatron.data.sources import open_source
        from odb_megatron.data.tokenizer import load_tokenizer
        from odb_megatron.plan.padding import OverlongPolicy
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reading data needs {error.name}, which is not installed: pip install "
            "'odb-megatron[megatron]', or give lengths with --lengths FILE"
        ) from error
    for path in request.paths:
        require_data(path)
        if has_records(path) and request.tokenizer is None:
            raise ValueError(f"{path} is text and needs the training's tokenizer: pass --tokenizer")
    renderer = None
    if request.tokenizer is not None:
        if not any(map(has_records, request.paths)):
            raise ValueError(
                f"--tokenizer {request.tokenizer!r} would do nothing: {' '.join(request.paths)} "
                "has tokens already; drop it"
            )
        try:
            tokenizer = load_tokenizer(request.tokenizer)
            renderer = ChatRenderer(tokenizer, template_arguments=request.template_args)
        except Exception as error:  # transformers raises whatever its parsers do
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"--tokenizer {request.tokenizer!r} cannot be loaded: {reason}"
            ) from error
    rules = SampleRules(
        context=1 << 40,
        token_budget=1 << 40,
        overlong=OverlongPolicy.TRUNCATE,
        skip_bad=skip_bad,
    )
    return [open_source(path, rules=rules, renderer=renderer) for path in request.paths], renderer


_opened: list[SampleSource] = []  # in a worker process


def _measured(
    sources: list[SampleSource], pieces: list[Integers], request: DataRequest, workers: int
) -> Iterator[tuple[list[int], list[tuple[int, int, str]]]]:
    if not workers:
        _opened[:] = sources
        yield from map(_measure, pieces)
        return
    import multiprocessing

    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["odb_megatron.report.lengths", "transformers"])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_open, initargs=(request,))
    try:
        yield from pool.map(_measure, pieces)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process ended while it read (killed, or out of memory?): lower --workers; 0 "
            "reads in this process and shows what is wrong"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _open(request: DataRequest) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _opened[:] = _sources(request)[0]


def _measure(piece: Integers) -> tuple[list[int], list[tuple[int, int, str]]]:
    """Return the tokens of each record, 0 for a bad one, and what is wrong with the bad ones."""
    from odb_megatron.data.sample import BAD_RECORD_HINT, Sample

    lengths: list[int] = []
    bad: list[tuple[int, int, str]] = []
    for source, record in piece.tolist():
        found = _opened[source].sample(record, source=source)
        lengths.append(len(found) if isinstance(found, Sample) else 0)
        if not isinstance(found, Sample):
            message = found.message.partition("\n")[0].partition(BAD_RECORD_HINT)[0]
            bad.append((source, record, message))
    return lengths, bad
