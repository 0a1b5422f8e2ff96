"""A run under Megatron: what a pretrain script passes to `pretrain()`, and its bookkeeping.

Holds no policy: planning is in `plan`, flags in `arguments`, refusals in `validation`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from odb_megatron.comm.control import ControlGroup
from odb_megatron.data.finished_step import StepHeader
from odb_megatron.data.step_feed import StepFeed
from odb_megatron.data.step_loader import StepLoader
from odb_megatron.data.stream import SampleStream
from odb_megatron.megatron.attention import registry
from odb_megatron.megatron.attention.spec import PredictionLayers, layer_spec
from odb_megatron.megatron.compat import describe_megatron
from odb_megatron.megatron.cost_model import RunCost
from odb_megatron.megatron.counters import StepCalculator
from odb_megatron.megatron.data_state import state_path, write_state
from odb_megatron.megatron.forward_step import (
    RouterMask,
    make_forward_step,
    packed_batch,
    padded_batch,
)
from odb_megatron.megatron.hooks import Hooks
from odb_megatron.megatron.providers import (
    build_loader,
    build_padded,
    build_streams,
    control_group,
)
from odb_megatron.megatron.recorder import StepRecorder
from odb_megatron.megatron.replica_data import ReplicaData, require_agreement
from odb_megatron.megatron.replica_ranks import replica_ranks
from odb_megatron.megatron.resume import resume_data
from odb_megatron.megatron.setup import odb_config, total_samples
from odb_megatron.megatron.source_totals import source_totals
from odb_megatron.megatron.topology import balance_scope, padding_multiple
from odb_megatron.plan.policy import ExchangeMode
from odb_megatron.report.live import LiveReport, SourceTotals
from odb_megatron.report.step_record import StepLog

__all__ = ["OdbRun"]

_CLEAN_CLOSE_S = 60.0
"""Seconds to wait for other replicas at the end of a run that all of them have reached."""

_CLOSE_S = 2.0
"""The same after an error, which others may not know of: this process must end for them to."""


class OdbRun:
    """One run of `pretrain()`, packed with `--odb` and padded without.

    Use as a context around `pretrain()`: leaving it prints the summary and undoes every hook, also
    after an exception.

    Args:
        args: from `setup.parse_and_validate_args`.
        datasets: your own map-style datasets instead of `--data-path`: a function of Megatron's
            (train, valid, test) sample counts that returns one dataset or None per split. Items
            are mappings with `tokens`, `labels` and `loss_mask`.

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
        self.config = odb_config(args)
        self._args = args
        self._datasets = datasets
        self._total = total_samples(args)
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._backend = registry.select(self.config.attention, device_type=device_type)
        self._hooks = Hooks(
            self, packed=self.config.enabled, has_experts=args.num_experts is not None
        )
        self._prediction = PredictionLayers(self._backend) if args.mtp_num_layers else None
        self._calculator: StepCalculator | None = None
        self._loader: StepLoader | None = None
        self._replica: ReplicaData | None = None
        self._exchange: ControlGroup | None = None  # on leaders
        self._groups: list[ControlGroup] = []
        self._stream: SampleStream | None = None
        self._padded: Sequence[SampleStream | None] = ()
        self._recorder: StepRecorder | None = None
        self._report: LiveReport | None = None
        self._cost: RunCost | None = None
        self._log: StepLog | None = None
        self._tokens_before = 0
        self._choice_printed = False
        self._eval_left_out = self._eval_truncated = 0
        self._place = replica_ranks(args, rank=args.rank)
        self.forward_step = make_forward_step(
            packed_batch
            if self.config.enabled
            else partial(padded_batch, multiple=padding_multiple(args)),
            on_batch=self._on_batch,
            router_mask=self._router_mask(),
        )
        self.datasets_provider = self._make_provider()
        if args.rank == 0:
            self._print_start()

    def layer_spec(self, config: Any, vp_stage: int | None = None) -> Any:
        """Layer spec with the chosen attention backend; set as the model's layer spec."""
        return layer_spec(config.transformer, backend=self._backend, vp_stage=vp_stage)

    def prepare_model(self, model_config: Any) -> None:
        """Put the layer spec, and what micro-batches of varied size need, into the configuration.

        Padded ones are cut to their longest sample. Pipeline stages learn the length of each
        micro-batch from each other (`variable_seq_lengths`), for which Megatron demands the
        alltoall token dispatcher, also of dense models (transformer_config.py, 0.16.1 to 0.19.2).

        Args:
            model_config: from `megatron.training.argument_utils.gpt_config_from_args`.
        """
        model_config.transformer_layer_spec = self.layer_spec
        if self._args.pipeline_model_parallel_size > 1:
            transformer = model_config.transformer
            transformer.variable_seq_lengths = self._args.variable_seq_lengths = True
            if transformer.num_moe_experts is None:
                transformer.moe_token_dispatcher_type = "alltoall"

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

    def __enter__(self) -> OdbRun:
        self._hooks.install()
        if self._prediction is not None:
            self._prediction.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.remove()
        if self._prediction is not None:
            self._prediction.remove()
        if self._calculator is not None:
            self._calculator.remove()
        try:
            clean = kind is None or (isinstance(error, SystemExit) and not error.code)
            ended = self._close_data(clean=clean)
            self._finish(together=clean and ended)
        finally:
            if self._log is not None:
                self._log.close()

    # --- what the hooks tell -------------------------------------------------------------------

    def on_schedule(self, *, training: bool) -> None:
        """See `hooks.RunListener`."""
        if training and self._recorder is not None:
            self._recorder.start_clock()

    def on_header(self, header: StepHeader, *, training: bool) -> None:
        """See `hooks.RunListener`: fix the loop's end and the step's sample count."""
        if not training:
            self._eval_left_out += header.totals.num_left_out
            self._eval_truncated += header.totals.num_truncated
            return
        assert self._calculator is not None
        self._calculator.begin_step(header.totals)
        if self._recorder is not None:
            self._recorder.begin_step(header)
        if self._cost is not None:
            self._cost.begin_step(header)
        self._print_choice()
        done = self._args.curr_iteration + 1
        if header.totals.is_final:
            self._args.train_iters = done
        elif done >= self._args.train_iters:
            self._args.train_iters = done + 1

    def wants_backward(self) -> bool:
        """See `hooks.RunListener`."""
        return self._cost is not None and self._cost.is_timing

    def on_backward(self) -> None:
        """See `hooks.RunListener`."""
        if self._cost is not None:
            self._cost.end_backward()

    def on_logged(self, values: dict[str, Any]) -> None:
        """See `hooks.RunListener`: record the step and show it."""
        values = self._with_loss(values)
        if self._recorder is None:
            return
        record = self._recorder.end_step(
            values,
            handed_out=None if self._train_feed is None else self._train_feed.handed_out,
            reports=0 if self._replica is None else self._replica.num_reported(),
        )
        if self._log is not None:
            self._log.write(record)
        if self._report is not None:
            self._report.step(record)

    def on_saved(self, iteration: int) -> None:
        """See `hooks.RunListener`: write the loader's state beside the checkpoint."""
        feed = self._train_feed
        if self._loader is None or self._exchange is None or self._args.save is None:
            return
        assert feed is not None, "built with the loader"
        path = state_path(self._args.save, iteration=iteration, replica=self._exchange.replica)
        state = {
            "data": self._loader.stream.data_digest(),
            "tokens_so_far": self.tokens_so_far() or 0,
            "planner": feed.state_dict(),
        }
        write_state(path, state)

    def tokens_so_far(self) -> int | None:
        """See `hooks.RunListener`."""
        if self._recorder is None:
            return None
        return self._tokens_before + self._recorder.num_tokens

    # --- data ----------------------------------------------------------------------------------

    def _make_provider(self) -> Callable[..., tuple[Any, Any, Any]]:
        def provider(sizes: Sequence[int | None], vp_stage: int | None = None) -> Any:
            if not vp_stage:
                require_agreement(self._args, self._place)
            if self._replica is None:  # else another chunk of a virtual pipeline asks
                self._replica = ReplicaData(
                    self._args, self._place, plan_ahead=self.config.plan_ahead
                )
                if self.config.enabled:
                    self._build_packed(self._replica, sizes)
                else:
                    self._padded = self._build_streams(sizes)
            if not self.config.enabled:
                return tuple(build_padded(self._args, self._padded))
            return self._replica.iterators(vp_stage or 0)

        provider.is_distributed = True  # type: ignore[attr-defined]  # every rank builds its data
        return provider

    def _build_streams(
        self, sizes: Sequence[int | None], *, reads_data: bool = True
    ) -> list[SampleStream | None]:
        """Build the streams, and on leaders what goes with them."""
        args = self._args
        datasets = None
        if self._datasets is not None:
            if not reads_data:  # and nothing of Megatron's is built, which would wait for all ranks
                return [None] * len(sizes)
            datasets = self._datasets(sizes)
        streams = build_streams(args, self.config, sizes, datasets=datasets, reads_data=reads_data)
        if not reads_data:
            return streams
        if streams[0] is None and not args.skip_train:
            raise ValueError(
                "there is nothing to train on: the train split is empty; change --split or "
                "--data-path"
            )
        if streams[1] is None and (args.full_validation or args.eval_iters):
            raise ValueError(
                "there is nothing to evaluate on: the validation split is empty; change "
                "--split, give --valid-data-path, or pass --eval-iters 0"
            )
        self._groups = [
            control_group(
                args,
                name=name,
                has_payloads=self.config.enabled
                and self.config.exchange is not ExchangeMode.NONE
                and name == "train",
            )
            for name in ("train", "valid", "test")
        ]
        self._exchange = self._groups[0]
        self._start(streams, self._exchange)
        return streams

    def _build_packed(self, replica: ReplicaData, sizes: Sequence[int | None]) -> None:
        args = self._args
        with replica.told_of_failure():
            streams = self._build_streams(sizes, reads_data=replica.place.is_leader)
        replica.build(lambda: self._build_loaders(streams))
        if self._cost is not None and replica.train is not None:
            self._cost.leave_out(replica.train.planner_cpu_ns)
        self._calculator = StepCalculator.install(num_replicas=args.data_parallel_size)
        args.dataloader_type = "external"
        remaining = max(0, self._total - args.consumed_train_samples)
        steps = -(-remaining // args.global_batch_size)
        args.train_iters = args.iteration + steps

    @property
    def _train_feed(self) -> StepFeed | None:
        return None if self._replica is None else self._replica.train

    def _close_data(self, *, clean: bool) -> bool:
        """Stop the threads that make steps, here and on all replicas; return whether all have."""
        if self._replica is None:
            return True
        return self._replica.close(timeout_s=_CLEAN_CLOSE_S if clean else _CLOSE_S)

    def _build_loaders(self, streams: Sequence[SampleStream | None]) -> list[StepLoader | None]:
        from megatron.core.datasets.utils import Split

        loaders = [
            None
            if stream is None
            else build_loader(self._args, self.config, stream, split=split, exchange=group)
            for split, stream, group in zip(Split, streams, self._groups, strict=True)
        ]
        self._loader = loaders[0]
        if self._loader is not None:
            self._cost = RunCost(self._args, self.config, self._loader)
            self._cost.start(self._resume())
        return loaders

    def _with_loss(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return what was logged, on the leader with the loss that the last stage knows."""
        if self._replica is None or self._args.pipeline_model_parallel_size == 1:
            return values
        loss = values["loss_dict"].get("lm loss")
        (found,) = self._replica.report([math.nan if loss is None else float(loss)])
        if math.isnan(found) and loss is None:
            return values
        return {**values, "loss_dict": {**values["loss_dict"], "lm loss": found}}

    def _resume(self) -> dict[str, Any] | None:
        """Continue the data where the loaded checkpoint left it; return the planner's state."""
        if self._loader is None or self._exchange is None:
            return None
        found = resume_data(self._args, self.config, self._loader, exchange=self._exchange)
        if found is None:
            return None
        self._tokens_before = found["tokens_so_far"]
        planner: dict[str, Any] = found["planner"]
        return planner

    # --- reports -------------------------------------------------------------------------------

    def _start(self, streams: Sequence[SampleStream | None], exchange: ControlGroup) -> None:
        args = self._args
        stream = streams[0]
        if stream is None or not self._place.is_leader:  # padded, every rank has its data
            return
        self._stream = stream
        self._recorder = StepRecorder(args, self.config, stream, exchange=exchange)
        if args.rank == 0:
            self._report = LiveReport(
                total_samples=self._total,
                consumed_before=args.consumed_train_samples,
                global_batch_size=args.global_batch_size,
                sequence_length=args.seq_length,
                title=f"odb, policy {self.config.policy.value}"
                if self.config.enabled
                else "padded baseline",
            )
        if self.config.log_dir is not None:
            self._log = StepLog(
                self.config.log_dir, replica=exchange.replica, is_new=args.iteration == 0
            )

    def _on_batch(self, item: Any) -> None:
        if torch.is_grad_enabled():
            if self._recorder is not None:
                self._recorder.on_batch(item)
            if self._cost is not None:
                self._cost.begin_micro_batch(item)
        elif not self.config.enabled:
            self._eval_left_out += sum(map(bool, item["hole"]))
            self._eval_truncated += int(item["truncated"].sum())

    def _print_start(self) -> None:
        print(f"odb: {describe_megatron()}", flush=True)
        print(f"odb: attention backend {self._backend.name}: {self._backend.reason}", flush=True)
        if self.config.enabled:
            seed = self._args.seed
            print(f"odb: reproduce with {self.config.describe()} --seed {seed}", flush=True)
            scope, reason = balance_scope(self._args)
            print(f"odb: balance scope {scope.value}: {reason}", flush=True)
        else:
            print("odb: --odb is off: padded baseline", flush=True)

    def _print_choice(self) -> None:
        """Say once what `--odb-exchange auto` chose for the run."""
        feed = self._train_feed
        choice = None if feed is None or self._loader is None else feed.progress.exchange_choice
        if choice is not None and not self._choice_printed and self._args.rank == 0:
            self._choice_printed = True
            print(f"odb: {choice.reason()}", flush=True)

    def _finish(self, *, together: bool) -> None:
        sources = self._source_totals(together=together)
        if together and not self.config.enabled and self._exchange is not None:
            own = [self._eval_left_out, self._eval_truncated]
            sums = zip(*self._exchange.gather_counts(own), strict=True)
            self._eval_left_out, self._eval_truncated = map(sum, sums)
        if self._report is not None:
            scope = "" if together else " (this replica only: the run did not end cleanly)"
            cost = "" if self._cost is None else self._cost.describe()
            self._report.finish(sources, scope=scope, cost=cost)
            if self._eval_left_out or self._eval_truncated:
                print(
                    f"odb: evaluations left out {self._eval_left_out} samples and truncated "
                    f"{self._eval_truncated}",
                    flush=True,
                )
        left_out = sum(source.bad_records + source.overlong for source in sources)
        if together and left_out and not any(source.samples for source in sources):
            raise ValueError(
                f"nothing was trained: all {left_out} samples were left out, the first because of "
                f"{next(filter(None, (source.first_message for source in sources)), '?')}"
            )

    def _source_totals(self, *, together: bool) -> list[SourceTotals]:
        if self._stream is None or self._recorder is None or self._exchange is None:
            return []
        counted = self._recorder.source_counts
        if self._train_feed is not None:
            counted = list(self._train_feed.progress.source_counts)
        return source_totals(
            self._stream.source_names, counted, exchange=self._exchange if together else None
        )
