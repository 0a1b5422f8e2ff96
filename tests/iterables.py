"""Iterable data sets for tests: every token says which item it belongs to.

Top-level classes, so that worker processes can be sent them; must not import Megatron.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Lines", "MakeLines", "Stateless"]

BASE = 1000


def item(name: int, length: int, *, base: int = BASE) -> dict[str, Any]:
    """Item `name`; length 0 stands for a bad record."""
    tokens = name * base + np.arange(max(1, length))
    mask = np.full(tokens.size, float(length > 0), dtype=np.float32)
    return {"tokens": tokens, "labels": tokens + 1, "loss_mask": mask}


class Stateless:
    """An iterable that cannot say where it is.

    Args:
        names: of its items.
        lengths: of its items.
        failing: item that raises, or with `kills` ends the process.
        base: see `item`.
    """

    def __init__(
        self,
        names: Sequence[int],
        lengths: Sequence[int],
        *,
        failing: int | None = None,
        kills: bool = False,
        base: int = BASE,
    ) -> None:
        self.names, self.lengths = list(names), list(lengths)
        self.failing, self.kills = failing, kills
        self.at = self.begin = 0
        self.base = base

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.at, self.begin = self.begin, 0
        while self.at < len(self.names):
            name = self.names[self.at]
            if name == self.failing and self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == self.failing:
                raise KeyError(f"no such thing in item {name}")
            self.at += 1
            yield item(name, self.lengths[name], base=self.base)


class Lines(Stateless):
    """One that can."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"at": self.at, "rng": (1, [2, 3]), b"key": np.arange(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there with the next `iter`."""
        assert state["rng"] == (1, [2, 3])
        assert state[b"key"].tolist() == [0, 1]
        self.at = self.begin = state["at"]


@dataclass(frozen=True)
class MakeLines:
    """Makes the shards of synthetic data: item i is in shard `owners[i]`, round and round."""

    lengths: Sequence[int]
    owners: Sequence[int]
    kind: type[Stateless] = Lines
    failing: int | None = None
    kills: bool = False
    base: int = BASE

    def __call__(self, index: int, num_shards: int) -> Stateless:
        names = [i for i, owner in enumerate(self.owners) if owner % num_shards == index]
        return self.kind(
            names, self.lengths, failing=self.failing, kills=self.kills, base=self.base
        )
