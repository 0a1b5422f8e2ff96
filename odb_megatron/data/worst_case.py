"""Synthetic micro-batches that take as much device memory as any real one can.

Must not know Megatron, read data or touch a global random generator. All ranks make the same ones
from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odb_megatron.data.sample import Sample
from odb_megatron.data.thd import MicroBatch, assemble
from odb_megatron.plan.padding import SizeRule, budget_length

__all__ = ["WorstCase", "worst_cases"]

_SEED = 20260619


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstCase:
    """The samples of a micro-batch that has nothing but real tokens, all of them with loss.

    Attributes:
        name: what is extreme in it.
        lengths: tokens of each sample, multiples of the padding multiple.
    """

    name: str
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        """Name, number of samples, tokens."""
        count, total = len(self.lengths), sum(self.lengths)
        return f"{self.name} ({count} in {total} tokens, up to {max(self.lengths)} each)"

    def micro_batch(self, *, vocab_size: int, rule: SizeRule) -> MicroBatch:
        """Return the micro-batch, tokens drawn from the whole vocabulary.

        Equal tokens would all be routed to the same experts.

        Args:
            vocab_size: token ids are below it.
            rule: see `data.thd.layout`.
        """
        generator = np.random.default_rng(_SEED)
        samples = []
        for length in self.lengths:
            tokens = generator.integers(0, vocab_size, size=length + 1, dtype=np.int64)
            mask = np.ones(length, dtype=np.float32)
            samples.append(Sample(tokens=tokens[:-1], labels=tokens[1:], loss_mask=mask))
        positions = range(len(samples))
        return assemble(samples, positions=positions, rule=rule)


def worst_cases(
    *, token_budget: int, longest: int, rule: SizeRule, max_samples: int
) -> tuple[WorstCase, ...]:
    """Return the micro-batches at the budget with the longest and with the most samples.

    Args:
        token_budget: most padded tokens of a micro-batch.
        longest: most tokens of a sample; above the budget where such samples get a micro-batch of
            their own.
        rule: what samples and micro-batches are padded to.
        max_samples: most samples that a micro-batch can have, whatever their length.

    Raises:
        ValueError: a budget or a longest sample below the padding multiple.
    """
    multiple = rule.multiple
    budget = budget_length(token_budget, multiple)
    longest = budget_length(longest, multiple)
    if min(budget, longest, max_samples) < 1:
        raise ValueError(
            f"no micro-batch fits: token budget {token_budget}, longest sample {longest}, padding "
            f"multiple {multiple}; raise --odb-token-budget or --seq-length"
        )
    if longest >= budget:
        lengths = [longest]
    else:
        lengths = [longest] * (budget // longest)
        lengths += [budget % longest] if budget % longest else []
    count = min(budget // max(rule.least, multiple), max(max_samples, len(lengths)))
    share, more = divmod(budget // multiple, count)
    shortest = [(share + (at < more)) * multiple for at in range(count)]
    return (
        WorstCase(name="longest samples", lengths=tuple(lengths)),
        WorstCase(name="most samples", lengths=tuple(shortest)),
    )
