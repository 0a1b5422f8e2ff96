"""What the GPU benchmark reports of its rows: the device's peak, cost model checks, printed lines.

Must not measure, and must not know how rows are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_cost import CostCheck, check_cost
from gpu_measure import MicroBatchTime

from odb_megatron.plan.cost import COST_UNIT, CostModel

__all__ = ["PEAK_TFLOPS", "backend_line", "cost_checks", "cost_json", "peak_flops", "row_text"]

PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4, "GH200": 989.4, "A100": 312.0}
"""Dense bf16, from the vendor's data sheets (SXM parts), by a part of the device's name."""


def peak_flops(device_name: str, given_tflops: float | None) -> tuple[float | None, str]:
    """Return the assumed peak of a device in FLOP/s and where it comes from."""
    if given_tflops is not None:
        return given_tflops * 1e12, "given with --peak-tflops"
    for part, tflops in PEAK_TFLOPS.items():
        if part in device_name:
            return tflops * 1e12, f"assumed for {part}: {tflops:g} TFLOP/s dense bf16"
    return None, f"not known for {device_name!r}: pass --peak-tflops to have MFU"


def cost_json(cost: CostModel) -> dict[str, float]:
    """Return what of a cost model is in the results."""
    return {
        "quadratic_per_linear": cost.quadratic / 2**32,
        "fixed_tokens": cost.fixed / COST_UNIT,
    }


def cost_checks(
    times: Sequence[MicroBatchTime], *, shape: CostModel, in_force: CostModel
) -> dict[str, object]:
    """Compare measured times with the cost model of the shape and with the calibrated one."""
    checks: dict[str, CostCheck | None] = {
        "shape_check": check_cost(times, shape),
        "in_force_check": check_cost(times, in_force),
    }
    return {name: one and one.as_json() for name, one in checks.items()}


def backend_line(one: Mapping[str, Any]) -> str:
    """Return what is printed of one backend."""
    if not one["available"]:
        return f"not available: {one['reason']}"
    parts = []
    for case, found in one["cases"].items():
        if "error" in found:
            parts.append(f"{case} FAILED: {found['error']}")
            continue
        worst = max(each["rel_diff"] for each in found["differences"])
        parts.append(f"{case} {'ok' if found['passed'] else 'FAILED'} ({worst:.1e})")
    if "attention_ms" in one:
        parts.append(f"{one['attention_ms']:.3f} ms a layer")
    return ", ".join(parts)


def row_text(row: Mapping[str, Any]) -> str:
    """Return what is printed of one row."""
    stopped = f"; stopped at {row['stopped']}" if row["stopped"] else ""
    lines = [f"row {row['name']}: {row.get('rounds', 0)} rounds{stopped}"]
    for name, arm in row.get("arms", {}).items():
        if "out_of_memory" in arm:
            lines.append(f"  {name:14s} out of memory: {arm['out_of_memory']}")
        elif arm["num_steps"]:
            mfu = "" if arm["mfu"] is None else f" MFU {arm['mfu']:.3f}"
            memory = arm["peak_memory_bytes"]
            gib = "" if memory is None else f" {memory / 2**30:.1f} GiB"
            lines.append(
                f"  {name:14s} {arm['samples_per_s']:9.2f} samples/s "
                f"{arm['tokens_per_s']:10.0f} tokens/s{mfu}{gib} padding "
                f"{arm['padding_fraction']:.1%} balance {arm['balance_measured']:.3f} "
                f"(predicted {arm['balance_predicted']:.3f})"
            )
    for name, one in row.get("ratios", {}).items():
        low, high = one["ci95"]
        interval = "one round" if low is None else f"{low:.3f} to {high:.3f}"
        lines.append(f"  {name}: {one['mean']:.3f} ({interval})")
    packed = row.get("cost_model", {}).get("packed", {})
    for name, one in packed.items():
        if one is not None:
            lines.append(
                f"  cost model, {name}: R² {one['r2'] or 0:.4f}, worst relative error "
                f"{one['worst_relative_error']:.1%}"
            )
    return "\n".join(lines)
