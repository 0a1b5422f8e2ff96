"""Simulation of step policies and their rivals on sample lengths, without a model or a device.

Numpy and `odb_megatron.plan` alone: no torch, no process groups. The planners simulated are the
real ones; only the samples are synthetic.
"""

from __future__ import annotations

__all__: list[str] = []
