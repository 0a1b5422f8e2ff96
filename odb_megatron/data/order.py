"""The order of a run's samples: stream position -> (epoch, source, record).

Pure apart from numpy's and torch's generators, seeded here and nowhere else. Knows no replicas
except where Megatron's own `cyclic` order depends on their number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["CyclicOrder", "PassOrder", "build_order"]


_CACHED_RECORDS = 1 << 24


class PassOrder:
    """Shuffled passes over a set of records.

    Each pass visits every record once; its permutation depends on the seed and the pass alone
    (numpy's RandomState, whose streams are frozen). Permutations in use are kept: at least two,
    and as many as fit in 128 MiB, because `cyclic` jumps between passes.

    Args:
        indices: record numbers of this split, as a range where they are many; passes are counted
            below 2**32.
        seed: `--seed`.
    """

    def __init__(self, indices: Sequence[int] | npt.NDArray[np.integer], *, seed: int) -> None:
        self._indices = indices
        self.seed = seed
        self._most_cached = max(2, _CACHED_RECORDS // max(1, len(indices)))
        self._passes: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._indices)

    def __getstate__(self) -> dict[str, object]:
        """Leave the permutations behind: another process makes them again."""
        return {**self.__dict__, "_passes": OrderedDict()}

    def __getitem__(self, index: int) -> int:
        """Return the record at place `index` of the endless sequence of passes."""
        number, place = divmod(index, len(self._indices))
        return int(self._indices[self._permutation(number)[place]])

    def _permutation(self, number: int) -> npt.NDArray[np.int64]:
        found = self._passes.get(number)
        if found is None:
            state = np.random.RandomState([self.seed % 2**32, number])
            found = self._passes[number] = state.permutation(len(self._indices))
            while len(self._passes) > self._most_cached:
                self._passes.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclicOrder:
    """Megatron's `cyclic` (MegatronPretrainingRandomSampler, data_samplers.py, 0.19.2).

    Attributes:
        total: length of the dataset the sampler sees.
        num_replicas: data-parallel size.
        data_sharding: each replica shuffles a bucket of its own (Megatron's default).
    """

    total: int
    num_replicas: int
    data_sharding: bool

    def __post_init__(self) -> None:
        if self.total % self.num_replicas:
            raise ValueError(
                f"--dataloader-type cyclic leaves out {self.total % self.num_replicas} of "
                f"{self.total} samples (Megatron's sampler drops what does not fill "
                f"{self.num_replicas} replicas): use --dataloader-type single, or a sample count "
                "divisible by the data-parallel size"
            )

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self.total)
        if not self.data_sharding:
            return int(_torch_permutation(self.total, epoch)[place])
        bucket = self.total // self.num_replicas
        row, replica = divmod(place, self.num_replicas)
        return replica * bucket + int(_torch_permutation(bucket, epoch)[row])


def build_order(
    name: str, *, total: int, num_replicas: int, data_sharding: bool
) -> CyclicOrder | None:
    """Return the order of Megatron's `--dataloader-type`; None for `single`, the stream's own.

    Raises:
        ValueError: another dataloader type, or one that would leave samples out.
    """
    if name not in ("single", "cyclic"):
        raise ValueError(
            f"--dataloader-type {name} has no order of its own: use single or cyclic with --odb"
        )
    if name == "single":
        return None
    return CyclicOrder(total=total, num_replicas=num_replicas, data_sharding=data_sharding)


@lru_cache(maxsize=2)
def _torch_permutation(size: int, epoch: int) -> npt.NDArray[np.int64]:
    generator = torch.Generator()
    generator.manual_seed(epoch)
    permutation: npt.NDArray[np.int64] = torch.randperm(size, generator=generator).numpy()
    return permutation
