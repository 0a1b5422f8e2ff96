"""What the `--odb-*` flags say, defaults filled in.

Must not decide what works with what (that is `validation`) and must not import Megatron.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from odb_megatron.comm.watchdog import OnPeerFailure
from odb_megatron.data.chat_record import template_arguments
from odb_megatron.data.preprocess import BadRecordPolicy, LossPer, SampleRules, count_scale
from odb_megatron.megatron.topology import sync_of
from odb_megatron.plan.cost import CostPrices
from odb_megatron.plan.padding import OverlongPolicy, SizeRule, budget_length, size_rule
from odb_megatron.plan.record import Sync

__all__ = ["STALL_WARN_S", "OdbConfig"]

_PLANNING_FLAGS = {
    "odb_token_budget": "--odb-token-budget",
    "odb_pad_to_budget": "--odb-pad-to-budget",
    "odb_shape_buckets": "--odb-shape-buckets",
    "odb_epochs": "--odb-epochs",
    "odb_cost": "--odb-cost",
    "odb_max_patches": "--odb-max-patches",
    "odb_max_bad_records": "--odb-max-bad-records",
    "odb_resume_strict": "--odb-resume-strict",
    "odb_plan_ahead": "--odb-plan-ahead",
    "odb_warmup_worst_case": "--odb-warmup-worst-case",
    "odb_dry_run": "--odb-dry-run",
    "odb_timeout_s": "--odb-timeout-s",
    "odb_stall_warn_s": "--odb-stall-warn-s",
    "odb_on_peer_failure": "--odb-on-peer-failure",
}


STALL_WARN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OdbConfig:
    """Values of the `--odb-*` flags, defaults filled in.

    Attributes:
        enabled: `--odb`.
        token_budget: most padded tokens of a micro-batch.
        pad_to_budget: every micro-batch is padded to the budget.
        shape_buckets: token counts to the nearest of which it is padded; empty for none.
        cost: `--odb-cost`; None for what follows from the model's shape.
        max_patches: most patches of a micro-batch, 0 for no cap.
        sync: where replicas wait for each other.
        template_args: further variables of the chat template.
        overlong: see `plan.padding.OverlongPolicy`.
        loss_per: see `data.preprocess.LossPer`; None for `TOKEN` with whole weights.
        batch_size: `--global-batch-size`.
        bad_record: see `data.preprocess.BadRecordPolicy`.
        max_bad_records: see `data.bad_records.max_bad_records`.
        resume_strict: whether a resume refuses data files that have changed.
        epochs: passes over the data, or None when the run length is given in Megatron's terms.
        attention: attention backend's name.
        log_dir: folder of the step logs; None for none, and in a dry run.
        log_ids: whether they name the samples.
        context: `--seq-length`.
        plan_ahead: most finished steps that wait for the trainer.
        warmup_worst_case: whether the worst micro-batches are run before the first step.
        timeout_s: seconds that the trainer waits for an exchange, and a worker has for a fetch.
        stall_warn_s: seconds before a peer that does not come is named in a warning.
        dry_run: whether to end when the first steps were read and planned.
        on_peer_failure: what becomes of this process when another rank is gone.
    """

    enabled: bool
    token_budget: int
    pad_to_budget: bool
    shape_buckets: tuple[int, ...]
    cost: CostPrices | None
    max_patches: int
    sync: Sync
    template_args: Mapping[str, Any]
    overlong: OverlongPolicy
    loss_per: LossPer | None
    batch_size: int
    bad_record: BadRecordPolicy
    max_bad_records: int
    resume_strict: bool
    epochs: int | None
    attention: str
    log_dir: str | None
    log_ids: bool
    context: int
    plan_ahead: int
    warmup_worst_case: bool
    timeout_s: float
    stall_warn_s: float
    dry_run: bool
    on_peer_failure: OnPeerFailure

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> OdbConfig:
        """Fill in defaults.

        Raises:
            ValueError: flags that would do nothing, or values out of range: one line each.
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
        problems: list[str] = []
        for name in (
            *("odb_token_budget", "odb_epochs", "odb_max_patches"),
            "odb_max_bad_records",
        ):
            value = getattr(args, name)
            if value is not None and value < 1:
                problems.append(f"{_PLANNING_FLAGS[name]} must be at least 1, got {value}")
        for name in ("odb_timeout_s", "odb_stall_warn_s"):
            value = getattr(args, name)
            if value is not None and not 0 < value < math.inf:
                problems.append(f"{_PLANNING_FLAGS[name]} must be above 0 seconds, got {value:g}")
        bad_record = BadRecordPolicy(args.odb_bad_record)
        if args.odb_max_bad_records and bad_record is BadRecordPolicy.ERROR:
            problems.append(
                "--odb-max-bad-records would do nothing with --odb-bad-record error, which ends "
                "the run at the first one: use --odb-bad-record skip, or drop it"
            )
        plan_ahead = 2 if args.odb_plan_ahead is None else args.odb_plan_ahead
        if plan_ahead < 0:
            problems.append(f"--odb-plan-ahead must not be negative, got {plan_ahead}")
        buckets = _taken(_buckets, args, problems)
        cost = _taken(_cost, args, problems)
        template_args = _taken(_template_args, args, problems)
        logs_ids = _taken(_logs_ids, args, problems)
        if problems or buckets is None:
            raise ValueError("\n".join(problems))
        minutes = getattr(args, "distributed_timeout_minutes", 10)  # Megatron's own default
        return cls(
            enabled=args.odb,
            token_budget=args.odb_token_budget or args.seq_length,
            pad_to_budget=bool(args.odb_pad_to_budget),
            shape_buckets=buckets,
            cost=cost,
            max_patches=args.odb_max_patches or 0,
            sync=sync_of(args)[0],
            template_args=template_args or {},
            overlong=OverlongPolicy(args.odb_overlong),
            loss_per=None if args.odb_loss_per is None else LossPer(args.odb_loss_per),
            batch_size=getattr(args, "global_batch_size", None) or 1,
            bad_record=bad_record,
            max_bad_records=args.odb_max_bad_records or 0,
            resume_strict=args.odb_resume_strict is not False,
            epochs=args.odb_epochs,
            attention=args.odb_attention,
            log_dir=None if args.odb_dry_run else args.odb_log_dir,
            log_ids=bool(logs_ids),
            context=args.seq_length,
            plan_ahead=plan_ahead,
            warmup_worst_case=bool(args.odb_warmup_worst_case),
            timeout_s=args.odb_timeout_s or 60.0 * minutes,
            stall_warn_s=args.odb_stall_warn_s or STALL_WARN_S,
            dry_run=bool(args.odb_dry_run),
            on_peer_failure=OnPeerFailure(args.odb_on_peer_failure or OnPeerFailure.EXIT.value),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Token counts to the nearest of which micro-batches are padded; empty for none."""
        return self.shape_buckets or ((self.token_budget,) if self.pad_to_budget else ())

    def micro_batch_length(self, multiple: int) -> int:
        """Return the tokens that every micro-batch is padded to; 0 for none."""
        return budget_length(self.token_budget, multiple) if self.pad_to_budget else 0

    def size_rule(self, multiple: int) -> SizeRule:
        """Return what samples and micro-batches are padded to."""
        return size_rule(
            self.sizes,
            token_budget=self.token_budget,
            context=self.context,
            multiple=multiple,
        )

    @property
    def count_scale(self) -> int:
        """What weights are multiplied by; 1 without `--odb-loss-per`: nothing changes."""
        if self.loss_per is None:
            return 1
        return count_scale(self.loss_per, batch_size=self.batch_size, context=self.context)

    def sample_rules(self, *, multiple: int) -> SampleRules:
        """Return the policies for records; without `--odb` only the context limits a sample."""
        return SampleRules(
            context=self.context,
            token_budget=self.token_budget if self.enabled else self.context,
            multiple=multiple,
            overlong=self.overlong,
            bad_record=self.bad_record,
            loss_per=self.loss_per or LossPer.TOKEN,
            count_scale=self.count_scale,
            whole_weights=self.loss_per is None,
        )

    def describe(self) -> str:
        """Return the flags that reproduce this configuration, defaults included."""
        flags = [
            f"--odb-token-budget {self.token_budget}",
            f"--odb-overlong {self.overlong.value}",
            f"--odb-bad-record {self.bad_record.value}",
            f"--odb-attention {self.attention}",
        ]
        if self.template_args:
            text = json.dumps(self.template_args, sort_keys=True)
            flags += [f"--odb-template-args {shlex.quote(text)}"]
        if self.loss_per is not None:
            flags += [f"--odb-loss-per {self.loss_per.value}"]
        if self.max_bad_records:
            flags += [f"--odb-max-bad-records {self.max_bad_records}"]
        if self.pad_to_budget:
            flags += ["--odb-pad-to-budget"]
        if self.shape_buckets:
            flags += [f"--odb-shape-buckets {' '.join(map(str, self.shape_buckets))}"]
        if self.cost is not None:
            flags += [f"--odb-cost {self.cost}"]
        if self.max_patches:
            flags += [f"--odb-max-patches {self.max_patches}"]
        if not self.resume_strict:
            flags += ["--no-odb-resume-strict"]
        if self.epochs is not None:
            flags += [f"--odb-epochs {self.epochs}"]
        flags += [f"--odb-plan-ahead {self.plan_ahead}"]
        if self.warmup_worst_case:
            flags += ["--odb-warmup-worst-case"]
        flags += [f"--odb-timeout-s {self.timeout_s:g}"]
        flags += [f"--odb-stall-warn-s {self.stall_warn_s:g}"]
        flags += [f"--odb-on-peer-failure {self.on_peer_failure.value}"]
        return " ".join(["--odb", *flags])


_Taken = TypeVar("_Taken")


def _taken(
    take: Callable[[argparse.Namespace], _Taken], args: argparse.Namespace, problems: list[str]
) -> _Taken | None:
    """Return what a part of the flags gives; None where it is refused, which is noted."""
    try:
        return take(args)
    except ValueError as error:
        problems.append(str(error))
        return None


def _buckets(args: argparse.Namespace) -> tuple[int, ...]:
    sizes = tuple(getattr(args, "odb_shape_buckets", None) or ())
    budget = args.odb_token_budget or args.seq_length
    if not sizes:
        return ()
    if args.odb_pad_to_budget:
        raise ValueError("--odb-pad-to-budget has one size and --odb-shape-buckets a few: keep one")
    if min(sizes) < 1 or max(sizes) > budget:
        raise ValueError(
            f"--odb-shape-buckets {' '.join(map(str, sizes))} must be between 1 and the token "
            f"budget {budget}, which is one of them always: change them, or raise "
            "--odb-token-budget"
        )
    return tuple(sorted({*sizes, budget}))


def _logs_ids(args: argparse.Namespace) -> bool:
    if args.odb_log_ids and args.odb_log_dir is None:
        raise ValueError(
            "--odb-log-ids would do nothing without --odb-log-dir: add --odb-log-dir DIR, or drop "
            "it"
        )
    return bool(args.odb_log_ids)


def _template_args(args: argparse.Namespace) -> dict[str, Any]:
    try:
        return template_arguments(args.odb_template_args or "{}")
    except ValueError as error:
        raise ValueError(f"--odb-template-args {args.odb_template_args!r}: {error}") from error


def _cost(args: argparse.Namespace) -> CostPrices | None:
    if args.odb_cost is None:
        return None
    try:
        return CostPrices.parse(args.odb_cost)
    except ValueError as error:
        raise ValueError(f"--odb-cost {error}") from error
