"""`odb-megatron patch`: puts `--odb` into a Megatron-LM checkout's own pretrain_gpt.py.

The patches are in `patches/`, one folder for each upstream version. Must not import torch or
Megatron.
"""

from __future__ import annotations

__all__: list[str] = []
