"""What the `--odb-*` flags say, defaults filled in.

Must not decide what works with what (that is `validation`) and must not import Megatron.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TypeVar

from odb_megatron.comm.watchdog import OnPeerFailure
from odb_megatron.data.preprocess import BadRecordPolicy, SampleRules
from odb_megatron.data.workers import WorkerStart
from odb_megatron.megatron.topology import balance_scope
from odb_megatron.plan.cost import CostPrices
from odb_megatron.plan.padding import OverlongPolicy, SizeRule, budget_length, size_rule
from odb_megatron.plan.policy import BalanceScope, ExchangeMode, PolicyName

__all__ = ["STALL_WARN_S", "CostSource", "MetricsTarget", "OdbConfig", "cost_flags"]

_PLANNING_FLAGS = {
    "odb_policy": "--odb-policy",
    "odb_token_budget": "--odb-token-budget",
    "odb_pad_to_budget": "--odb-pad-to-budget",
    "odb_shape_buckets": "--odb-shape-buckets",
    "odb_window": "--odb-window",
    "odb_max_delay_steps": "--odb-max-delay-steps",
    "odb_exchange": "--odb-exchange",
    "odb_epochs": "--odb-epochs",
    "odb_cost": "--odb-cost",
    "odb_cost_linear": "--odb-cost-linear",
    "odb_cost_quadratic": "--odb-cost-quadratic",
    "odb_cost_fixed": "--odb-cost-fixed",
    "odb_cost_patch": "--odb-cost-patch",
    "odb_max_patches": "--odb-max-patches",
    "odb_balance": "--odb-balance",
    "odb_max_bad_records": "--odb-max-bad-records",
    "odb_resume_strict": "--odb-resume-strict",
    "odb_plan_ahead": "--odb-plan-ahead",
    "odb_worker_start": "--odb-worker-start",
    "odb_warmup_worst_case": "--odb-warmup-worst-case",
    "odb_timeout_s": "--odb-timeout-s",
    "odb_stall_warn_s": "--odb-stall-warn-s",
    "odb_on_peer_failure": "--odb-on-peer-failure",
}


STALL_WARN_S = 60.0


class CostSource(Enum):
    """Where the cost model comes from when its prices are not given."""

    SHAPE = "shape"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsTarget:
    """Where metrics go for Prometheus.

    Attributes:
        port: of the server; None for none.
        host: address that it listens on.
        file: written after each step; None for none.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    file: str | None = None

    def __bool__(self) -> bool:
        """Whether they go anywhere."""
        return self.port is not None or self.file is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OdbConfig:
    """Values of the `--odb-*` flags, defaults filled in.

    Attributes:
        enabled: `--odb`.
        policy: step policy.
        token_budget: most padded tokens of a micro-batch.
        pad_to_budget: every micro-batch is padded to the budget.
        shape_buckets: token counts to the nearest of which it is padded; empty for none.
        window: samples each replica looks ahead (policy `cost`).
        max_delay_steps: see `plan.policy.CostPolicy`.
        cost: where the cost model comes from; `prices` come first.
        prices: the cost model's prices, or None.
        max_patches: most patches of a micro-batch, 0 for no cap.
        balance: where replicas wait for each other.
        exchange: whether replicas hand samples to each other.
        overlong: see `plan.padding.OverlongPolicy`.
        bad_record: see `data.preprocess.BadRecordPolicy`.
        max_bad_records: see `data.bad_records.most_bad_records`.
        resume_strict: whether a resume refuses data files that have changed.
        epochs: passes over the data, or None when the run length is given in Megatron's terms.
        attention: attention backend's name.
        log_dir: folder of the step logs, or None.
        log_ids: whether they name the samples.
        metrics: where metrics go besides Megatron's writers.
        context: `--seq-length`.
        plan_ahead: most finished steps that wait for the trainer.
        worker_start: how data-loader workers are started.
        warmup_worst_case: whether the worst micro-batches are run before the first step.
        timeout_s: seconds that the trainer waits for an exchange, and a worker has for a fetch.
        stall_warn_s: seconds before a peer that does not come is named in a warning.
        on_peer_failure: what becomes of this process when another rank is gone.
    """

    enabled: bool
    policy: PolicyName
    token_budget: int
    pad_to_budget: bool
    shape_buckets: tuple[int, ...]
    window: int
    max_delay_steps: int
    cost: CostSource
    prices: CostPrices | None
    max_patches: int
    balance: BalanceScope
    exchange: ExchangeMode
    overlong: OverlongPolicy
    bad_record: BadRecordPolicy
    max_bad_records: int
    resume_strict: bool
    epochs: int | None
    attention: str
    log_dir: str | None
    log_ids: bool
    metrics: MetricsTarget
    context: int
    plan_ahead: int
    worker_start: WorkerStart
    warmup_worst_case: bool
    timeout_s: float
    stall_warn_s: float
    on_peer_failure: OnPeerFailure

    @classmethod
    def from_args(cls, args: argparse.Namespace, *, num_replicas: int) -> OdbConfig:
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
            *("odb_token_budget", "odb_window", "odb_epochs", "odb_max_patches"),
            "odb_max_bad_records",
        ):
            value = getattr(args, name)
            if value is not None and value < 1:
                problems.append(f"{_PLANNING_FLAGS[name]} must be at least 1, got {value}")
        for name in ("odb_timeout_s", "odb_stall_warn_s"):
            value = getattr(args, name)
            if value is not None and not 0 < value < math.inf:
                problems.append(f"{_PLANNING_FLAGS[name]} must be above 0 seconds, got {value:g}")
        policy = PolicyName(args.odb_policy or PolicyName.SAMPLES.value)
        if policy is PolicyName.SAMPLES:
            for name in ("odb_window", "odb_max_delay_steps"):
                if getattr(args, name) is not None:
                    problems.append(
                        f"{_PLANNING_FLAGS[name]} would do nothing with --odb-policy samples, "
                        "which never reorders: use --odb-policy cost, or drop it"
                    )
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
        prices = _taken(_given_prices, args, problems)
        balance = _taken(balance_scope, args, problems)
        logs_ids = _taken(_logs_ids, args, problems)
        metrics = _taken(_metrics_target, args, problems)
        if problems or buckets is None or balance is None or metrics is None:
            raise ValueError("\n".join(problems))
        minutes = getattr(args, "distributed_timeout_minutes", 10)  # Megatron's own default
        share = -(-args.global_batch_size // num_replicas)
        return cls(
            enabled=args.odb,
            policy=policy,
            token_budget=args.odb_token_budget or args.seq_length,
            pad_to_budget=bool(args.odb_pad_to_budget),
            shape_buckets=buckets,
            window=args.odb_window or 4 * share,
            max_delay_steps=8 if args.odb_max_delay_steps is None else args.odb_max_delay_steps,
            cost=CostSource(args.odb_cost or CostSource.SHAPE.value),
            prices=prices,
            max_patches=args.odb_max_patches or 0,
            balance=balance[0],
            exchange=ExchangeMode(args.odb_exchange or ExchangeMode.NONE.value),
            overlong=OverlongPolicy(args.odb_overlong),
            bad_record=bad_record,
            max_bad_records=args.odb_max_bad_records or 0,
            resume_strict=args.odb_resume_strict is not False,
            epochs=args.odb_epochs,
            attention=args.odb_attention,
            log_dir=args.odb_log_dir,
            log_ids=bool(logs_ids),
            metrics=metrics,
            context=args.seq_length,
            plan_ahead=plan_ahead,
            worker_start=WorkerStart(args.odb_worker_start or WorkerStart.FORKSERVER.value),
            warmup_worst_case=bool(args.odb_warmup_worst_case),
            timeout_s=args.odb_timeout_s or 60.0 * minutes,
            stall_warn_s=args.odb_stall_warn_s or STALL_WARN_S,
            on_peer_failure=OnPeerFailure(args.odb_on_peer_failure or OnPeerFailure.EXIT.value),
        )

    def micro_batch_length(self, multiple: int) -> int:
        """Return the tokens that every micro-batch is padded to; 0 for none."""
        return budget_length(self.token_budget, multiple) if self.pad_to_budget else 0

    def size_rule(self, multiple: int) -> SizeRule:
        """Return what samples and micro-batches are padded to."""
        return size_rule(
            self.shape_buckets or ((self.token_budget,) if self.pad_to_budget else ()),
            token_budget=self.token_budget,
            context=self.context,
            multiple=multiple,
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
        if self.max_bad_records:
            flags += [f"--odb-max-bad-records {self.max_bad_records}"]
        if self.pad_to_budget:
            flags += ["--odb-pad-to-budget"]
        if self.shape_buckets:
            flags += [f"--odb-shape-buckets {' '.join(map(str, self.shape_buckets))}"]
        if self.policy is PolicyName.COST:
            flags += [f"--odb-window {self.window}"]
            flags += [f"--odb-max-delay-steps {self.max_delay_steps}"]
        flags += [cost_flags(self.prices) if self.prices else f"--odb-cost {self.cost.value}"]
        if self.max_patches:
            flags += [f"--odb-max-patches {self.max_patches}"]
        flags += [f"--odb-balance {self.balance.value}"]
        if not self.resume_strict:
            flags += ["--no-odb-resume-strict"]
        if self.epochs is not None:
            flags += [f"--odb-epochs {self.epochs}"]
        flags += [f"--odb-plan-ahead {self.plan_ahead}"]
        flags += [f"--odb-worker-start {self.worker_start.value}"]
        if self.warmup_worst_case:
            flags += ["--odb-warmup-worst-case"]
        flags += [f"--odb-timeout-s {self.timeout_s:g}"]
        flags += [f"--odb-stall-warn-s {self.stall_warn_s:g}"]
        flags += [f"--odb-on-peer-failure {self.on_peer_failure.value}"]
        return " ".join(["--odb", *flags])


def cost_flags(prices: CostPrices) -> str:
    """Return the flags that give exactly these prices."""
    given = {name: value for name, value in asdict(prices).items() if value}
    return " ".join(f"--odb-cost-{name} {value!r}" for name, value in given.items())


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


def _metrics_target(args: argparse.Namespace) -> MetricsTarget:
    port, host = args.odb_metrics_port, args.odb_metrics_host
    if port is None and host is not None:
        raise ValueError(
            "--odb-metrics-host would do nothing without --odb-metrics-port: add "
            "--odb-metrics-port PORT, or drop it"
        )
    if port is not None and not 0 < port < 1 << 16:
        raise ValueError(f"--odb-metrics-port must be from 1 to 65535, got {port}")
    target = MetricsTarget(port=port, file=args.odb_metrics_file)
    return target if host is None else replace(target, host=host)


def _given_prices(args: argparse.Namespace) -> CostPrices | None:
    names = ("linear", "quadratic", "fixed", "patch")
    given = {name: getattr(args, f"odb_cost_{name}") for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if args.odb_cost == CostSource.AUTO.value:
        raise ValueError(
            f"--odb-cost auto measures what --odb-cost-{next(iter(given))} gives: keep one"
        )
    return CostPrices(**{"linear": 0.0, **given})
