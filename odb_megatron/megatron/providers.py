"""Streams and step loaders built from Megatron's arguments; the padded baseline's datasets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.datasets.utils import Split

from odb_megatron.comm.groups import SourceGroup
from odb_megatron.comm.heartbeat import Deadline
from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.iterable import ItemStream, as_shards, is_iterable
from odb_megatron.data.megatron_dataset import build_datasets, stream_from_dataset
from odb_megatron.data.order import CyclicOrder, PassOrder, build_order
from odb_megatron.data.sample import Sample, SampleRules, as_lines, as_object
from odb_megatron.data.sources import MapSource
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import PaddedDataset, SampleStream, SourcePart
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.images import image_rules
from odb_megatron.megatron.setup import dataset_config, total_samples
from odb_megatron.megatron.topology import count_multiple, padding_multiple, pipeline_of
from odb_megatron.plan.record import OPEN_TOTAL, PlanConfig

__all__ = ["ENDLESS", "build_loader", "build_padded", "build_streams"]

_SHOWN_TOKENS = 200

ENDLESS = 1 << 41
"""Stream positions of an evaluation loader that Megatron asks for a number of steps."""


def build_streams(
    args: argparse.Namespace,
    config: OdbConfig,
    sizes: Sequence[int | None],
    *,
    datasets: Sequence[Any] | None = None,
    reads_data: bool = True,
    tokenizer: Any = None,
) -> list[SampleStream | ItemStream | None]:
    """Build the train, valid and test streams; every rank must call it (world barriers).

    Args:
        args: Megatron's arguments.
        config: ODB's.
        sizes: samples per split, as Megatron's provider gets them; None means one epoch.
        datasets: the user's own datasets per split (None for none), instead of `--data-path`:
            map-style, the train dataset also iterable.
        reads_data: whether this rank leads a replica; others get None for every split.
        tokenizer: None for Megatron's global one.
    """
    rules = replace(
        config.sample_rules(multiple=padding_multiple(args)),
        vocab_size=getattr(args, "padded_vocab_size", None) or 0,
    )
    lengths = [total_samples(args), *sizes[1:]]
    found, renderer = datasets, None
    if found is None:
        if lengths[0] == OPEN_TOTAL:
            raise ValueError(
                "--odb-epochs needs --data-path, or an iterable train dataset of your own: give "
                "one of them"
            )
        renderer, tokenizer = _renderer(args, config, tokenizer)
        images = image_rules(args)
        found = build_datasets(
            dataset_config(
                args, rules=rules, tokenizer=tokenizer, renderer=renderer, images=images
            ),
            num_samples=[getattr(args, "odb_epoch_samples", lengths[0]), *sizes[1:]],
            is_built_on_rank=lambda: reads_data,
        )
    streams: list[SampleStream | ItemStream | None] = []
    for split, dataset, length in zip(Split, found, lengths, strict=True):
        if dataset is None or length == 0:
            streams.append(None)
            continue
        order = None  # the padded baseline has Megatron's sampler itself
        if config.enabled and length:
            order = build_order(
                args.dataloader_type,
                total=length,
                num_replicas=args.data_parallel_size,
                data_sharding=args.data_sharding,
            )
        if datasets is None:
            streams.append(stream_from_dataset(dataset, num_samples=length, order=order))
        else:
            own = _own_stream(args, rules, dataset, split=split, length=length, order=order)
            streams.append(own)
    is_asked = config.dry_run or config.log_dir is not None
    shows = is_asked and mpu.get_data_parallel_rank() == 0 and reads_data
    if shows and renderer is not None and isinstance(streams[0], SampleStream):
        _show_first(streams[0], renderer)
    return streams


def build_loader(
    args: argparse.Namespace,
    config: OdbConfig,
    stream: SampleStream | ItemStream,
    *,
    split: Split,
    group: SourceGroup,
    deadline: Deadline | None = None,
) -> StepLoader:
    """Build a split's step loader."""
    training = split is Split.train
    total, batch, consumed = len(stream), args.global_batch_size, args.consumed_train_samples
    if isinstance(stream, ItemStream):
        consumed = 0  # its state says where
    elif not training:
        batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
        total = ENDLESS
        goes_on = split is Split.valid and not args.skip_train
        consumed = args.consumed_valid_samples if goes_on else 0
    plan = PlanConfig(
        total=total,
        global_batch_size=batch,
        num_replicas=group.num_replicas,
        token_budget=config.token_budget,
        multiple=padding_multiple(args),
        sizes=config.pad_to,
        context=config.context if config.pad_to else 0,
        count_multiple=count_multiple(args),
        cost=config.cost_model(args),
        sync=config.sync,
        pipeline=pipeline_of(args),
        max_patches=config.max_patches,
        has_iterators=isinstance(stream, ItemStream),
        max_bad_records=config.max_bad_records if training else None,
        loss_per="" if config.loss_per is None else f"{config.loss_per.value} {config.count_scale}",
        data=f"{stream.fingerprint()}, --seed {args.seed}",
    )
    loader = StepLoader(
        stream, plan, channel=group, num_workers=args.num_workers, consumed=consumed
    )
    # Less than the others wait for this replica: so the worker is named, not the replica alone.
    loader.fetch_limit_s = 0.8 * config.timeout_s
    loader.deadline = deadline
    return loader


