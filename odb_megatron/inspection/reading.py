"""Lengths of a data set's samples, by the training's own reader, in worker processes.

Must not judge lengths: the overlong policy, the token budget and all advice come later. Every
record that training would refuse is counted, with the reader's own message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from odb_megatron.inspection.lengths import ANY_LENGTH, Reading

if TYPE_CHECKING:
    from odb_megatron.data.chat import ChatRenderer
    from odb_megatron.data.sources import SampleSource

__all__ = ["DataRequest", "read_data", "show_records"]

Integers = npt.NDArray[np.int64]
Advance = Callable[[int], None]
Bad = tuple[int, int, str]  # source, record, message: in file order when sorted

NUM_NAMED = 5
"""Bad records that are named."""

_PIECE = 64  # records that a worker reads at a time
_FEW = 4 * _PIECE  # records below which no worker is started
_MAX_REASON = 300


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


def read_data(request: DataRequest, *, start: Callable[[int], Advance]) -> Reading:
    """Tokenize the records of a data set.

    Args:
        request: what to read.
        start: told the number of records; returns what is told of each batch that was read.

    Raises:
        ValueError: nothing can be read: no such file, no tokenizer, no record, no good record; or
            a worker process ended.
    """
    since = time.monotonic()
    sources = _sources(request)
    ranges = [_range(len(source), request.split) for source in sources]
    num_records = sum(len(one) for one in ranges)
    if not num_records:
        found = ", ".join(f"{s.path} has {len(s)} records" for s in sources)
        first, last = request.split
        raise ValueError(
            f"no record to train on: {found}, and the training split is {first:.3g} to {last:.3g} "
            "of them: name other data, or change --split (100,0,0 takes all)"
        )
    order = _order(ranges, weights=request.weights, seed=request.seed)
    if request.max_samples:
        order = order[: request.max_samples]
    is_text = request.tokenizer is not None
    workers = request.num_workers if is_text and len(order) > _FEW else 0
    advance = start(len(order))
    lengths = np.zeros(len(order), dtype=np.int64)
    bad: list[Bad] = []
    done = 0
    pieces = [order[at : at + _PIECE] for at in range(0, len(order), _PIECE)]
    from odb_megatron.data.chat_record import ChatFormatError
    from odb_megatron.data.sample import DataFileError

    try:
        for found_lengths, messages in _measured(sources, pieces, request, workers):
            lengths[done : done + len(found_lengths)] = found_lengths
            done += len(found_lengths)
            bad += messages
            advance(len(found_lengths))
    except (ChatFormatError, DataFileError) as error:  # no record is to blame for it
        raise ValueError(f"training would stop: {error}") from error
    if not lengths.any():
        raise ValueError(
            f"all {len(order)} records that were read are bad; the first: {min(bad)[-1]}. Mend the "
            "data, or name the tokenizer it was written for"
        )
    return Reading(
        name=" ".join(request.paths),
        positions=lengths,
        num_records=num_records,
        num_read=len(order),
        num_bad=len(bad),
        bad=tuple(message for *_, message in sorted(bad)[:NUM_NAMED]),
        vocab_size=_vocab_size(sources),
        read_s=time.monotonic() - since,
        num_workers=workers,
    )


def _order(ranges: Sequence[range], *, weights: Sequence[float], seed: int) -> Integers:
    """Return (source, record) in the order of the training's first epoch, int64 [N, 2].

    One source is shuffled as the training shuffles it. Of a blend each is, and they are mixed
    evenly, which is what Megatron's greedy blending comes to but for the last few places.
    """
    from odb_megatron.data.order import PassOrder

    total = sum(map(len, ranges))
    shares = [len(one) / total for one in ranges]
    if weights:
        shares = [weight / sum(weights) for weight in weights]
    parts, places = [], []
    for source, (records, share) in enumerate(zip(ranges, shares, strict=True)):
        num = round(share * total)
        if not num or not len(records):
            continue
        order = PassOrder(np.arange(records.start, records.stop), seed=seed)
        own = np.array([order[place] for place in range(num)], dtype=np.int64)
        parts.append(np.stack([np.full_like(own, source), own], axis=1))
        places.append((np.arange(num) + 0.5) / num)
    mixed: Integers = np.concatenate(parts)[np.argsort(np.concatenate(places), kind="stable")]
    return mixed


def _range(length: int, split: tuple[float, float]) -> range:
    return range(round(split[0] * length), round(split[1] * length))


def _sources(request: DataRequest, *, skip_bad: bool = True) -> list[SampleSource]:
    """Open the data for reading of any length, bad records skipped by default."""
    try:
        from odb_megatron.data.records import has_records, require_data
        from odb_megatron.data.sample import SampleRules
        from odb_megatron.data.sources import open_source
        from odb_megatron.plan.padding import OverlongPolicy
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reading data needs {error.name}, which is not installed: pip install "
            "'odb-megatron[megatron]', or give lengths with --lengths FILE"
        ) from error
    rules = SampleRules(
        context=ANY_LENGTH,
        token_budget=ANY_LENGTH,
        overlong=OverlongPolicy.TRUNCATE,
        skip_bad=skip_bad,
    )
    for path in request.paths:
        require_data(path)
    is_text = [has_records(path) for path in request.paths]
    for path, text in zip(request.paths, is_text, strict=True):
        if text and request.tokenizer is None:
            raise ValueError(
                f"{path} is text and needs the tokenizer of the training: pass --tokenizer with "
                "its folder"
            )
    renderer = _renderer(request) if any(is_text) and request.tokenizer else None
    if request.tokenizer is not None and renderer is None:
        raise ValueError(
            f"--tokenizer {request.tokenizer!r} would do nothing: {' '.join(request.paths)} has "
            "tokens already; drop it"
        )
    return [open_source(path, rules=rules, renderer=renderer) for path in request.paths]


def show_records(request: DataRequest, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return where each of the first records is, and the record token by token.

    Raises:
        ValueError: as `read_data`; or one of the records is bad.
    """
    from odb_megatron.data.chat_record import ChatFormatError, Conversation
    from odb_megatron.data.sample import Sample, as_object
    from odb_megatron.data.sources import ChatSource

    sources = _sources(request, skip_bad=False)
    renderer = _renderer(request) if request.tokenizer else None
    left = count
    for source in sources:
        for index in range(min(left, len(source))):
            left -= 1
            try:
                sample = source.sample(index, source=0)
            except ChatFormatError as error:  # no record is to blame for it
                raise ValueError(f"training would stop: {error}") from error
            assert isinstance(sample, Sample), "any length is read, and bad records are raised"
            decode = renderer.tokenizer.decode if renderer is not None else _as_text
            origin, line = "none: the data are tokens", index + 1
            if renderer is not None and isinstance(source, ChatSource):
                record, line = source.record(index), source.line(index)
                origin = "none: plain text"
                if isinstance(record, Conversation):
                    origin = renderer.template(has_tools=bool(record.tools)).origin
            yield f"{source.path}:{line}", as_object(sample, decode, template=origin)


