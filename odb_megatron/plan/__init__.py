"""Planning: which samples form the micro-batches of the next optimizer step, on every replica.

Pure functions and small state machines over gathered metadata: no torch, no rank, no clock, no
environment, no global random state. Whatever is decided from gathered records uses integers.
"""
