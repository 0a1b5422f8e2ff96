"""Trains a quantized GPT, or distils a teacher, on packed micro-batches; see docs/modelopt.md."""

from __future__ import annotations

from odb_megatron.megatron.modelopt.stages import train_gpt

if __name__ == "__main__":
    train_gpt()
