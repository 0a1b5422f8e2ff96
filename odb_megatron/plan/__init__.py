"""Planning: which samples form the micro-batches of the next optimizer step, on every replica.

Pure functions of gathered metadata: no torch, no rank, no clock, no environment, no global random
state. Whatever is decided from gathered records uses integers.
"""

from __future__ import annotations

from odb_megatron.plan.cost import CostModel
from odb_megatron.plan.step_planner import StepPlan, plan_step

__all__ = ["CostModel", "StepPlan", "plan_step"]