def _as_text(ids: Sequence[int]) -> list[str]:
    return list(map(str, ids))


def _renderer(request: DataRequest) -> ChatRenderer:
    from odb_megatron.data.chat import ChatRenderer
    from odb_megatron.data.tokenizer import load_tokenizer

    tokenizer = request.tokenizer
    assert tokenizer is not None, "only text is rendered"
    try:
        return ChatRenderer(load_tokenizer(tokenizer), template_arguments=request.template_args)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--tokenizer needs {error.name}, which is not installed: pip install "
            "'odb-megatron[megatron]'"
        ) from error
    except Exception as error:  # transformers raises whatever its parsers do
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise ValueError(f"--tokenizer {tokenizer!r} cannot be loaded: {reason}") from error


def _vocab_size(sources: Sequence[SampleSource]) -> int:
    for source in sources:
        if (renderer := getattr(source, "renderer", None)) is not None:
            return len(renderer.tokenizer)
    return 0


# --- worker processes ------------------------------------------------------------------------


_opened: list[SampleSource] = []


def _measured(
    sources: list[SampleSource], pieces: list[Integers], request: DataRequest, workers: int
) -> Iterator[tuple[list[int], list[Bad]]]:
    if not workers:
        for piece in pieces:
            yield _measure(sources, piece)
        return
    import multiprocessing

    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["odb_megatron.inspection.reading", "transformers"])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_open, initargs=(request,))
    try:
        yield from pool.map(_measure_opened, pieces)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process ended while it read (killed, or out of memory?): lower --workers; 0 "
            "reads in this process and shows what is wrong"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _open(request: DataRequest) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _opened[:] = _sources(request)


def _measure_opened(piece: Integers) -> tuple[list[int], list[Bad]]:
    return _measure(_opened, piece)


def _measure(sources: list[SampleSource], piece: Integers) -> tuple[list[int], list[Bad]]:
    """Return the tokens of each record, 0 for a bad one, and what is wrong with the bad ones."""
    from odb_megatron.data.sample import BAD_RECORD_WAY_OUT, Sample

    lengths: list[int] = []
    bad: list[Bad] = []
    for source, record in piece.tolist():
        found = sources[source].sample(record, source=source)
        if isinstance(found, Sample):
            lengths.append(len(found))
        else:
            lengths.append(0)
            message = found.message.partition("\n")[0].partition(BAD_RECORD_WAY_OUT)[0]
            bad.append((source, record, message))
    return lengths, bad
