"""ODB's command-line flags in Megatron's style, and the configuration they make.

Must not decide what works with what (that is `validation`) and must not import Megatron.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from odb_megatron.data.preprocess import BadRecordPolicy, SampleRules
from odb_megatron.plan.padding import OverlongPolicy
from odb_megatron.plan.policy import ExchangeMode, PolicyName

__all__ = ["OdbConfig", "add_odb_arguments"]

_PLANNING_FLAGS = {
    "odb_policy": "--odb-policy",
    "odb_token_budget": "--odb-token-budget",
    "odb_window": "--odb-window",
    "odb_max_delay_steps": "--odb-max-delay-steps",
    "odb_exchange": "--odb-exchange",
    "odb_epochs": "--odb-epochs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OdbConfig:
    """Values of the `--odb-*` flags, defaults filled in.

    Attributes:
        enabled: `--odb`.
        policy: step policy.
        token_budget: most padded tokens of a micro-batch.
        window: samples each replica looks ahead (policy `cost`).
        max_delay_steps: see `plan.policy.CostPolicy`.
        exchange: whether replicas hand samples to each other.
        overlong: see `plan.padding.OverlongPolicy`.
        bad_record: see `data.preprocess.BadRecordPolicy`.
        epochs: passes over the data, or None when the run length is given in Megatron's terms.
        attention: attention backend's name.
        log_dir: folder of the step logs, or None.
        context: `--seq-length`.
    """

    enabled: bool
    policy: PolicyName
    token_budget: int
    window: int
    max_delay_steps: int
    exchange: ExchangeMode
    overlong: OverlongPolicy
    bad_record: BadRecordPolicy
    epochs: int | None
    attention: str
    log_dir: str | None
    context: int

    @classmethod
    def from_args(cls, args: argparse.Namespace, *, num_replicas: int) -> OdbConfig:
        """Fill in defaults.

        Raises:
            ValueError: a flag that would do nothing, or a value out of range.
        """
        if not args.odb:
            given = [
                flag for name, flag in _PLANNING_FLAGS.items() if getattr(args, name) is not None
            ]
            if given:
                raise ValueError(
                    f"{', '.join(given)} would do nothing without --odb: add --odb, or drop "
                    f"{'it' if len(given) == 1 else 'them'}"
                )
        for name in ("odb_token_budget", "odb_window", "odb_epochs"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise ValueError(f"{_PLANNING_FLAGS[name]} must be at least 1, got {value}")
        policy = PolicyName(args.odb_policy or PolicyName.SAMPLES.value)
        if policy is PolicyName.SAMPLES:
            for name in ("odb_window", "odb_max_delay_steps"):
                if getattr(args, name) is not None:
                    raise ValueError(
                        f"{_PLANNING_FLAGS[name]} would do nothing with --odb-policy samples, "
                        "which never reorders: use --odb-policy cost, or drop it"
                    )
        share = -(-args.global_batch_size // num_replicas)
        return cls(
            enabled=args.odb,
            policy=policy,
            token_budget=args.odb_token_budget or args.seq_length,
            window=args.odb_window or 4 * share,
            max_delay_steps=8 if args.odb_max_delay_steps is None else args.odb_max_delay_steps,
            exchange=ExchangeMode(args.odb_exchange or ExchangeMode.NONE.value),
            overlong=OverlongPolicy(args.odb_overlong),
            bad_record=BadRecordPolicy(args.odb_bad_record),
            epochs=args.odb_epochs,
            attention=args.odb_attention,
            log_dir=args.odb_log_dir,
            context=args.seq_length,
        )

    def sample_rules(self, *, multiple: int) -> SampleRules:
        """Return the policies for records; without `--odb` only the context limits a sample."""
        return SampleRules(
            context=self.context,
            token_budget=self.token_budget if self.enabled else self.context,
            multiple=multiple,
            overlong=self.overlong,
            bad_record=self.bad_record,
        )

    def describe(self) -> str:
        """Return the flags that reproduce this configuration, defaults included."""
        flags = [
            f"--odb-policy {self.policy.value}",
            f"--odb-exchange {self.exchange.value}",
            f"--odb-token-budget {self.token_budget}",
            f"--odb-overlong {self.overlong.value}",
            f"--odb-bad-record {self.bad_record.value}",
            f"--odb-attention {self.attention}",
        ]
        if self.policy is PolicyName.COST:
            flags += [f"--odb-window {self.window}"]
            flags += [f"--odb-max-delay-steps {self.max_delay_steps}"]
        if self.epochs is not None:
            flags += [f"--odb-epochs {self.epochs}"]
        return " ".join(["--odb", *flags])


def add_odb_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--odb*` flags; pass as Megatron's `extra_args_provider`."""
    group = parser.add_argument_group(title="online dynamic batching")
    _add_planning_arguments(group)
    _add_data_arguments(group)
    return parser


