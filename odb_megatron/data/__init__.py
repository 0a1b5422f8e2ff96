"""Samples: sources, tokenization, the per-replica stream, packed (THD) assembly."""
