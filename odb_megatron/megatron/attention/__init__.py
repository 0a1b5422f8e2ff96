"""Attention backends: which kernels may run packed samples, and how they get into a model.

Must not build models and must not read Megatron's arguments. `registry` imports neither torch nor
Megatron; `cpu` and `spec` import both.
"""
