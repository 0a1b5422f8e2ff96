"""The record of one optimizer step, its JSON-lines file, and what is kept of the whole run.

Must not compute what a plan already knows; numbers are taken from `StepTotals`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO

__all__ = ["StepLog", "StepRecord", "write_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step as one replica saw it; fields marked (all) are sums over replicas.

    Attributes:
        iteration: 1-based iteration, as Megatron logs it.
        loss: mean loss per loss token (all); None where this rank has none.
        grad_norm: gradient norm before clipping, or None.
        learning_rate: learning rate of the step.
        consumed_samples: samples consumed after the step (all).
        samples: samples emitted (all).
        left_out: positions that emitted nothing, by policy (all).
        tokens: tokens before padding (all).
        computed_tokens: tokens the model ran, padding included (all).
        loss_tokens: positions that carried loss (all).
        num_micro_batches: M.
        idle: idle micro-batches (all).
        split: micro-batches split to meet M (all).
        fill: tokens over M * replicas * token budget; None for the padded baseline.
        balance: mean over max cost of the replicas; None for the padded baseline.
        balance_before: what `balance` would be without the exchange of samples; None without one.
        moved: samples handed from one replica to another (all).
        bytes_moved: their bytes on the wire (all).
        wait_s: seconds this replica's trainer waited for the step; 0 for the padded baseline.
        step_s: wall-clock seconds since the previous step ended, evaluation and saving excluded.
        ids: this replica's samples as "source:record@epoch", per micro-batch.
        lengths: their lengths, same shape.
        reassigned: samples that another replica than the one that held them fetched anew (all).
        collectives: broadcasts inside this replica that brought the step to its ranks.
        bytes_delivered: bytes of one copy of what they brought.
        reports: point-to-point transfers of the loss to this replica's leader.
        context_balance: mean over max of the attention cost of this replica's context-parallel
            ranks; None without context parallelism.
        idle_router_share: share of the tokens that routers' losses see which are those of idle
            micro-batches (all); None for dense models.
        fetch_wait_s: longest that a replica's planner waited for samples of the step, seconds.
        window_bytes: bytes of this replica's samples that are preprocessed and not emitted.
        queue_bytes: bytes of the finished steps that wait behind this one.
        peak_memory_bytes: most device memory that tensors have taken so far on this replica's first
            or last pipeline stage; without a device, that the process has.
        reserved_memory_bytes: the same of torch's allocator, 0 without a device.
        num_shapes: different lengths of micro-batches on this replica so far.
    """

    iteration: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    consumed_samples: int
    samples: int
    left_out: int
    tokens: int
    computed_tokens: int
    loss_tokens: int
    num_micro_batches: int
    idle: int
    split: int
    fill: float | None
    balance: float | None
    balance_before: float | None
    moved: int
    bytes_moved: int
    wait_s: float
    step_s: float
    ids: tuple[tuple[str, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    reassigned: int = 0
    collectives: int = 0
    bytes_delivered: int = 0
    reports: int = 0
    context_balance: float | None = None
    idle_router_share: float | None = None
    fetch_wait_s: float = 0.0
    window_bytes: int = 0
    queue_bytes: int = 0
    peak_memory_bytes: int = 0
    reserved_memory_bytes: int = 0
    num_shapes: int = 0


class StepLog:
    """Appends records to `steps-RRRRR.jsonl` of one replica.

    Args:
        folder: created if missing.
        replica: which replica writes.
        is_new: start the file anew; a resumed run goes on writing at its end.

    Raises:
        ValueError: the folder cannot be written.
    """

    def __init__(self, folder: str, *, replica: int, is_new: bool = True) -> None:
        self.path = os.path.join(folder, f"steps-{replica:05d}.jsonl")
        mode = "w" if is_new else "a"
        try:
            os.makedirs(folder, exist_ok=True)
            self._file: IO[str] = open(self.path, mode, encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"the step log {self.path} cannot be written ({error}): give --odb-log-dir a "
                "folder that can"
            ) from error

    def write(self, record: StepRecord) -> None:
        """Append one line."""
        self._file.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        """Close the file; later writes fail."""
        self._file.close()


def write_run(folder: str, values: Mapping[str, object]) -> None:
    """Write what holds for the whole run to `run.json`, beside the step logs."""
    path = os.path.join(folder, "run.json")
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.write("\n")
    os.replace(f"{path}.part", path)
