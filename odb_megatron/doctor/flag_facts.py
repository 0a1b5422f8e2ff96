"""`python -m odb_megatron.doctor.flag_facts REQUEST OUT`: a command's flags, checked, and its data.

Runs in a process of its own, which starts nothing: flags are parsed by Megatron's parser and ODB's
and held against both their rules, as every rank would do first; then records are read for their
lengths. Must not create process groups, and must not write but to OUT and a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from odb_megatron.doctor.command_facts import DataFacts, FlagFacts, Request

__all__ = ["examine", "main"]

_LARGEST = 64
"""Records of a file, the largest by bytes, that are read besides those spread over it."""

_ANY = 1 << 40


def main(argv: Sequence[str]) -> None:
    """Read the request, write the facts."""
    request, out = argv
    values = json.loads(Path(request).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="odb-doctor-") as cache:
        facts = examine(Request(**{**values, "flags": tuple(values["flags"])}), cache=cache)
    Path(out).write_text(json.dumps(asdict(facts)), encoding="utf-8")


def examine(request: Request, *, cache: str) -> FlagFacts:
    """Check flags and read data.

    Args:
        request: see `command_facts.Request`.
        cache: folder for what Megatron and the tokenizer keep; instead of `--data-cache-path`.
    """
    if request.folder:
        sys.path[0] = request.folder  # as Python has it: a checkout's own Megatron comes first
    _device_layer(request)
    problems: list[str] = []
    args, unknown = _parse(request, cache, problems)
    if args is None:
        return FlagFacts(problems=tuple(problems), unknown=unknown)
    problems += _problems(lambda: _complete(args))
    backend, backend_problem = _backend(args)
    facts = _values(args)
    return FlagFacts(
        problems=tuple(problems),
        unknown=unknown,
        backend=backend,
        backend_problem=backend_problem,
        data=_data(args, request, facts) if facts["limit"] else (),
        **facts,
    )


def _device_layer(request: Request) -> None:
    """Let flags be validated where there is no GPU: validation asks for its generation."""
    import torch

    from odb_megatron.testing import cpu_device

    if request.on_cpu or not torch.cuda.is_available():
        cpu_device.activate()


def _parse(
    request: Request, cache: str, problems: list[str]
) -> tuple[argparse.Namespace | None, str]:
    """Return the arguments, and what is said of flags that only the script can know."""
    from odb_megatron.megatron.multimodal.arguments import add_image_arguments
    from odb_megatron.megatron.setup import parse_flags

    sys.argv = [request.script, *request.flags, "--data-cache-path", cache]
    has_images = any(flag.startswith(("--odb-image-", "--odb-vision-")) for flag in request.flags)
    extra = add_image_arguments if has_images else None
    try:
        return parse_flags(extra), ""
    except SystemExit:
        problems.append("the flags ask for help or a version: nothing would be trained")
        return None, ""
    except ValueError as error:
        unknown = str(error)
    if not unknown.startswith("unrecognized arguments"):
        problems.append(unknown)
        return None, ""
    try:
        return parse_flags(extra, ignores_unknown=True), unknown
    except ValueError as error:
        problems.append(str(error))
        return None, unknown


def _complete(args: argparse.Namespace) -> None:
    from odb_megatron.megatron.setup import complete_args

    complete_args(args, {"tokenizer_type": "HuggingFaceTokenizer"})


def _problems(check: Any) -> list[str]:
    """Return what a check refuses, one text for each."""
    from odb_megatron.megatron.usage import usage_reason

    try:
        check()
    except SystemExit as ended:
        return [f"Megatron ends with {ended.code!r} as it reads the flags"]
    except Exception as error:
        return (usage_reason(error) or f"{type(error).__name__}: {error}").splitlines()
    return []


def _backend(args: argparse.Namespace) -> tuple[str, str]:
    from odb_megatron.megatron.setup import choose_backend

    try:
        chosen = choose_backend(args)
    except Exception as error:  # of arguments that are not complete
        return "", str(error)
    return f"{chosen.name}: {chosen.reason}", ""


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """Return what checks of the machine need, and the configuration as flags."""
    from odb_megatron.megatron.setup import odb_config
    from odb_megatron.megatron.topology import padding_multiple

    size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    size *= getattr(args, "context_parallel_size", None) or 1
    replicas = max(1, args.world_size // size)
    values: dict[str, Any] = {
        "has_odb": bool(args.odb),
        "uses_nccl": args.distributed_backend == "nccl",
        "num_workers": int(args.num_workers or 0),
        "replicas": replicas,
        "model_parallel": size,
        "batch_tokens": 0 if args.odb else (args.micro_batch_size or 1) * (args.seq_length or 0),
        "overlong": args.odb_overlong,
        "bad_record": args.odb_bad_record,
        "limit": 0,
    }
    if not args.seq_length:
        return values
    budget = args.odb_token_budget or args.seq_length
    values["multiple"] = padding_multiple(args)
    values["context"] = args.seq_length
    values["token_budget"] = budget if args.odb else args.seq_length
    values["limit"] = min(values["context"], values["token_budget"])
    if args.odb:
        try:
            values["described"] = odb_config(args).describe()
        except (AttributeError, TypeError, ValueError):
            values["described"] = ""  # said among the problems
    return values


# --- data ------------------------------------------------------------------------------------


def _data(
    args: argparse.Namespace, request: Request, facts: dict[str, Any]
) -> tuple[DataFacts, ...]:
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except Exception as error:  # asserts of Megatron's, or a file of paths that is not there
        return (DataFacts(path=str(args.data_path), error=f"{type(error).__name__}: {error}"),)
    splits = [blend] if blend is not None else list(per_split or ())
    paths = dict.fromkeys(path for split in splits if split for path in split[0])
    found, renderer = [], None
    for path in paths:
        try:
            renderer = renderer or _renderer(args, path)
            found.append(_measure(args, path, renderer, request, facts))
        except Exception as error:  # whatever opening a user's file raises
            told = str(error) if isinstance(error, ValueError) else ""
            found.append(DataFacts(path=path, error=told or f"{type(error).__name__}: {error}"))
    return tuple(found)


def _renderer(args: argparse.Namespace, path: str) -> Any:
    """Return the tokenizer and template for a text file; None for token data."""
    from odb_megatron.data.chat import ChatRenderer
    from odb_megatron.data.chat_record import template_arguments
    from odb_megatron.data.records import has_records
    from odb_megatron.data.tokenizer import adds_special_tokens, usable_tokenizer

    if not has_records(path) or args.tokenizer_type == "NullTokenizer":
        return None
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    if args.tokenizer_type is None:
        args.tokenizer_type = "HuggingFaceTokenizer"
    tokenizer = build_tokenizer(args)
    return ChatRenderer(
        usable_tokenizer(tokenizer),
        template_arguments=template_arguments(args.odb_template_args or "{}"),
        add_special_tokens=adds_special_tokens(tokenizer),
    )


def _measure(
    args: argparse.Namespace,
    path: str,
    renderer: Any,
    request: Request,
    facts: dict[str, Any],
) -> DataFacts:
    """Read a file's records for their lengths: all, or some and the largest."""
    import numpy as np

    from odb_megatron.data.preprocess import BadRecordPolicy, SampleRules
    from odb_megatron.data.sample import Skipped
    from odb_megatron.data.sources import open_source
    from odb_megatron.megatron.multimodal.arguments import image_rules
    from odb_megatron.plan.padding import padded_length

    rules = SampleRules(
        context=_ANY,
        token_budget=_ANY,
        bad_record=BadRecordPolicy.SKIP,
        vocab_size=getattr(args, "padded_vocab_size", None) or 0,
        whole_weights=args.odb_loss_per is None,
    )
    source = open_source(
        path, rules=rules, renderer=renderer, mmap=args.mmap_bin_files, images=image_rules(args)
    )
    sizes = source.rough_sizes()  # type: ignore[attr-defined]
    chosen = np.arange(len(source))
    if len(source) > request.num_records:
        spread = np.linspace(0, len(source) - 1, request.num_records).astype(np.int64)
        chosen = np.union1d(spread, np.argsort(sizes, kind="stable")[-_LARGEST:])
    longest, longest_at, num_overlong, num_bad, first_bad = 0, 0, 0, 0, ""
    for index in chosen.tolist():
        sample = source.sample(index, source=0)
        if isinstance(sample, Skipped):
            num_bad += 1
            first_bad = first_bad or sample.message.splitlines()[0]  # without a traceback
            continue
        length = len(sample)
        num_overlong += padded_length(length, facts["multiple"]) > facts["limit"]
        if length > longest:
            longest, longest_at = length, source.line(index)  # type: ignore[attr-defined]
    return DataFacts(
        path=path,
        num_records=len(source),
        num_read=len(chosen),
        longest=longest,
        longest_at=longest_at,
        num_overlong=int(num_overlong),
        num_bad=num_bad,
        first_bad=first_bad,
    )


if __name__ == "__main__":
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
    main(sys.argv[1:])
