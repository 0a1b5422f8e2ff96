"""A run of Bridge's `pretrain()` or `finetune()` with ODB: `megatron.run` on Bridge's state.

Holds no policy. What differs from Megatron's own `pretrain()`: Bridge's forward step is used as it
is, Bridge cuts context-parallel parts and serves virtual pipeline chunks from one iterator, and the
data state travels through the iterator into Bridge's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import metadata
from types import TracebackType
from typing import Any

import numpy as np
import torch

from odb_megatron.bridge.arguments import BridgeArgs, UnusableError, refuse
from odb_megatron.bridge.hooks import BridgeHooks
from odb_megatron.bridge.settings import described
from odb_megatron.data.thd import MicroBatch, MicroBatchLayout
from odb_megatron.data.wire import StepHeader
from odb_megatron.megatron.attention import Attention
from odb_megatron.megatron.checkpoint import restore
from odb_megatron.megatron.config import OdbConfig
from odb_megatron.megatron.forward_step import pinned
from odb_megatron.megatron.hooks import Hooks
from odb_megatron.megatron.replica import ReplicaData
from odb_megatron.megatron.run import OdbRun
from odb_megatron.megatron.run_report import Writers

__all__ = ["Batches", "BridgeRun", "SftSamples", "TrainBatches", "as_batch"]


class BridgeRun(OdbRun):
    """One run; see `megatron.run.OdbRun`.

    Args:
        state: Bridge's `GlobalState`, whose configuration was validated.

    Raises:
        UnusableError: settings or a configuration that cannot be used.
    """

    _goes_on = False  # Bridge restores the data, after they were built

    def __init__(self, state: Any) -> None:
        from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe

        cfg = state.cfg
        self._state, self._dataset = state, cfg.dataset
        try:
            args = BridgeArgs(cfg, state, rank=get_rank_safe(), world_size=get_world_size_safe())
            config = OdbConfig.from_args(args)
        except ValueError as error:
            raise UnusableError(str(error)) from error
        refuse(cfg, args, config)
        if config.dry_run:
            cfg.logger.tensorboard_dir = cfg.logger.wandb_project = None
        has_files = args.data_path is not None or args.train_data_path is not None
        self._reads_recipe = not (has_files or self._dataset.odb.has_data)
        self._context: Any = None
        self._built: Sequence[Any] = ()
        self._is_restored = self._has_begun = self._has_ended = False
        super().__init__(args, datasets=(lambda _: self._built) if self._reads_recipe else None)

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
        if self._reads_recipe:
            self._built = _sft_datasets(self._dataset.recipe, context)
        evaluated = args.eval_iters * cfg.validation.eval_global_batch_size
        sizes = [
            context.train_samples,
            max(context.valid_samples, evaluated),  # one at the end, whatever the interval
            context.test_samples,
        ]
        train, valid, test = self.datasets_provider(sizes)
        make = partial(TrainBatches, save=self.save, restore=self.restore)
        pairs = ((make, train), (Batches, valid), (Batches, test))
        found = [None if items is None else kind(items, self._on_batch) for kind, items in pairs]
        return found[0], found[1], found[2]

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
        restore(self._args, self._loader, group=self._groups[-1], text=text)
        self._report.goes_on()

    # --- what the hooks tell -------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """No watchdog ends the process within; the data's state goes through the iterator."""
        with nullcontext() if self._peers is None else self._peers.saving():
            yield

    def on_schedule(self, *, training: bool) -> None:
        if training and not self._has_begun:
            self._has_begun = True
            args = self._args
            if args.iteration and not self._is_restored and args.rank == 0:
                print(
                    f"odb: no dataloader state in the checkpoint of iteration {args.iteration}; "
                    f"the data goes on at sample {args.consumed_train_samples} of the stream",
                    flush=True,
                )
        super().on_schedule(training=training)

    # --- what differs from Megatron's own `pretrain()` -------------------------------------------

    def _choose_attention(self) -> Attention:
        return Attention(
            name="the recipe's", reason="the model's own layer spec, as Bridge builds it"
        )

    def _make_hooks(self) -> Hooks:
        return BridgeHooks(self, state=self._state, plans_shapes=self._plans_shapes)

    def _start_lines(self) -> list[str]:
        args, version = self._args, metadata.version("megatron-bridge")
        source = f"the recipe's {type(self._dataset.recipe).__name__}"
        if not self._reads_recipe:
            own = args.data_path or [*(args.train_data_path or ()), *(args.valid_data_path or ())]
            source = " ".join(own)
        megatron, attention, _, *lines = super()._start_lines()
        return [
            megatron,
            attention,
            f"Megatron-Bridge {version}; dataset.odb over {source}",
            f"reproduce with {described(self._dataset.odb)}",
            *lines,
        ]

    def _writers(self) -> Writers:
        state = self._state
        interval = state.cfg.logger.tensorboard_log_interval
        return state.tensorboard_logger, state.wandb_logger, interval

    def _make_forward_step(self) -> Callable[..., Any]:
        return _bridge_has_its_own

    def _make_replica(self) -> ReplicaData:
        return ReplicaData(
            self._args,
            replace(self._place, context_size=1, context_rank=0),
            deadlines=self._deadlines,
            num_chunks=1,
        )

    def _tokenizer(self) -> Any:
        return self._context.tokenizer


