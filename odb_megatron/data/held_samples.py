"""Samples that a replica has preprocessed and not trained, and the micro-batches made of them.

Must not plan or exchange records. Samples that another replica hands over come in through the
step's transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from odb_megatron.data.sample import Skipped, Sample
from odb_megatron.data.sample_hand_over import HandOver, Payloads
from odb_megatron.data.source_counts import SourceCounts
from odb_megatron.data.thd import MicroBatch, assemble, assemble_idle
from odb_megatron.plan.config import PlanConfig
from odb_megatron.plan.step import StepPlan

__all__ = ["HeldSamples"]


class HeldSamples:
    """Payloads of one replica's window.

    Args:
        config: padding and limits of a micro-batch.
        num_sources: data sources of the stream.

    Attributes:
        source_counts: what was emitted, and left out, of each source.
        num_bytes: bytes of the samples held.
    """

    def __init__(self, config: PlanConfig, *, num_sources: int) -> None:
        self._config = config
        self._rule = config.size_rule
        self._samples: dict[int, Sample] = {}
        self._hand_over: HandOver | None = None
        self.source_counts = [SourceCounts() for _ in range(num_sources)]
        self.num_bytes = 0

    def counted(self) -> tuple[SourceCounts, ...]:
        """Return `source_counts` as they are now."""
        return tuple(map(replace, self.source_counts))

    def count_from(self, counts: Sequence[SourceCounts]) -> None:
        """Go on from the counts of a saved run."""
        self.source_counts = list(map(replace, counts))

    def add(self, position: int, sample: Sample) -> None:
        """Take in a sample."""
        self._samples[position] = sample
        self.num_bytes += _num_bytes(sample)

    def leave_out(self, skipped: Skipped) -> None:
        """Count a position that emits nothing."""
        self.source_counts[skipped.source].add_skipped(skipped.reason, skipped.message)

    def emit(self, plan: StepPlan, *, payloads: Payloads | None) -> tuple[MicroBatch, ...]:
        """Drop or hand over what others train, and assemble what this replica trains.

        Args:
            plan: the step.
            payloads: channel to the other replicas, where the plan hands samples over.

        Raises:
            RuntimeError: a sample has another size than was announced, or did not arrive.
        """
        for position in plan.reassigned.given:
            self._remove(position)
        if plan.sends or plan.receives:
            assert payloads is not None, "a plan hands samples over only where there is a channel"
            given = [position for parcel in plan.sends for position in parcel.positions]
            self.num_bytes -= sum(_num_bytes(self._samples[position]) for position in given)
            self._hand_over = HandOver.start(plan, self._samples, payloads=payloads)
        micro_batches = tuple(map(self._assemble, plan.micro_batches))
        if self._hand_over is not None:
            self._hand_over.finish()
            self._hand_over = None
        return micro_batches

    def _assemble(self, positions: Sequence[int]) -> MicroBatch:
        config = self._config
        if not positions:
            return assemble_idle(rule=self._rule)
        samples = [self._take(position) for position in positions]
        for sample in samples:
            self.source_counts[sample.source].add_sample(
                num_tokens=len(sample),
                num_loss_tokens=sample.num_loss_tokens,
                truncated=sample.truncated > 0,
                solo=self._rule.padded(len(sample)) > config.token_budget
                or sample.num_patches > config.max_patches > 0,
            )
        return assemble(samples, positions=positions, rule=self._rule)

    def _take(self, position: int) -> Sample:
        """Return a sample of the step: this replica's own, or handed over."""
        if position not in self._samples and self._hand_over is not None:
            return self._hand_over.take(position)
        return self._remove(position)

    def _remove(self, position: int) -> Sample:
        sample = self._samples.pop(position)
        self.num_bytes -= _num_bytes(sample)
        return sample


def _num_bytes(sample: Sample) -> int:
    own = sample.tokens.nbytes + sample.labels.nbytes + sample.loss_mask.nbytes
    return own + (0 if sample.images is None else sample.images.nbytes)
