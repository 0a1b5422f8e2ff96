"""Compares named values between the ranks of a replica, once, at start-up.

Must not know what the values mean. Equal ranks pay one small all-gather.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from odb_megatron.comm.gloo_group import GlooGroup, numbered

__all__ = ["differences"]

_TEXT_BYTES = 1024


def differences(
    values: Mapping[str, str], *, ranks: Sequence[int], name: str, timeout_s: float
) -> list[str]:
    """Return what differs from the first rank's values, one text for each rank that differs.

    Every rank of `ranks` must call it; all get the same texts.

    Args:
        values: this rank's.
        ranks: global ranks.
        name: see `GlooGroup`; not yet numbered.
        timeout_s: seconds that each exchange may take.

    Raises:
        RuntimeError: a rank is gone or did not come in time.
    """
    group = GlooGroup(ranks, name=numbered(name, ranks), timeout_s=timeout_s)
    try:
        encoded = json.dumps(dict(values), sort_keys=True).encode()
        digest = np.frombuffer(hashlib.blake2b(encoded, digest_size=32).digest(), np.uint8).copy()
        digests = group.all_gather(torch.from_numpy(digest))
        if bool((digests == digests[0]).all()):
            return []
        size = torch.tensor([len(encoded)])
        group.broadcast(size, source=0)
        data = np.zeros(int(size), dtype=np.uint8)
        if group.rank == 0:
            data[:] = np.frombuffer(encoded, np.uint8)
        group.broadcast(torch.from_numpy(data), source=0)
        text = _difference(values, json.loads(data.tobytes()), rank=ranks[group.rank])
        own = np.zeros(_TEXT_BYTES, dtype=np.uint8)
        cut = text.encode()[:_TEXT_BYTES]
        own[: len(cut)] = np.frombuffer(cut, np.uint8)
        texts = [
            bytes(row.numpy()).rstrip(b"\0").decode("utf-8", "ignore")
            for row in group.all_gather(torch.from_numpy(own))
        ]
        return [text for text in texts if text]
    finally:
        group.close()


def _difference(values: Mapping[str, str], leader: Mapping[str, str], *, rank: int) -> str:
    names = sorted(
        name for name in {*values, *leader} if values.get(name, "") != leader.get(name, "")
    )
    parts = [
        f"{name} is {values.get(name, 'absent')} on rank {rank} and "
        f"{leader.get(name, 'absent')} on the leader"
        for name in names
    ]
    return "; ".join(parts)
