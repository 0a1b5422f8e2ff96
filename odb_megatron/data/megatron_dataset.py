"""Sample streams built by Megatron's own dataset builder: blends, splits, per-split paths, cache.

Knows Megatron's dataset classes (megatron.core.datasets), not its globals: the caller passes what
`get_args()` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from odb_megatron.data.chat import ChatRenderer
from odb_megatron.data.order import CyclicOrder, PassOrder
from odb_megatron.data.pictures import ImageRules
from odb_megatron.data.sample import SampleRules
from odb_megatron.data.sources import SampleSource, count_records, open_source
from odb_megatron.data.stream import Blend, SampleStream, SourcePart
from odb_megatron.errors import SettingError

__all__ = ["SampleDataset", "SampleDatasetConfig", "build_datasets", "count_epoch"]
__all__ += ["stream_from_dataset"]


@dataclass
class SampleDatasetConfig(BlendedMegatronDatasetConfig):  # type: ignore[misc]
    """Megatron's dataset configuration plus what turns a record into a sample.

    Attributes:
        rules: overlong and bad-record policies.
        renderer: tokenizer and chat template, for chat and text files.
        images: what becomes of the pictures of chat files; None to refuse them.
        opened: sources already open in this process, by path.
    """

    rules: SampleRules | None = None
    renderer: ChatRenderer | None = None
    images: ImageRules | None = None
    opened: dict[str, SampleSource] = field(default_factory=dict, repr=False)

    def open(self, path: str) -> SampleSource:
        """Open `path` once per process."""
        if path not in self.opened:
            assert self.rules is not None, "what opens files has rules"
            self.opened[path] = open_source(
                path,
                rules=self.rules,
                renderer=self.renderer,
                mmap=self.mmap_bin_files,
                images=self.images,
                cache=self.path_to_cache,
            )
        return self.opened[path]


class SampleDataset(MegatronDataset):  # type: ignore[misc]
    """One source's share of a split: whole records, in shuffled passes.

    Built by BlendedMegatronDatasetBuilder like Megatron's own GPTDataset, but it never cuts or
    concatenates documents.

    Raises:
        ValueError: a source of an unweighted blend has no record in this split.
    """

    def __init__(
        self,
        dataset: SampleSource,
        dataset_path: str | None,
        indices: Any,
        num_samples: int | None,
        index_split: Split,
        config: SampleDatasetConfig,
    ) -> None:
        paths, _ = _blend_of(config, index_split) or ([], None)
        if len(indices) == 0 and num_samples is None and len(paths) > 1:
            raise SettingError(  # Megatron's blend would fail by a bare assert
                f"{{path}} has {len(dataset)} records and none of them falls into the "
                f"{index_split.name} split: change {{split}}, or leave the file out",
                path=dataset_path,
            )
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        own = range(*(indices[[0, -1]] + [0, 1])) if len(indices) else range(0)  # not 4 bytes each
        self.part = SourcePart(source=dataset, order=PassOrder(own, seed=config.random_seed))

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: SampleSource) -> int:
        """Number of records."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: SampleDatasetConfig) -> SampleSource:
        """Open the source at `dataset_path`."""
        return config.open(dataset_path)

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.part.source.sample(self.part.order[index], source=0)
        return {"sample": sample}


def build_datasets(
    config: SampleDatasetConfig,
    *,
    num_samples: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> list[Any]:
    """Build the train, valid and test datasets; every rank must call it (it has world barriers).

    Args:
        config: blend or blend_per_split, split, seed, cache, and the sample rules.
        num_samples: samples wanted per split; used for weighted blends only (an unweighted source
            or blend is built as one exact pass, and the stream repeats passes).
        is_built_on_rank: whether this rank reads data.

    Returns:
        SampleDataset, BlendedDataset or None per split.

    Raises:
        ValueError: a weighted blend without a sample count, or a source without a record.
    """
    sizes = [
        _size_to_build(config, split, count)
        for split, count in zip(Split, num_samples, strict=True)
    ]
    builder = BlendedMegatronDatasetBuilder(SampleDataset, sizes, is_built_on_rank, config)
    built: list[Any] = builder.build()
    return built


def stream_from_dataset(
    dataset: SampleDataset | BlendedDataset,
    *,
    num_samples: int | None,
    order: CyclicOrder | None = None,
) -> SampleStream:
    """Wrap what the builder made; see `SampleStream`."""
    if isinstance(dataset, BlendedDataset):
        blend = Blend(
            source_index=np.asarray(dataset.dataset_index),
            source_place=np.asarray(dataset.dataset_sample_index),
        )
        parts = [part.part for part in dataset.datasets]
        split = dataset.split.name
        return SampleStream(parts, blend=blend, num_samples=num_samples, order=order, split=split)
    split = dataset.index_split.name
    return SampleStream([dataset.part], num_samples=num_samples, order=order, split=split)


def count_epoch(config: SampleDatasetConfig, split: Split = Split.train) -> int:
    """Return the number of records of one epoch of a split, bad ones included.

    For a weighted blend an epoch is as many draws as its sources have records together.

    Raises:
        ValueError: no data was given for the split.
    """
    blend = _blend_of(config, split)
    bounds = (0.0, 1.0) if config.split_matrix is None else config.split_matrix[split.value]
    if blend is None or bounds is None:
        raise ValueError(
            f"--odb-epochs needs data for the {split.name} split: pass --data-path with a --split "
            f"that gives it a share, or --{split.name}-data-path"
        )
    total = 0
    for path in blend[0]:
        size = float(count_records(path, mmap=config.mmap_bin_files, cache=config.path_to_cache))
        total += round(bounds[1] * size) - round(bounds[0] * size)
    return total


def _size_to_build(config: SampleDatasetConfig, split: Split, count: int | None) -> int | None:
    _, weights = _blend_of(config, split) or ([], None)
    if weights is None:
        return None
    if count is None and (config.split_matrix is None or config.split_matrix[split.value]):
        raise ValueError(
            f"the {split.name} split is a weighted blend, which has no end of its own: drop the "
            "weights, or ask for a number of samples (no --full-validation)"
        )
    return count or 0


def _blend_of(config: SampleDatasetConfig, split: Split) -> tuple[list[str], Any] | None:
    """Paths and weights of a split."""
    per_split = config.blend_per_split
    blend: tuple[list[str], Any] | None = config.blend
    return per_split[split.value] if blend is None and per_split is not None else blend
