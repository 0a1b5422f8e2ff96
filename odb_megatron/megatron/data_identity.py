"""Which data a run reads, as its saved state names it, and what has changed since.

Must not read records: files are told apart by their fingerprints.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping
from typing import Any

from odb_megatron.data.iterable import ItemStream
from odb_megatron.data.records import file_fingerprint
from odb_megatron.data.stream import SampleStream

MAX_BLEND_PLACES = 4096
"""Places of a blend that a state compares, at most."""

__all__ = ["changed_files", "check_same_samples", "data_identity"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def data_identity(
    args: argparse.Namespace,
    stream: SampleStream | ItemStream,
    *,
    num_places: int = MAX_BLEND_PLACES,
) -> dict[str, Any]:
    """Return the sources of a stream, the beginning of their blend and the tokenizer.

    Args:
        args: Megatron's.
        stream: of the training data.
        num_places: places of the blend to look at; as many as the identity compared with.

    Returns:
        Plain values for `data_state`.
    """
    return {
        "sources": stream.sources(),
        "blend": list(stream.blend_digest(num_places)),
        "tokenizer": _tokenizer(args),
    }


def check_same_samples(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise unless stream positions name the same records as when the state was saved.

    Args:
        saved: from `data_identity` of the saved run.
        current: of this run.

    Raises:
        ValueError: with what differs.
    """
    then, now = saved["sources"], current["sources"]
    found = []
    if len(then) != len(now):
        found.append(f"{len(then)} sources then, {len(now)} now")
    elif saved["blend"] != current["blend"] and current["blend"][0] >= saved["blend"][0]:
        found.append("the weights of the blend have changed")
    else:
        for name, what in (("num_records", "records"), ("seed", "seed"), ("ends", "split")):
            for old, new in zip(then, now, strict=True):
                if old[name] != new[name]:
                    found.append(f"{what} of {new['path']}: {old[name]} then, {new[name]} now")
    if found:
        raise ValueError(
            f"the data state was saved with other data ({_some(found)}), so samples would be lost "
            "or repeated: restore files, their order, --split and --seed (of an iterable data set "
            "its parts), or start the data anew (--finetune)"
        )


def changed_files(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return what has changed in files that hold as many records as before; "" for nothing."""
    found = [
        f"{new['path']} (fingerprint {old['fingerprint'][:12]} then, {new['fingerprint'][:12]} now)"
        for old, new in zip(saved["sources"], current["sources"], strict=True)
        if old["fingerprint"] != new["fingerprint"]
    ]
    if saved["tokenizer"] != current["tokenizer"]:
        found.append(f"tokenizer ({saved['tokenizer']} then, {current['tokenizer']} now)")
    return _some(found)


def _some(found: list[str]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _tokenizer(args: argparse.Namespace) -> str:
    """Name the tokenizer by its type and the digest of its files, wherever they lie.

    The chat templates that were chosen, and their arguments, are part of it.
    """
    folder = args.tokenizer_model or ""
    paths = [os.path.join(folder, name) for name in _TOKENIZER_FILES]
    paths = [path for path in [folder, *paths] if os.path.isfile(path)]
    templates = getattr(args, "odb_templates", "")
    digest = hashlib.sha256(
        ("".join(file_fingerprint(path) for path in paths) + templates).encode()
    )
    return (
        f"{args.tokenizer_type} {digest.hexdigest()[:12] if paths or templates else folder}".strip()
    )
