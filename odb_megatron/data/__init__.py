"""Samples: sources, tokenization, the per-replica stream, packed (THD) assembly.

Must not know Megatron's globals (`get_args`, `mpu`) and must not touch process groups.
"""