def _add_planning_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--odb",
        action="store_true",
        help="Form variable-size packed micro-batches under a token budget, online. "
        "Needs --calculate-per-token-loss and --micro-batch-size 1. Without it the same "
        "data is trained in Megatron's padded micro-batches.",
    )
    group.add_argument(
        "--odb-policy",
        choices=[policy.value for policy in PolicyName],
        default=None,
        help="samples: every optimizer step consumes exactly the --global-batch-size samples "
        "Megatron's own sampler would give. cost: each replica fills the step from a look-ahead "
        "window to a common compute target. Default samples.",
    )
    group.add_argument(
        "--odb-token-budget",
        type=int,
        default=None,
        help="Most tokens of one micro-batch on one replica, padding included. Memory follows "
        "it. Default --seq-length.",
    )
    group.add_argument(
        "--odb-window",
        type=int,
        default=None,
        help="Samples each replica looks ahead with --odb-policy cost. Default four times its "
        "share of --global-batch-size.",
    )
    group.add_argument(
        "--odb-max-delay-steps",
        type=int,
        default=None,
        help="With --odb-policy cost a sample is trained at most this many steps later than in "
        "first-in-first-out order. Default 8.",
    )
    group.add_argument(
        "--odb-exchange",
        choices=[mode.value for mode in ExchangeMode],
        default=None,
        help="Whether replicas hand samples to each other, on the CPU and in the background, so "
        "that a step costs the same on all: none; tokens, in every step; auto, where it is worth "
        "it (samples decides step by step, cost once, and says why). Which samples a step has "
        "under --odb-policy samples does not change. Default none.",
    )
    group.add_argument(
        "--odb-epochs",
        type=int,
        default=None,
        help="Run for this many passes over the training data; in place of --train-samples or "
        "--train-iters.",
    )


def _add_data_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--odb-overlong",
        choices=[policy.value for policy in OverlongPolicy],
        default=OverlongPolicy.ERROR.value,
        help="What happens to a sample longer than min(--seq-length, --odb-token-budget): error "
        "names it and stops; truncate cuts its end; drop leaves it out; solo gives it a "
        "micro-batch of its own, over the budget but not over --seq-length. All are counted. "
        "Holds for the padded baseline too.",
    )
    group.add_argument(
        "--odb-bad-record",
        choices=[policy.value for policy in BadRecordPolicy],
        default=BadRecordPolicy.ERROR.value,
        help="What happens to a record that cannot become a sample (bad JSON, wrong types, "
        "empty, nothing to learn): error names file and line and stops; skip leaves it out and "
        "counts it. Holds for the padded baseline too.",
    )
    group.add_argument(
        "--odb-attention",
        default="auto",
        help="Attention backend for packed samples. Default auto: the best available, printed.",
    )
    group.add_argument(
        "--odb-log-dir",
        default=None,
        help="Write one JSON line per optimizer step and replica into this folder: sample ids, "
        "micro-batches, loss, gradient norm, cost, waits.",
    )
