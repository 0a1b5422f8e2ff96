"""One replica's share of the stream, fetched in order by data-loader workers.

Must not decide what is drawn when: it hands out positions in the order of the replica's shard,
and the planner asks. Uses torch's public DataLoader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from odb_megatron.data.sample import Hole, Sample
from odb_megatron.data.stream import FetchError, SampleStream

__all__ = ["ReplicaStream"]


class ReplicaStream:
    """Samples of the shard `position % num_replicas == replica`, from `first` on.

    Args:
        stream: the run's stream.
        first: first position of the shard to hand out.
        total: positions of the run; the shard ends before it.
        num_replicas: data-parallel size.
        num_workers: worker processes; 0 fetches in this process.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        first: int,
        total: int,
        num_replicas: int,
        num_workers: int = 0,
    ) -> None:
        self._stream = stream
        self._expected = first
        self._num_replicas = num_replicas
        loader = torch.utils.data.DataLoader(
            stream,
            batch_size=None,
            sampler=range(first, max(first, total), num_replicas),
            num_workers=num_workers,
            collate_fn=_as_is,
            generator=torch.Generator().manual_seed(first),  # else the model's would be advanced
        )
        self._items: Iterator[Sample | Hole | FetchError] = iter(loader)

    def take(self, position: int) -> Sample | Hole:
        """Return the sample at `position`, which must be the shard's next.

        Raises:
            BadRecordError, OverlongError: by policy.
            ChatTemplateError: always.
        """
        assert position == self._expected, f"position {position} asked, {self._expected} is next"
        self._expected += self._num_replicas
        item = next(self._items)
        if isinstance(item, FetchError):
            raise item.error
        return item


def _as_is(item: Any) -> Any:
    return item
