"""Predicted compute of a sample and of a micro-batch, in fixed-point integers.

Pure. Leaders may sit on different CPUs, so nothing here that feeds a joint decision is a float.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COST_UNIT", "CostModel", "ModelShape"]

COST_UNIT = 1 << 16
"""Fixed-point value of the linear cost of one token."""

_QUADRATIC_BITS = 32
_MAX_COST = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer that its FLOPs follow from.

    Attributes:
        num_layers: transformer layers.
        hidden: hidden size.
        ffn_hidden: MLP intermediate size.
        query: total size of the query heads (heads * head size).
        key_value: total size of the key heads (query groups * head size).
        vocab: padded vocabulary size.
        gated_mlp: three MLP matrices (SwiGLU) instead of two.
    """

    num_layers: int
    hidden: int
    ffn_hidden: int
    query: int
    key_value: int
    vocab: int
    gated_mlp: bool = False

    def linear_flops(self) -> int:
        """Forward FLOPs per token that do not depend on the sample's length."""
        projections = self.hidden * (2 * self.query + 2 * self.key_value)
        mlp = self.hidden * self.ffn_hidden * (3 if self.gated_mlp else 2)
        return 2 * (self.num_layers * (projections + mlp) + self.hidden * self.vocab)

    def quadratic_flops(self) -> int:
        """Forward FLOPs per token squared of causal attention (half of the full square)."""
        return 2 * self.num_layers * self.query


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Cost of a sample of L tokens: `L + quadratic * L**2`, in units of one token's linear cost.

    Attributes:
        quadratic: `quadratic / linear` as a fixed-point integer with 32 fractional bits.
        fixed: price of a micro-batch in `COST_UNIT`s of one token (an integer).
    """

    quadratic: int = 0
    fixed: int = 0

    def __post_init__(self) -> None:
        if self.quadratic < 0 or self.fixed < 0:
            raise ValueError(
                f"costs must not be negative; got quadratic={self.quadratic}, fixed={self.fixed}"
            )

    @classmethod
    def from_ratios(cls, *, quadratic: float, fixed_tokens: float) -> CostModel:
        """Build from real numbers.

        Args:
            quadratic: cost per token squared over cost per token.
            fixed_tokens: price of one micro-batch, as a number of tokens.
        """
        return cls(
            quadratic=round(quadratic * (1 << _QUADRATIC_BITS)),
            fixed=round(fixed_tokens * COST_UNIT),
        )

    @classmethod
    def from_model_shape(cls, shape: ModelShape, *, fixed_tokens: float) -> CostModel:
        """Build from a model's FLOPs; `fixed_tokens` as in `from_ratios`."""
        ratio = (shape.quadratic_flops() << _QUADRATIC_BITS) // shape.linear_flops()
        return cls(quadratic=ratio, fixed=round(fixed_tokens * COST_UNIT))

    def sample(self, length: int) -> int:
        """Return the cost of one sample of `length` tokens.

        Raises:
            ValueError: the cost does not fit the 64-bit records that replicas exchange.
        """
        shift = _QUADRATIC_BITS - COST_UNIT.bit_length() + 1
        cost = length * COST_UNIT + ((self.quadratic * length * length) >> shift)
        if cost >= _MAX_COST:
            raise ValueError(
                f"a sample of {length} tokens costs {cost}, more than the {_MAX_COST} that fits a "
                "record: lower the quadratic cost"
            )
        return cost
