"""A run under Megatron: what a pretrain script passes to `pretrain()`, and what its hooks do."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.utils import Split
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from odb_megatron import doctor
from odb_megatron.comm.groups import SourceGroup, ranks_of
from odb_megatron.comm.heartbeat import Deadline
from odb_megatron.data.feed import StepFeed
from odb_megatron.data.iterable import ItemStream
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.data.wire import StepHeader
from odb_megatron.elastic import USAGE_ERROR, leave_reason
from odb_megatron.errors import SettingError, usage_errors
from odb_megatron.megatron.attention import Attention
from odb_megatron.megatron.checkpoint import (
    DataCheckpoint,
    data_identity,
    gather_json,
    restore,
    saved_text,
)
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.forward_step import (
    LossOf,
    RouterMask,
    make_forward_step,
    packed_batch,
    padded_batch,
)
from odb_megatron.megatron.hooks import REPLACED, Hooks, StepCalculator, is_within_step
from odb_megatron.megatron.providers import build_loader, build_padded, build_streams
from odb_megatron.megatron.replica import (
    PeerWatch,
    ReplicaData,
    replica_ranks,
    require_agreement,
)
from odb_megatron.megatron.run_report import (
    RunReport,
    Writers,
    logged_loss,
    megatron_writers,
    memory_use,
    start_lines,
)
from odb_megatron.megatron.setup import choose_backend, total_samples
from odb_megatron.megatron.sharing import PARTS, SharedGroups, largest_difference
from odb_megatron.megatron.topology import has_state_layers, padding_multiple, why_not_shared
from odb_megatron.megatron.versions import describe_megatron
from odb_megatron.plan.blocks import blocks_of
from odb_megatron.plan.record import ReplicaFailedError

__all__ = ["OdbRun"]

INTERRUPTED = 130
"""Exit code after SIGINT, as shells have it."""

_DRY_STEPS = 3
"""Steps that `--odb-dry-run` reads."""

_CLEAN_CLOSE_S = 60.0
"""Seconds to wait for other replicas at the end of a run that all of them have reached."""

_CLOSE_S = 2.0
"""The same after an error, which others may not know of: this process must end for them to."""

_EXACT, _ROUNDED = 1e-4, 0.05
"""Largest difference, relative to the largest value, of a sample shared and alone: in float32, and
in half precision."""

_SHOWN = 600
"""Most characters of an error that the other ranks are told."""


class OdbRun:
    """One run of `pretrain()`, packed with `--odb` and padded without.

    Use as a context around `pretrain()`: leaving it prints the summary and undoes every hook, also
    after an exception.

    Args:
        args: from `setup.parse_and_validate_args`.
        datasets: your own datasets instead of `--data-path`: a function of Megatron's
            (train, valid, test) sample counts that returns one dataset or None per split. They are
            map-style, and the train dataset can be iterable (docs/data.md). Items are mappings
            with `tokens`, `labels` and `loss_mask`.

    Attributes:
        forward_step: pass to `pretrain()`.
        datasets_provider: pass to `pretrain()`.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        datasets: Callable[[Sequence[int | None]], Sequence[Any]] | None = None,
    ) -> None:
        self.config = OdbConfig.from_args(args)
        self._args, self._datasets = args, datasets
        self._place = replica_ranks(args, rank=args.rank)
        self._hooks = self._make_hooks()
        self._undo_attention: Callable[[], None] = lambda: None
        self._model_class: Callable[..., Any] | None = None
        self._saved: str | None = None  # data state of the loaded checkpoint
        self._calculator: StepCalculator | None = None
        self._loader: StepLoader | None = None
        self._replica: ReplicaData | None = None
        self._groups: list[SourceGroup] = []  # on source ranks
        self._padded: Sequence[SampleStream | ItemStream | None] = ()
        self._peers: PeerWatch | None = None
        self._checkpoint: DataCheckpoint | None = None
        self._last_step: Any = None  # what shows it, its loss, memory
        self._unfit = ""  # what of this machine fails, in a dry run
        self._parts: list[torch.nn.Module] = []  # of the model, that sharing is about
        self._watch: RemovableHandle | None = None
        self._shared: SharedGroups | None = None
        self._max_share = 1
        self._attention = self._choose_attention()
        lines = self._start_lines()
        self._report = RunReport(args, self.config, lines=lines, writers=self._writers)
        self.forward_step = self._make_forward_step()
        self.datasets_provider = self._make_provider()

    # --- what another host than Megatron's own `pretrain()` has otherwise -----------------------

    def _make_hooks(self) -> Hooks:
        return Hooks(
            self,
            packed=self.config.enabled,
            has_experts=self._args.num_experts is not None,
            plans_shapes=self._plans_shapes,
        )

    @property
    def _plans_shapes(self) -> bool:
        """Whether pipeline stages take each other's shapes from step headers."""
        return self.config.enabled and self._args.pipeline_model_parallel_size > 1

    def _choose_attention(self) -> Attention:
        return choose_backend(self._args)

    def _start_lines(self) -> list[str]:
        """Return what is printed first."""
        attention = f"attention backend {self._attention.name}: {self._attention.reason}"
        return [describe_megatron(), attention, *start_lines(self._args, self.config)]

    def _writers(self) -> Writers:
        return megatron_writers(self._args)

    def _make_forward_step(self) -> Callable[..., Any]:
        args = self._args
        padded = partial(padded_batch, multiple=padding_multiple(args))
        packed = partial(
            packed_batch,
            has_state_layers=has_state_layers(args),
            context_size=self._place.context_size,
            group_of=self._group_of,
        )
        return make_forward_step(
            packed if self.config.enabled else padded,
            on_batch=self._on_batch,
            router_mask=self._router_mask(),
            loss=self._loss(),
        )

    def _group_of(self, width: int) -> Any:
        """Return the context-parallel group of so many replicas; None where nothing is shared."""
        return None if self._shared is None else self._shared.of(width)

    def _why_not_shared(self) -> str:
        """Return why replicas cannot train a sample together; "" where a check may tell."""
        if self._attention.name.startswith("flash"):
            return "flash-attn of local layers has no context parallelism"
        return why_not_shared(self._args)

    def _share(self) -> int:
        """Return how many replicas may share a sample, at most; every rank calls it.

        Raises:
            ValueError: it cannot be done.
        """
        args, asked, parts = self._args, self.config.share_long, self._parts
        if self._watch is not None:
            self._watch.remove()
        blocks = blocks_of(args.data_parallel_size)
        most = min(map(len, blocks))
        most = 1 << min(asked, most).bit_length() - 1
        reason, self._parts = self._why_not_shared(), []
        if most == 1:
            return 1
        if not reason and not parts:
            reason = "no layer of megatron-core was built"
        if not reason:
            groups = ProcessGroupCollection.use_mpu_process_groups()
            block = next(one for one in blocks if mpu.get_data_parallel_rank() in one)
            timeout = timedelta(minutes=args.distributed_timeout_minutes)
            shared = SharedGroups(groups, block, timeout=timeout, modules=parts)
            shared.make({shared.pair})
            found = largest_difference(parts, shared, multiple=padding_multiple(args))
            if found <= (_ROUNDED if args.bf16 or args.fp16 else _EXACT):
                self._shared = shared
                return most
            reason = f"a shared sample differs from the same alone by {found:.2g} of its values"
        raise SettingError("{odb_share_long} {asked}: {reason}", asked=asked, reason=reason)

    def _loss(self) -> LossOf | None:
        """Return the loss of a micro-batch; None for that of `forward_step`."""
        return None

    def _router_mask(self) -> RouterMask | None:
        args = self._args
        if not self.config.enabled or args.num_experts is None:
            return None
        return RouterMask(
            context_size=self._place.context_size,
            context_rank=self._place.context_rank,
            sequence_size=args.tensor_model_parallel_size if args.sequence_parallel else 1,
            sequence_rank=self._place.tensor_rank,
        )

    def _make_replica(self) -> ReplicaData:
        return ReplicaData(self._args, self._place, deadlines=self._deadlines)

    @property
    def _deadlines(self) -> dict[str, Deadline]:
        """Of each split's loader."""
        return {} if self._peers is None else self._peers.deadlines

    def _tokenizer(self) -> Any:
        """Return the tokenizer; None for Megatron's global one."""
        return None

    @property
    def _goes_on(self) -> bool:
        """Whether the training data go on where the loaded checkpoint left them."""
        return bool(self._args.iteration) and not self._args.finetune and not self._args.skip_train

    # --- the host's calls -----------------------------------------------------------------------

    def pretrain(
        self,
        *,
        forward_step: Callable[..., Any] | None = None,
        model_class: Callable[..., Any] | None = None,
    ) -> None:
        """Call Megatron's `pretrain()`; within the run's context.

        Args:
            forward_step: None for `self.forward_step`.
            model_class: takes the keyword arguments of `GPTModel`, which it stands for.
        """
        self._model_class = model_class
        from megatron.core.enums import ModelType
        from megatron.training import argument_utils, training

        with warnings.catch_warnings():  # it recommends a model configuration to a model provider
            warnings.simplefilter("ignore", UserWarning)
            container = argument_utils.pretrain_cfg_container_from_args(self._args)
        training.pretrain(
            cfg_container=container,
            train_valid_test_dataset_provider=self.datasets_provider,
            model_provider=self.model_provider,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=forward_step or self.forward_step,
        )

    def model_provider(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        """Build a chunk of a GPT, as gpt_builders.py does (0.18.2, dev)."""
        assert config is None, "given where a second model is built, which is refused"
        place = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
        return self.build_model(self._args, **place, pg_collection=pg_collection)

    def build_model(
        self, args: argparse.Namespace, *, vp_stage: int | None = None, **place: Any
    ) -> Any:
        """Build a chunk of a GPT of these arguments' shape."""
        from megatron.core.models.gpt import GPTModel, gpt_layer_specs
        from megatron.training.arguments import core_transformer_config_from_args

        config = core_transformer_config_from_args(args)
        options = {
            "use_transformer_engine": config.transformer_impl == "transformer_engine",
            "vp_stage": vp_stage,
        }
        norms = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}
        specs = gpt_layer_specs
        prediction = None
        if config.mtp_num_layers is not None:
            layer = specs.get_gpt_decoder_layer_specs(config, **options, **norms)[-1]
            prediction = specs.get_gpt_mtp_block_spec(config, layer, **options)
        return (self._model_class or GPTModel)(
            config=config,
            transformer_layer_spec=specs.get_gpt_decoder_block_spec(config, **options, **norms),
            mtp_block_spec=prediction,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            vp_stage=vp_stage,
            **place,
        )

    def __enter__(self) -> OdbRun:
        self._hooks.install()
        self._undo_attention = self._attention.install()
        if self.config.enabled and self.config.share_long > 1:
            self._watch = register_module_module_registration_hook(self._note_part)
        return self

    def _note_part(self, _owner: Any, _name: str, part: Any) -> None:
        if isinstance(part, PARTS):
            self._parts.append(part)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clean = kind is None or (isinstance(error, SystemExit) and not error.code)
        has_left = clean and is_within_step(trace)
        if clean and self._peers is not None:
            self._peers.heartbeat.leave(within_step=has_left)
        if has_left:
            clean, error = False, RuntimeError("the script has left by sys.exit() within a step")
            leave_reason(str(error))
        elif not clean and error is not None:
            self._tell_failure(error)
        self._hooks.undo()
        self._undo_attention()
        if self._watch is not None:
            self._watch.remove()
        with nullcontext() if clean else suppress(Exception):
            self._show_last_step(together=clean)
        ended = True
        if self._replica is not None:  # stop the threads that make steps, here and everywhere
            ended = self._replica.close(timeout_s=_CLEAN_CLOSE_S if clean else _CLOSE_S)
        # Where this rank leads its replica: it knows the planner's progress.
        feed = None if self._loader is None else self._train_feed
        with usage_errors() if self.config.dry_run else nullcontext():
            self._report.finish(feed, together=clean and ended)
        if self._peers is not None:
            self._peers.close(clean=clean)
        if self.config.dry_run:  # exit code 2 where something does not fit
            with usage_errors():
                if isinstance(error, (ValueError, ReplicaFailedError)):
                    raise ValueError(str(error)) from error
                if self._unfit:
                    raise ValueError(self._unfit)
        if isinstance(error, KeyboardInterrupt):
            print(f"odb: rank {self._args.rank} was interrupted", file=sys.stderr, flush=True)
            raise SystemExit(INTERRUPTED) from None
        if has_left and error is not None:
            raise error

    def _tell_failure(self, error: BaseException) -> None:
        """Tell the launcher, and the other ranks, unless one of them is the cause."""
        dry = self.config.dry_run
        text = str(error) if dry else f"{type(error).__name__}: {error}"
        is_told = isinstance(error, ReplicaFailedError)
        loss = "" if self._peers is None or is_told else self._peers.loss_behind_error()
        if isinstance(error, Exception):
            reason = text if loss in text else f"{loss} ({text})"
            is_told = is_told or bool(loss)
            leave_reason(reason, is_told=is_told, code=USAGE_ERROR if dry else 1)
        if self._peers is not None and not loss and not is_told:
            self._peers.heartbeat.tell_failure(text[:_SHOWN])

    # --- what the hooks tell -------------------------------------------------------------------

    def on_schedule(self, *, training: bool) -> None:
        if self._peers is not None:
            self._peers.heartbeat.begin_step()
        if training:
            self._report.start_clock()
            if self._checkpoint is not None:
                self._checkpoint.note_trained()

    def on_header(self, header: StepHeader, *, training: bool) -> None:
        """Fix the loop's end and the step's sample count; make the groups that it needs."""
        totals = header.totals
        if self._shared is not None:
            self._shared.make({width for width, _ in header.shares})
        if not training:
            counts = [totals.num_samples, totals.num_loss_tokens, totals.num_left_out]
            self._report.evaluated([*counts, totals.num_truncated])
            return
        assert self._calculator is not None
        self._calculator.begin_step(totals)
        self._report.begin_step(header)
        done = self._args.curr_iteration + 1
        if totals.is_final:
            self._args.train_iters = done
        elif done >= self._args.train_iters:
            self._args.train_iters = done + 1

    def on_trained(self) -> None:
        """The work of a schedule is launched; the loss of the step before it has come meanwhile."""
        self._report.mark()
        self._show_last_step()

    def on_logged(self, values: dict[str, Any]) -> None:
        """Record the step; it is shown with the next one, or at a save or the end."""
        show = None
        if self._report.records:
            delivered = None if self._train_feed is None else self._train_feed.delivered
            show = self._report.end_step(values, delivered=delivered)
        self._show_last_step()  # without --odb
        self._last_step = (show, logged_loss(values["loss_dict"]), memory_use())

    def _show_last_step(self, *, together: bool = True) -> None:
        """Show the last step; on the source rank with what the last pipeline stage knows.

        The first stage holds the most activations, the last one the logits.
        """
        if self._last_step is None:
            return
        (show, read, memory), self._last_step = self._last_step, None
        loss, reports = read(), 0
        if together and self._replica is not None and self._args.pipeline_model_parallel_size > 1:
            known = math.nan if loss is None else loss
            found, peak, reserved = self._replica.report([known, *memory])
            loss = None if math.isnan(found) and loss is None else found
            memory = (max(memory[0], int(peak)), max(memory[1], int(reserved)))
            reports = self._replica.num_reported()
        if show is not None:
            show(loss, memory, reports)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save the data's state as well; no watchdog ends the process within."""
        self._show_last_step()
        with nullcontext() if self._peers is None else self._peers.saving():
            if self._checkpoint is not None:
                self._checkpoint.save()
            yield

    def _on_batch(self, item: Any) -> None:
        if torch.is_grad_enabled():
            self._report.on_batch(item)
        elif not self.config.enabled:
            parts = (item["loss_mask"] > 0, item["skipped"] > 0, item["truncated"])
            loss_tokens, left_out, truncated = (int(part.sum()) for part in parts)
            num = len(item["skipped"]) - left_out
            self._report.evaluated([num, loss_tokens, left_out, truncated])

    # --- data ----------------------------------------------------------------------------------

    def _make_provider(self) -> Callable[..., tuple[Any, Any, Any]]:
        def provider(sizes: Sequence[int | None], vp_stage: int | None = None) -> Any:
            if not vp_stage:
                require_agreement(self._args, self._place)
            if self._replica is None:  # else another chunk of a virtual pipeline asks
                if self.config.enabled:
                    self._peers = PeerWatch(self._args, self.config)
                self._replica = self._make_replica()
                if self.config.enabled:
                    self._max_share = self._share()
                    self._build_packed(self._replica, sizes)
                else:
                    self._padded = self._build_streams(sizes)
            if not self.config.enabled:
                return tuple(build_padded(self._args, self._padded))
            if self.config.dry_run:
                self._read_first_steps(self._replica)
                raise SystemExit(0)
            return self._replica.iterators(vp_stage or 0)

        provider.is_distributed = True  # type: ignore[attr-defined]  # every rank builds its data
        return provider

    def _build_streams(self, sizes: Sequence[int | None]) -> list[SampleStream | ItemStream | None]:
        """Build the streams, and on ranks that read data what goes with them."""
        args = self._args
        reads_data = self._place.is_source or not self.config.enabled
        datasets = None
        if self._datasets is not None:
            if not reads_data:  # and nothing of Megatron's is built, which would wait for all ranks
                return []
            datasets = self._datasets(sizes)
        streams = build_streams(
            args,
            self.config,
            sizes,
            datasets=datasets,
            reads_data=reads_data,
            tokenizer=self._tokenizer(),
            max_share=self._max_share,
        )
        if not reads_data:
            return []
        if streams[0] is None and not args.skip_train:
            raise SettingError(
                "there is nothing to train on: the train split is empty; change {split} or "
                "{data_path}"
            )
        if streams[1] is None and args.eval_iters:
            raise SettingError(
                "there is nothing to evaluate on: the validation split is empty; change "
                "{split}, give {valid_data_path}, or pass {eval_iters} 0"
            )
        ranks = ranks_of(mpu.get_data_parallel_group())
        timeout_s = 60.0 * args.distributed_timeout_minutes
        self._groups = [
            SourceGroup(ranks, name=name, timeout_s=timeout_s, deadline=self._deadlines.get(name))
            for name in ("train", "valid", "test", "checkpoint")
        ]
        if streams[0] is not None and self._place.is_source:  # padded, every rank has its data
            self._report.open(streams[0], self._groups[-1])
        return streams

    def _build_packed(self, replica: ReplicaData, sizes: Sequence[int | None]) -> None:
        args = self._args
        self._saved = self._saved_text()
        replica.build(lambda: self._build_loaders(sizes))
        if not args.skip_train:
            group = self._groups[-1] if self._groups else None  # on source ranks
            channel = replica.checkpoint_channel
            self._checkpoint = DataCheckpoint(args, group=group, channel=channel)
            if self._loader is not None:
                identity = data_identity(args, self._loader.stream)
                assert replica.train is not None, "built with the loader"
                self._checkpoint.watch(replica.train, identity=identity)
        name = REPLACED["_GLOBAL_NUM_MICROBATCHES_CALCULATOR"]
        self._hooks.replace(name, self._make_calculator)
        args.dataloader_type = "external"
        remaining = max(0, total_samples(args) - args.consumed_train_samples)
        steps = -(-remaining // args.global_batch_size)
        if replica.train is not None and replica.train.num_steps == 0:
            steps = 0  # the end of iterables shows only in their state
        args.train_iters = args.iteration + steps

    def _make_calculator(self, base: Any) -> StepCalculator:
        self._calculator = StepCalculator(base, num_replicas=self._args.data_parallel_size)
        return self._calculator

    def _saved_text(self) -> str | None:
        return saved_text(self._args) if self._goes_on else None

    def _build_loaders(self, sizes: Sequence[int | None]) -> list[StepLoader | None]:
        streams = self._build_streams(sizes)
        loaders = [
            None
            if stream is None
            else build_loader(
                self._args,
                self.config,
                stream,
                split=split,
                group=group,
                deadline=self._deadlines.get(split.name),
                max_share=self._max_share,
            )
            for split, stream, group in zip(Split, streams, self._groups, strict=False)
        ]
        if loaders and loaders[0] is not None:
            self._loader, group = loaders[0], self._groups[0]
            if self._goes_on and restore(self._args, self._loader, group=group, text=self._saved):
                self._report.goes_on()
        return loaders

    @property
    def _train_feed(self) -> StepFeed | None:
        return None if self._replica is None else self._replica.train

    def _read_first_steps(self, replica: ReplicaData) -> None:
        """Read and plan the first steps, and look at the machine; every rank calls it."""
        args, (train, *_), longest = self._args, replica.iterators(0), 0
        for number in range(_DRY_STEPS):
            self._report.start_clock()
            header = None if train is None else next(train, None)
            if train is None or not isinstance(header, StepHeader):
                break
            self._report.begin_step(header)
            for _ in range(header.totals.num_micro_batches):
                self._report.on_batch(next(train))
            args.consumed_train_samples += header.totals.num_consumed
            if self._report.records:
                values = {"iteration": args.iteration + number + 1, "loss_dict": {}}
                values |= {"grad_norm": None, "learning_rate": None}
                delivered = replica.train.delivered if replica.train else None
                record = self._report.end_step(values, delivered=delivered)(None, memory_use(), 0)
                longest = max(longest, *(n for lengths in record.lengths for n in lengths), 0)
        if self._groups:
            longest = max(gather_json(self._groups[-1], longest))
        if args.rank == 0:
            print(f"odb: the longest sample of these steps has {longest} tokens", flush=True)
        if int(os.environ.get("LOCAL_RANK", args.rank)) == 0:
            self._check_machine()

    def _check_machine(self) -> None:
        args = self._args
        here = int(os.environ.get("LOCAL_WORLD_SIZE", min(args.world_size, 8)))
        load = doctor.Load(
            ranks=here,
            readers=max(1, here // len(self._place.ranks)),
            num_workers=args.num_workers or 0,
            replicas=args.data_parallel_size,
            uses_nccl=args.distributed_backend == "nccl",
        )
        found = doctor.check_run(load, num_nodes=-(-args.world_size // here))
        told = [one for one in found if one.status in (doctor.WARNING, doctor.FAILURE)]
        if told:
            print(f"odb: this machine, rank {args.rank}:\n{doctor.render(told)}", flush=True)
        self._unfit = "; ".join(
            f"{one.subject}: {one.observed}, expected {one.expected}: {one.hint}"
            for one in told
            if one.status == doctor.FAILURE
        )
