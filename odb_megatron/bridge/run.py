"""A run of Bridge's `pretrain()` or `finetune()` with ODB: `megatron.run` on Bridge's state.

Holds no policy. What differs from Megatron's own `pretrain()`: Bridge's forward step is used as it
is, Bridge cuts context-parallel parts and serves virtual pipeline chunks from one iterator, and the
data state travels through the iterator into Bridge's checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import metadata
from types import TracebackType
from typing import Any

from odb_megatron.bridge.arguments import BridgeArgs, transformer_of
from odb_megatron.bridge.batches import Batches, TrainBatches
from odb_megatron.bridge.hooks import BridgeHooks
from odb_megatron.bridge.settings import described, in_bridge_words
from odb_megatron.bridge.sft_samples import SftSamples
from odb_megatron.bridge.validation import UnusableError, has_data, refuse
from odb_megatron.megatron.attention import Attention
from odb_megatron.megatron.checkpoint import restore
from odb_megatron.megatron.hooks import Hooks
from odb_megatron.megatron.replica import ReplicaData
from odb_megatron.megatron.run import OdbRun
from odb_megatron.megatron.run_report import RunReport, SeriesWriters, start_lines
from odb_megatron.megatron.setup import odb_config
from odb_megatron.megatron.topology import padding_multiple

__all__ = ["BridgeRun"]


class BridgeRun(OdbRun):
    """One run; see `megatron.run.OdbRun`.

    Args:
        state: Bridge's `GlobalState`, whose configuration was validated.

    Raises:
        UnusableError: settings or a configuration that cannot be used.
    """

    def __init__(self, state: Any) -> None:
        from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe

        cfg = state.cfg
        self._state, self._dataset = state, cfg.dataset
        try:
            args = BridgeArgs(cfg, state, rank=get_rank_safe(), world_size=get_world_size_safe())
            config = odb_config(args)
        except ValueError as error:
            raise UnusableError(in_bridge_words(str(error))) from error
        refuse(cfg, args, config)
        if config.dry_run:
            cfg.logger.tensorboard_dir = cfg.logger.wandb_project = None
        self._reads_recipe = not has_data(self._dataset.odb) and args.data_path is None
        self._reads_recipe = self._reads_recipe and args.train_data_path is None
        self._context: Any = None
        self._built: Sequence[Any] = ()
        self._is_restored = self._has_begun = self._has_ended = False
        super().__init__(args, datasets=self._recipe_datasets if self._reads_recipe else None)
        self._prepare_transformer(transformer_of(cfg.model))

    def __enter__(self) -> BridgeRun:
        super().__enter__()
        self._dataset._run = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End; harmless when called again."""
        if self._has_ended:
            return
        self._has_ended = True
        self._dataset._run = None
        super().__exit__(kind, error, trace)

    def build(self, context: Any) -> tuple[Any, Any, Any]:
        """Build the data; every rank calls it. See `OdbDatasetConfig.build_datasets`.

        Raises:
            ValueError: data that cannot be used.
        """
        cfg, args = self._state.cfg, self._args
        self._context = context
        args.iteration = self._state.train_state.step
        with _bridge_words():
            if self._reads_recipe:
                self._built = _sft_datasets(self._dataset.recipe, context)
            evaluated = args.eval_iters * cfg.validation.eval_global_batch_size
            sizes = [
                context.train_samples,
                max(context.valid_samples, evaluated),  # one at the end, whatever the interval
                context.test_samples,
            ]
            train, valid, test = self.datasets_provider(sizes)
        return self._for_training(train), self._for_evaluation(valid), self._for_evaluation(test)

    def save(self) -> str:
        """Return the state of the training data; source ranks call it."""
        assert self._checkpoint is not None, "asked for before the data were built"
        return self._checkpoint.state().to_text()

    def restore(self, text: str) -> None:
        """Continue from the text of `save`; all ranks call it.

        Raises:
            ValueError: it is damaged, or belongs to other data or another step.
        """
        self._is_restored = True
        if self._loader is None:
            return
        with _bridge_words():
            restore(self._args, self._loader, group=self._groups[-1], text=text)
        self._report.goes_on()

    # --- what the hooks tell -------------------------------------------------------------------

    def saving(self) -> AbstractContextManager[None]:
        """No watchdog ends the process within; the data's state goes through the iterator."""
        return nullcontext() if self._peers is None else self._peers.saving()

    def on_schedule(self, *, training: bool) -> None:
        if training and not self._has_begun:
            self._has_begun = True
            self._require_state()
        super().on_schedule(training=training)

    # --- what differs from Megatron's own `pretrain()` -------------------------------------------

    def _choose_backend(self) -> Attention:
        return Attention(
            name="the recipe's", reason="the model's own layer spec, as Bridge builds it"
        )

    def _make_hooks(self) -> Hooks:
        length = self.config.micro_batch_length(padding_multiple(self._args))
        return BridgeHooks(self, state=self._state, micro_batch_length=length)

    def _make_report(self) -> RunReport:
        args, config = self._args, self.config
        lines = [
            f"Megatron-Bridge {metadata.version('megatron-bridge')}; dataset.odb over "
            f"{_source(args, self._dataset, reads_recipe=self._reads_recipe)}",
            f"reproduce with {described(self._dataset.odb)}",
            *map(in_bridge_words, start_lines(args, config)[1:]),
        ]
        return RunReport(
            args, config, backend=self._backend, lines=lines, writers=self._find_writers
        )

    def _find_writers(self) -> SeriesWriters:
        state = self._state
        return SeriesWriters(
            state.tensorboard_logger,
            state.wandb_logger,
            interval=state.cfg.logger.tensorboard_log_interval,
        )

    def _make_forward_step(self) -> Callable[..., Any]:
        return _bridge_has_its_own

    def _make_replica(self) -> ReplicaData:
        return ReplicaData(
            self._args,
            replace(self._place, context_size=1, context_rank=0),
            deadlines=self._peers.deadlines if self._peers else None,
            num_chunks=1,
        )

    def _tokenizer(self) -> Any:
        return self._context.tokenizer

    def _saved_text(self) -> str | None:
        return None

    def _go_on(self) -> None:
        """Bridge restores the data, after they were built."""

    def _prepare_transformer(self, transformer: Any) -> None:
        """Bridge builds the model after this."""
        if self._args.pipeline_model_parallel_size > 1 and not self.config.pads_to_budget:
            transformer.variable_seq_lengths = True
            if transformer.num_moe_experts is None:
                transformer.moe_token_dispatcher_type = "alltoall"

    def _require_state(self) -> None:
        args = self._args
        if not args.iteration or self._is_restored:
            return
        if args.rank == 0:
            print(
                f"odb: no dataloader state in the checkpoint of iteration {args.iteration}; the "
                f"data goes on at sample {args.consumed_train_samples} of the stream",
                flush=True,
            )

    def _recipe_datasets(self, _sizes: Sequence[int | None]) -> Sequence[Any]:
        return self._built

    def _for_training(self, items: Any) -> TrainBatches | None:
        if items is None:
            return None
        return TrainBatches(items, on_batch=self._on_batch, save=self.save, restore=self.restore)

    def _for_evaluation(self, items: Any) -> Batches | None:
        return None if items is None else Batches(items, on_batch=self._on_batch)


class _bridge_words:  # used like a function
    """Errors within name Bridge's settings, not Megatron's flags."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if type(error) is ValueError:
            text = in_bridge_words(str(error))
            if text != str(error):
                raise ValueError(text) from error


def _bridge_has_its_own(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("Bridge's forward step is used")


def _sft_datasets(recipe: Any, context: Any) -> list[SftSamples | None]:
    """Build the recipe's own text SFT datasets, as Bridge does; every rank calls it (barriers)."""
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetBuilder

    built = GPTSFTDatasetBuilder(recipe, context.tokenizer).build()
    return [None if dataset is None else SftSamples(dataset) for dataset in built]


def _source(args: argparse.Namespace, dataset: Any, *, reads_recipe: bool) -> str:
    if reads_recipe:
        return f"the recipe's {type(dataset.recipe).__name__}"
    own = args.data_path or [*(args.train_data_path or ()), *(args.valid_data_path or ())]
    return " ".join(own)
