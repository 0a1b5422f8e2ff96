"""Writes the token lengths of a chat file's samples, for `gpu_throughput.py --chat-lengths`.

Run where the data and a tokenizer are; the file it writes is a few kilobytes and holds no text.
Must not cut anything: the benchmark does, by its own context.

    python benchmarks/chat_lengths.py --data chat-mix --json build/bench/chat_lengths.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from chat_data import MissingDataError, prepare
from flags import data_name, output_file
from training_runs import write_json

from odb_megatron.simulation.lengths import read_lengths

_LONGEST = 1 << 24


def main() -> int:
    """Tokenize, count, write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=data_name, default="chitchat", help="chitchat (default), chat-mix or a file")
    add("--tokenizer", type=Path, help="folder of a tokenizer; default: one trained on the data")
    add("--json", type=output_file, required=True, help="write the lengths here")
    options = parser.parse_args()
    try:
        data = prepare(options.data)
    except MissingDataError as error:
        print(f"chat_lengths.py: error: {error}", file=sys.stderr)
        return 2
    tokenizer = options.tokenizer or data.tokenizer
    try:
        found = read_lengths(str(data.path), token_budget=_LONGEST, tokenizer=str(tokenizer))
    except ValueError as error:
        parser.error(str(error))
    write_json(
        options.json,
        {
            "data": options.data,
            "tokenizer": tokenizer.name,
            **found.summary(),
            "lengths": sorted(found.values.tolist()),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
