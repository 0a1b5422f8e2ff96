"""An inspection's findings as one JSON object.

Pure: figures in, figures out. The keys are listed in docs/inspect.md.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from odb_megatron.inspection.advice import Advice, Trial
from odb_megatron.inspection.findings import Findings, cut_offs
from odb_megatron.inspection.prediction import METHODS, RIVALS

__all__ = ["as_json"]


def as_json(findings: Findings) -> dict[str, Any]:
    """Return the report; its keys are listed in docs/inspect.md."""
    reading, setting, kept = findings.reading, findings.setting, findings.kept
    lengths = reading.lengths
    tokens = int(kept.lengths.sum())
    return {
        "data": {
            "name": reading.name,
            "num_records": reading.num_records,
            "num_read": reading.num_read,
            "num_bad": reading.num_bad,
            "bad": list(reading.bad),
            "read_s": reading.read_s,
            "num_workers": reading.num_workers,
        },
        "lengths": {
            "count": len(lengths),
            "num_tokens": int(lengths.sum()),
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p95": float(np.quantile(lengths, 0.95)),
            "max": int(lengths.max()),
            "cv": float(lengths.std() / lengths.mean()),
            "cut_offs": cut_offs(lengths, limit=setting.limit),
        },
        "overlong": {
            "policy": setting.overlong.value,
            "limit": setting.limit,
            "num_truncated": kept.num_truncated,
            "num_cut_tokens": kept.num_cut_tokens,
            "num_dropped": kept.num_dropped,
            "num_solo": kept.num_solo,
        },
        "setting": {
            **{
                name: getattr(setting, name)
                for name in (
                    *("seq_length", "token_budget", "dp", "global_batch_size", "tp", "cp", "pp"),
                    *("vpp", "sequence_parallel", "seed"),
                )
            },
            "model_shape": None if setting.shape is None else asdict(setting.shape),
            "cost": setting.cost_origin(),
        },
        "padding": {
            "num_tokens": kept.num_tokens,
            "context_padded": 1 - kept.num_tokens / findings.context_tokens,
            "avoided": findings.avoided(),
            "rounding": 1 - kept.num_tokens / tokens,
        },
        "prediction": {
            "num_samples": len(findings.stream),
            "epoch_samples": findings.epoch_samples,
            "methods": {name: _method(findings, name) for name in findings.runs},
            "speedup": {
                name: {rival: findings.speedup(name, rival) for rival in RIVALS}
                for name in findings.runs
                if name not in RIVALS
            },
            "fair_speedup": {
                "method": findings.planned,
                "token_budget": findings.runs[findings.planned].setting.token_budget,
                "fixed_token_budget": findings.fixed.setting.token_budget,
                "value": findings.fair_speedup(),
            },
        },
        "logits": None if findings.logits is None else findings.logits.as_json(),
        "advice": None if findings.advice is None else _advice(findings.advice),
    }


def _method(findings: Findings, name: str) -> dict[str, Any]:
    method = findings.runs[name].method
    mean, least, most = method.micro_batches
    return {
        "description": METHODS[name],
        "token_budget": findings.runs[name].setting.token_budget,
        "padding_fraction": method.padding,
        "fill": method.fill,
        "balance": method.balance,
        "mean_M": mean,
        "min_M": least,
        "max_M": most,
        "samples_per_step": method.samples_per_step,
        "steps_per_epoch": findings.steps_per_epoch(name),
        "over_budget": method.over_budget,
        "rate": method.rate,
        "bytes_moved_per_step": method.bytes_moved_per_step,
    }


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "flags": advice.flags,
        "num_samples": advice.num_samples,
        "gain": advice.gain,
        "reason": advice.reason,
        "warnings": list(advice.warnings),
        "trials": [_trial(trial) for trial in advice.trials],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    method = trial.method
    return {
        "token_budget": trial.token_budget,
        "rate": method.rate,
        "balance": method.balance,
        "fill": method.fill,
        "mean_M": method.micro_batches[0],
        "bytes_moved_per_step": method.bytes_moved_per_step,
        "logits_peak_gib": None if trial.logits is None else trial.logits.peak_gib,
    }