def build_padded(
    args: argparse.Namespace, streams: Sequence[SampleStream | ItemStream | None]
) -> list[PaddedDataset | None]:
    """Return the padded baseline's datasets, for Megatron's own samplers and loaders.

    Raises:
        ValueError: an iterable data set.
    """
    if any(isinstance(stream, ItemStream) for stream in streams):
        raise ValueError(
            "an iterable train dataset needs --odb: Megatron's samplers, which the padded baseline "
            "goes by, need random access"
        )
    return [
        PaddedDataset(stream, sequence_length=args.seq_length, split=split)
        if isinstance(stream, SampleStream)
        else None
        for split, stream in zip(Split, streams, strict=True)
    ]


def _renderer(
    args: argparse.Namespace, config: OdbConfig, tokenizer: Any
) -> tuple[ChatRenderer | None, Any]:
    if tokenizer is None:
        from megatron.training import get_tokenizer

        tokenizer = get_tokenizer()
    if args.tokenizer_type == "NullTokenizer":
        return None, tokenizer  # token data (.bin/.idx) needs no text
    renderer = ChatRenderer(tokenizer, template_arguments=config.template_args)
    args.odb_templates = renderer.digest()  # for `data_identity`
    return renderer, tokenizer


def _show_first(stream: SampleStream, renderer: ChatRenderer) -> None:
    """Print the run's first record token by token, with what is learnt marked."""
    try:
        sample = stream.fetch(0)
    except ValueError:
        return  # the loader comes to it, and says what becomes of it
    if isinstance(sample, Sample):
        shown = as_object(sample, renderer.tokenizer.decode)
        print(
            f"odb: the first record, {stream.describe(0)}; + is learnt; "
            f"chat template: {renderer.template().origin}",
            *as_lines(shown, most=_SHOWN_TOKENS),
            sep="\n",
            flush=True,
        )


def _own_stream(
    args: argparse.Namespace,
    rules: SampleRules,
    dataset: Any,
    *,
    split: Split,
    length: int | None,
    order: CyclicOrder | None,
) -> SampleStream | ItemStream:
    """Return the stream of a user's own dataset.

    Raises:
        ValueError: an iterable where there can be none, or a run length that needs one.
    """
    if not is_iterable(dataset):
        if length == OPEN_TOTAL:
            raise ValueError(
                "--odb-epochs without --data-path is for iterable train datasets, and this one is "
                f"a map-style {type(dataset).__name__}: give --train-samples N instead"
            )
        source = MapSource(dataset, rules=rules, name=f"{split.name} dataset")
        part = SourcePart(source=source, order=PassOrder(range(len(source)), seed=args.seed))
        return SampleStream([part], num_samples=length, order=order)
    if split is not Split.train:
        raise ValueError(
            f"the {split.name} dataset is an iterable {type(dataset).__name__}; evaluation has to "
            "see the same samples each time, also after a resume: give a map-style dataset (a "
            "list of items will do), or None and --eval-iters 0"
        )
    ends = length == OPEN_TOTAL
    assert length is not None, "the length of training is always given"
    return ItemStream(
        shards=as_shards(dataset, name="train dataset"),
        rules=rules,
        name="train dataset",
        passes=args.odb_epochs if ends else None,
        num_samples=length,
        keeps_state=bool(args.save),
    )
