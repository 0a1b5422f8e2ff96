"""What tests and demos need beside the product: a CPU device layer, gloo replicas, a script runner.

Importing this package imports neither torch nor Megatron. Nothing here may be imported by the
product's layers, except that `odb_megatron.cpu` runs scripts on the CPU.
"""

from __future__ import annotations

__all__: list[str] = []
