"""Writes a ModelOpt model as a plain one, ready for pruning; see docs/modelopt.md."""

from __future__ import annotations

from odb_megatron.megatron.modelopt.stages import export_gpt

if __name__ == "__main__":
    export_gpt()
