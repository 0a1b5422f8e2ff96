"""What a training would be run with, as far as the inspection needs to know: flags as values.

Pure: no files, no torch. The overlong policy is applied here, to lengths alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_megatron.plan.cost import CostModel, CostPrices, ModelShape
from odb_megatron.plan.padding import OverlongPolicy, budget_length, length_multiple
from odb_megatron.simulation.schedules import (
    ATTENTION_SHARE,
    FIXED_SHARE,
    Setting,
    shares_model,
)

__all__ = ["Kept", "TrainingSetting", "parse_shape", "require_samples"]

Integers = npt.NDArray[np.int64]

_SHAPE_KEYS = ("layers", "hidden", "heads", "groups", "ffn", "kv_channels", "vocab", "mlp")
_SHAPE_FORM = (
    "layers=32,hidden=4096,heads=32[,groups=8][,ffn=14336][,kv_channels=128][,vocab=128256]"
    "[,mlp=gated|plain]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Lengths after the overlong policy.

    Attributes:
        positions: padded to the multiple, int64; 0 where nothing is left of a position.
        num_tokens: before that padding.
        num_truncated: samples that were cut.
        num_cut_tokens: tokens that were.
        num_dropped: samples left out.
        num_solo: samples over the budget, in micro-batches of their own.
    """

    positions: Integers
    num_tokens: int
    num_truncated: int = 0
    num_cut_tokens: int = 0
    num_dropped: int = 0
    num_solo: int = 0

    @property
    def lengths(self) -> Integers:
        """Those of the samples that are left."""
        return self.positions[self.positions > 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetting:
    """Attributes are Megatron's and ODB's flags of the same name.

    Attributes:
        seq_length: most tokens of a sample.
        token_budget: most tokens of a micro-batch.
        dp: data-parallel replicas.
        global_batch_size: samples per step.
        overlong: overlong policy.
        tp: tensor-parallel size.
        cp: context-parallel size.
        pp: pipeline stages.
        vpp: virtual chunks per stage.
        sequence_parallel: whether it is on.
        shape: the model's sizes; None where nothing is known.
        prices: cost model as measured; None to follow from the shape.
        seed: of everything random.
    """

    seq_length: int
    token_budget: int
    dp: int
    global_batch_size: int
    overlong: OverlongPolicy = OverlongPolicy.ERROR
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    shape: ModelShape | None = None
    prices: CostPrices | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        names = ("token_budget", "seq_length", "dp", "global_batch_size", "tp", "cp", "pp", "vpp")
        for name in names:
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be at least 1, got {getattr(self, name)}")
        if budget_length(self.limit, self.multiple) == 0:
            raise ValueError(
                f"no sample fits: the limit {self.limit} is below {self.multiple}, to a multiple "
                "of which samples are padded: raise --seq-length and --token-budget"
            )

    @property
    def limit(self) -> int:
        """Longest sample that a micro-batch takes."""
        return min(self.seq_length, self.token_budget)

    @property
    def multiple(self) -> int:
        """What every sample is padded to a multiple of."""
        return length_multiple(
            context_parallel_size=self.cp,
            sequence_parallel_size=self.tp if self.sequence_parallel else 1,
        )

    def keep(self, positions: Integers) -> Kept:
        """Apply the overlong policy.

        Args:
            positions: tokens of the sample at each position, int64; 0 for none.

        Raises:
            ValueError: samples are too long and the policy is `error`, or nothing is left.
        """
        longest = budget_length(self.limit, self.multiple)
        too_long, lengths = positions > longest, positions[positions > 0]
        num = int(too_long.sum())
        policy = self.overlong
        if num and policy is OverlongPolicy.SOLO:
            beyond = int((lengths > budget_length(self.seq_length, self.multiple)).sum())
            if beyond:
                raise ValueError(
                    f"{beyond} of {len(lengths)} samples are longer than --seq-length "
                    f"{self.seq_length} (the longest has {int(lengths.max())} tokens), which "
                    "--overlong solo does not allow: raise --seq-length, or pass --overlong "
                    "truncate or drop"
                )
        if num and policy is OverlongPolicy.ERROR:
            raise ValueError(
                f"{num} of {len(lengths)} samples are longer than {self.limit} tokens, the smaller "
                f"of --seq-length {self.seq_length} and --token-budget {self.token_budget} (the "
                f"longest has {int(lengths.max())}); training would stop at the first: pass "
                "--overlong truncate, drop or solo, or raise both"
            )
        if num == len(lengths) and policy is OverlongPolicy.DROP:
            raise ValueError(
                f"all {num} samples are longer than {self.limit} tokens and --overlong drop leaves "
                "them out: raise --seq-length and --token-budget, or pass --overlong truncate"
            )
        kept = positions
        if policy is OverlongPolicy.TRUNCATE:
            kept = np.minimum(positions, longest)
        elif policy is OverlongPolicy.DROP:
            kept = np.where(too_long, 0, positions)
        return Kept(
            positions=-(-kept // self.multiple) * self.multiple,
            num_tokens=int(kept.sum()),
            num_truncated=num if policy is OverlongPolicy.TRUNCATE else 0,
            num_cut_tokens=int((lengths - np.minimum(lengths, longest)).sum())
            if policy is OverlongPolicy.TRUNCATE
            else 0,
            num_dropped=num if policy is OverlongPolicy.DROP else 0,
            num_solo=num if policy is OverlongPolicy.SOLO else 0,
        )

    def cost(self, lengths: Integers) -> CostModel:
        """Return the cost model: as measured, of the shape, or of typical shares."""
        if self.prices is not None:
            return self.prices.model()
        if self.shape is not None:
            fixed = FIXED_SHARE * self.token_budget
            return CostModel.from_ratios(quadratic=self.shape.quadratic_ratio, fixed_tokens=fixed)
        return shares_model(lengths, token_budget=self.token_budget)

    def cost_origin(self) -> str:
        """Return where the cost model comes from."""
        if self.prices is not None:
            return "the prices given"
        price = f"{FIXED_SHARE:.0%} of a full micro-batch as the overhead of each"
        if self.shape is not None:
            return f"FLOPs of the model's shape, {price}"
        return (
            f"assumed: attention is {ATTENTION_SHARE:.0%} of the cost of all samples, "
            f"{price} (--model-shape gives your model's)"
        )

    def simulated(self, cost: CostModel) -> Setting:
        """Return the simulation's setting."""
        return Setting(
            num_replicas=self.dp,
            token_budget=self.token_budget,
            global_batch_size=self.global_batch_size,
            cost=cost,
            sync="microbatch" if self.pp > 1 else "step",
            num_stages=self.pp,
            num_chunks=self.vpp,
            seed=self.seed,
        )


def require_samples(positions: Integers) -> Integers:
    """Return `positions`.

    Raises:
        ValueError: none of them holds a sample.
    """
    if not positions.any():
        raise ValueError(
            f"the first {len(positions)} records are all bad or dropped, so that no step would "
            "train: mend the data, or raise --train-samples or --max-samples"
        )
    return positions


def parse_shape(text: str) -> ModelShape:
    """Return the model's sizes.

    Args:
        text: `layers=32,hidden=4096,heads=32` and, where they differ from Megatron's defaults,
            `groups` (query groups), `ffn`, `kv_channels`, `vocab` (padded; 0 where unknown),
            `mlp=gated` (SwiGLU) or `plain`.

    Raises:
        ValueError: something else.
    """
    values: dict[str, int] = {}
    gated = False
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "mlp" and value in ("gated", "plain"):
            gated = value == "gated"
            continue
        if name not in _SHAPE_KEYS or not value.isdecimal() or not int(value):
            raise ValueError(
                f"--model-shape {text!r}: {part.strip()!r} is not understood; expected "
                f"{_SHAPE_FORM}"
            )
        if name in values:
            raise ValueError(f"--model-shape {text!r} gives {name} twice: keep one")
        values[name] = int(value)
    missing = [name for name in ("layers", "hidden", "heads") if name not in values]
    if missing:
        raise ValueError(
            f"--model-shape {text!r} lacks {', '.join(missing)}: expected {_SHAPE_FORM}"
        )
    heads, hidden = values["heads"], values["hidden"]
    if "kv_channels" not in values and hidden % heads:
        raise ValueError(
            f"--model-shape {text!r}: {heads} heads do not divide hidden {hidden}: correct one, or "
            "give kv_channels, the size of a head"
        )
    if heads % values.get("groups", heads):
        raise ValueError(
            f"--model-shape {text!r}: {values['groups']} groups do not divide {heads} heads: "
            "correct one"
        )
    size = values.get("kv_channels", hidden // heads)
    # Megatron's own default of --ffn-hidden-size (arguments.py, 0.19.2).
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    if not values.get("ffn", ffn):
        raise ValueError(
            f"--model-shape {text!r}: hidden {hidden} is too small for the default ffn of a gated "
            "MLP, which is a multiple of 64: give ffn"
        )
    return ModelShape(
        num_layers=values["layers"],
        hidden=hidden,
        ffn_hidden=values.get("ffn", ffn),
        query=heads * size,
        key_value=values.get("groups", heads) * size,
        vocab=values.get("vocab", 0),
        gated_mlp=gated,
    )
