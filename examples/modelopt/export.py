"""Writes a ModelOpt model as a plain one, ready for pruning; docs/modelopt.md has the command lines."""

from __future__ import annotations

from odb_megatron.megatron.modelopt.stages import export_gpt

if __name__ == "__main__":
    export_gpt()
