"""Refuses data and folders that a run cannot use, before Megatron starts.

Must not open a data file: what it holds shows when its samples are counted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator

from odb_megatron.data.preprocess import SampleRules
from odb_megatron.data.records import require_data
from odb_megatron.errors import usage_errors
from odb_megatron.megatron.replica_ranks import replica_ranks
from odb_megatron.megatron.setup import dataset_config, odb_config

__all__ = ["require_paths"]


def require_paths(args: argparse.Namespace, *, has_datasets: bool = False) -> None:
    """Check the paths that this rank reads and writes; called by a script that is about to train.

    Args:
        args: from `setup.parse_and_validate_args`.
        has_datasets: the script gives datasets of its own, so that no data flags are read.

    Raises:
        SystemExit: no data flags, or a path that cannot be used (2).
    """
    config = odb_config(args)
    is_source = replica_ranks(args, rank=args.rank).is_source
    with usage_errors():
        if not has_datasets:
            for path in _data_paths(args):
                if is_source or not config.enabled:  # the padded baseline reads on every rank
                    require_data(path)
        if args.odb_log_dir is not None and is_source:
            _require_folder(args.odb_log_dir)


def _data_paths(args: argparse.Namespace) -> Iterator[str]:
    rules = SampleRules(context=args.seq_length, token_budget=args.seq_length)
    data = dataset_config(args, rules=rules)
    for blend in (data.blend, *(data.blend_per_split or ())):
        if blend is not None:
            yield from blend[0]


def _require_folder(folder: str) -> None:
    """Make the folder of the step logs, and write to it: permissions do not tell all."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--odb-log-dir {folder} cannot be written ({error}): give a folder that can"
        ) from error
