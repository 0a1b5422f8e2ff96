"""What `make train` runs, as defaults of an inspection without data: its data, tokenizer and flags.

Must not prepare anything: `make train` does, and this looks for what it left in `.cache/`.
"""

from __future__ import annotations

import hashlib
import os

__all__ = ["EXAMPLE_FLAGS", "example_data"]

EXAMPLE_FLAGS: dict[str, object] = {
    "seq_length": 2048,
    "token_budget": 4096,
    "dp": 2,
    "global_batch_size": 32,
    "overlong": "truncate",
    "split": "98,1,1",
    "vocab_divisible_by": 64,
    "model_shape": "layers=4,hidden=128,heads=4,groups=2,ffn=384,mlp=gated",
}
"""Flags of `examples/train_chat.py`."""

_VOCAB_SIZE = 4096


def example_data(cache: str = ".cache") -> tuple[str, str]:
    """Return the data file and the tokenizer folder that `make train` prepared here.

    Raises:
        ValueError: they are not there.
    """
    data = os.path.join(cache, "chitchat.jsonl")
    if os.path.isfile(data):
        from odb_megatron.data.json_records import JsonRecords

        name = f"{JsonRecords(data).fingerprint()} {_VOCAB_SIZE}"
        folder = os.path.join(cache, f"tokenizer-{hashlib.sha256(name.encode()).hexdigest()[:12]}")
        if os.path.isdir(folder):
            return data, folder
    raise ValueError(
        f"no DATA was named, and the default, {data} with its tokenizer, is not here: run 'make "
        "train' in a checkout first and inspect from there, or name your data and --tokenizer"
    )
