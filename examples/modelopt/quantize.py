"""Calibrates and quantizes a trained GPT on packed micro-batches; see docs/modelopt.md."""

from __future__ import annotations

from odb_megatron.megatron.modelopt.stages import quantize_gpt

if __name__ == "__main__":
    quantize_gpt()
