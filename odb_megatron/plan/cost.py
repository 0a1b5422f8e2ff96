"""Predicted compute of a sample and of a micro-batch, in fixed-point integers.

Pure. Leaders may sit on different CPUs, so nothing here that feeds a joint decision is a float.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction

import numpy as np
import numpy.typing as npt

__all__ = ["COST_UNIT", "MAX_SAMPLE_COST", "CostModel", "CostPrices", "ModelShape"]

COST_UNIT = 1 << 16
"""Fixed-point value of the linear cost of one token."""

MAX_SAMPLE_COST = 1 << 46
"""Costs stay below this, so that a window of 65536 samples sums to less than 2**62."""

_QUADRATIC_BITS = 32
_SHIFT = _QUADRATIC_BITS - COST_UNIT.bit_length() + 1


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
    """Cost of a sample of L tokens and P patches: `L + quadratic * L**2 + per_patch * P`.

    The unit is one token's linear cost; a micro-batch adds the price `fixed`.

    Attributes:
        quadratic: `quadratic / linear` as a fixed-point integer with 32 fractional bits.
        fixed: price of a micro-batch in `COST_UNIT`s of one token (an integer).
        per_patch: cost of one patch (image encoder) in `COST_UNIT`s of one token (an integer).
    """

    quadratic: int = 0
    fixed: int = 0
    per_patch: int = 0

    def __post_init__(self) -> None:
        if min(self.quadratic, self.fixed, self.per_patch) < 0:
            raise ValueError(
                f"costs must not be negative; got quadratic={self.quadratic}, fixed={self.fixed}, "
                f"per_patch={self.per_patch}"
            )
        for name, price in (("micro-batch", self.fixed), ("patch", self.per_patch)):
            if price >= MAX_SAMPLE_COST:
                raise ValueError(
                    f"the price of a {name} is {price / COST_UNIT:.3g} times that of a token; it "
                    f"must stay below {MAX_SAMPLE_COST // COST_UNIT}: lower it, or raise the "
                    "price of a token"
                )

    @classmethod
    def from_ratios(
        cls, *, quadratic: float, fixed_tokens: float, patch_tokens: float = 0.0
    ) -> CostModel:
        """Build from real numbers.

        Args:
            quadratic: cost per token squared over cost per token.
            fixed_tokens: price of one micro-batch, as a number of tokens.
            patch_tokens: cost of one patch, as a number of tokens.
        """
        return cls(
            quadratic=round(quadratic * (1 << _QUADRATIC_BITS)),
            fixed=round(fixed_tokens * COST_UNIT),
            per_patch=round(patch_tokens * COST_UNIT),
        )

    @classmethod
    def from_model_shape(
        cls, shape: ModelShape, *, fixed_tokens: float, patch_tokens: float = 0.0
    ) -> CostModel:
        """Build from a model's FLOPs; `fixed_tokens` and `patch_tokens` as in `from_ratios`."""
        ratio = (shape.quadratic_flops() << _QUADRATIC_BITS) // shape.linear_flops()
        return cls(
            quadratic=ratio,
            fixed=round(fixed_tokens * COST_UNIT),
            per_patch=round(patch_tokens * COST_UNIT),
        )

    def sample(self, length: int, *, num_patches: int = 0) -> int:
        """Return the cost of one sample of `length` tokens and `num_patches` patches.

        Raises:
            ValueError: the cost is too high for windows of such samples to be summed in the
                64-bit records that replicas exchange.
        """
        cost = length * COST_UNIT + ((self.quadratic * length * length) >> _SHIFT)
        if num_patches:
            cost += num_patches * self.per_patch
        if cost >= MAX_SAMPLE_COST:
            raise ValueError(
                f"a sample of {length} tokens and {num_patches} patches costs {cost}, more than "
                f"the {MAX_SAMPLE_COST} that fits a record: lower the quadratic or patch cost"
            )
        return cost

    def samples(
        self, lengths: npt.NDArray[np.int64], num_patches: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return `sample` of each; int64 in, int64 out.

        Raises:
            ValueError: see `sample`.
        """
        if not len(lengths):
            return np.zeros(0, dtype=np.int64)
        longest, most = int(lengths.max()), int(num_patches.max())
        self.sample(longest, num_patches=most if most * self.per_patch < MAX_SAMPLE_COST else 0)
        if (self.quadratic * longest * longest) >> 63 or (most * self.per_patch) >> 62:
            pairs = zip(lengths.tolist(), num_patches.tolist(), strict=True)
            return np.array([self.sample(n, num_patches=p) for n, p in pairs], dtype=np.int64)
        costs: npt.NDArray[np.int64] = (
            lengths * COST_UNIT
            + ((self.quadratic * lengths * lengths) >> _SHIFT)
            + num_patches * self.per_patch
        )
        if int(costs.max()) >= MAX_SAMPLE_COST:
            at = int(costs.argmax())
            self.sample(int(lengths[at]), num_patches=int(num_patches[at]))
        return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPrices:
    """A cost model in real numbers of one unit, such as microseconds; the unit itself cancels.

    Written as `linear=1,quadratic=2.5e-5,overhead=400,patch=0`; what is left out is 0.

    Attributes:
        linear: of a token; above 0.
        quadratic: of a token squared, summed over each sample's own length.
        overhead: of a micro-batch.
        patch: of an image patch.
    """

    linear: float
    quadratic: float = 0.0
    overhead: float = 0.0
    patch: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} must be a number of at least 0, got {value}")
        if not self.linear:
            raise ValueError("linear must be above 0: the others are counted in it")

    @classmethod
    def parse(cls, text: str) -> CostPrices:
        """Inverse of `str`.

        Raises:
            ValueError: a key that is not known or given twice, what is no number, no `linear`.
        """
        known = [field.name for field in fields(cls)]
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = (word.strip() for word in part.partition("="))
            if name not in known or name in values:
                what = "is given twice" if name in values else "is not known"
                raise ValueError(
                    f"{name!r} {what}: give KEY=NUMBER of {', '.join(known)}, separated by commas"
                )
            try:
                values[name] = float(number)
            except ValueError as error:
                raise ValueError(f"{name}={number} is no number") from error
        if "linear" not in values:
            raise ValueError("linear is missing: the others are counted in it")
        return cls(**values)

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ",".join(f"{name}={value!r}" for name, value in values if value)

    def model(self) -> CostModel:
        """Return the model, the same integers on every machine."""
        linear = Fraction(self.linear)
        return CostModel(
            quadratic=round(Fraction(self.quadratic) / linear * (1 << _QUADRATIC_BITS)),
            fixed=round(Fraction(self.overhead) / linear * COST_UNIT),
            per_patch=round(Fraction(self.patch) / linear * COST_UNIT),
        )

    @classmethod
    def of(cls, model: CostModel, *, linear: float = 1.0) -> CostPrices:
        """Return prices with few digits that give exactly `model` again.

        Args:
            model: the model.
            linear: price of a token in the unit wanted.
        """
        return cls(
            linear=linear,
            quadratic=_short(model.quadratic, 1 << _QUADRATIC_BITS, linear),
            overhead=_short(model.fixed, COST_UNIT, linear),
            patch=_short(model.per_patch, COST_UNIT, linear),
        )


def _short(value: int, scale: int, linear: float) -> float:
    """Return the decimal of fewest digits that rounds to `value / scale` of `linear`."""
    exact = float(Fraction(value, scale) * Fraction(linear))
    for digits in range(1, 18):
        price = float(f"{exact:.{digits}g}")
        if round(Fraction(price) / Fraction(linear) * scale) == value:
            return price
    raise ValueError(f"cost {value}/{scale} is too large to be written as a decimal number")
