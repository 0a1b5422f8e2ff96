"""Data for the benchmarks: chitchat, a chat mix of files outside the repository, or a given file.

Must not tokenize for training (the runs do); lengths are measured here only to choose batch sizes.
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from training_runs import ROOT

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.order import PassOrder
from odb_megatron.data.records import open_records
from odb_megatron.data.sample import SampleRules
from odb_megatron.data.sources import ChatSource
from odb_megatron.data.stream import SampleStream, SourcePart
from odb_megatron.data.tokenizer import load_tokenizer
from odb_megatron.plan.padding import OverlongPolicy

__all__ = [
    "CHAT_MIX_FILES",
    "ChatData",
    "MissingDataError",
    "chat_mix_folder",
    "chat_stream",
    "mean_length",
    "oasst_conversations",
    "prepare",
]

CACHE = ROOT / ".cache"
OASST_FILE = "oasst_en_100_tree.jsonl"
CHAT_MIX_FILES = (
    OASST_FILE,
    "glaive_toolcall_en_demo.json",
    "self_instruct_seed_tasks.jsonl",
    "longchat_5_topics.jsonl",
    "longchat_10_topics.jsonl",
)
_OASST_ROLES = {"prompter": "user", "assistant": "assistant"}
_MAX_MEASURED = 1000


class MissingDataError(RuntimeError):
    """The files a data set is made of are not on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatData:
    """A chat file and the tokenizer trained on it."""

    path: Path
    tokenizer: Path


def prepare(name: str) -> ChatData:
    """Prepare `chitchat`, `chat-mix` or the file at path `name`, once; kept in `.cache/`.

    Raises:
        MissingDataError: the chat mix's files are absent.
    """
    example = _example()
    if name == "chitchat":
        path: Path = example["chitchat"](CACHE)
    elif name == "chat-mix":
        path = _write_chat_mix(CACHE)
    else:
        path = Path(name).resolve()
    return ChatData(path=path, tokenizer=example["tokenizer_for"](path, CACHE))


def chat_mix_folder() -> Path:
    """Where the chat mix's files are looked for: `ODB_CHAT_DATA`, or beside the repository."""
    return Path(os.environ.get("ODB_CHAT_DATA") or ROOT.parent / "shared" / "data")


def oasst_conversations(trees: Path) -> Iterator[list[dict[str, str]]]:
    """Yield the root-to-leaf conversations of OASST message trees.

    A path that ends in a user's turn is cut before it; what remains is yielded once.
    """
    with trees.open(encoding="utf-8") as file:
        for line in file:
            seen: set[tuple[str, ...]] = set()
            for path in _paths_to_leaves(json.loads(line)["prompt"]):
                while path and path[-1]["role"] != "assistant":
                    path = path[:-1]
                key = tuple(node["message_id"] for node in path)
                if path and key not in seen:
                    seen.add(key)
                    yield [
                        {"role": _OASST_ROLES[node["role"]], "content": node["text"]}
                        for node in path
                    ]


def mean_length(data: ChatData, *, seq_length: int) -> float:
    """Mean tokens of a sample cut to `seq_length`, over up to 1000 evenly spaced records."""
    from odb_megatron.data.chat_record import parse_record

    records = open_records(str(data.path))
    renderer = ChatRenderer(load_tokenizer(data.tokenizer))
    chosen = range(0, len(records), -(-len(records) // _MAX_MEASURED))
    lengths = [len(renderer.render(parse_record(records[index]))[0]) - 1 for index in chosen]
    return sum(min(length, seq_length) for length in lengths) / len(lengths)


def chat_stream(data: ChatData, *, context: int, budget: int, num_samples: int) -> SampleStream:
    """Return a stream over the file; what does not fit is cut, bad records are skipped."""
    rules = SampleRules(
        context=context,
        token_budget=budget,
        overlong=OverlongPolicy.TRUNCATE,
        skip_bad=True,
    )
    renderer = ChatRenderer(load_tokenizer(data.tokenizer))
    source = ChatSource(str(data.path), rules=rules, renderer=renderer)
    order = PassOrder(np.arange(len(source)), seed=1)
    return SampleStream([SourcePart(source=source, order=order)], num_samples=num_samples)


@cache
def _example() -> Mapping[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "train_chat.py"))


def _write_chat_mix(cache_folder: Path) -> Path:
    folder, target = chat_mix_folder(), cache_folder / "chat-mix.jsonl"
    missing = [name for name in CHAT_MIX_FILES if not (folder / name).is_file()]
    if missing:
        raise MissingDataError(
            f"the chat mix needs {', '.join(missing)} in {folder}: set ODB_CHAT_DATA to the folder "
            "that holds them, or use --data chitchat"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".part{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        for record in _chat_mix_records(folder):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    part.replace(target)
    return target


def _chat_mix_records(folder: Path) -> Iterator[Mapping[str, object]]:
    for name in CHAT_MIX_FILES:
        if name == OASST_FILE:
            for messages in oasst_conversations(folder / name):
                yield {"messages": messages}
        else:
            yield from open_records(str(folder / name))


def _paths_to_leaves(root: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    stack = [[root]]
    while stack:
        path = stack.pop()
        replies = path[-1].get("replies") or []
        if not replies:
            yield path
        stack.extend([*path, reply] for reply in reversed(replies))
