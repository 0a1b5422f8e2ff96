"""Memory of the logits of one micro-batch, which the token budget decides.

Pure arithmetic on what Megatron's loss does (megatron-core 0.19.2): the output layer gives logits
in the parameters' type; `VocabParallelCrossEntropy` makes a float32 copy, overwrites it with the
softmax and keeps it for the backward pass, which overwrites it with the gradient and casts that to
the logits' type. So the peak is the logits and the copy: 6 bytes each in bfloat16. The fusion `te`
(Transformer Engine, `pytorch/triton/cross_entropy.py`) writes the gradient over the logits up to
2.17.1 and into a float32 tensor from 2.18 on. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LogitsMemory", "padded_vocabulary"]

_GIB = 1 << 30
_LOGIT_BYTES, _COPY_BYTES = 2, 4  # bfloat16, float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsMemory:
    """Of the last pipeline stage's ranks.

    Attributes:
        token_budget: tokens of a full micro-batch.
        vocab: padded vocabulary.
        tp: tensor-parallel size; splits the vocabulary.
        cp: context-parallel size; splits the tokens.
    """

    token_budget: int
    vocab: int
    tp: int = 1
    cp: int = 1

    @property
    def num_logits(self) -> int:
        """Logits of a rank."""
        return -(-self.token_budget // self.cp) * -(-self.vocab // self.tp)

    @property
    def logits_gib(self) -> float:
        """The logits in bfloat16."""
        return self.num_logits * _LOGIT_BYTES / _GIB

    @property
    def peak_gib(self) -> float:
        """With the loss's float32 copy: Megatron's default, and its fusion `native`."""
        return self.num_logits * (_LOGIT_BYTES + _COPY_BYTES) / _GIB

    def as_json(self) -> dict[str, float | int | str]:
        """Return the figures with what a fused loss changes."""
        return {
            "vocab": self.vocab,
            "tensor_parallel": self.tp,
            "context_parallel": self.cp,
            "num_logits": self.num_logits,
            "logits_gib": self.logits_gib,
            "peak_gib": self.peak_gib,
            "note": NOTE,
        }


NOTE = (
    "bfloat16 logits and the float32 copy of Megatron's loss, which its fusion native keeps. Its "
    "fusion te (refused by the arguments of Megatron 0.19) overwrites the logits up to Transformer "
    "Engine 2.17 and so needs no copy; from 2.18 its float32 gradient takes the same place. "
    "Computed from the sources, not measured."
)


def padded_vocabulary(vocab: int, *, divisible_by: int, tp: int) -> int:
    """Return the vocabulary as Megatron pads it (`vocab_size_with_padding`).

    Args:
        vocab: entries of the tokenizer.
        divisible_by: `--make-vocab-size-divisible-by`.
        tp: tensor-parallel size.
    """
    multiple = divisible_by * tp
    return math.ceil(vocab / multiple) * multiple
