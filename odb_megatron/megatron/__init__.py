"""The adapter to Megatron: flags, forward step, attention backends, micro-batch count, accounting.

Must hold no policy: which samples run together is decided in `odb_megatron.plan`.
"""
