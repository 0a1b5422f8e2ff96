"""What a run says of its flags when it starts."""

from __future__ import annotations

import argparse
import shlex

import pytest

from odb_megatron.megatron.config import OdbConfig, add_odb_arguments
from odb_megatron.megatron.images import add_image_arguments


def _lines(flags: str, *, replicas: int, has_images: bool = False) -> list[str]:
    from odb_megatron.megatron.run_report import start_lines

    parser = add_odb_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if has_images:
        add_image_arguments(parser)
    args = parser.parse_args(shlex.split(flags))
    args.seq_length, args.seed = 128, 7
    args.data_parallel_size = replicas
    return start_lines(args, OdbConfig.from_args(args))


@pytest.mark.megatron
def test_what_is_said_of_every_run() -> None:
    assert _lines("", replicas=2) == ["--odb is off: padded baseline"]
    reproduce, scope = _lines("--odb", replicas=2)
    assert reproduce.startswith("reproduce with --odb --odb-token-budget 128 ")
    assert reproduce.endswith(" --seed 7")
    assert scope == "replicas are balanced in each step: replicas meet once per optimizer step"

    assert _lines("--odb", replicas=2, has_images=True)[0] == reproduce


@pytest.mark.megatron
def test_flags_of_images_are_in_the_line() -> None:
    given = (
        "--odb-image-folder '/a b' --odb-image-patch-size 16 --odb-image-merge 1 "
        "--odb-image-min-pixels 512 --odb-image-max-pixels 25088 --odb-image-token '<|i|>'"
    )
    parser = add_image_arguments(argparse.ArgumentParser())
    defaults = vars(parser.parse_args([]))
    values = vars(parser.parse_args(shlex.split(given)))
    assert all(values[name] != default for name, default in defaults.items())
    line = _lines(f"--odb {given}", replicas=2, has_images=True)[0]
    assert line.endswith(f" {given} --seed 7")
    again = line.removeprefix("reproduce with ").removesuffix(" --seed 7")
    assert _lines(again, replicas=2, has_images=True)[0] == line
