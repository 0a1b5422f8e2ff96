"""Predicted compute of a sample and of a micro-batch, in fixed-point integers.

Pure. Replicas may sit on different CPUs, so nothing that feeds a joint decision is a float.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["COST_UNIT", "MAX_SAMPLE_COST", "CostCoefficients", "CostModel", "ModelShape"]

COST_UNIT = 1 << 16
"""Fixed-point value of the linear cost of one token."""

MAX_SAMPLE_COST = 1 << 46
"""Costs stay below this, so that 65536 of them sum to less than 2**62."""

Real = float | Fraction

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

    @property
    def quadratic_ratio(self) -> Fraction:
        """Cost per token squared over cost per token."""
        return Fraction(self.quadratic_flops(), self.linear_flops())

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
        fixed: per-micro-batch overhead in `COST_UNIT`s of one token (an integer).
        per_patch: cost of one patch (image encoder) in `COST_UNIT`s of one token (an integer).
    """

    quadratic: int = 0
    fixed: int = 0
    per_patch: int = 0

    def __post_init__(self) -> None:
        for name in ("quadratic", "fixed", "per_patch"):
            if not 0 <= getattr(self, name) < MAX_SAMPLE_COST:
                raise ValueError(
                    f"the cost {name} is {getattr(self, name) / COST_UNIT:.3g} tokens; expected 0 "
                    f"to {MAX_SAMPLE_COST // COST_UNIT}: lower it, or raise that of a token"
                )

    @classmethod
    def from_ratios(
        cls, *, quadratic: Real, fixed_tokens: Real, patch_tokens: Real = 0.0
    ) -> CostModel:
        """Build from real numbers.

        Args:
            quadratic: cost per token squared over cost per token.
            fixed_tokens: overhead of a micro-batch, as a number of tokens.
            patch_tokens: cost of one patch, as a number of tokens.
        """
        return cls(
            quadratic=round(quadratic * (1 << _QUADRATIC_BITS)),
            fixed=round(fixed_tokens * COST_UNIT),
            per_patch=round(patch_tokens * COST_UNIT),
        )

    def sample(self, length: Any, num_patches: Any = 0) -> Any:
        """Return the cost of a sample of so many tokens and patches, int; or int64 of several."""
        quadratic = (self.quadratic * length * length) >> _SHIFT
        return length * COST_UNIT + quadratic + num_patches * self.per_patch

    def samples(
        self, lengths: npt.NDArray[np.int64], num_patches: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return `sample` of each; int64 in, int64 out.

        Raises:
            ValueError: the longest, with the most patches, would cost too much to be summed.
        """
        longest, most = int(lengths.max(initial=0)), int(num_patches.max(initial=0))
        if self.sample(longest, most) >= MAX_SAMPLE_COST:
            raise ValueError(
                f"a sample of {longest} tokens and {most} patches costs as much as "
                f"{self.sample(longest, most) // COST_UNIT} tokens; expected less than "
                f"{MAX_SAMPLE_COST // COST_UNIT}: lower the quadratic or patch cost"
            )
        costs: npt.NDArray[np.int64] = self.sample(lengths, num_patches)
        return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCoefficients:
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
    def parse(cls, text: str) -> CostCoefficients:
        """Inverse of `str`.

        Raises:
            ValueError: a key that is not known or given twice, what is no number, no `linear`.
        """
        known = [field.name for field in fields(cls)]
        pairs = [part.replace(" ", "").partition("=")[::2] for part in text.split(",")]
        names = [name for name, _ in pairs]
        if {*names} - {*known} or len({*names}) < len(names) or "linear" not in names:
            raise ValueError(
                f"{text!r} gives {', '.join(names)}; expected KEY=NUMBER, separated by commas, "
                f"each at most once of {', '.join(known)}, of which linear is needed"
            )
        try:
            return cls(**{name: float(number) for name, number in pairs})
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from error

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ",".join(f"{name}={value!r}" for name, value in values if value)

    def model(self) -> CostModel:
        """Return the model, the same integers on every machine."""
        linear, quadratic, fixed, patch = (
            Fraction(getattr(self, one.name)) for one in fields(self)
        )
        return CostModel.from_ratios(
            quadratic=quadratic / linear, fixed_tokens=fixed / linear, patch_tokens=patch / linear
        )

    @classmethod
    def of(cls, model: CostModel) -> CostCoefficients:
        """Return prices with few digits that give exactly `model` again; a token costs 1."""
        quadratic = _short(model.quadratic, 1 << _QUADRATIC_BITS)
        overhead, patch = (_short(value, COST_UNIT) for value in (model.fixed, model.per_patch))
        return cls(linear=1.0, quadratic=quadratic, overhead=overhead, patch=patch)


def _short(value: int, scale: int) -> float:
    """Return the decimal of fewest digits that rounds to `value / scale`, a power of 2."""
    prices = (float(f"{value / scale:.{digits}g}") for digits in range(1, 18))
    return next(price for price in prices if round(price * scale) == value)
