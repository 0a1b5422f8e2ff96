"""Lengths of a data set's samples: read by the training's own reader, from a file, or drawn.

What is too long is not judged here. Every record that training would refuse is counted, with the
reader's own message.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
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
Bad = tuple[int, int, str]  # source, record, message: in file order when sorted

LENGTHS = (
    "lognormal:mean=500,cv=1.0,max=8192[,n=131072][,seed=0], file:PATH.npy, file:PATH.json[#key] "
    "or file:PATH with a whole number per line"
)
MAX_LENGTH = 10**9
NUM_NAMED = 5
"""Bad records that are named."""

_LIMITS: dict[str, tuple[float, float]] = {
    "mean": (1, MAX_LENGTH), "cv": (0, 100), "max": (1, MAX_LENGTH), "n": (1, 1e9),
    "seed": (0, 2**32 - 1),
}  # fmt: skip
_PIECE = 64  # records that a worker reads at a time
_FEW = 4 * _PIECE  # records below which no worker is started


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read of a data set.

    Attributes:
        name: of the data.
        positions: tokens of the sample at each position of the training's first epoch, uncut,
            int64; 0 for a bad record, which training can leave out of its step.
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
    if spec.startswith("lognormal:"):
        values = _drawn(spec)
    elif spec.startswith("file:"):
        values = _stored(spec)
    else:
        raise ValueError(f"--lengths {spec!r} is not understood: expected {LENGTHS}")
    for at in (int(values.argmin()), int(values.argmax())):
        if not 1 <= values[at] <= MAX_LENGTH:
            raise ValueError(
                f"--lengths {spec!r}: length {values[at]} at index {at} is not from 1 to "
                f"{MAX_LENGTH}"
            )
    if spec.startswith("file:"):  # often sorted
        values = np.random.default_rng([seed, 0]).permutation(values)
    return values.astype(np.int64)


def _drawn(spec: str) -> Integers:
    values: dict[str, float] = {"n": 131072, "seed": 0}
    for part in spec.removeprefix("lognormal:").split(","):
        name, _, text = part.partition("=")
        try:
            values[name] = float(text) if name in ("mean", "cv") else int(text)
            least, most = _LIMITS[name]
        except (KeyError, ValueError):
            raise ValueError(
                f"--lengths {spec!r}: {part!r} is not understood; expected NAME=NUMBER with mean, "
                "cv, max, n or seed, whole numbers but for mean and cv"
            ) from None
        if not least <= values[name] <= most:
            raise ValueError(f"--lengths {spec!r}: {part} must be from {least} to {most:g}")
    missing = [name for name in _LIMITS if name not in values]
    if missing:
        raise ValueError(f"--lengths {spec!r} lacks {', '.join(missing)}: expected {LENGTHS}")
    sigma2 = math.log(1 + values["cv"] ** 2)
    drawn = np.random.RandomState(int(values["seed"])).lognormal(
        math.log(values["mean"]) - sigma2 / 2, math.sqrt(sigma2), size=int(values["n"])
    )
    lengths: Integers = np.clip(np.round(drawn), 1, values["max"]).astype(np.int64)
    return lengths


def _stored(spec: str) -> Integers:
    path, _, key = spec.removeprefix("file:").partition("#")
    found: Any
    if not path or os.path.isdir(path):
        what = "is a folder: name a file in it" if path else "names no file"
        raise ValueError(f"--lengths {path!r} {what}")
    try:
        if path.endswith(".npy"):
            found = np.load(path, allow_pickle=False)
        else:
            text = Path(path).read_text(encoding="utf-8")
            found = json.loads(text) if path.endswith(".json") else [*map(int, text.split())]
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"--lengths {spec!r} cannot be read ({error}): expected PATH.npy, PATH.json[#key] or "
            "text with one whole number per line"
        ) from error
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
        split: share of the records that is trained on, as (first, last) in 0 to 1.
        seed: of the order; `--seed` of the training.
        max_samples: records that are read at most, the first of that order; 0 for all.
        num_workers: processes; 0 reads in this one.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...] = ()
    tokenizer: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    split: tuple[float, float] = (0.0, 1.0)
    seed: int = 1234
    max_samples: int = 0
    num_workers: int = 0


def read_data(
    request: DataRequest, *, start: Callable[[int], Callable[[int], None]] | None = None
) -> Reading:
    """Tokenize the records of a data set.

    Args:
        request: what to read.
        start: told the number of records; returns what is called with each batch that was read.

    Raises:
        ValueError: nothing can be read: no such file, no tokenizer, no record, no good record; or
            a worker process ended.
    """
    since = time.monotonic()
    sources, renderer = _sources(request)
    first, last = request.split
    ranges = [range(round(first * len(one)), round(last * len(one))) for one in sources]
    num_records = sum(map(len, ranges))
    if not num_records:
        found = ", ".join(f"{s.path} has {len(s)} records" for s in sources)
        raise ValueError(
            f"no record to train on: {found}, and the training split is {first:.3g} to {last:.3g} "
            "of them: name other data, or change --split (100,0,0 takes all)"
        )
    order = _order(ranges, weights=request.weights, seed=request.seed)
    order = order[: request.max_samples or None]
    workers = request.num_workers if request.tokenizer is not None and len(order) > _FEW else 0
    advance = start(len(order)) if start else lambda _: None
    lengths: list[int] = []
    bad: list[Bad] = []
    pieces = [order[at : at + _PIECE] for at in range(0, len(order), _PIECE)]
    from odb_megatron.data.chat_record import ChatFormatError
    from odb_megatron.data.sample import DataFileError

    try:
        for own, messages in _measured(sources, pieces, request, workers):
            lengths += own
            bad += messages
            advance(len(own))
    except (ChatFormatError, DataFileError) as error:  # no record is to blame for it
        raise ValueError(f"training would stop: {error}") from error
    if not any(lengths):
        raise ValueError(
            f"all {len(order)} records that were read are bad; the first: {min(bad)[-1]}. Mend the "
            "data, or name the tokenizer it was written for"
        )
    return Reading(
        name=" ".join(request.paths),
        positions=np.array(lengths, dtype=np.int64),
        num_records=num_records,
        num_read=len(order),
        num_bad=len(bad),
        bad=tuple(message for *_, message in sorted(bad)[:NUM_NAMED]),
        vocab_size=0 if renderer is None else len(renderer.tokenizer),
        read_s=time.monotonic() - since,
        num_workers=workers,
    )


def show_records(request: DataRequest, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return where each of the first records is, and the record token by token.

    Raises:
        ValueError: as `read_data`; or one of the records is bad.
    """
    from odb_megatron.data.chat_record import ChatFormatError, Conversation
    from odb_megatron.data.sample import Sample, as_object
    from odb_megatron.data.sources import ChatSource

    sources, renderer = _sources(request, skip_bad=False)
    places = [(source, index) for source in sources for index in range(min(count, len(source)))]
    for source, index in places[:count]:
        try:
            sample = source.sample(index, source=0)
        except ChatFormatError as error:  # no record is to blame for it
            raise ValueError(f"training would stop: {error}") from error
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
        order = PassOrder(np.arange(records.start, records.stop), seed=seed) if num else ()
        parts += [(source, order[place]) for place in range(num)]
        places.append((np.arange(num) + 0.5) / max(1, num))
    mixed: Integers = np.array(parts)[np.argsort(np.concatenate(places), kind="stable")]
    return mixed