def _bridge_has_its_own(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("Bridge's forward step is used")


def _sft_datasets(recipe: Any, context: Any) -> list[SftSamples | None]:
    """Build the recipe's own text SFT datasets, as Bridge does; every rank calls it (barriers)."""
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetBuilder

    built = GPTSFTDatasetBuilder(recipe, context.tokenizer).build()
    return [None if dataset is None else SftSamples(dataset) for dataset in built]


def as_batch(item: MicroBatchLayout) -> dict[str, Any]:
    """Return what `megatron.bridge.training.gpt_step.get_batch` takes from the iterator.

    Ranks that use no tokens get None for them, and the layout all the same: without it a middle
    pipeline stage would attend across samples. Each sample is named with its padding, as in
    `forward_step.packed_batch`; entries that stand for no token are left out.
    """
    from megatron.core import parallel_state

    names = ("tokens", "labels", "loss_mask", "position_ids")
    has_tokens = isinstance(item, MicroBatch)
    offsets = item.cu_seqlens_padded
    offsets = torch.cat([offsets[:1], offsets[1:][offsets.diff() > 0]])
    longest = torch.tensor(1 << (item.max_seqlen - 1).bit_length(), dtype=torch.int32)
    tokens = {name: getattr(item, name) for name in names} if has_tokens else {}
    _, locked = pinned({**tokens, "offsets": offsets})
    offsets = locked.pop("offsets")
    batch = {
        **dict.fromkeys((*names, "attention_mask")),
        **locked,
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if parallel_state.get_context_parallel_world_size() > 1:  # Transformer Engine asks for them
        batch |= {"cu_seqlens_q_padded": offsets, "cu_seqlens_kv_padded": offsets}
    return batch


class Batches:
    """A rank's micro-batches as Bridge's own forward steps read them; step headers as they come.

    Bridge cuts a rank's context-parallel part itself (gpt_step.py
    `_partition_packed_batch_for_cp`, 0.6.2).
    """

    def __init__(
        self, items: Iterator[Any], on_batch: Callable[[MicroBatchLayout], None], /
    ) -> None:
        self._items, self._on_batch = items, on_batch

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> StepHeader | dict[str, Any]:
        item = next(self._items)
        if isinstance(item, StepHeader):
            return item
        self._on_batch(item)
        return as_batch(item)


class TrainBatches(Batches):
    """The same for training, with the two methods that Bridge's checkpoints ask for.

    Bridge calls `save_state` on the first rank of each replica and `restore_state` on all
    (checkpointing.py `maybe_save_dataloader_state`, `maybe_load_dataloader_state`, 0.6.2).
    """

    def __init__(
        self,
        items: Iterator[Any],
        on_batch: Callable[[MicroBatchLayout], None],
        /,
        *,
        save: Callable[[], str],
        restore: Callable[[str], None],
    ) -> None:
        super().__init__(items, on_batch)
        self._save, self._restore = save, restore

    def save_state(self) -> dict[str, str]:
        """Return the state after the last step trained."""
        return {"odb": self._save()}

    def restore_state(self, state: Any) -> None:
        """Continue from `state`, before the first step.

        Raises:
            ValueError: it is none of `save_state`, or see `BridgeRun.restore`.
        """
        text = state.get("odb") if isinstance(state, dict) else None
        if not isinstance(text, str):
            raise ValueError(
                f"the dataloader state of the checkpoint is {str(state)[:80]!r}, which ODB did not "
                "write: resume with the data loader that did, or start the data anew "
                "(checkpoint.finetune=true)"
            )
        self._restore(text)


class SftSamples:
    """A text SFT dataset of Bridge, unpacked, as items of `data.sources.MapSource`.

    Bridge's own dataset tokenizes, with its templates, loss masks and truncation.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `tokens`, `labels` and `loss_mask` of one record, each [L]."""
        item = self._dataset[int(index)]
        length = min(len(item["input_ids"]) - 1, self._dataset.max_seq_length)
        batch = self._dataset.collate_fn([item])
        return {
            name: np.asarray(batch[name][0, :length]) for name in ("tokens", "labels", "loss_mask")
        }
