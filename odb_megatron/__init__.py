"""Online Dynamic Batching for NVIDIA Megatron: packed micro-batches formed where length is known.

Importing this package imports neither torch nor Megatron; its parts are imported by name.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