def _sources(
    request: DataRequest, *, skip_bad: bool = True
) -> tuple[list[SampleSource], ChatRenderer | None]:
    """Open the data for reading of any length, bad records skipped by default."""
    try:
        from odb_megatron.data.records import has_records, require_data
        from odb_megatron.data.sample import SampleRules
        from odb_megatron.data.sources import open_source
        from odb_megatron.plan.padding import OverlongPolicy

        for path in request.paths:
            require_data(path)
            if has_records(path) and request.tokenizer is None:
                raise ValueError(
                    f"{path} is text and needs the tokenizer of the training: pass --tokenizer "
                    "with its folder"
                )
        renderer = None
        if request.tokenizer is not None:
            if not any(map(has_records, request.paths)):
                raise ValueError(
                    f"--tokenizer {request.tokenizer!r} would do nothing: "
                    f"{' '.join(request.paths)} has tokens already; drop it"
                )
            renderer = _renderer(request.tokenizer, request.template_args)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reading data needs {error.name}, which is not installed: pip install "
            "'odb-megatron[megatron]', or give lengths with --lengths FILE"
        ) from error
    rules = SampleRules(
        context=1 << 40,
        token_budget=1 << 40,
        overlong=OverlongPolicy.TRUNCATE,
        skip_bad=skip_bad,
    )
    return [open_source(path, rules=rules, renderer=renderer) for path in request.paths], renderer


def _renderer(tokenizer: str, template_args: Mapping[str, Any]) -> ChatRenderer:
    from odb_megatron.data.chat import ChatRenderer
    from odb_megatron.data.tokenizer import load_tokenizer

    try:
        return ChatRenderer(load_tokenizer(tokenizer), template_arguments=template_args)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # transformers raises whatever its parsers do
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"--tokenizer {tokenizer!r} cannot be loaded: {reason}") from error


_opened: list[SampleSource] = []  # in a worker process


def _measured(
    sources: list[SampleSource], pieces: list[Integers], request: DataRequest, workers: int
) -> Iterator[tuple[list[int], list[Bad]]]:
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


def _measure(piece: Integers) -> tuple[list[int], list[Bad]]:
    """Return the tokens of each record, 0 for a bad one, and what is wrong with the bad ones."""
    from odb_megatron.data.sample import BAD_RECORD_HINT, Sample

    lengths: list[int] = []
    bad: list[Bad] = []
    for source, record in piece.tolist():
        found = _opened[source].sample(record, source=source)
        if isinstance(found, Sample):
            lengths.append(len(found))
        else:
            lengths.append(0)
            message = found.message.partition("\n")[0].partition(BAD_RECORD_HINT)[0]
            bad.append((source, record, message))
    return lengths, bad
